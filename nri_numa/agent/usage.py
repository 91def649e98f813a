"""Measured usage: of the machine, of memory by NUMA node, of CPU time.

It runs in the HTTP thread and reads in other threads, so no container waits for it, and within a
budget: a sample of the machine every five seconds, and rounds over the memory and CPU pressure of
containers (``containerUsage``), a few at a time, limited to a part of one CPU.
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
"""Per cent of one CPU; rounds take as long as that requires."""
MAX_SERIES_PER_METRIC: Final = 100
"""Maximum series of a metric about containers; the most critical containers have them."""
READ_SLICE_S: Final = 0.002
"""Seconds of CPU time after which a slice of reading ends, after the current container."""

ReadingT = TypeVar("ReadingT")


class ContainerScan(ABC, Generic[ReadingT]):
    """Reads every container in rounds.

    Attributes:
        known: readings of the last complete round, by container id; a new object each round.
    """

    subject: str
    sign = -1
    """1 if low values need attention, -1 if high ones do."""

    def __init__(
        self, agent: Agent, config: AgentConfig, mode: UsageReadMode, *, proc: str = "/proc"
    ) -> None:
        self._agent, self._clock = agent, agent.current.clock
        self._has_metric = mode is UsageReadMode.METRIC
        self._interval_s = parse_duration(config.container_usage.interval)
        self._cgroup_root, self._proc = config.cgroup_root, proc
        # A new object, since views compare it by identity.
        self.known: Mapping[str, ReadingT] = MappingProxyType({})

    @abstractmethod
    def read_container_sample(self, reader: CgroupReader, allocation: Allocation) -> ReadingT:
        """Read one container, in a thread that may take its time."""

    @abstractmethod
    def metric_values(self, reading: ReadingT) -> Sequence[float | None]:
        """Return the values of the series, most important first; None if unknown."""

    def container_series(self, state: NodeState) -> MeasuredValuesByContainer | None:
        """Return the series of the containers of ``state``; None if no metric is configured."""
        if not self._has_metric:
            return None
        table = self.known
        values_by_name: dict[tuple[str, str, str], Sequence[float | None]] = {}
        for a in tuple(state.allocations.values()):
            values = self.metric_values(table[a.container_id]) if a.container_id in table else ()
            if any(value is not None for value in values):
                # A container and its replacement have one name for a moment: one series.
                values_by_name[a.namespace, a.pod, a.container] = values
        # Those that need attention most, then by name.
        ordered = sorted(
            values_by_name.items(),
            key=lambda one: (*(self.sign * (v or 0.0) for v in one[1]), one[0]),
        )
        series = dict(ordered[:MAX_SERIES_PER_METRIC])
        return MeasuredValuesByContainer(
            series,
            {
                "known": len(ordered),
                "unknown": len(state.allocations) - len(ordered),
                "left out": len(ordered) - len(series),
            },
        )

    async def run_watch(self) -> None:
        """Run rounds until cancelled."""
        while True:
            start = self._clock.monotonic()
            try:
                await self.read_all_containers()
            except OSError as error:
                log.warning("container usage not read", metric=self.subject, problem=str(error))
            await self._clock.sleep(max(1.0, self._interval_s - (self._clock.monotonic() - start)))

    async def read_all_containers(self) -> None:
        """Read every container once, with pauses that keep the CPU budget."""
        reader = await asyncio.to_thread(CgroupReader, self._cgroup_root, proc=self._proc)
        allocations = list(self._agent.current.state.allocations.values())
        allocations.reverse()
        readings: dict[str, ReadingT] = {}
        while allocations:
            spent = await asyncio.to_thread(self._read_slice, reader, allocations, readings)
            await self._clock.sleep(spent * (100 / CPU_BUDGET_PERCENT - 1))
        self.known = MappingProxyType(readings)

    def _read_slice(
        self, reader: CgroupReader, allocations: list[Allocation], readings: dict[str, ReadingT]
    ) -> float:
        """Read containers from the end of ``allocations``; returns the CPU time spent."""
        start_time = self._clock.cpu_time()
        spent = 0.0
        while allocations and spent < READ_SLICE_S:
            allocation = allocations.pop()
            readings[allocation.container_id] = self.read_container_sample(reader, allocation)
            spent = self._clock.cpu_time() - start_time
        return spent


# --- Memory by NUMA node ---

MEMORY_NOT_READ: Final = ContainerMemory(
    local_percent=None, by_numa_node={}, source="", read_at=0.0, problem="not read yet"
)


def container_memory(
    allocation: Allocation, memory_nodes: ContainerMemoryNodes, read_at: float
) -> ContainerMemory:
    """Build the document of a reading.

    A container's own NUMA nodes are its memory nodes, or those of its CPUs.
    """
    home = allocation.mems or allocation.numa_nodes
    total = sum(memory_nodes.by_numa_node.values())
    problem = memory_nodes.because
    if not problem and not total:
        problem = "it has no memory yet"
    elif not problem and not home:
        problem = "it is on no particular NUMA nodes"
    return ContainerMemory(
        local_percent=None
        if problem
        else round(100 * local_bytes(memory_nodes.by_numa_node, home) / total, 1),
        by_numa_node={str(i): n for i, n in sorted(memory_nodes.by_numa_node.items())},
        source=memory_nodes.source,
        read_at=read_at,
        problem=problem,
    )


class MemoryWatch(ContainerScan[ContainerMemory]):
    """Reads every container's memory by NUMA node."""

    subject = "memory locality"
    sign = 1

    def read_container_sample(
        self, reader: CgroupReader, allocation: Allocation
    ) -> ContainerMemory:
        """Read one container's memory by NUMA node."""
        cgroup = self._agent.containers.cgroup_places.get(allocation.container_id)
        memory_nodes = ContainerMemoryNodes(because="the agent does not know its cgroup")
        if cgroup is not None:
            root, page = self._cgroup_root, os.sysconf("SC_PAGE_SIZE")
            memory_nodes = read_container_memory(
                reader, cgroup, root, proc=self._proc, page_size=page
            )
        return container_memory(allocation, memory_nodes, self._clock.time())

    def metric_values(self, reading: ContainerMemory) -> Sequence[float | None]:
        """Return the local part, from 0 to 1."""
        return (None if reading.local_percent is None else reading.local_percent / 100,)


