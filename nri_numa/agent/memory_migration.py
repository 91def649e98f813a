"""Migration of moved containers' memory, in steps, while requests are answered.

Their CPUs changed before the new container started. The source memory nodes are in the node state
(`nri_numa.engine.state.Allocation.migrating_from`), so a restart continues the migration.
"""

from __future__ import annotations

import asyncio
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.confirmations import WriteTarget
from nri_numa.engine.rebalance import move_purpose_text
from nri_numa.engine.state import Allocation
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.migration import find_migration_problem, migrate_pages
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import numa_text
from nri_numa.observe.decisions import container_log_fields
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import NoticedEventKind, NoticeMessageReason
from nri_numa.text import human_bytes

log = get_logger("mover")

MAX_MIGRATION_BYTES_PER_S: Final = 1 << 30
"""Half of what one core copies in a second."""
MAX_MIGRATION_PASSES: Final = 2
"""The second pass moves pages that were touched meanwhile."""
TOLERATED_REMOTE_BYTES: Final = 64 << 20
"""Remaining bytes that the kernel moves when ``cpuset.mems`` is written."""
MIN_REPORTED_UNMOVED_BYTES: Final = 1 << 20
"""Unmoved bytes that are reported; fewer round to nothing."""
UNMOVED_RETRY_S: Final = 300.0
"""Seconds until unmoved pages are tried again."""


def can_move_memory(reader: CgroupReader) -> bool:
    """True if the agent can move pages of containers; a problem is logged."""
    problem = find_migration_problem(reader)
    if problem:
        log.info("memory migration unavailable", problem=problem)
    return not problem


class MemoryMigrator:
    """Migrates the memory of moved containers, one after the other."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._clock = agent, agent.current.clock
        self._confirmations = agent.cgroups.confirmations[WriteTarget.PAGES]
        agent.current.subscribe(self._confirmations.wake.set)

    async def run_migrations(self) -> None:
        """Move memory until cancelled."""
        confirmations = self._confirmations
        while True:
            await confirmations.wake.wait()
            confirmations.wake.clear()
            time_s, allocations = self._clock.monotonic(), self._agent.current.state.allocations
            for removed_id in confirmations.entries.keys() - allocations.keys():
                del confirmations.entries[removed_id]
            for container_id in [i for i, a in allocations.items() if a.migrating_from]:
                if confirmations.get_entry(container_id).not_before <= time_s:
                    await self._migrate_container(container_id)

    def _allocation_if_migrating(self, container_id: str) -> Allocation | None:
        current, containers = self._agent.current, self._agent.containers
        a = current.state.allocations.get(container_id)
        is_movable = current.synchronized and not current.observe
        is_movable = is_movable and containers.is_settled(container_id)
        return a if is_movable and a is not None and a.migrating_from else None

    async def _migrate_pages(
        self, container_id: str, sources: NUMASet, target: int
    ) -> tuple[int, str]:
        """Move the pages of one container to ``target``, for as long as it is migrating.

        Returns the bytes that could not be moved, and the obstacle.
        """
        total, unmoved, obstacle, migrating = 0, 0, "", self._agent.containers.migrating
        notified_at = self._clock.monotonic()
        try:
            for _ in range(MAX_MIGRATION_PASSES):
                unmoved = 0
                cgroup = self._agent.containers.cgroup_of(container_id)
                pages = migrate_pages(self._agent.cgroups.writer.reader, cgroup, sources, target)
                while (batch := await asyncio.to_thread(next, pages, None)) is not None:
                    self._agent.metrics.memory_migrated_bytes.inc(batch.moved_bytes)
                    total, unmoved = total + batch.moved_bytes, unmoved + batch.unmoved_bytes
                    obstacle = batch.obstacle or obstacle
                    migrating[container_id] = sources, target, total
                    if self._clock.monotonic() - notified_at >= 1.0:
                        notified_at = self._clock.monotonic()
                        self._agent.current.notify()
                    await self._clock.sleep(batch.moved_bytes / MAX_MIGRATION_BYTES_PER_S)
                    if self._allocation_if_migrating(container_id) is None:
                        return unmoved, obstacle
        except OSError as error:
            return TOLERATED_REMOTE_BYTES + 1, error.strerror or str(error)
        finally:
            migrating.pop(container_id, None)
        if unmoved > TOLERATED_REMOTE_BYTES:
            obstacle = f"{human_bytes(unmoved)} did not migrate ({obstacle or 'pinned'})"
        return unmoved, obstacle

    async def _migrate_container(self, container_id: str) -> None:
        a = self._allocation_if_migrating(container_id)
        if a is None:
            return
        self._confirmations.require_confirmation([container_id], self._clock.monotonic())
        (target,) = a.mems - a.migrating_from
        route = f"from {numa_text(a.migrating_from)} to {target}"
        nodes_change_text = f"{a.migrating_from} -> {target}"
        unmoved, obstacle = await self._migrate_pages(container_id, a.migrating_from, target)
        a = self._allocation_if_migrating(container_id)
        if a is None:
            return
        if unmoved > TOLERATED_REMOTE_BYTES:
            entry = self._confirmations.get_entry(container_id)
            entry.not_before = self._clock.monotonic() + UNMOVED_RETRY_S
            self._clock.call_later(UNMOVED_RETRY_S, self._confirmations.wake.set)
            message = f"partly moved {route}: {obstacle}"
            self._agent.history.notices.add_for_allocation(
                a, NoticedEventKind.MOVED, message, reason=NoticeMessageReason.PARTLY_MIGRATED
            )
            log.warning(
                "memory partly migrated",
                **container_log_fields(a),
                numa_nodes=nodes_change_text,
                problem=obstacle,
            )
            return
        cgroup_write = self._agent.finish_migration(container_id)
        # In a thread: the kernel visits every page once more.
        await asyncio.to_thread(self._agent.cgroups.writer.write_cgroup, cgroup_write)
        self._agent.post_update_container(container_id)
        start_time = self._confirmations.take_required([container_id])[container_id]
        self._confirmations.entries.pop(container_id, None)
        seconds = self._clock.monotonic() - start_time
        self._agent.history.notices.add_for_allocation(
            a, NoticedEventKind.MOVED, f"moved {route} in {seconds:.1f} s{move_purpose_text(a)}"
        )
        fields = {"numa_nodes": nodes_change_text, "duration_s": round(seconds, 3)}
        if unmoved >= MIN_REPORTED_UNMOVED_BYTES:
            fields |= {"unmigrated_bytes": unmoved, "problem": obstacle}
        log.info("memory migrated", **container_log_fields(a), **fields)
