"""Case 19: refusals and explanations that blamed the wrong thing, as they read now."""

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.cli.status import numa_node_table_lines
from nri_numa.engine.admit import admit
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain import sentences
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import KubeletRules, Settings
from tests.beds.explained import of_decision
from tests.beds.world import GIB, World, container, pod, resources, two_by_four
from tests.checks.docs_rejections import REJECTIONS
from tests.checks.rejection_words import WITHHELD, first_clause, problem, shortage
from tests.machines import named as machines
from tests.machines import pods

EIGHT = build_synthetic_topology(
    sockets=2, numa_per_socket=4, cores_per_numa=8, threads=2, memory_gib=6
)
"""128 CPUs, 48 GiB, no huge pages."""


PAGE = {GIB: GIB}


def clause(
    topology: Topology,
    policy: str,
    count: float = 1,
    memory: float = 1,
    hugepages: dict[int, int] | None = None,
    **more: str,
) -> str:
    """The first clause of the refusal of a container on an empty machine."""
    of = pod("p", {"policy": policy, **more})
    wants = resources(count, memory, hugepages=hugepages)
    return first_clause(World(topology).reject(of, wants=wants).message)


def told(topology: Topology, annotations: dict[str, str], cpus: float, **more: object) -> str:
    """The explanation of one container on an empty machine, on one line."""
    of = pod("p", annotations)
    wants = resources(cpus, 1, **more)  # type: ignore[arg-type]
    machine = NodeModel(topology=topology, settings=Settings())
    found = admit(NodeSnapshot(machine, NodeState()), of, container(of, wants=wants))
    return " ".join(sentences.render_text(of_decision(machine, found), 400).split())


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_case_19_no_huge_pages_are_named_and_not_memory(policy: str) -> None:
    """It read "Memory: 1 GiB needed, which no set of NUMA nodes has"."""
    expected = "hugepages-1Gi: 1 GiB needed, all NUMA nodes that may serve it have 0 B"
    assert clause(EIGHT, policy, hugepages=PAGE) == expected
    text = told(EIGHT, {"policy": policy}, 1, hugepages=PAGE)
    assert "Huge pages of 1 GiB: 1 GiB needed, all NUMA nodes together have 0 B." in text
    assert (
        "Memory: 1 GiB needed, 48 of 48 GiB free on all NUMA nodes together, but not together with "
        "the other resources." in text
    )
    assert f"Policy {policy} rejects it: {expected}." in text


def test_case_19_best_effort_names_what_is_not_there() -> None:
    """It read "no set of NUMA nodes has enough memory left"."""
    text = told(EIGHT, {"policy": "best-effort"}, 1, hugepages=PAGE)
    assert (
        "Hugepages-1Gi: 1 GiB needed, 0 B free on all NUMA nodes that may be used, so its "
        "memory may come from all of them." in text
    )


def test_case_19_huge_pages_that_lie_on_several_numa_nodes_are_named() -> None:
    """Memory is judged together with them, fits on each NUMA node, and was blamed."""
    topology = two_by_four(hugepages={GIB: GIB})
    pages = {GIB: 2 * GIB}
    assert (
        clause(topology, "single-numa-node", hugepages=pages)
        == "hugepages-1Gi: 2 GiB needed, more than the 1 GiB of any one NUMA node, even an "
        "empty one"
    )
    world = World(topology)
    world.put("first", {"policy": "single-numa-node"}, 1, 1, pages=PAGE)
    rejected = world.rejected("p", {"policy": "restricted"}, 1, 1, pages=pages)
    assert first_clause(rejected.message) == (
        "hugepages-1Gi: 2 GiB needed, 1 GiB free on all NUMA nodes together"
    )


def test_case_19_memory_and_huge_pages_that_never_meet() -> None:
    """Memory is free on one NUMA node, huge pages on the other: both are named, none blamed."""
    world = World(two_by_four(hugepages={GIB: 2 * GIB}))
    for name, memory, pages in (("memory", 5, None), ("pages", 1, {GIB: 2 * GIB})):
        of = pod(name, {"policy": "single-numa-node"})
        world.place(of, wants=resources(1, memory, hugepages=pages))
    rejected = world.rejected("p", {"policy": "single-numa-node"}, 1, 4, pages=PAGE)
    assert first_clause(rejected.message) == (
        "memory and hugepages-1Gi: each fits, but not on the same NUMA nodes: 4 GiB on NUMA node "
        "1, 1 GiB on NUMA node 0"
    )


ONE_LESS = build_synthetic_topology(
    sockets=2, numa_per_socket=4, cores_per_numa=8, memory_gib=6, offline=CPUSet([0])
)
"""32 CPUs are on any two of its NUMA nodes but the first."""
SIXTEEN = build_synthetic_topology(
    sockets=4, numa_per_socket=4, cores_per_numa=2, threads=1, memory_gib=6
)
"""Too large to count sets: the poorest NUMA nodes tell."""


