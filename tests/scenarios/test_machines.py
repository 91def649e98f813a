"""CPUs and memory on different NUMA nodes: CXL, HBM, KNL in flat mode, POWER, virtual machines."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain.explanation import explain_allocation
from nri_numa.engine.explain.sentences import explanation_sentences
from nri_numa.engine.request.annotations import resolve_placement_options
from nri_numa.engine.request.demand import Demand, compute_demand
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.machine.synthetic import build_synthetic_topology, synthetic_sysfs_files
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.reasons import Rejection
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.world import GIB, SINGLE, World, container, pod, resources, says, two_nodes
from tests.machines import named as machines
from tests.machines.named import write_tree

RESTRICTED = {"policy": "restricted"}
BEST_EFFORT = {"policy": "best-effort"}


def told(topology: Topology, homes: dict[int, set[int]], tiers: dict[int, int]) -> Topology:
    """A machine whose firmware tells initiators, and its kernel memory tiers."""
    nodes = {
        i: replace(n, initiators=NUMASet(homes.get(i, ())), tier=tiers.get(i))
        for i, n in topology.numa_nodes.items()
    }
    return replace(topology, numa_nodes=nodes)


def issue_machine() -> Topology:
    """``sockets=2,numa=1,cores=4,memory=8Gi,memory-only=64Gi+64Gi``."""
    return machines.dual_smt_16(memory_gib=8, memory_only_gib=(64, 64))


def test_case_9_best_effort_is_never_pinned_to_less_than_it_asked_for() -> None:
    world = World(issue_machine())
    cpus, mems = world.put("large", BEST_EFFORT, 2, 20, qos=QoSClass.BURSTABLE)
    assert (bool(cpus), mems) == (True, "")
    allocation = world.allocation("large-app")
    assert not allocation.aligned
    assert any(
        "memory-only NUMA nodes 2-3 with 128 GiB are excluded" in step
        for step in world.steps("large-app")
    )


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted", "best-effort"])
def test_case_9_a_tier_that_is_let_in_serves_the_numa_node_it_is_near_to(policy: str) -> None:
    """NUMA node 2 hangs at socket 0 and 3 at socket 1; 20 GiB take 0 and 2, or 1 and 3."""
    world = World(issue_machine(), Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    cpus, mems = world.put("large", {"policy": policy}, 2, 20)
    node = world.topology.numa_of(world.cpus("large-app"))
    assert mems == {"0": "0,2", "1": "1,3"}[str(node)]
    assert cpus
    assert world.allocation("large-app").aligned
    known = world.grounds("large-app")
    assert any(
        "memory-only NUMA node" in step and "attached to" in step
        for step in known.basis.decision_steps
    )
    assert known.alignment is not None
    memory = known.alignment.resource_summaries[1]
    assert [n.numa_node for n in memory.numa_nodes] == [0, 1, 2, 3]
    assert memory.hint_count == 3  # 0, 1 and 0-1, each with what serves it


def test_case_9_a_tier_that_is_full_serves_nobody() -> None:
    world = World(issue_machine(), Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    _, full = world.put("all", SINGLE, 2, 72)
    assert world.put("large", SINGLE, 2, 20)[1] == {"0,2": "1,3", "1,3": "0,2"}[full]


def test_case_9_a_strict_policy_names_the_tier_that_nobody_let_in() -> None:
    world = World(told(issue_machine(), {}, {0: 4, 1: 4, 2: 22, 3: 22}))
    rejected = world.rejected("large", SINGLE, 2, 20)
    assert "memory-only NUMA nodes 2-3 (memory tier 22) with 128 GiB are excluded" in (
        rejected.message
    )


def test_case_9_a_tier_is_let_in_by_its_number() -> None:
    topology = told(issue_machine(), {}, {0: 4, 1: 4, 2: 22, 3: 1})
    world = World(topology, Settings(memory_tiers=frozenset({22})))
    assert world.put("large", SINGLE, 2, 20)[1] == "0,2"
    says(world.rejected("again", SINGLE, 2, 60), "", "memory-only NUMA node 3 (memory tier 1)")


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted"])
def test_case_9_cpus_without_memory_are_served_by_what_is_near(policy: str) -> None:
    """CPUs on NUMA nodes 0 and 1, all memory on 2: it read "which this machine does not have"."""
    world = World(machines.cpu_only())
    for n in range(2):
        assert world.put(f"p{n}", {"policy": policy}, 4, 12)[1] == "2"
    nodes = {str(a.numa_nodes) for a in world.agent.current.state.allocations.values()}
    assert nodes == {"0", "1"}
    # It is one memory for both, not one for each.
    rejected = world.rejected("third", {"policy": policy}, 2, 12)
    assert "NUMA node 2: 0 CPUs for exclusive use, 8 GiB memory" in rejected.message


def test_case_9_shared_memory_counts_once_for_wide_containers() -> None:
    world = World(machines.cpu_only())
    says(world.rejected("wide", RESTRICTED, 10, 40), "TopologyAffinityError", "40 GiB memory")


def test_case_9_each_virtual_cpu_node_takes_its_own_memory_node() -> None:
    """Two NUMA nodes with CPUs and two with memory, told apart by distance only."""
    world = World(machines.dual_smt_16(memory_gib=0, memory_only_gib=(16, 16)))
    seen = set()
    for n in range(2):
        _, mems = world.put(f"p{n}", SINGLE, 4, 10)
        seen.add((str(world.topology.numa_of(world.cpus(f"p{n}-app"))), mems))
    assert seen == {("0", "2"), ("1", "3")}


def test_case_9_initiators_beat_distances() -> None:
    topology = told(issue_machine(), {2: {1}, 3: {0}}, {})
    world = World(topology, Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    for n in range(2):
        _, mems = world.put(f"p{n}", SINGLE, 2, 20)
        node = str(world.topology.numa_of(world.cpus(f"p{n}-app")))
        assert mems == {"0": "0,3", "1": "1-2"}[node]


def test_case_9_knl_in_flat_mode() -> None:
    """CPUs and DDR4 on NUMA node 0, MCDRAM on 1: one place, not two."""
    topology = build_synthetic_topology(
        sockets=1, numa_per_socket=1, cores_per_numa=16, threads=4, memory_gib=96,
        memory_only_gib=(16,), distances=[[10, 31], [31, 10]],
    )  # fmt: skip
    world = World(topology, Settings(memory_only_numa_nodes=NUMASet([1])))
    assert world.put("hpc", SINGLE, 8, 100)[1] == "0-1"


def test_case_9_the_nearest_memory_needs_no_leave_and_other_tiers_do() -> None:
    """NUMA node 1 has CPUs and no memory; 2 beside it has the memory, 3 is far away."""
    base = machines.dual_smt_16(
        memory_only_gib=(32, 64),
        distances=[[10, 21, 28, 60], [21, 10, 12, 60], [28, 12, 10, 60], [60, 60, 60, 10]],
    )
    nodes = {**base.numa_nodes, 1: replace(base.numa_nodes[1], memory_bytes=0)}
    world = World(replace(base, numa_nodes=nodes))
    assert str(world.agent.current.machine.memory_only_nodes.excluded) == "3"
    cpus, mems = world.put("a", SINGLE, 4, 20)
    assert (str(world.topology.numa_of(world.cpus("a-app"))), mems) == ("1", "2")
    assert cpus


def test_case_9_huge_pages_of_a_tier_count_too() -> None:
    base = issue_machine()
    pages = {2 << 20: 2 * GIB}
    nodes = {i: replace(n, hugepages=pages if i > 1 else {}) for i, n in base.numa_nodes.items()}
    world = World(replace(base, numa_nodes=nodes), Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    of = pod("a", SINGLE)
    _, mems = world.place(of, wants=resources(2, 1, hugepages={2 << 20: GIB}))
    assert mems in ("0,2", "1,3")
    charges = world.agent.current.state.charges
    assert sum(c.hugepages.get(2 << 20, 0) for i, c in charges.items() if i > 1) == GIB


def test_case_10_lists_are_booked_on_memory_only_numa_nodes() -> None:
    """Two pods of 900 MiB do not fit 996 MiB; both were placed."""
    world = World(machines.single_smt(memory_only_gib=(996 / 1024,)))
    assert world.put("first", {"numamem": "1"}, 1, 900 / 1024)[1] == "1"
    second = pod("second", {"numamem": "1"})
    rejected = world.reject(second, wants=resources(1, 900 / 1024))
    says(rejected, "NotEnoughMemory", "NUMA node 1: 96 MiB")
    world.stop("first-app")
    assert world.place(second, wants=resources(1, 900 / 1024))[1] == "1"


def test_case_10_the_memory_of_a_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A POWER9 shows the memory of its GPUs as NUMA nodes far from all CPUs."""
    topology = build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=4, threads=4, memory_gib=64,
        memory_only_gib=(16, 16), numa_ids=(0, 8, 250, 251),
        distances=[[10, 40, 80, 80], [40, 10, 80, 80], [80, 80, 10, 80], [80, 80, 80, 10]],
    )  # fmt: skip
    world = World(topology)
    assert world.put("a", {"numamem": "250"}, 1, 4)[1] == "250"
    assert any("memory-only NUMA node 250, at distance 80" in step for step in world.steps("a-app"))
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "questionable list applied"
    ]


