"""Random merge problems: machines with holes, resources of every kind, odd and even sizes."""

from collections.abc import Callable
from random import Random

from nri_numa.engine.align.hints import DeviceDemand, HintProvider, ResourceDemand
from nri_numa.engine.align.policies import AlignmentRequest, align_demands
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest, Policy
from tests.checks.oracles import Verdict, hints_of, walk


def aligned(case: AlignmentRequest) -> Verdict:
    """What the engine says, in the oracle's terms."""
    found = align_demands(case)
    assert found.exact
    affinity = None if found.affinity is None else frozenset(found.affinity)
    return Verdict(found.admitted, affinity, found.preferred)


def walked(case: AlignmentRequest) -> Verdict:
    """What the oracle says."""
    distance = case.distance if case.prefer_closest_numa_nodes else None
    lists = hints_of(case.demands, case.numa_ids)
    rank = None if case.rank is None else dict(case.rank)
    return walk(lists, case.numa_ids, case.policy, distance, rank)


POLICIES = (Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)


def _some(random: Random, nodes: list[int], chance: float) -> NUMASet:
    return NUMASet(i for i in nodes if random.random() < chance)


def _quantity(random: Random, name: str, nodes: list[int]) -> ResourceDemand:
    own = [i for i in nodes if random.random() < 0.93] or nodes
    size = random.choice((1, 4, 4, 8))
    capacity = {i: size if random.random() < 0.8 else random.randint(0, 8) for i in own}
    emptiness = random.choice((0.2, 0.6, 1.0))
    available = {
        i: c if random.random() < emptiness else random.randint(-1, c) for i, c in capacity.items()
    }
    total = sum(capacity.values())
    need = random.choice((1, 2, size, size + 1, random.randint(0, total + 1)))
    sockets = None
    if random.random() < 0.15:
        per_socket = random.choice((1, 2, 3))
        sockets = {i: place // per_socket for place, i in enumerate(own)}
    required = _some(random, own, 0.4) if random.random() < 0.15 else NUMASet()
    return ResourceDemand(
        resource=name,
        need=need,
        capacity=capacity,
        free_amounts=available,
        required=required,
        sockets=sockets,
        empty_is_nil=random.random() < 0.1,
    )


def _memory(random: Random, nodes: list[int], share: str) -> list[HintProvider]:
    """Several memory types judged together, with the kubelet's groups."""
    left = nodes[:]
    random.shuffle(left)
    groups: dict[int, NUMASet] = {}
    assigned: list[int] = []
    while left:
        size = random.choice((1, 1, 1, 2, 3))
        members, left = left[:size], left[size:]
        for i in members:
            groups[i] = NUMASet(members)
        if len(members) > 1 or random.random() < 0.4:
            assigned += members
    if random.random() < 0.2:
        del groups[random.choice(list(groups))]
    demands: list[HintProvider] = []
    for name in ("memory", "hugepages-2Mi", "hugepages-1Gi")[: random.choice((1, 2, 2, 3))]:
        base = _quantity(random, name, nodes)
        demands.append(
            ResourceDemand(
                resource=name,
                need=random.choice((base.need, base.need, 1)),
                capacity=base.capacity,
                free_amounts=base.free_amounts,
                required=base.required,
                groups=groups if random.random() < 0.97 else None,
                assigned=NUMASet(assigned),
                joint_key=share if random.random() < 0.9 else None,
                empty_is_nil=random.random() < 0.5,
            )
        )
    return demands


def _devices(random: Random, name: str, nodes: list[int]) -> DeviceDemand:
    devices = []
    several = random.random() < 0.4
    for k in range(random.randint(0, 8)):
        where = [i for i in nodes if several and random.random() < 0.4] or [random.choice(nodes)]
        if random.random() < 0.15:
            where = []
        devices.append(Device(id=f"d{k}", numa_nodes=frozenset(where)))
    count = random.choice((1, 1, 2, 3, random.randint(0, 8)))
    return DeviceDemand(request=DeviceRequest(resource=name, count=count, devices=tuple(devices)))


def distances(random: Random, nodes: list[int]) -> Callable[[int, int], int]:
    kind = random.random()
    found: dict[tuple[int, int], int] = {}
    for a in nodes:
        for b in nodes:
            if kind < 0.3:
                value = 10 if a == b else random.choice((11, 12, 20, 21, 32))
            elif kind < 0.7:
                value = 10 if a == b else (12 if a // 2 == b // 2 else 20 + abs(a - b) // 2)
            else:
                value = 10 if a == b else 20
            # Firmware is not held to symmetry.
            found[a, b] = value if kind < 0.15 or (b, a) not in found else found[b, a]
    return lambda i, j: found[i, j]


def random_case(
    random: Random, sizes: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 4, 5)
) -> AlignmentRequest:
    """One problem; the same for the same state of ``random``."""
    size = random.choice(sizes)
    nodes = sorted(random.sample(range(size + random.choice((0, 0, 1, 4))), size))
    demands: list[HintProvider] = []
    wanted = random.choice((0, 1, 2, 2, 3, 3, 4, 5, 6))
    kinds = random.choice(("mixed", "mixed", "quantities"))
    while len(demands) < wanted:
        name = f"r{len(demands)}"
        kind = 0.0 if kinds == "quantities" else random.random()
        if kind < 0.5:
            demands.append(_quantity(random, name, nodes))
        elif kind < 0.7:
            demands += _memory(random, nodes, name)[: wanted - len(demands)]
        else:
            demands.append(_devices(random, name, nodes))
    rank = None
    if random.random() < 0.3:
        rank = {i: random.randint(0, size) for i in nodes if random.random() < 0.95}
    return AlignmentRequest(
        demands=tuple(demands),
        numa_ids=NUMASet(nodes),
        policy=random.choice(POLICIES),
        distance=distances(random, nodes),
        prefer_closest_numa_nodes=random.random() < 0.5,
        rank=rank,
    )


def additive_case(random: Random, sizes: tuple[int, ...]) -> AlignmentRequest:
    """A problem of plain quantities on a larger machine, often nearly full."""
    size = random.choice(sizes)
    nodes = sorted(random.sample(range(size + random.choice((0, 3))), size))
    names = ("cpu", "memory", "hugepages-1Gi", "gpu")[: random.randint(1, 4)]
    return AlignmentRequest(
        demands=tuple(_quantity(random, name, nodes) for name in names),
        numa_ids=NUMASet(nodes),
        policy=random.choice(POLICIES),
        distance=distances(random, nodes),
        prefer_closest_numa_nodes=random.random() < 0.5,
        rank=None,
    )
