"""What a pod's sum leaves is reserved for its containers to come: hard, then soft, then nothing.

The cases are those that pods have every day; the rule is in docs/concepts.md.
"""

from collections.abc import Mapping

import pytest
from msgspec import UnsetType
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.engine import pod_admission
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.pod_admission import ExpectedContainer, format_expected_containers
from nri_numa.engine.pod_reservation import reservation_term
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import KubeletGrants, PodSandbox, QoSClass
from tests.beds.views import live_view
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

STRICT = {"policy": "single-numa-node"}
BEST = {"policy": "best-effort"}
WHOLE = {**STRICT, "scope": "pod"}
KEEP_S = 600.0


def node(cpus: int = 8, keep_s: float = KEEP_S) -> World:
    """One NUMA node, every CPU a core; the shared pool keeps one."""
    topology = machines.single_no_smt(cores_per_numa=cpus, memory_gib=64)
    return World(topology, Settings(reservation_seconds=keep_s))


def guaranteed(name: str, total: float, asks: Mapping[str, str] = STRICT) -> PodSandbox:
    return pod(name, asks, qos=QoSClass.GUARANTEED, total=resources(total, 1))


def runs(world: World, of: PodSandbox) -> None:
    world.pods[of.id] = of
    world.agent.run_pod(of)


def start(world: World, of: PodSandbox, name: str, cpus: float) -> str:
    world.place(of, made := container(of, name, resources(cpus, 0.1)))
    world.check()
    return made.id


def reserved(world: World, of: PodSandbox) -> int:
    """How many whole CPUs."""
    return sum(len(a.cpus) for a in world.agent.current.state.reservations_of(of.uid))


def is_hard(world: World, of: PodSandbox) -> bool:
    state = world.agent.current.state
    return all(
        reservation_term(state, a, KEEP_S).hard_until > world.now
        for a in state.reservations_of(of.uid)
    )


def passes(world: World, seconds: float) -> None:
    world.now += seconds
    world.agent.reservations.release_expired()


@pytest.mark.parametrize("asks", [STRICT, BEST, WHOLE])
@pytest.mark.parametrize("is_away", [False, True])
def test_the_app_has_its_cpu_after_fractional_init(asks: Mapping[str, str], is_away: bool) -> None:
    world, of = node(), guaranteed("job", 1, asks)
    runs(world, of)
    init = start(world, of, "init", 0.1)
    assert (reserved(world, of), is_hard(world, of)) == (1, True)
    late = guaranteed("late", 7)
    world.reject(late, container(late, wants=resources(7, 0.1)))
    if is_away:
        world.restart()
    world.stop(init)
    passes(world, 599)
    assert (reserved(world, of), is_hard(world, of)) == (1, True), "since the end"
    world.reject(late, container(late, wants=resources(7, 0.1)))
    app = start(world, of, "app", 1)
    assert world.allocation(app).exclusive
    assert not reserved(world, of)


def test_pods_with_a_large_init_container_withhold_nothing_from_others() -> None:
    world = node(32)
    for n in range(24):
        of = guaranteed(f"job-{n}", 1)
        world.stop(start(world, of, "init", 1))
        assert reserved(world, of) == 1
        start(world, of, "app", 0.1)
        assert not reserved(world, of)
    assert not world.agent.current.state.exclusive


def test_a_container_whose_image_is_pulled_finds_its_cpu() -> None:
    world, of = node(), guaranteed("pair", 2)
    world.stop(start(world, of, "init", 2))
    start(world, of, "b", 1)
    assert (reserved(world, of), is_hard(world, of)) == (1, True)
    passes(world, KEEP_S)
    assert (reserved(world, of), is_hard(world, of)) == (1, False)
    start(world, of, "c", 1)
    assert not reserved(world, of)


def test_an_app_with_all_of_its_pods_sum_has_nothing_reserved_beside_it() -> None:
    world, of = node(), guaranteed("web", 1.5)
    start(world, of, "app", 1.5)
    assert not world.agent.current.state.exclusive
    assert not any("pending" in one for one in world.store.documents.values())


@pytest.mark.parametrize(("ends", "hard_s"), [(1, 15), (2, 330)])
def test_a_container_that_completed_beside_another_gives_way_soon(ends: int, hard_s: int) -> None:
    """The kubelet restarts it at once, or after its back-off."""
    world, of = node(), guaranteed("job", 4)
    start(world, of, "main", 2)
    for _ in range(ends):
        world.stop(start(world, of, "job", 2))
    assert (reserved(world, of), is_hard(world, of)) == (2, True)
    passes(world, hard_s - 1)
    late = guaranteed("late", 5)
    world.reject(late, container(late, wants=resources(5, 0.1)))
    passes(world, 1)
    assert (reserved(world, of), is_hard(world, of)) == (2, False)
    start(world, late, "app", 5)
    assert not reserved(world, of)


