"""Listed CPUs and memory nodes: exactly these, or a refusal that says why."""

from tests.machines.vm_machine import Machine, format_list
from tests.vm.guest import Guest
from tests.vm.registry import case


def several_memory_nodes(machine: Machine) -> bool:
    """Whether memory can be local or remote at all."""
    return sum(1 for node in machine.numa if node.memory_mib) > 1


@case()
def listed_cpus_and_memory(guest: Guest) -> None:
    """`numacpu` and `numamem` are what the first instruction sees, on each NUMA node."""
    for numa_node in guest.sample(guest.full_nodes()):
        cpus = guest.cpus_of(numa_node)
        # First and last: a list with a gap wherever the NUMA node has three CPUs.
        wanted = frozenset({min(cpus), max(cpus)})
        container = guest.pod(
            f"listed-{numa_node}",
            {"numacpu": format_list(wanted), "numamem": str(numa_node)},
            cpus=len(wanted),  # what is not requested counts for a quota
        )
        guest.pinned(container, cpus=wanted, mems=frozenset({numa_node}))


@case()
def listed_cpus_only(guest: Guest) -> None:
    """`numacpu` alone leaves the memory nodes as they are."""
    cpu = max(guest.online)
    container = guest.pod("cpus-only", {"numacpu": str(cpu)})
    guest.pinned(container, cpus=frozenset({cpu}), mems=guest.memory_nodes)


@case(applies=several_memory_nodes)
def listed_memory_only(guest: Guest) -> None:
    """`numamem` alone leaves the CPUs as they are."""
    numa_node = max(guest.memory_nodes)
    container = guest.pod("mems-only", {"numamem": str(numa_node)})
    guest.pinned(container, cpus=guest.online, mems=frozenset({numa_node}))


@case(applies=lambda machine: bool(machine.offline))
def offline_cpu_rejected(guest: Guest) -> None:
    """A CPU that is switched off is refused as such; its neighbours are served."""
    cpu = min(guest.machine.offline)
    message = guest.rejected("offline-cpu", {"numacpu": str(cpu)})
    guest.mentions(message, "default/offline-cpu", "numacpu", f"'{cpu}'", "offline")
    guest.pinned(guest.pod("neighbour", {"numacpu": "0"}), cpus=frozenset({0}))
