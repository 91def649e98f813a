"""A pod keeps its exclusive CPUs between two of its containers' lives, as under the kubelet."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.engine.captions import PENDING_RESERVATION_CAPTION
from nri_numa.engine.decision import Rejected
from nri_numa.engine.explain.explanation import explain_allocation
from nri_numa.engine.explain.sentences import explanation_sentences
from nri_numa.engine.foreign_pins import shown_kind
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.pod_admission import ExpectedContainer, format_expected_containers
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import MemoryPolicies, PodSandbox, QoSClass, Strategy
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.world import GIB, OWN, World, container, pod, resources, says, two_nodes
from tests.machines import named as machines

WHOLE = {"policy": "single-numa-node", "scope": "pod"}
KEEP = Settings(reservation_seconds=600.0)


def four(settings: Settings = KEEP, *, cgroups: CgroupReader | None = None) -> World:
    return World(machines.single_no_smt(), settings, cgroups=cgroups)


def usual() -> World:
    """Two NUMA nodes of 8 CPUs, every CPU a core."""
    return World(machines.dual_no_smt(), KEEP)


def cgroups(directory: Path) -> tuple[CgroupTree, CgroupReader]:
    """Files of cgroup version 2, and what reads them."""
    tree = CgroupTree(directory / "cgroup", 2, CPUSet.parse("0-3"), NUMASet.parse("0"))
    return tree, CgroupReader(str(tree.root))


def on_cgroups(directory: Path, settings: Settings = KEEP) -> tuple[World, CgroupTree]:
    """A node of four CPUs that reads these files of cgroups."""
    tree, reader = cgroups(directory)
    return four(settings, cgroups=reader), tree


def start(world: World, of: PodSandbox, name: str, cpus: float, memory: float = 0) -> str:
    made = container(of, name, wants=resources(cpus, memory))
    world.place(of, made)
    return made.id


def owned(world: World, container_id: str) -> CPUSet:
    return CPUSet.parse(world.has(container_id)[0])


def rejected(world: World, of: PodSandbox, cpus: float) -> Rejected:
    return world.reject(of, container(of, "late", wants=resources(cpus)))


def test_a_container_that_was_killed_comes_back_to_its_cpus() -> None:
    world = four()
    of = pod("db", OWN)
    first = start(world, of, "main", 3)
    had = owned(world, first)
    assert world.stop(first) == (), "nobody gets its CPUs"
    (left,) = world.agent.current.state.reservations_of(of.uid)
    assert shown_kind(world.agent.current.state, left) == "reservation"
    assert explanation_sentences(explain_allocation(left, None, str(had))) == [
        "It does not run. Reserved for its pod, because the container ended: CPUs 0-2 and memory "
        "of NUMA node 0."
    ]
    says(rejected(world, pod("other", OWN), 1), "", "default/db/main has exclusive")
    world.check()
    again = start(world, of, "main", 3)
    assert owned(world, again) == had


def test_the_app_gets_the_cpus_of_the_init_container() -> None:
    world = four()
    of = pod("job", OWN)
    init = start(world, of, "init", 3)
    had = owned(world, init)
    world.stop(init)
    rejected(world, pod("other", OWN), 1)
    app = start(world, of, "app", 2)
    assert owned(world, app) < had
    world.check()
    (left,) = world.agent.current.state.reservations_of(of.uid)
    assert left.cpus == had - owned(world, app), "the rest is kept, too"
    assert sum(c.cpu_milli for c in left.charges.values()) == 1000
    before = world.agent.current.state
    world.restart()
    assert (world.agent.current.state.pods, world.agent.current.state.exclusive) == (
        before.pods,
        before.exclusive,
    )
    assert owned(world, start(world, of, "second", 1)) == left.cpus
    assert not world.agent.current.state.reservations_of(of.uid)


def test_what_is_kept_is_not_the_last_of_those_who_share() -> None:
    """The app does not fit where the init container was."""
    world = two_nodes(reservation_seconds=600.0, strategy=Strategy.PACK)
    world.put("other", {"numacpu": "0", **OWN}, 1)
    world.put("web")
    of = pod("job", {"policy": "single-numa-node"})
    world.stop(start(world, of, "init", 3))
    assert owned(world, start(world, of, "app", 4)) == CPUSet.parse("4-7")
    assert world.cpus("web-app") == CPUSet.parse("1-3")
    world.check()


def test_a_container_that_shares_leaves_what_its_pod_keeps() -> None:
    world = four()
    of = pod("db", OWN)
    main = start(world, of, "main", 3)
    had = owned(world, main)
    world.stop(main)
    shared = container(of, "log", wants=resources(0.5))
    world.place(replace(of, annotations={}), shared)
    assert world.cpus(shared.id) == CPUSet(range(4)) - had
    assert [a.container for a in world.agent.current.state.reservations_of(of.uid)] == ["main"]


def test_kept_cpus_go_back_after_a_while(tmp_path: Path) -> None:
    world, _ = on_cgroups(tmp_path)
    world.stop(start(world, pod("db", OWN), "main", 3))
    world.now += 599
    world.agent.reservations.release_expired()
    assert world.agent.current.state.exclusive
    world.now += 1
    world.agent.reservations.release_expired()
    assert not world.agent.current.state.exclusive


def passes(world: World, *seconds: float) -> None:
    for some in seconds:
        world.now += some
        world.agent.reservations.release_expired()


def sandbox(tree: CgroupTree, of: PodSandbox, number: int = 0) -> PodSandbox:
    """A sandbox of that pod, with its cgroup."""
    made = replace(of, id=f"{of.id}-{number}", cgroups_path=f"/pods/{of.name}/{number}")
    tree.write(made.cgroups_path)
    return made


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("path", ["told", "not told"])
def test_kept_cpus_go_back_with_the_sandboxs_cgroup(tmp_path: Path, away: bool, path: str) -> None:
    """Nothing reports the stop of a sandbox to an agent that is away.

    Nor the path of one that is stopped: containerd 1.7.
    """
    world, tree = on_cgroups(tmp_path)
    of = sandbox(tree, pod("db", OWN))
    main = start(world, of, "main", 3)
    if not away:
        world.stop(main)
        world.now += 6000
        world.agent.reservations.release_expired()
        assert world.agent.current.state.exclusive, "its sandbox is there"
    tree.remove(of.cgroups_path)
    if away:
        del world.live[main]
        world.pods[of.id] = of if path == "told" else replace(of, cgroups_path="")
        world.restart()
    assert world.agent.current.state.exclusive
    passes(world, 0, 59)
    assert world.agent.current.state.exclusive, "it may get another sandbox"
    passes(world, 1)
    assert not world.agent.current.state.exclusive


def test_kept_cpus_go_back_with_a_sandbox_that_is_a_folder_and_no_scope(tmp_path: Path) -> None:
    """CRI-O with the systemd driver, which runs no infra container by default."""
    world, tree = on_cgroups(tmp_path)
    of = replace(pod("db", OWN), cgroups_path="kubepods.slice:crio:db")
    tree.write("/kubepods.slice/crio-db")
    world.stop(start(world, of, "main", 3))
    world.agent.reservations.release_expired()
    assert world.agent.current.state.exclusive
    tree.remove("/kubepods.slice/crio-db")
    passes(world, 0, 60)
    assert not world.agent.current.state.exclusive


def test_a_sandbox_is_gone_when_neither_of_its_names_is_there(tmp_path: Path) -> None:
    """With the systemd driver: the scope of its infra container, and CRI-O's folder."""
    world, tree = on_cgroups(tmp_path)
    of = replace(pod("db", OWN), cgroups_path="kubepods.slice:crio:db")
    names = ["/kubepods.slice/crio-db.scope", "/kubepods.slice/crio-db"]
    for name in names:
        tree.write(name)
    had = owned(world, main := start(world, of, "main", 3))
    world.stop(main)
    tree.remove(names[0])
    passes(world, 0, 6000)
    world.restart()
    assert world.agent.current.state.exclusive == had
    tree.remove(names[1])
    passes(world, 0, 60)
    assert not world.agent.current.state.exclusive


