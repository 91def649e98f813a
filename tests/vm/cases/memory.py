"""Where the pages really are: numa_maps, and the memory controller's cpuset at its limit."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.beds.containerd import copy_crun
from tests.beds.cri import Container, CRIError, Pod, Resources, poll
from tests.beds.daemonset import AgentContainer, pod_spec
from tests.beds.images import IMAGE
from tests.beds.vm_records import ROOM_SECONDS
from tests.machines.vm_machine import Machine
from tests.vm import words
from tests.vm.cases.churn import processors
from tests.vm.cases.listed_cpus import several_memory_nodes
from tests.vm.guest import Guest
from tests.vm.plugin import PodPlugin, UnitPlugin
from tests.vm.registry import case, skip
from tests.vm.scopes import systemd_agrees

_MIB = 1024 * 1024
TOUCHED_MIB = 64
_BALANCING = Path("/proc/sys/kernel/numa_balancing")
_MOVED_MIB = 112
"""More than the mover leaves to the kernel."""


def touch(mib: int) -> tuple[str, ...]:
    """A command that touches memory and then stays: dd fills its buffer and waits to write it."""
    return (
        "/bin/sh",
        "-c",
        f"echo ready; dd if=/dev/zero bs={mib}M count=1 2>/dev/null | sleep 1000000",
    )


def _toucher(guest: Guest, container: Container, mib: int) -> int:
    """The process that holds the memory, once it has touched all of it."""

    def look() -> int | None:
        for pid in words.cgroup_pids(guest.pid(container)):
            try:
                if sum(words.anonymous_memory(pid).values()) >= mib * _MIB:
                    return pid
            except (FileNotFoundError, ProcessLookupError):
                continue
        return None

    return poll(look, f"{mib} MiB touched in {container.pod.name}", every_s=0.5)


def touched_pages(guest: Guest, container: Container) -> dict[int, int]:
    """Bytes by NUMA node of a container that runs `touch` with `TOUCHED_MIB`."""
    found = words.anonymous_memory(_toucher(guest, container, TOUCHED_MIB))
    text = ", ".join(f"node {i}: {size // _MIB} MiB" for i, size in sorted(found.items()))
    guest.notes.append(f"{container.pod.name}: {text}")
    return found


@case()
def memory_is_local(guest: Guest) -> None:
    """All of 64 MiB that a `single-numa-node` container touches lies on its own NUMA node."""
    container = guest.pod(
        "local", {"policy": "single-numa-node"}, memory_mib=128, command=touch(TOUCHED_MIB)
    )
    seen = words.allowed(guest.pid(container))
    (numa_node,) = guest.nodes_of(seen.cpus)
    assert seen.mems == {numa_node}
    assert set(touched_pages(guest, container)) == {numa_node}


@case(applies=several_memory_nodes)
def memory_follows_the_list(guest: Guest) -> None:
    """`numamem` puts every page there, on each memory node of the machine, near the CPUs or far."""
    cpu = str(min(guest.online))
    for numa_node in guest.sample(guest.memory_nodes):
        container = guest.pod(
            f"pages-{numa_node}",
            {"numacpu": cpu, "numamem": str(numa_node)},
            memory_mib=96,
            command=touch(TOUCHED_MIB),
        )
        assert set(touched_pages(guest, container)) == {numa_node}
        guest.containerd.cri.remove_pod(container.pod)


_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238}


def _migrate(pid: int, source: int, target: int) -> None:
    """Move a process's memory between NUMA nodes, as migratepages(8) does."""
    one = ctypes.c_ulong
    done = ctypes.CDLL(None, use_errno=True).syscall(
        one(_MIGRATE_PAGES[platform.machine()]),
        pid,
        one(8 * ctypes.sizeof(one) + 1),
        ctypes.byref(one(1 << source)),
        ctypes.byref(one(1 << target)),
    )
    assert done >= 0, os.strerror(ctypes.get_errno())


