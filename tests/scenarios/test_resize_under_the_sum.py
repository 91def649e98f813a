"""In-place resizes of containers whose pod has a sum, which a runtime may tell late or never."""

import pytest
from msgspec.structs import replace

from nri_numa.engine.request.demand import MIN_CPU_SHARES
from nri_numa.model.settings import Settings
from nri_numa.model.workload import PodSandbox, QoSClass
from tests.beds.wire import captured_request
from tests.beds.world import GIB, World, pod, resources, says
from tests.machines import named as machines
from tests.machines import pods

WHOLE = {"policy": "single-numa-node", "scope": "pod"}


def test_a_captured_resize_of_spec_resources_and_of_an_owner_beside_the_pool() -> None:
    """The kubelet sends the least shares beside the pod's quota, the runtime the sum of before."""
    of, c, of_the_pod = captured_request("update-container-with-pods-size")
    _, a, its_own = captured_request("update-container-beside-pods-pool")
    assert (of.resources.cpu_quota, of_the_pod.cpu_quota, of_the_pod.cpu_shares) == (
        400_000, 500_000, MIN_CPU_SHARES,
    )  # fmt: skip
    world = node_of_two()
    world.place(of, a)
    world.place(of, c)
    before = {one.id: world.cpus(one.id) for one in (a, c)}
    world.put("neighbour", {"policy": "single-numa-node"}, 2)
    assert had(world) == {"a": (1, 1000), "c": (3, 3000), "app": (2, 2000)}
    for update, id, expected in (
        (of_the_pod, c.id, {"a": (1, 1000), "c": (4, 4000)}),
        (its_own, a.id, {"a": (2, 2000), "c": (3, 3000)}),
    ):
        assert world.update(id, update) is None
        assert had(world) == expected | {"app": (2, 2000)}
        world.check()
    assert before[a.id] < world.cpus(a.id)


def test_an_owner_grows_before_the_pool_is_told_of_the_new_sum() -> None:
    """Both in one patch: the kubelet tells the sandbox, and nobody after one who is refused."""
    of, total = captured_request("update-pod-sandbox")
    world = node_of_two()
    world.agent.update_pod(of, total)
    assert not world.agent.current.state.pods  # none of ours yet
    world.add(of, "a", 3)
    world.add(of, "c", 4)
    grown = resources(4)
    says(world.update_rejected("p-a", grown), "NotEnoughCPUs", "its pod, which has 4 CPUs")
    world.agent.update_pod(of, total)
    world.restart()
    assert world.update("p-a", grown) is None
    assert world.update("p-c", replace(total, cpu_shares=MIN_CPU_SHARES)) is None
    assert had(world) == {"a": (4, 4000), "c": (1, 1000)}


def node_of_two() -> World:
    """CPUs 0-15 and 16-31."""
    return World(machines.dual_no_smt(cores_per_numa=16, memory_gib=32))


def told(world: World, of: PodSandbox, total: float, memory: float = 8) -> None:
    """From now on the runtime tells another sum."""
    world.pods[of.id] = replace(of, resources=resources(total, memory))


def had(world: World) -> dict[str, tuple[int, int]]:
    """By container, exclusive CPUs and thousandths of a CPU that are booked for it."""
    return {
        a.container: (len(a.cpus), sum(c.cpu_milli for c in a.charges.values()))
        for a in world.agent.current.state.allocations.values()
        if not a.reserved_at
    }


@pytest.mark.parametrize("scope", ["container", "pod"])
@pytest.mark.parametrize(
    ("total", "sizes", "steps", "expected"),
    [
        pytest.param(
            2.5, {"a": 2.0, "f": 0.5}, [("a", 4.0)], {"a": (4, 4000), "f": (0, 500)},
            id="own grows, no new sum",
        ),
        pytest.param(
            2, {"a": 1.0, "b": 1.0}, [("a", 3.0), ("b", 1.0)], {"a": (3, 3000), "b": (1, 1000)},
            id="the other one's memory afterwards",
        ),
        pytest.param(
            4, {"a": 2.0, "b": 2.0}, [6, ("a", 4.0)], {"a": (4, 4000), "b": (2, 2000)},
            id="own grows, sum first",
        ),
        pytest.param(
            4, {"a": 2.0, "b": 2.0}, [("a", 4.0)], {"a": (4, 4000), "b": (2, 2000)},
            id="own grows to the sum",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [4, ("a", 2.0)], {"a": (2, 2000), "b": (4, 4000)},
            id="own shrinks, sum first",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [4, ("a", 2.0), ("b", 2.0)], {"a": (2, 2000), "b": (2, 2000)},
            id="both shrink, sum first",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [("a", 2.0)], {"a": (2, 2000), "b": (4, 4000)},
            id="own shrinks, container first",
        ),
        pytest.param(
            4, {"a": 4.0}, [("a", 3.85)], {"a": (0, 3850)}, id="own, to a fraction",
        ),
        pytest.param(4, {"a": 4.0}, [("a", 6.0)], {"a": (6, 6000)}, id="an only one grows"),
    ],
)  # fmt: skip
def test_an_owner_has_its_size_whenever_the_sum_is_told(
    scope: str, total: float, sizes: dict[str, float], steps: list[object], expected: object
) -> None:
    world = node_of_two()
    of = pod("p", {**WHOLE, "scope": scope}, total=resources(total, 8))
    for name, cpus in sizes.items():
        world.add(of, name, cpus, 1)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            assert world.update(f"p-{step[0]}", resources(step[1], 1 + number)) is None
        else:
            told(world, of, float(str(step)))
        world.check()
    assert had(world) == expected
    world.restart()
    assert had(world) == expected