def test_a_newer_sandbox_of_the_pod_keeps_its_cpus(tmp_path: Path) -> None:
    """The former one died, the kubelet made another, and its containers are still to come."""
    world, tree = on_cgroups(tmp_path)
    of = sandbox(tree, pod("db", OWN))
    had = owned(world, main := start(world, of, "main", 3))
    world.stop(main)
    newer = sandbox(tree, pod("db", OWN), 1)
    tree.remove(of.cgroups_path)
    world.pods[newer.id] = newer
    world.agent.run_pod(newer)
    for again in (False, True):
        if again:
            world.restart()
        world.agent.reservations.release_expired()
        assert world.agent.current.state.exclusive == had
    world.agent.remove_pod(of.uid, of.id)
    assert world.agent.current.state.exclusive == had
    tree.remove(newer.cgroups_path)
    passes(world, 0, 60)
    assert not world.agent.current.state.exclusive


def test_a_sandbox_that_never_had_a_cgroup_proves_nothing(tmp_path: Path) -> None:
    """As where the runtime makes none, or elsewhere."""
    world, tree = on_cgroups(tmp_path)
    of = sandbox(tree, pod("db", OWN))
    tree.remove(of.cgroups_path)
    world.stop(start(world, of, "main", 3))
    world.agent.reservations.release_expired()
    assert world.agent.current.state.exclusive


