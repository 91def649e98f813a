"""Drift: found in real files, repaired through the runtime, read back, and not fought for ever.

Files of a cgroup tree stand for the kernel, a world in memory for the runtime; time passes only
when somebody sleeps.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from nri_numa import logs, reconcile
from nri_numa.cgroups import CgroupReader
from nri_numa.config import AgentConfig
from nri_numa.config.model import Reconcile
from nri_numa.engine.answers import ContainerUpdate
from nri_numa.engine.workload import Container, PodSandbox, QoSClass
from nri_numa.reconcile import CHUNK, Reconciler, Round
from nri_numa.topology.cpuset import CPUSet, NUMASet
from nri_numa.topology.synthetic import synthetic
from tests.support.cgroup_tree import CgroupTree
from tests.support.world import World, container, pod, resources


@dataclass
class Result:
    """What became of a push."""

    ok: bool = True
    detail: str = ""


@dataclass
class Bed:
    """An agent, a runtime's books, and the cgroups of its containers."""

    tree: CgroupTree
    observe: bool = False
    clock: float = 1000.0
    wall: float = 1_000_000.0
    pushes: list[list[ContainerUpdate]] = field(default_factory=list)
    active: bool = True
    failing: str = ""
    deaf: bool = False
    before_push: Callable[[], None] = lambda: None
    on_sleep: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        topology = synthetic(sockets=1, numa_per_socket=2, cores_per_numa=4, threads=1)
        self.world = World(topology, observe=self.observe)
        self.world.synchronize()
        self.output = io.StringIO()
        logs.setup("info", stream=self.output)
        self.reconciler = Reconciler(
            self.world.agent,
            self.world.metrics,
            self.push,
            reader=CgroupReader(str(self.tree.root)),
            active=lambda: self.active,
            now=lambda: self.clock,
            wall=lambda: self.wall,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.on_sleep()

    async def push(self, updates: Sequence[ContainerUpdate]) -> Result:
        if self.failing:
            return Result(False, self.failing)
        self.pushes.append(list(updates))
        self.before_push()
        self.world.apply(updates)
        if not self.deaf:
            for update in updates:
                self.settle(update.container_id)
        return Result()

    def settle(self, container_id: str) -> None:
        """The runtime writes what its books say into the cgroup."""
        if container_id in self.world.live:
            self.tree.write(f"/pods/{container_id}", *self.world.has(container_id))

    def run(self, of: PodSandbox, made: Container | None = None) -> None:
        made = made or container(of)
        made = replace(made, cgroups_path=f"/pods/{made.id}")
        self.world.place(of, made)
        for container_id in self.world.live:
            self.settle(container_id)
        self.reconciler.watch_pool()
        self.clock += 3600

    def drift(self, container_id: str, cpus: str, mems: str = "") -> None:
        """Somebody writes into the cgroup."""
        self.tree.write(f"/pods/{container_id}", cpus, mems)

    def round(self, **options: float) -> Round:
        return asyncio.run(self.reconciler.round(**options))  # type: ignore[arg-type]

    def count(self, name: str) -> float:
        return self.world.metrics.registry.get_sample_value(f"nri_numa_{name}_total") or 0.0

    def counts(self) -> tuple[float, float, float]:
        return (
            self.count("drift_found"),
            self.count("drift_repaired"),
            self.count("drift_fights"),
        )

    @property
    def log(self) -> str:
        """The reconciler's own lines."""
        lines = self.output.getvalue().splitlines(keepends=True)
        return "".join(line for line in lines if "component=reconcile" in line)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> CgroupTree:
    return CgroupTree(tmp_path / "cgroup", request.param, CPUSet.parse("0-7"), NUMASet.parse("0-1"))


@pytest.fixture
def bed(tree: CgroupTree) -> Bed:
    bed = Bed(tree)
    bed.run(pod("free", qos=QoSClass.BEST_EFFORT))
    bed.run(pod("listed", {"numacpu": "1", "numamem": "0"}))
    own = pod("owner", {"policy": "single-numa-node"})
    bed.run(own, container(own, wants=resources(2, 1)))
    return bed


def test_a_cgroup_that_is_just_being_made_is_no_drift(bed: Bed) -> None:
    """The OCI runtime makes the cgroup first and writes the cpuset into it later."""
    bed.drift("listed-app", "0-7", "0-1")
    bed.wall += 9.9
    assert bed.round(young=10) == Round(seen=3)
    assert bed.pushes == []
    assert bed.counts() == (0, 0, 0)
    bed.wall += 0.2
    assert bed.round(young=10).repaired == ("listed-app",)


def test_a_clock_set_back_makes_nobody_young(bed: Bed) -> None:
    bed.drift("listed-app", "0-7", "0-1")
    bed.wall -= 86_400
    assert bed.round(young=10).repaired == ("listed-app",)


def test_nothing_is_done_where_everything_is_as_meant(bed: Bed) -> None:
    assert bed.round() == Round(seen=3)
    assert bed.pushes == []
    assert bed.counts() == (0, 0, 0)
    assert bed.log == ""


def test_drift_is_found_repaired_read_back_counted_and_said(bed: Bed) -> None:
    bed.drift("listed-app", "0-7", "0-1")
    assert bed.round() == Round(seen=3, drifted=("listed-app",), repaired=("listed-app",))
    assert bed.tree.cpus_of("/pods/listed-app") == "1"
    assert bed.tree.mems_of("/pods/listed-app") == "0"
    assert bed.counts() == (1, 1, 0)
    found, repaired = bed.log.splitlines()
    assert "level=warning" in found
    assert "default/listed/app" in found
    assert "cpuset.cpus is 0-7, meant 1" in found
    assert "drift repaired" in repaired
    assert bed.round() == Round(seen=3)


def test_several_are_repaired_in_one_push_whoever_disturbs_an_owner_first(bed: Bed) -> None:
    bed.drift("listed-app", "3", "0")
    bed.drift("owner-app", "0", bed.world.has("owner-app")[1])
    bed.drift("free-app", "0-7")
    result = bed.round()
    assert set(result.repaired) == {"listed-app", "owner-app", "free-app"}
    assert [[u.container_id for u in push] for push in bed.pushes] == [
        ["free-app", "owner-app", "listed-app"]
    ]


def test_many_are_pushed_in_pieces(bed: Bed) -> None:
    names = [f"n{i:02}" for i in range(CHUNK + 5)]
    for name in names:
        bed.run(pod(name, {"numacpu": "1"}))
    for name in names:
        bed.drift(f"{name}-app", "0")
    assert len(bed.round().repaired) == len(names)
    assert [len(push) for push in bed.pushes] == [CHUNK, 5]


def test_an_update_on_its_way_is_no_drift(bed: Bed) -> None:
    bed.drift("listed-app", "0-7", "0")
    bed.on_sleep = lambda: bed.settle("listed-app")
    assert bed.round() == Round(seen=3)
    assert bed.counts() == (0, 0, 0)


def test_what_is_meant_to_change_between_the_looks_is_no_drift(bed: Bed) -> None:
    """A request comes in between: the new owner's answer has not reached the others yet."""
    bed.drift("free-app", "0-7")

    def grant() -> None:
        bed.on_sleep = lambda: None
        own = pod("second", {"cpus": "exclusive"})
        bed.world.place(own, container(own, wants=resources(1)))

    bed.on_sleep = grant
    assert bed.round().drifted == ()
    assert bed.pushes == []


def test_while_owners_come_and_go_the_shared_pool_is_not_judged(bed: Bed) -> None:
    """Two looks may see the same and mean two owners; each of their updates is still on its way."""
    bed.drift("free-app", "0-7")
    bed.drift("listed-app", "0-7", "0")

    def next_owner() -> None:
        bed.on_sleep = lambda: None
        bed.world.stop("owner-app")
        own = pod("owner", {"policy": "single-numa-node"})
        bed.world.place(own, container(own, wants=resources(2, 1)))

    bed.on_sleep = next_owner
    assert bed.round().drifted == ("listed-app",), "a list does not follow the pool"
    assert bed.round().repaired == ("free-app",)


def test_a_thousand_drifts_are_not_a_thousand_lines(bed: Bed) -> None:
    names = [f"n{i:02}" for i in range(reconcile.SAID_AT_ONCE + 7)]
    for name in names:
        bed.run(pod(name, {"numacpu": "1"}))
    for name in names:
        bed.drift(f"{name}-app", "0")
    assert len(bed.round().repaired) == len(names)
    assert bed.counts() == (len(names), len(names), 0)
    assert bed.log.count('msg="drift found"') == reconcile.SAID_AT_ONCE
    assert "containers=7" in bed.log


def test_an_update_that_waits_for_a_reply_is_not_drift(bed: Bed) -> None:
    bed.world.agent.remove_container("owner-app")  # its reply can carry no updates
    assert bed.world.agent.is_pending("free-app")
    assert bed.round().drifted == ()


def test_a_push_overtaken_by_a_request_is_set_right_at_once(bed: Bed) -> None:
    bed.drift("free-app", "0-7")

    def grant() -> None:
        """While the push is under way an owner comes; the push arrives last at the runtime."""
        bed.before_push = lambda: None
        own = pod("second", {"cpus": "exclusive"})
        bed.world.place(own, container(own, wants=resources(1)))

    bed.before_push = grant
    assert bed.round().repaired == ("free-app",)
    assert len(bed.pushes) == 2
    owned = bed.world.agent.state.owned
    assert not CPUSet.parse(bed.tree.cpus_of("/pods/free-app")) & owned
    assert bed.counts() == (1, 1, 0)


def test_somebody_who_keeps_rewriting_is_reported_and_not_fought(bed: Bed) -> None:
    def again() -> Round:
        bed.drift("listed-app", "0-7", "0")
        return bed.round(max_repairs=3, window=600)

    for _ in range(3):
        assert again().repaired == ("listed-app",)
    for _ in range(4):
        assert again() == Round(seen=3, drifted=("listed-app",), given_up=("listed-app",))
    assert len(bed.pushes) == 3
    assert bed.counts() == (4, 3, 1)
    assert bed.log.count("somebody keeps rewriting") == 1
    bed.clock += 600
    assert again().repaired == ("listed-app",), "the window has passed"
    assert bed.counts() == (4, 4, 1)


def test_a_fight_with_one_is_no_reason_to_leave_others_alone(bed: Bed) -> None:
    for _ in range(2):
        bed.drift("listed-app", "0-7", "0")
        bed.round(max_repairs=1)
    bed.drift("listed-app", "0-7", "0")
    bed.drift("free-app", "0-7")
    result = bed.round(max_repairs=1)
    assert result.given_up == ("listed-app",)
    assert result.repaired == ("free-app",)


def test_a_container_that_was_right_for_a_window_starts_anew(bed: Bed) -> None:
    bed.drift("listed-app", "0-7", "0")
    bed.round(max_repairs=1, window=600)
    bed.clock += 700
    assert bed.round(max_repairs=1, window=600).drifted == ()
    bed.drift("listed-app", "0-7", "0")
    assert bed.round(max_repairs=1, window=600).repaired == ("listed-app",)


def test_a_runtime_that_takes_the_update_and_does_nothing_is_noticed(bed: Bed) -> None:
    bed.deaf = True
    bed.drift("listed-app", "0-7", "0")
    for _ in range(3):
        assert bed.round(max_repairs=3).repaired == ()
    assert bed.round(max_repairs=3).given_up == ("listed-app",)
    assert bed.counts() == (1, 0, 1)


def test_a_push_that_fails_is_said_and_tried_again_and_is_no_fight(bed: Bed) -> None:
    bed.failing = "the runtime is busy"
    bed.drift("listed-app", "0-7", "0")
    for _ in range(5):
        assert bed.round(max_repairs=1).given_up == ()
    assert "the runtime is busy" in bed.log
    assert bed.counts() == (1, 0, 0), "the same drift is counted once"
    bed.failing = ""
    assert bed.round(max_repairs=1).repaired == ("listed-app",)


def test_without_a_link_drift_is_said_and_waits(bed: Bed) -> None:
    bed.active = False
    bed.drift("listed-app", "0-7", "0")
    assert bed.round().repaired == ()
    assert bed.pushes == []
    assert bed.counts() == (1, 0, 0)


def test_a_container_that_is_gone_is_no_drift(bed: Bed) -> None:
    bed.tree.remove("/pods/listed-app")
    assert bed.round() == Round(seen=2)
    bed.drift("owner-app", "0")

    def dies() -> None:
        bed.on_sleep = lambda: None
        bed.world.stop("owner-app")
        bed.tree.remove("/pods/owner-app")

    bed.on_sleep = dies
    assert bed.round().drifted == ()
    assert bed.counts() == (0, 0, 0)


def test_what_a_cgroup_above_takes_away_is_reported_once_and_not_fought(
    bed: Bed, tree: CgroupTree
) -> None:
    if tree.version == 1:
        pytest.skip("on version 1 the kernel shrinks the list itself")
    tree.write("/pods/listed-app", "1", "0", above="2-3")
    for _ in range(3):
        assert bed.round().drifted == ("listed-app",)
    assert bed.pushes == []
    assert bed.counts() == (1, 0, 0)
    assert "a cgroup above leaves 2-3 of it" in bed.log


def test_observe_reports_and_touches_nothing(tree: CgroupTree) -> None:
    bed = Bed(tree, observe=True)
    bed.run(pod("listed", {"numacpu": "1", "numamem": "0"}))
    for _ in range(2):
        assert bed.round().drifted == ("listed-app",)
    assert bed.pushes == []
    assert bed.counts() == (1, 0, 0)
    assert "observed=true" in bed.log


def test_before_the_runtime_has_told_what_runs_nothing_is_judged(bed: Bed) -> None:
    bed.drift("listed-app", "0-7", "0")
    bed.world.agent.synchronized = False
    assert bed.round() == Round()


def test_no_cgroups_at_all_is_said_once_and_so_is_their_return(bed: Bed, tree: CgroupTree) -> None:
    hidden = tree.root.with_name("hidden")
    tree.root.rename(hidden)
    for _ in range(3):
        assert bed.round() == Round()
    assert bed.log.count("drift is not looked for") == 1
    hidden.rename(tree.root)
    assert bed.round() == Round(seen=3)
    assert bed.log.count("drift is looked for again") == 1


def test_the_wrong_root_is_said_after_a_few_rounds(bed: Bed) -> None:
    for container_id in bed.world.live:
        bed.tree.remove(f"/pods/{container_id}")
    for _ in range(5):
        assert bed.round() == Round(seen=0)
    assert bed.log.count("none of 3 containers has a cgroup below") == 1


def test_a_node_without_containers_is_quiet(tree: CgroupTree) -> None:
    bed = Bed(tree)
    for _ in range(5):
        assert bed.round() == Round()
    assert bed.log == ""


def test_cpus_the_kernel_took_from_an_unbound_container_come_back(bed: Bed) -> None:
    """On version 1 an offline CPU leaves every cpuset and does not return by itself."""
    bed.world.stop("owner-app")
    for container_id in bed.world.live:
        bed.settle(container_id)
    bed.reconciler.watch_pool()
    bed.clock += 3600
    bed.drift("free-app", "0-6")  # it lived while the pool was narrow: ours to widen again
    assert bed.round().repaired == ("free-app",)
    assert bed.tree.cpus_of("/pods/free-app") == "0-7"


@pytest.mark.parametrize("cut", range(5))
def test_a_plan_interrupted_anywhere_is_finished_by_the_next_round(bed: Bed, cut: int) -> None:
    """The runtime takes the first few updates of a push and then dies."""
    for name in ("x", "y"):
        bed.run(pod(name, {"numacpu": "3"}))
    drifted = ["free-app", "listed-app", "x-app", "y-app"]
    for container_id in drifted:
        bed.drift(container_id, "0-7")

    async def dying(updates: Sequence[ContainerUpdate]) -> Result:
        await Bed.push(bed, updates[:cut])
        return Result(False, "the runtime died")

    bed.reconciler._push = dying
    assert bed.round().repaired == ()
    bed.reconciler._push = bed.push
    assert len(bed.round().repaired) == len(drifted) - cut
    for container_id in drifted:
        wanted = bed.world.has(container_id)[0]
        assert bed.tree.cpus_of(f"/pods/{container_id}") == wanted
    assert bed.round() == Round(seen=5)


def test_the_task_keeps_its_interval_and_survives_a_mistake(bed: Bed) -> None:
    def config(interval: str) -> AgentConfig:
        return AgentConfig(reconcile=Reconcile(interval=interval))

    now = config("5s")
    rounds: list[float] = []
    started = bed.clock

    def tick() -> None:
        nonlocal now
        if bed.clock >= started + 30:
            now = config("0")  # reloaded: off
        if bed.clock >= started + 100:
            raise asyncio.CancelledError

    bed.on_sleep = tick

    async def mistaken(**options: float) -> Round:
        rounds.append(bed.clock - started)
        raise RuntimeError("a mistake")

    bed.reconciler.round = mistaken  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bed.reconciler.run(lambda: now))
    assert rounds == [5, 10, 15, 20, 25]
    assert bed.count("internal_errors") == len(rounds)
    assert bed.log.count("a mistake") >= len(rounds)


def test_a_look_holds_the_interpreter_for_a_batch_at_a_time(bed: Bed) -> None:
    """Between batches the thread pauses, however many containers there are."""
    pauses: list[float] = []
    agent = bed.world.agent
    places = [(f"{k}{i}", place) for i in range(30) for k, place in agent.places.items()]
    found = reconcile.look(
        bed.reconciler._reader, agent.machine, agent.state, places, None, pauses.append
    )
    assert found.seen == 90
    assert len(pauses) == 90 // reconcile.BATCH
