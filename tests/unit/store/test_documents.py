"""Containers and pods as the checkpoint keeps them: everything that is known, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from nri_numa.engine.state import Allocation, Charge, Former, Kind, NodeState, PodRecord
from nri_numa.engine.values.answers import StateChange
from nri_numa.engine.values.memory_policy import MemoryPolicy
from nri_numa.engine.values.workload import SMT, Load, Policy, QoSClass
from nri_numa.machine.cpuset import CPUSet, NUMASet
from nri_numa.store.documents import (
    allocation_document,
    allocation_from,
    changed_documents,
    pod_document,
    pod_from,
    state_from,
)
from tests.beds.allocations import allocation

BARE = allocation(pod_id="s")
WHOLE = replace(
    BARE,
    kind=Kind.EXCLUSIVE,
    qos=QoSClass.GUARANTEED,
    cpus=CPUSet.parse("1-2"),
    idle=CPUSet.parse("9-10"),
    owned=True,
    numa_nodes=NUMASet([0]),
    mems=NUMASet([0, 2]),
    charges={0: Charge(2000, 5, {2048: 4096}), 2: Charge(0, 7)},
    cpu_milli=2000,
    memory_bytes=12,
    hugepages={2048: 4096},
    policy=Policy.RESTRICTED,
    smt=SMT.ISOLATE,
    load=Load(((0, 60), (120, 180))),
    preferred=False,
    reason="because",
    quota=0,
    slots="0-1,0-2",
    mempolicy=MemoryPolicy.INTERLEAVE,
    since=17.5,
)
SHORT = {
    "pod_id": "s",
    "pod_uid": "u",
    "namespace": "shop",
    "pod": "web",
    "container": "app",
    "kind": "unbound",
    "qos": "BestEffort",
    "since": 0.0,
    "reason": "",
}


def test_a_container_that_is_not_bound_is_a_short_document() -> None:
    """One is written for each container's start."""
    assert allocation_document(BARE) == SHORT
    assert allocation_from("c", SHORT) == BARE


def test_everything_that_is_known_of_a_container_comes_back() -> None:
    document = allocation_document(WHOLE)
    assert document == {
        **SHORT,
        "kind": "exclusive",
        "qos": "Guaranteed",
        "since": 17.5,
        "reason": "because",
        "cpus": "1-2",
        "idle": "9-10",
        "owned": True,
        "numa": "0",
        "mems": "0,2",
        "charges": {"0": [2000, 5, {"2048": 4096}], "2": [0, 7, {}]},
        "cpu_milli": 2000,
        "memory": 12,
        "hugepages": {"2048": 4096},
        "policy": "restricted",
        "smt": "isolate",
        "load": ((0, 60), (120, 180)),
        "preferred": False,
        "quota": 0,
        "slots": "0-1,0-2",
        "mempolicy": "interleave",
    }
    assert allocation_from("c", document) == WHOLE
    usual = {each.name: getattr(BARE, each.name) for each in fields(Allocation)}
    told = {name for name, value in usual.items() if getattr(WHOLE, name) != value}
    same = {"container_id", "pod_id", "pod_uid", "namespace", "pod", "container", "pinned"}
    assert told == usual.keys() - same, "a field of this test is as usual, so it shows nothing"


def test_where_somebody_else_pinned_a_container_comes_back() -> None:
    foreign = replace(BARE, kind=Kind.FOREIGN, pinned=CPUSet.parse("3"))
    assert allocation_document(foreign) == {**SHORT, "kind": "foreign", "pinned": "3"}
    assert allocation_from("c", allocation_document(foreign)) == foreign


@pytest.mark.parametrize(
    ("record", "document"),
    [
        (PodRecord(uid="u", pod_id="s"), None),
        (
            PodRecord(uid="u", pod_id="s", affinity=NUMASet([1]), affinity_preferred=False),
            {"pod_id": "s", "affinity": "1", "preferred": False},
        ),
        (
            PodRecord(uid="u", pod_id="s", affinity=NUMASet([0, 1])),
            {"pod_id": "s", "affinity": "0-1", "preferred": True},
        ),
        (
            PodRecord(uid="u", pod_id="s", former={"a": Former(CPUSet([3]), NUMASet([1]))}),
            {"pod_id": "s", "former": {"a": ["3", "1"]}},
        ),
    ],
)
def test_of_a_pod_only_what_was_decided_for_it_is_kept(
    record: PodRecord, document: dict[str, object] | None
) -> None:
    assert pod_document(record) == document
    if document is not None:
        assert pod_from("u", document) == record


def test_a_pod_of_an_older_checkpoint_had_the_place_it_should() -> None:
    assert pod_from("u", {"pod_id": "s", "affinity": "1"}).affinity_preferred


def test_only_what_a_step_changed_is_written() -> None:
    before = NodeState().with_allocation(BARE)
    after = before.with_allocation(replace(WHOLE, container_id="d")).without("c")
    change = StateChange(containers=("c", "d", "never"), pods=("u", "never"))
    assert changed_documents(before, after, change) == {
        "c/c": None,
        "c/d": allocation_document(WHOLE),
    }
    assert changed_documents(before, before, change) == {}
    # An owner that went leaves its CPUs to whoever replaces it.
    gone = after.without("d")
    change = StateChange(containers=("d",), pods=("u",))
    assert changed_documents(after, gone, change) == {
        "c/d": None,
        "p/u": {"pod_id": "s", "former": {"app": ["1-2", "0"]}},
    }
    assert changed_documents(gone, gone.without_pod("u"), change) == {"p/u": None}


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "other"},
        {"pod": 3},
        {"slots": 3},
        {"cpus": "x"},
        {"charges": {"0": [1]}},
        {"since": "x"},
        {"kind": "exclusive"},
        {"memory": 10**30},
        {"memory": -1},
        {"cpu_milli": 10**30},
        {"hugepages": {"2097152": 10**30}},
        {"charges": {"0": [0, 10**30, {}]}},
        {"quota": -(10**30)},
    ],
)
def test_a_damaged_document_costs_itself_and_is_said(damage: dict[str, object]) -> None:
    state, problems = state_from(
        {"c/bad": {**SHORT, **damage}, "c/good": SHORT, "p/u": {"pod_id": "s"}, "x/y": SHORT}
    )
    assert set(state.allocations) == {"good"}
    assert state.pods["u"].containers == {"good"}
    assert problems[0].startswith("checkpoint entry 'c/bad' is damaged and was left out: ")
    assert problems[1:] == ["checkpoint entry 'x/y' is of no known sort and was left out"]
