"""Drift: found in real files, written, and not fought for ever; or left to the runtime."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent import cgroup_updates, reconcile
from nri_numa.agent.reconcile import PUSH_BATCH, RoundResult
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter, SystemdScopes
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import Container, ContainerUpdate, PodSandbox, QoSClass
from tests.beds.cgroup_bed import READ_ONLY, CgroupBed, DriftBed, Writer
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.systemd_bus import SystemdBus
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

BUSY = "the runtime is busy"


@dataclass
class ReconcilerBed(DriftBed):
    """Looked at now and then; all containers have run for an hour."""

    aged: bool = True

    def listed_drifts(self) -> None:
        self.drift("listed-app", "0-7", "0")

    def stuck(self) -> None:
        """A container has drifted, and nobody can put it right."""
        self.writer.problem, self.failing = READ_ONLY, BUSY
        self.listed_drifts()

    def counts(self) -> tuple[float, float, float]:
        found, repaired, abandoned = (
            self.count(f"drift_{what}_total") for what in ("found", "repaired", "repairs_abandoned")
        )
        return found, repaired, abandoned

    @property
    def log(self) -> str:
        return "\n".join(self.lines("component=reconcile"))


@pytest.fixture
def bed(tree: CgroupTree) -> ReconcilerBed:
    bed = ReconcilerBed(tree)
    bed.run(pod("free", qos=QoSClass.BEST_EFFORT))
    listed = pod("listed", {"numacpu": "1", "numamem": "0"})
    bed.run(listed, container(listed, wants=resources(1)))
    own = pod("owner", {"policy": "single-numa-node"})
    bed.run(own, container(own, wants=resources(2, 1)))
    return bed


def test_cgroups_that_cannot_be_written_are_said_at_the_start(tree: CgroupTree) -> None:
    (tree.base / "cgroup.procs").mkdir()  # root may write all but a directory
    assert f"problem={tree.base}/cgroup.procs: Is a directory" in ReconcilerBed(tree).log.replace(
        '"', ""
    )


def test_a_cgroup_that_is_just_being_made_is_no_drift(bed: ReconcilerBed) -> None:
    """The OCI runtime makes the cgroup first and writes the cpuset into it later."""
    of = pod("new", {"numacpu": "2"})
    made = replace(container(of, wants=resources(1)), cgroups_path="/pods/new-app")
    bed.world.place(of, made)
    bed.drift("new-app", "", "")
    assert bed.round() == RoundResult(cgroup_count=3)
    bed.world.agent.start_container(of, made)
    assert bed.round() == RoundResult(cgroup_count=3)
    assert bed.counts() == (0, 0, 0)
    bed.world.agent.post_start_container(of, made)
    bed.round()
    assert bed.tree.cpus_of("/pods/new-app") == "2"
    assert bed.counts() == (0, 0, 0), "it is late"


def test_a_quota_that_was_lifted_and_is_back_is_drift(bed: ReconcilerBed) -> None:
    """Whoever owns CPUs would be throttled on them, and every cpuset looks right."""
    bed.tree.limit("/pods/owner-app", -1)
    bed.tree.limit("/pods/listed-app", 50_000)  # its own limit, which nobody lifted
    assert bed.round() == RoundResult(cgroup_count=3)
    bed.tree.limit("/pods/owner-app", 200_000)
    done = bed.round()
    assert done == RoundResult(cgroup_count=3, drifted=("owner-app",), repaired=("owner-app",))
    ((update,),) = bed.pushes
    assert update == ContainerUpdate("owner-app", cpu_quota=-1, cpu_period=100_000)
    assert "the CFS quota is 200000 µs, desired none" in bed.log
    assert bed.round() == RoundResult(cgroup_count=3)
    assert bed.counts() == (1, 1, 0)


def test_drift_is_found_repaired_read_back_counted_and_said(bed: ReconcilerBed) -> None:
    bed.drift("listed-app", "0-7", "0-1")
    assert bed.round() == RoundResult(
        cgroup_count=3, drifted=("listed-app",), repaired=("listed-app",)
    )
    assert bed.tree.cpus_of("/pods/listed-app") == "1"
    assert bed.tree.mems_of("/pods/listed-app") == "0"
    assert bed.counts() == (1, 1, 0)
    found, repaired = bed.log.splitlines()
    assert "level=warning" in found
    assert "pod=default/listed container=app" in found
    assert "cpuset.cpus is 0-7, desired 1" in found
    assert "repairable=true" in found
    assert "drift repaired" in repaired
    assert bed.round() == RoundResult(cgroup_count=3)


def test_many_are_pushed_in_pieces(bed: ReconcilerBed) -> None:
    number = bed.drift_many(PUSH_BATCH + 5)
    bed.writer.problem = READ_ONLY
    assert len(bed.round().repaired) == number
    assert [len(push) for push in bed.pushes] == [PUSH_BATCH, 5]


def test_a_thousand_drifts_are_not_a_thousand_lines(bed: ReconcilerBed) -> None:
    number = bed.drift_many(reconcile.MAX_CONTAINER_LINES_PER_ROUND + 7)
    assert len(bed.round().repaired) == number
    assert bed.counts() == (number, number, 0)
    assert bed.log.count('msg="drift found"') == reconcile.MAX_CONTAINER_LINES_PER_ROUND
    assert bed.log.count("container_count=7") == 2, "found and repaired"


def test_somebody_who_keeps_rewriting_is_reported_and_not_fought(bed: ReconcilerBed) -> None:
    def again() -> RoundResult:
        bed.listed_drifts()
        return bed.round(max_repairs=3)

    for _ in range(3):
        assert again().repaired == ("listed-app",)
    for _ in range(4):
        assert again() == RoundResult(
            cgroup_count=3, drifted=("listed-app",), abandoned=("listed-app",)
        )
    assert bed.counts() == (4, 3, 1)
    assert bed.log.count("another program keeps rewriting") == 1
    notices = bed.world.history.notices.notices_after()
    assert [(n.notice_kind, n.reason, n.pod, n.count) for n in notices] == [
        ("drift", "", "listed", 4),
        ("drift", "RepairsAbandoned", "listed", 1),
    ]
    assert differing(bed) == {"listed-app": ("desired 1, actual 0-7", True, True)}
    assert bed.world.agent.drift.known["listed-app"].observed_at == bed.wall
    bed.settle("listed-app")  # somebody else ends it
    assert bed.round(max_repairs=3) == RoundResult(cgroup_count=3)
    assert differing(bed) == {}
    bed.clock += 600
    assert again().repaired == ("listed-app",), "the window has passed"
    assert bed.counts() == (5, 4, 1)


@pytest.mark.parametrize(
    ("most", "steps"),
    [
        (2, [(0, "repaired"), (400, "repaired"), (300, "repaired"), (0, "given up")]),
        (2, [(0, "repaired"), (400, "repaired"), (300, ""), (0, "repaired"), (0, "given up")]),
        (1, [(0, "repaired"), (700, ""), (0, "repaired")]),
        (3, [(0, "repaired"), (700, "failed"), (0, ""), (0, "repaired")]),
    ],
    ids=["the first is longer ago", "a moment of peace", "right for a window", "one that fails"],
)
def test_only_repairs_within_the_window_count(
    bed: ReconcilerBed, most: int, steps: list[tuple[float, str]]
) -> None:
    for seconds, outcome in steps:
        bed.clock += seconds
        bed.failing = BUSY if outcome == "failed" else ""
        bed.writer.problem = READ_ONLY if bed.failing else ""
        bed.listed_drifts() if outcome else bed.settle("listed-app")
        done = bed.round(max_repairs=most)
        assert (done.drifted, done.repaired, done.abandoned) == tuple(
            ("listed-app",) * (outcome in of)
            for of in (("repaired", "given up", "failed"), ("repaired",), ("given up",))
        )


def test_of_a_push_that_fails_on_the_way_the_rest_is_told(bed: ReconcilerBed) -> None:
    bed.drift_many(PUSH_BATCH + 5)
    bed.writer.problem = READ_ONLY

    def dies() -> None:
        bed.failing = "the runtime died"

    bed.before_push = dies
    assert len(bed.round().repaired) == PUSH_BATCH
    assert "container_count=5" in bed.log


def test_containers_are_named_with_the_short_id_that_crictl_shows(bed: ReconcilerBed) -> None:
    of = pod("long")
    bed.run(of, container(of, id="0123456789abcdef"))
    bed.drift("0123456789abcdef", "0")
    assert bed.round().repaired == ("0123456789abcdef",)
    assert [line.count("id=0123456789ab ") for line in bed.log.splitlines()] == [1, 1]


def test_a_fight_with_one_is_no_reason_to_leave_others_alone(bed: ReconcilerBed) -> None:
    for _ in range(2):
        bed.listed_drifts()
        bed.round(max_repairs=1)
    bed.listed_drifts()
    bed.drift("free-app", "0-7")
    result = bed.round(max_repairs=1)
    assert result.abandoned == ("listed-app",)
    assert result.repaired == ("free-app",)


def test_a_runtime_that_takes_the_update_and_does_nothing_is_noticed(bed: ReconcilerBed) -> None:
    bed.writer.problem, bed.deaf = READ_ONLY, True
    bed.listed_drifts()
    for _ in range(5):
        assert bed.round(max_repairs=3) == RoundResult(cgroup_count=3, drifted=("listed-app",))
    assert bed.counts() == (1, 0, 0)
    assert bed.log.count("the runtime accepted the update, but the cgroup did not change") == 1
    bed.deaf = False
    assert bed.round(max_repairs=3).repaired == ("listed-app",)


@dataclass
class KernelBed(CgroupBed):
    """A cgroup of the kernel's version 1, and a runtime that does nothing."""

    tree: Any
    failing: str = "nobody is asked"

    def __post_init__(self) -> None:
        if (self.tree / "cpuset.cpus").read_text().strip() != "0-1":
            pytest.skip("made for a machine of two CPUs")
        super().__post_init__()
        self.world = World(machines.single_no_smt(cores_per_numa=2))
        self.world.synchronize()
        self.world.starts = False
        self.world.agent.cgroups.writer = CgroupWriter(CgroupReader())
        self.start_reconciler()

    def place(self, of: PodSandbox, made: Container | None = None) -> None:
        path = "/none" if made else f"/{self.tree.relative_to('/sys/fs/cgroup/cpuset')}"
        made = replace(made or container(of), cgroups_path=path)
        self.world.place(of, made)
        self.world.agent.post_start_container(of, made)
        self.clock += 3600
        self.checks.take_required(list(self.checks.required_ids()))

    def drifts(self, name: str, said: str) -> None:
        """Round after round: found, named, not counted as repaired, and nobody blamed."""
        for _ in range(5):
            assert asyncio.run(self.reconciler.reconcile()) == RoundResult(
                cgroup_count=1, drifted=(name,)
            )
        counts = self.world.metrics.registry.get_sample_value
        assert counts("nri_numa_drift_repaired_total") == 0
        assert counts("nri_numa_drift_repairs_abandoned_total") == 0
        assert "keeps rewriting" not in self.output.getvalue()
        assert self.output.getvalue().count(said) == 1
        assert said in self.world.agent.drift.known[name].difference_text
        assert said in self.world.history.notices.notices_after()[-1].message

    def repairs(self, name: str) -> None:
        assert asyncio.run(self.reconciler.reconcile()).repaired == (name,)


