"""Which devices a message or the kubelet means, by what sysfs, the driver and CDI files say.

The driver's GPUs and CDI files are read in threads and replaced as a whole. Whoever looks a device
up reads nothing but links and small files of sysfs, and those once (`nri_numa.devices.sysfs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from nri_numa.devices import nvidia
from nri_numa.devices.cdi import CDIDevice, CDIRegistry
from nri_numa.devices.found import Found
from nri_numa.devices.given import GivenDevice
from nri_numa.devices.sysfs import SysfsDevices
from nri_numa.devices.variables import named_by
from nri_numa.engine.values.workload import DeviceNode, Mentions
from nri_numa.machine.pci import GPU


class Sources(Protocol):
    """Which sources are asked; `nri_numa.config.device_sources.Devices` is one."""

    @property
    def nodes(self) -> bool:
        """Device files."""
        ...

    @property
    def variables(self) -> bool:
        """``PCIDEVICE_*``."""
        ...

    @property
    def nvidia(self) -> bool:
        """NVIDIA's GPUs."""
        ...

    @property
    def cdi(self) -> bool:
        """The Container Device Interface."""
        ...

    @property
    def cdi_directories(self) -> tuple[str, ...]:
        """Where its files are."""
        ...

    @property
    def network(self) -> bool:
        """Network interfaces."""
        ...

    @property
    def pod_resources(self) -> bool:
        """The kubelet."""
        ...


@dataclass(slots=True)
class Missed:
    """What gives no hint.

    Attributes:
        gpu, cdi: a GPU is not known to the driver; a name stands in no CDI file. Either is read
            again because of that.
        notes: sentences for explanations.
    """

    gpu: bool = False
    cdi: bool = False
    notes: list[str] = field(default_factory=list)


class Lookup:
    """Knows devices by what they are called; safe to use from several threads.

    Attributes:
        sysfs: where devices are.
        gpus: the driver's, replaced as a whole.
        cdi: the files.
    """

    def __init__(self, sources: Sources, *, root: str, own_resource: str) -> None:
        """Know nothing yet; see `nri_numa.devices.watch.DeviceWatch` for the arguments."""
        self._sources = sources
        self._own_resource = own_resource
        self.sysfs = SysfsDevices(root)
        self.gpus = nvidia.GPUs()
        self.cdi = CDIRegistry(sources.cdi_directories)

    def mentioned(self, mentions: Mentions, missed: Missed) -> Iterator[Found]:
        """The devices that a message mentions; what gives no hint is put into ``missed``."""
        sources = self._sources
        if mentions.unread:
            missed.notes.append(
                f"{mentions.unread} more devices than are looked at: no hint of them"
            )
        for node in mentions.nodes:
            yield from self._of_node(node)
        if mentions.variables:
            named = named_by(mentions.variables, pci=sources.variables, nvidia=sources.nvidia)
            missed.notes += named.notes
            for address, variable in named.addresses:
                at = self.sysfs.by_pci(address)
                if not at:
                    missed.notes.append(
                        f"variable {variable} names {address}, which is not there: no hint"
                    )
                yield from at
            for name in named.gpus:
                gpu = self.gpus.of_name(name)
                if gpu is None:
                    missed.gpu = True
                    missed.notes.append(f"GPU {name[:60]!r} is not known to the driver: no hint")
                else:
                    yield self._at(gpu)
        if sources.cdi:
            for name in mentions.cdi:
                yield from self._of_cdi(name, missed)

    def _of_node(self, node: DeviceNode) -> Iterator[Found]:
        if node.major == nvidia.MAJOR and node.type in ("c", "u"):
            address = self.gpus.of_minor(node.minor) if self._sources.nvidia else None
            if address is not None:
                yield self._at(address)
        elif self._sources.nodes:
            yield from self.sysfs.by_number(node.type, node.major, node.minor)

    def _of_cdi(self, name: str, missed: Missed) -> Iterator[Found]:
        device = self.cdi.devices.get(name)
        if device is None:
            missed.cdi = True
            missed.notes.append(
                f"CDI device {name[:80]!r} stands in no file that was read: no hint of it"
            )
            device = CDIDevice()
        for node in device.nodes:
            yield from self._of_node(node)
        for interface in device.interfaces:
            yield from self.sysfs.by_interface(interface)

    def _at(self, address: str) -> Found:
        """A GPU of NVIDIA's at a PCI address, on no NUMA node where sysfs does not have it."""
        found = self.sysfs.by_pci(address)
        return found[0]._replace(kind=GPU) if found else Found(GPU, address)

    def given(self, devices: Iterable[GivenDevice]) -> Iterator[Found]:
        """Devices of the kubelet's, as those that sysfs knows where their ids tell which."""
        for device in devices:
            if device.resource == self._own_resource:
                continue
            address = self.gpus.of_name(device.id) if device.id.lower().startswith("gpu-") else None
            if address is not None:
                yield self._at(address)
                continue
            known = self.sysfs.by_pci(device.id)
            if known:
                yield from known
            else:
                yield Found(device.resource, device.id, device.numa_nodes)
