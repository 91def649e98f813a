"""The memory of containers that made room follows them: in steps, while requests are answered.

Their CPUs changed before the newcomer started. Which memory nodes their pages are leaving is in the
node state (`nri_numa.engine.state.Allocation.migrating_from`): a restart goes on from there.

While no pod starts and nothing waits, the same worker brings far memory home
(``room.farPages``), within ``room.budget``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.config.sections import AgentConfig, MemoryLocalityRounds
from nri_numa.engine.rebalance import (
    move_purpose_text,
    nodes_short_of_memory,
)
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.migration import find_migration_problem, migrate_pages
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import numa_text
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import NoticedEventKind, NoticeMessageReason
from nri_numa.text import human_bytes

if TYPE_CHECKING:
    from nri_numa.agent.usage import MemoryWatch

log = get_logger("mover")

MAX_MIGRATION_BYTES_PER_S: Final = 1 << 30
"""Bytes in a second at most; half of what one core copies."""
MAX_MIGRATION_PASSES: Final = 2
"""The second finds what was touched meanwhile."""
TOLERATED_REMOTE_BYTES: Final = 64 << 20
"""Bytes that are left to the kernel, which moves them when ``cpuset.mems`` is written; and so few
that are far stay far."""
MIN_REPORTED_UNMOVED_BYTES: Final = 1 << 20
"""Bytes that would not move and are worth a word; fewer round to nothing."""
UNMOVED_RETRY_S: Final = 300.0
"""Seconds until what would not move is tried again."""
NODE_IDLE_AFTER_S: Final = 30.0
"""Seconds without a creation after which far memory comes home."""
REMOTE_CHECK_INTERVAL_S: Final = 60.0
PROACTIVE_BUDGET_WINDOW_S: Final = 3600.0


def can_move_memory(reader: CgroupReader) -> bool:
    """True if pages of containers can be moved from here; what is in the way is logged."""
    problem = find_migration_problem(reader)
    if problem:
        log.info("containers with memory of their own NUMA node do not move", because=problem)
    return not problem


class _MigrationResult(NamedTuple):
    """Bytes that were moved and that would not move, and why."""

    migrated_bytes: int
    unmigrated_bytes: int
    obstacle: str


class MemoryMigrator:
    """Moves what is to be moved, one container after the other."""

    def __init__(self, agent: Agent, metrics: Metrics, clock: Clock) -> None:
        self._agent, self._metrics, self._clock = agent, metrics, clock
        self._watch: MemoryWatch | None = None
        self._far_part = 1.0
        self._wake = asyncio.Event()
        self._began: dict[str, float] = {}
        self._later: dict[str, float] = {}
        self._creations, self._busy = -1, 0.0
        self._spent = deque[float]()  # when something moved ahead of need, in the last hour
        agent.current.subscribe(self._wake.set)

    def request_proactive_check(self) -> None:
        """See whether something is to move ahead of need; called every few seconds."""
        if self._watch is not None:
            self._wake.set()

    def watch_remote_memory(self, config: AgentConfig) -> Coroutine[Any, Any, None]:
        """Read again and again where memory is, so that too much far memory comes home."""
        from nri_numa.agent.usage import MemoryWatch

        rounds = MemoryLocalityRounds(interval=REMOTE_CHECK_INTERVAL_S)
        self._far_part = config.room.max_remote_memory_fraction
        self._watch = MemoryWatch(self._agent, rounds, config.cgroup_root, self._clock)
        return self._watch.run()

    async def run(self) -> None:
        """Move memory until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            now, known = self._clock.monotonic(), self._agent.current.state.allocations
            for kept in (self._began, self._later):
                for gone in kept.keys() - known.keys():
                    del kept[gone]
            for a in [a for a in known.values() if a.migrating_from]:
                if self._later.get(a.container_id, now) <= now:
                    await self._migrate_container(a.container_id)
            if self._is_node_idle():
                await self._migrate_proactively()

    def _is_node_idle(self) -> bool:
        """Whether no pod started for a while."""
        agent, now = self._agent, self._clock.monotonic()
        if agent.containers.creations != self._creations:
            self._creations, self._busy = agent.containers.creations, now
        return now - self._busy >= NODE_IDLE_AFTER_S

    def _allocation_if_migrating(self, container_id: str) -> Allocation | None:
        agent = self._agent
        a = agent.current.state.allocations.get(container_id)
        moves = (
            agent.current.synchronized
            and agent.containers.is_settled(container_id)
            and not agent.current.observe
        )
        return a if moves and a is not None and a.migrating_from else None

    async def _migrate_pages(
        self,
        container_id: str,
        sources: NUMASet,
        target: int,
        should_continue: Callable[[], object],
        rate: float = MAX_MIGRATION_BYTES_PER_S,
    ) -> _MigrationResult:
        """Move the pages of one container to ``target`` while it ``goes_on``."""
        done, left, why, moving = 0, 0, "", self._agent.containers.migrating
        said = self._clock.monotonic()
        try:
            for _ in range(MAX_MIGRATION_PASSES):
                left = 0
                place = self._agent.containers.cgroup_of(container_id)
                steps = migrate_pages(self._agent.cgroups.writer.reader, place, sources, target)
                while (step := await asyncio.to_thread(next, steps, None)) is not None:
                    self._metrics.migrated_bytes.inc(step.moved_bytes)
                    done, left, why = (
                        done + step.moved_bytes,
                        left + step.unmoved_bytes,
                        step.obstacle or why,
                    )
                    moving[container_id] = sources, target, done
                    if self._clock.monotonic() - said >= 1.0:
                        said = self._clock.monotonic()
                        self._agent.current.notify()
                    rest = step.moved_bytes / rate
                    while rest > 0 and should_continue():
                        await self._clock.sleep(min(rest, 1.0))
                        rest -= 1.0
                    if not should_continue():
                        return _MigrationResult(done, left, why)
        except OSError as error:
            return _MigrationResult(done, TOLERATED_REMOTE_BYTES + 1, error.strerror or str(error))
        finally:
            moving.pop(container_id, None)
        if left > TOLERATED_REMOTE_BYTES:
            why = f"{human_bytes(left)} would not move ({why or 'pinned'})"
        return _MigrationResult(done, left, why)

    async def _migrate_container(self, container_id: str) -> None:
        a = self._allocation_if_migrating(container_id)
        if a is None:
            return
        began = self._began.setdefault(container_id, self._clock.monotonic())
        (target,) = a.mems - a.migrating_from
        where = f"from {numa_text(a.migrating_from)} to {target}"

        def goes_on() -> bool:
            return self._allocation_if_migrating(container_id) is not None

        moved = await self._migrate_pages(container_id, a.migrating_from, target, goes_on)
        a = self._allocation_if_migrating(container_id)
        if a is None:
            return
        if moved.unmigrated_bytes > TOLERATED_REMOTE_BYTES:
            self._try_later(container_id, UNMOVED_RETRY_S)
            message = f"partly moved {where}: {moved.obstacle}"
            self._agent.history.notices.add_for_allocation(
                a, NoticedEventKind.MOVED, message, reason=NoticeMessageReason.PARTLY_MOVED
            )
            log.warning("partly moved", container=a.full_name, where=where, problem=moved.obstacle)
            return
        wanted = self._agent.finish_migration(container_id)
        # In a thread of its own: the kernel looks at every page once more.
        await asyncio.to_thread(self._agent.cgroups.writer.write_cgroup, wanted)
        self._agent.post_update_container(container_id)
        del self._began[container_id]
        seconds = self._clock.monotonic() - began
        self._agent.history.notices.add_for_allocation(
            a, NoticedEventKind.MOVED, f"moved {where} in {seconds:.1f} s{move_purpose_text(a)}"
        )
        fields = {"where": where, "seconds": round(seconds, 3)}
        if moved.unmigrated_bytes >= MIN_REPORTED_UNMOVED_BYTES:
            fields |= {"left": moved.unmigrated_bytes, "problem": moved.obstacle}
        log.info("memory moved", container=a.full_name, **fields)

    def _try_later(self, container_id: str, seconds: float) -> None:
        self._later[container_id] = self._clock.monotonic() + seconds
        self._clock.call_later(seconds, self._wake.set)

    # --- ahead of need ----------------------------------------------------------------------------

    def _remaining_proactive_budget(self) -> tuple[float, int]:
        """Bytes in a second, and how many containers may move now; 0 where either is used up."""
        size, moves = self._agent.current.machine.settings.room_budget
        while self._spent and self._spent[0] <= self._clock.monotonic() - PROACTIVE_BUDGET_WINDOW_S:
            self._spent.popleft()
        return (size / 60 if moves else 0.0), max(0, moves - len(self._spent)) if size else 0

    async def _migrate_proactively(self) -> None:
        agent, (_, most) = self._agent, self._remaining_proactive_budget()
        if not most or agent.current.observe or not agent.current.synchronized:
            return
        if agent.containers.moves_memory and self._watch is not None:
            read = self._watch.known.items()
            used = {i: {int(n): m for n, m in known.by_numa_node.items()} for i, known in read}
            short = nodes_short_of_memory(agent.current.snapshot(), used)
            every = [
                (agent.current.state.allocations[i], used[i])
                for i in agent.current.state.allocations.keys() & used
            ]
            far = [
                found
                for a, places in every
                if (found := self._excess_remote_memory(a, places, short))
            ]
            if far:
                # What others have to have first, then the most bytes, then by id.
                best = min(far, key=lambda one: (not one[2] & short, -one[0], one[1]))
                size, container_id, sources = best
                await self._migrate_home(
                    agent.current.state.allocations[container_id], sources, size
                )

    def _excess_remote_memory(
        self, a: Allocation, places: Mapping[int, int], short: NUMASet
    ) -> tuple[int, str, NUMASet] | None:
        """How much of its memory is far, and where, if it is too much.

        Where NUMA nodes are ``short`` of it, it is too much at once.
        """
        if a.kind is ContainerKind.FOREIGN or a.migrating_from or not a.mems:
            return None
        if self._later.get(a.container_id, 0.0) > self._clock.monotonic():
            return None
        away = {i: size for i, size in places.items() if i not in a.mems and size}
        for sources, part in ((NUMASet(away) & short, 0.0), (NUMASet(away), self._far_part)):
            far = sum(away[i] for i in sources)
            if far > max(TOLERATED_REMOTE_BYTES, part * sum(places.values())):
                return far, a.container_id, sources
        return None

    async def _migrate_home(self, a: Allocation, sources: NUMASet, far: int) -> None:
        agent, container_id, began = self._agent, a.container_id, self._clock.monotonic()
        left = agent.current.desired.free_memory
        target = max(a.mems, key=lambda i: (left.get(i, 0), -i))

        def goes_on() -> bool:
            now = agent.current.state.allocations.get(container_id)
            return (
                now is not None
                and now.mems == a.mems
                and not agent.current.observe
                and self._is_node_idle()
            )

        moved = await self._migrate_pages(
            container_id, sources, target, goes_on, self._remaining_proactive_budget()[0]
        )
        self._try_later(container_id, UNMOVED_RETRY_S)
        if not moved.migrated_bytes:
            log.debug("far memory stays", container=a.full_name, bytes=far, problem=moved.obstacle)
            return
        self._spent.append(began)
        self._metrics.moves.labels("far_pages").inc()
        where = f"from {numa_text(sources)} to {target}"
        seconds = self._clock.monotonic() - began
        message = (
            f"{human_bytes(moved.migrated_bytes)} of far memory moved {where} in {seconds:.1f} s"
        )
        agent.history.notices.add_for_allocation(a, NoticedEventKind.MOVED, message)
        agent.current.notify()
        log.info("far memory moved", container=a.full_name, where=where, bytes=moved.migrated_bytes)