def test_a_cgroup_above_that_was_narrowed_is_named_and_repair_follows_it(real: Path) -> None:
    bed = KernelBed(real)
    bed.place(pod("listed", {"numacpu": "1"}))
    for directory in (real, real.parent):
        (directory / "cpuset.cpus").write_text("0")
    bed.drifts("listed-app", f"the cgroup above, {real.parent.name}, has cpuset.cpus 0")
    (real.parent / "cpuset.cpus").write_text("0-1")
    bed.repairs("listed-app")
    assert (real / "cpuset.cpus").read_text().strip() == "1"


def test_a_nested_cgroup_that_has_more_is_named_and_repair_follows_it(real: Path) -> None:
    bed = KernelBed(real)
    bed.place(pod("free", qos=QoSClass.BEST_EFFORT))
    nested = real / "nested"
    nested.mkdir()
    try:
        for name in ("cpuset.cpus", "cpuset.mems"):
            (nested / name).write_text((real / name).read_text())
        own = pod("owner", {"cpus": "exclusive"})
        bed.place(own, container(own, wants=resources(1)))
        bed.drifts("free-app", f"{real.name}/nested, has cpuset.cpus 0-1")
        assert bed.world.agent.drift.known["free-app"].on_exclusive_cpus
    finally:
        nested.rmdir()
    bed.repairs("free-app")
    assert (real / "cpuset.cpus").read_text().strip() == bed.world.has("free-app")[0]


