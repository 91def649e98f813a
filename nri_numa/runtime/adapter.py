"""Between the NRI link and the agent: protobuf in, engine types through, protobuf out.

The only place where a refusal becomes an error status, and where a bug of ours is turned into the
answer the operator chose for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import Message

from nri_numa.engine.answers import ContainerAdjustment, ContainerUpdate
from nri_numa.engine.decision import Refused, Resized
from nri_numa.engine.workload import Container, PodSandbox, Resources
from nri_numa.logs import get_logger, operation
from nri_numa.metrics import Metrics
from nri_numa.protocol.pb import nri_pb2 as pb
from nri_numa.protocol.versions import RuntimeInfo
from nri_numa.runtime import convert
from nri_numa.runtime.handler import LinkState, RequestRefused

log = get_logger("nri")


class AnswerLike(Protocol):
    """What the agent answers about a new container."""

    @property
    def adjustment(self) -> ContainerAdjustment:
        """Changes to the container itself."""
        ...

    @property
    def updates(self) -> tuple[ContainerUpdate, ...]:
        """Changes to others."""
        ...


class AgentLike(Protocol):
    """The agent as seen from the link."""

    def create_container(self, pod: PodSandbox, container: Container) -> AnswerLike | Refused:
        """See `nri_numa.agent.Agent`; so for the others."""
        ...

    def update_container(
        self, pod: PodSandbox, container: Container, asked: Resources
    ) -> Resized | Refused:
        """Decide about new resources."""
        ...

    def stop_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        """Take back what it has."""
        ...

    def remove_container(self, container_id: str) -> None:
        """Forget it."""
        ...

    def remove_pod(self, uid: str) -> None:
        """Forget the pod."""
        ...

    def synchronize(
        self, pods: Sequence[PodSandbox], containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Compare notes."""
        ...


class Adapter:
    """Implements `nri_numa.runtime.handler.PluginHandler` over an agent."""

    def __init__(
        self,
        agent: AgentLike,
        metrics: Metrics,
        *,
        reject_on_error: bool = False,
        configure: Callable[[RuntimeInfo], None] = lambda info: None,
        changed: Callable[[LinkState, str], None] = lambda state, detail: None,
    ) -> None:
        """Make an adapter.

        Args:
            agent: decides.
            metrics: counted into.
            reject_on_error: answer a bug of ours with an error, which fails the creation, instead
                of an empty adjustment.
            configure: told what the runtime said of itself.
            changed: told every change of the link.
        """
        self._agent = agent
        self._metrics = metrics
        self.reject_on_error = reject_on_error
        self._configure = configure
        self._changed = changed
        # Pods by sandbox id: in Stop and Remove requests the pod may carry only its id.
        self._pod_uids: dict[str, str] = {}

    def configured(self, info: RuntimeInfo) -> None:
        """The runtime introduced itself."""
        self._configure(info)
        self._metrics.connected(info.name, info.version)

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        """Convert the whole picture and let the agent compare notes."""
        with operation():
            first: dict[str, pb.Container] = {}
            for container in containers:
                first.setdefault(container.pod_sandbox_id, container)
            known = [convert.pod_from(pod, first.get(pod.id)) for pod in pods]
            self._pod_uids = {pod.id: pod.uid for pod in known}
            updates = self._agent.synchronize(
                known,
                # One without an id could never be told anything, and would spoil the whole answer.
                [convert.container_from(container) for container in containers if container.id],
            )
            return convert.updates(updates)

    def create_container(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse:
        """Place a container."""
        if not request.container.id:
            raise RequestRefused("InvalidRequest: the container has no id, expected the runtime's")
        with operation():
            pod = convert.pod_from(request.pod, request.container)
            container = convert.container_from(request.container, brief=True)
            self._pod_uids[pod.id] = pod.uid
            answer = self._agent.create_container(pod, container)
            if isinstance(answer, Refused):
                raise _refusal(answer)
            return convert.create_response(answer.adjustment, answer.updates)

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        """Judge new resources."""
        with operation():
            pod = convert.pod_from(request.pod, request.container)
            container = convert.container_from(request.container, brief=True)
            asked = convert.resources_from(request.linux_resources, update=True)
            outcome = self._agent.update_container(pod, container, asked)
            if isinstance(outcome, Refused):
                raise _refusal(outcome)
            return convert.update_response(outcome.own, outcome.updates)

    def stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse:
        """Take back what it had."""
        with operation():
            return convert.stop_response(self._agent.stop_container(request.container.id))

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Forget it."""
        with operation():
            self._agent.remove_container(container.id)

    def post_update_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Nothing to learn: the decision was made in UpdateContainer."""

    def run_pod(self, pod: pb.PodSandbox) -> None:
        """Nothing to decide, and a refusal here would leak the sandbox on older runtimes."""
        self._pod_uids[pod.id] = pod.uid or pod.id

    def update_pod(self, request: pb.UpdatePodSandboxRequest) -> None:
        """Nothing to decide: the containers' own updates follow."""

    def stop_pod(self, pod: pb.PodSandbox) -> None:
        """Its containers report for themselves; the pod is forgotten when it is removed."""

    def remove_pod(self, pod: pb.PodSandbox) -> None:
        """Forget the pod."""
        with operation():
            uid = self._pod_uids.pop(pod.id, "") or pod.uid or pod.id
            self._agent.remove_pod(uid)

    def replied(self, event_name: str, seconds: float) -> None:
        """Count the request, now that its answer is on its way."""
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


def _refusal(refused: Refused) -> RequestRefused:
    """Make the error that the pod's author will read: one line, whatever names are in it."""
    text = f"{refused.reason}: {refused.message}"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return RequestRefused(text)
