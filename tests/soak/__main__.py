"""A long run: thousands of pods come and go on a full node, and nothing may grow, leak or break.

    python -m tests.soak [--pods 10000] [--resident 300] [--minutes 60]

The plugin is a real process, which the embedded runtime drives, with cgroup files for the
containers. What is sampled from outside while that goes on is printed; the exit status is 1 when
something was not as it must be.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded_node import EmbeddedNode
from tests.beds.plugin_process import PluginProcess

WATCHED = (
    "invariant_violations_total",
    "internal_errors_total",
    "protocol_errors_total",
    "checkpoint_errors_total",
    "drift_repairs_abandoned_total",
    "missed_starts_total",
)
"""Counters that must stay at zero; the bed writes cgroups a moment late, so some drift is found."""
MAY_GROW = {"RSS KiB": (1.15, 2048), "descriptors": (1, 3), "threads": (1, 2)}
"""After the first quarter, by a factor and a summand: a look is a connection itself."""


def look(plugin: PluginProcess) -> dict[str, float]:
    """Sample a plugin process from outside."""
    proc = Path(f"/proc/{plugin.pid}")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    lines = plugin.get("/metrics")[1].splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        "RSS KiB": int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": int(stat[17]),
        "CPU s": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        "longest gap ms": float(told["nri_numa_event_loop_max_lag_seconds"]) * 1000,
        "journal KiB": plugin.checkpoint.stat().st_size // 1024
        if plugin.checkpoint.exists()
        else 0,
        **{name: float(told.get(f"nri_numa_{name}", 0)) for name in WATCHED},
    }


def judge(samples: Sequence[dict[str, float]]) -> list[str]:
    """What must not be in the samples: growth after the warm-up, and counters above zero."""
    first, last = samples[len(samples) // 4], samples[-1]
    return [
        *(
            f"{name} grew from {first[name]:g} to {last[name]:g}"
            for name, (factor, summand) in MAY_GROW.items()
            if last[name] > first[name] * factor + summand
        ),
        *(f"{name} is {last[name]:g}" for name in WATCHED if last[name]),
    ]


KINDS: dict[str, tuple[dict[str, str], str, tuple[float, ...]]] = {
    "free": ({}, "besteffort/", (0,)),
    "shared": ({"policy": "best-effort", "cpus": "shared"}, "burstable/", (0.1,)),
    "listed": ({"numacpu": "0-3", "numamem": "0"}, "", (0,)),
    "owner": ({"policy": "single-numa-node"}, "", (1, 2, 4)),
}
"""Annotations, what the cgroups of its pods are below, and numbers of CPUs."""
RESIDENT_WEIGHTS = (70, 25, 3, 2)
CYCLE_WEIGHTS = (42, 38, 15, 5)
EXPECTED_REJECTIONS = ("TopologyAffinityError", "NotEnough", "CPUExclusive")


class Soak:
    """Pods on a node, four at a time."""

    def __init__(self, node: EmbeddedNode, pods: int, deadline: float) -> None:
        self.node, self.pods, self.deadline = node, pods, deadline
        self.samples: list[dict[str, float]] = []
        self.problems: list[str] = []
        self.numbers, self.done, self.rejected = itertools.count(), 0, 0
        self.rng = random.Random(1)
        self.began = time.monotonic()

    def run(self, resident: int) -> None:
        for _ in range(resident):
            self.start(RESIDENT_WEIGHTS)
        with ThreadPoolExecutor(4) as pool:
            cycles = [pool.submit(self.cycle) for _ in range(4)]
            while wait(cycles, timeout=3).not_done:
                self.look()
        for cycle in cycles:
            cycle.result()
        self.node.check()
        self.look()
        self.problems += judge(self.samples)

    def cycle(self) -> None:
        """One pod after the other, until there were enough of them."""
        while self.done < self.pods and time.monotonic() < self.deadline:
            self.done += 1
            container = self.start(CYCLE_WEIGHTS)
            if container is None:
                continue
            if self.rng.random() < 0.2:
                more = pb.LinuxResources()
                more.cpu.shares.value = self.rng.randrange(100, 4000)
                self.node.call(self.node.runtime.update_container(container.id, more))
            time.sleep(self.rng.random() * 0.05)
            self.node.remove(container)

    def start(self, weights: Sequence[int]) -> DemoContainer | None:
        kind = self.rng.choices(list(KINDS), weights)[0]
        annotations, qos, cpus = KINDS[kind]
        runtime = self.node.runtime
        pod = self.node.pod(f"{kind}-{next(self.numbers)}", annotations, qos)
        try:
            container = self.node.create(pod, cpus=self.rng.choice(cpus))
            self.node.call(runtime.start_container(container.id))
        except PodOperationFailed as error:
            self.rejected += 1
            if not any(reason in str(error) for reason in EXPECTED_REJECTIONS):
                self.problems.append(f"{kind}: {error}")
            self.node.call(runtime.remove_pod(pod.id))
            return None
        return container

    def look(self) -> None:
        sample = look(self.node.plugin)
        self.samples.append(sample)
        told = ", ".join(f"{name} {value:.6g}" for name, value in sample.items() if value)
        print(
            f"{time.monotonic() - self.began:.0f} s: {self.done} pods, {self.rejected} refused, "
            f"{len(self.node.live)} live, {told}"
        )


def warnings(plugin: PluginProcess) -> None:
    """Print what the plugin warned of, and how often."""
    seen = Counter(
        str(record.get("msg"))
        for record in plugin.records()
        if record.get("level") in ("warning", "error") and record.get("msg") != "link changed"
    )
    for message, count in seen.items():
        print(f"log: {count} times {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--pods", type=int, default=10_000, help="pods that come and go")
    parser.add_argument("--resident", type=int, default=300, help="containers that stay")
    parser.add_argument("--minutes", type=float, default=60, help="at most")
    options = parser.parse_args(arguments)
    machine = build_synthetic_topology(
        sockets=2, numa_per_socket=4, cores_per_numa=16, threads=2, memory_gib=256
    )
    config = {"reconcile": {"interval": "10s"}, "log": {"level": "info", "format": "json"}}
    fast = "/run" if os.access("/run", os.W_OK) else None  # on tmpfs
    with (
        tempfile.TemporaryDirectory(prefix="nri-numa-soak-", dir=fast) as directory,
        EmbeddedNode(Path(directory), topology=machine, config=config) as node,
    ):
        node.start()
        soak = Soak(node, options.pods, time.monotonic() + options.minutes * 60)
        soak.run(options.resident)
        warnings(node.plugin)
    for problem in soak.problems or [f"zero at the end, as it must be: {', '.join(WATCHED)}"]:
        print(problem)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
