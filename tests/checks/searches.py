"""Merges drawn by a number, and what came out of each, with the work that it took.

The oracle of `tests.checks.merge_cases` walks over every mask, which is possible on small machines
only. On large ones the search decides how near the best it comes, and everywhere it decides what
a container's start waits for; so both are written down.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.align.hints import DeviceDemand, HintProvider, ResourceDemand
from nri_numa.engine.align.policies import Alignment, AlignmentRequest, align_demands
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest, Policy
from tests.checks.merge_cases import additive_case, distances, random_case

RECORDED: Final = Path(__file__).parents[1] / "golden" / "searches"
KINDS: Final = ("small", "large", "hard", "hard-small", "nearly-full", "nearly-full-small")
CASES: Final = 60


def _case(kind: str, number: int) -> AlignmentRequest:
    random = Random(f"{kind} {number}")
    match kind:
        case "small":
            return random_case(random, (1, 2, 3, 4, 5, 6))
        case "large":
            return random_case(random, (11, 12, 14, 16))
        case "hard":
            return hard_case(random, (11, 12, 16, 24))
        case "hard-small":
            return hard_case(random, (4, 6, 8))
        case "nearly-full":
            return additive_case(random, (7, 9, 12))
        case _:
            return additive_case(random, (3, 5, 6, 8))


def hard_case(random: Random, sizes: tuple[int, ...]) -> AlignmentRequest:
    """Several resources that are wanted on more than one NUMA node of a machine in use."""
    size = random.choice(sizes)
    nodes = list(range(size))
    demands: list[HintProvider] = []
    share = random.choice((None, "memory"))
    for name in ("cpu", "memory", "hugepages-1Gi", "gpu")[: random.choice((1, 2, 2, 3, 4))]:
        capacity = {i: random.choice((4, 4, 4, 8)) for i in nodes}
        available = {
            i: random.choice((amount, random.randint(0, amount))) for i, amount in capacity.items()
        }
        width = random.choice((1, 2, 2, 3, 4))
        need = sum(sorted(capacity.values())[-width:]) - random.choice((0, 1, 2, 3))
        if name == "gpu":
            devices = tuple(
                Device(
                    id=f"d{k:02}",
                    numa_nodes=frozenset(random.sample(nodes, random.choice((1, 2, 2)))),
                )
                for k in range(size)
            )
            request = DeviceRequest(resource=name, count=width, devices=devices)
            demands.append(DeviceDemand(request=request))
            continue
        demand = ResourceDemand(resource=name, need=need, capacity=capacity, free_amounts=available)
        if name != "cpu" and random.random() < 0.3:
            some = random.sample(nodes, 3)
            groups = {i: NUMASet([i]) for i in nodes} | {i: NUMASet(some[:2]) for i in some[:2]}
            demand = replace(demand, groups=groups, assigned=NUMASet(some), joint_key=share)
        elif random.random() < 0.25:
            demand = replace(demand, required=NUMASet(random.sample(nodes, random.choice((1, 2)))))
        demands.append(demand)
    return AlignmentRequest(
        demands=tuple(demands),
        numa_ids=NUMASet(nodes),
        policy=random.choice((Policy.BEST_EFFORT, Policy.BEST_EFFORT, Policy.RESTRICTED)),
        distance=distances(random, nodes),
        prefer_closest_numa_nodes=random.random() < 0.7,
        rank={i: random.randint(0, size) for i in nodes} if random.random() < 0.5 else None,
    )


def told(kind: str) -> Iterator[str]:
    """One problem after the other: a line with the outcome, and lines that explain it.

    Texts that tell every NUMA node are left out on machines that have many.
    """
    for number in range(CASES):
        case = _case(kind, number)
        found = align_demands(case)
        yield f"{number} {case.policy} on {case.numa_ids}: {_outcome(found)}"
        small = len(case.numa_ids) <= 6
        yield f"    {found.reason_text if small else found.shortage.text}"
        for one in found.resource_summaries:
            words = [one.text if small else f"{one.resource} {one.need} {one.state}:"]
            words.append(f"{one.preferred_width} NUMA nodes, now {one.narrowest_width};")
            words.append(f"{one.narrowest_count} of {one.hint_count}")
            words += ["every set"] * one.all_sets_fit
            sets = [f"{{{h.affinity}}}{'✓' if h.preferred else '✗'}" for h in one.hints]
            yield f"    {' '.join([*words, *sets])}"
        for other in found.rejected_masks:
            yield f"    not {other.affinity}: {other.text}"


def _outcome(found: Alignment) -> str:
    words = ["admitted" if found.admitted else "refused", str(found.affinity)]
    if not found.preferred:
        words.append("not preferred")
    if not found.exact:
        words.append("not exact")
    return " ".join([*words, f"after {found.search_steps} steps"])