@pytest.mark.parametrize(
    ("topology", "cpus", "said"),
    [
        (EIGHT, 24, "2 NUMA nodes: any two of them."),
        (EIGHT, 40, "3 NUMA nodes: any three of them."),
        (ONE_LESS, 32, "2 NUMA nodes: NUMA nodes 1-2 or 1,3 or 1,4 or 1,5 or 17 other sets."),
        (SIXTEEN, 3, "2 NUMA nodes: any two of them."),
    ],
)
def test_case_19_sets_are_named_or_counted(topology: Topology, cpus: float, said: str) -> None:
    """It read "0-1 or 0,2 or 0,3 or 0,4" where all 28 pairs fit."""
    assert f"would need {said}" in told(topology, {"policy": "best-effort"}, cpus)


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
def test_case_19_what_the_machine_has_is_said(policy: str) -> None:
    """It read "needs 130 exclusive CPUs" and never that the machine has 128."""
    assert (
        clause(EIGHT, policy, 130, cpus="exclusive")
        == "cpu: 130 exclusive CPUs needed, this machine has 128 for containers"
    )


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_case_19_a_policy_is_not_explained_as_a_load(policy: str) -> None:
    """It read "policy: best-effort (annotation …): when it is busy"."""
    text = told(EIGHT, {"policy": policy, "cpus": "exclusive", "numamem": "1"}, 1.5)
    assert f"policy: {policy} (annotation numa.kubernetes.io/policy): it is placed on " in text
    text = told(EIGHT, {"policy": policy, "cpus": "exclusive", "numamem": "1"}, 2)
    assert "busy" not in text
    listed = told(EIGHT, {"numamem": "1", "policy": "none"}, 2)
    assert "policy: none (annotation numa.kubernetes.io/policy): it is placed on any NUMA" in listed


def test_case_19_one_or_several() -> None:
    """It read "on NUMA node 0-1"."""
    world = World(EIGHT)
    world.put("p", {"policy": "best-effort"}, 24, 1)
    reasons = [a.reason for a in world.agent.current.state.allocations.values()]
    assert reasons == ["24 exclusive CPUs on NUMA nodes 0-1"]


@pytest.mark.parametrize("reason", sorted(REJECTIONS))
def test_case_19_every_reason_begins_with_what_failed(reason: str) -> None:
    rejected = REJECTIONS[reason]()
    assert not problem(rejected), rejected.message
    told = shortage(first_clause(rejected.message))
    assert told is None or reason in WITHHELD or told[1] > told[2]


def test_case_19_tables_do_not_say_0_left_where_there_never_was_anything() -> None:
    """Memory-only NUMA nodes had LEFT 0 of no CPUs."""
    manifest = pods.pod("a", 2, "1Gi", {"policy": "single-numa-node"})
    machine = "synthetic:sockets=2,numa=1,cores=4,threads=1,memory=8Gi,memory-only=64Gi"
    for more in ([], ["--compare", "strategy=pack"]):
        arguments = ["simulate", "--machine", machine, *more, "-"]
        done = CliRunner().invoke(cli, arguments, input=manifest)
        assert done.exit_code == 0, done.output
        rows = [line.split() for line in done.output.splitlines() if line.startswith("2 ")]
        if more:
            assert rows == [["2", "-", "-", "64", "GiB", "-", "-", "64", "GiB"]]
        else:
            assert rows == [["2", "-", "-", "-", "-", "64", "GiB", "0", "B", "64", "GiB"]]


def test_case_19_status_does_not_say_0_of_0() -> None:
    used = {
        "exclusive": "", "shared": "", "reserved": "", "cpuFreeMilli": 0,
        "cpuCapacityMilli": 0, "memoryFreeBytes": 0, "memoryBytes": 0,
    }  # fmt: skip
    memory_only = {**used, "id": 2, "memoryFreeBytes": 63 * GIB, "memoryBytes": 64 * GIB}
    cpu_only = {**used, "id": 3, "cpuFreeMilli": 3500, "cpuCapacityMilli": 4000}
    cpu_only["freeExclusiveCPUs"] = 3
    rows = [line.split() for line in numa_node_table_lines([memory_only, cpu_only])]
    assert rows[1] == ["2", "-", "-", "-", "-", "-", "63", "GiB", "of", "64", "GiB"]
    assert rows[2] == ["3", "-", "-", "-", "3", "3.5", "of", "4", "-"]


def test_case_19_memory_that_is_tied_by_the_kubelets_rules() -> None:
    """Enough is free; a NUMA node that serves one container by itself joins no group."""
    world = World(two_by_four(), Settings(kubelet=KubeletRules(memory=True)))
    world.put("first", {"policy": "single-numa-node"}, 1, 1)
    rejected = world.rejected("p", {"cpus": "exclusive"}, 1, 12)
    assert first_clause(rejected.message) == (
        "memory: 12 GiB needed, 15 GiB free, but not together by the kubelet's rules "
        "(kubeletCompatibility: memory)"
    )


SMALL = machines.snc_single_no_smt(cores_per_numa=2)


@pytest.fixture
def world() -> World:
    made = World(SMALL)
    made.synchronize()
    return made


def noted(world: World) -> list[tuple[str, str, str, int]]:
    return [
        (n.notice_kind, n.reason, n.pod, n.count) for n in world.history.notices.notices_after()
    ]


def test_a_rejection_is_noted_once_however_often_the_kubelet_asks(world: World) -> None:
    for attempt in range(3):
        of = pod("web", {"numacpu": "63"})
        rejected = world.reject(of, container(of, id=f"attempt-{attempt}"))
    assert noted(world) == [("rejected", rejected.reason, "web", 3)]
    assert world.history.rejected_count == 3
    (notice,) = world.history.notices.notices_after()
    assert notice.message == rejected.message
    assert (notice.pod_uid, notice.container) == ("uid-web", "app")


def test_observing_notes_nothing_because_nothing_happens() -> None:
    world = World(SMALL, observe=True)
    world.synchronize()
    of = pod("web", {"numacpu": "63"})
    world.create(of, container(of))
    assert world.history.rejections
    assert noted(world) == []
