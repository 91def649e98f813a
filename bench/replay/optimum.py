"""What somebody could have done who knew the whole trace: an integer program, solved by HiGHS.

Each pod is on one NUMA node from its beginning to its end, or refused; nothing moves. Refused
are as few pods as possible, though a placement that decides at once may not refuse one that
fits. No placement that keeps pods on one NUMA node can refuse fewer; not every one of those
solutions can be found without knowing the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from bench.replay.trace import GIB, Pod
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology


@dataclass(frozen=True, slots=True)
class Optimum:
    """The fewest refusals.

    Attributes:
        refused: pods in the best solution that was found.
        at_least: no solution has fewer; equal to ``refused`` where that is proven to be the best.
    """

    refused: int
    at_least: int

    @property
    def proven(self) -> bool:
        """Whether there is no better one."""
        return self.refused == self.at_least


def moments(pods: Sequence[Pod]) -> list[list[int]]:
    """Sets of pods that are there together; every other one is part of one of these.

    Args:
        pods: in order of their arrival.
    """
    found: list[list[int]] = []
    there: list[int] = []
    for place, pod in enumerate(pods):
        staying = [one for one in there if pods[one].ends > pod.begins]
        if len(staying) < len(there):
            found.append(there)
        there = [*staying, place]
    return [*found, there] if there else found


def fewest_refused(
    topology: Topology, reserved: CPUSet, pods: Sequence[Pod], *, seconds: float
) -> Optimum:
    """The fewest pods that must be refused, or between what that is.

    Args:
        topology: of the machine.
        reserved: CPUs that no pod may have.
        pods: in order of their arrival.
        seconds: for the search.
    """
    nodes = sorted(topology.numa_nodes)
    room = [
        (
            len(set(topology.numa_nodes[i].cpus) - set(reserved)),
            topology.numa_nodes[i].memory_bytes / GIB,
        )
        for i in nodes
    ]
    width = len(nodes)
    values: list[float] = []
    columns: list[int] = []
    starts, most = [0], []

    def row(entries: Sequence[tuple[int, float]], limit: float) -> None:
        columns.extend(column for column, _ in entries)
        values.extend(value for _, value in entries)
        starts.append(len(columns))
        most.append(limit)

    for p in range(len(pods)):
        row([(p * width + n, 1.0) for n in range(width)], 1.0)
    for there in moments(pods):
        for n, (cpus, memory) in enumerate(room):
            if sum(pods[p].cpus for p in there) > cpus:
                row([(p * width + n, float(pods[p].cpus)) for p in there], float(cpus))
            if sum(pods[p].memory for p in there) > memory * GIB:
                row([(p * width + n, pods[p].memory / GIB) for p in there], memory)
    size = len(pods) * width
    matrix = csr_array((values, columns, starts), shape=(len(most), size))
    found = milp(
        -numpy.ones(size),
        constraints=LinearConstraint(matrix, -numpy.inf, most),
        integrality=numpy.ones(size),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds},
    )
    placed = 0 if found.x is None else round(-found.fun)
    # The dual bound is a number of pods placed that nobody exceeds.
    dual = found.mip_dual_bound
    limit = min(len(pods), int(-dual + 1e-6)) if dual is not None else len(pods)
    return Optimum(len(pods) - placed, len(pods) - max(placed, limit))
