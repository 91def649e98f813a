"""Handler between the link and the agent: passes events on, with devices and claims.

Only here a rejection fails the runtime's request, and an internal error becomes the answer that the
operator chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from nri_numa.agent.agent import Agent
from nri_numa.engine.decision import Rejected
from nri_numa.engine.state import Allocation
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    Resources,
)
from nri_numa.observe.logs import get_logger, operation
from nri_numa.runtime import LinkState, PodObserver, RequestRejected, RuntimeInfo
from nri_numa.text import escape_unprintable

log = get_logger("nri")

SLOW_ANSWER_S: Final = 0.5
"""Seconds above which an answer is logged as slow."""


class ContainerSource(Protocol):
    """Source of facts that the runtime does not report."""

    def complete_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[PodSandbox, Container]:
        """Return pod and container with these facts."""


class AdjustmentExtension(Protocol):
    """Addition to the adjustment of a placed container."""

    def extend_adjustment(
        self, allocation: Allocation, container: Container, adjustment: ContainerAdjustment
    ) -> ContainerAdjustment:
        """Return the extended adjustment."""


class LinkObserver:
    """Observer of the link."""

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Handle the runtime's Configure request."""

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """Handle a change of the link's state."""


class AgentHandler:
    """Implements `nri_numa.runtime.RuntimeHandler` over an agent.

    Args:
        link_observers: observers of the link, called in this order.
        rejects_on_error: True if an internal error fails the creation, instead of an empty
            adjustment.
        observers: observers of pods, called in this order.
        sources: complete containers before their admission, in this order.
        extensions: add to the adjustment of a placed container, in this order.
    """

    def __init__(
        self,
        agent: Agent,
        link_observers: Sequence[LinkObserver] = (),
        *,
        rejects_on_error: Callable[[], bool] = lambda: False,
        observers: Sequence[PodObserver] = (),
        sources: Sequence[ContainerSource] = (),
        extensions: Sequence[AdjustmentExtension] = (),
    ) -> None:
        self._agent, self._metrics = agent, agent.metrics
        self._link_observers = link_observers
        self._rejects_on_error = rejects_on_error
        self._observers, self._sources = observers, sources
        self._extensions = extensions
        # Pods by sandbox id: in Stop and Remove requests the pod may carry only its id.
        self._pod_uids: dict[str, str] = {}
        # Containers whose creation ran into an internal error.
        self._failed: set[str] = set()

    @property
    def reads_mentions(self) -> bool:
        """True if devices or claims of containers are used."""
        return bool(self._sources)

    # --- requests ---------------------------------------------------------------------------------

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Pass the runtime's name and abilities on."""
        for observer in self._link_observers:
            observer.on_runtime_configured(info)
        self._metrics.record_registration(info.name, info.version)

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        """Synchronize the agent with the runtime's containers."""
        with operation():
            self._pod_uids = dict(pods.uids)
            self._failed.clear()
            for observer in self._observers:
                observer.on_synchronize(pods, containers)
            if self._sources:
                pods, containers = self._complete_all(pods, containers)
            return self._agent.synchronize(pods, containers)

    def create_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[ContainerAdjustment, Sequence[ContainerUpdate]]:
        """Place a container."""
        if not container.id:
            raise RequestRejected("InvalidRequest: the container has no id, expected the runtime's")
        with operation():
            self._pod_uids[pod.id] = pod.uid
            for observer in self._observers:
                observer.on_container(pod, container.name)
            try:
                answer = self._agent.create_container(*self._complete_container(pod, container))
            except Exception:
                # Whatever the answer is, its start must not be that of an unknown container.
                self._failed.add(container.id)
                raise
            finally:
                # Only now, so the pod is always published as pending or as charged.
                for observer in self._observers:
                    observer.on_decided(pod.id)
            if answer is None:
                return NO_ADJUSTMENT, ()
            if isinstance(answer, Rejected):
                raise _rejection_error(answer)
            adjustment = answer.adjustment
            for extension in self._extensions:
                adjustment = extension.extend_adjustment(answer.allocation, container, adjustment)
            return adjustment, answer.updates

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        """Decide about new resources."""
        with operation():
            pod, container = self._complete_container(pod, container)
            outcome = self._agent.update_container(pod, container, requested)
            if isinstance(outcome, Rejected):
                raise _rejection_error(outcome)
            return tuple(filter(None, (outcome.container_update, *outcome.updates)))

    def post_update_container(self, container_id: str) -> None:
        """Repair its cgroup, which may have the runtime's older record."""
        with operation():
            self._agent.post_update_container(container_id)

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        """Release its allocation."""
        with operation():
            self._failed.discard(container_id)
            return self._agent.stop_container(container_id)

    def remove_container(self, container_id: str) -> None:
        """Forget it."""
        with operation():
            self._failed.discard(container_id)
            self._agent.remove_container(container_id)

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """Correct its cgroup if the desired values changed since its creation."""
        if container.id not in self._failed:
            with operation():
                self._pod_uids.setdefault(pod.id, pod.uid)
                self._agent.start_container(*self._complete_container(pod, container))

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """Record that it runs, and can be updated from now on."""
        if container.id not in self._failed:
            with operation():
                self._pod_uids.setdefault(pod.id, pod.uid)
                self._agent.post_start_container(*self._complete_container(pod, container))

    def run_pod(self, pod: PodSandbox) -> None:
        """Reserve the resources of a pod with scope `pod`."""
        with operation():
            self._agent.run_pod(pod)
            for observer in self._observers:
                observer.on_run_pod(pod)

    def update_pod(self, pod: PodSandbox, total: Resources) -> None:
        """Record the pod's new resources."""
        with operation():
            self._agent.update_pod(pod, total)

    def stop_pod(self, pod: PodSandbox) -> None:
        """Release its reservations; the pod is forgotten when it is removed."""
        for observer in self._observers:
            observer.on_stop_pod(pod.id)
        with operation():
            self._agent.stop_pod(self._pod_uids.get(pod.id, pod.uid), pod.id)

    def remove_pod(self, pod: PodSandbox) -> None:
        """Forget the pod."""
        with operation():
            uid = self._pod_uids.pop(pod.id, pod.uid)
            self._agent.remove_pod(uid, pod.id)
            for observer in self._observers:
                observer.on_remove_pod(pod.id, uid)

    def _complete_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[PodSandbox, Container]:
        """Complete pod and container from the sources."""
        for source in self._sources:
            pod, container = source.complete_container(pod, container)
        return pod, container

    def _complete_all(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> tuple[PodTable, list[Container]]:
        """Complete all pods and containers; additions to a pod accumulate."""
        by_id = {pod_id: pods[pod_id] for pod_id in pods.uids}
        completed_containers: list[Container] = []
        for container in containers:
            if container.pod_id in by_id:
                by_id[container.pod_id], container = self._complete_container(
                    by_id[container.pod_id], container
                )
            completed_containers.append(container)
        return PodTable.from_pods(by_id.values()), completed_containers

    # --- the link ---------------------------------------------------------------------------------

    def on_request_answered(self, event_name: str, seconds: float) -> None:
        """Count an answered request, and log it if it was slow."""
        self._metrics.record_request(event_name, seconds)
        if seconds > SLOW_ANSWER_S:
            log.warning("request answered slowly", event=event_name, duration_s=round(seconds, 3))

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """Pass the state of the link on."""
        if state is not LinkState.ACTIVE and state is not LinkState.CONFIGURED:
            self._metrics.link_up.set(0)
        for observer in self._link_observers:
            observer.on_link_changed(state, detail)

    def on_protocol_broken(self) -> None:
        """Count a protocol error."""
        self._metrics.protocol_errors.inc()

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        """Count an internal error, log its traceback, and answer as configured."""
        self._metrics.internal_errors.inc()
        log.exception("request handling failed", event=event_name)
        if event_name in ("CreateContainer", "UpdateContainer") and self._rejects_on_error():
            raise RequestRejected(
                f"InternalError: nri-numa failed in {event_name} ({error!r}); see its log"
            )


def _rejection_error(rejected: Rejected) -> RequestRejected:
    """Build the error that the pod's author will read: one printable line."""
    return RequestRejected(escape_unprintable(f"{rejected.reason}: {rejected.message}"))
