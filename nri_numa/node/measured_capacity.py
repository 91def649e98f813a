"""Capacity factors that follow steal: read, smoothed, told, and where asked for put in force.

Off unless ``measuredCapacity.mode``. Reading is two small files and a few more of cpufreq in a
thread. New containers are
decided by the factors; nothing that runs moves. The frequency of CPUs is told beside, and decides
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final

from nri_numa.config import AgentConfig
from nri_numa.config.sections import MeasuredCapacity, MeasuredMode
from nri_numa.config.values import parse_duration
from nri_numa.engine.values.settings import Settings
from nri_numa.errors import TopologyError
from nri_numa.machine.model import Topology
from nri_numa.machine.steal import CPUTimes, Smoothed, cpu_times, frequencies, stolen, waiting
from nri_numa.machine.tree import open_tree
from nri_numa.node.agent import Agent
from nri_numa.node.reload import MakeSettings, with_tables
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics, StealGauges

log = get_logger("capacity")

SOURCE: Final = "steal"
STEP: Final = 0.1
"""How far the average must be from a factor before it changes."""
"""Where these factors come from, in log lines."""


class StealWatch:
    """Measures steal of each NUMA node, and what capacity factors follow.

    Args:
        config: the ``measuredCapacity`` section.
        root: directory with the proc/ tree.
        metrics: told what was measured.
        clock: seconds that only grow.
        sleep: waits.
    """

    def __init__(
        self,
        config: MeasuredCapacity,
        root: str,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._interval = parse_duration(config.interval)
        self._acts = config.mode is MeasuredMode.ACT
        self._root = root
        self._metrics = metrics
        self._gauges: StealGauges | None = None
        self._clock = clock
        self._sleep = sleep
        self._smoothed = Smoothed(
            half_life=parse_duration(config.half_life), step=STEP, floor=config.floor
        )
        self._last: tuple[float, Topology, CPUTimes] | None = None
        self._problem = ""
        self._in_force = True
        self.factors: dict[int, float] = {}
        """By NUMA node, the factors that are not 1; another object after each change."""

    def over(self, settings: Settings, topology: Topology, told: Collection[int] = ()) -> Settings:
        """These settings, with what was measured where that is acted upon; any thread may ask.

        Args:
            settings: of the configuration.
            topology: of the machine.
            told: NUMA nodes whose factor is told from outside, which counts instead.
        """
        if not self._acts:
            return settings
        ours = settings.capacity_factor
        lower = {
            i: factor
            for i, factor in self.factors.items()
            if i in topology.numa_nodes and i not in told and factor < ours.get(i, 1.0)
        }
        return replace(settings, capacity_factor={**ours, **lower}) if lower else settings

    def acting(self) -> dict[int, float]:
        """By NUMA node, what was measured and is acted upon; any thread may ask."""
        return self.factors if self._acts else {}

    def look(self, topology: Topology) -> bool:
        """Read once; whether a factor changed. What cannot be read changes nothing."""
        now = self._clock()
        try:
            tree = open_tree(self._root)
            times = cpu_times(tree.read("proc/stat") or "", tree.read("proc/schedstat") or "")
        except (TopologyError, OSError) as error:
            return self._unknown(str(error))
        if not times.steal:
            return self._unknown(f"{self._root.rstrip('/')}/proc/stat tells no steal")
        if self._problem:
            log.info("steal is known again")
            self._problem = ""
        last, self._last = self._last, (now, topology, times)
        # CPUs that moved to another NUMA node meanwhile would be counted there.
        if last is None or last[1] is not topology or now <= last[0]:
            return False
        seconds = now - last[0]
        steal = stolen(last[2], times, topology)
        self._smoothed.keep(set(topology.numa_nodes))
        changed = self._smoothed.take(steal, seconds)
        if changed:
            self.factors = dict(self._smoothed.factors)
            log.info(
                "capacity measured",
                factors=" ".join(f"{i}:{f:g}" for i, f in sorted(self.factors.items())) or "all 1",
                steal=" ".join(f"{i}:{s:.3f}" for i, s in sorted(steal.items())),
                source=SOURCE,
                in_force=self._acts,
            )
        if self._gauges is None:
            self._gauges = StealGauges(self._metrics)
        self._gauges.set(
            {i: self.factors.get(i, 1.0) for i in steal},
            steal,
            waiting(last[2], times, topology, seconds),
            frequencies(tree, topology),
        )
        return changed

    def _unknown(self, problem: str) -> bool:
        if problem != self._problem:
            log.warning("steal is not known here", because=problem)
        self._last, self._problem = None, problem
        return False

    async def run(
        self, agent: Agent, config: Callable[[], AgentConfig], settings: MakeSettings
    ) -> None:
        """Look again and again, and put in force what changed, until cancelled.

        Args:
            agent: decides with it.
            config: in force.
            settings: makes the engine's settings of it, with `over`.
        """
        while True:
            await self.apply(agent, config(), settings)
            await self._sleep(self._interval)

    async def apply(self, agent: Agent, config: AgentConfig, settings: MakeSettings) -> None:
        """Look once. New containers are decided by it; nothing that runs moves."""
        before = agent.machine
        if await asyncio.to_thread(self.look, before.topology) and self._acts:
            self._in_force = False
        if self._in_force:
            return
        made = await asyncio.to_thread(settings, config, before.topology)
        if made != before.settings:
            machine = await asyncio.to_thread(with_tables, replace(before, settings=made))
            if agent.machine is not before:
                return  # somebody else changed the machine meanwhile: next time again
            agent.retopology(machine)
        self._in_force = True