def test_a_failed_push_is_said_and_retried_not_fought(bed: ReconcilerBed, tree: CgroupTree) -> None:
    bed.stuck()
    for _ in range(5):
        assert bed.round(max_repairs=1) == RoundResult(cgroup_count=3, drifted=("listed-app",))
    assert BUSY in bed.log
    assert bed.counts() == (1, 0, 0), "the same drift is counted once"
    assert differing(bed) == {"listed-app": ("desired 1, actual 0-7", True, False)}
    bed.settle("listed-app")  # somebody else ends it
    assert bed.round() == RoundResult(cgroup_count=3)
    bed.listed_drifts()
    assert bed.round().drifted == ("listed-app",)
    assert bed.counts() == (2, 0, 0), "a second time it is news"
    if tree.version == 2:
        tree.write("/pods/listed-app", "1", "0", above="3")
        bed.round()
        assert differing(bed) == {"listed-app": ("desired 1, actual 3", False, False)}
        bed.listed_drifts()
    bed.failing = ""
    assert bed.round(max_repairs=1).repaired == ("listed-app",)


def test_a_container_that_is_gone_is_no_drift(bed: ReconcilerBed) -> None:
    bed.tree.remove("/pods/listed-app")
    assert bed.round() == RoundResult(cgroup_count=2)
    bed.drift("owner-app", "0")

    bed.world.stop("owner-app")
    bed.tree.remove("/pods/owner-app")
    assert bed.round().drifted == ()


