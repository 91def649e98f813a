"""What is read back from files and annotations is believed only when it can be true."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.engine.state import Allocation, Kind, contradiction
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import Resources
from nri_numa.store import journal
from tests.beds.allocations import allocation
from tests.beds.world import PREFIX, World, container, pod

OWNER = allocation(
    kind=Kind.EXCLUSIVE,
    cpus=CPUSet.parse("1"),
    idle=CPUSet.parse("5"),
    owned=True,
    numa_nodes=NUMASet.parse("0"),
    mems=NUMASet.parse("0"),
)
SHARED = replace(OWNER, kind=Kind.SHARED, cpus=CPUSet(), idle=CPUSet(), owned=False)


def document_of(allocation: Allocation) -> dict[str, Any]:
    """As it is read back from the journal."""
    document: dict[str, Any] = msgspec.json.decode(
        journal.encode(journal.allocation_document(allocation))
    )
    return document


@pytest.mark.parametrize("good", [OWNER, SHARED, replace(OWNER, kind=Kind.EXPLICIT)])
def test_what_can_be_true_is_believed(good: Allocation) -> None:
    assert contradiction(good) == ""
    read_back = journal.allocation_from("c", document_of(good))
    assert read_back == good


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(OWNER, cpus=CPUSet()), "must own CPUs"),
        (replace(OWNER, owned=False), "must own CPUs"),
        (replace(SHARED, numa_nodes=NUMASet()), "must have NUMA nodes"),
        (replace(OWNER, kind=Kind.UNBOUND), "unbound cannot own"),
        (replace(OWNER, idle=CPUSet.parse("1")), "kept idle"),
        (replace(SHARED, idle=CPUSet.parse("5")), "kept idle"),
        (replace(SHARED, kind=Kind.FOREIGN), "foreign"),
    ],
)
def test_what_cannot_be_true_is_left_out_with_a_reason(bad: Allocation, reason: str) -> None:
    assert reason in contradiction(bad)
    document = document_of(bad)
    state, problems = journal.state_from({"c/c": document})
    assert not state.allocations
    assert reason in problems[0]


@pytest.mark.parametrize("key", ["pod_id", "pod_uid", "namespace", "pod", "container", "reason"])
def test_a_name_must_be_a_text(key: str) -> None:
    """A document in place of a name was believed once, and failed the container's stop."""
    document = {**document_of(OWNER), key: {}}
    assert len(journal.state_from({"c/c": document})[1]) == 1


@pytest.mark.parametrize(
    "forged",
    [
        {"numa": "9"},
        {"mems": "9"},
        {"idle": "1"},
        {"kind": "foreign"},
        {"kind": "shared", "numa": ""},
        {"kind": []},
        "[" * 100_000,
    ],
)
def test_a_forged_note_on_a_container_makes_it_a_stranger(forged: object) -> None:
    """Also one from another machine; the synchronisation goes on for everybody else."""
    note = {
        "cpus": "1",
        "mems": "0",
        "policy": "none",
        "kind": "exclusive",
        "numa": "0",
        "preferred": True,
        "reason": "x",
    }
    text = forged if isinstance(forged, str) else json.dumps(note | dict(forged))  # type: ignore[call-overload]
    world = World(synthetic(sockets=1, numa_per_socket=2, cores_per_numa=2, threads=1))
    of = pod("web")
    made = replace(
        container(of, wants=Resources(cpus="1", cpu_shares=1024)),
        annotations={f"{PREFIX}assigned": text},
    )
    world.pods[of.id], world.live[made.id] = of, made
    world.place(pod("other"))
    world.synchronize()
    allocation = world.agent.state.allocations["web-app"]
    assert allocation.kind is Kind.FOREIGN
    assert not allocation.owned
    world.check()
