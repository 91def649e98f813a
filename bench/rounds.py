"""What it costs to look at every container all the time: where its memory is, how much it waits.

The rounds of the agent, over files as a kernel has them, with the rests that they take. The share
is CPU time of the whole process in the time of a round, so what resting itself costs is in it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stats import table, us
from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.agent.usage import ContainerScan, MemoryWatch, WaitingWatch
from nri_numa.config import AgentConfig
from nri_numa.config.sections import UsageReadMode
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources
from tests.beds.world import agent_of

EVERY_S = 30.0
"""From one round to the next, as it is by default."""
_STAT = "".join(
    f"{name} N0=104857600 N1=4096\n"
    for name in ("anon", "file", "kernel_stack", "pagetables", "shmem", "slab_reclaimable")
)
_LINE = "7f0000000000 default anon=1 dirty=1 active=0 N0=1 kernelpagesize_kB=4\n"
_PRESSURE = "some avg10=0.00 avg60=1.50 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00\n"


@dataclass(frozen=True, slots=True)
class Read:
    """What is read of each container.

    Attributes:
        title: for the table.
        containers: of a round.
        files: by name, of the container's cgroup.
        maps: lines of numa_maps of its process; 0 for no such file.
        threads: of its process.
    """

    title: str
    containers: int
    files: dict[str, str]
    maps: int = 0
    threads: int = 0


READS = {
    "memory.numa_stat": Read("memory, by memory.numa_stat", 300, {"memory.numa_stat": _STAT}),
    "numa_maps": Read("memory, by numa_maps of 1,000 lines", 20, {}, maps=1000),
    "waiting": Read("waiting: cpu.pressure, and 20 threads", 50, {"cpu.pressure": _PRESSURE},
                    threads=20),
}  # fmt: skip


def _agent(root: Path, read: Read) -> Agent:
    topology = build_synthetic_topology(sockets=2, numa_per_socket=1, cores_per_numa=16)
    agent = agent_of(NodeModel(topology=topology, settings=Settings()), clock=Clock())
    (root / "cgroup.controllers").touch()
    for n in range(read.containers):
        pod = PodSandbox(
            id=f"s{n}", uid=f"u{n}", namespace="d", name=f"p{n}", qos=QoSClass.BURSTABLE
        )
        made = Container(id=f"c{n}", pod_id=pod.id, name="c", resources=Resources(cpu_shares=102))
        agent.create_container(pod, made)
        agent.containers.cgroup_places[made.id] = CgroupPlace(f"/kubepods/pod{n}/c{n}")
        home, process = root / f"kubepods/pod{n}/c{n}", root / f"proc/{n + 1}"
        home.mkdir(parents=True)
        (home / "cgroup.procs").write_text(f"{n + 1}\n")
        for name, text in read.files.items():
            (home / name).write_text(text)
        process.mkdir(parents=True)
        if read.maps:
            (process / "numa_maps").write_text(_LINE * read.maps)
        for thread in range(read.threads):
            (process / f"task/{thread}").mkdir(parents=True)
            (process / f"task/{thread}/schedstat").write_text("123456789 123456 1234\n")
    return agent


class _Restless(Clock):
    """Rests not, unless it is told so."""

    resting = False

    async def sleep(self, seconds: float) -> None:
        if self.resting:
            await asyncio.sleep(seconds)


def _watch(name: str, root: Path, agent: Agent) -> ContainerScan[Any]:
    config, proc = AgentConfig(cgroup_root=str(root)), str(root / "proc")
    if name == "waiting":
        return WaitingWatch(agent, config, UsageReadMode.READ, proc=proc)
    return MemoryWatch(agent, config, UsageReadMode.READ, proc=proc)


async def _one(name: str, read: Read, rounds: int) -> tuple[object, ...]:
    with tempfile.TemporaryDirectory(prefix="nri-numa-rounds-") as directory:
        root = Path(directory)
        agent = _agent(root, read)
        clock = agent.current.clock = _Restless()
        watch = _watch(name, root, agent)
        await watch.read_all_containers()  # files are in the page cache, and code is loaded
        before = time.process_time()
        for _ in range(rounds):
            await watch.read_all_containers()
        each = (time.process_time() - before) / rounds / read.containers
        before, begun = time.process_time(), time.perf_counter()
        clock.resting = True
        await watch.read_all_containers()
        took = time.perf_counter() - begun
        spent = time.process_time() - before
    return (
        read.title,
        read.containers,
        us(each),
        f"{took:.1f} s",
        f"{spent / took:.2%}",
        f"{spent / max(took, EVERY_S):.2%}",
    )


def measure(*, quick: bool = False) -> str:
    rows = [asyncio.run(_one(name, read, 2 if quick else 10)) for name, read in READS.items()]
    head = (
        "what is read",
        "containers",
        "µs each",
        "a round takes",
        "of a core meanwhile, ≤ 0.6 %",
        f"of a core in {EVERY_S:g} s, ≤ 0.5 %",
    )
    return table(head, rows)