# --- CPU pressure of containers ---

WAITING_NOT_READ: Final = ContainerCPUPressure(
    pressure_percent=None, waiting_tasks=None, read_at=0.0, problem="not read yet"
)


class WaitingWatch(ContainerScan[ContainerCPUPressure]):
    """Reads every container's CPU pressure and waiting tasks."""

    subject = "CPU pressure"

    def __init__(
        self, agent: Agent, config: AgentConfig, mode: UsageReadMode, *, proc: str = "/proc"
    ) -> None:
        super().__init__(agent, config, mode, proc=proc)
        self._before: dict[str, tuple[float, Mapping[int, float]]] = {}

    def read_container_sample(
        self, reader: CgroupReader, allocation: Allocation
    ) -> ContainerCPUPressure:
        """Read one container's waits, and compare them with the previous reading."""
        cgroup = self._agent.containers.cgroup_places.get(allocation.container_id)
        if cgroup is None:
            unknown = "the agent does not know its cgroup"
            waits = CPUWaits(no_pressure=unknown, no_threads=unknown)
        else:
            waits = read_cpu_waits(reader, cgroup, self._cgroup_root, proc=self._proc)
        moment = self._clock.monotonic()
        prior = self._before.pop(allocation.container_id, None)
        tasks, problem = None, waits.no_threads
        if waits.threads is not None:
            self._before[allocation.container_id] = moment, waits.threads
            if prior is None:
                problem = "threads were read once so far"
            else:
                tasks = tasks_waiting(prior[1], waits.threads, moment - prior[0])
                problem = "" if tasks is not None else "no thread was there at both readings"
        return ContainerCPUPressure(
            pressure_percent=None if waits.pressure is None else round(100 * waits.pressure, 2),
            waiting_tasks=None if tasks is None else round(tasks, 3),
            read_at=self._clock.time(),
            problem="; ".join(dict.fromkeys(filter(None, (waits.no_pressure, problem)))),
        )

    async def read_all_containers(self) -> None:
        """Read every container once, and drop those that ended."""
        await super().read_all_containers()
        for removed_id in self._before.keys() - self.known.keys():
            del self._before[removed_id]

    def metric_values(self, reading: ContainerCPUPressure) -> Sequence[float | None]:
        """Return the pressure from 0 to 1, and the number of waiting tasks."""
        percent = reading.pressure_percent
        return None if percent is None else percent / 100, reading.waiting_tasks


