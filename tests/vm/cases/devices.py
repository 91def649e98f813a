"""Containers beside the devices they have: disks by VFIO, network cards moved into pods.

Disks have no driver of the kernel's here: interrupts of what is behind a second host bridge do not
arrive (`tests.machines.vm_machine` boots without MSI), and the driver of NVMe waits for them. So
they are given by VFIO, as to programs that drive their disk themselves.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from tests.beds.cri import Container, CRIError, Pod, poll
from tests.machines.vm_machine import Machine
from tests.vm import pod_cards, words
from tests.vm.cases.memory import TOUCHED_MIB, touch, touched_pages
from tests.vm.guest import Guest
from tests.vm.registry import case

_PCI = Path("/sys/bus/pci")
_CARD, _DISK, _STAND_IN = "0x020000", "0x010802", "0x00ff00"
"""Classes of PCI devices."""
_SOURCES = {"devices": {"enabled": True, "podResources": False}}
_SINGLE = {"policy": "single-numa-node", "cpus": "shared"}
_BEST_EFFORT = {"policy": "best-effort", "cpus": "shared"}


def _disks(machine: Machine) -> bool:
    return machine.has_on_each_node("nvme")


@contextlib.contextmanager
def _sources(guest: Guest) -> Iterator[None]:
    """The plugin with `devices.enabled`, which takes a start; the next case has it without."""
    guest.plugin.terminate(60)
    guest.plugin.write_config(_SOURCES)
    try:
        guest.plugin.start()
        yield
    finally:
        guest.reset()
        if guest.plugin.running:
            guest.plugin.terminate(60)
        guest.plugin.write_config({})


def _address(numa_node: int, class_: str) -> str:
    """PCI address of the device of a class on a NUMA node."""
    (found,) = (
        address for address, what in words.pci_devices().items() if what == (numa_node, class_)
    )
    return found


def _disk(numa_node: int) -> str:
    """Device file of VFIO for the disk on a NUMA node."""
    address = _address(numa_node, _DISK)
    device = _PCI / "devices" / address
    if not (device / "driver").exists():
        words.run("modprobe", "vfio-pci")
        (device / "driver_override").write_text("vfio-pci", encoding="ascii")
        (_PCI / "drivers_probe").write_text(address, encoding="ascii")
    group = os.path.basename(os.path.realpath(device / "iommu_group"))
    file = Path(f"/dev/vfio/{group}")
    poll(lambda: file.exists(), f"{file} for {address}")
    return str(file)


def _interface(numa_node: int) -> str:
    """Name of the network card on a NUMA node, while it is not in a pod."""
    words.run("modprobe", "e1000e")
    directory = _PCI / "devices" / _address(numa_node, _CARD) / "net"

    def look() -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return next(iter(os.listdir(directory)), None)
        return None

    return poll(look, f"an interface in {directory}")


def _beside(guest: Guest, container: Container, numa_node: int) -> None:
    guest.pinned(container, cpus=guest.cpus_of(numa_node), mems=frozenset({numa_node}))


@case(applies=_disks)
def disks_decide(guest: Guest) -> None:
    """A container is on the NUMA node of the disk it is given, unless it says `devices: ignore`."""
    numa_nodes = range(len(guest.machine.numa))
    disks = [_disk(i) for i in numa_nodes]
    with _sources(guest):
        for asks in (_SINGLE, _BEST_EFFORT):
            for numa_node in numa_nodes:
                pod = guest.sandbox(f"{asks['policy']}-{numa_node}", asks)
                _beside(guest, guest.container(pod, "main", devices=[disks[numa_node]]), numa_node)
            guest.reset()
        # Where nothing is a hint, an empty node has one place for the first pod.
        without = guest.pinned(guest.pod("without", _SINGLE))
        guest.reset()
        (usual,) = without.mems
        other = next(i for i in numa_nodes if i != usual)
        ignoring = guest.sandbox("ignoring", _SINGLE | {"devices": "ignore"})
        _beside(guest, guest.container(ignoring, "main", devices=[disks[other]]), usual)


@case(applies=pod_cards.moves_cards)
def moved_cards_decide(guest: Guest) -> None:
    """A pod is on the NUMA node of the network card in it; pods created at one time too."""
    with _sources(guest):
        both = _with_cards(guest, {0: _SINGLE, 1: _SINGLE})
        for numa_node, container in both.items():
            _beside(guest, container, numa_node)
        told = _why(guest, both[1].pod.name)
        assert f"because its NIC {_address(1, _CARD)} is there" in told, told
        guest.reset()
        # The plugin that moved the card in has moved it out, so it can be had again.
        again = _with_cards(guest, {1: _BEST_EFFORT})
        _beside(guest, again[1], 1)


@case(applies=lambda machine: _disks(machine) and pod_cards.moves_cards(machine))
def card_and_disk_apart(guest: Guest) -> None:
    """With a card here and a disk there `single-numa-node` refuses and names both."""
    disk = _disk(1)
    with _sources(guest):
        _give(guest, "refused", 0)
        pod = guest.sandbox("refused", _SINGLE, own_network=True)
        _looked_at(guest, pod)
        try:
            guest.container(pod, "main", devices=[disk])
        except CRIError as error:
            guest.notes.append(f"refused: {error.message}")
            places = "1 NIC on NUMA node 0", "1 NVMe disk on NUMA node 1"
            guest.mentions(error.message, "default/refused", *places)
        else:
            raise AssertionError("no NUMA node has both, but the container was created")
        guest.reset()
        _give(guest, "placed", 0)
        pod = guest.sandbox("placed", _BEST_EFFORT, own_network=True)
        _looked_at(guest, pod)
        guest.pinned(guest.container(pod, "main", devices=[disk]))
        guest.notes.append(_why(guest, "placed"))


@case(applies=lambda machine: machine.has_on_each_node("virtio-rng-pci"))
def devices_of_two_roots(guest: Guest) -> None:
    """CPUs and pages are beside two devices of a NUMA node, each behind a PCIe root of its own."""
    with _sources(guest):
        for numa_node in range(len(guest.machine.numa)):
            stand_ins = [
                address
                for address, what in words.pci_devices().items()
                if what == (numa_node, _STAND_IN)
            ]
            assert len({_root(address) for address in stand_ins}) == 2, stand_ins
            names = ("PCIDEVICE_BED_EXAMPLE_COM_GPU", "PCIDEVICE_BED_EXAMPLE_COM_NIC")
            container = guest.container(
                guest.sandbox(f"roots-{numa_node}", _SINGLE),
                "main",
                memory_mib=128,
                env=dict(zip(names, stand_ins, strict=True)),
                command=touch(TOUCHED_MIB),
            )
            seen = words.allowed(guest.pid(container))
            assert seen.cpus == guest.cpus_of(numa_node), seen
            assert seen.mems == {numa_node}, seen
            assert set(touched_pages(guest, container)) == {numa_node}


def _root(address: str) -> str:
    """The PCIe root of a device, such as pci0000:40."""
    return os.path.realpath(_PCI / "devices" / address).split("/")[3]


def _give(guest: Guest, pod: str, numa_node: int) -> None:
    address = f"10.250.{numa_node}.2/24"
    pod_cards.give(guest.containerd.directory, pod, _interface(numa_node), address)


def _with_cards(guest: Guest, asks: Mapping[int, Mapping[str, str]]) -> dict[int, Container]:
    """Pods with the network card of a NUMA node each; their containers at one time."""
    together = Barrier(len(asks))

    def create(numa_node: int) -> Container:
        pod = guest.sandbox(f"card-{numa_node}", asks[numa_node], own_network=True)
        _looked_at(guest, pod)
        together.wait(300)
        return guest.container(pod, "main")

    for numa_node in asks:
        _give(guest, f"card-{numa_node}", numa_node)
    with ThreadPoolExecutor(len(asks)) as pool:
        return dict(zip(asks, pool.map(create, asks), strict=True))


def _why(guest: Guest, pod: str, container: str = "main") -> str:
    """What `nri-numa explain` would say of a container, as one text."""

    def ask() -> str:
        status, text = guest.plugin.get(f"/v1/explain/default/{pod}/{container}")
        return text if status == 200 else ""

    return poll(ask, f"explanation of {pod}/{container}")


def _looked_at(guest: Guest, pod: Pod) -> None:
    """Wait until the pod's network interfaces are known, as a container would find out.

    A pod's first container comes seconds after its sandbox on a node that pulls images; here it
    may come before a thread of an emulated machine has had its turn.
    """
    cri = guest.containerd.cri

    def look() -> bool | None:
        name = f"look-{len(os.listdir(pod.log_directory))}"
        container = cri.create(pod, name)
        text = _why(guest, pod.name, name)
        cri.remove(container, stop=False)
        return "were not read yet" not in text or None

    poll(look, f"the network interfaces of {pod.name} looked at", every_s=0.2)
