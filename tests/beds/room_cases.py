"""Containers that move to make room for others."""

import asyncio
import re
from collections.abc import Callable, Iterator

import pytest

from nri_numa.agent.memory_migration import MemoryMigrator
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.machine.migration import MigrationStep
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from tests.beds.world import GIB, StillClock, World, container, pod, resources

SINGLE = {"policy": "single-numa-node", "cpus": "exclusive"}
MOVABLE = {"movable": "true"}
BOOTED = 1e6
"""Seconds that it was before."""
MIB = 1 << 20
A_AND_B = (("a", 3, 2, {}), ("b", 4, 1, {}))
"""On a NUMA node each: 8 CPUs, of which 5 and 4 are free then."""


def movable_world(
    *there: tuple[str, float, float, dict[str, str]], moves: int = 2, **more: object
) -> World:
    """A node where movable pods make room: two NUMA nodes of eight CPUs and 16 GiB."""
    world = World(machine(2, 8), Settings(rebalance_moves=moves, reservation_seconds=600.0), **more)  # type: ignore[arg-type]
    world.agent.containers.moves_memory = True
    for name, cpus, memory, wishes in there:
        world.put(name, SINGLE | MOVABLE | wishes, cpus, memory)
    return world


def create_new(world: World, cpus: float = 6, memory: float = 1) -> Admitted | Rejected | None:
    of = pod("new", SINGLE)
    return world.create(of, container(of, wants=resources(cpus, memory)))


class SteppingClock(StillClock):
    """Waiting takes the time that it takes; nothing is read a second time."""

    passed = BOOTED

    def monotonic(self) -> float:
        return self.passed

    async def sleep(self, seconds: float) -> None:
        if seconds > 1:
            await asyncio.Event().wait()
        self.passed += seconds


def migrated_notices(
    world: World, clock: SteppingClock, migrate: Callable[..., Iterator[MigrationStep]]
) -> list[str]:
    """A hundred looks of the mover, whose pages move as ``migrate`` says; what is noted of them."""

    async def live() -> None:
        world.agent.current.clock = clock
        mover = MemoryMigrator(world.agent)
        world.agent.containers.moves_memory = True
        work = asyncio.create_task(mover.run_migrations())
        for _ in range(100):
            world.agent.current.notify()
            await asyncio.sleep(0.002)
            clock.passed += 2.0
        work.cancel()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nri_numa.agent.memory_migration.migrate_pages", migrate)
        asyncio.run(live())
    messages = [n.message for n in world.history.notices.notices_after()]
    assert all(float(s) < BOOTED for text in messages for s in re.findall(r" in (\S+) s", text))
    return [text.rpartition(" in ")[0] for text in messages]


def machine(nodes: int, cores: int, threads: int = 1, gib: int = 16, pages: int = 0) -> Topology:
    return build_synthetic_topology(
        sockets=nodes, numa_per_socket=1, cores_per_numa=cores, threads=threads, memory_gib=gib,
        hugepages={GIB: pages * GIB} if pages else None,
    )  # fmt: skip
