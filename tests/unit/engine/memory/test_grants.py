"""Accounting by NUMA node, widening before OOM, and the kubelet's memory groups."""

from collections.abc import Mapping

import pytest

from nri_numa.engine.place.memory import (
    AmountsByNode,
    MemoryTable,
    kubelet_memory_grant,
    widen_for_memory,
)
from nri_numa.model.cpuset import NUMASet


def near(i: int, j: int) -> int:
    return 10 + 10 * abs(i - j)


class TestWidening:
    """Grow a mask by as few and as close NUMA nodes as possible."""

    def widen(
        self,
        mask: set[int],
        need: int,
        left: AmountsByNode,
        candidates: set[int] | None = None,
        also: tuple[tuple[int, AmountsByNode], ...] = (),
    ) -> str | None:
        whole = set(left) if candidates is None else candidates
        found = widen_for_memory(NUMASet(mask), [(need, left), *also], near, NUMASet(whole))
        return None if found is None else str(found)

    @pytest.mark.parametrize(
        ("mask", "need", "left", "expected"),
        [
            ({1}, 5, {0: 5, 1: 5, 2: 5}, "1"),  # it suffices
            ({1}, 6, {0: 0, 1: 5, 2: 1}, "1-2"),
            ({1}, 6, {0: 1, 1: 5, 2: 1}, "0-1"),  # equally close: the lower value
            ({0}, 6, {0: 1, 1: 1, 2: 1, 3: 5}, "0,3"),  # fewer beat closer
            ({0}, 10, {0: 1, 1: 4, 2: 4, 3: 5}, "0-1,3"),
            ({0}, 99, {0: 1, 1: 4}, None),
            ({0}, 5, {0: 1, 1: 4}, "0-1"),
            ({0}, 3, {0: -9, 1: 3}, "0-1"),  # an over-committed node takes nothing away
            ({2}, 0, {0: 1}, "2"),
            (set(), 2, {0: 1, 1: 4}, "1"),
            (set(), 0, {0: 1}, ""),
        ],
    )
    def test_table(
        self, mask: set[int], need: int, left: dict[int, int], expected: str | None
    ) -> None:
        assert self.widen(mask, need, left) == expected

    def test_needs_met_on_different_numa_nodes_take_both(self) -> None:
        assert self.widen({0}, 2, {1: 2, 2: 0, 3: 0}, {1, 2, 3}, also=((2, {2: 2}),)) == "0-2"


class TestKubeletRules:
    """The kubelet's memory manager, for operators who want its verdicts."""

    CAPACITY: Mapping[str, AmountsByNode] = {
        "memory": dict.fromkeys(range(4), 10),
        "hugepages-2Mi": {0: 4, 1: 4},
    }

    def table(self, *assigned: dict[int, int], memory: AmountsByNode | None = None) -> MemoryTable:
        """With containers that have so much memory on each NUMA node."""
        capacity = self.CAPACITY if memory is None else {"memory": memory}
        return MemoryTable.from_assignments(
            capacity, [(NUMASet(has), {"memory": has}) for has in assigned]
        )

    def grant(
        self,
        table: MemoryTable,
        affinity: set[int] | None = None,
        preferred: bool = False,
        **needs: int,
    ) -> str:
        mask = None if affinity is None else NUMASet(affinity)
        return str(kubelet_memory_grant(table, needs, mask, preferred))

    def test_a_preferred_wish_needs_a_preferred_hint(self) -> None:
        # One NUMA node would do on an empty machine; 0 and 1 are bound, 2 and 3 together fit.
        assert self.grant(self.table({0: 6}, {1: 6}), memory=11) == "2-3"
        table = self.table({0: 10, 1: 1}, memory={0: 10, 1: 10})
        rejected = self.grant(table, None, True, memory=3)
        assert rejected == "failed to find the default preferred hint"
        assert self.grant(table, memory=3) == "0-1"

    def test_a_short_mask_is_extended(self) -> None:
        table = self.table({3: 5})
        assert self.grant(table, {1}, memory=12) == "0-1"
        rejected = self.grant(table, {3}, memory=12)
        assert rejected == "NUMA node 3 has too little memory, and no larger set fits"

    def test_groups_never_overlap(self) -> None:
        table = self.table({0: 10, 1: 2})
        rejected = self.grant(table, {1}, memory=2)
        assert rejected == "NUMA node 1 is tied to the group of NUMA nodes 0-1, expected 1"
        rejected = self.grant(table, {1, 2}, memory=2)
        assert rejected == "NUMA node 1 is tied to the group of NUMA nodes 0-1, expected 1-2"
        table = self.table({0: 2})
        rejected = self.grant(table, {0, 1}, memory=2)
        assert rejected == "NUMA node 0 is tied to the group of NUMA node 0, expected 0-1"
        assert self.grant(table, {0}, memory=2) == "0"
