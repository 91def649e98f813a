"""What looking for room costs a request that is refused, and how often it makes room.

Machines are filled at random, some of what is there ends again, and pods that fit on no one NUMA
node are asked for. Half of the shapes are hostile: a thousand containers of which each has other
sizes, broken cores, pods that name their containers. The slowest of all are listed.

Run as a script it prints, for a number of full machines, whether room was made; with an older
checkout first on PYTHONPATH that is what that one makes of the same machines.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from bench.stats import ms, quantile, table
from nri_numa.engine.accounting import max_exclusive_by_node, total_free_exclusive
from nri_numa.engine.admit import release_container
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.pod_admission import admit_pod
from nri_numa.engine.rebalance import admit_by_moving
from nri_numa.engine.state import NodeState
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources

PREFIX: Final = "numa.kubernetes.io/"
MIB: Final = 1 << 20
ORDINARY: Final = (1, 1, 2, 2, 2, 3, 4, 4, 6, 8, 10, 12, 16)
"""Whole CPUs of a pod; small ones oftener."""
SMT: Final = ("any", "any", "any", "spread", "full-core", "isolate")


class Shape(NamedTuple):
    """A full machine, and a pod for which no NUMA node has room."""

    seed: int
    text: str
    machine: NodeModel
    state: NodeState
    pod: PodSandbox
    container: Container


def _resources(milli: int, memory: int) -> Resources:
    return Resources(
        cpu_shares=max(2, milli * 1024 // 1000),
        cpu_quota=milli * 100 or None,
        cpu_period=100_000,
        memory_limit=memory,
    )


def _pod(
    name: str, asks: dict[str, str], milli: int, memory: int, others: int = 0
) -> tuple[PodSandbox, Container]:
    total = _resources(milli + 1000 * others, memory + MIB * others)
    if others:
        named = {"app": {"cpu": f"{milli}m", "memory": str(memory)}}
        named |= {f"c{n}": {"cpu": "1", "memory": str(MIB)} for n in range(others)}
        asks = asks | {"container-resources": json.dumps(named)}
    pod = PodSandbox(
        id=f"s-{name}", uid=f"u-{name}", namespace="shop", name=name, qos=QoSClass.GUARANTEED,
        annotations={PREFIX + key: value for key, value in asks.items()}, resources=total,
    )  # fmt: skip
    resources = _resources(milli, memory)
    return pod, Container(id=f"{name}-app", pod_id=pod.id, name="app", resources=resources)


def _filled(rng: random.Random, machine: NodeModel, most: int, hostile: bool) -> NodeState:
    """Until a few in a row are refused; then a part of them ends."""
    state, rejected, n = NodeState(), 0, 0
    movable, biggest = rng.choice((0.3, 0.7, 1.0)), rng.choice((1, 2, 16))
    biggest = biggest if hostile else machine.cpu_count // 8
    sizes = [one for one in ORDINARY if one <= biggest]
    gib = sum(node.memory_bytes for node in machine.topology.numa_nodes.values()) >> 20
    few, many = (most // 4, most) if hostile else (4, min(most, machine.cpu_count))
    each = gib // rng.randrange(few, many)  # MiB
    while rejected < (40 if hostile else 8) and n < most:
        n += 1
        shares = hostile and rng.random() < 0.5
        milli = rng.randrange(10, 200) if shares else 1000 * rng.choice(sizes)
        asks = {"policy": "single-numa-node", "movable": str(rng.random() < movable).lower()}
        if not shares:
            asks |= {"cpus": "exclusive", "smt": rng.choice(SMT)}
        memory = rng.randrange(each // 4 + 1, each + 1) * MIB
        memory += rng.randrange(4096) * 4096 if hostile else 0
        if rng.random() < 0.2:
            asks["bind"] = "cpu"
        decision = admit_pod(NodeSnapshot(machine, state), *_pod(f"p{n}", asks, milli, memory))
        rejected = rejected + 1 if isinstance(decision, Rejected) else 0
        if isinstance(decision, Admitted):
            state = decision.state
    there = sorted(state.allocations)
    for container_id in rng.sample(there, k=len(there) // rng.randrange(4, 12)):
        state = release_container(NodeSnapshot(machine, state), container_id).state
    return state


def shapes(seed: int, *, hostile: bool, most_cpus: int) -> Iterator[Shape]:
    """Those of one machine; the same from every checkout."""
    rng = random.Random(seed)
    cpus = rng.choice([n for n in (16, 32, 48, 64, 96, 128, 256, 512) if n <= most_cpus])
    numa_nodes = rng.choice([n for n in (2, 2, 4, 8) if cpus // n >= 8])
    topology = build_synthetic_topology(
        sockets=numa_nodes, numa_per_socket=1, cores_per_numa=cpus // numa_nodes // 2,
        memory_gib=rng.choice((2, 4, 8)) * cpus // numa_nodes,
    )  # fmt: skip
    settings = Settings(rebalance_moves=rng.choice((1, 2, 2, 3)), reservation_seconds=600.0)
    machine = NodeModel(topology=topology, settings=settings)
    state = _filled(rng, machine, 1000 if hostile else 200, hostile)
    free, total = (
        max(max_exclusive_by_node(NodeSnapshot(machine, state)).values()),
        total_free_exclusive(NodeSnapshot(machine, state)),
    )
    most = min(cpus // numa_nodes, max(total, free + 1))
    for number in range(3):
        smt = rng.choice(SMT) if rng.random() < (1.0 if hostile else 0.3) else "any"
        asks = {"policy": "single-numa-node", "cpus": "exclusive", "smt": smt}
        if hostile and rng.random() < 0.2:
            asks["scope"] = "pod"
        others = rng.choice((1, 7, 63)) if hostile and rng.random() < 0.2 else 0
        size = rng.randrange(min(most, free + 1), most + 1)
        memory = rng.randrange(1, 65) * 16 * MIB
        pod, container = _pod("new", asks, 1000 * size, memory, others)
        text = (
            f"{cpus} CPUs, {numa_nodes} NUMA nodes, {len(state.allocations)} containers, "
            f"{size} CPUs {smt}{f' and {others} more containers' if others else ''}"
        )
        yield Shape(10 * seed + number, text, machine, state, pod, container)


class Cost(NamedTuple):
    """CPU seconds of a decision, and of the search after it; whether room was made, or said."""

    admit: float
    search: float
    made: bool
    said: bool
    spent: bool
    shape: Shape


def cost(shape: Shape) -> Cost | None:
    """None where it fits as it is."""
    gc.disable()  # as the agent does: it collects between requests, and has no thousand shapes
    try:
        begun = time.process_time()
        decision = admit_pod(NodeSnapshot(shape.machine, shape.state), shape.pod, shape.container)
        decided = time.process_time()
        if isinstance(decision, Admitted):
            return None
        found = admit_by_moving(NodeSnapshot(shape.machine, shape.state), decision)
        ended = time.process_time()
    finally:
        gc.enable()
    made = isinstance(found, Admitted)
    said = isinstance(found, Rejected) and "it would fit" in found.message
    spent = getattr(found, "is_search_spent", False)
    return Cost(decided - begun, ended - decided, made, said, spent, shape)


def costs(count: int, **kind: Any) -> Iterator[Cost]:
    """Of so many shapes."""
    seed = 0
    while count > 0:
        for shape in shapes(seed, **kind):
            if (found := cost(shape)) is not None:
                yield found
                count -= 1
        seed += 1


def full_node() -> NodeSnapshot:
    """512 CPUs with 1,000 containers: movable owners, some that follow the pool, and sharers."""
    topology = build_synthetic_topology(
        sockets=8, numa_per_socket=1, cores_per_numa=32, memory_gib=512
    )
    settings = Settings(rebalance_moves=3, reservation_seconds=600.0)
    node, rng = (
        NodeSnapshot(NodeModel(topology=topology, settings=settings), NodeState()),
        random.Random(1),
    )
    for n in range(1000):
        owns = n % 3 == 0 and len(node.state.exclusive) < 320
        asks = {"policy": "best-effort", "cpus": "shared"} if n % 2 else {}
        if owns:
            asks = {"policy": "single-numa-node", "cpus": "exclusive", "movable": "true"}
        milli = 1000 * rng.randrange(1, 5) if owns else rng.randrange(10, 100)
        memory = rng.randrange(1, 200) * MIB
        decision = admit_pod(node, *_pod(f"p{n}", asks, milli, memory))
        assert isinstance(decision, Admitted)
        node = node.with_state(decision.state)
    return node


def large_requests(node: NodeSnapshot) -> dict[str, tuple[PodSandbox, Container]]:
    """Creations that take the most on a full node, by their shape."""
    size = max(max_exclusive_by_node(node).values()) + 2
    alone = {"policy": "single-numa-node", "cpus": "exclusive"}
    named = {
        f"first of 64 named containers, {policy}": _pod(
            "new", {"policy": policy, "cpus": "exclusive"}, 1000, MIB, 63
        )
        for policy in ("single-numa-node", "restricted")
    }
    pod_scope = {"policy": "none", "scope": "pod", "cpus": "exclusive"}
    return {
        "one that is moved for": _pod("new", alone, 1000 * size, MIB),
        **named,
        "policy none with scope pod": _pod("new", pod_scope, 8000, MIB),
    }


def create(node: NodeSnapshot, request: tuple[PodSandbox, Container]) -> Admitted | Rejected:
    """The whole decision, as of a state that nothing was worked out about."""
    node = node.with_state(node.state)
    decision = admit_pod(node, *request)
    return admit_by_moving(node, decision) if isinstance(decision, Rejected) else decision


def measure_large(*, rounds: int) -> str:
    """CPU time of a creation of each shape."""
    node, rows = full_node(), []
    for text, request in large_requests(node).items():
        samples = []
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            begun = time.process_time()
            create(node, request)
            samples.append(time.process_time() - begun)
            gc.enable()
        samples.sort()
        rows.append((text, ms(samples[0]), ms(samples[len(samples) // 2]), ms(samples[-1])))
    return table(("creation", "least ms of CPU", "p50", "most"), rows)


def measure(*, quick: bool) -> str:
    rows, slowest = [], list[Cost]()
    for hostile, most in ((False, 128), (True, 512)):
        found = list(costs(40 if quick else 300, hostile=hostile, most_cpus=most))
        slowest += found
        ordered = sorted(one.search for one in found)
        rows.append((
            "hostile" if hostile else "ordinary", len(found), ms(ordered[len(found) // 2]),
            ms(quantile(ordered, 0.99)), ms(ordered[-1]), sum(one.made for one in found),
            sum(one.said for one in found), sum(one.spent for one in found),
        ))  # fmt: skip
    head = ("shapes", "count", "search p50 ms", "p99", "most", "room made", "said", "spent")
    # The slowest first, each measured once more; then by seed.
    slowest.sort(key=lambda one: (-one.search, one.shape.seed))
    again = [
        (one.shape.seed, one.shape.text, ms(one.admit), ms(best.search))
        for one in slowest[:5]
        if (best := min(filter(None, map(cost, [one.shape] * 5)), key=lambda c: c.search))
    ]
    return "\n\n".join((
        table(head, rows),
        table(("seed", "slowest", "admit ms", "search, least of 5, ms"), again),
    ))  # fmt: skip


if __name__ == "__main__":
    for one in costs(int(sys.argv[1]), hostile=len(sys.argv) > 2, most_cpus=128):
        print(one.shape.seed, int(one.made), int(one.said), int(one.spent), ms(one.search))
