"""CPUs that go and come while containers run."""

from pathlib import Path

from tests.beds.cri import CRIError, poll
from tests.machines.vm_machine import CPU_MODEL, Machine, format_list
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.registry import case

_CGROUPS = Path("/sys/fs/cgroup")


def _has_spare(machine: Machine) -> bool:
    """Whether one NUMA node has three CPUs or more to play with."""
    return any(len(node.cpus & machine.online) >= 2 for node in machine.numa)


def _admitted(guest: Guest, name: str, cpu: int) -> None:
    """Wait until a pod can list a CPU: the plugin looks for new ones every few seconds."""

    def attempt() -> bool | None:
        try:
            container = guest.pod(name, {"numacpu": str(cpu)})
        except CRIError as error:
            guest.notes.append(f"{name}: not yet: {error.message[-160:]}")
            return None
        guest.pinned(container, cpus=frozenset({cpu}))
        return True

    poll(attempt, f"a pod on CPU {cpu}", every_s=3)


def _refused(guest: Guest, name: str, cpu: int, why: str = "offline") -> None:
    """Wait until a pod that lists a CPU is refused."""

    def attempt() -> bool | None:
        try:
            guest.pod(name, {"numacpu": str(cpu)})
        except CRIError as error:
            guest.mentions(error.message, f"default/{name}", "numacpu", why)
            return True
        return None

    poll(attempt, f"a refusal of CPU {cpu}", every_s=3)


@case(applies=_has_spare)
def cpu_offline_and_back(guest: Guest) -> None:
    """A CPU goes offline under running containers and comes back: all are as before."""
    before = guest.online
    numa_node = max(guest.cpu_nodes(), key=lambda i: (len(guest.cpus_of(i)), i))
    cpus = guest.cpus_of(numa_node)
    victim = max(cpus - {0})
    listed = guest.pod("listed", {"numacpu": format_list({min(cpus), victim})}, cpus=2)
    shared = guest.pod("shared")
    aligned = guest.pod("aligned", {"policy": "single-numa-node", "cpus": "shared"})
    was = [words.allowed(guest.pid(each)) for each in (listed, shared, aligned)]
    try:
        words.set_online(victim, online=False)
        assert victim not in guest.online
        # At once, by the kernel: nobody may run on a CPU that is not there.
        for container in (listed, shared, aligned):
            now = words.allowed(guest.pid(container))
            assert victim not in now.cpus or now.cpus & guest.online
            assert guest.containerd.cri.running(container)
        _refused(guest, "too-late", victim)
        for container in (listed, shared, aligned):
            assert guest.containerd.cri.running(container)
        own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=1))
        assert victim not in own.cpus
    finally:
        words.set_online(victim, online=True)
    assert guest.online == before
    _admitted(guest, "again", victim)
    owner_cpus = own.cpus
    guest.settles(listed, cpus=was[0].cpus, mems=was[0].mems)
    guest.settles(shared, cpus=before - owner_cpus)
    guest.settles(aligned, cpus=was[2].cpus - owner_cpus, mems=was[2].mems)


@case(applies=_has_spare, turn=1)
def partition_and_back(guest: Guest) -> None:
    """A cgroup beside the pods takes a CPU for itself and gives it back: so do all containers."""
    before = guest.online
    victim = max(before - {0})
    shared = guest.pod("shared")
    partition = _CGROUPS / "nri-numa-test"
    partition.mkdir()
    try:
        for file, text in (("cpuset.cpus", str(victim)), ("cpuset.cpus.partition", "isolated")):
            (partition / file).write_text(text, encoding="ascii")
        state = (partition / "cpuset.cpus.partition").read_text(encoding="ascii").strip()
        assert state == "isolated", state
        _refused(guest, "too-late", victim, "expected CPUs among")
        guest.settles(shared, cpus=before - {victim})
        own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=1))
        assert victim not in own.cpus
    finally:
        (partition / "cpuset.cpus.partition").write_text("member", encoding="ascii")
        partition.rmdir()
    _admitted(guest, "again", victim)
    guest.settles(shared, cpus=before - own.cpus)


@case(applies=lambda machine: bool(machine.unplugged))
def cpu_plugged(guest: Guest) -> None:
    """A CPU that is plugged into a running machine can be used by the next pod."""
    cpu = min(guest.machine.unplugged)
    socket, core, thread = guest.machine.core_of(cpu)
    message = guest.rejected("too-early", {"numacpu": str(cpu)})
    guest.mentions(message, "default/too-early", "numacpu", f"'{cpu}'")
    shared = guest.pod("shared")
    guest.qemu(
        "device_add",
        driver=f"{CPU_MODEL}-x86_64-cpu",
        id=f"cpu{cpu}",
        **{"socket-id": socket, "core-id": core, "thread-id": thread},
    )
    poll(lambda: cpu in words.present_cpus(), f"CPU {cpu} present")
    words.set_online(cpu, online=True)
    assert cpu in guest.online
    _admitted(guest, "new", cpu)
    guest.settles(shared, cpus=guest.online)
