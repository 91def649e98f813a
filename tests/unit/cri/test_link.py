"""The CRI link: a runtime in memory on a real socket, and the real handler and agent behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nri_numa.agent.handler import AgentHandler, LinkObserver
from nri_numa.cri.client import UpdateFailure
from nri_numa.cri.link import ContainerSize, CRILink, DetectedResize, LiveContainer, UpdateQueue
from nri_numa.cri.pb import cri_pb2
from nri_numa.engine.desired import plan_corrections
from nri_numa.engine.state import ContainerKind
from nri_numa.errors import RuntimeUnavailable
from nri_numa.machine.cgroups import NO_CGROUP_OUTCOME
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import ActualCgroup
from nri_numa.model.workload import ContainerUpdate, Resources
from nri_numa.runtime import LinkState
from tests.beds.small_cri import SmallCRI
from tests.beds.world import World
from tests.machines import named as machines

PATIENCE_S = 180.0
ALL = "0-3"


async def until(true: Callable[[], object], what: str) -> None:
    """Wait until something is so; the limit only bounds a failure."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)
    assert true(), what


@dataclass
class CRIBed(LinkObserver):
    """A runtime, an agent, and the link between them."""

    runtime: SmallCRI
    world: World = field(
        default_factory=lambda: World(
            machines.single_no_smt(), write=lambda *one: NO_CGROUP_OUTCOME
        )
    )
    refusals: list[tuple[str, ...]] = field(default_factory=list)
    beginnings: list[tuple[str, float, float | None]] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    states: list[LinkState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handler = AgentHandler(self.world.agent, [self])
        self.link = CRILink(
            self.handler,
            self,
            socket_path=f"unix://{self.runtime.socket}",
            listing=0.02,
            delays=lambda: iter([0.01] * 10_000),
        )

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        self.states.append(state)

    def on_started_despite_rejection(self, *words: str) -> None:
        self.refusals.append(words)

    def on_start(self, container_id: str, started: float, told: float | None) -> None:
        self.beginnings.append((container_id, started, told))

    def on_start_update_applied(self, container_id: str, started: float) -> None:
        self.starts.append(container_id)

    def on_rejected_resize_in_force(self, container_id: str, quota: int) -> None:
        self.world.agent.record_enforced_quota(container_id, quota)

    def kind(self, container_id: str) -> ContainerKind | None:
        allocation = self.world.agent.current.state.allocations.get(container_id)
        return None if allocation is None else allocation.kind


def starts(runtime: SmallCRI, pod: str, container: str, milli: int = 0, **annotations: str) -> None:
    """A pod with one container, which runs."""
    runtime.pod(pod, **annotations)
    runtime.create(container, pod, milli=milli)
    runtime.run(container)


@asynccontextmanager
async def linked(bed: CRIBed) -> AsyncIterator[SmallCRI]:
    async with bed.runtime:
        task = asyncio.create_task(bed.link.run())
        try:
            await until(lambda: bed.link.state is LinkState.ACTIVE, "the link is active")
            if bed.runtime.events:
                await until(lambda: bed.runtime.listeners, "it listens")
            yield bed.runtime
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(params=[True, False], ids=["events", "listings"])
def bed(request: pytest.FixtureRequest, directory: Path) -> CRIBed:
    """With and without an event stream, everything below is the same."""
    return CRIBed(SmallCRI(directory / "c.sock", events=request.param))


async def test_a_container_gets_its_cpus_and_its_neighbours_leave_them(bed: CRIBed) -> None:
    async with linked(bed) as runtime:
        starts(runtime, "shared", "neighbour")
        await until(lambda: "neighbour" in bed.starts, "the neighbour is known")
        runtime.pod("own", cpus="exclusive")
        runtime.create("owner", "own", milli=1000)
        await until(
            lambda: bed.kind("owner") is ContainerKind.EXCLUSIVE, "decided when it was created"
        )
        runtime.run("owner", at=7.0)
        await until(lambda: runtime.cpus("owner") == "0", "the owner's CPUs")
        await until(lambda: runtime.cpus("neighbour") == "1-3", "the neighbour's CPUs")
        await until(lambda: "owner" in bed.starts, "told that it runs")
        assert [b[:2] for b in bed.beginnings if b[0] == "owner"] == [("owner", 7.0)]
        # Once as it was created, once more as it runs: the runtime may have been starting it.
        assert [cpus for who, cpus in runtime.updates if who == "owner"] == ["0", "0"]
        runtime.end("owner")
        await until(lambda: runtime.cpus("neighbour") == ALL, "they come back")
        runtime.remove("owner")
        del runtime.pods["own"]
        await until(lambda: "own" not in bed.world.agent.current.state.pods, "the pod is forgotten")


async def test_a_pod_is_known_before_its_first_container(bed: CRIBed) -> None:
    """So that what the kubelet gave it can be found out ahead."""
    async with linked(bed) as runtime:
        runtime.pod("new")
        known = 'requests_total{event="RunPodSandbox"} 1.0'
        await until(lambda: known in bed.world.metrics.render_metrics(), "it is known")


async def test_what_runs_already_is_adopted_by_a_listing(bed: CRIBed) -> None:
    runtime = bed.runtime
    starts(runtime, "old", "before", numacpu="2")
    runtime.create("ended", "old", name="init")
    runtime.end("ended")
    async with linked(bed):
        assert bed.kind("before") is ContainerKind.LISTED
        assert bed.kind("ended") is None
        await until(lambda: runtime.cpus("before") == "2", "its CPUs")
        assert bed.beginnings == []  # it was not late: nobody was there


async def test_a_refused_container_is_taken_in_and_that_is_told_once(bed: CRIBed) -> None:
    async with linked(bed) as runtime:
        starts(runtime, "wrong", "refused", numacpu="77")
        await until(lambda: "refused" in bed.starts, "it runs")
        assert bed.kind("refused") is ContainerKind.UNPINNED
        ((namespace, pod, uid, container, message),) = bed.refusals
        assert (namespace, pod, uid, container) == ("ns", "wrong", "wrong", "main")
        assert "77" in message
        assert len(bed.world.history.rejections) == 1
        # It leaves CPUs that are somebody's, as every unpinned one does.
        runtime.pod("own", cpus="exclusive")
        runtime.create("owner", "own", milli=1000)
        await until(lambda: runtime.cpus("refused") == "1-3", "it makes room")


async def owner_and_neighbour(bed: CRIBed) -> None:
    """``owner`` has CPU 0 for itself, ``neighbour`` the rest."""
    runtime = bed.runtime
    starts(runtime, "shared", "neighbour")
    starts(runtime, "own", "owner", milli=1000, cpus="exclusive")
    await until(lambda: {"owner", "neighbour"} <= set(bed.starts), "both run")
    await until(lambda: runtime.cpus("owner") == "0", "the owner's CPUs")
    await until(lambda: runtime.cpus("neighbour") == "1-3", "the neighbour's CPUs")
    await until(lambda: runtime.containers["owner"].cpu["quota"] == -1, "its quota is lifted")


async def test_a_resize_that_nobody_tells_of_is_seen_and_decided(bed: CRIBed) -> None:
    async with linked(bed) as runtime:
        await owner_and_neighbour(bed)
        for milli, cpus, rest in ((2000, "0-1", "2-3"), (1000, "0", "1-3")):
            runtime.resize("owner", milli=milli)
            await until(lambda cpus=cpus: runtime.cpus("owner") == cpus, "the owner's CPUs")
            await until(lambda rest=rest: runtime.cpus("neighbour") == rest, "the neighbour's")
            await until(lambda: runtime.containers["owner"].cpu["quota"] == -1, "lifted again")
        allocation = bed.world.agent.current.state.allocations["owner"]
        assert allocation.cpu_milli == 1000


@pytest.fixture
def listed(directory: Path) -> CRIBed:
    """Without events listings come quickly."""
    return CRIBed(SmallCRI(directory / "c.sock", events=False))


async def test_a_resize_that_cannot_be_had_moves_nobody_and_is_said_once(listed: CRIBed) -> None:
    async with linked(listed) as runtime:
        await owner_and_neighbour(listed)
        runtime.resize("owner", milli=9000)
        await until(lambda: listed.world.history.rejections, "the refusal")
        listings = runtime.listings
        await until(lambda: runtime.listings > listings + 5, "it is looked at again")
        (refused,) = listed.world.history.rejections
        assert "resize rejected" in refused.message
        assert (runtime.cpus("owner"), runtime.cpus("neighbour")) == ("0", "1-3")
        assert runtime.containers["owner"].cpu["quota"] == 900_000, "as docs/runtimes.md says"
        cpus, mems = CPUSet.parse("0"), NUMASet.parse("0")
        observed = ActualCgroup(
            cpus=cpus, mems=mems, effective_cpus=cpus, effective_mems=mems, quota=900_000
        )
        agent = listed.world.agent
        assert plan_corrections(agent.current.desired, {"owner": observed}) == ()
        runtime.resize("owner", milli=1000)
        await until(lambda: runtime.containers["owner"].cpu["quota"] == -1, "lifted again")


async def test_a_refused_resize_of_memory_leaves_the_quota_lifted(listed: CRIBed) -> None:
    """The kubelet sends the whole size, and that CPU limit is what the container has CPUs for."""
    async with linked(listed) as runtime:
        await owner_and_neighbour(listed)
        runtime.resize("owner", milli=1000, memory=1 << 50)
        await until(lambda: listed.world.history.rejections, "the refusal")
        assert listed.world.agent.current.state.allocations["owner"].lifted_quota == 100_000


async def test_a_quota_is_not_written_over_before_it_was_looked_at(bed: CRIBed) -> None:
    """A search for drift finds the resize's quota, and would lift it as one given back."""
    async with linked(bed) as runtime:
        await owner_and_neighbour(bed)
        runtime.resize("owner", milli=2000)
        lift = [ContainerUpdate("owner", cpus="0", cpu_quota=-1)]
        assert await bed.link.push_updates(lift) == ""
        await until(lambda: runtime.cpus("owner") == "0-1", "the owner's CPUs")
        await until(lambda: runtime.containers["owner"].cpu["quota"] == -1, "lifted again")


async def test_a_runtime_that_restarts_is_found_again_and_nothing_moves(bed: CRIBed) -> None:
    async with linked(bed) as runtime:
        starts(runtime, "old", "stays", numacpu="2")
        await until(lambda: "stays" in bed.starts, "it runs")
        await runtime.stop()
        await until(lambda: bed.link.state is LinkState.DISCONNECTED, "the loss is seen")
        lost = [ContainerUpdate("stays", cpus="3")]
        assert await bed.link.push_updates(lost)
        updates = list(runtime.updates)
        starts(runtime, "new", "meanwhile", numacpu="3")
        await runtime.start()
        await until(lambda: runtime.cpus("meanwhile") == "3", "what came meanwhile")
        assert runtime.cpus("stays") == "2"
        assert [one for one in runtime.updates[len(updates) :] if one[0] == "stays"] == []


async def test_a_runtime_that_hangs_fails_what_is_pushed_and_ends_nobody(
    listed: CRIBed, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(listed) as runtime:
        starts(runtime, "own", "owner", milli=2000, cpus="exclusive")
        await until(lambda: "owner" in listed.starts, "it runs")
        runtime.hangs = True
        lift = [ContainerUpdate("owner", cpus="0-1", cpu_quota=-1)]
        assert await listed.link.push_updates(lift) == "the connection was closed"
        runtime.hangs = False
        # The same where the connection ends in the moment in which it is pushed.
        listed.link._listing = 50
        await until(lambda: listed.link.state is LinkState.ACTIVE, "it is back")
        await asyncio.sleep(0.1)
        connection, pushed = (
            listed.link._connection,
            asyncio.create_task(listed.link.push_updates(lift)),
        )
        assert connection is not None
        connection._failure = RuntimeUnavailable("gone")
        connection._listing_due.set()
        assert await pushed == "the connection was closed"
    assert "Exception in callback" not in caplog.text


async def test_pushed_updates_arrive_and_failures_are_told(bed: CRIBed) -> None:
    async with linked(bed) as runtime:
        runtime.pod("p")
        for name in ("good", "bad"):
            runtime.create(name, "p", name=name)
            runtime.run(name)
        await until(lambda: {"good", "bad"} <= set(bed.starts), "both run")
        runtime.refuse_updates.add("bad")
        updates = [ContainerUpdate(name, cpus="1") for name in ("good", "bad", "gone")]
        pushed = await bed.link.push_updates(updates)
        assert runtime.cpus("good") == "1"
        # One that is gone needs nothing.
        assert pushed == "permission denied"


async def test_a_container_that_cannot_be_looked_at_is_looked_at_again(listed: CRIBed) -> None:
    async with linked(listed) as runtime:
        runtime.refuse_status.add("late")
        runtime.pod("p", numacpu="1")
        runtime.create("late", "p")
        await until(lambda: runtime.cpus("late") == "1", "its CPUs")
        assert LinkState.DISCONNECTED not in listed.states


async def test_a_runtime_without_specs_is_read_by_what_cri_itself_says(directory: Path) -> None:
    async with linked(CRIBed(SmallCRI(directory / "c.sock", verbose=False))) as runtime:
        runtime.pod("own", cpus="exclusive")
        runtime.create("owner", "own", milli=2000)
        await until(lambda: runtime.cpus("owner") == "0-1", "its size is known")


async def test_events_that_got_lost_are_made_good_by_listings(listed: CRIBed) -> None:
    async with linked(listed) as runtime:
        runtime.pod("p", numacpu="1")
        runtime.create("short", "p")
        await until(lambda: listed.kind("short") is ContainerKind.LISTED, "seen")
        del runtime.containers["short"]  # nobody tells
        starts(runtime, "q", "ended", numacpu="2")
        await until(lambda: "ended" in listed.starts, "seen to run")
        await until(lambda: listed.kind("short") is None, "seen to be gone")
        runtime.end("ended")
        await until(lambda: listed.kind("ended") is None, "seen to be over")
        runtime.remove("ended")
        removed = 'requests_total{event="RemoveContainer"} 2.0'
        await until(lambda: removed in listed.world.metrics.render_metrics(), "both are forgotten")


async def test_a_pod_met_during_a_listing_stays_and_an_absent_one_has_none(directory: Path) -> None:
    bed = CRIBed(SmallCRI(directory / "c.sock"))
    runtime, list_pods = bed.runtime, bed.runtime._ListPodSandbox

    async def late(request: Any, context: Any) -> Any:
        answer = await list_pods(request, context)
        if bed.link.state is LinkState.ACTIVE and not bed.kind("owner"):
            starts(runtime, "own", "owner", milli=1000, cpus="exclusive")
            await until(lambda: "owner" in bed.starts, "it is met")
        return answer

    runtime._ListPodSandbox = late  # type: ignore[method-assign]
    async with linked(bed):
        runtime.create("orphan", "gone")
        for listings in (2, 3):
            runtime._tell("before", "before", cri_pb2.CONTAINER_DELETED_EVENT)
            await until(lambda n=listings: runtime.listings >= n, "it is listed")
            await asyncio.sleep(0.1)
        assert bed.kind("owner") is ContainerKind.EXCLUSIVE
        assert runtime.listings < 10


async def test_a_mistake_of_ours_is_counted_and_the_link_goes_on(bed: CRIBed) -> None:
    runtime, agent, calls = bed.runtime, bed.world.agent, [0]

    def broken(*arguments: Any) -> object:
        calls[0] += 1
        if calls[0] == 1:
            raise ValueError("a mistake")
        return create(*arguments)

    async with linked(bed):
        create, agent.create_container = agent.create_container, broken  # type: ignore[method-assign]
        runtime.pod("one", numacpu="1")
        runtime.create("first", "one")
        await until(lambda: calls[0] == 1, "it was asked about")
        runtime.pod("two", numacpu="2")
        runtime.create("second", "two")
        await until(lambda: runtime.cpus("second") == "2", "the next one is placed")
        assert bed.link.state is LinkState.ACTIVE


async def test_no_socket_is_tried_again_until_there_is_one(directory: Path) -> None:
    bed = CRIBed(SmallCRI(directory / "c.sock"))
    task = asyncio.create_task(bed.link.run())
    try:
        await until(lambda: bed.states == [LinkState.DISCONNECTED], "said once")
        async with bed.runtime:
            await until(lambda: bed.link.state is LinkState.ACTIVE, "found")
            assert await bed.link.ensure_containers_reported() == ""
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert bed.states[-1] is LinkState.STOPPED


# --- updates on their way: one call for each container at a time, the newest values last ----------


class Slow:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.down = False

    async def update_container(self, update: ContainerUpdate) -> UpdateFailure | None:
        self.calls.append(update[:3])
        await self.gates.setdefault(update.container_id, asyncio.Event()).wait()
        if self.down:
            raise RuntimeUnavailable("no answer")
        return None

    def open(self, *ids: str) -> None:
        for container_id in ids:
            self.gates.setdefault(container_id, asyncio.Event()).set()


async def turns() -> None:
    """Let everything that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_comes_during_a_call_is_put_together_and_sent_after_it() -> None:
    runtime = Slow()
    outbox = UpdateQueue(runtime)
    first = outbox.merge_and_enqueue_update(ContainerUpdate("a", cpus="0"))
    await turns()
    second = outbox.merge_and_enqueue_update(ContainerUpdate("a", cpus="1"))
    outbox.merge_and_enqueue_update(ContainerUpdate("a", mems="1"))
    await turns()
    assert runtime.calls == [("a", "0", "")]
    runtime.open("a")
    assert (await first, await second) == (None, None)
    assert runtime.calls == [("a", "0", ""), ("a", "1", "1")]


async def test_an_urgent_one_does_not_wait_behind_neighbours() -> None:
    runtime = Slow()
    outbox = UpdateQueue(runtime, concurrency=2)
    for name in "abcd":
        outbox.merge_and_enqueue_update(ContainerUpdate(name, cpus="0"))
    await turns()
    assert [call[0] for call in runtime.calls] == ["a", "b"]
    runtime.open("own")
    assert (
        await outbox.merge_and_enqueue_update(ContainerUpdate("own", cpus="1"), urgent=True) is None
    )
    runtime.open(*"abcd")
    await turns()
    assert [call[0] for call in runtime.calls] == ["a", "b", "own", "c", "d"]


async def test_a_lost_runtime_and_a_closed_connection_are_failures_not_exceptions() -> None:
    runtime = Slow()
    runtime.down = True
    outbox = UpdateQueue(runtime, concurrency=1)
    lost = outbox.merge_and_enqueue_update(ContainerUpdate("a", cpus="0"))
    runtime.open("a")
    failed = await lost
    assert failed is not None
    assert (failed.unknown, failed.message) == (False, "no answer")
    under_way = outbox.merge_and_enqueue_update(ContainerUpdate("b", cpus="0"))
    await turns()
    waiting = [outbox.merge_and_enqueue_update(ContainerUpdate(name, cpus="0")) for name in "bc"]
    await outbox.drop_pending_updates()
    for one in (under_way, *waiting):
        failed = await one
        assert failed is not None
        assert failed.message == "the connection was closed"


# --- what of a container's size somebody else changed ---------------------------------------------


def sized(shares: int = 0, quota: int = 0, limit: int = 0) -> Resources:
    return Resources(
        cpu_shares=shares, cpu_quota=quota, cpu_period=100_000, memory_limit=limit, cpus="0-3"
    )


def live(resources: Resources) -> LiveContainer:
    return LiveContainer(cri_pb2.CONTAINER_RUNNING, ContainerSize.from_resources(resources))


def change(of: DetectedResize | None) -> tuple[ContainerSize, ContainerSize]:
    assert of is not None
    return ContainerSize.from_resources(of.requested), ContainerSize.from_resources(of.previous)


def test_what_differs_was_asked_for_and_what_was_before_is_told() -> None:
    one = live(sized(1024, 100_000, 5))
    assert one.detect_change(sized(1024, 100_000, 5)) is None
    found = one.detect_change(sized(2048, 200_000, 5))
    assert change(found) == (
        ContainerSize(2048, 200_000, 100_000),
        ContainerSize(1024, 100_000, 100_000, 5),
    )
    assert found is not None
    assert found.previous.cpus == "0-3"
    assert change(one.detect_change(sized(2048, 200_000, 7)))[0] == ContainerSize(limit=7)
    assert one.detect_change(sized(2048, 200_000, 7)) is None
    assert one.change_count == 2


def test_a_quota_of_ours_is_no_change_and_what_is_asked_over_it_is() -> None:
    one = live(sized(1024, 100_000))
    one.sent_quota = -1
    assert one.detect_change(sized(1024, -1)) is None
    assert change(one.detect_change(sized(2048, 200_000)))[0].quota == 200_000
    # Given back to what it was: ours as well, when a container loses CPUs of its own.
    one.sent_quota = 100_000
    assert one.detect_change(sized(2048, 100_000)) is None


def test_a_lifted_quota_that_is_there_again_was_asked_for_even_if_nobody_saw_it_lifted() -> None:
    """So that it is lifted again at once, and not by the next search for drift."""
    one = live(sized(1024, 100_000, 5))
    one.sent_quota = -1
    asked, before = change(one.detect_change(sized(1024, 100_000, 7)))
    assert asked == ContainerSize(0, 100_000, 100_000, 7)
    assert before == ContainerSize(1024, 100_000, 100_000, 5)
    # Where it stays, it is not asked for again.
    assert change(one.detect_change(sized(1024, 100_000, 9)))[0] == ContainerSize(limit=9)