def test_what_never_starts_goes_back_with_its_sandbox(tmp_path: Path) -> None:
    """The runtime still lists it, and can start it no more."""
    world, tree = on_cgroups(tmp_path)
    of = sandbox(tree, pod("db", OWN))
    made = replace(container(of, "main", wants=resources(3)), cgroups_path="/pods/db/db-main")
    world.starts = False
    world.place(of, made)
    tree.remove(of.cgroups_path)
    world.live[made.id] = replace(world.live[made.id], starting=True)
    world.restart()
    world.agent.reservations.release_expired()
    assert not world.agent.current.state.exclusive
    del world.live[made.id]


def fails_to_start(world: World, of: PodSandbox, tree: CgroupTree, cpus: float) -> str:
    """Made, and never started: the runtime reports nothing more of it until it is removed."""
    tree.write(f"/pods/{of.name}/{of.id}")
    made = container(of, "main", wants=resources(cpus, 1))
    made = replace(made, cgroups_path=f"/pods/{of.name}/{made.id}")
    world.starts = False
    world.place(of, made)
    world.starts = True
    return made.id


def test_a_failed_start_gives_back_when_the_sandbox_stops(tmp_path: Path) -> None:
    world, (tree, _) = four(), cgroups(tmp_path)
    of = pod("db", OWN)
    del world.live[fails_to_start(world, of, tree, 3)]
    rejected(world, pod("other", OWN), 1)
    world.agent.stop_pod(of.uid, of.id)
    assert not world.agent.current.state.allocations


@pytest.mark.parametrize(("settings", "limit"), [(KEEP, 600), (Settings(), 120)])
def test_a_failed_start_releases_in_time(tmp_path: Path, settings: Settings, limit: float) -> None:
    """Not sooner than the kubelet gives up a start that takes long, and not while it goes on."""
    world, tree = on_cgroups(tmp_path, settings)
    of, slow = pod("db", OWN), pod("slow", OWN)
    own = fails_to_start(world, of, tree, 1)
    begun = fails_to_start(world, slow, tree, 1)
    tree.write(f"/pods/slow/{begun}")
    world.now += limit - 1
    world.agent.reservations.release_expired()
    assert {own, begun} == set(world.agent.current.state.allocations)
    world.now += 1
    world.agent.reservations.release_expired()
    assert {begun} == set(world.agent.current.state.allocations)
    del world.live[own]


@pytest.mark.parametrize("taken", [False, True])
def test_a_start_after_all_is_one_of_a_stranger(tmp_path: Path, taken: bool) -> None:
    """It has its CPUs again, or those that are left where another has them by now."""
    world, tree = on_cgroups(tmp_path)
    of = pod("db", OWN)
    own = fails_to_start(world, of, tree, 3)
    had = owned(world, own)
    world.now += 600
    world.agent.reservations.release_expired()
    other = start(world, pod("other", OWN), "main", 3) if taken else ""
    world.agent.start_container(of, world.live[own])
    assert owned(world, own) == (had if not taken else CPUSet(range(4)) - owned(world, other))


def test_of_a_checkpoint_older_than_a_grant_nothing_is_kept_that_another_has() -> None:
    world = four()
    of = pod("db", OWN)
    world.stop(start(world, of, "main", 3))
    older = world.agent.current.state
    world.agent.stop_pod(of.uid, of.id)
    own = start(world, pod("other", OWN), "main", 3)
    had = owned(world, own)
    world.boot()
    world.agent.current.state = older
    world.synchronize()
    assert not world.agent.current.state.reservations_of(of.uid)
    assert owned(world, own) == had


def test_nothing_is_kept_where_it_is_switched_off() -> None:
    world = four(Settings())
    world.stop(start(world, pod("db", OWN), "main", 3))
    assert not world.agent.current.state.exclusive