POOL_CASES = [
    ("the pool gives", {"a": 1, "c": 4}, [("a", 2)], {"a": (2, 2000), "c": (2, 2000)}),
    ("the pool takes", {"a": 2, "c": 4}, [("a", 1)], {"a": (1, 1000), "c": (3, 3000)}),
    ("spec.resources grow", {"a": 1, "c": 4}, [("c", 5)], {"a": (1, 1000), "c": (4, 4000)}),
    ("and shrink", {"a": 2, "c": 5}, [("c", 3)], {"a": (2, 2000), "c": (1, 1000)}),
    ("below its owners", {"a": 2, "c": 4}, [("c", 2)], {"a": (2, 2000), "c": (1, 1000)}),
    ("a fraction grows", {"f": 0.5, "c": 4}, [("f", 1.5)], {"f": (0, 1500), "c": (2, 2000)}),
    ("a fraction comes", {"c": 4, "f": 0.5}, [], {"f": (0, 500), "c": (3, 3000)}),
    (
        "spec.resources and an owner", {"a": 1, "c": 4}, [("c", 5), ("a", 2)],
        {"a": (2, 2000), "c": (3, 3000)},
    ),
    (
        "an owner and spec.resources", {"a": 1, "c": 4}, [("a", 2), ("c", 5)],
        {"a": (2, 2000), "c": (3, 3000)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"), [pytest.param(*case[1:], id=case[0]) for case in POOL_CASES]
)
@pytest.mark.parametrize("lost", [False, True], ids=["", "without a checkpoint"])
def test_a_pods_pool_has_what_its_owners_leave(
    sizes: dict[str, float], steps: list[tuple[str, float]], expected: object, lost: bool
) -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(max(sizes.values()), 8))
    for name, cpus in sizes.items():
        world.add(of, name, cpus, 1)
    for name, cpus in steps:
        assert world.update(f"p-{name}", resources(cpus, 1)) is None
        world.check()
    assert had(world) == expected
    world.restart(lost=lost)
    assert had(world) == expected


def test_a_pool_of_an_older_checkpoint_is_known_by_its_cpus() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 8))
    for name, cpus in (("own", 1), ("x", 4), ("y", 4)):
        world.add(of, name, cpus, 1)
    for document in world.store.documents.values():
        for key in ("sum", "pool"):
            document.pop(key, None)
    world.restart()
    assert world.update("p-own", resources(2, 1)) is None
    assert had(world) == {"own": (2, 2000), "x": (2, 2000), "y": (2, 2000)}


@pytest.mark.parametrize("on_failure", ["reject", "best-effort"])
def test_the_last_cpu_of_a_pool_is_nobody_elses(on_failure: str) -> None:
    world = node_of_two()
    of = pod("p", {**WHOLE, "on-failure": on_failure}, total=resources(4, 8))
    world.add(of, "a", 3, 1)
    world.add(of, "c", 4, 1)
    if on_failure == "reject":
        says(
            world.update_rejected("p-a", resources(4, 1)), "NotEnoughCPUs",
            "cpu: 4 CPUs needed, 3 CPUs free in its pod, which has 4 CPUs",
        )  # fmt: skip
    else:
        assert world.update("p-a", resources(4, 1)) is None
    assert had(world) == {"a": (3, 3000), "c": (1, 1000)}
    assert world.allocation("p-a").has_shortfall == (on_failure == "best-effort")