def test_what_completed_long_ago_is_given_back() -> None:
    world, of = node(), guaranteed("job", 4)
    start(world, of, "main", 2)
    world.stop(start(world, of, "job", 2))
    passes(world, 15 + KEEP_S - 1)
    assert reserved(world, of)
    passes(world, 1)
    assert not reserved(world, of)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_sandbox_that_dies_and_comes_again_has_its_cpus(is_reported: bool) -> None:
    world, of = node(), guaranteed("db", 3, WHOLE)
    runs(world, of)
    world.stop(main := start(world, of, "main", 3))
    (left,) = world.agent.current.state.reservations_of(of.uid)
    world.agent.stop_pod(of.uid, of.id)
    start(world, guaranteed("small", 2), "app", 2)
    newer = replace(of, id="sandbox-db-1")
    del world.pods[of.id]
    world.pods[newer.id] = newer
    if is_reported:
        world.agent.run_pod(newer)
    else:
        world.restart()
    world.agent.remove_pod(of.uid, of.id)
    passes(world, 60)
    assert is_hard(world, newer)
    world.place(newer, container(newer, "main", resources(3, 0.1), id=f"{main}-1"))
    assert world.allocation(f"{main}-1").cpus == left.cpus
    world.agent.stop_pod(of.uid, of.id)  # late news
    assert not world.agent.current.state.pods[of.uid].stopped_at


def test_a_container_of_a_sandbox_that_nobody_reported_has_what_its_pod_reserved() -> None:
    world, of = node(), guaranteed("db", 3)
    world.stop(start(world, of, "main", 3))
    newer = replace(of, id="sandbox-db-1")
    world.place(newer, container(newer, "log", resources(0.5, 0.1)))
    world.agent.remove_pod(of.uid, of.id)
    assert reserved(world, newer) == 2


@pytest.mark.parametrize("is_away", [False, True])
def test_a_pod_whose_sandbox_stopped_gives_way_and_is_forgotten(is_away: bool) -> None:
    world, of, late = node(), guaranteed("db", 3), guaranteed("late", 5)
    world.stop(start(world, of, "main", 3))
    world.reject(late, container(late, wants=resources(5, 0.1)))
    world.agent.stop_pod(of.uid, of.id)
    start(world, guaranteed("small", 2), "app", 2)
    assert (reserved(world, of), is_hard(world, of)) == (3, False), "room enough elsewhere"
    if is_away:
        world.restart()
    passes(world, 59)
    assert reserved(world, of) == 3
    passes(world, 1)
    assert not reserved(world, of)


def test_another_sandbox_of_a_pod_that_has_nothing_left_has_its_sum_again() -> None:
    world, of = node(), guaranteed("db", 3, WHOLE)
    runs(world, of)
    world.agent.stop_pod(of.uid, of.id)
    passes(world, 60)
    assert not reserved(world, of)
    newer = replace(of, id="sandbox-db-1")
    runs(world, newer)
    assert (reserved(world, newer), is_hard(world, newer)) == (3, True)


def test_a_container_that_shares_is_not_rejected_for_what_its_own_pod_reserved() -> None:
    """Two fractions of a sum of one: the first could have been an init container."""
    world, of = node(3), guaranteed("halves", 1)
    start(world, guaranteed("x", 1), "app", 1)
    start(world, of, "a", 0.5)
    assert reserved(world, of) == 1
    start(world, of, "b", 0.5)
    assert not reserved(world, of)


def test_nothing_is_reserved_where_it_is_switched_off() -> None:
    world, of = node(keep_s=0), guaranteed("job", 1, WHOLE)
    runs(world, of)
    start(world, of, "init", 0.1)
    assert not world.agent.current.state.exclusive
    assert not any("pending" in one for one in world.store.documents.values())


def test_of_an_older_checkpoint_nothing_more_is_to_come() -> None:
    world, of = node(), guaranteed("pair", 3)
    start(world, of, "a", 1)
    for key in ("pending", "init"):
        world.store.documents[f"p/{of.uid}"].pop(key, None)
    world.restart()
    assert (reserved(world, of), is_hard(world, of)) == (2, True)
    passes(world, 15)
    assert (reserved(world, of), is_hard(world, of)) == (2, False)