@pytest.mark.parametrize("seen", [True, False])
def test_what_is_kept_survives_a_restart_of_the_agent(seen: bool) -> None:
    """The container ended before, or while nobody looked."""
    world = four()
    of = pod("db", OWN)
    main = start(world, of, "main", 3)
    had = owned(world, main)
    if seen:
        world.stop(main)
    else:
        del world.live[main]
    world.restart()
    (left,) = world.agent.current.state.reservations_of(of.uid)
    assert (left.cpus, left.reserved_at) == (had, world.now)
    rejected(world, pod("other", OWN), 1)
    assert owned(world, start(world, of, "main", 3)) == had


def whole(name: str, cpus: float) -> PodSandbox:
    """A pod that is placed as a whole, with the sum that the kubelet names."""
    return replace(pod(name, WHOLE, qos=QoSClass.GUARANTEED), resources=resources(cpus, 1))


def test_the_pods_sum_is_kept_for_its_second_container(world: World) -> None:
    of = whole("pair", 6)
    first = start(world, of, "a", 3, 0.5)
    for n in (1, 2):  # each needs more than is left there
        assert world.topology.numa_of(owned(world, start(world, whole(f"x{n}", 4), "a", 4, 0.5)))
    second = start(world, of, "b", 3, 0.5)
    assert world.topology.numa_of(owned(world, second)) == world.topology.numa_of(
        owned(world, first)
    )
    assert not world.agent.current.state.reservations_of(of.uid)


def test_the_pods_sum_is_kept_from_its_sandbox_on(world: World) -> None:
    of = whole("pair", 7)
    world.pods[of.id] = of
    world.agent.run_pod(of)
    (held,) = world.agent.current.state.reservations_of(of.uid)
    assert (len(held.cpus), held.container) == (7, "*")
    assert world.agent.current.state.pods[of.uid].affinity is None, "its devices may say where"
    world.check()
    first = start(world, of, "a", 3, 0.5)
    assert owned(world, first) < held.cpus
    (held,) = world.agent.current.state.reservations_of(of.uid)
    assert len(held.cpus) == 4
    world.check()
    start(world, of, "b", 4, 0.5)
    assert not world.agent.current.state.reservations_of(of.uid)


def test_a_sandbox_of_a_known_pod_keeps_nothing_more(world: World) -> None:
    of = whole("pair", 7)
    start(world, of, "a", 3, 0.5)
    before = world.agent.current.state
    world.agent.run_pod(of)
    assert world.agent.current.state is before


def test_a_pod_whose_sum_the_machine_does_not_have_is_rejected_with_its_first_container() -> None:
    world = usual()
    of = replace(
        pod("wide", {"policy": "best-effort", "scope": "pod"}, qos=QoSClass.GUARANTEED),
        resources=resources(20, 1),
    )
    answer = rejected(world, of, 3)
    assert answer.message == (
        "pod default/wide, container late: its pod is admitted as a whole, and its other "
        "containers "
        "need 17 CPUs together; free without this one: 13 CPUs"
    )
    assert not world.agent.current.state.allocations


def test_a_pod_that_begins_with_a_fraction_keeps_its_sum_until_another_shares(world: World) -> None:
    of = whole("halves", 2)
    world.pods[of.id] = of
    world.agent.run_pod(of)
    start(world, of, "a", 0.5, 0.5)
    assert len(world.agent.current.state.exclusive) == 2, "it may be an init container"
    start(world, of, "b", 1.25, 0.5)
    assert not world.agent.current.state.exclusive


@pytest.mark.parametrize(
    "of",
    [
        pod("single", {"policy": "single-numa-node"}, qos=QoSClass.GUARANTEED),
        pod("wrong", {**WHOLE, "smt": "isolated"}, qos=QoSClass.GUARANTEED),
        pod("small", WHOLE, qos=QoSClass.BURSTABLE),
    ],
)
def test_a_sandbox_of_other_pods_keeps_nothing(world: World, of: PodSandbox) -> None:
    of = replace(of, resources=resources(4, 1))
    world.agent.run_pod(of)
    assert not world.agent.current.state.pods