def test_case_10_a_tier_that_was_let_in_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = World(issue_machine(), Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    world.put("a", {"numamem": "2"}, 1, 4)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_case_9_where_no_numa_node_has_both_there_is_one_tier() -> None:
    """CPUs on NUMA node 0, memory on 1 and, farther away, on 2."""
    topology = machines.single_smt(
        memory_gib=0, memory_only_gib=(8, 8), distances=[[10, 20, 40], [20, 10, 40], [40, 40, 10]]
    )
    world = World(topology)
    of = pod("a", SINGLE)
    assert world.place(of, wants=resources(2, 12))[1] == "1-2"
    # Unless the kernel tells that it is another one.
    slow = World(told(topology, {}, {1: 4, 2: 22}))
    rejected = slow.reject(of, wants=resources(2, 12))
    assert "memory-only NUMA node 2 (memory tier 22) with 8 GiB is excluded" in rejected.message


def test_case_9_a_rejection_for_cpus_says_nothing_of_tiers() -> None:
    world = World(issue_machine())
    rejected = world.rejected("a", SINGLE, 12, 1)
    assert "not allowed" not in rejected.message


def test_case_9_a_machine_that_tells_no_memory_pins_none() -> None:
    base = machines.dual_no_smt()
    nodes = {i: replace(n, memory_bytes=0) for i, n in base.numa_nodes.items()}
    world = World(replace(base, numa_nodes=nodes))
    assert world.put("a", BEST_EFFORT, 2)[1] == ""


def test_case_9_why_another_lost_counts_no_tier_as_its_own() -> None:
    world = World(issue_machine(), Settings(memory_only_numa_nodes=NUMASet([2, 3])))
    for n in range(2):
        world.put(f"p{n}", SINGLE, 2, 20)
    known = world.history.explanation_of("p1-app")
    allocation = world.allocation("p1-app")
    text = " ".join(explanation_sentences(explain_allocation(allocation, known, "4-5")))
    assert "NUMA node 0 was not chosen: lower rank by the strategy." in text


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_case_9_listed_memory_has_its_cpus_where_its_initiators_are(policy: str) -> None:
    """Distances say otherwise. A list needs no leave, but that it had none is said."""
    world = World(told(issue_machine(), {2: {1}, 3: {0}}, {2: 22, 3: 22}))
    for numamem, numa_node in (("2", 1), ("3", 0)):
        of = pod(f"on-{numamem}", {"policy": policy, "numamem": numamem})
        made = container(of, wants=resources(2, 20))
        assert world.place(of, made)[1] == numamem
        allocation = world.allocation(made.id)
        assert allocation.numa_nodes == NUMASet([numa_node])
        assert allocation.aligned
        assert any(
            "(memory tier 22)" in step and "is excluded" in step for step in world.steps(made.id)
        )


# --- What firmware and kernel leave out or get wrong, and what a container then gets ------------


CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
Change = Callable[[dict[str, str]], None]


def _read(root: Path, topology: Topology, change: Change) -> Topology:
    files = synthetic_sysfs_files(topology)
    change(files)
    return discover_topology(write_tree(root, files))


def _without_node(files: dict[str, str]) -> None:
    """As the kernel shows NUMA node 1 while its memory is offline: not at all."""
    for name in [n for n in files if n.startswith(f"{NODE}/node1/")]:
        del files[name]
    files[f"{NODE}/online"] = "0\n"
    files[f"{NODE}/node0/distance"] = "10\n"


def test_case_13_cpus_of_an_offline_numa_node_are_not_near_the_online_one(tmp_path: Path) -> None:
    """They joined NUMA node 0, at a distance of 21, and were reported as its own."""
    machine = _read(tmp_path, machines.dual_no_smt(), _without_node)
    assert str(machine.numa_nodes[0].cpus) == "0-7"
    assert {machine.cpus[i].numa_node for i in range(8, 16)} == {None}
    assert "CPUs 8-15 belong to no NUMA node" in machine.warnings
    world = World(machine)
    assert world.put("a", SINGLE, 7, 1)[0] == "0-6"
    says(world.rejected("wide", SINGLE, 4, 1), "", "free: NUMA node 0: 1 CPU")


Told = Mapping[str, Mapping[str, str]]
"""Files of ``topology`` by CPUs that have them with the same text."""
EIGHT = [f"{i}-{i + 1}" for i in range(0, 16, 2)]
HALVES = {"0-3": "0-3", "4-7": "4-7"}
SELF = {str(i): str(i) for i in range(8)}


@pytest.mark.parametrize(
    ("sockets", "cores", "unknown", "told", "expected"),
    [
        # An s390 in a partition: 16 CPUs in 8 sockets were read as one.
        (8, 2, "0-15", {"core_siblings_list": dict(zip(EIGHT, EIGHT, strict=True))}, EIGHT),
        # Nothing is known of the socket: each CPU by itself.
        (2, 4, "0-7", {"core_siblings_list": SELF, "book_siblings_list": HALVES}, [*HALVES]),
        (2, 4, "0-7", {"core_siblings_list": SELF, "drawer_siblings_list": HALVES}, [*HALVES]),
        # Package ids are unique in a book only.
        (
            4,
            2,
            "",
            {
                "book_id": {"0-3": "0", "4-7": "1"},
                "physical_package_id": {"0-1,4-5": "0", "2-3,6-7": "1"},
            },
            ["0-1", "2-3", "4-5", "6-7"],
        ),
        # Unknown and known packages keep apart.
        (2, 4, "4-7", {"core_siblings_list": {"4-7": "4-7"}}, [*HALVES]),
    ],
)
def test_case_14_what_tells_the_sockets(
    tmp_path: Path, sockets: int, cores: int, unknown: str, told: Told, expected: list[str]
) -> None:
    """Package ids of minus one are none."""
    base = build_synthetic_topology(
        sockets=sockets, numa_per_socket=1, cores_per_numa=cores, threads=1
    )

    def change(files: dict[str, str]) -> None:
        for name, groups in {"physical_package_id": {unknown: "-1"}, **told}.items():
            for cpus, text in groups.items():
                for i in CPUSet.parse(cpus):
                    files[f"{CPU}/cpu{i}/topology/{name}"] = f"{text}\n"

    machine = _read(tmp_path, base, change)
    assert {i: str(s.cpus) for i, s in machine.sockets.items()} == dict(enumerate(expected))
    if unknown:
        said = f"CPUs {unknown} report no package id that can be read; the socket is taken from its"
        assert machine.warnings == (f"{said} siblings",)


def test_case_14_sockets_count_before_ids_where_no_cache_is_told() -> None:
    """Two sockets in one NUMA node, even and odd numbers; 4 CPUs were 0-3, two of each."""
    base = machines.dual_no_smt(sockets_per_numa=2, cores_per_l3=0)
    world = World(base)
    world.put("first", {"numacpu": "0,2", "cpus": "exclusive"}, 2)
    world.put("a", SINGLE, 3, 1)
    assert {base.cpus[i].socket for i in world.cpus("a-app")} == {1}


def test_case_14_an_empty_map_is_no_cache(tmp_path: Path) -> None:
    """Each CPU was taken for an L3 cache of its own."""

    def change(files: dict[str, str]) -> None:
        for name in [n for n in files if n.endswith("shared_cpu_list")]:
            files[name] = "\n"
            files[name.replace("_list", "_map")] = "00000000\n"

    machine = _read(tmp_path, machines.dual_no_smt(), change)
    assert machine.l3_groups == {}


def test_case_14_a_good_mask_beats_an_empty_list(tmp_path: Path) -> None:
    def change(files: dict[str, str]) -> None:
        files[f"{NODE}/node0/cpulist"] = "\n"
        files[f"{NODE}/node0/cpumap"] = "000000ff\n"

    machine = _read(tmp_path, machines.dual_no_smt(), change)
    assert str(machine.numa_nodes[0].cpus) == "0-7"


def _grouped(files: dict[str, str], name: str, size: int, count: int = 16) -> None:
    for i in range(count):
        low = i // size * size
        files[f"{CPU}/cpu{i}/topology/{name}"] = f"{low}-{low + size - 1}\n"


@pytest.mark.parametrize(
    ("name", "noun"), [("cluster_cpus_list", "clusters of cores"), ("die_cpus_list", "dies")]
)
def test_case_14_clusters_and_dies_serve_as_caches(tmp_path: Path, name: str, noun: str) -> None:
    """An Arm machine that tells clusters of 4 cores and no cache."""
    base = machines.dual_no_smt(cores_per_l3=0)
    machine = _read(tmp_path, base, lambda files: _grouped(files, name, 4))
    assert [str(g.cpus) for g in machine.l3_groups.values()] == ["0-3", "4-7", "8-11", "12-15"]
    assert f"the kernel reports no L3 caches; {noun} are taken for them" in machine.warnings
    world = World(machine)
    world.put("first", {"numacpu": "0-1", "cpus": "exclusive"}, 2)
    world.put("other", {"numamem": "1"}, 1, 12)
    assert world.put("a", SINGLE, 4, 1)[0] == "4-7"


def test_case_14_groups_that_tell_nothing_are_not_taken(tmp_path: Path) -> None:
    """A die that is the socket, a cluster that is a core."""
    base = machines.dual_no_smt(cores_per_l3=0)

    def change(files: dict[str, str]) -> None:
        _grouped(files, "die_cpus_list", 8)
        _grouped(files, "cluster_cpus_list", 1)

    assert _read(tmp_path, base, change).l3_groups == {}


# --- More CPUs than a machine has: what was asked is said, or that it cannot be known -----------


MANY = 262_144
"""CPU shares of 256 CPUs, and of every number above."""


@pytest.mark.parametrize(
    "wish", [{"policy": "single-numa-node"}, {"cpus": "exclusive"}, {"policy": "restricted"}]
)
@pytest.mark.parametrize("large", [False, True])
def test_case_12_ten_thousand_cpus_are_asked_for(wish: dict[str, str], large: bool) -> None:
    """On a big machine they were placed as 256; elsewhere "needs 256" was refused."""
    big = machines.dual_no_smt(cores_per_numa=320)
    world = World(big if large else machines.dual_smt())
    says(world.rejected("a", wish, 10_000, 1), "", "10000 exclusive CPUs")


def _wants(total: float = 0) -> tuple[World, object, object]:
    world = World(machines.dual_smt())
    limits = Resources(cpu_quota=int(total * 100_000), cpu_period=100_000) if total else None
    of = pod("a", {"cpus": "exclusive"}, total=limits)
    return world, of, container(of, wants=Resources(cpu_shares=MANY))


@pytest.mark.parametrize("total", [0, 300])
def test_case_12_shares_that_saturate_are_no_number(total: float) -> None:
    world, of, made = _wants(total)
    rejected = world.reject(of, made)  # type: ignore[arg-type]
    says(rejected, "CPURequestUnknown", "a request of 256 CPUs or more", "is not known")
    assert ("the limit of its pod is 300 CPUs" in rejected.message) is bool(total)


def test_case_12_shared_ones_need_at_least_that() -> None:
    world = World(machines.dual_smt())
    rejected = world.reject(
        pod("a", {"policy": "single-numa-node"}, qos=QoSClass.BURSTABLE),
        wants=Resources(cpu_shares=MANY),
    )
    assert "needs at least 256 CPUs" in rejected.message


def _demand(defaults: dict[str, str], annotations: dict[str, str]) -> Demand | Rejection:
    of = pod("a", annotations)
    made = container(of, wants=Resources(cpu_shares=MANY))
    requested = resolve_placement_options(Settings(defaults=defaults), of, made)
    assert isinstance(requested, PlacementOptions)
    return compute_demand(of, made, requested, 1 << 40)


def test_case_12_a_mere_default_makes_it_share() -> None:
    found = _demand({"cpus": "exclusive"}, {})
    assert isinstance(found, Demand)
    assert (found.exclusive_cpus, found.cpu_milli, found.cpu_is_lower_bound) == (0, 256_000, True)


def test_case_12_a_policy_of_a_guaranteed_pod_cannot_know_either() -> None:
    found = _demand({}, {"policy": "restricted"})
    assert isinstance(found, Rejection)
    assert found.reason == "CPURequestUnknown"


SOURCE = "annotation cpu-shared.crio.io/app"


def create(world: World, asks: Mapping[str, str], cpus: float = 2) -> Admitted | Rejected | None:
    of = pod("web", asks)
    made = container(of, "app", wants=resources(cpus))
    return world.create(of, replace(made, added_cpus_source=SOURCE))


@pytest.mark.parametrize(
    "asks", [{"cpus": "exclusive"}, {"policy": "single-numa-node"}, {"numacpu": "2-3"}]
)
def test_cpus_of_its_own_are_rejected_at_the_creation(asks: Mapping[str, str]) -> None:
    """CRI-O's CPUs were taken out of its cpuset again within two seconds."""
    rejected = create(two_nodes(), asks)
    assert isinstance(rejected, Rejected)
    says(rejected, "RuntimeAddsCPUs", f"{SOURCE} is set", "cpus: shared and no numacpu")


@pytest.mark.parametrize(
    "asks", [{}, {"policy": "single-numa-node", "cpus": "shared"}, {"on-failure": "unpinned"}]
)
def test_whoever_shares_is_admitted(asks: Mapping[str, str]) -> None:
    asks = {"cpus": "exclusive", **asks} if "on-failure" in asks else asks
    decision = create(two_nodes(), asks)
    assert isinstance(decision, Admitted)
    assert not decision.allocation.exclusive
