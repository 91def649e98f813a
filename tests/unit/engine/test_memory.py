"""Accounting by NUMA node, widening before OOM, and the kubelet's memory groups."""

from __future__ import annotations

import pytest

from nri_numa.engine.memory import (
    Amounts,
    MemoryBooks,
    MemoryGrant,
    MemoryRefused,
    allocatable,
    available,
    cells,
    charge,
    kubelet_grant,
    usable_memory_nodes,
    widen_for_memory,
)
from nri_numa.engine.policies import align
from nri_numa.engine.workload import Policy
from nri_numa.topology.cpuset import NO_NUMA_NODES, NUMASet


def near(i: int, j: int) -> int:
    return 10 + 10 * abs(i - j)


class TestAccounting:
    """What is left on a NUMA node."""

    def test_reserves_and_huge_pages_are_not_allocatable(self) -> None:
        found = allocatable({0: 100, 1: 100, 2: 10}, {0: 30, 2: 50}, [{0: 20, 1: 8}, {1: 2}])
        assert found == {0: 50, 1: 90, 2: 0}

    def test_books_and_kernel_both_limit(self) -> None:
        capacity = {0: 100, 1: 100, 2: 100, 3: 100}
        found = available(capacity, {0: 30, 1: 30, 3: 130}, {0: 90, 1: 50, 2: -5})
        assert found == {0: 70, 1: 50, 2: 0, 3: 0}
        assert available(capacity, {}, None) == capacity

    def test_a_grant_is_booked_node_by_node(self) -> None:
        left = {0: 3, 1: 0, 2: 5}
        assert charge(NUMASet([0, 1, 2]), 4, left) == {0: 3, 2: 1}
        assert charge(NUMASet([0]), 3, left) == {0: 3}
        assert charge(NUMASet([0, 1]), 4, left) is None
        assert charge(NUMASet([0]), 0, left) == {}

    def test_memory_only_numa_nodes_are_for_those_who_ask(self) -> None:
        memory, cpus = NUMASet([0, 1, 4]), NUMASet([0, 1, 2])
        assert usable_memory_nodes(memory, cpus, NO_NUMA_NODES) == NUMASet([0, 1])
        assert usable_memory_nodes(memory, cpus, NUMASet([4, 7])) == NUMASet([0, 1, 4])

    def test_memory_apart_from_all_cpus_is_used(self) -> None:
        assert usable_memory_nodes(NUMASet([2, 3]), NUMASet([0]), NO_NUMA_NODES) == NUMASet([2, 3])


class TestWidening:
    """Grow a mask by as few and as close NUMA nodes as possible."""

    def widen(
        self,
        mask: set[int],
        need: int,
        left: Amounts,
        candidates: set[int] | None = None,
        also: tuple[tuple[int, Amounts], ...] = (),
    ) -> str | None:
        whole = set(left) if candidates is None else candidates
        found = widen_for_memory(NUMASet(mask), need, left, near, NUMASet(whole), also)
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

    def test_only_candidates_are_added(self) -> None:
        assert self.widen({0}, 5, {0: 1, 1: 9, 2: 9}, {2}) == "0,2"
        assert self.widen({0}, 5, {0: 1, 1: 9}, set()) is None

    def test_huge_pages_are_looked_at_together(self) -> None:
        pages: tuple[tuple[int, Amounts], ...] = ((2, {2: 2}), (0, {}))
        assert self.widen({0}, 5, {0: 1, 1: 9, 2: 9}, also=pages) == "0,2"
        assert self.widen({0}, 1, {0: 1, 1: 9, 2: 9}, also=((1, {}),)) is None

    def test_needs_met_on_different_numa_nodes_take_both(self) -> None:
        assert self.widen({0}, 2, {1: 2, 2: 0, 3: 0}, {1, 2, 3}, also=((2, {2: 2}),)) == "0-2"

    def test_many_numa_nodes_take_bounded_work(self) -> None:
        left = {i: 1 + i % 7 for i in range(64)}
        found = widen_for_memory(NUMASet([5]), 150, left, near, NUMASet(range(64)))
        assert found is not None
        assert NUMASet([5]) <= found
        assert sum(left[i] for i in found) >= 150


