"""The memory of containers that made room follows them: in steps, while requests are answered.

Their CPUs changed before the newcomer started. Which memory nodes their pages are leaving is in the
node state (`nri_numa.engine.state.Allocation.leaves`): a restart goes on from there.
"""

from __future__ import annotations

import asyncio
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.engine.room import for_whom
from nri_numa.engine.state import Allocation
from nri_numa.machine.cgroups import CgroupWriter
from nri_numa.machine.migration import hindrance, migrate
from nri_numa.model.machine import numa_text
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import What
from nri_numa.text import human_bytes

log = get_logger("mover")

RATE: Final = 1 << 30
"""Bytes in a second at most; half of what one core copies."""
PASSES: Final = 2
"""The second finds what was touched meanwhile."""
LITTLE: Final = 64 << 20
"""Bytes that are left to the kernel, which moves them when ``cpuset.mems`` is written."""
AGAIN: Final = 300.0
"""Seconds until what would not move is tried again."""


class Mover:
    """Moves what is to be moved, one container after the other."""

    def __init__(self, agent: Agent, metrics: Metrics, writer: CgroupWriter, clock: Clock) -> None:
        self._agent, self._metrics, self._writer, self._clock = agent, metrics, writer, clock
        self._wake = asyncio.Event()
        self._began: dict[str, float] = {}
        self._later: dict[str, float] = {}
        agent.subscribe(self._wake.set)
        problem = hindrance(writer.reader)
        agent.moves_memory = not problem
        if problem:
            log.info("containers with memory of their own NUMA node do not move", because=problem)

    async def run(self) -> None:
        """Move memory until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            now, known = self._clock.monotonic(), self._agent.state.allocations
            for kept in (self._began, self._later):
                for gone in kept.keys() - known.keys():
                    del kept[gone]
            for container_id in [i for i, a in known.items() if a.leaves]:
                if self._later.get(container_id, now) <= now:
                    await self._move(container_id)

    def _under_way(self, container_id: str) -> Allocation | None:
        agent = self._agent
        a = agent.state.allocations.get(container_id)
        moves = agent.synchronized and agent.runs(container_id) and not agent.observe
        return a if moves and a is not None and a.leaves else None

    async def _move(self, container_id: str) -> None:
        a = self._under_way(container_id)
        if a is None:
            return
        began = self._began.setdefault(container_id, self._clock.monotonic())
        (target,), left, problem, why = a.mems - a.leaves, 0, "", ""
        try:
            for _ in range(PASSES):
                left, place = 0, self._agent.places[container_id]
                steps = migrate(self._writer.reader, place, a.leaves, target)
                while (step := await asyncio.to_thread(next, steps, None)) is not None:
                    self._metrics.migrated_bytes.inc(step.moved)
                    left, why = left + step.left, step.why or why
                    await self._clock.sleep(step.moved / RATE)
                    if self._under_way(container_id) is None:
                        return
        except OSError as error:
            problem = error.strerror or str(error)
        where = f"from {numa_text(a.leaves)} to {target}"
        a = self._under_way(container_id)
        if a is None:
            return
        if problem or left > LITTLE:
            self._later[container_id] = self._clock.monotonic() + AGAIN
            self._clock.call_later(AGAIN, self._wake.set)
            why = problem or f"{human_bytes(left)} would not move ({why or 'pinned'})"
            message = f"partly moved {where}: {why}"
            self._agent.notices.about(a, What.MOVED, message, reason="PartlyMoved")
            log.warning("partly moved", container=a.full_name, where=where, problem=why)
            return
        wanted = self._agent.arrived(container_id)
        # In a thread of its own: the kernel looks at every page once more.
        await asyncio.to_thread(self._writer.put, wanted)
        self._agent.post_update_container(container_id)
        seconds = self._clock.monotonic() - began
        self._agent.notices.about(a, What.MOVED, f"moved {where} in {seconds:.1f} s{for_whom(a)}")
        rest = {"left": left, "problem": why} if left else {}
        fields = {"where": where, "seconds": round(seconds, 3), **rest}
        log.info("memory moved", container=a.full_name, **fields)
