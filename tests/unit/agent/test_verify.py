"""Neighbours of owners: written at once, and looked at when something else wrote them."""

import asyncio
import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nri_numa.agent.loop import Clock
from nri_numa.engine.assigned import ASSIGNED_KEY
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.workload import Resources
from tests.beds.cgroup_bed import READ_ONLY, DriftBed, blocked
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.link_bed import eventually
from tests.beds.systemd_bus import SystemdBus
from tests.beds.world import PREFIX, container, pod


@pytest.fixture
def bed(tree: CgroupTree) -> DriftBed:
    bed = DriftBed(tree)
    bed.run(pod("plain"))
    bed.check()
    return bed


def test_neighbours_are_written_before_the_answer_and_widened_after_it(bed: DriftBed) -> None:
    for n in range(60):
        bed.run(pod(f"p{n}"))
    ids = ["plain-app", *(f"p{n}-app" for n in range(60))]
    waiting: list[Callable[[], object]] = []
    bed.world.timing.later = waiting.append
    bed.own()
    bed.writer.finish()  # on a busy machine later than the agent waits for it
    assert {bed.has(i) for i in ids} == {"2-7"}
    while waiting:
        waiting.pop(0)()
    assert bed.world.stop("own-app") == ()
    assert {bed.has(i) for i in ids} == {"2-7"}, "not before the answer"
    widened = []
    while waiting:
        waiting.pop(0)()
        bed.writer.finish()
        widened.append(sum(bed.has(i) == "0-7" for i in ids))
        if len(widened) == 1:
            bed.own("next", 1)  # what is meant at that moment counts
            bed.writer.finish()
            assert {bed.has(i) for i in ids} == {"1-7"}
    assert {bed.has(i) for i in ids} == {"1-7"}
    assert widened[0] == 25
    assert bed.count("undelivered_updates_repaired_total") == bed.count("drift_found_total") == 0
    assert bed.pushes == []


def test_what_was_started_elsewhere_is_written_and_counted_as_late(bed: DriftBed) -> None:
    bed.run(pod("listed", {"numacpu": "1"}), has="0-7")
    bed.own()
    bed.check()
    assert bed.has("listed-app") == "1"
    assert bed.count("undelivered_updates_repaired_total") == 1
    assert bed.count("drift_found_total") == 0
    (notice,) = bed.world.history.notices.notices_after()
    assert (notice.notice_kind, notice.pod) == ("undelivered-update", "listed")
    [line] = bed.lines("undelivered update repaired")
    assert "desired 1" in line


def test_a_write_that_the_kernel_holds_up_is_bounded_said_and_read_back(bed: DriftBed) -> None:
    with blocked(bed.tree.directory("/pods/plain-app") / "cpuset.cpus"):
        bed.own()
        assert bed.writer.is_write_held_up
        assert bed.world.sent == [], "the runtime would wait as well"
        bed.check()
    assert bed.count("cgroup_writes_slow_total") == 1
    [line] = bed.lines("cpuset write slow")
    assert "ids=plain-app" in line
    assert "memory" not in line, "nothing says that any moves"
    bed.writer.finish()
    bed.tree.settle("/pods/plain-app")
    bed.check()
    assert bed.has("plain-app") == "2-7"
    assert not bed.world.agent.drift.known


def test_a_neighbour_on_owned_cpus_is_counted_with_its_seconds(bed: DriftBed) -> None:
    bed.own()
    bed.world.agent.cgroups.request_check(["plain-app"])
    bed.tree.write("/pods/plain-app", "0-7")
    bed.wall += 0.25
    bed.check()
    assert bed.count("exclusive_cpu_intrusions_total") == 1
    assert bed.count("exclusive_cpu_intrusion_seconds_total") == pytest.approx(0.25)
    assert bed.count("exclusive_cpu_intruders") == 0


