"""The world of the embedded runtime: pods and containers, and the cpusets they really have.

In memory only. A container's resources are kept as a runtime keeps them, in its stored spec; every
update is merged into the spec and, when the container runs, checked against the machine the way the
kernel would check it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.nri.wire.pb import nri_pb2 as pb


class CRIError(Exception):
    """A pod or container operation failed; the text is what the kubelet would be shown."""


class ContainerState(enum.Enum):
    """The life of a container, by the numbers of NRI's messages."""

    CREATED = pb.CONTAINER_CREATED
    RUNNING = pb.CONTAINER_RUNNING
    EXITED = pb.CONTAINER_STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedMachine:
    """What cpusets are checked against."""

    cpus: CPUSet
    mems: NUMASet

    def problem(self, cpu: pb.LinuxCPU) -> str | None:
        """Return why the kernel would not take this cpuset; None when it would."""
        try:
            cpus, mems = CPUSet.parse(cpu.cpus), NUMASet.parse(cpu.mems)
        except ListFormatError as error:
            return f"invalid argument: {error}"
        if not cpus <= self.cpus:
            return f"cpuset.cpus {cpu.cpus}: numerical result out of range"
        if not mems <= self.mems:
            return f"cpuset.mems {cpu.mems}: numerical result out of range"
        return None


@dataclass(slots=True, kw_only=True)
class EmbeddedPod:
    """A pod sandbox.

    Attributes:
        older: than the runtime's last start; containerd tells nobody of its end (containerd#8426).
    """

    message: pb.PodSandbox
    stopped: bool = False
    older: bool = False

    @property
    def id(self) -> str:
        return self.message.id


@dataclass(slots=True, kw_only=True)
class EmbeddedContainer:
    """A container.

    Attributes:
        stop_told: StopContainer was sent; it is sent once.
        cpuset: the file with what it really has, where there is one; its spec is older then.
    """

    message: pb.Container
    machine: EmbeddedMachine
    state: ContainerState = ContainerState.CREATED
    stop_told: bool = False
    cpuset: Path | None = None

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def pod_id(self) -> str:
        return self.message.pod_sandbox_id

    @property
    def cpus(self) -> str:
        """The CPUs it may run on, as a list; every CPU when its cpuset is empty."""
        recorded = self.message.linux.resources.cpu.cpus
        with contextlib.suppress(OSError):
            if self.cpuset is not None:
                # Unlike the kernel's, a file that is being written is empty for a moment.
                while not (text := self.cpuset.read_text().strip()) and recorded:
                    pass
                recorded = text
        return recorded or str(self.machine.cpus)

    @property
    def mems(self) -> str:
        """The NUMA nodes its memory may come from; every one when its cpuset is empty."""
        return self.message.linux.resources.cpu.mems or str(self.machine.mems)

    def snapshot(self) -> pb.Container:
        message = pb.Container()
        message.CopyFrom(self.message)
        message.state = self.state.value
        return message


@dataclass(slots=True, kw_only=True)
class World:
    """Every pod and container of the node, by id, in creation order.

    Attributes:
        on_update: called with the id of each container that is to be updated.
    """

    machine: EmbeddedMachine
    on_update: Callable[[str], object] = lambda _: None
    pods: dict[str, EmbeddedPod] = field(default_factory=dict)
    containers: dict[str, EmbeddedContainer] = field(default_factory=dict)

    def containers_of(self, pod_id: str) -> list[EmbeddedContainer]:
        return [item for item in self.containers.values() if item.pod_id == pod_id]

    def apply(self, update: pb.ContainerUpdate) -> str | None:
        """Apply an update to one container; returns why it failed, or None.

        Unknown and exited containers are passed over in silence, as containerd does. The memory and
        CPU numbers that are zero mean "not part of this update".
        """
        self.on_update(update.container_id)
        container = self.containers.get(update.container_id)
        if container is None or container.state is ContainerState.EXITED:
            return None
        resources = pb.LinuxResources()
        resources.CopyFrom(container.message.linux.resources)
        resources.MergeFrom(_given(update.linux.resources))
        if container.state is ContainerState.RUNNING:
            problem = self.machine.problem(resources.cpu)
            if problem is not None:
                return problem
        container.message.linux.resources.CopyFrom(resources)
        return None


def _given(resources: pb.LinuxResources) -> pb.LinuxResources:
    """Return the resources without the wrappers that are present and zero."""
    given = pb.LinuxResources()
    given.CopyFrom(resources)
    for part in (given.cpu, given.memory):
        for descriptor, value in part.ListFields():
            if descriptor.message_type is not None and not value.value:
                part.ClearField(descriptor.name)
    return given