def test_what_is_kept_counts_on_the_numa_nodes_where_it_lies(world: World) -> None:
    of = pod("job", OWN)
    world.stop(start(world, of, "init", 10))
    start(world, of, "app", 9)
    (left,) = world.agent.current.state.reservations_of(of.uid)
    (numa_node,) = left.numa_nodes
    assert left.cpus <= world.topology.numa_nodes[numa_node].cpus
    assert {i: c.cpu_milli for i, c in left.charges.items()} == {numa_node: 1000}
    free = world.topology.online - world.agent.current.state.exclusive
    assert owned(world, start(world, pod("other", OWN), "main", 5)) < free, "all but one can be had"


def test_a_pod_keeps_no_more_than_its_sum_where_the_next_container_goes_elsewhere() -> None:
    """Its memory, and so its place, is on a NUMA node without a free CPU."""
    kubelet = replace(KEEP, kubelet=KubeletRules(cpu_order=True, ties=True, memory=True, cpus=True))
    world = World(
        build_synthetic_topology(
            sockets=3, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=8
        ),
        kubelet,
    )
    start(world, pod("full", {"numacpu": "0-3", "cpus": "exclusive"}), "main", 4)
    for n in range(3):  # memory of each NUMA node serves single NUMA nodes from now on
        start(
            world, pod(f"small{n}", {"policy": "single-numa-node"}), "main", 0.5, 6 - 2 * (n == 2)
        )
    best = pod("wide", {"policy": "best-effort", "scope": "pod"})
    of = replace(best, resources=resources(7, 1.5))
    for name, cpus, memory in (("first", 3, 0.5), ("second", 1, 0.5), ("third", 3, 0.5)):
        start(world, of, name, cpus, memory)
        world.check()
        theirs = [a for a in world.agent.current.state.allocations.values() if a.pod == "wide"]
        assert sum(len(a.cpus) for a in theirs) == 7, [(a.container, str(a.cpus)) for a in theirs]


STRICT = {"policy": "single-numa-node"}


def named(name: str, total: float, containers: str, asks: Mapping[str, str] = STRICT) -> PodSandbox:
    """A Guaranteed pod whose containers the scheduler named."""
    annotations = {**asks, "container-resources": containers}
    return pod(name, annotations, qos=QoSClass.GUARANTEED, total=resources(total, 4))


def test_memory_of_an_init_container_is_kept_for_the_app(world: World) -> None:
    """Strict policies refuse; what they promised the pod once, no other pod gets in between."""
    of, other = pod("job", STRICT), pod("other", STRICT)
    gib = world.topology.numa_nodes[0].memory_bytes / GIB
    for numa_node in (0, 1):
        start(world, pod(f"fill{numa_node}", STRICT), "main", 0.5, gib * 0.5)
    init = start(world, of, "init", 0.5, gib * 0.4)
    (place,) = world.allocation(init).mems
    world.stop(init)
    start(world, other, "main", 0.5, gib * 0.4)
    late = pod("late", STRICT)
    answer = world.reject(late, container(late, "main", resources(0.5, gib * 0.4)))
    assert answer.reason == "TopologyAffinityError"
    app = start(world, of, "app", 0.5, gib * 0.3)
    assert set(world.allocation(app).mems) == {place}
    (left,) = world.agent.current.state.reservations_of(of.uid)
    assert 0 < left.memory_bytes < gib * 0.11 * GIB
    world.check()
    world.restart()
    assert world.agent.current.state.reservations_of(of.uid) == (left,)
    world.agent.stop_pod(of.uid, of.id)
    assert world.place(late, container(late, "main", resources(0.5, gib * 0.15)))[1] == str(place)
    assert not world.agent.current.state.reservations_of(of.uid), "it gives way"


def test_huge_pages_that_are_left_of_an_init_container_add_up_over_numa_nodes() -> None:
    world = two_nodes(pages={GIB: 2 * GIB}, reservation_seconds=600.0)
    of = pod("job", {"policy": "best-effort", "bind": "cpu+mem"})
    world.place(of, container(of, "init", wants=resources(4, 1, hugepages={GIB: 4 * GIB})))
    world.stop("job-init")
    world.place(of, container(of, "app", wants=resources(1, 1, hugepages={GIB: GIB})))
    (left,) = world.agent.current.state.reservations_of(of.uid)
    assert left.hugepages == {GIB: 3 * GIB}


