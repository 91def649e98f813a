"""How long a merge takes, from 2 to 64 NUMA nodes and four resources.

Run ``python -m bench.bench_merge``. Each line is one kind of load: the best, median and worst of
the rounds in microseconds, the steps taken, and whether the result is exact. Random parts are
seeded.
"""

from __future__ import annotations

import sys
import time
from random import Random

from nri_numa.engine.align.hints import HintProvider, ResourceDemand
from nri_numa.engine.align.policies import Alignment, AlignmentRequest, align_demands
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy

SIZES = (2, 4, 8, 10, 16, 32, 64)
NAMES = ("cpu", "memory", "hugepages-1Gi", "gpu")
ROUNDS = 15


def demand(name: str, need: int, capacity: int, available: list[int]) -> ResourceDemand:
    return ResourceDemand(
        resource=name,
        need=max(need, 1),
        capacity=dict.fromkeys(range(len(available)), capacity),
        free_amounts=dict(enumerate(available)),
    )


def loads(n: int) -> dict[str, list[HintProvider]]:
    """Problems of ``n`` NUMA nodes by name, from everyday to adversarial."""
    random = Random(n)
    return {
        "one NUMA node, empty machine": [demand(x, 1, 4, [4] * n) for x in NAMES],
        "a quarter of the machine": [demand(x, n, 4, [4] * n) for x in NAMES],
        "half of the machine": [demand(x, 2 * n, 4, [4] * n) for x in NAMES],
        "nothing fits as on an empty machine": [demand(x, 3, 4, [2] * n) for x in NAMES],
        "random, half is free": [
            demand(x, 2 * n, 100, [random.randint(0, 100) for _ in range(n)]) for x in NAMES
        ],
        "nearly full": [
            demand(x, 2 * n, 4, [random.randint(1, 3) for _ in range(n)]) for x in NAMES
        ],
        "each resource elsewhere": [
            demand(x, n // 2, 4, [4 if i % 4 == k else 1 for i in range(n)])
            for k, x in enumerate(NAMES)
        ],
        "wide and scattered": [
            demand(x, 40 * n, 100, [random.randint(0, 100) for _ in range(n)]) for x in NAMES
        ],
    }


def distance(i: int, j: int) -> int:
    """Sockets of four NUMA nodes."""
    if i == j:
        return 10
    return 12 if i // 4 == j // 4 else 32


def measure(n: int, demands: list[HintProvider]) -> tuple[list[float], Alignment]:
    rank = {i: n - i for i in range(n)}
    numa_ids, policy = NUMASet(range(n)), Policy.BEST_EFFORT

    def merge() -> Alignment:
        return align_demands(
            AlignmentRequest(tuple(demands), numa_ids, policy, distance, rank=rank)
        )

    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        merge()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times), merge()


def main() -> int:
    print(f"{'n':>3}  {'load':<36}{'min µs':>9}{'median':>9}{'max':>9}{'steps':>7}  exact  result")
    for n in SIZES:
        for name, demands in loads(n).items():
            times, result = measure(n, demands)
            affinity = "any" if result.affinity is None else str(result.affinity)
            print(
                f"{n:>3}  {name:<36}{times[0]:>9.0f}{times[ROUNDS // 2]:>9.0f}{times[-1]:>9.0f}"
                f"{result.search_steps:>7}  {'yes' if result.exact else 'no':<5}  "
                f"{affinity[:24]}{'' if result.preferred else ' (not preferred)'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
