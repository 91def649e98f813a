"""How much of a machine can be given away before the first pod must be refused.

Random sequences of Guaranteed pods with whole CPUs and memory, each to be kept on one NUMA node,
arrive one after the other until one is refused; none leaves. The seeds are the numbers 0, 1, 2 …

*Exact* is what somebody could have done who knew the whole sequence: the longest part from its
beginning for which an assignment to NUMA nodes exists at all, from an integer program (HiGHS).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp

from bench.stats import table
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.machine import Topology
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources, Strategy

GIB = 1 << 30
Pod = tuple[int, int]  # whole CPUs, GiB

MACHINES: dict[str, Callable[[], Topology]] = {
    "2 NUMA nodes × 16 CPUs, 64 GiB": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=8, memory_gib=64
    ),
    "4 NUMA nodes × 16 CPUs, 64 GiB": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=2, cores_per_numa=8, memory_gib=64
    ),
}
SETTINGS = {
    "spread (default)": Settings(strategy=Strategy.SPREAD),
    "pack": Settings(strategy=Strategy.PACK),
    "kubelet's order and ties": Settings(
        kubelet=KubeletRules(cpu_order=True, ties=True), align_l3=False
    ),
}


def sequence(seed: int, length: int = 200) -> list[Pod]:
    """Pods of 1 to 10 CPUs, small ones oftener, with 1 to 6 GiB for each CPU."""
    rng = random.Random(seed)
    pods = []
    for _ in range(length):
        cpus = rng.choice((1, 1, 2, 2, 2, 3, 4, 4, 6, 8, 10))
        pods.append((cpus, max(1, round(cpus * rng.uniform(1, 6)))))
    return pods


def admitted(topology: Topology, settings: Settings, pods: Sequence[Pod]) -> int:
    """Pods placed before the first refusal."""
    machine, state = NodeModel(topology=topology, settings=settings), NodeState()
    policy = {f"{settings.prefix}/policy": "single-numa-node"}
    for n, (cpus, gib) in enumerate(pods):
        pod = PodSandbox(
            id=f"s{n}", uid=f"u{n}", namespace="d", name=f"p{n}", annotations=policy,
            qos=QoSClass.GUARANTEED,
        )  # fmt: skip
        resources = Resources(
            cpu_shares=cpus * 1024, cpu_quota=cpus * 100_000, cpu_period=100_000,
            memory_limit=gib * GIB,
        )  # fmt: skip
        container = Container(id=f"c{n}", pod_id=f"s{n}", name="c", resources=resources)
        decision = admit(NodeSnapshot(machine, state), pod, container)
        if not isinstance(decision, Admitted):
            return n
        state = decision.state
    return len(pods)


def possible(topology: Topology, pods: Sequence[Pod]) -> bool:
    """Whether any assignment of these pods to NUMA nodes fits; one CPU stays shared."""
    nodes = list(topology.numa_nodes.values())
    if sum(cpus for cpus, _ in pods) > len(topology.allowed) - 1:
        return False
    p, n = len(pods), len(nodes)
    rows, low, high = [], [], []
    for i in range(p):  # each pod on exactly one NUMA node
        row = numpy.zeros(p * n)
        row[i * n : (i + 1) * n] = 1
        rows.append(row)
        low.append(1.0)
        high.append(1.0)
    for j, node in enumerate(nodes):
        for part, capacity in ((0, len(node.cpus)), (1, node.memory_bytes / GIB)):
            row = numpy.zeros(p * n)
            row[j::n] = [pod[part] for pod in pods]
            rows.append(row)
            low.append(0.0)
            high.append(float(capacity))
    found = milp(
        numpy.zeros(p * n),
        constraints=LinearConstraint(numpy.array(rows), low, high),
        integrality=numpy.ones(p * n),
        bounds=Bounds(0, 1),
        options={"time_limit": 5},
    )
    return bool(found.status == 0)


def exact(topology: Topology, pods: Sequence[Pod], at_least: int) -> int:
    """The longest beginning of the sequence that fits somehow."""
    fits = at_least
    while fits < len(pods) and possible(topology, pods[: fits + 1]):
        fits += 1
    return fits


def measure(*, seeds: int = 40) -> str:
    rows = []
    for title, build in MACHINES.items():
        topology = build()
        cpus = len(topology.allowed)
        counts: dict[str, list[int]] = {name: [] for name in (*SETTINGS, "exact")}
        used: dict[str, list[float]] = {name: [] for name in counts}
        for seed in range(seeds):
            pods = sequence(seed)
            for name, settings in SETTINGS.items():
                counts[name].append(admitted(topology, settings, pods))
            counts["exact"].append(
                exact(topology, pods, max(counts[name][-1] for name in SETTINGS))
            )
            for name in counts:
                used[name].append(sum(c for c, _ in pods[: counts[name][-1]]) / cpus)
        best = statistics.mean(counts["exact"])
        for name, found in counts.items():
            mean = statistics.mean(found)
            rows.append((
                title, name, f"{mean:.2f}", min(found), max(found),
                f"{statistics.mean(used[name]):.1%}", f"{mean / best:.1%}",
            ))  # fmt: skip
    head = ("machine", "placed by", "pods", "min", "max", "CPUs given away", "of exact")
    return f"{table(head, rows)}\n\nMeans over the seeds 0 to {seeds - 1}."