def test_an_update_cannot_bring_back_what_the_runtime_remembers(bed: DriftBed) -> None:
    """It sends its cpuset with any update, which may be what was meant before."""
    bed.own()
    agent, of = bed.world.agent, bed.world.pods["sandbox-plain"]
    made = bed.world.live["plain-app"]
    remembers = replace(made, resources=replace(made.resources, cpus="0-7"))
    answer = agent.update_container(of, remembers, Resources(memory_limit=1 << 30))
    assert answer.container_update.cpus == "2-7"  # type: ignore[union-attr]
    bed.tree.write("/pods/plain-app", "0-7")  # answered before the owner came, written after it
    asyncio.run(bed.reconciler.reconcile(["plain-app"]))
    assert bed.has("plain-app") == "2-7"
    bed.tree.write("/pods/plain-app", "0-7")
    agent.post_update_container("plain-app")
    assert bed.has("plain-app") == "2-7"
    assert bed.count("drift_found_total") == bed.count("undelivered_updates_repaired_total") == 0


def test_after_a_restart_who_was_narrowed_for_a_former_owner_is_widened(bed: DriftBed) -> None:
    """Killed between the answer to a stop and the widening."""
    bed.own()
    bed.world.live["plain-app"] = replace(
        bed.world.live["plain-app"],
        cgroups_path="/pods/plain-app",
        resources=Resources(),  # a runtime that was never told
    )
    del bed.world.live["own-app"], bed.world.pods["sandbox-own"]
    bed.world.boot()
    bed.world.agent.cgroups.writer = bed.writer
    assert bed.world.synchronize() == ()
    assert bed.has("plain-app") == "0-7"


def test_after_a_restart_the_runtime_is_told_of_cpus_it_does_not_know(bed: DriftBed) -> None:
    """Of those alone: what it remembers of who shares is older than their cgroups."""
    bed.own()
    for name in ("own-app", "plain-app"):
        known = bed.world.live[name]
        there = replace(known.resources, cpus="", mems="")
        bed.world.live[name] = replace(known, cgroups_path=f"/pods/{name}", resources=there)
    bed.world.boot()
    bed.world.agent.cgroups.writer = bed.writer
    assert [(u.container_id, u.cpus) for u in bed.world.synchronize()] == [("own-app", "0-1")]


def test_a_foreign_container_that_is_met_at_its_start_is_said_and_marked(bed: DriftBed) -> None:
    """Its creation was lost, and it is pinned to a CPU of an owner."""
    bed.own()
    of = pod("foreign")
    made = replace(container(of, wants=Resources(cpus="0")), cgroups_path="/pods/foreign-app")
    bed.tree.write("/pods/foreign-app", "0")
    bed.world.agent.start_container(of, made)
    assert bed.count("foreign_containers_on_exclusive_cpus") == 1
    mark = bed.writer.reader.read_mark(CgroupPlace("/pods/foreign-app"), f"{PREFIX}{ASSIGNED_KEY}")
    assert json.loads(mark)["kind"] == "foreign"


def test_systemd_has_what_was_written(bed: DriftBed, systemd: SystemdBus) -> None:
    """Or it would write what it has with the next property of the scope."""
    bed.scope(systemd, "plain-app")
    bed.own(cpus=1)
    bed.own("next", cpus=1)
    assert (bed.has("plain-app"), systemd.has("cri-plain-app.scope")) == ("2-7", "0-7")

    async def soon() -> None:
        task = asyncio.create_task(bed.systemd.run_systemd_sync())
        await eventually(lambda: systemd.has("cri-plain-app.scope") == "2-7")
        task.cancel()

    asyncio.run(soon())
    assert len(systemd.calls) == 1, "once for both owners"


def test_where_cgroups_cannot_be_written_the_runtime_is_asked(bed: DriftBed) -> None:
    bed.writer.problem = READ_ONLY
    for _ in range(2):
        bed.own()
        assert bed.world.sent[-1][:2] == ("plain-app", "2-7"), "in the reply"
        bed.tree.write("/pods/plain-app", "0-7")  # it was lost
        bed.world.agent.cgroups.request_check(["plain-app"])
        bed.check()
        assert [u.container_id for u in bed.pushes[-1]] == ["plain-app"]
        assert bed.has("plain-app") == "2-7"
        assert len(bed.world.agent.drift.known) == 0
        assert [u[:2] for u in bed.world.stop("own-app")] == [("plain-app", "0-7")]
    assert len(bed.lines("Read-only file system")) == 1  # said once
    assert bed.world.history.notices.notices_after() == [], "nobody asked for CPUs"
    assert bed.count("undelivered_updates_repaired_total") == 2