def test_containers_that_the_scheduler_named_have_their_place_from_the_first_on() -> None:
    world = usual()
    sizes = {"log": (500, 0), "a": (4000, 0), "b": (5000, GIB)}
    expected = {
        name: ExpectedContainer(milli=milli, memory=memory)
        for name, (milli, memory) in sizes.items()
    }
    of = named("trio", 10, format_expected_containers(expected))
    start(world, of, "log", 0.5)
    kept = {a.container: a for a in world.agent.current.state.reservations_of(of.uid)}
    assert {name: len(a.cpus) for name, a in kept.items() if a.exclusive} == {"a": 4, "b": 5}
    world.check()
    for n in (1, 2):  # nothing of it can be had by others
        start(world, pod(f"x{n}", STRICT), "main", 2)
        rejected(world, pod("big", STRICT), 4)
    for name, cpus in (("b", 5), ("a", 4)):
        assert (
            owned(world, start(world, of, name, cpus, 1 if name == "b" else 0)) == kept[name].cpus
        )
    assert not world.agent.current.state.reservations_of(of.uid)


def test_a_pod_bound_before_the_upgrade_keeps_the_room_of_its_later_containers() -> None:
    """Its annotation has the old key."""
    world = usual()
    text = '{"a":{"cpu":"4"},"b":{"cpu":"5"}}'
    of = pod("pair", {**STRICT, "containers": text}, qos=QoSClass.GUARANTEED, total=resources(9, 4))
    start(world, of, "a", 4)
    (kept,) = world.agent.current.state.reservations_of(of.uid)
    assert (kept.container, len(kept.cpus)) == ("b", 5)
    start(world, of, "b", 5)
    assert not world.agent.current.state.reservations_of(of.uid)


def test_a_pod_is_rejected_with_its_first_container_where_a_later_one_has_no_place() -> None:
    world = usual()
    of = named("pair", 14, '{"init":{"cpu":"2","ends":true},"a":{"cpu":"5"},"b":{"cpu":"9"}}')
    answer = world.reject(of, container(of, "init", resources(2, 1)))
    assert answer.message.startswith(
        "pod default/pair, container init: its pod is admitted as a whole, and container b would "
        "be "
        "rejected: cpu: 9 exclusive CPUs needed"
    )
    assert not world.agent.current.state.allocations


def test_app_containers_have_what_the_init_container_leaves_them(world: World) -> None:
    of = named("job", 8, '{"init":{"cpu":"6","ends":true},"a":{"cpu":"4"},"b":{"cpu":"3"}}')
    init = start(world, of, "init", 6)
    assert len(world.agent.current.state.exclusive) == 7, "the peak of the pod, and no more"
    world.check()
    world.stop(init)
    start(world, pod("x", STRICT), "main", 7)
    for name, cpus in (("a", 4), ("b", 3)):
        start(world, of, name, cpus)
        world.check()
    assert not [
        a for a in world.agent.current.state.reservations_of(of.uid) if a.container != "init"
    ]


def test_an_init_container_beside_a_sidecar_has_what_comes_after_it(world: World) -> None:
    of = named("job", 8, '{"proxy":{"cpu":"2"},"init":{"cpu":"6","ends":true},"a":{"cpu":"5"}}')
    start(world, of, "proxy", 2)
    assert len(world.agent.current.state.exclusive) == 8, "the peak of the pod, and no more"
    rejected(world, pod("x", OWN), 8)
    world.stop(start(world, of, "init", 6))
    assert len(world.agent.current.state.exclusive) == 8
    start(world, of, "a", 5)


def test_the_pods_sum_is_kept_where_each_container_has_its_own_place(world: World) -> None:
    of = pod("pair", STRICT, total=resources(9, 2))
    start(world, of, "a", 5, 1)
    (held,) = world.agent.current.state.reservations_of(of.uid)
    assert (len(held.cpus), held.memory_bytes, held.reason) == (4, GIB, PENDING_RESERVATION_CAPTION)
    rejected(world, pod("x", OWN), 8)
    start(world, of, "log", 0.5)
    (held,) = world.agent.current.state.reservations_of(of.uid)
    assert len(held.cpus) == 3, "what a fraction has is not to come"
    start(world, of, "b", 3, 1)
    assert not world.agent.current.state.reservations_of(of.uid)
    wide, other = pod("wide", STRICT, total=resources(14)), usual()
    start(other, wide, "a", 5)
    assert len(other.agent.current.state.reservations_of(wide.uid)[0].cpus) == 9, (
        "on several NUMA nodes"
    )