# --- Usage of the machine ---

SAMPLE_INTERVAL_S: Final = 5.0
"""Seconds between two samples."""
SAMPLE_COUNT: Final = 60
"""Number of stored samples: five minutes."""
SAMPLING_REST_RATIO: Final = 200
"""Reading takes at most this part of the time of one CPU."""
CONTAINER_MEASURE_S: Final = 0.5
"""Seconds that the CPU time of a container is measured over."""
MAX_MEASUREMENTS: Final = 4
"""Containers measured at the same time; others wait."""


class UsageSample(msgspec.Struct, frozen=True):
    """Usage between two readings.

    Attributes:
        sampled_at: Unix time of the later reading.
        seconds: between them.
        cpus: by CPU, the busy part of the time, from 0 to 1.
        memory: by NUMA node, from the later reading.
        remote: by NUMA node, the part of its allocated pages that programs on other NUMA nodes
            allocated meanwhile; None without pages, or if the kernel does not count.
    """

    sampled_at: float
    seconds: float
    cpus: Mapping[int, float]
    memory: Mapping[int, NUMAMemoryReading]
    remote: Mapping[int, float | None]


def sample_between(
    prior: MachineUsage, usage: MachineUsage, *, sampled_at: float, seconds: float
) -> UsageSample:
    """Compute the sample of two readings; CPUs offline at one of them are left out."""
    cpus = {
        cpu: min(1.0, max(0.0, (used - prior.cpus[cpu][0]) / (total - prior.cpus[cpu][1])))
        for cpu, (used, total) in usage.cpus.items()
        if cpu in prior.cpus and total > prior.cpus[cpu][1]
    }
    remote = {i: _other_node_fraction(prior.pages.get(i), usage.pages.get(i)) for i in usage.memory}
    return UsageSample(sampled_at, seconds, cpus, usage.memory, remote)


def _other_node_fraction(
    prior: tuple[int, int] | None, pages: tuple[int, int] | None
) -> float | None:
    if prior is None or pages is None:
        return None
    local_pages, remote_pages = pages[0] - prior[0], pages[1] - prior[1]
    total = local_pages + remote_pages
    return remote_pages / total if local_pages >= 0 and remote_pages >= 0 and total else None


