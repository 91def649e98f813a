"""What is read back from files and annotations is believed only when it can be true."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.engine.state import Allocation, ContainerKind, find_allocation_contradiction
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.store import journal
from tests.beds.allocations import allocation

OWNER = allocation(
    kind=ContainerKind.EXCLUSIVE,
    cpus=CPUSet.parse("1"),
    idle_siblings=CPUSet.parse("5"),
    exclusive=True,
    numa_nodes=NUMASet.parse("0"),
    mems=NUMASet.parse("0"),
)
SHARED = replace(
    OWNER, kind=ContainerKind.SHARED, cpus=CPUSet(), idle_siblings=CPUSet(), exclusive=False
)


def document_of(allocation: Allocation) -> dict[str, Any]:
    """As it is read back from the journal."""
    document: dict[str, Any] = msgspec.json.decode(
        journal.encode(journal.allocation_document(allocation))
    )
    return document


@pytest.mark.parametrize("good", [OWNER, SHARED, replace(OWNER, kind=ContainerKind.LISTED)])
def test_what_can_be_true_is_believed(good: Allocation) -> None:
    assert find_allocation_contradiction(good) == ""
    read_back = journal.allocation_from("c", document_of(good))
    assert read_back == good


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(OWNER, cpus=CPUSet()), "must own CPUs"),
        (replace(OWNER, exclusive=False), "must own CPUs"),
        (replace(SHARED, numa_nodes=NUMASet()), "must have NUMA nodes"),
        (replace(OWNER, kind=ContainerKind.UNPINNED), "unpinned cannot own"),
        (replace(OWNER, idle_siblings=CPUSet.parse("1")), "kept idle"),
        (replace(SHARED, idle_siblings=CPUSet.parse("5")), "kept idle"),
        (replace(SHARED, kind=ContainerKind.FOREIGN), "foreign"),
    ],
)
def test_what_cannot_be_true_is_left_out_with_a_reason(bad: Allocation, reason: str) -> None:
    assert reason in find_allocation_contradiction(bad)
    document = document_of(bad)
    state, problems = journal.state_from({"c/c": document})
    assert not state.allocations
    assert reason in problems[0]


@pytest.mark.parametrize("key", ["podID", "podUID", "namespace", "pod", "container", "reason"])
def test_a_name_must_be_a_text(key: str) -> None:
    """A document in place of a name was believed once, and failed the container's stop."""
    document = {**document_of(OWNER), key: {}}
    assert len(journal.state_from({"c/c": document})[1]) == 1
