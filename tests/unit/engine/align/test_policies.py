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


def place(policy: Policy, n: int, *demands: HintDemand) -> Alignment:
    return align(Problem(demands, NUMASet(range(n)), policy, near))


def cpu(need: int, *free_of: tuple[int, int], unit: str | None = "cpus") -> ResourceDemand:
    return ResourceDemand(
        resource="cpu",
        need=need,
        capacity={i: capacity for i, (_, capacity) in enumerate(free_of)},
        available={i: free for i, (free, _) in enumerate(free_of)},
        unit=unit,
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


class TestReasons:
    """Of CPUs, with what each NUMA node had; others are in tests/golden/searches."""

    @pytest.mark.parametrize(
        ("policy", "demands", "expected"),
        [
            (NONE, [TIGHT], "policy none looks at no NUMA nodes"),
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
        ],
    )
    def test_the_sentence(self, policy: Policy, demands: list[HintDemand], expected: str) -> None:
        assert place(policy, 2, *demands).reason == expected


def test_memory_types_that_need_several_numa_nodes_and_never_meet() -> None:
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
