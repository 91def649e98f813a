"""What is kept of a decision explains as much as the decision itself, in little memory."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nri_numa.agent.agent import Agent
from nri_numa.engine import admit
from nri_numa.engine.align.hints import ResourceDemand
from nri_numa.engine.align.policies import AlignmentRequest, align_demands
from nri_numa.engine.decision import DecisionTrace
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain.explanation import StoredExplanation
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import PodTable, Policy, QoSClass
from nri_numa.observe import logs
from nri_numa.observe.traces import pack_trace, unpack_explanation
from tests.beds.world import GIB, MemoryStore, StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

MACHINE = NodeModel(topology=machines.snc_smt(), settings=Settings(defaults={"smt": "spread"}))


def again(trace: DecisionTrace) -> StoredExplanation:
    """Through the small form and back."""
    who = trace.pod.namespace, trace.pod.name, trace.container.name
    return unpack_explanation(pack_trace(trace), who, MACHINE.topology.distance)


def test_large_machines_take_little_more() -> None:
    machine = NodeModel(topology=machines.sixty_four_nodes(), settings=Settings())
    reading = MeasuredFree(memory={i: GIB + 4096 * i for i in machine.assignable_numa_nodes})
    of = pod("web", {"policy": "restricted"})
    decision = admit.admit(
        NodeSnapshot(machine, NodeState(), reading), of, container(of, wants=resources(2, 0.5))
    )
    assert len(pack_trace(decision.trace).data) < 1300
    assert again(decision.trace).basis.free_memory == decision.trace.free_memory


def test_one_width_for_all_resources_is_kept() -> None:
    """Without it, memory that fits on one NUMA node was said to be wider than ideal on two."""
    of, both = pod("web"), {0: 4, 1: 4}
    problem = AlignmentRequest(
        demands=(
            ResourceDemand(resource="cpu", need=8, capacity=both, free_amounts=both),
            ResourceDemand(resource="memory", need=1, capacity=both, free_amounts=both),
        ),
        numa_ids=NUMASet([0, 1]),
        policy=Policy.RESTRICTED,
        distance=MACHINE.topology.distance,
        one_width=True,
    )
    alignment = align_demands(problem)
    assert alignment.preferred
    restored = again(DecisionTrace(pod=of, container=container(of), alignment=alignment)).alignment
    assert restored is not None
    assert restored.resource_summaries == alignment.resource_summaries


def agent(
    machine: NodeModel = MACHINE,
    later: Callable[[Callable[[], object]], object] = lambda function: function(),
    store: MemoryStore | None = None,
) -> Agent:
    store = MemoryStore() if store is None else store
    made = agent_of(machine, clock=StillClock(lambda: 7.0, later=later), store=store)
    made.synchronize(PodTable.from_pods(()), ())
    return made


def test_a_trace_is_packed_after_the_reply_and_can_be_read_before() -> None:
    waiting: list[Callable[[], object]] = []
    made = agent(later=waiting.append)
    for n in range(60):
        of = pod(f"a{n}", {"policy": "best-effort"}, qos=QoSClass.BURSTABLE)
        made.create_container(of, container(of, wants=resources(0.1)))
    assert len(waiting) == 1
    assert "a0-app" not in made.history.packed_traces()
    assert made.history.explanation_of("a0-app") is not None
    made.stop_container("a1-app")
    rounds = 0
    while waiting:
        waiting.pop()()
        rounds += 1
    assert rounds > 1  # not all in one go
    assert "a0-app" in made.history.packed_traces()
    assert made.history.explanation_of("a0-app") is not None
    assert made.history.explanation_of("a1-app") is None


@pytest.mark.parametrize(("annotations", "budget"), [({"policy": "best-effort"}, 4096), ({}, 2048)])
def test_a_container_costs_at_most_four_kilobytes(annotations: dict[str, str], budget: int) -> None:
    """State and explanation together; names and ids as long as real ones."""
    topology = build_synthetic_topology(
        sockets=2, numa_per_socket=4, cores_per_numa=16, memory_gib=64 << 10
    )
    store = MemoryStore()
    made = agent(
        NodeModel(topology=topology, settings=Settings(cpu_overcommit=1000.0)), store=store
    )

    def create(n: int) -> None:
        of = replace(
            pod(f"deployment-5d89c7b6f-{n:05}", annotations, qos=QoSClass.BURSTABLE),
            id=f"{n:064x}",
            uid=f"{n:08x}-1111-2222-3333-444444444444",
            labels={"app": f"label-{n}"},
        )
        wants = resources(0.5 + n / 1000, 0.1 + n / 1e5)
        made.create_container(of, container(of, "server", wants, id=f"{n + (1 << 60):064x}"))

    for n in range(20):
        create(n)
    logs.set_level("error")  # pytest would keep every line, and count as ours
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(1000, 1200):
            create(n)
        store.documents.clear()  # the real store's are on disk
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / 200
    finally:
        tracemalloc.stop()
        logs.set_level("info")
    assert each < budget
