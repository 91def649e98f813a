"""Between the NRI link and the agent: protobuf in, engine types through, protobuf out.

The only place where a refusal becomes an error status, and where a bug of ours is turned into the
answer the operator chose for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Protocol

from google.protobuf.message import Message

from nri_numa.engine.decision import Admitted, Refused, Resized
from nri_numa.engine.values.workload import (
    NO_ADJUSTMENT,
    NO_DEVICES,
    Container,
    ContainerUpdate,
    KnownDevices,
    Mentions,
    Pods,
    PodSandbox,
    Resources,
)
from nri_numa.nri import conversion
from nri_numa.nri.coming import Coming
from nri_numa.nri.conversion import CONTAINER_NAME, Told
from nri_numa.nri.handler import LinkState, RequestRefused
from nri_numa.nri.mentions import mentions_of, network_namespace
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import RuntimeInfo
from nri_numa.observe.logs import get_logger, operation
from nri_numa.observe.metrics import Metrics

log = get_logger("nri")

REMOVAL_SECONDS: Final = 5.0
"""How long after its stop a sandbox may be on its way out with containers still in it."""


class AgentLike(Protocol):
    """The agent as seen from the link."""

    def create_container(self, pod: PodSandbox, container: Container) -> Admitted | Refused | None:
        """See `nri_numa.node.agent.Agent`; so for the others."""
        ...

    def update_container(
        self, pod: PodSandbox, container: Container, asked: Resources
    ) -> Resized | Refused:
        """Decide about new resources."""
        ...

    def knows(self, container_id: str) -> bool:
        """Whether it has been decided about."""
        ...

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """Put its cgroup right before its program runs."""
        ...

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """Its program runs."""
        ...

    def stop_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        """Take back what it has."""
        ...

    def remove_container(self, container_id: str) -> None:
        """Forget it."""
        ...

    def run_pod(self, pod: PodSandbox) -> None:
        """Keep what its containers will need."""
        ...

    def stop_pod(self, uid: str, sandbox: str) -> None:
        """Give back what was kept for its containers."""
        ...

    def remove_pod(self, uid: str, sandbox: str) -> None:
        """Forget the pod."""
        ...

    def synchronize(
        self, pods: Pods, containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Compare notes."""
        ...


class PodWatch(Protocol):
    """Who looks after the names in annotations; see `nri_numa.node.unmatched`."""

    def saw(self, containers: Iterable[tuple[PodSandbox, str]]) -> None:
        """Pods and names of containers that are there, or were refused."""
        ...

    def kept(self, uids: Collection[str]) -> None:
        """There are no other pods."""
        ...

    def gone(self, uid: str) -> None:
        """A pod is removed."""
        ...


class DeviceWatch(Protocol):
    """Who finds out which devices containers have; see `nri_numa.devices.watch`."""

    def began(self, pod: PodSandbox, network: str) -> None:
        """A pod is being made; its network namespace is there, and none of its containers."""
        ...

    def known(self, pod_id: str, name: str, mentions: Mentions) -> KnownDevices:
        """What is known of the devices of a container."""
        ...

    def kept(self, pods: Iterable[tuple[PodSandbox, str]]) -> None:
        """There are no other pods."""
        ...

    def gone(self, pod_id: str) -> None:
        """A pod is removed."""
        ...


class ClaimWatch(Protocol):
    """Who knows which ResourceClaims containers have; see `nri_numa.node.claims`."""

    def seen(
        self, pod: PodSandbox, container: Container, environment: Sequence[str]
    ) -> tuple[PodSandbox, Container]:
        """Pod and container with what the claims say that its environment names."""
        ...


