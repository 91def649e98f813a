"""The guest is the machine its document describes, and a container runs on it without a plugin."""

from collections import Counter

from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.registry import case

_MIB = 1024 * 1024
_PCI_CLASSES = {
    "e1000e": "0x020000",
    "igb": "0x020000",
    "virtio-net-pci": "0x020000",
    "virtio-rng-pci": "0x00ff00",
    "nvme": "0x010802",
}


@case(plugin=False)
def machine_as_described(guest: Guest) -> None:
    """The kernel finds the NUMA nodes, CPUs, memory and distances of the machine's document."""
    machine = guest.machine
    assert words.numa_nodes() == set(range(len(machine.numa)))
    assert words.online_cpus() == machine.online
    assert words.present_cpus() == machine.present
    assert words.nohz_full_cpus() == machine.nohz_full
    for i, node in enumerate(machine.numa):
        assert words.numa_cpus(i) == node.cpus & machine.online, f"CPUs of NUMA node {i}"
        assert words.numa_distances(i) == machine.distances[i], f"distances of NUMA node {i}"
        memory = words.numa_memory(i) / _MIB
        # The kernel itself takes some, mostly for its page tables, and more of the first node.
        assert node.memory_mib * 0.8 - 128 <= memory <= node.memory_mib, (
            f"NUMA node {i} has {memory:.0f} MiB, expected about {node.memory_mib}"
        )
    for cpu in sorted(machine.online):
        assert words.package(cpu) == machine.core_of(cpu)[0], f"socket of CPU {cpu}"
        assert words.siblings(cpu) == machine.siblings(cpu) & machine.online, (
            f"thread siblings of CPU {cpu}"
        )
    guest.notes.append(f"{len(machine.numa)} NUMA nodes, {len(machine.online)} CPUs online")


@case(plugin=False, applies=lambda machine: bool(machine.pci))
def devices_as_described(guest: Guest) -> None:
    """The kernel places the PCI devices on the NUMA nodes of the machine's document."""
    expected = Counter((d.numa_node, _PCI_CLASSES[d.device]) for d in guest.machine.pci)
    # Class 0x060400 is the port in front of the device.
    found = Counter(
        (numa_node, kind)
        for numa_node, kind in words.pci_devices().values()
        if numa_node >= 0 and kind != "0x060400"
    )
    assert found == expected


@case(plugin=False)
def container_without_plugin(guest: Guest) -> None:
    """Without a plugin a container may use every online CPU and every memory node: the control."""
    container = guest.pod("plain", {"numacpu": "0", "numamem": "0"})
    with_memory = {i for i, node in enumerate(guest.machine.numa) if node.memory_mib}
    guest.pinned(container, cpus=guest.machine.online, mems=frozenset(with_memory))
    version = guest.containerd.cri.version()
    guest.notes.append(version)
    expected = f"containerd {guest.machine.containerd}."
    assert version.startswith(expected)