def test_without_the_runtime_cgroups_are_written_where_that_is_wanted(bed: ReconcilerBed) -> None:
    bed.is_synchronized = False
    bed.drift("listed-app", "0-7", "0-1")
    assert bed.round().repaired == ()
    assert bed.counts() == (1, 0, 0)
    done = bed.round(repair_without_runtime=True)
    assert (done.drifted, done.repaired) == (("listed-app",), ("listed-app",))
    assert bed.pushes == []
    assert bed.tree.cpus_of("/pods/listed-app") == "1"
    assert bed.counts() == (1, 1, 0)


def test_a_limit_that_only_the_runtime_can_write_waits_for_it(bed: ReconcilerBed) -> None:
    bed.is_synchronized = False
    bed.tree.limit("/pods/owner-app", 200_000)
    assert bed.round(repair_without_runtime=True).repaired == ()
    assert "there is no link" in bed.log
    bed.is_synchronized = True
    assert bed.round(repair_without_runtime=True).repaired == ("owner-app",)


def test_what_a_parent_cgroup_takes_is_reported_once(bed: ReconcilerBed, tree: CgroupTree) -> None:
    if tree.version == 1:
        pytest.skip("on version 1 the kernel shrinks the list itself")
    tree.write("/pods/listed-app", "1", "0", above="2-3")
    for _ in range(3):
        assert bed.round().drifted == ("listed-app",)
    assert bed.pushes == []
    assert bed.counts() == (1, 0, 0)
    assert "a parent cgroup leaves 2-3 of it" in bed.log
    assert "repairable=false" in bed.log


def test_observe_reports_and_touches_nothing(tree: CgroupTree) -> None:
    bed = ReconcilerBed(tree, observe=True)
    listed = pod("listed", {"numacpu": "1", "numamem": "0"})
    bed.run(listed, container(listed, wants=resources(1)))
    for _ in range(2):
        assert bed.round().drifted == ("listed-app",)
    assert bed.pushes == []
    assert bed.counts() == (1, 0, 0)
    assert "observe=true" in bed.log
    assert bed.world.history.notices.notices_after() == []
    assert differing(bed) == {
        "listed-app": ("desired 1, actual 0-7; memory nodes: desired 0, actual 0-1", False, False)
    }


def differing(bed: ReconcilerBed) -> dict[str, tuple[str, bool, bool]]:
    """By container: both sides, whether it disturbs an owner, and whether it was given up."""
    known = bed.world.agent.drift.known
    return {
        i: (one.difference_text, one.on_exclusive_cpus, one.repairs_abandoned)
        for i, one in known.items()
    }


