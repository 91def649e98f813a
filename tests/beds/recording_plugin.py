"""A handler that writes down what is reported and answers what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    PodSandbox,
    PodTable,
)
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import LinkState, RuntimeInfo

Hook = Callable[..., Any]
Created = tuple[ContainerAdjustment, Sequence[ContainerUpdate]]


def pin(cpus: str = "", mems: str = "") -> pb.LinuxResources:
    return pb.LinuxResources(cpu=pb.LinuxCPU(cpus=cpus, mems=mems))


def update(container_id: str, cpus: str = "", mems: str = "") -> ContainerUpdate:
    return ContainerUpdate(container_id, cpus, mems)


def adjusted(cpus: str = "", mems: str = "", *updates: ContainerUpdate, note: str = "") -> Created:
    """Return the answer to a creation: a cpuset, an annotation ``k``, and updates of others."""
    annotations = {"k": note} if note else {}
    return ContainerAdjustment(cpus=cpus, mems=mems, annotations=annotations), updates


def _recorded(event: Event, default: Any = ()) -> Callable[..., Any]:
    """A method that notes an event with the name of its container or pod, and asks its hook."""
    hook = event.name.lower().removesuffix("_sandbox")

    def method(self: RecordingPlugin, *given: Any) -> Any:
        of = next((one for one in given if isinstance(one, Container)), given[0])  # or an id
        if isinstance(of, Container):
            self._names[of.id] = of.name
        name = self._names.get(of, of) if isinstance(of, str) else of.name
        self.log.append(f"{event.method_name} {name}")
        return self._call(hook, default, *given)

    return method


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

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        self.info = info
        self.log.append("Configure")
        self._call("configured", None, info)

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        self.log.append("Synchronize")
        self.pods = {pod_id: pods[pod_id] for pod_id in pods.uids}
        self.containers = {container.id: container for container in containers}
        self._names.update((container.id, container.name) for container in containers)
        answer: Sequence[ContainerUpdate] = self._call("synchronize", (), pods, containers)
        return answer

    create_container = _recorded(Event.CREATE_CONTAINER, (NO_ADJUSTMENT, ()))
    update_container = _recorded(Event.UPDATE_CONTAINER)
    post_update_container = _recorded(Event.POST_UPDATE_CONTAINER)
    stop_container = _recorded(Event.STOP_CONTAINER)
    remove_container = _recorded(Event.REMOVE_CONTAINER)
    start_container = _recorded(Event.START_CONTAINER)
    post_start_container = _recorded(Event.POST_START_CONTAINER)
    run_pod = _recorded(Event.RUN_POD_SANDBOX)
    update_pod = _recorded(Event.UPDATE_POD_SANDBOX)
    stop_pod = _recorded(Event.STOP_POD_SANDBOX)
    remove_pod = _recorded(Event.REMOVE_POD_SANDBOX)

    def on_request_answered(self, event_name: str, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(event_name)
        self._call("replied", None, event_name)

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        self.states.append((state, detail))
        self._call("on_link_changed", None, state)

    def on_protocol_broken(self) -> None:
        self.broken += 1

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        self.errors.append((event_name, error))
        self._call("on_internal_error", None, event_name, error)