@case(applies=several_memory_nodes)
def moved_memory_shows(guest: Guest) -> None:
    """Memory that somebody moves to another NUMA node is local no longer, by what the API says."""
    container = guest.pod(
        "moved", {"policy": "single-numa-node"}, memory_mib=128, command=touch(TOUCHED_MIB)
    )
    pid = _toucher(guest, container, TOUCHED_MIB)
    (home,) = words.allowed(guest.pid(container)).mems
    away = max(guest.memory_nodes - {home}, key=lambda i: (words.numa_memory(i, "MemFree"), i))

    def local() -> float:
        """Percent; not a number, which compares with none, while it is not known."""
        (use,) = guest.plugin.json("/v1/use/default/moved/main")["containers"]
        guest.notes.append(f"local: {use['localPercent']} % {use['memoryByNUMANode']}")
        percent = use["localPercent"]
        return float("nan") if percent is None else float(percent)

    # The kernel adds up what a cgroup has every two seconds.
    poll(lambda: local() > 90, "memory told as local", every_s=1)
    _migrate(pid, home, away)
    poll(lambda: local() < 50, "memory told as moved", every_s=1)


def _small_node(machine: Machine) -> int | None:
    """A NUMA node other than the first whose memory can be used up without hurting the guest."""
    nodes = [i for i, node in enumerate(machine.numa) if i and 0 < node.memory_mib <= 768]
    return min(nodes, key=lambda i: (machine.numa[i].memory_mib, i), default=None)


@case(applies=lambda machine: _small_node(machine) is not None)
def memory_limit_is_the_node(guest: Guest) -> None:
    """A container cannot take more than its NUMA node has, though its neighbours have room."""
    numa_node = _small_node(guest.machine)
    assert numa_node is not None
    wanted = words.numa_memory(numa_node) // _MIB + 32
    room = sum(
        words.numa_memory(i, "MemFree") // _MIB for i in guest.memory_nodes if i != numa_node
    )
    if room < wanted:
        skip(f"only {room} MiB free on the other NUMA nodes, {wanted} MiB needed")

    def touched(name: str, **asks: str) -> int:
        """Exit code of a program that touches so much."""
        container = guest.pod(
            name,
            asks,
            # No memory limit: what stops it is the cpuset. The score makes it the first victim.
            resources=Resources(shares=102, oom_score_adj=1000),
            command=("/bin/dd", "if=/dev/zero", "of=/dev/null", f"bs={wanted}M", "count=1"),
        )
        poll(lambda: not guest.containerd.cri.running(container), f"end of {name}", every_s=0.5)
        code = guest.containerd.cri.status(container).status.exit_code
        guest.notes.append(f"{name}: touching {wanted} MiB: exit code {code}")
        return int(code)

    glutton = touched("glutton", numacpu=str(min(guest.online)), numamem=str(numa_node))
    assert glutton == 137, "killed by SIGKILL"
    # The same program without a pin gets its memory: the node was the limit, not the machine.
    assert touched("free") == 0


@case(applies=lambda machine: any(not node.cpus for node in machine.numa))
def memory_only_node_is_not_for_everybody(guest: Guest) -> None:
    """A computed assignment takes no memory from a NUMA node without CPUs unless configured."""
    without = {i for i, node in enumerate(guest.machine.numa) if not node.cpus}
    for count in range(len(guest.cpu_nodes()) + 1):
        asks = {"policy": "best-effort", "cpus": "exclusive"}
        seen = guest.pinned(guest.pod(f"computed-{count}", asks, cpus=1))
        assert not seen.mems & without


def _roomy(machine: Machine) -> bool:
    """Whether two NUMA nodes have eight CPUs each, and memory."""
    two = len(machine.numa) == 2
    return two and all(len(n.cpus & machine.online) >= 8 and n.memory_mib for n in machine.numa)


_PROCESSES = multiprocessing.get_context("fork")


