"""The Topology Manager's policies and exclusive CPUs, admitted and refused."""

from tests.beds.cri import guaranteed
from tests.machines.vm_machine import Machine, format_list
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.registry import case, skip

_MIB = 1024 * 1024


def several_cpu_nodes(machine: Machine) -> bool:
    """Whether CPUs are on more than one NUMA node."""
    return sum(1 for node in machine.numa if node.cpus & machine.online) > 1


def smt(machine: Machine) -> bool:
    """Whether cores have two threads."""
    return machine.threads > 1


def _own(policy: str) -> dict[str, str]:
    return {"policy": policy, "cpus": "exclusive"}


def _shared(policy: str) -> dict[str, str]:
    return {"policy": policy, "cpus": "shared"}


@case()
def single_numa_node_admitted(guest: Guest) -> None:
    """`single-numa-node` binds a shared container to the CPUs and the memory of one NUMA node."""
    seen = guest.pinned(guest.pod("single", _shared("single-numa-node"), cpus=1))
    (numa_node,) = guest.nodes_of(seen.cpus)
    assert seen.mems == {numa_node}
    assert seen.cpus == guest.cpus_of(numa_node), "shared: all CPUs of the NUMA node"


@case()
def single_numa_node_exclusive(guest: Guest) -> None:
    """`single-numa-node` with exclusive CPUs: all from one NUMA node, memory beside them."""
    wanted = 2
    seen = guest.pinned(guest.pod("own", _own("single-numa-node"), cpus=wanted))
    assert len(seen.cpus) == wanted
    assert seen.mems == guest.nodes_of(seen.cpus)


@case(applies=several_cpu_nodes)
def restricted_admitted(guest: Guest) -> None:
    """`restricted` admits a request that needs two NUMA nodes on any day, and takes close ones."""
    wanted = guest.largest_node() + 1
    if wanted >= len(guest.online):
        skip("the machine is too small")
    # CPUs only: a little memory would want one NUMA node, and the two wishes cannot both be met.
    asks = _own("restricted") | {"bind": "cpu"}
    seen = guest.pinned(guest.pod("wide", asks, cpus=wanted), mems=guest.memory_nodes)
    assert len(seen.cpus) == wanted
    guest.narrowest_and_closest(guest.nodes_of(seen.cpus), wanted)


@case()
def exclusive_leaves_the_shared(guest: Guest) -> None:
    """Exclusive CPUs leave a running shared container at once and come back with the pod's end."""
    shared = guest.pod("shared")
    guest.pinned(shared, cpus=guest.online)
    owner = guest.pod("owner", {"cpus": "exclusive"}, cpus=2)
    own = guest.pinned(owner).cpus
    assert len(own) == 2
    guest.now(shared, cpus=guest.online - own)
    late = guest.pod("late")
    guest.pinned(late, cpus=guest.online - own)
    message = guest.rejected("thief", {"numacpu": str(min(own))})
    guest.mentions(message, "default/thief", "default/owner/main")
    guest.containerd.cri.remove_pod(owner.pod)
    guest.settles(shared, cpus=guest.online)
    guest.settles(late, cpus=guest.online)


@case(applies=smt, system=True, turn=1)
def exclusive_spreads_over_cores(guest: Guest) -> None:
    """By default an owner gets no two threads of one core while whole cores are free."""
    own = guest.pinned(guest.pod("spread", {"cpus": "exclusive"}, cpus=2)).cpus
    assert len({guest.machine.siblings(cpu) for cpu in own}) == 2


@case(applies=smt, system=True, turn=1)
def full_cores(guest: Guest) -> None:
    """`smt: full-core` gives both threads of each core and refuses an odd number."""
    asks = {"cpus": "exclusive", "smt": "full-core"}
    own = guest.pinned(guest.pod("cores", asks, cpus=2)).cpus
    assert own == guest.machine.siblings(min(own))
    half = {cpu for cpu in guest.online if words.siblings(cpu) == {cpu}}
    if half:
        # A core whose other thread is switched off is a whole core of one CPU.
        (cpu,) = guest.pinned(guest.pod("half", asks, cpus=1)).cpus
        assert cpu in half
        return
    message = guest.rejected("odd", asks, cpus=1)
    guest.mentions(message, "default/odd", "full-core")


@case(applies=smt, system=True, turn=1)
def isolated_cores(guest: Guest) -> None:
    """`smt: isolate` gives one thread per core, and nobody gets the other one."""
    shared = guest.pod("shared")
    own = guest.pinned(guest.pod("alone", {"cpus": "exclusive", "smt": "isolate"}, cpus=2)).cpus
    cores = {guest.machine.siblings(cpu) for cpu in own}
    assert len(cores) == 2
    guest.now(shared, cpus=guest.online - frozenset().union(*cores))


@case()
def exclusive_resized(guest: Guest) -> None:
    """An owner that grows keeps what it has and gets more; what it gives up is everybody's."""
    shared = guest.pod("shared")
    owner = guest.pod("owner", {"cpus": "exclusive"}, cpus=1)
    small = words.allowed(guest.pid(owner)).cpus
    assert len(small) == 1
    guest.containerd.cri.update(owner, guaranteed(2, 64 * _MIB))
    large = words.allowed(guest.pid(owner)).cpus
    assert len(large) == 2
    assert small <= large
    guest.settles(shared, cpus=guest.online - large)
    guest.containerd.cri.update(owner, guaranteed(1, 64 * _MIB))
    left = words.allowed(guest.pid(owner)).cpus
    assert len(left) == 1
    assert left <= large
    guest.settles(shared, cpus=guest.online - left)


@case(applies=lambda machine: bool(machine.nohz_full))
def ticks_decide(guest: Guest) -> None:
    """CPUs without a timer tick are shown, and taken first or last as the configuration says."""
    without = guest.machine.nohz_full
    assert guest.plugin.json("/v1/topology")["cpus"]["nohzFull"] == format_list(without)
    for wish, among in (("prefer", without), ("avoid", guest.online - without)):
        guest.reconfigure({"nohzFullCPUs": wish})
        seen = guest.pinned(guest.pod(f"ticks-{wish}", _own("best-effort"), cpus=2))
        assert len(seen.cpus) == 2
        assert seen.cpus <= among, f"{wish}: CPUs {format_list(seen.cpus)}"
        guest.reset()
    guest.reconfigure({})
