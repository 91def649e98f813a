"""Pods that come and go, in the shape of a public trace. Generated, never downloaded.

The shape is that of Azure's VM trace of 2017 (Cortez et al., *Resource Central*, SOSP 2017, and the
public data set V1 of it): requests of whole CPUs, few and small sizes, created in batches, more
by day than by night, with lifetimes of which nine in ten are shorter than a day and a few last
weeks. Sizes are of that trace; how often each comes, and the numbers below, are our own round
ones, close to what the paper says: four in five have one or two CPUs, seven in ten
less than 4 GB.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from nri_numa.model.machine import Topology

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """What one pod asks for, and in how many of a thousand cases."""

    cpus: int
    memory: int
    weight: float


SIZES = (
    Size(1, 768 * MIB, 30),
    Size(1, 1792 * MIB, 450),
    Size(2, 3584 * MIB, 300),
    Size(2, 14 * GIB, 10),
    Size(4, 7 * GIB, 110),
    Size(4, 28 * GIB, 10),
    Size(8, 14 * GIB, 70),
    Size(8, 56 * GIB, 15),
    Size(16, 112 * GIB, 5),
)
LIFE_MEDIAN_H = 1.0
LIFE_SIGMA = math.log(24 / LIFE_MEDIAN_H) / NormalDist().inv_cdf(0.9)
"""Lognormal, so that nine in ten are shorter than a day."""
LIFE_LONGEST_H = 30 * 24.0
"""As long as the trace: nobody knows what lasted longer."""
BATCH_MEAN = 2.0
"""Pods of one size that come at once; geometric."""
BY_DAY = 0.4
"""The rate goes up and down by this part of it within a day."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a trace.

    Attributes:
        number: its place in the trace.
        cpus: whole CPUs, exclusive.
        memory: bytes.
        begins, ends: hours since the trace began.
    """

    number: int
    cpus: int
    memory: int
    begins: float
    ends: float


def possible_sizes(topology: Topology, reserved: int) -> tuple[Size, ...]:
    """The sizes that an empty NUMA node of the machine holds; the others nobody could place.

    Args:
        topology: of the machine.
        reserved: CPUs that are withheld, on one of the NUMA nodes.
    """
    nodes = topology.numa_nodes.values()
    return tuple(
        size
        for size in SIZES
        if any(len(n.cpus) - reserved >= size.cpus and n.memory_bytes >= size.memory for n in nodes)
    )


def mean_life() -> float:
    """Mean hours of a lifetime, of a lognormal distribution that is cut at its longest."""
    mu, sigma, normal = math.log(LIFE_MEDIAN_H), LIFE_SIGMA, NormalDist()
    z = (math.log(LIFE_LONGEST_H) - mu) / sigma
    whole = math.exp(mu + sigma * sigma / 2)
    return whole * normal.cdf(z - sigma) + LIFE_LONGEST_H * (1 - normal.cdf(z))


def generate(
    seed: int, *, sizes: Sequence[Size], cpus: int, load: float, hours: float
) -> tuple[Pod, ...]:
    """The pods of one trace, in order of their arrival.

    Args:
        seed: the same seed gives the same pods.
        sizes: that may come; one at least.
        cpus: CPUs that pods can have.
        load: CPUs asked for on average, as a part of ``cpus``, if nobody were refused.
        hours: of arrivals.
    """
    rng = random.Random(seed)
    weights = [size.weight for size in sizes]
    mean_cpus = sum(s.cpus * s.weight for s in sizes) / sum(weights)
    # Little's law: pods that are there are pods that come times how long they stay.
    batches_per_hour = load * cpus / (mean_cpus * mean_life()) / BATCH_MEAN
    most = batches_per_hour * (1 + BY_DAY)
    pods: list[Pod] = []
    now = 0.0
    while (now := now + rng.expovariate(most)) < hours:
        if rng.random() * (1 + BY_DAY) > 1 + BY_DAY * math.sin(2 * math.pi * now / 24):
            continue  # thinned to the rate of this hour
        (size,) = rng.choices(sizes, weights)
        batch = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / BATCH_MEAN))
        for _ in range(batch):
            life = min(LIFE_LONGEST_H, rng.lognormvariate(math.log(LIFE_MEDIAN_H), LIFE_SIGMA))
            pods.append(Pod(len(pods), size.cpus, size.memory, now, now + life))
    return tuple(pods)