class _Watched:
    """Processes that own CPUs. One of its own reads every 5 ms that no CPU has two owners.

    A thread would not do: each system call of either would wait until the emulator turns to the
    processor of the other.
    """

    def __init__(self) -> None:
        self.owners = _PROCESSES.RawArray("q", 32)
        self.rounds = _PROCESSES.RawValue("q", 0)
        self.over = _PROCESSES.RawValue("b", 0)
        self.wrong, self._report = _PROCESSES.Pipe(duplex=False)

    def add(self, pid: int, only: int = 0) -> None:
        """Watch a process, with the only CPUs that it may have as bits, or 0 for any."""
        at = list(self.owners[::2]).index(0)
        self.owners[2 * at + 1] = only
        self.owners[2 * at] = pid

    def remove(self, pid: int) -> None:
        """What it has may be another's from now on."""
        self.owners[2 * list(self.owners[::2]).index(pid)] = 0
        self._next()

    def _next(self) -> None:
        after = self.rounds.value + 2
        poll(lambda: self.rounds.value >= after, "two rounds of the watcher", every_s=0.01)

    def run(self) -> None:
        files = dict[int, int]()
        while not self.over.value:
            time.sleep(0.005)
            every, owners = 0, list(self.owners)
            for pid, only in zip(owners[::2], owners[1::2], strict=True):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                    if pid and pid not in files:
                        files[pid] = os.open(f"/proc/{pid}/status", os.O_RDONLY)
                    text = os.pread(files[pid], 8192, 0) if pid else b""
                    at = text.index(b"\nCpus_allowed:\t") + 15
                    cpus = int(text[at : text.index(b"\n", at)].replace(b",", b""), 16)
                    if cpus != (only or cpus) or cpus & every:
                        self._report.send(f"{cpus:x}, others {every:x}, its own {only:x}")
                    every |= cpus
            self.rounds.value += 1


@contextlib.contextmanager
def _watched(guest: Guest) -> Iterator[_Watched]:
    """Insist that no CPU has two owners."""
    watched = _Watched()
    watching, began = _PROCESSES.Process(target=watched.run), time.monotonic()
    watching.start()
    try:
        yield watched
    finally:
        watched.over.value = 1
        watching.join()
    every, count = time.monotonic() - began, watched.rounds.value
    guest.notes.append(f"CPUs of owners read {count} times, every {1000 * every / count:.1f} ms")
    assert watching.exitcode == 0
    assert not watched.wrong.poll(), watched.wrong.recv()


def _arrives(pid: int, away: int) -> dict[int, int]:
    """Wait until the memory of a process is on one NUMA node."""

    def arrived() -> dict[int, int] | None:
        # A task has its new memory nodes before the kernel has moved the last pages.
        found = words.anonymous_memory(pid)
        there = found.get(away, 0) >= 0.99 * sum(found.values()) > 0
        return found if there and words.allowed(pid).mems == {away} else None

    return poll(arrived, "memory of the mover", timeout_s=400, every_s=0.2)


_NO_ROUNDS = {"reconcile": {"interval": "1h"}}
"""What systemd has is right by the moves themselves."""


def _moves_memory(guest: Guest, **more: object) -> None:
    """Have an agent that can; on Linux 6.1 nothing moves with NUMA balancing."""
    guest.plugin.terminate()
    _BALANCING.write_text("0")
    if isinstance(guest.plugin, UnitPlugin):
        guest.plugin.drop_in("annotations.md")
        more = _NO_ROUNDS | more
    guest.plugin.directory.mkdir(parents=True, exist_ok=True)
    guest.plugin.write_config(more)
    guest.plugin.start()


_SECONDS = float(os.environ.get(ROOM_SECONDS) or 0)
_SINGLE = {"policy": "single-numa-node"}
_MOVABLE = _SINGLE | {"movable": "true"}


@case(applies=_roomy, system=True, limit_s=900)
def room_is_made(guest: Guest) -> None:
    """A movable container and its memory change NUMA nodes, so that another one has room."""
    _moves_memory(guest)
    _room_is_made(guest)


_PROGRAM: Final = {"/usr": "/usr", "/lib": "/usr/lib", "/lib64": "/usr/lib64", "/opt": "/opt"}
"""Where the interpreter and the checkout are in the guest, by path in the container."""


