"""An agent, a runtime's books, and the cgroups that it writes or fails to write.

Files of a cgroup tree stand for the kernel, a world in memory for the runtime; time passes only
when somebody sleeps.
"""

import asyncio
import contextlib
import fcntl
import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.confirmations import Confirmations, WriteTarget
from nri_numa.agent.loop import Clock
from nri_numa.agent.reconcile import Reconciler, RoundResult
from nri_numa.agent.systemd_sync import SystemdSync
from nri_numa.config import AgentConfig
from nri_numa.config.sections import Reconcile
from nri_numa.machine import cgroups
from nri_numa.machine.cgroups import (
    CgroupPlace,
    CgroupReader,
    CgroupWrite,
    CgroupWriter,
    SystemdScopes,
    WriteOutcome,
    cgroup_relative_path,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import Container, ContainerUpdate, PodSandbox
from nri_numa.observe import logs
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.systemd_bus import SystemdBus
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

READ_ONLY = "/cgroup: Read-only file system"


class Writer(CgroupWriter):
    """Writes as the kernel would: a cgroup of version 2 has an effective set too."""

    def __init__(self, tree: CgroupTree, world: World) -> None:
        super().__init__(CgroupReader(str(tree.root)))
        self.tree = tree
        self.problem = ""
        self.world = world
        world.agent.cgroups.writer = self

    def unwritable_cpuset_reason(self, place: CgroupPlace | None = None) -> str:
        return self.problem or super().unwritable_cpuset_reason(place)

    def finish(self) -> None:
        """Wait until the kernel is through with the last write."""
        assert self._last is not None
        self._last.result()

    def write_cpusets(self, wanted: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        """The runtime's books follow, so that they say what is meant."""
        if self.problem:
            return dict.fromkeys(wanted, WriteOutcome(problem=self.problem))
        done = super().write_cpusets(wanted)
        for container_id, (place, cpus, mems) in wanted.items():
            if done[container_id].changed:
                path = cgroup_relative_path(place.cgroups_path)
                self.tree.settle(path)
                self.world.apply([ContainerUpdate(container_id, cpus, mems)])
        return done


class ConfigInForce:
    """The configuration in force, with some keys of the section ``reconcile``."""

    def __init__(self, **keys: Any) -> None:
        self.set_keys(**keys)

    def set_keys(self, **keys: Any) -> None:
        self.config = AgentConfig(reconcile=Reconcile(**keys))


@dataclass
class CgroupBed(Clock):
    """Base of the beds of those who read cgroups back; one container's cgroup is ``/pods/ID``.

    Its time goes on when somebody sleeps.

    Attributes:
        clock: monotonic time in seconds.
        failing: why the runtime takes no push; empty when it does.
        scopes: systemd's view; a systemd that made no scope unless a test has another one.
    """

    tree: CgroupTree
    observe: bool = False
    clock: float = 1000.0
    wall: float = 1_000_000.0
    is_synchronized: bool = True
    over_cri: bool = False
    pushes: list[list[ContainerUpdate]] = field(default_factory=list)
    failing: str = ""
    deaf: bool = False
    before_push: Callable[[], None] = lambda: None
    on_sleep: Callable[[], None] = lambda: None
    in_force: ConfigInForce = field(default_factory=ConfigInForce)
    scopes: SystemdScopes = field(default_factory=lambda: SystemdScopes("/nowhere", "/nowhere"))

    def __post_init__(self) -> None:
        self.world = World(machines.snc_single_no_smt(), observe=self.observe)
        self.world.starts = False
        self.world.synchronize()
        self.timing: Clock = self
        self.output = io.StringIO()
        logs.setup_logging("debug", stream=self.output)

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.clock

    async def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.on_sleep()

    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> str:
        if self.failing or not self.is_synchronized:
            return self.failing or "there is no link"
        self.pushes.append(list(updates))
        self.before_push()
        self.world.apply(updates)
        if not self.deaf:
            for update in updates:
                self.settle(update.container_id)
                if update.cpu_quota is not None:
                    self.tree.limit(f"/pods/{update.container_id}", update.cpu_quota)
        return ""

    @property
    def checks(self) -> Confirmations:
        """What is to be compared."""
        return self.world.agent.cgroups.confirmations[WriteTarget.CGROUP]

    def start_reconciler(self) -> None:
        """Begin to compare, with systemd as it is now."""
        agent = self.world.agent
        agent.current.clock = self.timing
        self.systemd = SystemdSync(agent.current, agent.cgroups, self.scopes)
        self.reconciler = Reconciler(
            agent, self.systemd, self, lambda updates: self.push_updates(updates), self.in_force
        )

    def settle(self, container_id: str) -> None:
        """The runtime writes what its books say into the cgroup."""
        if container_id in self.world.live:
            self.tree.write(f"/pods/{container_id}", *self.world.has(container_id))


@dataclass
class DriftBed(CgroupBed):
    """With what compares cgroups with the node state.

    Attributes:
        aged: whether containers have run for an hour once `run` returns: no check is due.
    """

    aged: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writer = Writer(self.tree, self.world)
        self.start_reconciler()

    def run(self, of: PodSandbox, made: Container | None = None, has: str = "") -> None:
        """Create a container and start it; its cgroup has what was answered, or something else."""
        made = made or container(of)
        made = replace(made, cgroups_path=f"/pods/{made.id}")
        self.world.place(of, made)
        self.settle(made.id)
        self.world.agent.start_container(of, made)
        if has:
            self.tree.write(f"/pods/{made.id}", has)
        self.world.agent.post_start_container(of, made)
        if self.aged:
            for container_id in self.world.live:
                self.settle(container_id)
            self.clock += 3600
            self.checks.take_required(list(self.checks.required_ids()))

    def own(self, name: str = "own", cpus: float = 2) -> None:
        """A pod with exclusive CPUs."""
        of = pod(name, {"cpus": "exclusive"})
        self.run(of, container(of, wants=resources(cpus, 1)))

    def check(self) -> None:
        """Look at the containers for which a check is due."""
        late = tuple(self.checks.required_ids())
        asyncio.run(self.reconciler.reconcile(late))

    def round(self, **keys: float) -> RoundResult:
        """Look at all containers, and tell systemd."""
        self.in_force.set_keys(**keys)
        done = asyncio.run(self.reconciler.reconcile())
        asyncio.run(self.systemd.sync_systemd())
        return done

    def drift(self, container_id: str, cpus: str, mems: str = "") -> None:
        """Somebody else writes a container's cgroup."""
        self.tree.write(f"/pods/{container_id}", cpus, mems)

    def drift_many(self, number: int) -> int:
        """So many containers, all of which have drifted."""
        names = [f"n{i:02}" for i in range(number)]
        for name in names:
            self.run(pod(name, {"numacpu": "1"}))
        for name in names:
            self.drift(f"{name}-app", "0")
        return number

    def scope(self, systemd: SystemdBus, name: str) -> str:
        """Let systemd have made the cgroup of a container, with every CPU; gives its unit."""
        if self.tree.version == 1:
            pytest.skip("systemd has no property of cpusets of version 1")
        unit, slice_ = f"cri-{name}.scope", self.tree.directory("/pods.slice")
        slice_.mkdir(exist_ok=True)
        (slice_ / unit).symlink_to(self.tree.directory(f"/pods/{name}"))
        self.world.agent.containers.cgroup_places[name] = CgroupPlace(f"pods.slice:cri:{name}")
        self.systemd._scopes = systemd.scopes
        systemd.make(unit, AllowedCPUs="0-7", AllowedMemoryNodes="0-1")
        return unit

    def count(self, name: str) -> float:
        return self.world.count(name)

    def has(self, container_id: str) -> str:
        return self.tree.cpus_of(f"/pods/{container_id}")

    def lines(self, event: str) -> list[str]:
        return [line for line in self.output.getvalue().splitlines() if event in line]


@contextlib.contextmanager
def blocked(file: Path) -> Iterator[None]:
    """Whoever opens a file for writing waits meanwhile, as the kernel lets writes of cpusets wait.

    A lease does it; see fcntl(2).
    """
    fd = os.open(file, os.O_RDONLY)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # says that somebody waits
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cgroups, "MAX_WRITE_WAIT_S", 0.5)
            yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(fd)
        signal.signal(signal.SIGIO, before)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> CgroupTree:
    """A cgroup file system of each version, for eight CPUs and two NUMA nodes."""
    return CgroupTree(tmp_path / "cgroup", request.param, CPUSet.parse("0-7"), NUMASet.parse("0-1"))


@pytest.fixture
def real() -> Iterator[Path]:
    """Two cgroups of version 1 on this machine, one in the other, and none of them afterwards."""
    root = Path("/sys/fs/cgroup/cpuset")
    if not (root / "cpuset.cpus").exists():
        pytest.skip("no cpusets of version 1 here")
    if os.geteuid() != 0 or not os.access(root, os.W_OK):
        pytest.skip("only root makes cgroups")
    outer = root / f"nri-numa-test-{os.getpid()}"
    inner = outer / "container"
    try:
        for one in (outer, inner):
            try:
                one.mkdir()
            except OSError as error:
                pytest.skip(f"cgroups cannot be made here: {error}")
            for name in ("cpuset.cpus", "cpuset.mems"):
                (one / name).write_text((root / name).read_text())
        yield inner
    finally:
        for one in (inner, outer):
            if one.is_dir():
                one.rmdir()
