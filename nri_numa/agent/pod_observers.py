"""Observers of pods: their annotations without effect, and those without a container yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.engine.request.annotations import (
    MAX_NAMED_CONTAINERS,
    annotated_container_names,
    misspelt_prefix_sentences,
    old_value_sentences,
    unknown_container_sentence,
)
from nri_numa.model.workload import Container, PodSandbox, PodTable, QoSClass
from nri_numa.observe.notices import NoticeMessageReason
from nri_numa.runtime import PodObserver

SETTLED_AFTER_S: Final = 120.0
"""Seconds without a container of a new name after which all are assumed to exist."""
_MAX_PODS_WITH_PENDING_NAMES: Final = 2048
"""Pods with unmatched names; the oldest are dropped."""


@dataclass(slots=True)
class _PendingNames:
    """Unmatched names in a pod's annotations, and names of its containers."""

    pod: PodSandbox
    annotation_by_name: dict[str, str]
    updated_at: float = 0.0
    container_names: dict[str, None] = field(default_factory=dict)


class UnmatchedAnnotations(PodObserver):
    """Reports annotations for an unknown container, with a wrong prefix, or of an old version.

    No event marks the pod's last container. All are assumed to exist if no container of a new name
    was created for `SETTLED_AFTER_S` seconds, and certainly when the pod is removed. A container
    that is created later, behind a slow init container or image, withdraws the notice.
    """

    def __init__(self, agent: Agent) -> None:
        self._current, self._reporter = agent.current, agent.history.reporter
        self._now, self._later = agent.current.clock.monotonic, agent.current.clock.call_soon
        self._pods: dict[str, _PendingNames] = {}

    def on_container(self, pod: PodSandbox, name: str) -> None:
        """Record a container that is being created."""
        self._later(partial(self._record_containers, [(pod, name)]))

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """Drop pods that are gone, and record all containers."""
        for uid in self._pods.keys() - set(pods.uids.values()):
            del self._pods[uid]
        live = [c for c in containers if c.pod_id in pods.uids]
        self._later(partial(self._record_containers, ((pods[c.pod_id], c.name) for c in live)))
        pod_ids = dict.fromkeys(c.pod_id for c in live)
        self._later(partial(self._report_old_values, (pods[pod_id] for pod_id in pod_ids)))

    def _report_old_values(self, pods: Iterable[PodSandbox]) -> None:
        """Report old values of running pods, which keep their placement."""
        prefix, reason = self._current.machine.settings.prefix, NoticeMessageReason.OLD_VALUE
        for pod in pods:
            sentences = old_value_sentences(pod.annotations, prefix)
            self._reporter.report_unmatched_annotations(pod, reason, sentences)

    def _record_containers(self, containers: Iterable[tuple[PodSandbox, str]]) -> None:
        for pod, name in containers:
            pending = self._pods.get(pod.uid) or self._add_pod(pod)
            if pending is None:
                continue
            names = pending.container_names
            if name not in names and len(names) < 2 * MAX_NAMED_CONTAINERS:
                names[name] = None
                pending.updated_at = self._now()
            if pending.annotation_by_name.pop(name, None) is not None:
                self._reporter.withdraw_unknown_containers(pod)

    def _add_pod(self, pod: PodSandbox) -> _PendingNames | None:
        """Read a pod's annotations; None if they name no container."""
        prefix = self._current.machine.settings.prefix
        misspelt = misspelt_prefix_sentences(pod.annotations, prefix)
        reason = NoticeMessageReason.UNKNOWN_PREFIX
        self._reporter.report_unmatched_annotations(pod, reason, misspelt)
        names = annotated_container_names(pod.annotations, prefix)
        if not names:
            return None
        if len(self._pods) >= _MAX_PODS_WITH_PENDING_NAMES:
            del self._pods[next(iter(self._pods))]
        self._pods[pod.uid] = _PendingNames(pod, names)
        return self._pods[pod.uid]

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """Report the unmatched names of a removed pod."""
        pending = self._pods.pop(uid, None)
        if pending is not None:
            self._later(partial(self._report_pod, pending))

    def report_settled(self) -> None:
        """Report unmatched names of settled pods; called periodically."""
        settled_at = self._now() - SETTLED_AFTER_S
        for pending in self._pods.values():
            if pending.updated_at <= settled_at:
                self._report_pod(pending)
                pending.updated_at = inf  # until a container of another new name comes

    def _report_pod(self, pending: _PendingNames) -> None:
        container_names = tuple(pending.container_names)
        sentences = [
            unknown_container_sentence(annotation, name, container_names)
            for name, annotation in pending.annotation_by_name.items()
        ]
        self._reporter.report_unmatched_annotations(
            pending.pod, NoticeMessageReason.UNKNOWN_CONTAINER, sentences
        )


# --- Pods without a container ---

PENDING_POD_TIMEOUT_S: Final = 300.0
"""Seconds for which a pending pod is named: one whose image cannot be pulled must not keep its
node's numbers from the scheduler without limit."""
FIRST_CONTAINER_DELAY_S: Final = 0.5
"""Seconds in which the first container follows if its image is present."""


class PendingPods(PodObserver):
    """Guaranteed pods on this node without a created container.

    A scheduler that works by a NodeResourceTopology drops what it reserved for pods of a node when
    the object names the pods that it counts itself, and it counts none that is still Pending. A pod
    whose image is being pulled is charged nowhere: if it were not named either, its CPUs would be
    allocated twice. Its sandbox runs before images are pulled, so from then on it is named
    (docs/adr/0047-one-document-for-schedulers.md).
    """

    def __init__(self, agent: Agent) -> None:
        self._current, self._clock = agent.current, agent.current.clock
        # By sandbox: start time, namespace, name.
        self._pods: dict[str, tuple[float, str, str]] = {}

    def on_run_pod(self, pod: PodSandbox) -> None:
        """Add the pod if it is Guaranteed."""
        if pod.qos is QoSClass.GUARANTEED:
            self._pods[pod.id] = self._clock.monotonic(), pod.namespace, pod.name
            self._clock.call_later(
                FIRST_CONTAINER_DELAY_S, partial(self._notify_if_pending, pod.id)
            )

    def _notify_if_pending(self, sandbox: str) -> None:
        if sandbox in self._pods:
            self._current.notify()

    def on_decided(self, pod_id: str) -> None:
        """Drop the pod, since a container of it was decided about."""
        self._pods.pop(pod_id, None)

    on_stop_pod = on_decided

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """Drop a removed pod; over CRI no stop was reported."""
        self.on_decided(pod_id)

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """Drop sandboxes that are gone."""
        for pod_id in self._pods.keys() - pods.uids.keys():
            self.on_decided(pod_id)

    def pod_names(self) -> list[tuple[str, str]]:
        """Return namespace and name of each pod; any thread may call this."""
        oldest = self._clock.monotonic() - PENDING_POD_TIMEOUT_S
        # A copy in one step: the runtime's requests change it meanwhile.
        return [(space, name) for t, space, name in tuple(self._pods.values()) if t > oldest]
