"""Annotations without effect: those for a container that does not come, and misspelt prefixes.

Each gets a log line and a notice once, and ``explain`` shows it. No event says that the pod's last
container is there. It is taken to be there when no container of a new name came for
`SETTLED_AFTER_S` seconds, and for certain when the pod is removed. A container that comes later all
the same, behind a slow init container or image, takes it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.handler import PodObserver
from nri_numa.agent.loop import Clock
from nri_numa.engine.request.annotations import (
    MAX_NAMED_CONTAINERS,
    UnknownContainerName,
    annotated_container_names,
    misspelt_prefix_sentences,
)
from nri_numa.model.workload import Container, PodSandbox, PodTable
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import NoticedEventKind

log = get_logger("annotations")

SETTLED_AFTER_S: Final = 120.0
"""Seconds without a container of a new name after which the last one is taken to be there."""
_MAX_PODS_WITH_PENDING_NAMES: Final = 2048
"""Pods with names that have not come yet; the oldest are forgotten."""


@dataclass(slots=True)
class _PendingNames:
    """One pod that has names to come, or misspelt prefixes."""

    namespace: str
    name: str
    uid: str
    annotation_by_name: dict[str, str]
    misspelt: list[str]
    updated_at: float
    container_names: dict[str, None] = field(default_factory=dict)
    is_reported: bool = False

    def mark_reported(self) -> None:
        """What is missing was said."""
        self.is_reported = True

    def unknown_names(self) -> tuple[UnknownContainerName, ...]:
        had, final = tuple(self.container_names), self.is_reported
        return tuple(
            UnknownContainerName(annotation=a, name=n, known_names=had, final=final)
            for n, a in tuple(self.annotation_by_name.items())
        )


class UnmatchedAnnotations(PodObserver):
    """Looks after the names in pods' annotations."""

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self._agent = agent
        self._now = clock.monotonic
        self._later = clock.call_soon
        self._pods: dict[str, _PendingNames] = {}

    def on_container(self, pod: PodSandbox, name: str) -> None:
        """A container is created, perhaps to be rejected."""
        self._later(partial(self._record_containers, [(pod, name)]))

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """These are all pods that there are, and their containers."""
        for uid in self._pods.keys() - set(pods.uids.values()):
            del self._pods[uid]
        known = (c for c in containers if c.pod_id in pods.uids)
        self._later(partial(self._record_containers, ((pods[c.pod_id], c.name) for c in known)))

    def _record_containers(self, containers: Iterable[tuple[PodSandbox, str]]) -> None:
        for pod, name in containers:
            waiting = self._pods.get(pod.uid)
            if waiting is None:
                prefix = self._agent.current.machine.settings.prefix
                wanted = annotated_container_names(pod.annotations, prefix)
                wrong = misspelt_prefix_sentences(pod.annotations, prefix)
                if not wanted and not wrong:
                    continue
                if len(self._pods) >= _MAX_PODS_WITH_PENDING_NAMES:
                    del self._pods[next(iter(self._pods))]
                waiting = _PendingNames(
                    pod.namespace, pod.name, pod.uid, wanted, wrong, self._now()
                )
                self._pods[pod.uid] = waiting
                self._report_sentences(
                    waiting, "annotation with a misspelt prefix", "UnknownPrefix", wrong
                )
            if (
                name not in waiting.container_names
                and len(waiting.container_names) < 2 * MAX_NAMED_CONTAINERS
            ):
                waiting.container_names[name] = None
                waiting.updated_at = self._now()
            if waiting.annotation_by_name.pop(name, None) is not None and waiting.is_reported:
                log.info(
                    "the container that an annotation names was created",
                    pod=f"{waiting.namespace}/{waiting.name}",
                )

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """A pod is removed: who has not come will not come."""
        waiting = self._pods.pop(uid, None)
        if waiting is not None:
            self._later(partial(self._report_pod, waiting))

    def report_settled(self) -> None:
        """Say what is missing in pods that have been quiet; call it now and then."""
        until = self._now() - SETTLED_AFTER_S
        for waiting in self._pods.values():
            if waiting.updated_at <= until:
                self._report_pod(waiting)

    def problem_sentences(self, uid: str) -> list[str]:
        """What is wrong with a pod's annotations; before it is final, as far as it is likely."""
        waiting = self._pods.get(uid)
        if waiting is None:
            return []
        likely = (one for one in waiting.unknown_names() if one.final or one.suggested_name)
        return [*waiting.misspelt, *(one.sentence for one in likely)]

    def _report_pod(self, waiting: _PendingNames) -> None:
        if waiting.is_reported or not waiting.annotation_by_name:
            return
        waiting.mark_reported()
        self._report_sentences(
            waiting,
            "annotation for a container that the pod does not have",
            "UnknownContainer",
            [one.sentence for one in waiting.unknown_names()],
        )

    def _report_sentences(
        self, waiting: _PendingNames, event: str, reason: str, sentences: list[str]
    ) -> None:
        """A log line for each sentence, and one notice of all that no earlier process made."""
        for sentence in sentences:
            log.warning(event, pod=f"{waiting.namespace}/{waiting.name}", problem=sentence)
        message, notices = "; ".join(sentences), self._agent.history.notices
        if sentences and not any(
            (one.pod_uid, one.reason) == (waiting.uid, reason) for one in notices.notices_after()
        ):
            notices.add_notice(
                NoticedEventKind.IGNORED,
                message,
                namespace=waiting.namespace,
                pod=waiting.name,
                pod_uid=waiting.uid,
                container="",
                reason=reason,
            )
