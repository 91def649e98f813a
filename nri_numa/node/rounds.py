"""Reading something of every container, again and again, within a budget.

It lives in the thread of HTTP and reads in threads besides, a few containers at a time, and rests
after each turn as long as its budget asks: the CPU time of reading is measured, and never more than
that part of one CPU.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from nri_numa.engine.state import Allocation
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.node.agent import Agent
from nri_numa.observe.logs import get_logger

log = get_logger("http")

BUDGET: Final = 0.5
"""Per cent of one CPU; a round is stretched over as much time as that needs."""
MAX_SERIES: Final = 100
"""Series of a metric about containers at most; those that need attention most have them."""
TURN: Final = 0.002
"""Seconds of CPU time after which a turn of reading ends, with the container that is being read."""

Found = TypeVar("Found")


class Rounds(ABC, Generic[Found]):
    """Keeps what was read of every container.

    Args:
        agent: whose containers.
        cgroup_root: where the cgroup file systems are mounted.
        what: is read, for a log line.
        interval: seconds from one round to the next.
        budget: per cent of one CPU.
        proc: the proc file system.
        cost: CPU time of the thread that reads.

    Attributes:
        known: what the last whole round found, by container id; another object after each round.
    """

    def __init__(
        self,
        agent: Agent,
        cgroup_root: str,
        *,
        what: str,
        interval: float,
        budget: float = BUDGET,
        proc: str = "/proc",
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self._agent = agent
        self._cgroup_root = cgroup_root
        self._what = what
        self._interval = interval
        self._budget = budget
        self._proc = proc
        self._cost = cost
        # A new object: views tell by identity whether nobody looks.
        self.known: Mapping[str, Found] = MappingProxyType({})

    @abstractmethod
    def look(self, reader: CgroupReader, allocation: Allocation) -> Found:
        """Read one container, in a thread that may take its time.

        Args:
            reader: knows where cgroups are.
            allocation: of the container.
        """

    async def run(self) -> None:
        """Go round until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await self.round(asyncio.sleep)
            except OSError as error:
                log.warning(f"{self._what}, was not read", error=str(error))
            await asyncio.sleep(max(1.0, self._interval - (time.monotonic() - begun)))

    async def round(self, rest: Callable[[float], Awaitable[object]]) -> None:
        """Read every container once.

        Args:
            rest: is awaited after each turn, with the seconds that pay for it.
        """
        reader = await asyncio.to_thread(CgroupReader, self._cgroup_root, proc=self._proc)
        waiting = list(self._agent.state.allocations.values())
        waiting.reverse()
        found: dict[str, Found] = {}
        while waiting:
            spent = await asyncio.to_thread(self._turn, reader, waiting, found)
            await rest(spent * (100 / self._budget - 1))
        self.known = MappingProxyType(found)

    def _turn(
        self, reader: CgroupReader, waiting: list[Allocation], found: dict[str, Found]
    ) -> float:
        """Read containers from the end of ``waiting``; gives the CPU time that it took."""
        begun = self._cost()
        spent = 0.0
        while waiting and spent < TURN:
            allocation = waiting.pop()
            found[allocation.container_id] = self.look(reader, allocation)
            spent = self._cost() - begun
        return spent
