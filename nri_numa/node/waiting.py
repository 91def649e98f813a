"""How much containers wait for CPUs: read again and again, beside the decisions.

Off unless ``cpuWaiting.enabled``; `nri_numa.node.rounds` goes round.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from nri_numa.config.sections import CPUWaiting
from nri_numa.config.values import parse_duration
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.http.responses import ContainerWaiting
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.waiting import Waits, tasks_waiting, waits
from nri_numa.node.agent import Agent
from nri_numa.node.rounds import MAX_SERIES, Rounds
from nri_numa.observe.metrics import Named, Waiting

Waitings: TypeAlias = Mapping[str, ContainerWaiting]
"""By container id."""

NOBODY_LOOKS: Final[Waitings] = MappingProxyType({})
"""It is not switched on."""
NOT_READ: Final = ContainerWaiting(
    pressure_percent=None, waiting_tasks=None, at=0.0, problem="not read yet"
)


class WaitingWatch(Rounds[ContainerWaiting]):
    """Keeps how much every container waits.

    Args:
        agent: whose containers.
        config: the ``cpuWaiting`` section.
        cgroup_root: where the cgroup file systems are mounted.
        now: Unix time in seconds.
        proc: the proc file system.
        clock: seconds that only grow.
        cost: CPU time of the thread that reads.
    """

    def __init__(
        self,
        agent: Agent,
        config: CPUWaiting,
        cgroup_root: str,
        *,
        now: Callable[[], float],
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(
            agent,
            cgroup_root,
            what="how much containers wait",
            interval=parse_duration(config.interval),
            proc=proc,
            cost=cost,
        )
        self._config = config
        self._now = now
        self._clock = clock
        self._before: dict[str, tuple[float, Mapping[int, float]]] = {}

    def look(self, reader: CgroupReader, allocation: Allocation) -> ContainerWaiting:
        """Read how much one container waits, and compare with the reading before."""
        place = self._agent.places.get(allocation.container_id)
        if place is None:
            unknown = "the agent does not know its cgroup"
            found = Waits(no_pressure=unknown, no_threads=unknown)
        else:
            found = waits(reader, place, self._cgroup_root, proc=self._proc)
        moment = self._clock()
        before = self._before.pop(allocation.container_id, None)
        tasks, problem = None, found.no_threads
        if found.threads is not None:
            self._before[allocation.container_id] = moment, found.threads
            if before is None:
                problem = "threads were read once so far"
            else:
                tasks = tasks_waiting(before[1], found.threads, moment - before[0])
                problem = "" if tasks is not None else "no thread was there at both readings"
        return ContainerWaiting(
            pressure_percent=None if found.pressure is None else round(100 * found.pressure, 2),
            waiting_tasks=None if tasks is None else round(tasks, 3),
            at=self._now(),
            problem="; ".join(dict.fromkeys(filter(None, (found.no_pressure, problem)))),
        )

    async def round(self, rest: Callable[[float], Awaitable[object]]) -> None:
        """Read every container once, and forget those that are gone."""
        await super().round(rest)
        for gone in self._before.keys() - self.known.keys():
            del self._before[gone]

    def samples(self, state: NodeState) -> Waiting | None:
        """What a scrape tells of the containers of ``state``; None where no metric is wanted."""
        if not self._config.metric:
            return None
        known = self.known
        found: dict[tuple[str, str, str], ContainerWaiting] = {}
        for a in tuple(state.allocations.values()):
            one = known.get(a.container_id, NOT_READ)
            if one.pressure_percent is not None or one.waiting_tasks is not None:
                # While a container is replaced there are two of its name for a moment: one series.
                found[a.namespace, a.pod, a.container] = one
        # By what waits most, then by name.
        ordered = sorted(
            found.items(),
            key=lambda item: (
                -(item[1].pressure_percent or 0.0),
                -(item[1].waiting_tasks or 0.0),
                item[0],
            ),
        )
        shown = ordered[:MAX_SERIES]
        pressure: list[Named] = [
            (*names, one.pressure_percent / 100)
            for names, one in shown
            if one.pressure_percent is not None
        ]
        tasks: list[Named] = [
            (*names, one.waiting_tasks) for names, one in shown if one.waiting_tasks is not None
        ]
        return Waiting(
            pressure=pressure,
            tasks=tasks,
            states={
                "known": len(ordered),
                "unknown": len(state.allocations) - len(ordered),
                "left out": len(ordered) - len(shown),
            },
        )