def test_a_difference_is_shown_until_it_is_repaired(bed: ReconcilerBed) -> None:
    bed.writer.problem = READ_ONLY
    shown: list[dict[str, tuple[str, bool, bool]]] = []
    bed.before_push = lambda: shown.append(differing(bed))
    bed.drift("free-app", "0-7")
    bed.drift("listed-app", "1", "0-1")
    assert bed.round().repaired == ("free-app", "listed-app")
    pool = str(bed.world.has("free-app")[0])
    assert shown == [
        {
            "free-app": (f"desired {pool}, actual 0-7", True, False),
            "listed-app": ("memory nodes: desired 0, actual 0-1", False, False),
        }
    ]
    assert differing(bed) == {}
    assert bed.count("exclusive_cpu_intrusions_total") == 1


def test_seconds_on_owned_cpus_are_counted_while_they_pass(bed: ReconcilerBed) -> None:
    """Not when the overlap ends: it may last for hours."""
    started, bed.wall = bed.clock, bed.wall + 3600  # nobody is young
    started_wall = bed.wall
    bed.world.agent.drift.accumulate_seconds()
    bed.writer.problem, bed.failing = READ_ONLY, BUSY
    bed.drift("free-app", "0-7")
    counted: dict[float, float] = {}

    def tick() -> None:
        bed.wall = started_wall + bed.clock - started
        counted[round(bed.clock - started)] = bed.count("exclusive_cpu_intrusion_seconds_total")
        if bed.clock >= started + 60:
            raise asyncio.CancelledError

    bed.on_sleep = tick
    bed.in_force.set_keys(interval="5s")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bed.reconciler.run_periodic_rounds())
    assert counted[20] >= 10
    assert counted[60] - counted[20] == pytest.approx(40)
    bed.settle("free-app")
    bed.on_sleep = lambda: None
    bed.round()
    ended = bed.count("exclusive_cpu_intrusion_seconds_total")
    bed.wall += 100
    bed.world.agent.drift.accumulate_seconds()
    assert bed.count("exclusive_cpu_intrusion_seconds_total") == ended


def test_what_is_shown_never_changes_under_the_one_who_reads_it(bed: ReconcilerBed) -> None:
    bed.stuck()
    bed.round()
    read = bed.world.agent.drift.known
    bed.world.stop("listed-app")
    assert list(read) == ["listed-app"]
    assert not bed.world.agent.drift.known


def test_before_the_runtime_has_told_what_runs_nothing_is_judged(bed: ReconcilerBed) -> None:
    bed.listed_drifts()
    bed.world.agent.current.synchronized = False
    assert bed.round() == RoundResult()


def test_cgroups_that_go_and_return_are_said_once(bed: ReconcilerBed, tree: CgroupTree) -> None:
    hidden = tree.root.with_name("hidden")
    tree.root.rename(hidden)
    for _ in range(3):
        assert bed.round() == RoundResult()
    assert bed.log.count("drift check suspended") == 1
    hidden.rename(tree.root)
    assert bed.round() == RoundResult(cgroup_count=3)
    assert bed.log.count("drift check resumed") == 1


def test_the_wrong_root_is_said_after_a_few_rounds(bed: ReconcilerBed) -> None:
    for container_id in bed.world.live:
        bed.tree.remove(f"/pods/{container_id}")
    said: list[int] = []
    for _ in range(5):
        assert bed.round() == RoundResult(cgroup_count=0)
        said.append(bed.log.count("none of 3 containers has a cgroup below"))
    assert said == [0, 0, 1, 1, 1]


def test_a_node_without_containers_is_quiet(tree: CgroupTree) -> None:
    bed = ReconcilerBed(tree)
    for _ in range(5):
        assert bed.round() == RoundResult()
    assert bed.log == ""


def test_cpus_the_kernel_took_from_an_unbound_container_come_back(bed: ReconcilerBed) -> None:
    """On version 1 an offline CPU leaves every cpuset and does not return by itself."""
    bed.world.stop("owner-app")
    for container_id in bed.world.live:
        bed.settle(container_id)
    bed.clock += 3600
    bed.drift("free-app", "0-6")  # it lived while the pool was narrow: ours to widen again
    assert bed.round().repaired == ("free-app",)
    assert bed.tree.cpus_of("/pods/free-app") == "0-7"