class Adapter:
    """Implements `nri_numa.nri.handler.PluginHandler` over an agent."""

    def __init__(
        self,
        agent: AgentLike,
        metrics: Metrics,
        *,
        reject_on_error: bool = False,
        configure: Callable[[RuntimeInfo], None] = lambda info: None,
        changed: Callable[[LinkState, str], None] = lambda state, detail: None,
        clock: Callable[[], float] = time.monotonic,
        watch: PodWatch | None = None,
        slots_key: Callable[[], str] = lambda: "",
        mark_key: Callable[[], str] | None = None,
        devices: DeviceWatch | None = None,
        claims: ClaimWatch | None = None,
        coming: Coming | None = None,
    ) -> None:
        """Make an adapter.

        Args:
            agent: decides.
            metrics: counted into.
            reject_on_error: answer a bug of ours with an error, which fails the creation, instead
                of an empty adjustment.
            configure: told what the runtime said of itself.
            changed: told every change of the link.
            clock: seconds of a clock that never jumps.
            watch: told which containers pods have.
            slots_key: the annotation of containers that says which slots they hold.
            mark_key: the one that we write on containers. Together with ``slots_key`` it is all
                that is read of containers when the runtime tells what runs; None reads everything.
            devices: asked which devices containers have; None where that is nobody's business.
            claims: asked which claims containers have; None where there are none.
            coming: told of pods that have no container yet; None where nobody names them.

        Attributes:
            handled: requests answered so far.
        """
        self.handled = 0
        self._clock = clock
        self._watch = watch
        self._slots_key = slots_key
        self._mark_key = mark_key
        self._devices = devices
        self._claims = claims
        self._coming = coming
        self._agent = agent
        self._metrics = metrics
        self.reject_on_error = reject_on_error
        self._configure = configure
        self._changed = changed
        # Pods by sandbox id: in Stop and Remove requests the pod may carry only its id.
        self._pod_uids: dict[str, str] = {}
        # When sandboxes were stopped that have not been removed since, oldest first.
        self._stopped: dict[str, float] = {}
        # Containers about which we made a mistake of our own.
        self._failed: set[str] = set()

    @property
    def sandboxes(self) -> bool:
        """Whether there is a use for the news that a sandbox runs."""
        return self._devices is not None or self._coming is not None

    def configured(self, info: RuntimeInfo) -> None:
        """The runtime introduced itself."""
        self._configure(info)
        self._metrics.connected(info.name, info.version)

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        """Convert the whole picture and let the agent compare notes."""
        with operation():
            known = conversion.pods_from(pods, containers)
            self._pod_uids = dict(known.uids)
            if self._coming is not None:
                self._coming.kept({pod.id for pod in pods})
            self._stopped.clear()
            self._failed.clear()
            # One without an id could never be told anything, and would spoil the whole answer.
            brief = self._mark_key is not None
            keep = (self._mark_key(), self._slots_key()) if self._mark_key is not None else ()
            told = [
                conversion.container_from(one, brief=brief, keep=keep)
                for one in containers
                if one.id
            ]
            if self._watch is not None:
                self._watch.kept(known.uids.values())
                every = known  # what claims say of a pod is no annotation of it
                self._watch.saw((every[c.pod_id], c.name) for c in told if c.pod_id in every)
            if self._devices is not None:
                told = self._with_devices(self._devices, pods, known, told, containers)
            if self._claims is not None:
                known, told = _with_claims(self._claims, known, told, containers)
            updates = self._agent.synchronize(known, told)
            return conversion.updates(updates)

    def create_container(
        self, request: pb.CreateContainerRequest
    ) -> pb.CreateContainerResponse | Told:
        """Place a container."""
        if not request.container.id:
            raise RequestRefused("InvalidRequest: the container has no id, expected the runtime's")
        try:
            return self._place(request)
        finally:
            # Only now: whoever reads in between finds the pod named or charged.
            if self._coming is not None:
                self._coming.over(request.pod.id)

    def _place(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse | Told:
        with operation():
            devices = NO_DEVICES
            if self._devices is not None:
                devices = _known(self._devices, request.pod.id, request.container)
            pod = conversion.pod_from(request.pod, request.container)
            container = conversion.container_from(
                request.container,
                brief=True,
                keep=(self._slots_key(),),
                devices=devices,
            )
            self._pod_uids[pod.id] = pod.uid
            if self._watch is not None:
                self._watch.saw([(pod, container.name)])
            if self._claims is not None:
                pod, container = self._claims.seen(pod, container, request.container.env)
            try:
                answer = self._agent.create_container(pod, container)
            except Exception:
                # Whatever is answered now, its start is no news of a container we never heard of.
                self._failed.add(container.id)
                raise
            if answer is None:
                return conversion.create_response(NO_ADJUSTMENT)
            if isinstance(answer, Refused):
                raise _refusal(answer)
            if answer.updates:
                return conversion.create_answer(answer.adjustment, answer.updates)
            return conversion.create_response(answer.adjustment)

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        """Judge new resources."""
        with operation():
            pod = conversion.pod_from(request.pod, request.container)
            devices = NO_DEVICES
            if self._devices is not None:
                devices = _known(self._devices, pod.id, request.container)
            container = conversion.container_from(request.container, brief=True, devices=devices)
            if self._claims is not None:
                pod, container = self._claims.seen(pod, container, request.container.env)
            asked = conversion.resources_from(request.linux_resources, update=True)
            outcome = self._agent.update_container(pod, container, asked)
            if isinstance(outcome, Refused):
                raise _refusal(outcome)
            return conversion.update_response(outcome.own, outcome.updates)

    def stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse | Told:
        """Take back what it had."""
        with operation():
            self._failed.discard(request.container.id)
            return conversion.stop_answer(self._agent.stop_container(request.container.id))

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Forget it."""
        with operation():
            self._failed.discard(container.id)
            self._agent.remove_container(container.id)

    def start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Put its cgroup right if what it should have changed since it was created."""
        if container.id in self._failed:
            return
        with operation():
            self._agent.start_container(*self._met(pod, container))

    def post_start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """It runs, and updates reach it from now on."""
        if container.id in self._failed:
            return
        with operation():
            self._agent.post_start_container(*self._met(pod, container))

    def run_pod(self, pod: pb.PodSandbox) -> None:
        """Subscribed to where devices count or pods are named.

        A refusal would leak the sandbox on older runtimes.
        """
        known = conversion.pod_from(pod)
        with operation():
            self._agent.run_pod(known)
        if self._coming is not None:
            self._coming.began(known)
        if self._devices is not None:
            with operation():
                self._devices.began(known, network_namespace(pod))

    def _met(self, pod: pb.PodSandbox, container: pb.Container) -> tuple[PodSandbox, Container]:
        uid = self._pod_uids.get(pod.id)
        if self._claims is None and uid is not None and self._agent.knows(container.id):
            # All that is looked at of one that was decided about is where its cgroup is.
            return PodSandbox(id=pod.id, uid=uid, namespace="", name=""), Container(
                id=container.id,
                pod_id=pod.id,
                name="",
                pid=container.pid,
                cgroups_path=container.linux.cgroups_path,
            )
        known = conversion.pod_from(pod, container)
        self._pod_uids[pod.id] = known.uid
        devices = NO_DEVICES
        if self._devices is not None:
            devices = _known(self._devices, known.id, container)
        met = conversion.container_from(
            container, brief=True, keep=(self._slots_key(),), devices=devices
        )
        if self._claims is not None:
            known, met = self._claims.seen(known, met, container.env)
        return known, met

    def _with_devices(
        self,
        devices: DeviceWatch,
        pods: Sequence[pb.PodSandbox],
        known: Pods,
        told: Sequence[Container],
        containers: Sequence[pb.Container],
    ) -> list[Container]:
        """The containers of a Synchronize with what their messages say of devices."""
        devices.kept([(known[pod.id], network_namespace(pod)) for pod in pods])
        found: list[Container] = []
        for container, message in zip(told, (c for c in containers if c.id), strict=True):
            if container.pod_id in known:
                container = _known(devices, container.pod_id, message).on(container)
            found.append(container)
        return found

    def stop_pod(self, pod: pb.PodSandbox) -> None:
        """What was kept for it is given back; the pod is forgotten when it is removed."""
        self._stopped[pod.id] = self._clock()
        if self._coming is not None:
            self._coming.over(pod.id)
        with operation():
            self._agent.stop_pod(self._pod_uids.get(pod.id, "") or pod.uid or pod.id, pod.id)

    def remove_pod(self, pod: pb.PodSandbox) -> None:
        """Forget the pod."""
        with operation():
            self._stopped.pop(pod.id, None)
            uid = self._pod_uids.pop(pod.id, "") or pod.uid or pod.id
            self._agent.remove_pod(uid, pod.id)
            if self._watch is not None:
                self._watch.gone(uid)
            if self._devices is not None:
                self._devices.gone(pod.id)

    def removal_ahead(self) -> bool:
        """Whether the removal of a sandbox may be under way, as far as events tell.

        A registration while a sandbox is removed together with its containers hangs some runtimes
        for good; see docs/reliability.md. Whoever removes by force does so right after the stop.
        """
        oldest = self._clock() - REMOVAL_SECONDS
        while self._stopped:
            sandbox, stopped = next(iter(self._stopped.items()))
            if stopped > oldest:
                return True
            del self._stopped[sandbox]
        return False

    def replied(self, event_name: str, seconds: float) -> None:
        """Count the request, now that its answer is on its way."""
        self.handled += 1
        self._metrics.request(event_name, seconds)
        if seconds > 0.5:
            log.warning("slow answer", event_name=event_name, seconds=round(seconds, 3))

    def link_changed(self, state: LinkState, detail: str) -> None:
        """Say where the link stands."""
        if state is not LinkState.ACTIVE and state is not LinkState.CONFIGURED:
            self._metrics.link_up.set(0)
        self._changed(state, detail)

    def internal_error(self, event_name: str, error: Exception) -> Message | None:
        """A bug of ours: counted, logged with its traceback, answered as configured."""
        self._metrics.internal_errors.inc()
        try:
            raise error
        except Exception:
            log.exception("internal error", event_name=event_name)
        if self.reject_on_error and event_name in ("CreateContainer", "UpdateContainer"):
            raise RequestRefused(
                f"InternalError: nri-numa failed in {event_name} ({error!r}); see its log"
            )
        return None


def _known(watch: DeviceWatch, pod_id: str, container: pb.Container) -> KnownDevices:
    """What is known of a container's devices."""
    name = container.name or container.labels.get(CONTAINER_NAME, "")
    return watch.known(pod_id, name, mentions_of(container))


def _with_claims(
    claims: ClaimWatch,
    known: Pods,
    told: Sequence[Container],
    containers: Sequence[pb.Container],
) -> tuple[Pods, list[Container]]:
    """Pods and containers of a Synchronize with what their claims say."""
    by_id = {pod_id: known[pod_id] for pod_id in known.uids}
    found: list[Container] = []
    for container, message in zip(told, (c for c in containers if c.id), strict=True):
        pod = by_id.get(container.pod_id)
        if pod is not None:
            by_id[pod.id], container = claims.seen(pod, container, message.env)
        found.append(container)
    return Pods.of(by_id.values()), found


def _refusal(refused: Refused) -> RequestRefused:
    """Make the error that the pod's author will read: one line, whatever names are in it."""
    text = f"{refused.reason}: {refused.message}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return RequestRefused(text)
