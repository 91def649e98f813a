"""The memory of containers that made room follows them: in steps, while requests are answered.

Their CPUs changed before the newcomer started. Which memory nodes their pages are leaving is in the
node state (`nri_numa.engine.state.Allocation.leaves`): a restart goes on from there.

While no pod starts and nothing waits, the same worker has containers move ahead of need
(``room.keep``), and brings far memory home (``room.farPages``), both within ``room.budget``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.config.sections import AgentConfig, MemoryLocality
from nri_numa.engine.room import for_whom
from nri_numa.engine.state import Allocation, Kind
from nri_numa.machine.cgroups import CgroupPlace, CgroupWriter
from nri_numa.machine.migration import hindrance, migrate
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import numa_text
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import What
from nri_numa.text import human_bytes

if TYPE_CHECKING:
    from nri_numa.agent.usage import MemoryWatch

log = get_logger("mover")

RATE: Final = 1 << 30
"""Bytes in a second at most; half of what one core copies."""
PASSES: Final = 2
"""The second finds what was touched meanwhile."""
LITTLE: Final = 64 << 20
"""Bytes that are left to the kernel, which moves them when ``cpuset.mems`` is written; and so few
that are far stay far."""
SMALLEST_LEFT: Final = 1 << 20
"""Bytes that would not move and are worth a word; fewer round to nothing."""
AGAIN: Final = 300.0
"""Seconds until what would not move is tried again."""
QUIET: Final = 30.0
"""Seconds without a creation after which something moves ahead of need."""
FAR_EVERY: Final = 60.0
HOUR: Final = 3600.0


class _Moved(NamedTuple):
    """Bytes that were moved and that would not move, and why; or whether it was ended early."""

    done: int
    left: int
    why: str
    ended: bool


class Mover:
    """Moves what is to be moved, one container after the other."""

    def __init__(self, agent: Agent, metrics: Metrics, writer: CgroupWriter, clock: Clock) -> None:
        self._agent, self._metrics, self._writer, self._clock = agent, metrics, writer, clock
        self._watch: MemoryWatch | None = None
        self._far_part = 1.0
        self._wake = asyncio.Event()
        self._began: dict[str, float] = {}
        self._later: dict[str, float] = {}
        self._creations, self._busy = -1, 0.0
        self._spent = deque[float]()  # when something moved ahead of need, in the last hour
        self._tried: tuple[object, ...] = ()
        agent.subscribe(self._wake.set)
        problem = hindrance(writer.reader)
        agent.moves_memory = not problem
        if problem:
            log.info("containers with memory of their own NUMA node do not move", because=problem)

    def look(self) -> None:
        """See whether something is to move ahead of need; called every few seconds."""
        if self._watch is not None or any(self._agent.machine.settings.room_keep):
            self._wake.set()

    def look_for_far(self, config: AgentConfig) -> Coroutine[Any, Any, None]:
        """Read again and again where memory is, so that too much far memory comes home."""
        from nri_numa.agent.usage import MemoryWatch

        rounds = MemoryLocality(interval=FAR_EVERY)
        self._far_part = config.room.far_pages
        self._watch = MemoryWatch(self._agent, rounds, config.cgroup_root, self._clock)
        return self._watch.run()

    async def run(self) -> None:
        """Move memory until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            now, known = self._clock.monotonic(), self._agent.state.allocations
            for kept in (self._began, self._later):
                for gone in kept.keys() - known.keys():
                    del kept[gone]
            # What a pod waits for comes first.
            for a in sorted((a for a in known.values() if a.leaves), key=lambda a: a.ahead):
                if self._later.get(a.container_id, now) <= now:
                    await self._move(a.container_id)
            if self._quiet():
                await self._move_ahead()

    def _quiet(self) -> bool:
        """Whether no pod started for a while."""
        agent, now = self._agent, self._clock.monotonic()
        if agent.creations != self._creations:
            self._creations, self._busy = agent.creations, now
        return now - self._busy >= QUIET

    def _under_way(self, container_id: str) -> Allocation | None:
        agent = self._agent
        a = agent.state.allocations.get(container_id)
        moves = agent.synchronized and agent.runs(container_id) and not agent.observe
        return a if moves and a is not None and a.leaves else None

    async def _pages(
        self,
        container_id: str,
        sources: NUMASet,
        target: int,
        goes_on: Callable[[], object],
        rate: float = RATE,
    ) -> _Moved:
        """Move the pages of one container to ``target`` while it ``goes_on``."""
        done, left, why, moving = 0, 0, "", self._agent.moving
        said = self._clock.monotonic()
        try:
            for _ in range(PASSES):
                left = 0
                place = self._agent.places.get(container_id, CgroupPlace())
                steps = migrate(self._writer.reader, place, sources, target)
                while (step := await asyncio.to_thread(next, steps, None)) is not None:
                    self._metrics.migrated_bytes.inc(step.moved)
                    done, left, why = done + step.moved, left + step.left, step.why or why
                    moving[container_id] = sources, target, done
                    if self._clock.monotonic() - said >= 1.0:
                        said = self._clock.monotonic()
                        self._agent.notify()
                    rest = step.moved / rate
                    while rest > 0 and goes_on():
                        await self._clock.sleep(min(rest, 1.0))
                        rest -= 1.0
                    if not goes_on():
                        return _Moved(done, left, why, ended=True)
        except OSError as error:
            return _Moved(done, LITTLE + 1, error.strerror or str(error), ended=False)
        finally:
            moving.pop(container_id, None)
        if left > LITTLE:
            why = f"{human_bytes(left)} would not move ({why or 'pinned'})"
        return _Moved(done, left, why, ended=False)

    async def _move(self, container_id: str) -> None:
        a = self._under_way(container_id)
        if a is None:
            return
        ahead = a.ahead
        rate = self._budget()[0] if ahead else RATE
        if ahead and not (rate and self._quiet()):
            self._try_later(container_id, QUIET)
            return
        began = self._began.setdefault(container_id, self._clock.monotonic())
        (target,) = a.mems - a.leaves
        where = f"from {numa_text(a.leaves)} to {target}"

        def goes_on() -> bool:
            return self._under_way(container_id) is not None and (not ahead or self._quiet())

        moved = await self._pages(container_id, a.leaves, target, goes_on, rate)
        a = self._under_way(container_id)
        if a is None:
            return
        if moved.ended:
            self._try_later(container_id, QUIET)
            return
        if moved.left > LITTLE:
            self._try_later(container_id, AGAIN)
            message = f"partly moved {where}: {moved.why}"
            self._agent.notices.about(a, What.MOVED, message, reason="PartlyMoved")
            log.warning("partly moved", container=a.full_name, where=where, problem=moved.why)
            return
        wanted = self._agent.arrived(container_id)
        # In a thread of its own: the kernel looks at every page once more.
        await asyncio.to_thread(self._writer.put, wanted)
        self._agent.post_update_container(container_id)
        del self._began[container_id]
        seconds = self._clock.monotonic() - began
        self._agent.notices.about(a, What.MOVED, f"moved {where} in {seconds:.1f} s{for_whom(a)}")
        fields = {"where": where, "seconds": round(seconds, 3)}
        if moved.left >= SMALLEST_LEFT:
            fields |= {"left": moved.left, "problem": moved.why}
        log.info("memory moved", container=a.full_name, **fields)

    def _try_later(self, container_id: str, seconds: float) -> None:
        self._later[container_id] = self._clock.monotonic() + seconds
        self._clock.call_later(seconds, self._wake.set)

    # --- ahead of need ----------------------------------------------------------------------------

    def _budget(self) -> tuple[float, int]:
        """Bytes in a second, and how many containers may move now; 0 where either is used up."""
        size, moves = self._agent.machine.settings.room_budget
        while self._spent and self._spent[0] <= self._clock.monotonic() - HOUR:
            self._spent.popleft()
        return (size / 60 if moves else 0.0), max(0, moves - len(self._spent)) if size else 0

    async def _move_ahead(self) -> None:
        agent, (_, most) = self._agent, self._budget()
        keep = agent.machine.settings.room_keep
        tried = agent.state.serial, keep, most
        if not most or agent.observe or not agent.synchronized:
            return
        if any(keep) and tried != self._tried:
            self._tried = tried
            self._spent.extend([self._clock.monotonic()] * (moves := agent.keep_room(most)))
            if moves:
                return
        if agent.moves_memory and self._watch is not None:
            read = self._watch.known.items()
            used = {i: {int(n): m for n, m in known.by_numa_node.items()} for i, known in read}
            short = agent.short_of_memory(used)
            every = [
                (agent.state.allocations[i], used[i]) for i in agent.state.allocations.keys() & used
            ]
            far = [found for a, places in every if (found := self._far(a, places, short))]
            if far:
                # What others have to have first, then the most bytes, then by id.
                best = min(far, key=lambda one: (not one[2] & short, -one[0], one[1]))
                size, container_id, sources = best
                await self._home(agent.state.allocations[container_id], sources, size)

    def _far(
        self, a: Allocation, places: Mapping[int, int], short: NUMASet
    ) -> tuple[int, str, NUMASet] | None:
        """How much of its memory is far, and where, if it is too much.

        Where NUMA nodes are ``short`` of it, it is too much at once.
        """
        if a.kind is Kind.FOREIGN or a.leaves or not a.mems:
            return None
        if self._later.get(a.container_id, 0.0) > self._clock.monotonic():
            return None
        away = {i: size for i, size in places.items() if i not in a.mems and size}
        for sources, part in ((NUMASet(away) & short, 0.0), (NUMASet(away), self._far_part)):
            far = sum(away[i] for i in sources)
            if far > max(LITTLE, part * sum(places.values())):
                return far, a.container_id, sources
        return None

    async def _home(self, a: Allocation, sources: NUMASet, far: int) -> None:
        agent, container_id, began = self._agent, a.container_id, self._clock.monotonic()
        left = agent.machine.memory_left(agent.state, None)
        target = max(a.mems, key=lambda i: (left.get(i, 0), -i))

        def goes_on() -> bool:
            now = agent.state.allocations.get(container_id)
            return now is not None and now.mems == a.mems and not agent.observe and self._quiet()

        moved = await self._pages(container_id, sources, target, goes_on, self._budget()[0])
        self._try_later(container_id, AGAIN)
        if not moved.done:
            log.debug("far memory stays", container=a.full_name, bytes=far, problem=moved.why)
            return
        self._spent.append(began)
        self._metrics.moves.labels("far_pages").inc()
        where = f"from {numa_text(sources)} to {target}"
        seconds = self._clock.monotonic() - began
        message = f"{human_bytes(moved.done)} of far memory moved {where} in {seconds:.1f} s"
        agent.notices.about(a, What.MOVED, message)
        agent.notify()
        log.info("far memory moved", container=a.full_name, where=where, bytes=moved.done)
