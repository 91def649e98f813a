"""What is really used, beside the decisions: of the machine, of memory by NUMA node, of CPU time.

It lives in the thread of HTTP and reads in threads besides, so that no container waits for it, and
within a budget: a sample of the machine every five seconds; where the memory of containers is
and how much they wait for CPUs (``containerUsage``) in rounds, a few containers at
a time, whose CPU time is measured and stays below a part of one CPU.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.config import AgentConfig
from nri_numa.config.sections import UsageReadMode
from nri_numa.config.values import parse_duration
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.errors import TopologyError
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.cpu_wait import CPUWaits, read_cpu_waits, tasks_waiting
from nri_numa.machine.usage import (
    NUMA_STAT,
    ContainerMemoryNodes,
    MachineUsage,
    local_bytes,
    read_container_memory,
    read_container_usage,
    read_usage,
)
from nri_numa.model.machine import NUMAMemoryReading
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import MeasuredValuesByContainer
from nri_numa.web.responses import (
    ContainerCPUPressure,
    ContainerMemory,
    MeasuredContainer,
    NodeUsage,
    NUMANodeLoad,
)

# --- Rounds over all containers ---

log = get_logger("http")

CPU_BUDGET_PERCENT: Final = 0.5
"""Per cent of one CPU; a round is stretched over as much time as that needs."""
MAX_SERIES_PER_METRIC: Final = 100
"""Series of a metric about containers at most; those that need attention most have them."""
READ_SLICE_S: Final = 0.002
"""Seconds of CPU time after which a turn of reading ends, with the container that is being read."""

ReadingT = TypeVar("ReadingT")


class ContainerScan(ABC, Generic[ReadingT]):
    """Keeps what was read of every container.

    Attributes:
        known: what the last whole round found, by container id; another object after each round.
    """

    subject: str
    sign = -1
    """1 where low values need attention, -1 where high ones do."""

    def __init__(
        self,
        agent: Agent,
        mode: UsageReadMode,
        interval: str | float,
        cgroup_root: str,
        clock: Clock,
        *,
        proc: str = "/proc",
    ) -> None:
        self._agent = agent
        self._has_metric = mode is UsageReadMode.METRIC
        self._interval_s = parse_duration(interval)
        self._cgroup_root = cgroup_root
        self._proc = proc
        self._clock = clock
        # A new object: views see by identity whether anything is read at all.
        self.known: Mapping[str, ReadingT] = MappingProxyType({})

    @abstractmethod
    def read_container_sample(self, reader: CgroupReader, allocation: Allocation) -> ReadingT:
        """Read one container, in a thread that may take its time."""

    @abstractmethod
    def metric_values(self, found: ReadingT) -> Sequence[float | None]:
        """What becomes a series each, the weightiest first; None where one is not known."""

    def container_series(self, state: NodeState) -> MeasuredValuesByContainer | None:
        """What a scrape has of the containers of ``state``; None where no metric is wanted."""
        if not self._has_metric:
            return None
        known = self.known
        found: dict[tuple[str, str, str], Sequence[float | None]] = {}
        for a in tuple(state.allocations.values()):
            values = self.metric_values(known[a.container_id]) if a.container_id in known else ()
            if any(value is not None for value in values):
                # While a container is replaced there are two of its name for a moment: one series.
                found[a.namespace, a.pod, a.container] = values
        # Those that need attention most, then by name.
        ordered = sorted(
            found.items(), key=lambda one: (*(self.sign * (v or 0.0) for v in one[1]), one[0])
        )
        shown = dict(ordered[:MAX_SERIES_PER_METRIC])
        return MeasuredValuesByContainer(
            shown,
            {
                "known": len(ordered),
                "unknown": len(state.allocations) - len(ordered),
                "left out": len(ordered) - len(shown),
            },
        )

    async def run(self) -> None:
        """Go round until cancelled."""
        while True:
            begun = self._clock.monotonic()
            try:
                await self.read_all_containers()
            except OSError as error:
                log.warning(f"{self.subject}, was not read", error=str(error))
            await self._clock.sleep(max(1.0, self._interval_s - (self._clock.monotonic() - begun)))

    async def read_all_containers(self) -> None:
        """Read every container once, with rests that pay for it."""
        reader = await asyncio.to_thread(CgroupReader, self._cgroup_root, proc=self._proc)
        waiting = list(self._agent.current.state.allocations.values())
        waiting.reverse()
        found: dict[str, ReadingT] = {}
        while waiting:
            spent = await asyncio.to_thread(self._read_slice, reader, waiting, found)
            await self._clock.sleep(spent * (100 / CPU_BUDGET_PERCENT - 1))
        self.known = MappingProxyType(found)

    def _read_slice(
        self, reader: CgroupReader, waiting: list[Allocation], found: dict[str, ReadingT]
    ) -> float:
        """Read containers from the end of ``waiting``; gives the CPU time that it took."""
        begun = self._clock.cpu_time()
        spent = 0.0
        while waiting and spent < READ_SLICE_S:
            allocation = waiting.pop()
            found[allocation.container_id] = self.read_container_sample(reader, allocation)
            spent = self._clock.cpu_time() - begun
        return spent


# --- Where memory is ---

MEMORY_NOT_READ: Final = ContainerMemory(
    local_percent=None, by_numa_node={}, source="", read_at=0.0, problem="not read yet"
)


def container_memory(
    allocation: Allocation, found: ContainerMemoryNodes, at: float
) -> ContainerMemory:
    """The document of what was found.

    A container's own NUMA nodes are its memory nodes, or those of its CPUs.
    """
    home = allocation.mems or allocation.numa_nodes
    total = sum(found.by_numa_node.values())
    problem = found.because
    if not problem and not total:
        problem = "it has no memory yet"
    elif not problem and not home:
        problem = "it is on no particular NUMA nodes"
    return ContainerMemory(
        local_percent=None
        if problem
        else round(100 * local_bytes(found.by_numa_node, home) / total, 1),
        by_numa_node={str(i): n for i, n in sorted(found.by_numa_node.items())},
        source=found.source,
        read_at=at,
        problem=problem,
    )


class MemoryWatch(ContainerScan[ContainerMemory]):
    """Keeps where the memory of every container is."""

    subject = "where memory is"
    sign = 1

    def read_container_sample(
        self, reader: CgroupReader, allocation: Allocation
    ) -> ContainerMemory:
        """Read where the memory of one container is."""
        place = self._agent.containers.cgroup_places.get(allocation.container_id)
        places = (
            ContainerMemoryNodes(because="the agent does not know its cgroup")
            if place is None
            else read_container_memory(
                reader,
                place,
                self._cgroup_root,
                proc=self._proc,
                page_size=os.sysconf("SC_PAGE_SIZE"),
            )
        )
        return container_memory(allocation, places, self._clock.time())

    def metric_values(self, found: ContainerMemory) -> Sequence[float | None]:
        """The part that is local."""
        return (None if found.local_percent is None else found.local_percent / 100,)


# --- How much containers wait for CPUs ---

WAITING_NOT_READ: Final = ContainerCPUPressure(
    pressure_percent=None, waiting_tasks=None, read_at=0.0, problem="not read yet"
)


class WaitingWatch(ContainerScan[ContainerCPUPressure]):
    """Keeps how much every container waits for CPUs."""

    subject = "how much containers wait"

    def __init__(
        self,
        agent: Agent,
        mode: UsageReadMode,
        interval: str | float,
        cgroup_root: str,
        clock: Clock,
        *,
        proc: str = "/proc",
    ) -> None:
        super().__init__(agent, mode, interval, cgroup_root, clock, proc=proc)
        self._before: dict[str, tuple[float, Mapping[int, float]]] = {}

    def read_container_sample(
        self, reader: CgroupReader, allocation: Allocation
    ) -> ContainerCPUPressure:
        """Read how much one container waits, and compare with the reading before."""
        place = self._agent.containers.cgroup_places.get(allocation.container_id)
        if place is None:
            unknown = "the agent does not know its cgroup"
            found = CPUWaits(no_pressure=unknown, no_threads=unknown)
        else:
            found = read_cpu_waits(reader, place, self._cgroup_root, proc=self._proc)
        moment = self._clock.monotonic()
        before = self._before.pop(allocation.container_id, None)
        tasks, problem = None, found.no_threads
        if found.threads is not None:
            self._before[allocation.container_id] = moment, found.threads
            if before is None:
                problem = "threads were read once so far"
            else:
                tasks = tasks_waiting(before[1], found.threads, moment - before[0])
                problem = "" if tasks is not None else "no thread was there at both readings"
        return ContainerCPUPressure(
            pressure_percent=None if found.pressure is None else round(100 * found.pressure, 2),
            waiting_tasks=None if tasks is None else round(tasks, 3),
            read_at=self._clock.time(),
            problem="; ".join(dict.fromkeys(filter(None, (found.no_pressure, problem)))),
        )

    async def read_all_containers(self) -> None:
        """Read every container once, and forget those that are not there any more."""
        await super().read_all_containers()
        for gone in self._before.keys() - self.known.keys():
            del self._before[gone]

    def metric_values(self, found: ContainerCPUPressure) -> Sequence[float | None]:
        """The pressure from 0 to 1, and the threads that wait."""
        percent = found.pressure_percent
        return None if percent is None else percent / 100, found.waiting_tasks


# --- What is used ---

SAMPLE_INTERVAL_S: Final = 5.0
"""Seconds between two samples."""
SAMPLE_COUNT: Final = 60
"""Samples kept: five minutes."""
SAMPLING_REST_RATIO: Final = 200
"""Reading takes at most this part of the time of one CPU."""
CONTAINER_MEASURE_S: Final = 0.5
"""Seconds that the CPU time of a container is measured over."""
MAX_MEASUREMENTS: Final = 4
"""Containers measured at the same time; others wait."""


class UsageSample(msgspec.Struct, frozen=True):
    """What was used between two readings.

    Attributes:
        sampled_at: Unix time of the later one.
        seconds: between them.
        cpus: by CPU, the part of the time that it was busy, from 0 to 1.
        memory: by NUMA node, as the later reading has it.
        remote: by NUMA node, the part of the pages taken there meanwhile that programs of other
            NUMA nodes took; None where none were taken or the kernel does not count.
    """

    sampled_at: float
    seconds: float
    cpus: Mapping[int, float]
    memory: Mapping[int, NUMAMemoryReading]
    remote: Mapping[int, float | None]


def sample_between(
    before: MachineUsage, after: MachineUsage, *, at: float, seconds: float
) -> UsageSample:
    """The sample of two readings; CPUs that were away at one of them are left out."""
    cpus = {
        cpu: min(1.0, max(0.0, (busy - before.cpus[cpu][0]) / (total - before.cpus[cpu][1])))
        for cpu, (busy, total) in after.cpus.items()
        if cpu in before.cpus and total > before.cpus[cpu][1]
    }
    remote = {i: _remote_fraction(before.pages.get(i), after.pages.get(i)) for i in after.memory}
    return UsageSample(at, seconds, cpus, after.memory, remote)


def _remote_fraction(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None:
        return None
    here, elsewhere = after[0] - before[0], after[1] - before[1]
    taken = here + elsewhere
    return elsewhere / taken if here >= 0 and elsewhere >= 0 and taken else None


class UsageWatch:
    """Keeps the last minutes, and measures containers.

    ``root`` has the sys/ and proc/ trees.
    """

    def __init__(self, agent: Agent, root: str, cgroup_root: str, clock: Clock) -> None:
        self._agent = agent
        self._root = root
        self._cgroup_root = cgroup_root
        self._now = clock.time
        self._samples: deque[UsageSample] = deque(maxlen=SAMPLE_COUNT)
        self._last: tuple[float, MachineUsage] | None = None
        self._problem = "not read yet"
        self._turn = asyncio.Semaphore(MAX_MEASUREMENTS)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            cost = await self.take_sample()
            await asyncio.sleep(max(SAMPLE_INTERVAL_S, SAMPLING_REST_RATIO * cost))

    async def take_sample(self) -> float:
        """Take one sample; gives the seconds of CPU time that reading took."""
        cost = 0.0

        def read_timed_usage() -> MachineUsage:
            nonlocal cost
            begun = time.thread_time()
            try:
                return read_usage(self._root, self._agent.current.machine.topology)
            finally:
                cost = time.thread_time() - begun

        at = time.monotonic()
        try:
            usage = await asyncio.to_thread(read_timed_usage)
        except (TopologyError, OSError) as error:
            self._last, self._problem = None, str(error)
            return cost
        if not usage.cpus:
            self._problem = f"{self._root.rstrip('/')}/proc/stat lists no CPU"
        else:
            self._problem = ""
            if self._last is not None and at > self._last[0]:
                seconds = at - self._last[0]
                self._samples.append(
                    sample_between(self._last[1], usage, at=self._now(), seconds=seconds)
                )
        self._last = at, usage
        return cost

    def usage_document(self) -> NodeUsage:
        """The last sample, and the minutes before it."""
        samples = list(self._samples)
        if not samples:
            return NodeUsage(
                sampled_at=None, interval=0.0, problem=self._problem, cpus={}, numa_nodes=()
            )
        last = samples[-1]
        return NodeUsage(
            sampled_at=last.sampled_at,
            interval=last.seconds,
            problem=self._problem,
            cpus={str(cpu): round(100 * part) for cpu, part in sorted(last.cpus.items())},
            numa_nodes=tuple(self._numa_node_usage(i, last, samples) for i in sorted(last.memory)),
        )

    def _numa_node_usage(
        self, i: int, last: UsageSample, samples: list[UsageSample]
    ) -> NUMANodeLoad:
        one, remote = last.memory[i], last.remote[i]
        node = self._agent.current.machine.topology.numa_nodes.get(i)
        cpus = tuple(node.cpus) if node is not None else ()
        return NUMANodeLoad(
            id=i,
            cpu_percent=_mean_percent(last, cpus),
            memory_bytes=one.total_bytes,
            memory_used_bytes=_used_memory_bytes(one),
            memory_reclaimable_bytes=one.reclaimable_bytes,
            remote_percent=None if remote is None else round(100 * remote, 1),
            cpu_history=tuple(_mean_percent(sample, cpus) for sample in samples),
            memory_history=tuple(_used_memory_percent(sample.memory.get(i)) for sample in samples),
        )

    async def measure_container(self, allocation: Allocation) -> MeasuredContainer:
        """Measure one container, over half a second."""
        use = MeasuredContainer(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            cpu_milli=None,
            cpu_set_milli=0,
            memory_by_numa_node={},
            local_percent=None,
            problem="the agent does not know its cgroup",
        )
        async with self._turn:
            reader = await asyncio.to_thread(CgroupReader, self._cgroup_root)
            place = self._agent.containers.cgroup_places.get(allocation.container_id)
            page = os.sysconf("SC_PAGE_SIZE")
            if place is None:
                return use
            arguments = reader, place, self._cgroup_root, page
            first = await asyncio.to_thread(read_container_usage, *arguments)
            begun = time.monotonic()
            await asyncio.sleep(CONTAINER_MEASURE_S)
            second = await asyncio.to_thread(read_container_usage, *arguments)
            seconds = time.monotonic() - begun
        if first is None or second is None:
            return replace(use, problem="it has no cgroup that can be read")
        cpus = self._agent.current.desired.usable_cpus_of(allocation)
        used = None
        if first.cpu_seconds is not None and second.cpu_seconds is not None:
            used = max(0.0, second.cpu_seconds - first.cpu_seconds) / seconds
        memory = container_memory(
            allocation,
            ContainerMemoryNodes(second.memory, NUMA_STAT)
            if second.memory
            # The file is not there: only now is it worth while to look into each process.
            else await asyncio.to_thread(
                read_container_memory, reader, place, self._cgroup_root, page_size=page
            ),
            self._now(),
        )
        problem = "" if used is not None else "its cgroup does not count CPU time"
        if not memory.by_numa_node:
            problem = "; ".join(filter(None, (problem, memory.problem)))
        return replace(
            use,
            cpu_milli=None if used is None else round(1000 * used),
            cpu_set_milli=1000 * len(cpus),
            memory_by_numa_node=memory.by_numa_node,
            local_percent=memory.local_percent,
            problem=problem,
        )


def _mean_percent(sample: UsageSample, cpus: tuple[int, ...]) -> int | None:
    """Per cent that these CPUs were busy; None when nothing is known of any."""
    known = [sample.cpus[cpu] for cpu in cpus if cpu in sample.cpus]
    return round(100 * sum(known) / len(known)) if known else None


def _used_memory_bytes(one: NUMAMemoryReading) -> int:
    return max(0, one.total_bytes - one.available_bytes)


def _used_memory_percent(one: NUMAMemoryReading | None) -> int | None:
    if one is None or not one.total_bytes:
        return None
    return round(100 * _used_memory_bytes(one) / one.total_bytes)


class UsageWatches(msgspec.Struct, frozen=True):
    """Those that are switched on: usage of the machine; memory and waiting of containers."""

    usage: UsageWatch | None = None
    memory: MemoryWatch | None = None
    cpu_waiting: WaitingWatch | None = None

    @classmethod
    def from_config(cls, config: AgentConfig, agent: Agent, clock: Clock) -> UsageWatches:
        """By the configuration."""
        cgroups, section, off = config.cgroup_root, config.container_usage, UsageReadMode.OFF
        memory, pressure, every = section.memory, section.cpu_pressure, section.interval
        return cls(
            UsageWatch(agent, config.sysfs_root, cgroups, clock),
            None if memory is off else MemoryWatch(agent, memory, every, cgroups, clock),
            None if pressure is off else WaitingWatch(agent, pressure, every, cgroups, clock),
        )

    def start_watches(self) -> list[asyncio.Task[None]]:
        """Begin to read, in the loop that runs now."""
        running = (self.usage, self.memory, self.cpu_waiting)
        return [asyncio.create_task(one.run()) for one in running if one is not None]
