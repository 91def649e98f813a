"""A plugin handler that writes down what it is asked and answers what a test tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from nri_numa.nri.link import LinkState
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import RuntimeInfo

Hook = Callable[..., Any]


def pin(cpus: str = "", mems: str = "") -> pb.LinuxResources:
    """Return resources with a cpuset and nothing else."""
    return pb.LinuxResources(cpu=pb.LinuxCPU(cpus=cpus, mems=mems))


def update(container_id: str, cpus: str = "", mems: str = "") -> pb.ContainerUpdate:
    """Return an update of a cpuset."""
    return pb.ContainerUpdate(
        container_id=container_id, linux=pb.LinuxContainerUpdate(resources=pin(cpus, mems))
    )


def adjustment(cpus: str = "", mems: str = "") -> pb.ContainerAdjustment:
    """Return an adjustment of a cpuset."""
    return pb.ContainerAdjustment(linux=pb.LinuxContainerAdjustment(resources=pin(cpus, mems)))


class RecordingPlugin:
    """Fits `PluginHandler`.

    Attributes:
        log: what happened, as short texts: ``RunPodSandbox web``, ``CreateContainer app``.
        states: every state of the link with its detail.
        hooks: by method name, what to do instead of answering nothing.
        pods: of the last Synchronize, by id.
        containers: of the last Synchronize, by id.
        errors: exceptions that reached `internal_error`.
    """

    def __init__(self, **hooks: Hook) -> None:
        self.log: list[str] = []
        self.states: list[tuple[LinkState, str]] = []
        self.hooks = hooks
        self.info: RuntimeInfo | None = None
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, pb.Container] = {}
        self.answered: list[str] = []
        self.errors: list[tuple[str, Exception]] = []

    def _call(self, hook: str, default: Any, *arguments: Any) -> Any:
        return self.hooks[hook](*arguments) if hook in self.hooks else default

    def configured(self, info: RuntimeInfo) -> None:
        self.info = info
        self.log.append("Configure")
        self._call("configured", None, info)

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        self.log.append("Synchronize")
        self.pods = {pod.id: pod for pod in pods}
        self.containers = {container.id: container for container in containers}
        answer: Sequence[pb.ContainerUpdate] = self._call("synchronize", (), pods, containers)
        return answer

    def create_container(
        self, request: pb.CreateContainerRequest, data: bytes = b""
    ) -> pb.CreateContainerResponse:
        self.log.append(f"CreateContainer {request.container.name}")
        answer: pb.CreateContainerResponse = self._call(
            "create_container", pb.CreateContainerResponse(), request
        )
        return answer

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        self.log.append(f"UpdateContainer {request.container.name}")
        answer: pb.UpdateContainerResponse = self._call(
            "update_container", pb.UpdateContainerResponse(), request
        )
        return answer

    def stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse:
        self.log.append(f"StopContainer {request.container.name}")
        answer: pb.StopContainerResponse = self._call(
            "stop_container", pb.StopContainerResponse(), request
        )
        return answer

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        self.log.append(f"RemoveContainer {container.name}")
        self._call("remove_container", None, pod, container)

    def start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        self.log.append(f"StartContainer {container.name}")
        self._call("start_container", None, pod, container)

    def post_start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        self.log.append(f"PostStartContainer {container.name}")
        self._call("post_start_container", None, pod, container)

    def run_pod(self, pod: pb.PodSandbox) -> None:
        self.log.append(f"RunPodSandbox {pod.name}")
        self._call("run_pod", None, pod)

    def stop_pod(self, pod: pb.PodSandbox) -> None:
        self.log.append(f"StopPodSandbox {pod.name}")
        self._call("stop_pod", None, pod)

    def remove_pod(self, pod: pb.PodSandbox) -> None:
        self.log.append(f"RemovePodSandbox {pod.name}")
        self._call("remove_pod", None, pod)

    def replied(self, event_name: str, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(event_name)
        self._call("replied", None, event_name)

    def link_changed(self, state: LinkState, detail: str) -> None:
        self.states.append((state, detail))
        self._call("link_changed", None, state)

    def internal_error(self, event_name: str, error: Exception) -> Message | None:
        self.errors.append((event_name, error))
        answer: Message | None = self._call("internal_error", None, event_name, error)
        return answer
