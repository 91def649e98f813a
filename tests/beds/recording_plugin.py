"""A handler that writes down what is reported and answers what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    Pods,
    PodSandbox,
    Resources,
)
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.runtime import LinkState, RuntimeInfo

Hook = Callable[..., Any]
Created = tuple[ContainerAdjustment, Sequence[ContainerUpdate]]


def pin(cpus: str = "", mems: str = "") -> pb.LinuxResources:
    """Return resources with a cpuset and nothing else."""
    return pb.LinuxResources(cpu=pb.LinuxCPU(cpus=cpus, mems=mems))


def update(container_id: str, cpus: str = "", mems: str = "") -> ContainerUpdate:
    return ContainerUpdate(container_id, cpus, mems)


def adjusted(cpus: str = "", mems: str = "", *updates: ContainerUpdate, note: str = "") -> Created:
    """Return the answer to a creation: a cpuset, an annotation ``k``, and updates of others."""
    annotations = {"k": note} if note else {}
    return ContainerAdjustment(cpus=cpus, mems=mems, annotations=annotations), updates


class RecordingPlugin:
    """Fits `nri_numa.runtime.RuntimeHandler`.

    Attributes:
        hooks: by method name, what to do instead of answering nothing.
    """

    reads_mentions = False

    def __init__(self, **hooks: Hook) -> None:
        self.log: list[str] = []
        self.states: list[tuple[LinkState, str]] = []
        self.hooks = hooks
        self.info: RuntimeInfo | None = None
        self.pods: dict[str, PodSandbox] = {}
        self.containers: dict[str, Container] = {}
        self.answered: list[str] = []
        self.errors: list[tuple[str, Exception]] = []
        self.broken = 0
        self._names: dict[str, str] = {}

    def _call(self, hook: str, default: Any, *arguments: Any) -> Any:
        return self.hooks[hook](*arguments) if hook in self.hooks else default

    def _happened(self, event: str, container: Container) -> None:
        self._names[container.id] = container.name
        self.log.append(f"{event} {container.name}")

    def configured(self, info: RuntimeInfo) -> None:
        self.info = info
        self.log.append("Configure")
        self._call("configured", None, info)

    def synchronize(self, pods: Pods, containers: Sequence[Container]) -> Sequence[ContainerUpdate]:
        self.log.append("Synchronize")
        self.pods = {pod_id: pods[pod_id] for pod_id in pods.uids}
        self.containers = {container.id: container for container in containers}
        self._names.update((container.id, container.name) for container in containers)
        answer: Sequence[ContainerUpdate] = self._call("synchronize", (), pods, containers)
        return answer

    def create_container(self, pod: PodSandbox, container: Container) -> Created:
        self._happened("CreateContainer", container)
        answer: Created = self._call("create_container", (NO_ADJUSTMENT, ()), pod, container)
        return answer

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        self._happened("UpdateContainer", container)
        answer: Sequence[ContainerUpdate] = self._call("update_container", (), container, requested)
        return answer

    def post_update_container(self, container_id: str) -> None:
        self.log.append(f"PostUpdateContainer {self._names.get(container_id, container_id)}")

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        self.log.append(f"StopContainer {self._names.get(container_id, container_id)}")
        answer: Sequence[ContainerUpdate] = self._call("stop_container", (), container_id)
        return answer

    def remove_container(self, container_id: str) -> None:
        self.log.append(f"RemoveContainer {self._names.get(container_id, container_id)}")
        self._call("remove_container", None, container_id)

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        self._happened("StartContainer", container)
        self._call("start_container", None, pod, container)

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        self._happened("PostStartContainer", container)
        self._call("post_start_container", None, pod, container)

    def run_pod(self, pod: PodSandbox) -> None:
        self.log.append(f"RunPodSandbox {pod.name}")
        self._call("run_pod", None, pod)

    def stop_pod(self, pod: PodSandbox) -> None:
        self.log.append(f"StopPodSandbox {pod.name}")
        self._call("stop_pod", None, pod)

    def remove_pod(self, pod: PodSandbox) -> None:
        self.log.append(f"RemovePodSandbox {pod.name}")
        self._call("remove_pod", None, pod)

    def replied(self, event_name: str, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(event_name)
        self._call("replied", None, event_name)

    def link_changed(self, state: LinkState, detail: str) -> None:
        self.states.append((state, detail))
        self._call("link_changed", None, state)

    def protocol_broken(self) -> None:
        self.broken += 1

    def internal_error(self, event_name: str, error: Exception) -> None:
        self.errors.append((event_name, error))
        self._call("internal_error", None, event_name, error)