def test_the_oldest_give_way_and_no_more_than_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    world = node(16)
    pods = [guaranteed(f"job-{n}", 3) for n in range(5)]
    for of in pods:
        world.now += 1
        start(world, of, "main", 1)
        world.stop(start(world, of, "job", 2))
    passes(world, 15)
    late = guaranteed("late", 4)
    answer = world.admit(late, container(late, wants=resources(4, 0.1)))
    assert [reserved(world, of) for of in pods] == [0, 0, 2, 2, 2]
    assert [a.pod for a in answer.released] == ["job-0", "job-1"]
    assert world.steps("late-app")[0].endswith("reserved for default/job-0, became free")
    notices = [
        n for n in world.agent.history.notices.notices_after() if n.notice_kind == "reservation"
    ]
    cpus = str(answer.released[0].cpus)
    assert [(n.pod, n.container, n.message) for n in notices][:1] == [
        (
            "job-0",
            "job",
            f"CPUs {cpus}, reserved for default/job-0, became free for default/late/app",
        )
    ]
    assert "pod reservation taken" in caplog.text
    world.restart()
    assert [reserved(world, of) for of in pods] == [0, 0, 2, 2, 2]


def test_nothing_gives_way_where_it_would_not_do() -> None:
    world, of = node(), guaranteed("job", 4)
    start(world, of, "main", 2)
    world.stop(start(world, of, "job", 2))
    passes(world, 15)
    for late in (guaranteed("large", 6), pod("wrong", {**STRICT, "smt": "isolated"})):
        world.reject(late, container(late, wants=resources(6, 0.1)))
    assert reserved(world, of) == 2


def test_what_gives_way_is_free_for_schedulers() -> None:
    world, of = node(), guaranteed("job", 4)
    start(world, of, "main", 2)
    world.stop(start(world, of, "job", 2))

    def shown() -> tuple[int, str | UnsetType]:
        agent = world.agent
        (left,) = agent.current.state.reservations_of(of.uid)
        assignments = {a.id: a for a in live_view(agent).list_assignments().containers}
        free = zones_document(agent.current.schedulable).free_exclusive_cpus
        return free, assignments[left.container_id].reservation

    passes(world, 0)
    serial = world.agent.current.state.serial
    assert shown() == (3, "hard")
    passes(world, 15)
    assert shown() == (5, "soft")
    assert world.agent.current.state.serial > serial, "who publishes looks again"


def test_reservations_that_give_way_are_found_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    world, tried = node(130), []
    for n in range(64):
        of = guaranteed(f"job-{n:02}", 1.5)
        start(world, of, "main", 0.5)
        world.stop(start(world, of, "job", 1))
    passes(world, 15)
    admit = pod_admission.admit_pod

    def counted(*args: object, **kwargs: object) -> Admitted | Rejected:
        tried.append(1)
        return admit(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(pod_admission, "admit_pod", counted)
    late = guaranteed("late", 70)
    answer = world.admit(late, container(late, wants=resources(70, 0.1)))
    assert 0 < len(answer.released) < 64
    assert len(tried) <= 8


def test_named_containers_that_are_too_much_work_have_what_is_left_of_the_sum() -> None:
    world = node(130)
    names = [f"c{n:02}" for n in range(64)]
    expected = {name: ExpectedContainer(milli=1000, memory=0) for name in names}
    asks = {**STRICT, "container-resources": format_expected_containers(expected)}
    of = guaranteed("many", 64, asks)
    world.place(of, container(of, "c00", resources(1)))
    world.check()
    left = {a.container: len(a.cpus) for a in world.agent.current.state.reservations_of(of.uid)}
    assert left["*"] == 64 - len(left) > 1
    late = guaranteed("late", 66)
    world.reject(late, container(late, wants=resources(66)))
    for name in names[1:]:
        world.place(of, container(of, name, resources(1)))
    world.check()
    assert (reserved(world, of), len(world.agent.current.state.exclusive)) == (0, 64)


@pytest.mark.parametrize("way", ["runs", "met", "granted"])
def test_what_runs_already_or_is_granted_has_cpus_of_pods_without_a_sandbox(way: str) -> None:
    world, of = node(2), guaranteed("dead", 1)
    runs(world, of)
    start(world, of, "main", 1)
    world.agent.stop_container("dead-main")
    del world.live["dead-main"]
    world.agent.stop_pod(of.uid, of.id)
    assert reserved(world, of) == 1
    if way == "granted":
        world.agent.apply_grants(KubeletGrants(cpus={("uid-x", "main"): CPUSet.parse("1")}))
        assert world.agent.current.desired.pool == CPUSet.parse("0")
        return
    late = guaranteed("late", 1)
    made = container(late, wants=resources(1, 0.1))
    world.pods[late.id], world.live[made.id] = late, made
    if way == "runs":
        world.synchronize()
    else:
        world.agent.start_container(late, made)
    assert world.allocation(made.id).exclusive