class UsageWatch:
    """Stores samples of the last minutes, and measures containers."""

    def __init__(self, agent: Agent, config: AgentConfig) -> None:
        self._agent, self._now = agent, agent.current.clock.time
        self._root, self._cgroup_root = config.sysfs_root, config.cgroup_root
        self._samples: deque[UsageSample] = deque(maxlen=SAMPLE_COUNT)
        self._last: tuple[float, MachineUsage] | None = None
        self._problem = "not read yet"
        self._turn = asyncio.Semaphore(MAX_MEASUREMENTS)

    async def run_watch(self) -> None:
        """Sample until cancelled."""
        while True:
            cost = await self.take_sample()
            await asyncio.sleep(max(SAMPLE_INTERVAL_S, SAMPLING_REST_RATIO * cost))

    async def take_sample(self) -> float:
        """Take one sample; returns the CPU time of the reading in seconds."""
        cost = 0.0

        def read_timed_usage() -> MachineUsage:
            nonlocal cost
            cpu_start = time.thread_time()
            try:
                return read_usage(self._root, self._agent.current.machine.topology)
            finally:
                cost = time.thread_time() - cpu_start

        read_at = time.monotonic()
        try:
            usage = await asyncio.to_thread(read_timed_usage)
        except (TopologyError, OSError) as error:
            self._last, self._problem = None, str(error)
            return cost
        self._problem = "" if usage.cpus else f"{self._root.rstrip('/')}/proc/stat lists no CPU"
        if usage.cpus and self._last is not None and read_at > self._last[0]:
            seconds = read_at - self._last[0]
            self._samples.append(
                sample_between(self._last[1], usage, sampled_at=self._now(), seconds=seconds)
            )
        self._last = read_at, usage
        return cost

    def usage_document(self) -> NodeUsage:
        """Return the last sample, and the history before it."""
        samples = list(self._samples)
        if not samples:
            return NodeUsage(
                sampled_at=None, interval=0.0, problem=self._problem, cpus={}, numa_nodes=()
            )
        sample = samples[-1]
        return NodeUsage(
            sampled_at=sample.sampled_at,
            interval=sample.seconds,
            problem=self._problem,
            cpus={str(cpu): round(100 * part) for cpu, part in sorted(sample.cpus.items())},
            numa_nodes=tuple(
                self._numa_node_usage(i, sample, samples) for i in sorted(sample.memory)
            ),
        )

    def _numa_node_usage(
        self, i: int, last_sample: UsageSample, samples: list[UsageSample]
    ) -> NUMANodeLoad:
        reading, remote = last_sample.memory[i], last_sample.remote[i]
        node = self._agent.current.machine.topology.numa_nodes.get(i)
        cpus = tuple(node.cpus) if node is not None else ()
        return NUMANodeLoad(
            id=i,
            cpu_percent=_mean_percent(last_sample, cpus),
            memory_bytes=reading.total_bytes,
            memory_used_bytes=_used_memory_bytes(reading),
            memory_reclaimable_bytes=reading.reclaimable_bytes,
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
            cgroup = self._agent.containers.cgroup_places.get(allocation.container_id)
            page = os.sysconf("SC_PAGE_SIZE")
            if cgroup is None:
                return use
            arguments = reader, cgroup, self._cgroup_root, page
            first_usage = await asyncio.to_thread(read_container_usage, *arguments)
            start_time = time.monotonic()
            await asyncio.sleep(CONTAINER_MEASURE_S)
            second_usage = await asyncio.to_thread(read_container_usage, *arguments)
            seconds = time.monotonic() - start_time
        if first_usage is None or second_usage is None:
            return replace(use, problem="it has no cgroup that can be read")
        cpus = self._agent.current.desired.usable_cpus_of(allocation)
        used = None
        if first_usage.cpu_seconds is not None and second_usage.cpu_seconds is not None:
            used = max(0.0, second_usage.cpu_seconds - first_usage.cpu_seconds) / seconds
        memory_nodes = ContainerMemoryNodes(second_usage.memory, NUMA_STAT)
        if not second_usage.memory:
            # Without the file each process has to be read, which is slow.
            memory_nodes = await asyncio.to_thread(
                read_container_memory, reader, cgroup, self._cgroup_root, page_size=page
            )
        memory = container_memory(allocation, memory_nodes, self._now())
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
    """Return the mean usage of these CPUs in per cent; None if all are unknown."""
    ratios = [sample.cpus[cpu] for cpu in cpus if cpu in sample.cpus]
    return round(100 * sum(ratios) / len(ratios)) if ratios else None


def _used_memory_bytes(reading: NUMAMemoryReading) -> int:
    return max(0, reading.total_bytes - reading.available_bytes)


def _used_memory_percent(reading: NUMAMemoryReading | None) -> int | None:
    if reading is None or not reading.total_bytes:
        return None
    return round(100 * _used_memory_bytes(reading) / reading.total_bytes)


class UsageWatches(msgspec.Struct, frozen=True):
    """Watches that are switched on: usage of the machine; memory and waits of containers."""

    usage: UsageWatch
    memory: MemoryWatch | None = None
    cpu_waiting: WaitingWatch | None = None

    @classmethod
    def from_config(cls, config: AgentConfig, agent: Agent) -> UsageWatches:
        """Build the watches by the configuration."""
        memory, pressure = config.container_usage.memory, config.container_usage.cpu_pressure
        return cls(
            UsageWatch(agent, config),
            None if memory is UsageReadMode.OFF else MemoryWatch(agent, config, memory),
            None if pressure is UsageReadMode.OFF else WaitingWatch(agent, config, pressure),
        )

    def start_watches(self) -> list[asyncio.Task[None]]:
        """Start the watches in the running loop."""
        running = (self.usage, self.memory, self.cpu_waiting)
        return [asyncio.create_task(watch.run_watch()) for watch in running if watch is not None]
