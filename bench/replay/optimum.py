"""What somebody could have done who knew the whole trace: an integer program, solved by HiGHS.

Each pod is on one NUMA node from its beginning to its end, or refused; nothing moves. Refused
are as few pods as possible, though a placement that decides at once may not refuse one that
fits. No placement that keeps pods on one NUMA node can refuse fewer; not every one of those
solutions can be found without knowing the future.
"""

from __future__ import annotations

from collections import Counter
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

    rejected: int
    at_least: int

    @property
    def proven(self) -> bool:
        """Whether there is no better one."""
        return self.rejected == self.at_least


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


def fewest_rejected(
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


def moved_least(
    topology: Topology, reserved: CPUSet, pods: Sequence[Pod], homes: Sequence[int | None]
) -> list[int] | None:
    """A NUMA node for each of these pods at one moment, of as few moves as can be; None for none.

    Pods of one size are alike, so it is a question of how many are where.

    Args:
        topology: of the machine.
        reserved: CPUs that no pod may have.
        pods: all of them.
        homes: where each is; None for one that comes.
    """
    nodes = sorted(topology.numa_nodes)
    size_of = [(pod.cpus, pod.memory / GIB) for pod in pods]
    sizes = sorted(set(size_of))
    there = Counter(zip(size_of, homes, strict=True))
    had = numpy.array([there[size, node] for size in sizes for node in nodes])
    room = [
        (len(set(n.cpus) - set(reserved)), n.memory_bytes / GIB)
        for _, n in sorted(topology.numa_nodes.items())
    ]
    # How many there are, and of these those that stay.
    each, one, none = numpy.eye(len(had)), numpy.eye(len(nodes)), numpy.zeros(len(had))
    counts = [size_of.count(size) for size in sizes]
    rows = numpy.kron(numpy.eye(len(sizes)), numpy.ones(len(nodes)))
    limits = [
        (numpy.kron([size[k] for size in sizes], one), [amounts[k] for amounts in room])
        for k in (0, 1)
    ]
    found = milp(
        numpy.concatenate([none, none - 1]),
        constraints=[
            LinearConstraint(numpy.hstack([rows, 0 * rows]), counts, counts),
            *(LinearConstraint(numpy.hstack([m, 0 * m]), -numpy.inf, most) for m, most in limits),
            LinearConstraint(numpy.hstack([each, -each]), 0, numpy.inf),
        ],
        integrality=numpy.ones(2 * len(had)),
        bounds=Bounds(0, numpy.concatenate([none + len(pods), had])),
    )
    if found.x is None:
        return None
    number = found.x[: len(had)].round().astype(int).reshape(len(sizes), len(nodes))
    left = {(s, n): number[i, j] for i, s in enumerate(sizes) for j, n in enumerate(nodes)}
    placed: list[int | None] = []
    for size, home in zip(size_of, homes, strict=True):
        stays = home is not None and left[size, home] > 0
        placed.append(home if stays else None)
        if stays and home is not None:
            left[size, home] -= 1
    for p, size in enumerate(size_of):
        if placed[p] is None:
            placed[p] = next(node for node in nodes if left[size, node] > 0)
            left[size, placed[p]] -= 1
    return [node for node in placed if node is not None]
