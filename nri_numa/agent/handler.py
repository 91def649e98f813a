"""Between the link and the agent: what the runtime reports, with devices and claims, goes to it.

The only place where a refusal fails the runtime's request, and where a bug of ours becomes the
answer the operator chose for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.agent.unmatched_annotations import UnmatchedAnnotations
from nri_numa.engine.decision import Rejected
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.observe.logs import get_logger, operation
from nri_numa.observe.metrics import Metrics
from nri_numa.runtime import LinkState, RequestRejected, RuntimeInfo

if TYPE_CHECKING:
    from nri_numa.agent.assigned_files import AssignedFiles
    from nri_numa.agent.claims import ClaimStore
    from nri_numa.agent.daemon import Daemon
    from nri_numa.devices.watch import DeviceWatch

log = get_logger("nri")

SLOW_ANSWER_S: Final = 0.5
"""An answer that takes longer is logged."""

PENDING_POD_TIMEOUT_S: Final = 300.0
"""Seconds for which a pending pod is named: one whose image cannot be pulled must not keep its
node's numbers from the scheduler for ever."""

FIRST_CONTAINER_DELAY_S: Final = 0.5
"""Seconds in which the first container follows where its image is there."""


class AgentHandler:
    """Implements `nri_numa.runtime.RuntimeHandler` over an agent.

    Args:
        reject_on_error: answer a bug of ours with an error, which fails the creation, instead of an
            empty adjustment.
        annotations: follows the container names in annotations.
        devices: knows the devices of containers; None where they do not count.
        claims: knows the ResourceClaims of containers; None where there are none.
        pending: pods without a container yet; None where they are not published.

    Attributes:
        files: shows containers what they have; None where they are not asked for.
    """

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        observer: Daemon | None = None,
        *,
        reject_on_error: bool = False,
        annotations: UnmatchedAnnotations | None = None,
        devices: DeviceWatch | None = None,
        claims: ClaimStore | None = None,
        pending: PendingPods | None = None,
    ) -> None:
        self.reject_on_error = reject_on_error
        self._agent = agent
        self._metrics = metrics
        self._observer = observer
        self._annotations = annotations
        self._devices = devices
        self._claims = claims
        self.files: AssignedFiles | None = None
        self._pending = pending
        # Pods by sandbox id: in Stop and Remove requests the pod may carry only its id.
        self._pod_uids: dict[str, str] = {}
        # Containers about which we made a mistake of our own.
        self._failed: set[str] = set()

    @property
    def reads_mentions(self) -> bool:
        """Whether devices or claims of containers count."""
        return self._devices is not None or self._claims is not None

    # --- requests ---------------------------------------------------------------------------------

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """The runtime introduced itself."""
        if self._observer is not None:
            self._observer.on_runtime_configured(info)
        self._metrics.record_registration(info.name, info.version)

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        """Let the agent compare what runs with what it knows."""
        with operation():
            self._pod_uids = dict(pods.uids)
            self._failed.clear()
            if self._pending is not None:
                self._pending.retain_sandboxes(pods.uids.keys())
            if self._annotations is not None:
                self._annotations.retain_pods(pods.uids.values())
                named = (c for c in containers if c.pod_id in pods.uids)
                self._annotations.record_containers((pods[c.pod_id], c.name) for c in named)
            if self._devices is not None:
                self._devices.retain_pods([pods[pod_id] for pod_id in pods.uids])
            if not self.reads_mentions:
                return self._agent.synchronize(pods, containers)
            return self._agent.synchronize(*self._with_all_devices_and_claims(pods, containers))

    def create_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[ContainerAdjustment, Sequence[ContainerUpdate]]:
        """Place a container."""
        if not container.id:
            raise RequestRejected("InvalidRequest: the container has no id, expected the runtime's")
        with operation():
            self._pod_uids[pod.id] = pod.uid
            if self._annotations is not None:
                self._annotations.record_containers([(pod, container.name)])
            try:
                answer = self._agent.create_container(
                    *self._with_devices_and_claims(pod, container)
                )
            except Exception:
                # Whatever is answered now, its start is not that of an unknown container.
                self._failed.add(container.id)
                raise
            finally:
                # Only now: in between the pod is published as pending or as charged.
                if self._pending is not None:
                    self._pending.discard(pod.id)
            if answer is None:
                return NO_ADJUSTMENT, ()
            if isinstance(answer, Rejected):
                raise _rejection_error(answer)
            adjustment = answer.adjustment
            if self._claims is not None and answer.allocation.exclusive:
                adjustment = self._claims.with_claim_cpus(container, adjustment)
            if self.files is not None:
                adjustment = self.files.with_assigned_files(answer.allocation, adjustment)
            return adjustment, answer.updates

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        """Judge new resources."""
        with operation():
            pod, container = self._with_devices_and_claims(pod, container)
            outcome = self._agent.update_container(pod, container, requested)
            if isinstance(outcome, Rejected):
                raise _rejection_error(outcome)
            return (
                outcome.updates
                if outcome.container_update is None
                else (outcome.container_update, *outcome.updates)
            )

    def post_update_container(self, container_id: str) -> None:
        """Its cgroup may have what the runtime remembered."""
        with operation():
            self._agent.post_update_container(container_id)

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        """Free what it had."""
        with operation():
            self._failed.discard(container_id)
            return self._agent.stop_container(container_id)

    def remove_container(self, container_id: str) -> None:
        """Forget it."""
        with operation():
            self._failed.discard(container_id)
            self._agent.remove_container(container_id)

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """Put its cgroup right if what it should have changed since it was created."""
        if container.id not in self._failed:
            with operation():
                self._pod_uids.setdefault(pod.id, pod.uid)
                self._agent.start_container(*self._with_devices_and_claims(pod, container))

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """It runs, and updates reach it from now on."""
        if container.id not in self._failed:
            with operation():
                self._pod_uids.setdefault(pod.id, pod.uid)
                self._agent.post_start_container(*self._with_devices_and_claims(pod, container))

    def run_pod(self, pod: PodSandbox) -> None:
        """The sum of a pod with scope `pod` is kept from here on."""
        with operation():
            self._agent.run_pod(pod)
            if self._pending is not None:
                self._pending.add(pod)
            if self._devices is not None:
                self._devices.prepare_pod(pod)

    def stop_pod(self, pod: PodSandbox) -> None:
        """Give back what was kept for it; the pod is forgotten when it is removed."""
        if self._pending is not None:
            self._pending.discard(pod.id)
        with operation():
            self._agent.stop_pod(self._pod_uids.get(pod.id, pod.uid), pod.id)

    def remove_pod(self, pod: PodSandbox) -> None:
        """Forget the pod."""
        with operation():
            uid = self._pod_uids.pop(pod.id, pod.uid)
            self._agent.remove_pod(uid, pod.id)
            if self._pending is not None:  # over CRI no stop was reported
                self._pending.discard(pod.id)
            if self._annotations is not None:
                self._annotations.report_and_forget_pod(uid)
            if self._devices is not None:
                self._devices.forget_pod(pod.id)

    def _with_devices_and_claims(
        self, pod: PodSandbox, container: Container
    ) -> tuple[PodSandbox, Container]:
        """Pod and container with what is known of the container's devices and claims."""
        if self._devices is not None:
            known = self._devices.known_container_devices(
                pod.id, container.name, container.mentions
            )
            container = known.apply_to(container)
        if self._claims is not None:
            pod, container = self._claims.with_claims(pod, container)
        return pod, container

    def _with_all_devices_and_claims(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> tuple[PodTable, list[Container]]:
        """All pods and containers `_with_devices_and_claims`; what claims say of a pod adds up."""
        by_id = {pod_id: pods[pod_id] for pod_id in pods.uids}
        found: list[Container] = []
        for container in containers:
            if container.pod_id in by_id:
                by_id[container.pod_id], container = self._with_devices_and_claims(
                    by_id[container.pod_id], container
                )
            found.append(container)
        return PodTable.from_pods(by_id.values()), found

    # --- the link ---------------------------------------------------------------------------------

    def on_request_answered(self, event_name: str, seconds: float) -> None:
        """Count the request, now that its answer is on its way."""
        self._metrics.record_request(event_name, seconds)
        if seconds > SLOW_ANSWER_S:
            log.warning("slow answer", event_name=event_name, seconds=round(seconds, 3))

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """Say where the link stands."""
        if state is not LinkState.ACTIVE and state is not LinkState.CONFIGURED:
            self._metrics.link_up.set(0)
        if self._observer is not None:
            self._observer.on_link_changed(state, detail)

    def on_protocol_broken(self) -> None:
        """Count it."""
        self._metrics.protocol_errors.inc()

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        """A bug of ours: counted, logged with its traceback, answered as configured."""
        self._metrics.internal_errors.inc()
        try:
            raise error
        except Exception:
            log.exception("internal error", event_name=event_name)
        if self.reject_on_error and event_name in ("CreateContainer", "UpdateContainer"):
            raise RequestRejected(
                f"InternalError: nri-numa failed in {event_name} ({error!r}); see its log"
            )


def _rejection_error(refused: Rejected) -> RequestRejected:
    """Make the error that the pod's author will read: one line, whatever names are in it."""
    text = f"{refused.reason}: {refused.message}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return RequestRejected(text)


class PendingPods:
    """Guaranteed pods that are on this node and of which no container was created yet.

    A scheduler that works by a NodeResourceTopology drops what it reserved for pods of a node when
    the object names the pods that it counts itself, and it counts none that is still Pending. A pod
    whose image is being pulled is charged nowhere: if it were not named either, its CPUs would be
    promised twice. Its sandbox runs before images are pulled, so from then on it is named
    (docs/adr/0047-one-document-for-schedulers.md).
    """

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self._agent, self._clock = agent, clock
        # By sandbox: since when, namespace, name.
        self._pods: dict[str, tuple[float, str, str]] = {}

    def add(self, pod: PodSandbox) -> None:
        """A sandbox runs."""
        if pod.qos is QoSClass.GUARANTEED:
            self._pods[pod.id] = self._clock.monotonic(), pod.namespace, pod.name
            self._clock.call_later(
                FIRST_CONTAINER_DELAY_S, partial(self._notify_if_pending, pod.id)
            )

    def _notify_if_pending(self, sandbox: str) -> None:
        if sandbox in self._pods:
            self._agent.current.notify()

    def discard(self, sandbox: str) -> None:
        """A container of it was decided about, or it is stopped."""
        self._pods.pop(sandbox, None)

    def retain_sandboxes(self, sandboxes: Collection[str]) -> None:
        """There are no other sandboxes."""
        for sandbox in self._pods.keys() - sandboxes:
            self.discard(sandbox)

    def pod_names(self) -> list[tuple[str, str]]:
        """Namespace and name of each; may be called in another thread."""
        oldest = self._clock.monotonic() - PENDING_POD_TIMEOUT_S
        # A copy in one step: the runtime's requests change it meanwhile.
        return [(space, name) for at, space, name in tuple(self._pods.values()) if at > oldest]
