"""Policies: which hints count, who is admitted, and the reasons that are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nri_numa.engine.align.hint_reasons import HintState, sets_text
from nri_numa.engine.align.hints import DeviceDemand, FixedHints, Hint, HintDemand, ResourceDemand
from nri_numa.engine.align.policies import Alignment, align
from nri_numa.engine.values.workload import Device, DeviceRequest, Policy
from nri_numa.machine.cpuset import NUMASet

NONE, BEST_EFFORT = Policy.NONE, Policy.BEST_EFFORT
RESTRICTED, SINGLE = Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE
GIB = 1 << 30


def near(i: int, j: int) -> int:
    return 10 + abs(i - j)


def place(
    policy: Policy,
    n: int,
    *demands: HintDemand,
    rank: dict[int, int] | None = None,
    closest: bool = True,
    exact_upto: int = 10,
) -> Alignment:
    return align(
        demands,
        numa_ids=NUMASet(range(n)),
        policy=policy,
        distance=near,
        prefer_closest=closest,
        rank=rank,
        exact_upto=exact_upto,
    )


def verdict(alignment: Alignment) -> tuple[bool, str | None, bool]:
    affinity = alignment.affinity
    return (
        alignment.admitted,
        None if affinity is None else str(affinity),
        alignment.preferred,
    )


def cpu(need: int, *free_of: tuple[int, int], unit: str | None = "cpus") -> ResourceDemand:
    return ResourceDemand(
        resource="cpu",
        need=need,
        capacity={i: capacity for i, (_, capacity) in enumerate(free_of)},
        available={i: free for i, (free, _) in enumerate(free_of)},
        unit=unit,
    )


def memory(gib: int, *free_of: tuple[int, int], resource: str = "memory") -> ResourceDemand:
    return ResourceDemand(
        resource=resource,
        need=gib * GIB,
        capacity={i: capacity * GIB for i, (_, capacity) in enumerate(free_of)},
        available={i: free * GIB for i, (free, _) in enumerate(free_of)},
    )


def gpu(count: int, *numa_nodes: int | None, taken: str = "", owned: str = "") -> DeviceDemand:
    return DeviceDemand(
        request=DeviceRequest(
            resource="gpu",
            count=count,
            devices=tuple(
                Device(
                    id=f"{k}",
                    numa_nodes=frozenset() if node is None else frozenset({node}),
                    available=f"{k}" not in taken,
                )
                for k, node in enumerate(numa_nodes)
            ),
        ),
        owned=frozenset(owned),
    )


TIGHT = cpu(4, (2, 4), (3, 4))
"""Two NUMA nodes of four CPUs; no one has four free."""


class TestVerdicts:
    """One table over the policies."""

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            (NONE, (True, None, False)),
            (BEST_EFFORT, (True, "0-1", False)),
            (RESTRICTED, (False, "0-1", False)),
            (SINGLE, (False, None, False)),
        ],
    )
    def test_wider_than_an_empty_machine_would_need(
        self, policy: Policy, expected: tuple[bool, str | None, bool]
    ) -> None:
        assert verdict(place(policy, 2, TIGHT)) == expected

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            (BEST_EFFORT, (True, "0-1", True)),
            (RESTRICTED, (True, "0-1", True)),
            (SINGLE, (False, None, False)),
        ],
    )
    def test_two_numa_nodes_where_one_could_never_do(
        self, policy: Policy, expected: tuple[bool, str | None, bool]
    ) -> None:
        assert verdict(place(policy, 3, cpu(6, (4, 4), (4, 4), (4, 4)))) == expected

    @pytest.mark.parametrize("policy", [BEST_EFFORT, RESTRICTED, SINGLE])
    def test_one_numa_node_is_enough(self, policy: Policy) -> None:
        assert verdict(place(policy, 2, cpu(3, (2, 4), (3, 4)))) == (True, "1", True)

    def test_no_wish_is_admitted_without_affinity(self) -> None:
        assert verdict(place(SINGLE, 2, FixedHints("a", None))) == (True, None, True)
        assert verdict(place(SINGLE, 2)) == (True, None, True)
        assert verdict(place(RESTRICTED, 2)) == (True, "0-1", True)

    def test_on_a_machine_of_one_numa_node_single_gives_no_mask(self) -> None:
        assert verdict(place(SINGLE, 1, cpu(1, (1, 1)))) == (True, None, True)
        assert verdict(place(RESTRICTED, 1, cpu(1, (1, 1)))) == (True, "0", True)

    def test_impossible_is_refused_unless_best_effort(self) -> None:
        for policy, admitted in ((BEST_EFFORT, True), (RESTRICTED, False), (SINGLE, False)):
            assert place(policy, 2, cpu(100, (4, 4), (4, 4))).admitted is admitted

    def test_single_leaves_out_hints_of_several_numa_nodes(self) -> None:
        wide = FixedHints("a", (Hint(NUMASet([0, 1]), True), Hint(NUMASet([1]), False)))
        assert verdict(place(SINGLE, 2, wide)) == (False, None, False)

    def test_single_takes_a_wished_numa_node_over_none(self) -> None:
        loose = FixedHints("a", (Hint(None, True), Hint(NUMASet([1]), True)))
        assert verdict(place(SINGLE, 3, loose)) == (True, "1", True)
        wide = FixedHints("a", (Hint(None, True), Hint(NUMASet([1, 2]), True)))
        assert verdict(place(SINGLE, 3, wide)) == (True, None, True)

    def test_single_does_not_look_at_distances(self) -> None:
        """Even where firmware calls a NUMA node far from itself."""
        found = align(
            [cpu(1, (1, 1), (1, 1))],
            numa_ids=NUMASet([0, 1]),
            policy=SINGLE,
            distance=lambda i, j: 20 - i - j,
        )
        assert verdict(found) == (True, "0", True)

    def test_the_strategy_decides_between_equal_numa_nodes(self) -> None:
        free = cpu(2, (4, 4), (4, 4), (4, 4))
        rank = {0: 2, 1: 0, 2: 1}
        for policy in (RESTRICTED, SINGLE):
            assert verdict(place(policy, 3, free, rank=rank)) == (True, "1", True)
            assert verdict(place(policy, 3, free, gpu(1, 0, 2), rank=rank)) == (True, "2", True)


class TestReasons:
    """A sentence that names the resource, the need, and what each NUMA node had."""

    @pytest.mark.parametrize(
        ("policy", "demands", "expected"),
        [
            (NONE, [TIGHT], "policy none looks at no NUMA nodes"),
            (RESTRICTED, [], "every NUMA node suits"),
            (SINGLE, [FixedHints("a", None)], "every NUMA node suits"),
            (RESTRICTED, [cpu(4, (2, 4), (4, 4))], "NUMA node 1 suits every resource"),
            (
                RESTRICTED,
                [TIGHT],
                "cpu: 4 exclusive CPUs needed, at most 3 CPUs free on one NUMA node: on an empty "
                "machine 1 NUMA node would do, now it takes 2 (NUMA node 0: 2 CPUs free of 4 "
                "CPUs; NUMA node 1: 3 CPUs free of 4 CPUs)",
            ),
            (
                SINGLE,
                [TIGHT],
                "cpu: 4 exclusive CPUs needed, at most 3 CPUs free on one NUMA node (NUMA node 0: "
                "2 CPUs free of 4 CPUs; NUMA node 1: 3 CPUs free of 4 CPUs)",
            ),
            (
                SINGLE,
                [cpu(1500, (1000, 1000), (1000, 1000), unit="millicpu")],
                "cpu: 1.5 CPUs needed, more than the 1 CPU of any one NUMA node (NUMA node 0: 1 "
                "CPU free of 1 CPU; NUMA node 1: 1 CPU free of 1 CPU)",
            ),
            (
                RESTRICTED,
                [memory(9, (2, 4), (3, 4))],
                "memory: 9 GiB needed, all NUMA nodes that may serve it have 8 GiB "
                "(NUMA node 0: 2 GiB free of 4 GiB; NUMA node 1: 3 GiB free of 4 GiB)",
            ),
            (
                RESTRICTED,
                [memory(6, (2, 4), (3, 4))],
                "memory: 6 GiB needed, 5 GiB free on all NUMA nodes together (NUMA node 0: 2 GiB "
                "free of 4 GiB; NUMA node 1: 3 GiB free of 4 GiB)",
            ),
            (
                RESTRICTED,
                [memory(1, (0, 0), (0, 0), resource="hugepages-16Gi")],
                "hugepages-16Gi: 1 GiB needed, all NUMA nodes that may serve it have 0 bytes (NUMA "
                "node 0: 0 bytes free of 0 bytes; NUMA node 1: 0 bytes free of 0 bytes)",
            ),
            (
                RESTRICTED,
                [cpu(4, (4, 4), (0, 4)), memory(2, (1, 4), (4, 4))],
                "cpu and memory: each fits, but not on the same NUMA nodes: 4 exclusive CPUs on "
                "NUMA node 0, 2 GiB on NUMA node 1",
            ),
            (
                RESTRICTED,
                [cpu(4, (4, 4), (4, 4)), memory(6, (4, 4), (4, 4))],
                "cpu and memory: different numbers of NUMA nodes needed: 4 exclusive CPUs on 1 "
                "NUMA node, 6 GiB on 2 NUMA nodes",
            ),
            (
                RESTRICTED,
                [gpu(3, 0, 1)],
                "gpu: 3 needed, more than the 2 there are (NUMA node 0: 1 free of 1; NUMA node 1: "
                "1 free of 1)",
            ),
            (
                RESTRICTED,
                [gpu(3, 0, 1, None)],
                "gpu: 3 needed, but only 2 of 3 devices say which NUMA node they belong to (NUMA "
                "node 0: 1 free of 1; NUMA node 1: 1 free of 1)",
            ),
            (
                RESTRICTED,
                [gpu(2, 0, 1, taken="1")],
                "gpu: 2 needed, 1 of 2 devices are free (NUMA node 0: 1 free of 1; NUMA node 1: "
                "0 free of 1)",
            ),
            (
                RESTRICTED,
                [gpu(2, 0, 1, owned="0")],
                "gpu: 2 needed, while the container holds 1 (NUMA node 0: 1 free of 1; NUMA node "
                "1: 0 free of 1)",
            ),
            (RESTRICTED, [FixedHints("gpu", ())], "gpu: no place suits"),
            (
                SINGLE,
                [FixedHints("gpu", (Hint(NUMASet([0, 1]), True),))],
                "gpu has its place already, which is not one NUMA node",
            ),
            (
                RESTRICTED,
                [FixedHints("gpu", (Hint(NUMASet([0]), False),))],
                "gpu: has its place already: {0}✗",
            ),
            (
                SINGLE,
                [
                    cpu(4, (4, 4), (0, 4)),
                    FixedHints("gpu", (Hint(None, True), Hint(NUMASet([0, 1]), True))),
                    memory(2, (1, 4), (4, 4)),
                ],
                "cpu and memory: each fits, but not on the same NUMA nodes: 4 exclusive CPUs on "
                "NUMA node 0, 2 GiB on NUMA node 1",
            ),
            (
                RESTRICTED,
                [FixedHints("gpu", (Hint(NUMASet([0]), True),)), cpu(2, (0, 2), (2, 2))],
                "gpu and cpu: each fits, but not on the same NUMA nodes: gpu on NUMA node 0, 2 "
                "exclusive CPUs on NUMA node 1",
            ),
        ],
    )
    def test_the_sentence(self, policy: Policy, demands: list[HintDemand], expected: str) -> None:
        assert place(policy, 2, *demands).reason == expected

    def test_two_wide_resources_that_never_meet(self) -> None:
        wide = cpu(8, (4, 4), (4, 4), (0, 4), (0, 4))
        other = memory(8, (0, 4), (0, 4), (4, 4), (4, 4))
        found = place(RESTRICTED, 4, wide, other)
        assert verdict(found) == (False, "0-1", False)
        assert found.reason == (
            "cpu and memory: each fits, but not on the same NUMA nodes: 8 exclusive CPUs on NUMA "
            "nodes 0-1, 8 GiB on NUMA nodes 2-3"
        )

    def test_memory_tied_to_groups(self) -> None:
        tied = ResourceDemand(
            resource="memory",
            need=2 * GIB,
            capacity={0: GIB, 1: GIB, 2: GIB},
            available={0: GIB, 1: GIB, 2: GIB},
            groups={0: NUMASet([0]), 1: NUMASet([1]), 2: NUMASet([2])},
            assigned=NUMASet([0, 1, 2]),
        )
        assert "its NUMA nodes are tied to groups" in place(RESTRICTED, 3, tied).reason

    def test_what_is_held_elsewhere(self) -> None:
        held = ResourceDemand(
            resource="cpu",
            need=2,
            capacity={0: 2, 1: 2},
            available={0: 2, 1: 2},
            required=NUMASet([5]),
        )
        assert "not together with what is held already" in place(RESTRICTED, 2, held).reason

    def test_many_numa_nodes_are_cut(self) -> None:
        found = place(RESTRICTED, 40, cpu(8, *[(3, 4)] * 40))
        assert found.reason.endswith(
            "NUMA node 7: 3 CPUs free of 4 CPUs; 32 more with at most 3 CPUs free)"
        )


class TestSummaries:
    """What each resource asked and which masks suit it."""

    def test_masks_and_widths(self) -> None:
        (found,) = place(RESTRICTED, 2, TIGHT).resources
        assert (found.state, found.preferred_width, found.narrowest_width) == (
            HintState.MASKS,
            1,
            2,
        )
        assert [str(h) for h in found.hints] == ["{0-1}✗"]
        assert found.hint_count == 1
        assert [(n.numa_node, n.free, n.capacity) for n in found.numa_nodes] == [
            (0, 2, 4),
            (1, 3, 4),
        ]

    def test_samples_are_the_narrowest(self) -> None:
        (found,) = place(RESTRICTED, 4, cpu(1, *[(1, 1)] * 4)).resources
        assert [str(h) for h in found.hints] == ["{0}✓", "{1}✓", "{2}✓", "{3}✓"]
        assert found.hint_count == 15
        assert found.text.startswith("cpu: 1 CPU needed, fits on 1 NUMA node (")

    @pytest.mark.parametrize(
        ("demand", "text"),
        [
            (cpu(0, (1, 1), unit=None), "cpu: 0 asked for, so any place suits"),
            (gpu(2, None, None), "gpu: 2 needed, of devices that belong to no NUMA node"),
            (FixedHints("a", None), "a: any place suits"),
            (
                ResourceDemand(
                    resource="memory",
                    need=3 << 20,
                    capacity={0: 1},
                    available={0: 1},
                    nothing_is_no_wish=True,
                ),
                "memory: 3 MiB needed, which no mask has; left to the allocation to refuse",
            ),
        ],
    )
    def test_no_wish(self, demand: HintDemand, text: str) -> None:
        (found,) = place(RESTRICTED, 1, demand).resources
        assert (found.state, found.text) == (HintState.NONE, text)

    @pytest.mark.parametrize("required", [NUMASet(), NUMASet([3])])
    def test_large_machines_tell_whether_every_set_suits(self, required: NUMASet) -> None:
        free = dict.fromkeys(range(40), 4)
        demand = ResourceDemand(
            resource="cpu", need=6, capacity=free, available=free, required=required
        )
        (found,) = place(RESTRICTED, 40, demand).resources
        assert (found.narrowest_width, found.narrowest_count) == (2, None)
        assert found.every_set is not bool(required)
        poor = ResourceDemand(resource="cpu", need=6, capacity=free, available={**free, 7: 1})
        assert not place(RESTRICTED, 40, poor).resources[0].every_set
        (all_of_it,) = place(RESTRICTED, 40, replace(demand, need=160)).resources
        assert (all_of_it.narrowest_width, all_of_it.every_set) == (40, False)

    @pytest.mark.parametrize(
        ("sets", "every", "count", "text"),
        [
            ([], False, 0, "other NUMA nodes"),
            (["0", "1"], False, 2, "NUMA nodes 0 or 1"),
            (["0"], False, None, "NUMA node 0"),
            (["0-1", "0,2", "0-2"], False, 5, "NUMA nodes 0-1 or 0,2 or 3 other sets"),
            (["0-1"], True, 6, "any two of them"),
            (["0-8"], True, None, "any 9 of them"),
        ],
    )
    def test_sets(self, sets: list[str], every: bool, count: int | None, text: str) -> None:
        assert sets_text(sets, every, count) == text

    def test_memory_types_that_need_several_numa_nodes_and_never_meet(self) -> None:
        """Judged together: each fits on two NUMA nodes, and on four only together."""
        amounts = dict.fromkeys(range(4), 4 * GIB)
        low, high = {0: 4 * GIB, 1: 4 * GIB}, {2: 4 * GIB, 3: 4 * GIB}
        kinds = [
            ResourceDemand(
                resource=name, need=8 * GIB, capacity=amounts, available=free, share="memory"
            )
            for name, free in (("memory", low), ("hugepages-1Gi", high))
        ]
        assert str(place(RESTRICTED, 4, *kinds).shortage) == (
            "memory and hugepages-1Gi: each fits, but not on the same NUMA nodes: 8 GiB on 2 NUMA "
            "nodes, 8 GiB on 2 NUMA nodes"
        )

    def test_large_machines_are_not_counted(self) -> None:
        groups = ResourceDemand(
            resource="memory",
            need=1,
            capacity=dict.fromkeys(range(20), 1),
            available=dict.fromkeys(range(20), 1),
            groups={},
            assigned=NUMASet([3]),
        )
        options = FixedHints("a", (Hint(NUMASet([3]), True),))
        found = place(RESTRICTED, 20, cpu(2, *[(1, 2)] * 20), groups, options).resources
        assert [r.hint_count for r in found] == [None, None, None]
        assert [r.narrowest_width for r in found] == [2, 1, 1]
        assert [str(h) for h in found[1].hints] == ["{0}✓", "{1}✓", "{2}✓", "{3}✓"]


class TestCandidates:
    """Who lost, and by what."""

    def told(self, found: Alignment) -> list[tuple[str, bool, str]]:
        return [(str(c.affinity), c.preferred, c.separated_by) for c in found.candidates]

    def test_equal_but_higher_numbers(self) -> None:
        found = place(RESTRICTED, 2, cpu(1, (1, 1), (1, 1)))
        assert self.told(found) == [
            ("1", True, "its NUMA nodes have higher numbers"),
            (
                "0-1",
                False,
                "it is wider than an empty machine would need, or resources would differ on it",
            ),
        ]

    def test_ranked_lower(self) -> None:
        found = place(SINGLE, 2, cpu(1, (1, 1), (1, 1)), rank={0: 1, 1: 0})
        assert self.told(found) == [("0", True, "the strategy ranks it lower")]

    def test_farther_apart(self) -> None:
        found = place(RESTRICTED, 3, cpu(2, (1, 1), (1, 1), (1, 1)))
        assert self.told(found)[1] == (
            "0,2",
            True,
            "its NUMA nodes are farther apart: average distance 11 instead of 10.5",
        )

    def test_not_preferred_ones(self) -> None:
        found = place(
            BEST_EFFORT,
            4,
            FixedHints("cpu", (Hint(NUMASet([0, 1]), False), Hint(NUMASet([0, 1, 2]), False))),
            FixedHints("gpu", tuple(Hint(NUMASet(m), False) for m in ([0], [0, 1], [0, 1, 2]))),
        )
        assert self.told(found) == [
            ("0", False, "it is narrower than the 2 NUMA nodes that the neediest resource takes"),
            ("0-2", False, "it takes 3 NUMA nodes instead of 2"),
        ]

    def test_large_machines_tell_the_next_preferred(self) -> None:
        found = place(RESTRICTED, 20, cpu(2, *[(1, 1)] * 20), closest=False)
        assert [c[0] for c in self.told(found)] == ["0,2", "1-2", "0,3", "1,3"]

    def test_nothing_to_tell(self) -> None:
        assert place(NONE, 2, TIGHT).candidates == ()
        assert place(SINGLE, 2, TIGHT).candidates == ()
        assert place(RESTRICTED, 2).candidates == ()
        assert place(BEST_EFFORT, 2, FixedHints("a", ())).candidates == ()
        assert place(BEST_EFFORT, 12, cpu(2, *[(1, 2)] * 12)).candidates == ()

    def test_single_tells_no_wider_masks(self) -> None:
        loose = FixedHints("a", (Hint(None, True), Hint(NUMASet([1, 2]), True)))
        assert place(SINGLE, 3, loose).candidates == ()
