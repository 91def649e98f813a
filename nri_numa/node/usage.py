"""What is really used: the last minutes of the machine, and one container when somebody asks.

It lives in the thread of HTTP and reads in threads besides, so that no container waits for it. What
it costs is bounded: a sample every five seconds, fewer where reading takes long, so that it never
takes more than a two-hundredth of one CPU; a container is read only when it is asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from nri_numa.engine.state import Allocation, effective_cpus
from nri_numa.errors import TopologyError
from nri_numa.http.responses import ContainerUse, NUMANodeLoad, Use
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.usage import (
    NUMA_STAT,
    MachineUsage,
    MemoryPlaces,
    NUMAUsage,
    memory_places,
    read_container,
    read_usage,
)
from nri_numa.node.agent import Agent
from nri_numa.node.locality import container_memory

EVERY: Final = 5.0
"""Seconds between two samples."""
KEPT: Final = 60
"""Samples kept: five minutes."""
SHARE: Final = 200
"""Reading takes at most this part of the time of one CPU."""
CONTAINER_SECONDS: Final = 0.5
"""Seconds that the CPU time of a container is measured over."""
AT_ONCE: Final = 4
"""Containers measured at the same time; others wait."""


class Sample(msgspec.Struct, frozen=True):
    """What was used between two readings.

    Attributes:
        at: Unix time of the later one.
        seconds: between them.
        cpus: by CPU, the part of the time that it was busy, from 0 to 1.
        numa_nodes: by id, as the later reading has it.
        remote: by NUMA node, the part of the pages taken there meanwhile that programs of other
            NUMA nodes took; None where none were taken or the kernel does not count.
    """

    at: float
    seconds: float
    cpus: Mapping[int, float]
    numa_nodes: Mapping[int, NUMAUsage]
    remote: Mapping[int, float | None]


def between(before: MachineUsage, after: MachineUsage, *, at: float, seconds: float) -> Sample:
    """The sample of two readings; CPUs that were away at one of them are left out."""
    cpus = {
        cpu: min(1.0, max(0.0, (busy - before.cpus[cpu][0]) / (total - before.cpus[cpu][1])))
        for cpu, (busy, total) in after.cpus.items()
        if cpu in before.cpus and total > before.cpus[cpu][1]
    }
    remote = {i: _remote(before.numa_nodes.get(i), one) for i, one in after.numa_nodes.items()}
    return Sample(at, seconds, cpus, after.numa_nodes, remote)


def _remote(before: NUMAUsage | None, after: NUMAUsage) -> float | None:
    if before is None or None in (before.here, before.elsewhere, after.here, after.elsewhere):
        return None
    here = (after.here or 0) - (before.here or 0)
    elsewhere = (after.elsewhere or 0) - (before.elsewhere or 0)
    taken = here + elsewhere
    return elsewhere / taken if here >= 0 and elsewhere >= 0 and taken else None


class UsageWatch:
    """Keeps the last minutes, and measures containers.

    Args:
        agent: whose machine and containers.
        root: directory with the sys/ and proc/ trees.
        cgroup_root: where the cgroup file systems are mounted.
        now: Unix time in seconds.
    """

    def __init__(
        self, agent: Agent, root: str, cgroup_root: str, *, now: Callable[[], float]
    ) -> None:
        self._agent = agent
        self._root = root
        self._cgroup_root = cgroup_root
        self._now = now
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._last: tuple[float, MachineUsage] | None = None
        self._problem = "not read yet"
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            cost = await self.sample()
            await asyncio.sleep(max(EVERY, SHARE * cost))

    async def sample(self) -> float:
        """Take one sample; gives the seconds of CPU time that reading took."""
        cost = 0.0

        def read() -> MachineUsage:
            nonlocal cost
            begun = time.thread_time()
            try:
                return read_usage(self._root, self._agent.machine.topology)
            finally:
                cost = time.thread_time() - begun

        at = time.monotonic()
        try:
            usage = await asyncio.to_thread(read)
        except (TopologyError, OSError) as error:
            self._last, self._problem = None, str(error)
            return cost
        if not usage.cpus:
            self._problem = f"{self._root.rstrip('/')}/proc/stat tells of no CPU"
        else:
            self._problem = ""
            if self._last is not None and at > self._last[0]:
                seconds = at - self._last[0]
                self._samples.append(between(self._last[1], usage, at=self._now(), seconds=seconds))
        self._last = at, usage
        return cost

    def document(self) -> Use:
        """The last sample, and the minutes before it."""
        samples = list(self._samples)
        last = samples[-1] if samples else None
        return Use(
            at=last.at if last else None,
            interval=last.seconds if last else 0.0,
            problem=self._problem if not last or self._problem else "",
            cpus={str(cpu): round(100 * part) for cpu, part in sorted(last.cpus.items())}
            if last
            else {},
            numa_nodes=tuple(self._load(i, last, samples) for i in sorted(last.numa_nodes))
            if last
            else (),
        )

    def _load(self, i: int, last: Sample, samples: list[Sample]) -> NUMANodeLoad:
        one, remote = last.numa_nodes[i], last.remote[i]
        node = self._agent.machine.topology.numa_nodes.get(i)
        cpus = tuple(node.cpus) if node is not None else ()
        return NUMANodeLoad(
            id=i,
            cpu_percent=_mean(last, cpus),
            memory_bytes=one.total,
            memory_used_bytes=max(0, one.total - one.free - one.reclaimable),
            memory_reclaimable_bytes=one.reclaimable,
            remote_percent=None if remote is None else round(100 * remote, 1),
            cpu_history=tuple(_mean(sample, cpus) for sample in samples),
            memory_history=tuple(_used(sample.numa_nodes.get(i)) for sample in samples),
        )

    async def container(self, allocation: Allocation) -> ContainerUse:
        """Measure one container, over half a second."""
        async with self._turn:
            reader = await asyncio.to_thread(CgroupReader, self._cgroup_root)
            place = self._agent.places.get(allocation.container_id)
            page = os.sysconf("SC_PAGE_SIZE")
            if place is None:
                return _nothing(allocation, "the agent does not know its cgroup")
            arguments = reader, place, self._cgroup_root, page
            first = await asyncio.to_thread(read_container, *arguments)
            begun = time.monotonic()
            await asyncio.sleep(CONTAINER_SECONDS)
            second = await asyncio.to_thread(read_container, *arguments)
            seconds = time.monotonic() - begun
        if first is None or second is None:
            return _nothing(allocation, "it has no cgroup that can be read")
        machine = self._agent.machine
        state, topology = self._agent.state, machine.topology
        pool = state.pool(topology, machine.settings)
        cpus = effective_cpus(allocation, pool, topology, state.withheld_bits) or topology.online
        used = None
        if first.cpu_seconds is not None and second.cpu_seconds is not None:
            used = max(0.0, second.cpu_seconds - first.cpu_seconds) / seconds
        memory = container_memory(
            allocation,
            MemoryPlaces(second.memory, NUMA_STAT)
            if second.memory
            # The file is not there: only now is it worth while to look into each process.
            else await asyncio.to_thread(
                memory_places, reader, place, self._cgroup_root, page_size=page
            ),
            self._now(),
        )
        problem = "" if used is not None else "its cgroup does not count CPU time"
        if not memory.by_numa_node:
            problem = "; ".join(filter(None, (problem, memory.problem)))
        return ContainerUse(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            cpu_milli=None if used is None else round(1000 * used),
            cpu_set_milli=1000 * len(cpus),
            memory_by_numa_node=memory.by_numa_node,
            local_percent=memory.local_percent,
            problem=problem,
        )


def _nothing(allocation: Allocation, problem: str) -> ContainerUse:
    return ContainerUse(
        namespace=allocation.namespace,
        pod=allocation.pod,
        container=allocation.container,
        cpu_milli=None,
        cpu_set_milli=0,
        memory_by_numa_node={},
        local_percent=None,
        problem=problem,
    )


def _mean(sample: Sample, cpus: tuple[int, ...]) -> int | None:
    """Per cent that these CPUs were busy; None when nothing is known of any."""
    known = [sample.cpus[cpu] for cpu in cpus if cpu in sample.cpus]
    return round(100 * sum(known) / len(known)) if known else None


def _used(one: NUMAUsage | None) -> int | None:
    if one is None or not one.total:
        return None
    return round(100 * max(0, one.total - one.free - one.reclaimable) / one.total)
