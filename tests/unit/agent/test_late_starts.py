"""Containers that run before they were placed: written at once, measured, and said."""

import asyncio
import subprocess
import time
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from nri_numa.agent.late_starts import LateStarts
from nri_numa.machine.cgroups import CgroupPlace
from tests.beds.cgroup_bed import CgroupBed, Writer
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.world import container, pod, resources

STARTED = 5000.0


@dataclass
class LateStartsBed(CgroupBed):
    """With whom puts late containers right; the wall clock is set by the test."""

    wall: float = STARTED

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writer = Writer(self.tree, self.world)
        self.world.agent.current.clock = self.timing
        self.late = LateStarts(self.world.agent)

    def place(self, name: str, cpus: float = 0, **annotations: str) -> str:
        """A container that was decided about while it was being started."""
        of = pod(name, annotations)
        made = container(of, wants=resources(cpus, 1) if cpus else None)
        path = f"/pods/{made.id}"
        self.tree.write(path)
        self.world.place(of, replace(made, cgroups_path=path))
        return made.id

    def metric(self, name: str) -> float:
        value = self.world.metrics.registry.get_sample_value(name)
        return 0.0 if value is None else value


@pytest.fixture
def bed(tree: CgroupTree) -> LateStartsBed:
    return LateStartsBed(tree)


def test_a_cgroup_that_is_not_as_meant_is_written_at_once(bed: LateStartsBed) -> None:
    one = bed.place("one", numacpu="2")
    bed.wall = STARTED + 0.25
    bed.late.on_start(one, STARTED, None)
    assert bed.tree.cpus_of(f"/pods/{one}") == "2"
    assert bed.late.start_delays == {one: 0.25}
    assert bed.metric("nri_numa_late_start_seconds_count") == 1
    bed.world.stop(one)
    other = bed.place("other", numacpu="2")
    bed.late.on_start(other, STARTED, None)
    assert bed.late.start_delays.keys() == {other}


def test_the_start_that_counts_is_the_process_not_the_runtimes_note(bed: LateStartsBed) -> None:
    """On a busy machine the runtime notes it long after the program's first instruction."""
    one = bed.place("one", numacpu="2")
    waits = ["sh", "-c", "sleep 0.2; echo; exec sleep 1000"]
    with subprocess.Popen(waits, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        bed.world.agent.containers.cgroup_places[one] = CgroupPlace(f"/pods/{one}", process.pid)
        bed.wall = time.time()
        bed.late.on_start(one, bed.wall, None)
        process.kill()
    assert bed.late.start_delays[one] >= 0.2


@pytest.mark.parametrize(("told", "late"), [(STARTED - 1, 0.0), (STARTED + 0.5, 0.5), (None, 0.0)])
def test_a_quick_update_is_in_time(bed: LateStartsBed, told: float | None, late: float) -> None:
    one = bed.place("one", numacpu="2")
    bed.tree.write(f"/pods/{one}", "2")
    bed.wall = STARTED + 9
    bed.late.on_start(one, STARTED, told)
    assert bed.late.start_delays == {one: late}


def test_where_cgroups_cannot_be_written_the_update_is_waited_for(bed: LateStartsBed) -> None:
    one = bed.place("one", numacpu="2")
    bed.writer.problem = "read-only"

    async def wait() -> None:
        bed.late.on_start(one, STARTED, None)
        assert bed.late.start_delays == {}
        bed.late.on_start_update_applied(one, STARTED)
        await asyncio.sleep(0)
        bed.tree.write(f"/pods/{one}", "2")  # the runtime's update arrives
        bed.wall = STARTED + 0.75
        async with asyncio.timeout(180):
            while not bed.late.start_delays:
                await asyncio.sleep(0.005)

    asyncio.run(wait())
    # Seen before the clock was set forward or after it: both are the truth of this test's clock.
    assert bed.late.start_delays[one] in (0.0, 0.75)


def test_one_that_never_gets_right_is_left_to_the_search_for_drift(bed: LateStartsBed) -> None:
    one = bed.place("one", numacpu="2")
    bed.writer.problem = "read-only"
    bed.wall = STARTED + 60

    async def wait() -> None:
        bed.late.on_start_update_applied(one, STARTED)
        await asyncio.sleep(0)
        await bed.late.close()

    asyncio.run(wait())
    assert bed.late.start_delays == {}


def test_who_is_left_alone_is_not_measured(bed: LateStartsBed) -> None:
    one = bed.place("plain")
    bed.late.on_start(one, STARTED, None)
    bed.late.on_start("unknown", STARTED, None)
    bed.late.on_start_update_applied(one, STARTED)
    assert bed.late.start_delays == {}


def test_observing_only_writes_nothing(tree: CgroupTree) -> None:
    bed = LateStartsBed(tree, observe=True)
    one = bed.place("one", numacpu="2")
    before = bed.tree.cpus_of(f"/pods/{one}")
    bed.late.on_start(one, STARTED, None)
    bed.late.on_started_despite_rejection("ns", "pod", "uid", "main", "no")
    assert bed.tree.cpus_of(f"/pods/{one}") == before
    assert bed.metric("nri_numa_rejected_running_total") == 0


@pytest.mark.parametrize(("quota", "left"), [(200_000, 200_000), (300_000, None)])
def test_limits_of_rejected_resizes_stay(bed: LateStartsBed, quota: int, left: int | None) -> None:
    own, plain = bed.place("own", 2, policy="single-numa-node"), bed.place("plain")
    for container_id in (own, plain, "unknown"):
        bed.late.on_rejected_resize_in_force(container_id, quota)
    known = bed.world.agent.current.state.allocations
    assert (known[own].lifted_quota, known[plain].lifted_quota) == (left, None)


def test_a_rejection_that_stops_nothing_is_counted_and_becomes_a_notice(bed: LateStartsBed) -> None:
    bed.late.on_started_despite_rejection("ns", "pod", "uid", "main", "numacpu: no such CPU")
    assert bed.metric("nri_numa_rejected_running_total") == 1
    (notice,) = bed.world.history.notices.notices_after(0)
    assert (notice.notice_kind, notice.reason, notice.pod) == ("unpinned", "RejectedRunning", "pod")
    assert "numacpu: no such CPU" in notice.message
