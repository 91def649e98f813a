"""A long run: thousands of pods come and go on a full node, and nothing may grow, leak or break.

    python -m tests.soak [--pods 10000] [--resident 1000] [--minutes 60]

The plugin is a real process, which the embedded runtime drives, with cgroup files for the
containers. What is sampled from outside while that goes on is printed; the exit status is 1 when
something was not as it must be.
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
from pathlib import Path

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.runtime import CRIError, EmbeddedContainer, EmbeddedRuntime
from tests.beds.embedded_node import PREFIX, limits
from tests.beds.plugin_process import PluginProcess
from tests.machines.named import write_sysfs

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
        "longest gap ms": float(told["nri_numa_loop_lag_longest_seconds"]) * 1000,
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
        self.samples: list[dict[str, float]] = []
        self.problems: list[str] = []
        self.refused = 0
        self.rng = random.Random(1)
        self.done = 0
        self.numbers = 0
        self.changed: set[str] = set()

    async def run(self) -> None:
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
        await asyncio.sleep(2)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._sample(plugin, started)
        self.problems += judge(self.samples)
        await self._compare(plugin)

    async def _cycle(self) -> None:
        """One of several pods at a time, until there were enough of them."""
        while self.done < self.pods and time.monotonic() < self.deadline:
            self.done += 1
            kind = self.rng.choices(list(KINDS), CYCLE_WEIGHTS)[0]
            container = await self._start(kind)
            if container is None:
                self.refused += 1
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
                self.problems.append(f"{kind}: {error}")
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
        sample = await asyncio.to_thread(look, plugin)
        self.samples.append(sample)
        told = ", ".join(f"{name} {value:.6g}" for name, value in sample.items() if value)
        print(
            f"{time.monotonic() - started:.0f} s: {self.done} pods, {self.refused} refused, "
            f"{len(self.runtime.containers)} live, {told}"
        )
        calls = self.runtime.calls
        while calls:
            call = calls.popleft()
            if call.outcome != "ok" and call.method != "CreateContainer":
                self.problems.append(f"{call.method}: {call.outcome}")

    async def _compare(self, plugin: PluginProcess) -> None:
        """The plugin's books, the runtime's, and nobody's CPU twice."""
        listing = await asyncio.to_thread(plugin.json, "/v1/assignments")
        told = {one["id"]: one for one in listing["containers"]}
        live = dict(self.runtime.containers)
        if told.keys() != live.keys():
            self.problems.append(
                f"the plugin knows {len(told)} containers, the runtime {len(live)}"
            )
        owned = NO_CPUS
        for container_id, one in told.items():
            if one["kind"] == "exclusive":
                cpus = CPUSet.parse(live[container_id].cpus)
                if cpus & owned:
                    self.problems.append(f"CPUs {cpus & owned} are owned twice")
                owned = owned | cpus
        for container_id, one in told.items():
            cpus = CPUSet.parse(live[container_id].cpus)
            if one["kind"] != "exclusive" and cpus & owned:
                self.problems.append(f"{container_id} runs on owned CPUs {cpus & owned}")
        warnings(plugin)


def warnings(plugin: PluginProcess) -> None:
    """Print what the plugin warned of, and how often."""
    seen = Counter(
        str(record.get("msg"))
        for record in plugin.records()
        if record.get("level") in ("warning", "error") and record.get("msg") != "link"
    )
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
        asyncio.run(soak.run())
    for problem in soak.problems or [f"zero at the end, as it must be: {', '.join(WATCHED)}"]:
        print(problem)
    return 1 if soak.problems else 0


def _fast() -> str | None:
    """A directory on tmpfs where there is one, as /run is."""
    return "/run" if os.access("/run", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