def test_what_cannot_be_put_right_is_shown(bed: DriftBed) -> None:
    bed.own()
    bed.writer.problem, bed.failing = READ_ONLY, "not quiet"
    bed.tree.write("/pods/plain-app", "0-7")
    bed.world.agent.cgroups.request_check(["plain-app"])
    bed.check()
    found = bed.world.agent.drift.known["plain-app"]
    assert (str(found.drift.actual.effective_cpus), found.on_exclusive_cpus) == ("0-7", True)
    assert bed.count("exclusive_cpu_intruders") == 1
    assert bed.count("undelivered_updates_repaired_total") == 0
    assert bed.lines("corrections not sent")
    bed.tree.write("/pods/plain-app", "3")  # wrong, and on nobody's CPU
    bed.wall += 2
    asyncio.run(bed.reconciler.reconcile())
    assert not bed.world.agent.drift.known["plain-app"].on_exclusive_cpus
    assert bed.count("exclusive_cpu_intruders") == 0
    assert bed.count("exclusive_cpu_intrusion_seconds_total") > 0
    bed.world.stop("plain-app")
    assert not bed.world.agent.drift.known


def test_a_container_that_goes_meanwhile_is_left_out(bed: DriftBed, tree: CgroupTree) -> None:
    tree.remove("/pods/plain-app")
    bed.own()
    bed.world.agent.cgroups.request_check(["plain-app", "gone"])
    bed.check()
    assert bed.count("undelivered_updates_repaired_total") == 0


def test_containers_being_started_wait_until_they_run(bed: DriftBed) -> None:
    of = pod("slow")
    made = replace(container(of), cgroups_path="/pods/slow-app")
    bed.world.place(of, made)
    bed.own()
    bed.tree.write("/pods/slow-app", "0-7")
    bed.world.agent.cgroups.request_check(["slow-app"])
    bed.check()
    assert bed.has("slow-app") == "0-7"
    assert bed.world.sent[-1][:2] == ("slow-app", "2-7"), "for a start without us"
    bed.world.agent.post_start_container(of, made)
    bed.check()
    assert bed.has("slow-app") == "2-7"


def test_hundreds_of_late_containers_are_said_in_a_few_lines(bed: DriftBed) -> None:
    for n in range(31):
        bed.run(pod(f"p{n}", {"numacpu": "1"}), has="0-7")
    bed.check()
    assert bed.count("undelivered_updates_repaired_total") == 31
    assert len(bed.lines("undelivered update repaired")) == 20
    assert "container_count=11" in bed.lines("more undelivered updates repaired")[0]


@pytest.mark.parametrize("interval", ["1h", "0"])
def test_what_somebody_writes_is_put_right_at_once(bed: DriftBed, interval: str) -> None:
    """Without waiting for the round, which comes in an hour; and not where drift is left alone."""
    bed.world.agent.current.clock = Clock()
    bed.in_force.set_keys(interval=interval)
    bed.own()

    async def scenario() -> None:
        task = asyncio.create_task(bed.reconciler.run_checks())
        await eventually(lambda: not list(bed.checks.required_ids()))
        if interval != "0":
            mistake, bed.reconciler.reconcile = bed.reconciler.reconcile, None  # type: ignore[method-assign]
            bed.tree.write("/pods/plain-app", "0-7")
            await eventually(lambda: bed.count("internal_errors_total") > 0)
            bed.reconciler.reconcile = mistake  # type: ignore[method-assign]
        bed.tree.write("/pods/plain-app", "0-7")
        if interval != "0":
            await eventually(lambda: bed.has("plain-app") == "2-7")
        else:
            bed.run(pod("listed", {"numacpu": "3"}), has="0-7")
            await eventually(lambda: bed.has("listed-app") == "3")
            assert bed.has("plain-app") == "0-7"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert bed.count("drift_repaired_total") == (interval != "0")
