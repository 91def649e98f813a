"""How long it takes to choose CPUs, on machines from 64 to 2,048 CPUs.

Run ``python -m bench.bench_take``. Of every machine two fifths of the CPUs are used, in single
threads chosen at random from a seed: holes everywhere are the worst case for every order. The
tables of the machine are kept between requests, as the agent does; what they cost is in the first
lines. A minus marks a refused request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from random import Random

from nri_numa.engine.cpus.allocator import (
    AllocatorIndex,
    ChosenCPUs,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.index import build_allocator_index
from nri_numa.engine.request.options import parse_load
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, SMT

ROUNDS = 31
COUNTS = (1, 2, 4, 8, 16, 64, 256)
MACHINES: dict[str, Callable[[], Topology]] = {
    "2 NUMA nodes, 64 CPUs": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=16, cores_per_l3=4
    ),
    "8 NUMA nodes, 256 CPUs": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=4, cores_per_numa=16, cores_per_l3=4
    ),
    "8 NUMA nodes, 2048 CPUs": lambda: build_synthetic_topology(
        sockets=8, numa_per_socket=1, cores_per_numa=128, cores_per_l3=8
    ),
    "64 NUMA nodes, 2048 CPUs": lambda: build_synthetic_topology(
        sockets=16, numa_per_socket=4, cores_per_numa=16, cores_per_l3=8
    ),
}
ORDERS = {
    "default": Settings(),
    "default, distributed": Settings(kubelet=KubeletRules(distribute_cpus_across_numa=True)),
    "kubelet": Settings(kubelet=KubeletRules(cpu_order=True), align_l3=False),
    "kubelet, distributed": Settings(
        kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_numa=True), align_l3=False
    ),
}


def measure(tables: AllocatorIndex, request: TakeRequest) -> list[float]:
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        take_cpus(tables, request)
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def main() -> int:
    built: dict[str, tuple[Topology, AllocatorIndex]] = {}
    for name, build in MACHINES.items():
        topology = build()
        start = time.perf_counter()
        built[name] = topology, build_allocator_index(topology)
        print(f"tables of {name}: {(time.perf_counter() - start) * 1e3:.1f} ms")
    heads = "".join(f"{count:>9}" for count in COUNTS)
    print(f"\n{'median in µs for so many CPUs':<59}{heads}")
    for name, (topology, tables) in built.items():
        random = Random(1)
        free = CPUSet(i for i in topology.online if random.random() < 0.6)
        busy = topology.online - free
        choices = (ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, parse_load("09:00-18:00"))
        loads = {i: random.choice(choices) for i in busy}
        for order, settings in ORDERS.items():
            for smt in SMT:
                cells = ""
                for count in COUNTS:
                    request = TakeRequest(
                        count=count,
                        free_cpus=free,
                        unavailable_cpus=busy,
                        smt=smt,
                        load=ALWAYS_BUSY_SCHEDULE,
                        loads=loads if smt is SMT.PAIR else {},
                        settings=settings,
                    )
                    done = isinstance(take_cpus(tables, request), ChosenCPUs)
                    times = measure(tables, request)
                    mark = "" if done else "-"
                    cells += f"{mark + format(times[ROUNDS // 2], '.0f'):>9}"
                print(f"{name:<26}{order:<22}{smt:<11}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
