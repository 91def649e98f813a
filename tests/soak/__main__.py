"""A long run: thousands of pods come and go on a full node, and nothing may grow, leak or break.

    python -m tests.soak [--pods 10000] [--resident 1000] [--minutes 60]

The plugin is a real process, which the embedded runtime drives, with cgroup files for the
containers. What is sampled from outside while that goes on is printed as a table; the exit status
is 1 when something was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.runtime import CRIError, EmbeddedContainer, EmbeddedRuntime
from tests.beds.embedded_node import limits
from tests.beds.plugin_process import PluginProcess
from tests.machines.named import write_sysfs

PREFIX = "numa.kubernetes.io/"
WATCHED = (
    "invariant_violations_total",
    "internal_errors_total",
    "protocol_errors_total",
    "checkpoint_errors_total",
    "drift_found_total",
    "drift_fights_total",
    "gap_containers_total",
)
"""Counters that must stay at zero."""
ROWS = 10


@dataclass(slots=True)
class Sample:
    """One look at the plugin from outside."""

    seconds: float
    pods: int
    live: int
    rss_kib: int
    descriptors: int
    threads: int
    cpu_seconds: float
    lag_ms: float
    checkpoint_kib: int
    broken: dict[str, float]


@dataclass(slots=True)
class Report:
    """What one bed came to."""

    title: str
    samples: list[Sample] = field(default_factory=list)
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    pods: int = 0

    def print(self) -> None:
        rate = self.pods / self.seconds if self.seconds else 0.0
        print(f"\n### {self.title}\n")
        print(
            f"{self.pods} pods in {self.seconds:.0f} s ({rate:.1f} per second), "
            f"{self.refused} of them refused for want of CPUs.\n"
        )
        print(
            "| s | pods | live | RSS KiB | fds | threads | CPU s | longest gap ms | journal KiB |"
        )
        print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        step = max(1, len(self.samples) // ROWS)
        for sample in [*self.samples[::step], self.samples[-1]]:
            print(
                f"| {sample.seconds:.0f} | {sample.pods} | {sample.live} | {sample.rss_kib} "
                f"| {sample.descriptors} | {sample.threads} | {sample.cpu_seconds:.1f} "
                f"| {sample.lag_ms:.1f} | {sample.checkpoint_kib} |"
            )
        print()
        for problem in self.problems:
            print(f"PROBLEM: {problem}")
        if not self.problems:
            print(f"Zero at the end, as it must be: {', '.join(WATCHED)}.")


def look(plugin: PluginProcess, started: float, pods: int, live: int) -> Sample:
    """Sample a plugin process from outside."""
    proc = Path(f"/proc/{plugin.pid}")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    metrics = dict.fromkeys((*WATCHED, "loop_lag_longest_seconds"), 0.0)
    for line in plugin.get("/metrics")[1].splitlines():
        name, _, value = line.removeprefix("nri_numa_").partition(" ")
        if name in metrics:
            metrics[name] = float(value)
    lag = metrics.pop("loop_lag_longest_seconds")
    checkpoint = plugin.checkpoint.stat().st_size if plugin.checkpoint.exists() else 0
    return Sample(
        seconds=time.monotonic() - started,
        pods=pods,
        live=live,
        rss_kib=int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        descriptors=len(list((proc / "fd").iterdir())),
        threads=int(stat[17]),
        cpu_seconds=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        lag_ms=lag * 1000,
        checkpoint_kib=checkpoint // 1024,
        broken={name: value for name, value in metrics.items() if value},
    )


def judge(report: Report) -> None:
    """Find what must not be in the samples: growth after the warm-up, and counters above zero."""
    settled = report.samples[len(report.samples) // 4 :]
    first, last = settled[0], settled[-1]
    if last.rss_kib > first.rss_kib * 1.15 + 2048:
        report.problems.append(f"RSS grew from {first.rss_kib} to {last.rss_kib} KiB")
    # The look itself is a connection.
    if last.descriptors > first.descriptors + 3:
        report.problems.append(f"descriptors grew from {first.descriptors} to {last.descriptors}")
    if last.threads > first.threads + 2:
        report.problems.append(f"threads grew from {first.threads} to {last.threads}")
    for name, value in last.broken.items():
        report.problems.append(f"{name} is {value:g}")


# --- the embedded runtime -------------------------------------------------------------------------


class CgroupLinks:
    """Cgroups of a thousand containers: each is a link to the directory of its cpuset.

    A pool that changes for all of them is written in milliseconds.
    """

    def __init__(self, root: Path, cpus: str, mems: str) -> None:
        self.root = root
        self._all = cpus, mems
        self._shown: dict[str, tuple[str, str]] = {}
        (root / "sets").mkdir(parents=True)
        (root / "pods").mkdir()
        (root / "cgroup.controllers").write_text("cpuset\n")

    def show(self, container_id: str, container: EmbeddedContainer | None) -> None:
        """Show what the runtime has a container run with; None when it does not run."""
        if container is None:
            if self._shown.pop(container_id, None) is not None:
                (self.root / "pods" / container_id).unlink()
            return
        cpu = container.message.linux.resources.cpu
        has = cpu.cpus, cpu.mems
        if self._shown.get(container_id) == has:
            return
        self._shown[container_id] = has
        temporary = self.root / "pods" / ".new"
        os.symlink(self._directory(*has), temporary)
        os.replace(temporary, self.root / "pods" / container_id)

    def _directory(self, cpus: str, mems: str) -> Path:
        directory = self.root / "sets" / f"{cpus}_{mems}"
        if not directory.exists():
            directory.mkdir()
            for name, text, whole in (("cpus", cpus, self._all[0]), ("mems", mems, self._all[1])):
                (directory / f"cpuset.{name}").write_text(f"{text}\n")
                (directory / f"cpuset.{name}.effective").write_text(f"{text or whole}\n")
        return directory


KINDS: dict[str, tuple[dict[str, str], str]] = {
    "free": ({}, "besteffort/"),
    "shared": ({"policy": "best-effort", "cpus": "shared"}, "burstable/"),
    "listed": ({"numacpu": "0-3", "numamem": "0"}, ""),
    "owner": ({"policy": "single-numa-node"}, ""),
}
RESIDENT_WEIGHTS = (70, 25, 3, 2)
CYCLE_WEIGHTS = (42, 38, 15, 5)
EXPECTED_REFUSALS = ("TopologyAffinityError", "NotEnough")


class EmbeddedSoak:
    """Pods on the embedded runtime, one plugin process."""

    def __init__(self, directory: Path, pods: int, resident: int, deadline: float) -> None:
        self.topology = synthetic(
            sockets=2, numa_per_socket=4, cores_per_numa=16, threads=2, memory_gib=256
        )
        self.directory = directory
        self.pods = pods
        self.resident = resident
        self.deadline = deadline
        self.report = Report(
            f"Embedded runtime: {resident} resident containers, "
            f"{len(self.topology.online)} CPUs on {len(self.topology.numa_ids)} NUMA nodes"
        )
        self.rng = random.Random(1)
        self.done = 0
        self.numbers = 0
        self.changed: set[str] = set()

    async def run(self) -> Report:
        machine = write_sysfs(self.directory / "machine", self.topology)
        cpus, mems = str(self.topology.online), str(self.topology.memory_nodes)
        self.cgroups = CgroupLinks(self.directory / "cgroup", cpus, mems)
        socket = self.directory / "nri.sock"
        config = {
            "cgroupRoot": str(self.cgroups.root),
            "kubeletRoot": str(self.directory / "kubelet"),
            "reconcile": {"interval": "10s"},
            "log": {"level": "warning", "format": "json"},
        }
        plugin = PluginProcess(self.directory / "plugin", socket, config=config, sysfs_root=machine)
        async with EmbeddedRuntime(str(socket), cpus=cpus, mems=mems) as runtime:
            self.runtime = runtime
            runtime._world.on_update = self.changed.add
            try:
                plugin.start(wait=False)
                await runtime.wait_for_plugin(limit=30)
                await self._live(plugin)
            finally:
                plugin.close()
        return self.report

    async def _live(self, plugin: PluginProcess) -> None:
        weights = RESIDENT_WEIGHTS
        for _ in range(self.resident):
            await self._start(self.rng.choices(list(KINDS), weights)[0])
            await asyncio.sleep(0)
        while not await asyncio.to_thread(plugin.responsive):
            await asyncio.sleep(0.1)
        self.runtime.calls.clear()
        started = time.monotonic()
        looking = asyncio.create_task(self._look_on(plugin, started))
        await asyncio.gather(*(self._cycle() for _ in range(4)))
        self.report.seconds, self.report.pods = time.monotonic() - started, self.done
        await asyncio.sleep(2)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._sample(plugin, started)
        judge(self.report)
        await self._compare(plugin)

    async def _cycle(self) -> None:
        """One of several pods at a time, until there were enough of them."""
        while self.done < self.pods and time.monotonic() < self.deadline:
            self.done += 1
            kind = self.rng.choices(list(KINDS), CYCLE_WEIGHTS)[0]
            container = await self._start(kind)
            if container is None:
                self.report.refused += 1
                continue
            if self.rng.random() < 0.2:
                more = pb.LinuxResources()
                more.cpu.shares.value = self.rng.randrange(100, 4000)
                await self.runtime.update_container(container.id, more)
            await asyncio.sleep(self.rng.random() * 0.05)
            await self.runtime.stop_container(container.id)
            self.changed.add(container.id)
            self._mirror()
            await self.runtime.remove_pod(container.pod_id)

    async def _start(self, kind: str) -> EmbeddedContainer | None:
        self.numbers += 1
        number = self.numbers
        annotations, qos = KINDS[kind]
        message = pb.PodSandbox(
            name=f"{kind}-{number}",
            namespace="soak",
            annotations={PREFIX + key: value for key, value in annotations.items()},
        )
        message.linux.cgroup_parent = f"/kubepods/{qos}pod{number}"
        pod = await self.runtime.run_pod(message)
        container = pb.Container(name="app", id=f"c{number:06}")
        container.linux.cgroups_path = f"/pods/{container.id}"
        if kind in ("shared", "owner"):
            count = 0.1 if kind == "shared" else self.rng.choice((1, 2, 4))
            container.linux.resources.CopyFrom(limits(count, 64 << 20))
        try:
            made = await self.runtime.create_container(pod.id, container)
            await self.runtime.start_container(made.id)
        except CRIError as error:
            if not any(reason in str(error) for reason in EXPECTED_REFUSALS):
                self.report.problems.append(f"{kind}: {error}")
            await self.runtime.remove_pod(pod.id)
            return None
        self.changed.add(made.id)
        self._mirror()
        return made

    def _mirror(self) -> None:
        """Write the cgroups of whoever has changed since, at once, as the runtime does."""
        changed, self.changed = self.changed, set()
        for container_id in changed:
            container = self.runtime.containers.get(container_id)
            running = container is not None and container.state.name == "RUNNING"
            self.cgroups.show(container_id, container if running else None)

    async def _look_on(self, plugin: PluginProcess, started: float) -> None:
        while True:
            await self._sample(plugin, started)
            await asyncio.sleep(3)

    async def _sample(self, plugin: PluginProcess, started: float) -> None:
        live = len(self.runtime.containers)
        sample = await asyncio.to_thread(look, plugin, started, self.done, live)
        self.report.samples.append(sample)
        calls = self.runtime.calls
        while calls:
            call = calls.popleft()
            if call.outcome != "ok" and call.method != "CreateContainer":
                self.report.problems.append(f"{call.method}: {call.outcome}")

    async def _compare(self, plugin: PluginProcess) -> None:
        """The plugin's books, the runtime's, and nobody's CPU twice."""
        listing = await asyncio.to_thread(plugin.json, "/v1/assignments")
        told = {one["id"]: one for one in listing["containers"]}
        live = dict(self.runtime.containers)
        if told.keys() != live.keys():
            self.report.problems.append(
                f"the plugin knows {len(told)} containers, the runtime {len(live)}"
            )
        owned = NO_CPUS
        for container_id, one in told.items():
            if one["kind"] == "exclusive":
                cpus = CPUSet.parse(live[container_id].cpus)
                if cpus & owned:
                    self.report.problems.append(f"CPUs {cpus & owned} are owned twice")
                owned = owned | cpus
        for container_id, one in told.items():
            cpus = CPUSet.parse(live[container_id].cpus)
            if one["kind"] != "exclusive" and cpus & owned:
                self.report.problems.append(f"{container_id} runs on owned CPUs {cpus & owned}")
        warnings(plugin)


def warnings(plugin: PluginProcess) -> None:
    """Print what the plugin warned of: how often, and the first of each."""
    seen: Counter[str] = Counter()
    for record in plugin.records():
        message = str(record.get("msg"))
        if record.get("level") in ("warning", "error") and message != "link":
            seen[message] += 1
            if seen[message] <= 5 and message != "container refused":
                print(f"log: {record}", file=sys.stderr)
    for message, count in seen.items():
        print(f"log: {count} times {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--pods", type=int, default=10_000, help="pods that come and go")
    parser.add_argument("--resident", type=int, default=1000, help="containers that stay")
    parser.add_argument("--minutes", type=float, default=60, help="at most")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="nri-numa-soak-", dir=_fast()) as directory:
        soak = EmbeddedSoak(Path(directory), options.pods, options.resident, deadline)
        report = asyncio.run(soak.run())
    report.print()
    return 1 if report.problems else 0


def _fast() -> str | None:
    """A directory on tmpfs where there is one, as /run is."""
    return "/run" if os.access("/run", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