@case(
    applies=lambda machine: _roomy(machine) and bool(machine.system),
    system=True,
    plugin=False,
    limit_s=900,
)
def room_is_made_by_the_chart(guest: Guest) -> None:
    """The same by the container that the chart makes with ``movesMemory`` and our profile."""
    guest.plugin.terminate()
    _BALANCING.write_text("0")
    unit, config = guest.plugin, Path("/run/agent-config")
    config.mkdir(exist_ok=True)
    (config / "agent.yaml").write_text(json.dumps(_NO_ROUNDS))
    agent = AgentContainer(
        guest.containerd.cri,
        pod_spec("seccomp", "moves-memory"),
        {"config": config, "nri": guest.containerd.nri_socket.parent},
        image=IMAGE,
        command=["/usr/local/bin/nri-numa"],
        mounts=_PROGRAM,
    )
    guest.plugin = PodPlugin(config, guest.containerd.nri_socket, unit.log_file)
    try:
        started = agent.run()
        guest.plugin.wait_ready(timeout_s=150)
        status = Path(f"/proc/{guest.containerd.cri.pid(started)}/status").read_text()
        guest.notes += re.findall("^(?:CapEff|Seccomp|NoNewPrivs):.*", status, re.MULTILINE)
        assert "\nSeccomp:\t2\n" in status
        _room_is_made(guest)
        systemd_agrees(guest)
    finally:
        guest.notes += agent.log().splitlines()[-40:]
        guest.plugin = unit


