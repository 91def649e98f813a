"""Every refusal's first clause names what failed, and what it names did fail."""

from collections.abc import Mapping

from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nri_numa.engine.decision import Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, KubeletRules, QuotasAndPoolFloor, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import GIB, World, container, pod, resources
from tests.checks.rejection_words import first_clause, problem, shortage

MIB2 = 2 << 20

CPUS = st.sampled_from([1.0, 2.0, 1.5, 3.0, 4.0, 7.0, 0.0, 12.0, 40.0])
MEMORY = st.sampled_from([1.0, 2.0, 0.0, 4.0, 6.0, 9.0, 100.0])
PAGES = st.sampled_from([{}, {}, {GIB: GIB}, {GIB: 3 * GIB}, {MIB2: GIB}, {GIB: GIB, MIB2: GIB}])
COMPUTED = st.fixed_dictionaries(
    {"policy": st.sampled_from(["single-numa-node", "restricted", "best-effort", "none"])},
    optional={
        "scope": st.sampled_from(["pod", "container"]),
        "cpus": st.sampled_from(["exclusive", "shared"]),
        "smt": st.sampled_from(["any", "full-core", "isolate"]),
        "on-failure": st.just("reject"),
        "bind": st.sampled_from(["cpu", "cpu+mem"]),
    },
)
LISTED = st.fixed_dictionaries(
    {"numamem": st.sampled_from(["0", "1", "0-1", "7-8"])},
    optional={
        "policy": st.sampled_from(["single-numa-node", "restricted", "best-effort"]),
        "cpus": st.just("exclusive"),
    },
) | st.fixed_dictionaries(
    {"numacpu": st.sampled_from(["0-1", "2", "3-5", "90", "90-91"])},
    optional={"cpus": st.just("exclusive"), "numamem": st.sampled_from(["0", "1", "0-1"])},
)
ANNOTATIONS = COMPUTED | COMPUTED | LISTED
CONTAINERS = st.lists(st.tuples(CPUS, MEMORY, PAGES), min_size=1, max_size=3)
PODS = st.tuples(ANNOTATIONS, CONTAINERS, st.sampled_from(list(QoSClass)), st.booleans())

NODES = st.builds(
    build_synthetic_topology,
    sockets=st.sampled_from([1, 2]),
    numa_per_socket=st.sampled_from([1, 2, 4]),
    cores_per_numa=st.sampled_from([1, 2, 4]),
    threads=st.sampled_from([1, 2]),
    memory_gib=st.just(8),
    hugepages=st.sampled_from([{}, {GIB: 2 * GIB}, {GIB: GIB, MIB2: GIB}]),
    memory_only_gib=st.sampled_from([(), (8,)]),
)
SETTINGS = st.builds(
    Settings,
    kubelet=st.builds(
        KubeletRules,
        memory=st.sampled_from([False, False, True]),
        cpus=st.sampled_from([False, False, True]),
    ),
    reserved_cpus=st.sampled_from([CPUSet(), CPUSet([0])]),
    limits=st.builds(QuotasAndPoolFloor, pool=st.sampled_from([None, CPUAmount(3)])),
)


@given(NODES, SETTINGS, st.lists(PODS, min_size=1, max_size=6), st.none() | st.integers(0, 6))
@hypothesis_settings(deadline=None, max_examples=6 * hypothesis_settings().max_examples)
def test_the_first_clause_of_every_rejection_names_what_failed(
    topology: Topology,
    settings: Settings,
    pods: list[tuple[Mapping[str, str], list[tuple[float, float, dict[int, int]]], QoSClass, bool]],
    free: int | None,
) -> None:
    reading = MeasuredFree(memory=dict.fromkeys(topology.numa_ids, free * GIB)) if free else None
    world = World(topology, settings, reading=reading)
    for number, (asks, containers, qos, told) in enumerate(pods):
        total = resources(
            sum(cpus for cpus, _, _ in containers), sum(memory for _, memory, _ in containers)
        )
        of = pod(f"p{number}", asks, qos=qos, total=total if told else None)
        for place, (cpus, memory, pages) in enumerate(containers):
            made = container(of, f"c{place}", resources(cpus, memory, hugepages=pages))
            answer = world.create(of, made)
            if isinstance(answer, Rejected):
                event(answer.reason)
                assert not problem(answer), answer.message
                _really(world, answer)
                continue
            rejected = world.update(made.id, resources(cpus + 1, memory + 1, hugepages=pages))
            if rejected is not None:
                event(f"resize: {rejected.reason}")
                assert not problem(rejected), rejected.message


def _really(world: World, rejected: Rejected) -> None:
    """What is named was short, and no more is said to be there than there is."""
    clause = first_clause(rejected.message)
    told, machine, state = shortage(clause), world.agent.current.machine, world.agent.current.state
    if told is None or machine.settings.kubelet.memory:
        return
    name, need, have = told
    if name == "memory":
        left, total = (
            NodeSnapshot(machine, state, world.reading).free_memory,
            machine.memory_capacity,
        )
    elif name.startswith("hugepages-"):
        size = MIB2 if name.endswith("-2Mi") else GIB
        left, total = (
            NodeSnapshot(machine, state, world.reading).free_hugepages(size),
            machine.hugepages_capacity(size),
        )
    else:
        return
    assert need > min(left.values())
    assert have <= sum((left if "free" in clause else total).values())
