"""Rare ways through decisions, each of which somebody will meet one day."""

from __future__ import annotations

import json

from msgspec.structs import replace

from nri_numa.engine.decision import Reading
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.allocations import allocation
from tests.beds.explained import of_decision
from tests.beds.world import GIB, PREFIX, World, container, pod, resources
from tests.machines import named as machines

SINGLE = {"policy": "single-numa-node"}
BURSTABLE = QoSClass.BURSTABLE


def lose_checkpoint(world: World) -> None:
    """The state directory is gone when the agent comes back."""
    world.restart(lost=True)


def test_a_stranger_with_more_cpus_than_it_asks_for_is_decided_anew() -> None:
    world = World(machines.single_smt())
    of = pod("a", {"cpus": "exclusive"})
    made = container(of, wants=resources(1))
    world.meet(of, replace(made, resources=replace(made.resources, cpus="0-3")))
    world.synchronize()
    assert len(world.cpus("a-app")) == 1


def test_widen_cannot_help_where_no_width_would() -> None:
    world = World(machines.single_smt())
    assert (
        world.refused(
            "a", {"cpus": "exclusive", "smt": "full-core", "on-failure": "widen"}, 3
        ).reason
        == "SMTAlignmentError"
    )


def test_an_annotation_that_a_resize_made_stale_is_not_believed() -> None:
    """It says *owner of CPU 0*; by now it shares the pool, and must not be taken for its owner."""
    world = World(machines.single_smt())
    world.put("a", {"policy": "best-effort"}, 1, 1)
    assert json.loads(world.live["a-app"].annotations[PREFIX + "assigned"])["kind"] == "exclusive"
    assert world.update("a-app", resources(1.5, 1)) is None
    lose_checkpoint(world)
    assert not world.agent.state.owned
    world.check()


def test_nobody_is_adopted_as_the_owner_of_the_last_cpus() -> None:
    world = World(machines.single_no_smt())
    of = pod("a", {"cpus": "exclusive"})
    made = container(of, wants=resources(4))
    text = (
        '{"cpus":"0-3","mems":"","policy":"none","kind":"exclusive","numa":"0","preferred":true,'
        '"reason":"r"}'
    )
    world.meet(
        of,
        replace(
            made,
            annotations={PREFIX + "assigned": text},
            resources=replace(made.resources, cpus="0-3"),
        ),
    )
    world.synchronize()
    assert world.allocation("a-app").kind is Kind.UNBOUND
    world.check()


def test_memory_nodes_that_were_widened_since_are_kept_from_the_runtime() -> None:
    """Somebody widened them after the annotation was written; the runtime is the truth."""
    world = World(machines.snc_smt())
    world.put("a", {"policy": "best-effort"}, 1.5, 4, qos=BURSTABLE)
    world.unseen("a-app", mems="0-1")
    lose_checkpoint(world)
    assert world.has("a-app")[1] == "0-1"


def test_what_is_booked_on_a_numa_node_that_is_no_longer_used_does_not_count() -> None:
    """A memory tier was listed by hand; computed pins may not use it, and do not see its books."""
    topology = synthetic(sockets=1, numa_per_socket=1, cores_per_numa=2, memory_only_gib=[8])
    tier = str(topology.memory_nodes - topology.cpu_nodes)
    world = World(topology, reading=Reading(memory={0: GIB, int(tier): GIB, 9: 0}))
    world.put("t", {"numacpu": "0", "numamem": tier}, 1, 1)
    assert world.put("a", {"policy": "best-effort"}, 0.5, 0.5, qos=BURSTABLE)[1] == "0"


def test_shared_containers_on_several_nodes_hold_back_no_single_cpu() -> None:
    world = World(machines.dual_no_smt())
    world.put("wide", {"policy": "best-effort", "bind": "cpu"}, 9.5, qos=BURSTABLE)
    assert (
        len(CPUSet.parse(world.put("own", {**SINGLE, "bind": "cpu", "on-failure": "widen"}, 2)[0]))
        == 2
    )