class TestCells:
    """Which NUMA nodes are tied together."""

    def test_at_first_each_is_alone(self) -> None:
        found = cells(NUMASet([0, 2]), [])
        assert (found.groups, found.assigned) == (
            {0: NUMASet([0]), 2: NUMASet([2])},
            NO_NUMA_NODES,
        )

    def test_an_assignment_ties_its_mask(self) -> None:
        found = cells(NUMASet(range(4)), [NUMASet([0, 1]), NUMASet([3]), NUMASet([0, 1])])
        assert found.groups[0] == found.groups[1] == NUMASet([0, 1])
        assert found.assigned == NUMASet([0, 1, 3])

    def test_overlapping_masks_become_one_group(self) -> None:
        found = cells(NUMASet(range(4)), [NUMASet([0, 1]), NUMASet([2, 3]), NUMASet([1, 2, 9])])
        assert set(found.groups.values()) == {NUMASet(range(4))}


MiB = 1 << 20


class TestKubeletRules:
    """The kubelet's memory manager, for operators who want its verdicts."""

    BOOKS = MemoryBooks(
        capacity={"memory": dict.fromkeys(range(4), 10), "hugepages-2Mi": {0: 4, 1: 4}}
    )

    def grant(
        self,
        books: MemoryBooks,
        affinity: set[int] | None = None,
        preferred: bool = False,
        **needs: int,
    ) -> MemoryGrant | MemoryRefused:
        return kubelet_grant(
            books, needs, None if affinity is None else NUMASet(affinity), preferred
        )

    def granted(self, books: MemoryBooks, key: str, mask: set[int], amount: int) -> MemoryBooks:
        found = self.grant(books, mask, memory=amount)
        assert isinstance(found, MemoryGrant)
        return books.granted(key, found)

    def mask(self, found: MemoryGrant | MemoryRefused) -> str:
        return str(found.mask) if isinstance(found, MemoryGrant) else found.message

    def test_a_grant_takes_the_mask_and_books_it(self) -> None:
        found = self.grant(self.BOOKS, {1, 2}, memory=12)
        assert found == MemoryGrant(mask=NUMASet([1, 2]), charges={"memory": {1: 10, 2: 2}})

    def test_without_a_mask_it_takes_its_best_hint(self) -> None:
        assert self.mask(self.grant(self.BOOKS, memory=12)) == "0-1"
        books = self.granted(self.BOOKS, "a", {0}, 6)
        assert self.mask(self.grant(books, memory=6)) == "1"

    def test_a_preferred_wish_needs_a_preferred_hint(self) -> None:
        books = self.BOOKS
        for i in range(4):
            books = self.granted(books, f"{i}", {i}, 6)
        books = books.released("2").released("3")
        # One NUMA node would do on an empty machine; 0 and 1 are bound, 2 and 3 together fit.
        found = kubelet_grant(books, {"memory": 11}, None, preferred=False)
        assert self.mask(found) == "2-3"
        books = MemoryBooks(capacity={"memory": {0: 10, 1: 10}})
        books = self.granted(books, "a", {0, 1}, 11)
        found = self.grant(books, None, True, memory=3)
        assert self.mask(found) == "failed to find the default preferred hint"
        assert self.mask(self.grant(books, memory=3)) == "0-1"

    def test_no_hint_fails_at_the_grant(self) -> None:
        assert self.mask(self.grant(self.BOOKS, memory=99)).startswith("failed to get the default")

    def test_a_short_mask_is_extended(self) -> None:
        books = self.granted(self.BOOKS, "a", {3}, 5)
        assert self.mask(self.grant(books, {1}, memory=12)) == "0-1"
        refused = self.mask(self.grant(books, {3}, memory=12))
        assert refused == "NUMA node 3 has too little memory, and no wider set that holds it fits"

    def test_wide_masks_are_made_of_free_numa_nodes(self) -> None:
        books = MemoryBooks(capacity={"memory": {0: 20, 1: 5, 2: 5, 3: 5}})
        books = self.granted(books, "a", {0}, 10)
        assert self.mask(self.grant(books, memory=12)) == "1-3"

    def test_groups_never_overlap(self) -> None:
        books = self.granted(self.BOOKS, "a", {0, 1}, 12)
        refused = self.mask(self.grant(books, {1}, memory=2))
        assert refused == "NUMA node 1 is tied to the group of NUMA nodes 0-1, expected 1"
        refused = self.mask(self.grant(books, {1, 2}, memory=2))
        assert refused == "NUMA node 1 is tied to the group of NUMA nodes 0-1, expected 1-2"
        books = self.granted(self.BOOKS, "a", {0}, 2)
        refused = self.mask(self.grant(books, {0, 1}, memory=2))
        assert refused == "NUMA node 0 is tied to the group of NUMA nodes 0, expected 0-1"
        assert self.mask(self.grant(books, {0}, memory=2)) == "0"

    def test_release_gives_everything_back(self) -> None:
        books = self.granted(self.BOOKS, "a", {0, 1}, 12)
        books = self.granted(books, "b", {0, 1}, 3)
        assert books.free("memory") == {0: 0, 1: 5, 2: 10, 3: 10}
        books = books.released("a")
        assert cells(books.numa_ids, books.masks.values()).groups[0] == NUMASet([0, 1])
        assert books.released("b") == self.BOOKS

    def test_types_are_judged_together(self) -> None:
        found = kubelet_grant(self.BOOKS, {"memory": 2, "hugepages-2Mi": 6}, None, False)
        assert isinstance(found, MemoryGrant)
        assert found.charges == {"memory": {0: 2}, "hugepages-2Mi": {0: 4, 1: 2}}

    @pytest.mark.parametrize("need", [0, -4])
    def test_nothing_asked_is_nothing_granted(self, need: int) -> None:
        assert self.mask(self.grant(self.BOOKS, memory=need)) == "no memory was asked for"

    def test_a_type_the_machine_does_not_have_is_refused(self) -> None:
        found = kubelet_grant(self.BOOKS, {"hugepages-16Gi": 1}, None, False)
        assert self.mask(found).startswith("failed to get the default NUMA affinity")

    def test_memory_of_init_containers_is_not_booked_twice(self) -> None:
        books = self.granted(self.BOOKS, "init", {1}, 8)
        reusable = {"memory": {NUMASet([1]): 8}}
        found = kubelet_grant(books, {"memory": 9}, NUMASet([1]), True, reusable)
        assert isinstance(found, MemoryGrant)
        assert found.charges == {"memory": {1: 1}}
        found = kubelet_grant(books, {"memory": 3}, NUMASet([1]), True, reusable)
        assert isinstance(found, MemoryGrant)
        assert found.charges == {"memory": {}}

    @pytest.mark.parametrize(
        ("needs", "expected"),
        [
            ({"memory": 10}, "0"),
            ({"memory": 11}, "0-1"),
            ({"memory": 11, "hugepages-2Mi": 8}, "0-1"),
            ({"memory": 41}, "0-3"),  # no hint: no wish, and the failure comes at the grant
        ],
    )
    def test_demands_merge_as_the_kubelets_provider_answers(
        self, needs: dict[str, int], expected: str
    ) -> None:
        found = align(
            self.BOOKS.demands(needs),
            numa_ids=self.BOOKS.numa_ids,
            policy=Policy.RESTRICTED,
            distance=near,
        )
        assert (found.admitted, str(found.affinity)) == (True, expected)
