"""The engine alone: merging hints of 2 to 64 NUMA nodes, and whole decisions."""

from __future__ import annotations

import time

from bench.beds import EXCLUSIVE, MACHINES, SHARED, Shape, container_of, pod_of
from bench.bench_merge import ROUNDS, SIZES, loads
from bench.bench_merge import measure as measure_merge
from bench.stats import summary, table, us
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox
from nri_numa.nri import conversion


def merges() -> str:
    rows = []
    for n in SIZES:
        worst = ("", 0.0, 0.0)
        everyday = 0.0
        for name, demands in loads(n).items():
            times, _ = measure_merge(n, demands)
            median = times[ROUNDS // 2]
            everyday = everyday or median
            worst = max(worst, (name, median, times[-1]), key=lambda item: item[1])
        rows.append((n, f"{everyday:.0f}", f"{worst[1]:.0f}", f"{worst[2]:.0f}", worst[0]))
    head = ("NUMA nodes", "everyday, p50 µs", "worst load, p50 µs", "max µs", "which")
    return table(head, rows)


def _request(shape: Shape, name: str) -> tuple[PodSandbox, Container]:
    pod, container = pod_of(shape, name), container_of(shape)
    pod.id, container.id, container.pod_sandbox_id = f"s-{name}", f"c-{name}", f"s-{name}"
    return conversion.pod_from(pod, container), conversion.container_from(container)


def admits(rounds: int = 400) -> str:
    rows = []
    for title, build in MACHINES.items():
        machine = NodeModel(topology=build(), settings=Settings())
        for name, shape in (("shared", SHARED), ("exclusive", EXCLUSIVE)):
            for residents in (0, 100, 500):
                state = NodeState()
                for n in range(residents):
                    made = admit(NodeSnapshot(machine, state), *_request(SHARED, f"r{n}"))
                    assert isinstance(made, Admitted)
                    state = made.state
                samples = []
                for n in range(rounds):
                    request = _request(shape, f"n{n}")
                    begun = time.perf_counter()
                    admit(NodeSnapshot(machine, state), *request)
                    samples.append(time.perf_counter() - begun)
                s = summary(samples)
                rows.append((title, name, residents, us(s.least), us(s.p50), us(s.p99)))
    return table(("machine", "pod", "residents", "min µs", "p50 µs", "p99 µs"), rows)
