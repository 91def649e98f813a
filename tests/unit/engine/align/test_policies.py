"""Policies: which hints count, who is admitted, and the reasons that are told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.align.hints import DeviceDemand, HintDemand, ResourceDemand
from nri_numa.engine.align.policies import Alignment, Problem, align, sets_text
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest, Policy

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
) -> Alignment:
    return align(Problem(demands, NUMASet(range(n)), policy, near, closest, rank))


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


def gpu(count: int, *numa_nodes: int | None) -> DeviceDemand:
    return DeviceDemand(
        request=DeviceRequest(
            resource="gpu",
            count=count,
            devices=tuple(
                Device(id=f"{k}", numa_nodes=frozenset() if node is None else frozenset({node}))
                for k, node in enumerate(numa_nodes)
            ),
        ),
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


class TestReasons:
    """A sentence that names the resource, the need, and what each NUMA node had."""

    @pytest.mark.parametrize(
        ("policy", "demands", "expected"),
        [
            (NONE, [TIGHT], "policy none looks at no NUMA nodes"),
            (RESTRICTED, [], "every NUMA node suits"),
            (SINGLE, [gpu(1, None)], "every NUMA node suits"),
            (RESTRICTED, [cpu(4, (2, 4), (4, 4))], "NUMA node 1 suits every resource"),
            (
                RESTRICTED,
                [TIGHT],
                "cpu: 4 exclusive CPUs needed, at most 3 CPUs free for exclusive use on one NUMA "
                "node: on an empty machine 1 NUMA node would do, now it takes 2 (NUMA node 0: 2 of "
                "4 CPUs free for exclusive use; NUMA node 1: 3 of 4 CPUs free for exclusive use)",
            ),
            (
                SINGLE,
                [TIGHT],
                "cpu: 4 exclusive CPUs needed, at most 3 CPUs free for exclusive use on one NUMA "
                "node (NUMA node 0: 2 of 4 CPUs free for exclusive use; NUMA node 1: 3 of 4 CPUs "
                "free for exclusive use)",
            ),
            (
                SINGLE,
                [cpu(1500, (1000, 1000), (1000, 1000), unit="millicpu")],
                "cpu: 1.5 CPUs needed, more than the 1 CPU of any one NUMA node (NUMA node 0: 1 "
                "of 1 CPU free; NUMA node 1: 1 of 1 CPU free)",
            ),
            (
                RESTRICTED,
                [memory(9, (2, 4), (3, 4))],
                "memory: 9 GiB needed, all NUMA nodes that may serve it have 8 GiB "
                "(NUMA node 0: 2 GiB of 4 GiB free; NUMA node 1: 3 GiB of 4 GiB free)",
            ),
            (
                RESTRICTED,
                [memory(6, (2, 4), (3, 4))],
                "memory: 6 GiB needed, 5 GiB free on all NUMA nodes together (NUMA node 0: 2 GiB "
                "of 4 GiB free; NUMA node 1: 3 GiB of 4 GiB free)",
            ),
            (
                RESTRICTED,
                [memory(1, (0, 0), (0, 0), resource="hugepages-16Gi")],
                "hugepages-16Gi: 1 GiB needed, all NUMA nodes that may serve it have 0 B (NUMA "
                "node 0: 0 B of 0 B free; NUMA node 1: 0 B of 0 B free)",
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
                "gpu: 3 needed, more than the 2 there are (NUMA node 0: 1 of 1 free; NUMA node 1: "
                "1 of 1 free)",
            ),
            (
                RESTRICTED,
                [gpu(3, 0, 1, None)],
                "gpu: 3 needed, but only 2 of 3 devices say which NUMA node they belong to (NUMA "
                "node 0: 1 of 1 free; NUMA node 1: 1 of 1 free)",
            ),
        ],
    )
    def test_the_sentence(self, policy: Policy, demands: list[HintDemand], expected: str) -> None:
        assert place(policy, 2, *demands).reason == expected


class TestSummaries:
    """What each resource asked and which masks suit it."""

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


class TestCandidates:
    """Who lost, and by what."""

    def told(self, found: Alignment) -> list[tuple[str, bool, str]]:
        return [(str(c.affinity), c.preferred, c.text) for c in found.candidates]

    def test_ranked_lower(self) -> None:
        found = place(SINGLE, 2, cpu(1, (1, 1), (1, 1)), rank={0: 1, 1: 0})
        assert self.told(found) == [("0", True, "the strategy ranks it lower")]

    def test_nothing_to_tell(self) -> None:
        assert place(NONE, 2, TIGHT).candidates == ()
        assert place(SINGLE, 2, TIGHT).candidates == ()
        assert place(RESTRICTED, 2).candidates == ()
        assert place(BEST_EFFORT, 2, gpu(2, 0)).candidates == ()
        assert place(BEST_EFFORT, 12, cpu(2, *[(1, 2)] * 12)).candidates == ()

    def test_single_tells_no_wider_masks(self) -> None:
        """Both NUMA nodes of a socket are a preferred set as well, and no result of this policy."""
        found = place(SINGLE, 2, replace(cpu(1, (1, 1), (1, 1)), sockets={0: 0, 1: 0}))
        assert [told[0] for told in self.told(found)] == ["1"]


def test_sets_that_nothing_names_are_others() -> None:
    assert sets_text([], False, None) == "other NUMA nodes"
