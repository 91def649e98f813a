"""Annotations without effect: those for a container that does not come, and misspelt prefixes.

Each gets a log line and a notice once, and ``explain`` shows it. No event says that the pod's last
container is there. It is taken to be there when no container of a new name came for `QUIET`
seconds, and for certain when the pod is removed. A container that comes later all the same, behind
a slow init container or image, takes it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.engine.request.annotations import (
    MOST_ADDRESSEES,
    Missing,
    addressees,
    misspelt,
)
from nri_numa.model.workload import PodSandbox
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import What

log = get_logger("annotations")

QUIET: Final = 120.0
"""Seconds without a container of a new name after which the last one is taken to be there."""
_PODS: Final = 2048
"""Pods with names that have not come yet; the oldest are forgotten."""


@dataclass(slots=True)
class _Waiting:
    """One pod that has names to come, or misspelt prefixes."""

    namespace: str
    name: str
    uid: str
    wanted: dict[str, str]
    misspelt: list[str]
    since: float
    had: dict[str, None] = field(default_factory=dict)
    said: bool = False

    def missing(self) -> tuple[Missing, ...]:
        had, final = tuple(self.had), self.said
        return tuple(
            Missing(annotation=a, name=n, had=had, final=final)
            for n, a in tuple(self.wanted.items())
        )


class UnmatchedAnnotations:
    """Looks after the names in pods' annotations."""

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self._agent = agent
        self._now = clock.monotonic
        self._later = clock.call_soon
        self._pods: dict[str, _Waiting] = {}

    def saw(self, containers: Iterable[tuple[PodSandbox, str]]) -> None:
        """Containers were created, or are there, or were refused: pods and container names."""
        self._later(partial(self._saw, containers))

    def kept(self, uids: Collection[str]) -> None:
        """These are all pods that there are."""
        for uid in self._pods.keys() - set(uids):
            del self._pods[uid]

    def _saw(self, containers: Iterable[tuple[PodSandbox, str]]) -> None:
        for pod, name in containers:
            waiting = self._pods.get(pod.uid)
            if waiting is None:
                prefix = self._agent.machine.settings.prefix
                wanted = addressees(pod.annotations, prefix)
                wrong = misspelt(pod.annotations, prefix)
                if not wanted and not wrong:
                    continue
                if len(self._pods) >= _PODS:
                    del self._pods[next(iter(self._pods))]
                waiting = _Waiting(pod.namespace, pod.name, pod.uid, wanted, wrong, self._now())
                self._pods[pod.uid] = waiting
                self._warn(waiting, "annotation with a misspelt prefix", "UnknownPrefix", wrong)
            if name not in waiting.had and len(waiting.had) < 2 * MOST_ADDRESSEES:
                waiting.had[name] = None
                waiting.since = self._now()
            if waiting.wanted.pop(name, None) is not None and waiting.said:
                log.info(
                    "the container that an annotation names was created",
                    pod=f"{waiting.namespace}/{waiting.name}",
                )

    def gone(self, uid: str) -> None:
        """A pod is removed: who has not come will not come."""
        waiting = self._pods.pop(uid, None)
        if waiting is not None:
            self._later(partial(self._say, waiting))

    def look(self) -> None:
        """Say what is missing in pods that have been quiet; call it now and then."""
        until = self._now() - QUIET
        for waiting in self._pods.values():
            if waiting.since <= until:
                self._say(waiting)

    def sentences(self, uid: str) -> list[str]:
        """What is wrong with a pod's annotations; before it is final, as far as it is likely."""
        waiting = self._pods.get(uid)
        if waiting is None:
            return []
        likely = (one for one in waiting.missing() if one.final or one.close)
        return [*waiting.misspelt, *(one.sentence for one in likely)]

    def _say(self, waiting: _Waiting) -> None:
        if waiting.said or not waiting.wanted:
            return
        waiting.said = True
        self._warn(
            waiting,
            "annotation for a container that the pod does not have",
            "UnknownContainer",
            [one.sentence for one in waiting.missing()],
        )

    def _warn(self, waiting: _Waiting, event: str, reason: str, sentences: list[str]) -> None:
        """A log line for each sentence, and one notice of all that no earlier process made."""
        for sentence in sentences:
            log.warning(event, pod=f"{waiting.namespace}/{waiting.name}", problem=sentence)
        message, notices = "; ".join(sentences), self._agent.notices
        if sentences and not any(
            (one.pod_uid, one.reason) == (waiting.uid, reason) for one in notices.after()
        ):
            notices.add(
                What.IGNORED,
                message,
                namespace=waiting.namespace,
                pod=waiting.name,
                pod_uid=waiting.uid,
                container="",
                reason=reason,
            )