def _room_is_made(guest: Guest) -> None:
    movers = {
        guest.pid(made): _toucher(guest, made, _MOVED_MIB)
        for made in (
            guest.pod(
                name,
                _MOVABLE,
                cpus=2,
                memory_mib=_MOVED_MIB + 32,
                command=touch(_MOVED_MIB),
                user=1000,  # as most programs in containers: root is another user to them
            )
            for name in ("mover-a", "mover-b")
        )
    }
    homes = {pid: next(iter(words.allowed(pid).mems)) for pid in movers}
    assert sorted(homes.values()) == [0, 1], "each on a NUMA node, so that neither has 7 CPUs free"
    with _watched(guest) as watched:
        for pid in movers:
            watched.add(pid)
        newcomer = _newcomer(guest, guest.sandbox("newcomer", _SINGLE), "main", 7, watched)
        (numa_node,) = guest.pinned(newcomer).mems
        (mover,) = (pid for pid, home in homes.items() if home == numa_node)
        away = 1 - numa_node
        assert guest.nodes_of(words.allowed(mover).cpus) == {away}
        free = {i: words.numa_memory(i, "MemFree") // _MIB for i in (0, 1)}
        guest.notes.append(f"during: {words.anonymous_memory(movers[mover])}, MiB free: {free}")
        guest.notes.append(f"afterwards: {_arrives(movers[mover], away)}")
        assert guest.plugin.metric("nri_numa_container_moves_total") >= 1
        counted = guest.plugin.metric("nri_numa_memory_migrated_bytes_total")
        assert counted >= 0.9 * _MOVED_MIB * _MIB, f"{counted / _MIB:.1f} MiB were moved in steps"


@case(
    applies=lambda machine: _SECONDS > 0 and _roomy(machine),
    system=True,
    runtime=False,
    plugin=False,
    limit_s=int(_SECONDS) + 900,
)
def room_is_made_again(guest: Guest) -> None:
    """Of three random containers the first and the last need a movable one to move, every time.

    The containers are started by crun in two pods that stay, and the runtime keeps to three CPUs:
    what is asked is how often room is made, and an emulated CPU takes a second for a program in Go.
    """
    guest.containerd.stop()
    usual = guest.containerd.binaries
    guest.containerd.binaries = replace(usual, runc=copy_crun(usual.directory))
    try:
        with processors(3):
            guest.containerd.start(timeout_s=150)
        _moves_memory(guest, podReservationTimeout="0")
        _again_and_again(guest)
    finally:
        guest.reset()
        guest.containerd.stop()
        guest.containerd.binaries = usual


@case(applies=lambda machine: _SECONDS > 0 and _roomy(machine), system=True, limit_s=900)
def work_goes_on(guest: Guest) -> None:
    """A container that writes all of its memory works while that moves."""
    _moves_memory(guest)
    command = ("/bin/dd", "if=/dev/zero", "of=/dev/null", f"bs={_MOVED_MIB}M")
    guest.pod("beside", _SINGLE, cpus=2)  # it has the other NUMA node
    busy = guest.pod("busy", _MOVABLE, cpus=3, memory_mib=_MOVED_MIB + 32, command=command)
    pid = guest.pid(busy)
    poll(lambda: words.anonymous_memory(pid), "memory of the busy one", timeout_s=90, every_s=0.5)
    figures = []

    def measured(what: str, action: Callable[[], object]) -> None:
        def done() -> int:
            return int(Path(f"/proc/{pid}/io").read_text().split()[1]) // (_MOVED_MIB * _MIB)

        began, before = time.monotonic(), done()
        action()
        seconds = time.monotonic() - began
        figures.append(f"{what} {(done() - before) / seconds:.2f} in {seconds:.1f} s")

    home = next(iter(words.allowed(pid).mems))
    measured("alone", lambda: time.sleep(15))
    pod = guest.sandbox("newcomer", _SINGLE)
    measured("a container starts", lambda: _newcomer(guest, pod, "main", 7))
    measured("its memory moves", lambda: _arrives(pid, 1 - home))
    measured("afterwards", lambda: time.sleep(15))
    guest.notes.append(f"iterations a second, {_MOVED_MIB} MiB each: {', '.join(figures)}")
    guest.plugin.write_config({})


def _newcomer(
    guest: Guest, pod: Pod, name: str, cpus: int, watched: _Watched | None = None
) -> Container:
    """A container that others make room for; made again, as the kubelet does, if that took long."""
    while True:
        try:
            made = guest.container(pod, name, cpus=cpus)
            break
        except CRIError as error:
            if "a write of cpusets takes longer than" not in error.message:
                raise
            guest.notes.append(f"{name}: refused once, a write of cpusets took long")
    if watched is not None:
        watched.add(guest.pid(made), sum(1 << cpu for cpu in guest.first(made).cpus))
    return made


def _again_and_again(guest: Guest) -> None:
    cri, chance, creations, made, local = guest.containerd.cri, random.Random(7), 0, 0, 1.0
    pids = dict[str, int]()
    movers = dict[int, int]()  # the process that holds the memory, by the container's first one
    for name in ("mover-a", "mover-b"):
        mib = chance.randrange(8, 17)
        mover = guest.pod(name, _MOVABLE, cpus=2, memory_mib=48, command=touch(mib))
        movers[guest.pid(mover)] = _toucher(guest, mover, mib)
    pods = [guest.sandbox(name, _SINGLE) for name in ("a", "b")]

    def homes() -> dict[int, int]:
        return {pid: next(iter(words.allowed(pid).mems)) for pid in movers}

    def create(pod: Pod, cpus: int, moves: int) -> Container:
        nonlocal creations, made, local
        before, creations, made = homes(), creations + 1, made + moves
        new = _newcomer(guest, pod, f"n{creations}", cpus)
        first = guest.first(new).cpus
        pids[new.id] = guest.pid(new)
        watched.add(pids[new.id], sum(1 << cpu for cpu in first))
        (numa_node,) = guest.nodes_of(first)
        away = {
            pid: guest.nodes_of(words.allowed(pid).cpus)
            for pid, home in before.items()
            if guest.nodes_of(words.allowed(pid).cpus) != {home}
        }
        assert list(away.values()) == moves * [{1 - numa_node}], (before, away, numa_node)
        for pid in away:
            found = _arrives(movers[pid], 1 - numa_node)
            local = min(local, found[1 - numa_node] / sum(found.values()))
        return new

    def remove(new: Container) -> None:
        watched.remove(pids.pop(new.id))
        cri.remove(new)

    moves = guest.plugin.metric("nri_numa_container_moves_total")
    with _watched(guest) as watched:
        for pid in movers:
            watched.add(pid)
        assert sorted(homes().values()) == [0, 1]
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            remove(create(pods[0], 7, 1))  # both movers are on one NUMA node then
            sizes = chance.choice(((5, 5), (5, 6), (6, 5)))  # one CPU has to be left for others
            both = [create(pod, sizes[moves], moves) for moves, pod in enumerate(pods)]
            for new in chance.sample(both, 2):
                remove(new)
            guest.notes[:] = [
                f"{creations} containers created, for {made} of them room was made, "
                f"at least {100 * local:.2f} % of a mover's memory where it moved to"
            ]
            print(*guest.notes, flush=True)
    moves = guest.plugin.metric("nri_numa_container_moves_total") - moves
    guest.notes.append(f"moves counted: {moves:.0f}")
    assert moves == made