def test_of_the_pods_sum_what_an_ended_container_left_is_not_to_come(world: World) -> None:
    of = pod("pair", STRICT, total=resources(5, 2))
    world.stop(start(world, of, "init", 3, 1))
    start(world, of, "log", 0.5)
    start(world, of, "a", 1, 1)
    assert len(world.agent.current.state.exclusive) == 4
    start(world, of, "b", 3)
    assert not world.agent.current.state.reservations_of(of.uid)


@pytest.mark.parametrize(
    ("asks", "first", "total", "kubelet"),
    [
        ({"policy.a": "single-numa-node"}, 5, 9, False),  # nobody knows what the others want
        (STRICT, 5, 5.5, False),  # a fraction is left
        ({"numacpu": "0-3", "cpus": "exclusive"}, 4, 8, False),  # its pod has one list
        (STRICT, 5, 9, True),  # nobody knows how much of it is fractions, which share
    ],
)
def test_nothing_is_kept_for_others_that_may_want_none(
    asks: Mapping[str, str], first: float, total: float, kubelet: bool
) -> None:
    world = World(machines.dual_no_smt(), replace(KEEP, kubelet=KubeletRules(cpus=kubelet)))
    of = pod("pair", asks, total=resources(total, 2))
    start(world, of, "a", first, 1)
    assert not world.agent.current.state.reservations_of(of.uid)


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        (replace(KEEP, cpu_overcommit=2.0), {"policy": "best-effort"}),
        (KEEP, {"policy": "restricted", "on-failure": "unpinned"}),
    ],
)
def test_others_of_a_pod_may_share_or_start_unpinned_where_none_could_be_owned(
    settings: Settings, asks: Mapping[str, str]
) -> None:
    world = World(machines.dual_no_smt(), settings)
    start(world, pod("x", OWN), "main", 10)
    of = pod("pair", asks, total=resources(8, 2))
    start(world, of, "a", 4, 1)
    assert not world.agent.current.state.reservations_of(of.uid)


def one_cpu_each(count: int) -> str:
    return json.dumps({f"c{number}": {"cpu": "1"} for number in range(count)})


@pytest.mark.parametrize(
    ("containers", "said"),
    [
        (
            "[]",
            "container-resources is '[]' (annotation numa.kubernetes.io/container-resources), "
            "expected containers ",
        ),
        ('{"b":{"cpus":"4"}}', "expected containers in the order"),
        ('{"b":{"cpu":"four"}}', "expected containers in the order"),
        ('{"b":4}', "expected containers in the order"),
        (one_cpu_each(65), "expected containers in the order"),
        (one_cpu_each(64), "container-resources has 64 CPUs and 0 bytes"),
        (
            '{"b":{"cpu":"9"}}',
            "container-resources has 9 CPUs and 0 bytes (annotation numa.kubernetes.io/",
        ),
        (
            '{"b":{"cpu":"4","memory":"5Gi"}}',
            "expected no more than its pod, 8 CPUs and 4294967296",
        ),
    ],
)
def test_an_impossible_annotation_is_said(world: World, containers: str, said: str) -> None:
    of = named("pair", 8, containers)
    answer = world.admit(of, container(of, "a", resources(4, 1)))
    assert said in answer.warnings[0]
    assert [a.container for a in world.agent.current.state.reservations_of(of.uid)] == ["*"]


def node() -> World:
    """Two NUMA nodes of eight CPUs without hyperthreads."""
    world = World(machines.dual_no_smt(memory_gib=64))
    world.synchronize()
    return world


def test_a_container_that_comes_back_after_a_restart_of_the_agent_has_its_cpus() -> None:
    """Not those that are first by then."""
    world = node()
    world.put("first", OWN, 2, 1)
    of = pod("web", OWN)
    world.place(of, container(of, wants=resources(2, 1), id="attempt-0"))
    assert world.has("attempt-0")[0] == "2-3"
    world.stop("first-app")
    world.stop("attempt-0")
    world.restart()
    world.place(of, container(of, wants=resources(2, 1), id="attempt-1"))
    assert world.has("attempt-1")[0] == "2-3"


