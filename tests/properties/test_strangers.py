"""A node full of strangers is taken in at once, byte for byte as if they came one after the other.

What is compared is what outlives the call: the lines of the journal, the explanations, what goes
into each answer, and where every container ends.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Decision, RunningAdmission
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain.explanation import (
    explain_allocation,
    explain_rejection,
    stored_explanation,
)
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.resync import admit_running, rebuild_node_state
from nri_numa.engine.state import ContainerKind, NodeState, state_invariant_violations
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    ChangedStateIds,
    Container,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.store.journal import changed_documents, encode
from tests.beds.world import container, pod, resources
from tests.machines import named as machines

ASKED: tuple[Mapping[str, str], ...] = (
    {},
    {"policy": "best-effort"},
    {"policy": "restricted", "scope": "pod"},
    {"policy": "single-numa-node"},
    {"policy": "best-effort", "cpus": "exclusive"},
    {"cpus": "exclusive", "smt": "isolate", "on-failure": "unpinned"},
    {"numacpu": "2-3"},
    {"numacpu": "4", "cpus": "exclusive"},
    {"numamem": "1"},
    {"bind": "none"},
    {"policy": "bogus"},
)
wants = st.builds(
    resources,
    st.sampled_from([0, 0.05, 0.5, 1, 2, 4]),
    st.sampled_from([0, 0.1, 2, 30]),
    hugepages=st.sampled_from([None, {2 << 20: 4 << 20}]),
)
pods = st.tuples(
    st.sampled_from(ASKED),
    st.sampled_from(list(QoSClass)),
    # Two of one name: the later takes the place of the first.
    st.lists(st.tuples(st.sampled_from(["app", "app", "side"]), wants), min_size=1, max_size=3),
)
nodes = st.lists(pods, min_size=1, max_size=6)
topologies = st.sampled_from(
    [machines.snc_single(), machines.snc_smt(cores_per_numa=2, memory_gib=64)]
)

Node: TypeAlias = list[tuple[Mapping[str, str], QoSClass, list[tuple[str, Resources]]]]


def _full(node: Node) -> tuple[list[PodSandbox], list[Container]]:
    sandboxes, live = [], []
    for n, (asks, qos, containers) in enumerate(node):
        of = pod(f"p{n}", asks, qos=qos)
        sandboxes.append(of)
        live += [
            container(of, name, wants=needs, id=f"{n}-{i}", oom_score_adj=900)
            for i, (name, needs) in enumerate(containers)
        ]
    return sandboxes, live


def _journal(before: NodeState, after: NodeState, ids: Iterable[str], uids: Iterable[str]) -> bytes:
    change = ChangedStateIds(tuple(sorted(ids)), tuple(sorted(uids)))
    return encode(changed_documents(before, after, change))


def _said(decision: Decision, calm: Collection[str]) -> bytes:
    """All that is told of a decision: what the container gets, what others get, and why."""
    if isinstance(decision, Admitted):
        why = explain_allocation(
            decision.allocation, stored_explanation(decision.trace), decision.adjustment.cpus
        )
        others = [u for u in decision.updates if u.container_id not in calm]
        told: object = (decision.adjustment, others, decision.change, decision.warnings)
    else:
        why = explain_rejection(
            stored_explanation(decision.trace), decision.reason, decision.message
        )
        told = ()
    return msgspec.json.encode((why, told))


def _after(
    state: NodeState, live: Iterable[Container], updates: Iterable[ContainerUpdate], every: str
) -> dict[str, Resources]:
    """Resources of every container that is known, once the runtime has done as it was told.

    One without a cpuset has the CPUs that everybody shares.
    """
    has = {c.id: replace(c.resources, cpus=every) for c in live}
    for update in updates:
        now = has[update.container_id]
        quota = now.cpu_quota if update.cpu_quota is None else update.cpu_quota
        has[update.container_id] = replace(
            now, cpus=update.cpus or now.cpus, mems=update.mems or now.mems, cpu_quota=quota
        )
    return {i: has[i] for i in state.allocations}


@given(nodes, topologies)
def test_strangers_are_decided_as_if_they_came_one_by_one(node: Node, topology: Topology) -> None:
    machine = NodeModel(topology=topology, settings=Settings(), key=b"signs")
    sandboxes, live = _full(node)
    of = {p.id: p for p in sandboxes}
    told = rebuild_node_state(
        NodeSnapshot(machine, NodeState(), now=7.0), PodTable.from_pods(sandboxes), live
    )
    state, one_by_one = NodeState(), []
    updates: list[ContainerUpdate] = []
    for stranger in sorted(live, key=lambda c: (of[c.pod_id].full_name, c.name, c.id)):
        met: RunningAdmission = admit_running(
            NodeSnapshot(machine, state, now=7.0), of[stranger.pod_id], stranger
        )
        one_by_one.append(met.decision)
        state = met.state
        updates += met.updates
    ids, uids = [c.id for c in live], [p.uid for p in sandboxes]
    assert _journal(NodeState(), told.state, ids, uids) == _journal(NodeState(), state, ids, uids)
    assert replace(told.state, serial=state.serial) == state
    assert state_invariant_violations(told.state, topology, machine.settings) == []
    # Those that nothing asks to pin are told by their allocation alone.
    calm = {a.container_id for a in told.unpinned}
    assert [_said(d, calm) for d in told.decisions] == [
        _said(d, calm)
        for d in one_by_one
        if not (isinstance(d, Admitted) and d.allocation.container_id in calm)
    ]
    pool = str(NodeSnapshot(machine, state).pool)
    assert _after(state, live, told.updates, pool) == _after(state, live, updates, pool)


@given(nodes, nodes, topologies)
def test_shared_states_never_change(first: Node, then: Node, topology: Topology) -> None:
    """The remembered state, and that of each decision which tells others."""
    machine = NodeModel(topology=topology, settings=Settings())
    sandboxes, live = _full(first)
    prior = rebuild_node_state(
        NodeSnapshot(machine, NodeState(), now=7.0), PodTable.from_pods(sandboxes), live
    ).state
    known, text = list(prior.allocations), repr(prior)
    more, others = _full(then)
    more = [replace(p, id=f"n{p.id}", uid=f"n{p.uid}") for p in more]
    others = [replace(c, id=f"n{c.id}", pod_id=f"n{c.pod_id}") for c in others]
    every = PodTable.from_pods([*sandboxes, *more])
    told = rebuild_node_state(NodeSnapshot(machine, prior, now=9.0), every, [*live, *others])
    assert repr(prior) == text
    for decision in told.decisions:
        if not isinstance(decision, Admitted):
            continue
        assert state_invariant_violations(decision.state, topology, machine.settings) == []
        mine = decision.allocation.container_id
        if decision.updates:
            assert decision.state.allocations[mine] is decision.allocation
        else:  # that before all of them
            assert set(decision.state.allocations) <= set(known)


def test_the_pods_of_known_containers_are_not_asked_for() -> None:
    """Converting all pods of a node takes longer than comparing what is known of them."""
    machine = NodeModel(topology=machines.snc_single(), settings=Settings())
    asks: Mapping[str, str] = {"policy": "best-effort"}
    sandboxes, live = _full([(asks, QoSClass.BURSTABLE, [("app", resources(1))])] * 3)
    prior = rebuild_node_state(
        NodeSnapshot(machine, NodeState(), now=7.0), PodTable.from_pods(sandboxes), live
    ).state
    asked: list[str] = []

    def make(pod_id: str) -> PodSandbox:
        asked.append(pod_id)
        return next(p for p in sandboxes if p.id == pod_id)

    every = PodTable({p.id: p.uid for p in sandboxes}, make)
    known = rebuild_node_state(NodeSnapshot(machine, prior, now=9.0), every, live)
    assert (asked, len(known.adopted)) == ([], 3)
    larger = replace(live[1], resources=resources(2))
    again = rebuild_node_state(
        NodeSnapshot(machine, prior, now=9.0), every, [live[0], larger, live[2]]
    )
    assert asked == [sandboxes[1].id]
    assert [a.container_id for a, _ in again.resized] == [larger.id]
    assert again.state.allocations[live[0].id].kind is ContainerKind.SHARED