def test_a_refusal_names_only_what_is_needed() -> None:
    world = World(machines.dual_smt(), Settings(capacity_factor={0: 0, 1: 0}))
    refused = world.refused("idle", SINGLE, qos=QoSClass.BEST_EFFORT)
    assert "needs a place to run" in refused.message
    refused = world.refused("bare", {**SINGLE, "bind": "cpu"}, 1.5, 4, qos=BURSTABLE)
    assert "GiB" not in refused.message
    memory = pod("memory", SINGLE, qos=BURSTABLE)
    wants = Resources(memory_limit=200 * GIB)
    refused = world.refuse(memory, wants=wants)
    assert "200 GiB memory" in refused.message
    assert "0 CPUs" not in refused.message


def test_memory_outside_our_own_cpuset_is_refused_as_such() -> None:
    topology = replace(machines.snc_smt(), withheld_memory=NUMASet([3]))
    world = World(topology)
    refused = world.refused("a", {"numamem": "3"})
    assert refused.reason == "NUMANodeNotAllowed"
    assert "NUMA node 3" in refused.message


def test_pairing_across_numa_nodes_is_told_as_the_reason() -> None:
    from nri_numa.engine.admit import admit
    from nri_numa.engine.decision import Admitted
    from nri_numa.engine.explain import sentences

    world = World(machines.dual_smt())
    pair = {"policy": "best-effort", "smt": "pair"}
    world.put("high", {**pair, "load": "high"}, 2, 1)
    low = pod("low", {**pair, "load": "low"})
    decision = admit(
        world.agent.machine, world.agent.state, low, container(low, wants=resources(2, 1))
    )
    assert isinstance(decision, Admitted)
    told = sentences.text(of_decision(world.agent.machine, decision))
    assert "beside containers of the opposite load" in " ".join(told.split())


def test_what_cannot_be_true_of_an_allocation_is_said() -> None:
    from nri_numa.engine.state import contradiction

    base = allocation()
    one, other = CPUSet([1]), CPUSet([2])
    assert contradiction(base) == ""
    assert "must own" in contradiction(replace(base, kind=Kind.EXCLUSIVE))
    assert "must have NUMA" in contradiction(replace(base, kind=Kind.SHARED))
    assert "cannot own" in contradiction(replace(base, owned=True, cpus=one))
    owner = replace(base, kind=Kind.EXCLUSIVE, owned=True, cpus=one)
    assert contradiction(replace(owner, idle=other)) == ""
    assert "siblings" in contradiction(replace(owner, idle=one))
    assert "siblings" in contradiction(replace(base, idle=other))
    assert "can be soft" in contradiction(replace(base, soft=True))
    assert "foreign" in contradiction(replace(base, kind=Kind.FOREIGN, mems=NUMASet([0])))


def test_an_annotation_that_names_foreign_numa_nodes_is_not_believed() -> None:
    world = World(machines.single_no_smt())
    of = pod("a", {"policy": "best-effort"}, qos=BURSTABLE)
    made = container(of, wants=resources(0.5))
    text = (
        '{"cpus":"","mems":"7","policy":"best-effort","kind":"shared","numa":"7",'
        '"preferred":true,"reason":"r"}'
    )
    world.meet(of, replace(made, annotations={PREFIX + "assigned": text}))
    world.synchronize()
    assert world.has("a-app")[1] == "0"


def test_a_quota_comes_back_when_an_owner_becomes_shared_without_a_new_one() -> None:
    """A resize by shares alone: what was lifted is written again."""
    world = World(machines.dual_smt())
    world.put("a", SINGLE, 2, 1)
    assert world.live["a-app"].resources.cpu_quota == -1
    world.settings = Settings(lift_quota=False)
    from nri_numa.engine.decision import Machine

    world.agent.machine = Machine(topology=world.topology, settings=world.settings)
    assert world.update("a-app", Resources(memory_limit=2 * GIB)) is None
    assert world.live["a-app"].resources.cpu_quota == 200_000