def test_the_next_container_of_a_pod_gets_the_cpus_before_it_where_memory_has_changed() -> None:
    """What an init container read lies in the page cache beside its CPUs: less is free there."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node"})
    world.reading = MeasuredFree(memory={0: 31 * GIB, 1: 30 * GIB})
    assert world.add(of, "init", 2, 1) == ("0-1", "0")
    world.stop("web-init")
    world.reading = MeasuredFree(memory={0: 20 * GIB, 1: 30 * GIB})
    assert world.add(of, "app", 2, 1) == ("0-1", "0")
    assert world.put("other", {**OWN, "policy": "single-numa-node"}, 2, 1)[1] == "1"


def test_what_a_pod_had_before_binds_nobody() -> None:
    """Where its NUMA node is too small for the next container, that goes elsewhere."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node"})
    world.add(of, "init", 2, 1)
    world.stop("web-init")
    world.put("other", {**OWN, "numacpu": "2-6"}, 5, 1)
    assert world.add(of, "app", 4, 1) == ("8-11", "1")


def test_a_pod_keeps_its_numa_node_after_a_restart_of_the_agent() -> None:
    """The other one has room for all of the pod by then, and its first container is not there."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node", "scope": "pod"}, total=resources(6, 4))
    assert world.add(of, "one", 3, 2)[0] == "0-2"
    world.restart()
    assert world.add(of, "two", 3, 2)[0] == "3-5"


def test_a_pod_that_is_gone_is_forgotten_for_good() -> None:
    """A pod of the same name has another uid; nothing of the first one is left on the disk."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node", "scope": "pod"}, total=resources(6, 4))
    world.add(of, "one", 3, 2)
    assert any("uid-web" in key for key in world.store.documents)
    world.stop("web-one")
    world.remove_pod(of)
    assert not any("web" in key for key in world.store.documents)
    world.restart()
    assert not world.agent.current.state.pods


def create_in_vain(world: World, tree: CgroupTree, name: str = "db") -> str:
    """Create a container as CRI-O does one whose program does not exist: no more is reported."""
    world.agent.current.set_runtime(MemoryPolicies(), 2.0, reports_failed_creations=False)
    of = sandbox(tree, pod(name, OWN))
    return fails_to_start(world, of, tree, 3)


def test_a_failed_creation_gives_way_to_whoever_would_be_rejected(tmp_path: Path) -> None:
    world, tree = on_cgroups(tmp_path)
    failed = create_in_vain(world, tree)
    other = sandbox(tree, pod("web", OWN))
    passes(world, 29)
    world.reject(other, container(other, "app", wants=resources(2)))
    passes(world, 1)
    assert world.agent.current.schedulable.state.exclusive == CPUSet(), "schedulers count it free"
    world.place(other, container(other, "app", wants=resources(2)))
    assert list(world.agent.current.state.allocations) == ["web-app"]
    assert "default/db, whose container was not created, became free" in world.steps("web-app")[0]
    del world.live[failed]


def test_a_failed_creation_is_gone_after_the_time_of_a_start(tmp_path: Path) -> None:
    world, tree = on_cgroups(tmp_path)
    failed = create_in_vain(world, tree)
    passes(world, 119)
    assert failed in world.agent.current.state.allocations
    passes(world, 1)
    assert not world.agent.current.state.exclusive
    del world.live[failed]


@pytest.mark.parametrize("made", ["in time", "late"])
def test_a_slow_creation_keeps_its_cpus_once_its_cgroup_is_made(tmp_path: Path, made: str) -> None:
    """An OCI runtime may take longer than 30 s; what gave way starts as an unknown container."""
    world, tree = on_cgroups(tmp_path)
    slow = create_in_vain(world, tree)
    other = sandbox(tree, pod("web", OWN))
    wants = container(other, "app", wants=resources(2))
    passes(world, 60)
    if made == "in time":
        tree.write(world.live[slow].cgroups_path)
        passes(world, 600)
        world.reject(other, wants)
        assert world.allocation(slow).cpus == world.agent.current.state.exclusive
        return
    world.place(other, wants)
    tree.write(world.live[slow].cgroups_path)
    of = world.pods[world.live[slow].pod_id]
    world.agent.start_container(of, world.live[slow])
    assert slow in world.agent.current.state.allocations
    assert world.count("missed_starts_total") == 1


def test_what_containerd_created_and_never_started_does_not_give_way(tmp_path: Path) -> None:
    """It reports the end of each failed creation, and makes the cgroup at the start."""
    world, tree = on_cgroups(tmp_path)
    created = fails_to_start(world, sandbox(tree, pod("db", OWN)), tree, 3)
    other = sandbox(tree, pod("web", OWN))
    passes(world, 300)
    world.reject(other, container(other, "app", wants=resources(2)))
    assert world.allocation(created).exclusive