@pytest.mark.parametrize("cut", range(5))
def test_a_plan_interrupted_anywhere_is_finished_by_the_next_round(
    bed: ReconcilerBed, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime takes the first few updates of a push and then dies."""
    for name in ("x", "y"):
        bed.run(pod(name, {"numacpu": "3"}))
    drifted = ["free-app", "listed-app", "x-app", "y-app"]
    for container_id in drifted:
        bed.drift(container_id, "0-7")

    bed.writer.problem = READ_ONLY

    async def dying(updates: Sequence[ContainerUpdate]) -> str:
        await ReconcilerBed.push_updates(bed, updates[:cut])
        return "the runtime died"

    monkeypatch.setattr(bed, "push_updates", dying)
    assert bed.round().repaired == ()
    monkeypatch.undo()
    assert len(bed.round().repaired) == len(drifted) - cut
    for container_id in drifted:
        wanted = bed.world.has(container_id)[0]
        assert bed.tree.cpus_of(f"/pods/{container_id}") == wanted
    assert bed.round() == RoundResult(cgroup_count=5)


def test_the_task_keeps_its_interval_and_survives_a_mistake(bed: ReconcilerBed) -> None:
    bed.in_force.set_keys(interval="1s")
    rounds: list[float] = []
    started = bed.clock

    def tick() -> None:
        if bed.clock >= started + 4:
            bed.in_force.set_keys(interval="5s")
        if bed.clock >= started + 30:
            bed.in_force.set_keys(interval="0")  # reloaded: off
        if bed.clock >= started + 100:
            raise asyncio.CancelledError

    bed.on_sleep = tick

    async def mistaken(targets: object) -> RoundResult:
        rounds.append(bed.clock - started)
        raise RuntimeError("a mistake")

    bed.reconciler.reconcile = mistaken  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bed.reconciler.run_periodic_rounds())
    assert rounds == [1, 2, 3, 8, 13, 18, 23, 28]
    assert bed.count("internal_errors_total") == len(rounds)
    assert bed.log.count("a mistake") >= len(rounds)


def test_a_look_holds_the_interpreter_for_a_batch_at_a_time(bed: ReconcilerBed) -> None:
    """Between batches the thread pauses, however many containers there are."""
    pauses: list[float] = []
    agent = bed.world.agent
    places = [
        (f"{k}{i}", place) for i in range(30) for k, place in agent.containers.cgroup_places.items()
    ]
    found = cgroup_updates.observe_cgroups(
        bed.writer.reader, agent.current.desired, places, pauses.append
    )
    assert found.cgroup_count == 90
    assert len(pauses) == 90 // cgroup_updates.READ_BATCH


@pytest.fixture
def scope(bed: ReconcilerBed, systemd: SystemdBus) -> str:
    """The container "listed" is in a scope, which systemd has made with every CPU."""
    return bed.scope(systemd, "listed-app")


def test_what_systemd_has_is_compared_in_each_round_and_repaired_with_the_cgroup(
    bed: ReconcilerBed, systemd: SystemdBus, scope: str
) -> None:
    assert bed.round() == RoundResult(cgroup_count=3)
    assert systemd.has(scope) == "1"
    assert bed.counts() == (0, 0, 0)
    systemd.make(scope, AllowedCPUs="0-7", AllowedMemoryNodes="0-1")
    bed.drift("listed-app", "0-7", "0-1")
    assert bed.round().repaired == ("listed-app",)
    assert (systemd.has(scope), systemd.has(scope, "AllowedMemoryNodes")) == ("1", "0")


@dataclass
class CrunScope:
    """The container "owner" as crun with the systemd driver made it while no agent ran.

    Scope and inner cgroup are limited. An update of crun changes the inner cgroup alone, and only
    with a period; systemd changes the scope.
    """

    bed: ReconcilerBed
    systemd: SystemdBus
    unit: str = ""

    def __post_init__(self) -> None:
        self.unit = self.bed.scope(self.systemd, "owner-app")
        self.bed.tree.write("/pods/owner-app/container", *self.bed.world.has("owner-app"))
        self.limit("", 100_000)
        self.limit("/container", 100_000)
        self.systemd.put(self.unit, "CPUQuota", "200%")
        self.bed.deaf = True
        self.bed.before_push = self.update
        self.systemd.on_call = self.set_properties

    def limit(self, child: str, quota: int, period: int = 50_000) -> None:
        text = f"{'max' if quota < 0 else quota} {period}\n"
        (self.bed.tree.directory(f"/pods/owner-app{child}") / "cpu.max").write_text(text)

    def update(self) -> None:
        for update in self.bed.pushes[-1]:
            if update.cpu_quota and update.cpu_period:
                self.limit("/container", update.cpu_quota, update.cpu_period)

    def set_properties(self, values: dict[str, str]) -> None:
        if values.get("CPUQuotaPerSecUSec") == "":
            self.limit("", -1, 100_000)


def test_a_cpu_limit_is_lifted_in_cgroup_and_scope(bed: ReconcilerBed, systemd: SystemdBus) -> None:
    scope = CrunScope(bed, systemd)
    done = bed.round()
    assert (done.drifted, done.repaired) == (("owner-app",), ("owner-app",))
    ((update,),) = bed.pushes
    assert update == ContainerUpdate("owner-app", cpu_quota=-1, cpu_period=50_000)
    assert systemd.has(scope.unit, "CPUQuota") == ""
    assert bed.round() == RoundResult(cgroup_count=3)
    assert bed.counts() == (1, 1, 0)


def test_a_scope_that_keeps_its_cpu_limit_is_drift(bed: ReconcilerBed, systemd: SystemdBus) -> None:
    scope = CrunScope(bed, systemd)
    systemd.refusing = "Unit is frozen"
    done = bed.round()
    assert (done.drifted, done.repaired) == (("owner-app",), ())
    assert "the CFS quota is 100000 µs, desired none" in bed.log
    assert "Unit is frozen" in bed.log
    systemd.refusing = ""
    assert bed.round().repaired == ("owner-app",)
    assert systemd.has(scope.unit, "CPUQuota") == ""


def test_a_resize_leaves_no_limit_on_the_scope(bed: ReconcilerBed, systemd: SystemdBus) -> None:
    """The runtime applies the answer to an update to crun's cgroup alone."""
    scope = CrunScope(bed, systemd)
    scope.limit("/container", -1)
    bed.world.agent.post_update_container("owner-app")
    asyncio.run(bed.systemd.sync_systemd())
    assert systemd.has(scope.unit, "CPUQuota") == ""
    assert bed.round() == RoundResult(cgroup_count=3)


def test_systemd_restoring_is_no_fight(bed: ReconcilerBed, systemd: SystemdBus, scope: str) -> None:
    systemd.refusing = "Unit is frozen"
    bed.round()
    for _ in range(5):
        bed.drift("listed-app", "0-7", "0-1")  # a property of the scope was set
        assert bed.round(max_repairs=1) == RoundResult(cgroup_count=3, drifted=("listed-app",))
        assert bed.tree.cpus_of("/pods/listed-app") == "1"
    assert bed.counts()[1:] == (0, 0)
    assert bed.round() == RoundResult(cgroup_count=3)
    assert bed.log.count("systemd scopes differ from cgroups") == 1
    assert "Unit is frozen" in bed.log
    systemd.refusing = ""
    bed.round()
    assert "systemd scopes equal to cgroups again" in bed.log
    assert systemd.has(scope) == "1"


def test_a_systemd_that_does_not_answer_is_asked_once_in_a_look(
    bed: ReconcilerBed, systemd: SystemdBus, scope: str
) -> None:
    bed.systemd._scopes = SystemdScopes(str(systemd.transient), "/nowhere")
    bed.round()
    assert "no answer over D-Bus: No such file or directory" in bed.log
    bed.systemd._scopes, welcome = systemd.scopes, systemd.welcome
    bed.round()
    assert systemd.has(scope) == "1"
    systemd.make(scope, AllowedCPUs="0-7")
    systemd.welcome = b"REJECTED EXTERNAL\r\n"
    bed.round()
    assert "no answer over D-Bus: " in bed.log.rpartition("systemd scopes differ from cgroups")[2]
    systemd.welcome = welcome
    bed.round()
    assert systemd.has(scope) == "1"


def test_systemd_hears_nothing_of_those_left_alone(bed: ReconcilerBed, systemd: SystemdBus) -> None:
    """Nothing is told of the container of others, nor while the agent observes."""
    of = pod("foreign")
    bed.run(of, container(of, wants=replace(resources(1, 1), cpus="7")))
    for name in ("foreign-app", "listed-app"):
        bed.scope(systemd, name)
    bed.world.agent.current.observe = True
    bed.round()
    assert systemd.calls == []
    bed.world.agent.current.observe = False
    bed.round()
    assert [unit for unit, _ in systemd.calls] == ["cri-listed-app.scope"]


@pytest.mark.parametrize("when", ["before it is told", "while it writes"])
def test_what_systemd_hears_late_undoes_nothing(
    bed: ReconcilerBed, systemd: SystemdBus, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A CPU of an owner is back before systemd has what the owner had without it."""
    unit, whole = bed.scope(systemd, "owner-app"), bed.world.topology
    own = bed.world.has("owner-app")[0]
    bed.world.becomes(replace(whole, online=whole.online - CPUSet([max(CPUSet.parse(own))])))
    (less,) = {bed.tree.cpus_of("/pods/owner-app")}
    changes = [whole]

    def back() -> None:
        if changes:
            bed.world.becomes(changes.pop())

    def writes(lists: dict[str, str]) -> None:
        back()
        bed.tree.write("/pods/owner-app", lists["AllowedCPUs"], lists["AllowedMemoryNodes"])

    systemd.on_call = writes
    if when == "before it is told":
        observe = CgroupReader.read_actual_cgroup
        monkeypatch.setattr(
            CgroupReader, "read_actual_cgroup", lambda *place: (observe(*place), back())[0]
        )
    asyncio.run(bed.systemd.sync_systemd())
    assert systemd.has(unit) == own.replace(",", " ")
    assert bed.tree.cpus_of("/pods/owner-app") == own != less
    told = [lists["AllowedCPUs"] for _, lists in systemd.calls]
    assert told == ([own] if when == "before it is told" else [less, own])
    assert bed.round() == RoundResult(cgroup_count=3)


def test_systemd_hears_of_moved_memory(bed: ReconcilerBed, systemd: SystemdBus, scope: str) -> None:
    """Without a round; not before: it would have the kernel move everything in one go."""
    agent, before = bed.world.agent, bed.world.allocation("listed-app")
    there = replace(before, mems=NUMASet([0, 1]), migrating_from=NUMASet([1]))
    agent.current.state = agent.current.state.without_allocation("listed-app").with_allocation(
        there
    )
    bed.tree.write("/pods/listed-app", "1", "0-1")
    wanted = agent.finish_migration("listed-app")
    bed.world.agent.cgroups.queue_systemd_sync(["listed-app"])
    asyncio.run(bed.systemd.sync_systemd())
    assert systemd.calls == []
    bed.writer.write_cgroup(wanted)
    agent.post_update_container("listed-app")
    asyncio.run(bed.systemd.sync_systemd())
    assert systemd.has(scope, "AllowedMemoryNodes") == "0"


def test_a_new_process_tells_systemd_what_the_one_before_did_not(
    bed: ReconcilerBed, systemd: SystemdBus, scope: str
) -> None:
    """It was killed; all cgroups are right, and nothing is persisted."""
    world, places = bed.world, dict(bed.world.agent.containers.cgroup_places)
    world.boot()
    bed.writer = Writer(bed.tree, world)
    bed.scopes = systemd.scopes
    bed.start_reconciler()
    for container_id, place in places.items():
        made = world.live[container_id]
        world.live[container_id] = replace(made, cgroups_path=place.cgroups_path)
    world.synchronize()
    asyncio.run(bed.systemd.sync_systemd())
    assert systemd.has(scope) == "1"


def test_systemd_hears_of_writes_at_a_start(bed: ReconcilerBed, systemd: SystemdBus) -> None:
    """Without a round: the owner came between the neighbour's creation and its start."""
    of = pod("new", qos=QoSClass.BEST_EFFORT)
    made = replace(container(of), cgroups_path="pods.slice:cri:new-app")
    bed.world.place(of, made)
    bed.tree.write("/pods/new-app", bed.world.has("new-app")[0])
    unit = bed.scope(systemd, "new-app")
    bed.own("next", 1)
    bed.world.agent.start_container(of, made)
    asyncio.run(bed.systemd.sync_systemd())
    bed.world.agent.post_start_container(of, made)
    asyncio.run(bed.systemd.sync_systemd())
    has = bed.world.live["free-app"].resources.cpus
    assert (bed.tree.cpus_of("/pods/new-app"), systemd.has(unit)) == (has, has.replace(",", " "))