def test_a_container_that_grew_and_comes_again_has_cpus_of_its_own() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 8))
    world.add(of, "a", 2, 1)
    world.add(of, "b", 2, 1)
    assert world.update("p-a", resources(4, 1)) is None
    world.restart()
    world.stop("p-a")
    world.add(of, "a", 4, 1)
    assert had(world) == {"a": (4, 4000), "b": (2, 2000)}


def test_a_burstable_owner_grows_though_its_pods_sum_is_old() -> None:
    world = node_of_two()
    of = pod("p", {"cpus": "exclusive"}, qos=QoSClass.BURSTABLE, total=resources(2))
    world.add(of, "a", 2)
    assert world.update("p-a", resources(4)) is None
    assert had(world) == {"a": (4, 4000)}


def test_a_resize_that_nobody_told_of_is_the_same() -> None:
    """The sum is the new one, and both containers are found with half their size."""
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(8, 8))
    for name in "ab":
        world.add(of, name, 4, 1)
    told(world, of, 4)
    for name in "ab":
        world.unseen(f"p-{name}", cpu_shares=2048, cpu_quota=200_000)
    world.restart()
    assert had(world) == {"a": (2, 2000), "b": (2, 2000)}


@pytest.mark.parametrize("away", [False, True], ids=["", "while the agent is away"])
def test_the_pool_grows_when_an_owner_of_its_pod_ends(away: bool) -> None:
    world = World(node_of_two().topology, Settings(reservation_seconds=600))
    of = pod("p", WHOLE, total=resources(4, 4))
    world.add(of, "proxy", 4, 4)
    world.add(of, "init", 3, 1)
    assert had(world) == {"init": (3, 3000), "proxy": (1, 1000)}
    if away:
        del world.live["p-init"]
        world.restart()
    else:
        world.stop("p-init")
    assert had(world) == {"proxy": (4, 4000)}
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 4 * GIB
    world.add(of, "log", 4, 4)
    world.add(of, "main", 2, 1)
    assert had(world) == {"proxy": (2, 2000), "log": (2, 2000), "main": (2, 2000)}
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 4 * GIB


def test_memory_of_those_who_share_a_pool_is_booked_once() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 4))
    for name, cpus, memory in (("x", 4, 4), ("y", 4, 4), ("own", 1, 1)):
        world.add(of, name, cpus, memory)
    for memory in (6, 3):
        for name in "xy":
            assert world.update(f"p-{name}", resources(4, memory)) is None
        assert sum(c.memory for c in world.agent.current.state.charges.values()) == memory * GIB
    for cpus in (1, 2):
        assert world.update("p-own", resources(cpus, 2)) is None
    assert had(world)["x"] == (2, 2000)
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 3 * GIB


def test_those_who_share_a_fraction_have_one_pool_again_when_it_is_whole() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 4))
    for name in "xy":
        world.add(of, name, 4, 4)
    world.add(of, "own", 1, 1)
    for cpus in (4.5, 5):
        for name in "xy":
            assert world.update(f"p-{name}", resources(cpus, 4)) is None
    assert had(world) == {"own": (1, 1000), "x": (4, 4000), "y": (4, 4000)}
    assert world.cpus("p-x") == world.cpus("p-y")


def test_simulate_resizes_a_pod_whose_sum_is_smaller_by_now() -> None:
    limits = [{"limits": {"cpu": cpus, "memory": "1Gi"}} for cpus in (4, 2)]
    specs = [{"containers": [pods.container(name, one) for name in "ab"]} for one in limits]
    result = pods.run(node_of_two().topology, *(pods.document("Pod", "p", s, WHOLE) for s in specs))
    outcomes = [outcome for event in result.events for outcome in event.outcomes]
    assert [len(o.allocation.cpus) for o in outcomes if o.allocation] == [4, 4, 2, 2]


@pytest.mark.parametrize("key", ["smt", "smt.a"])
def test_a_pool_gives_whole_cores_if_it_has_them(key: str) -> None:
    """Else an owner's are free ones."""
    world = World(machines.dual_smt())
    of = pod("p", {**WHOLE, key: "full-core"}, total=resources(6, 4))
    world.add(of, "c", 6, 4)
    world.add(of, "a", 2, 1)
    before = world.cpus("p-c") | world.cpus("p-a")
    assert world.update("p-a", resources(4, 1)) is None
    own, topology = world.cpus("p-a"), world.topology
    assert (len(own), len(world.cpus("p-c"))) == (4, 2)
    assert topology.siblings_of(own) == own
    assert (own <= before) == (key == "smt")
