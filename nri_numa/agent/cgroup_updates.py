"""Writes to the cgroups of containers, and what follows from them.

Every change of a container's CPUs or memory nodes goes through `CgroupUpdates`: within a request,
after it, and to repair drift. Failed writes, and updates that may not have arrived, are queued:
`nri_numa.agent.reconcile` compares them, and `nri_numa.agent.systemd_sync` sends them to systemd.
Nothing is written in a dry run.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.agent.confirmations import Confirmations, WriteTarget
from nri_numa.agent.containers import LiveContainers
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import TASK_BATCH, DeferredTasks
from nri_numa.engine.assigned import ASSIGNED_KEY, encode_assignment, is_signed
from nri_numa.engine.decision import Resynced
from nri_numa.engine.desired import Drift, NodeSnapshot, plan_corrections
from nri_numa.engine.state import shared_group_key
from nri_numa.machine.cgroups import (
    CgroupPlace,
    CgroupReader,
    CgroupWrite,
    CgroupWriter,
    WriteOutcome,
    read_actual_cgroups,
)
from nri_numa.model.workload import Container, ContainerUpdate
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

log = get_logger("reconcile")

READ_BATCH: Final = 25
"""Containers read without a pause: about a millisecond."""
THREAD_PAUSE_S: Final = 0.002
"""Seconds that the thread pauses, so the loop gets its turn."""
MAX_LOGGED_IDS: Final = 20
"""Container ids in one log line."""


class CgroupCheckResult(msgspec.Struct, frozen=True):
    """Number of containers with a cgroup, and those of them that differ from the node state."""

    cgroup_count: int
    corrections: tuple[Drift, ...]


class CgroupUpdates:
    """Writes cgroups by the node state, and requests checks of updates that may be lost.

    Attributes:
        containers: the live containers and their cgroups.
        confirmations: by target, the writes to confirm, and their results.
    """

    def __init__(
        self,
        current: CurrentState,
        containers: LiveContainers,
        writer: CgroupWriter,
        tasks: DeferredTasks,
        metrics: Metrics,
    ) -> None:
        self.containers, self.writer, self._current = containers, writer, current
        self._tasks, self._metrics = tasks, metrics
        self.confirmations = {target: Confirmations() for target in WriteTarget}

    # --- moving -----------------------------------------------------------------------------------

    def immovable_ids(self) -> set[str]:
        """Return containers that cannot be moved now; any thread may call this."""
        return self.immovable_by_state() | self.movable_write_problems().keys()

    def immovable_by_state(self) -> set[str]:
        """Return containers that cannot be moved now, even if their cgroups can be written."""
        return {
            i
            for i, a in self._current.state.allocations.items()
            if self._current.observe
            or not self.containers.is_settled(i)
            or i in self.containers.unconfirmed_ids
            or (a.mems and not self.containers.moves_memory)
        }

    def movable_write_problems(self) -> dict[str, str]:
        """Return movable containers whose cgroups cannot be written, with the problem."""
        problems = {
            i: self.writer.unwritable_cpuset_reason(self.containers.cgroup_of(i))
            for i, a in self._current.state.allocations.items()
            if a.movable
        }
        return {i: problem for i, problem in problems.items() if problem}

    # --- cgroups ----------------------------------------------------------------------------------

    def write_cgroups(self, writes: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        """Write cgroups, by container; systemd gets the same for the cgroups it made."""
        self.containers.write_counts.update(writes.keys())
        outcomes = self.writer.write_cpusets(writes)
        if slow := [i for i, o in outcomes.items() if o.is_held_up]:
            self._report_slow_write(slow)
        # A failed write may still take effect later.
        self.queue_systemd_sync(i for i, o in outcomes.items() if o.changed or o.problem)
        return outcomes

    def _report_slow_write(self, container_ids: Sequence[str]) -> None:
        """Report slow writes, and request a check of their results."""
        self._metrics.cgroup_writes_slow.inc()
        log.warning(
            "cpuset write slow",
            ids=",".join(i[:12] for i in container_ids[:MAX_LOGGED_IDS]),
            problem="the kernel has another change of cgroups under way"
            if self.writer.is_blocked_in_kernel()
            else "the thread that writes got no CPU in time",
        )
        self.request_check(container_ids)

    def queue_systemd_sync(self, container_ids: Iterable[str]) -> None:
        """Queue these containers for systemd, if it made their cgroups."""
        if self.writer.reader.unified and not self._current.observe:
            cgroups = self.containers.cgroup_places
            ids = [i for i in container_ids if i in cgroups and cgroups[i].is_systemd_managed]
            if ids:
                self.confirmations[WriteTarget.SYSTEMD].require_confirmation(
                    ids, self._current.clock.time()
                )

    def find_corrections(self, container_ids: Iterable[str]) -> tuple[Drift, ...]:
        """Return the running containers that differ from the node state."""
        cgroups = self.containers.settled_places(container_ids)
        return observe_cgroup_batch(self.writer.reader, self._current.desired, cgroups).corrections

    def repair_cgroups(self, container_ids: Iterable[str]) -> dict[str, WriteOutcome]:
        """Write the cgroups of containers that differ from the node state."""
        return self.apply_corrections(
            c for c in self.find_corrections(container_ids) if not c.is_report_only
        )

    def apply_corrections(self, corrections: Iterable[Drift]) -> dict[str, WriteOutcome]:
        """Write the desired lists of these containers; quotas are left to runtime and systemd."""
        corrections, places = tuple(corrections), self.containers.cgroup_places
        self.queue_systemd_sync(c.container_id for c in corrections if c.quota)
        return self.write_cgroups(
            {
                c.container_id: CgroupWrite(places[c.container_id], str(c.cpus), str(c.mems))
                for c in corrections
            }
        )

    def write_updates(self, updates: Sequence[ContainerUpdate]) -> tuple[ContainerUpdate, ...]:
        """Write updates of other containers; returns those that the runtime has to apply.

        These are the ones that cannot be written, and those of containers that have not started:
        the runtime's record is right even if they start without the agent.
        """
        if self._current.observe or not updates:
            return ()
        cgroups, starting = self.containers.cgroup_places, self.containers.starting
        outcomes = self.write_cgroups(
            {
                u.container_id: CgroupWrite(cgroups[u.container_id], u.cpus, u.mems)
                for u in updates
                if u.container_id in cgroups and u.container_id not in starting
            }
        )
        written = {i for i, o in outcomes.items() if not (o.problem or o.missing)}
        unwritten = [u for u in updates if u.container_id not in written]
        if self.writer.is_write_held_up:  # the runtime's writes would wait as well
            unwritten = [u for u in unwritten if u.container_id not in outcomes]
        return tuple(unwritten)

    def schedule_cpu_return(
        self, updates: Sequence[ContainerUpdate]
    ) -> tuple[ContainerUpdate, ...]:
        """Return CPUs to containers after the reply was sent; returns the updates it must carry."""
        if self._current.observe or not updates:
            return ()
        starting, widening = self.containers.starting, self.containers.widening
        running_updates = [u for u in updates if u.container_id not in starting]
        # If cgroups cannot be written, the reply carries the updates; one stands for all.
        if running_updates and self.writer.unwritable_cpuset_reason(
            self.containers.cgroup_of(running_updates[0].container_id)
        ):
            return self.write_updates(updates)
        is_queue_empty = not widening
        widening.update(dict.fromkeys(u.container_id for u in running_updates))
        if is_queue_empty and widening:
            self._tasks.add(self._return_cpus_batch)
        return tuple(u for u in updates if u.container_id in starting)

    def _return_cpus_batch(self) -> None:
        """Return CPUs to one batch of containers, as the node state is now."""
        widening = self.containers.widening
        ids = list(widening)[:TASK_BATCH]
        for container_id in ids:
            del widening[container_id]
        desired, allocations = self._current.desired, self._current.state.allocations
        updates = [
            ContainerUpdate(i, str(cpus))
            for i in ids
            if i in allocations
            and (cpus := desired.cpuset_with_pool_restored(allocations[i], has_cpuset=True))
        ]
        self.request_check_of_unsent(self.write_updates(updates))
        if widening:
            self._tasks.add(self._return_cpus_batch)

    def write_synchronized(self, outcome: Resynced) -> tuple[tuple[ContainerUpdate, ...], Resynced]:
        """Write the cgroups of all running containers; returns updates for the runtime and repairs.

        The runtime's records of containers in the shared pool are older than their cgroups.
        """
        reader = self.writer.reader
        if self._current.observe or not reader.detect_hierarchy():
            return (() if self._current.observe else outcome.updates), outcome
        results = self.repair_cgroups(self.containers.cgroup_places)
        changed = {i for i, r in results.items() if r.changed}
        failed = {i for i, r in results.items() if r.problem}
        allocations = outcome.state.allocations
        runtime_updates = [
            u
            for u in outcome.updates
            if shared_group_key(allocations[u.container_id]) is None
            or u.container_id in failed | self.containers.starting.keys()
            or not reader.directory_of(self.containers.cgroup_places[u.container_id])
        ]
        changed |= {u.container_id for u in runtime_updates}.intersection(outcome.repaired)
        changed -= set(outcome.missed_starts)
        repaired = tuple(i for i in outcome.adopted if i in changed)
        return tuple(runtime_updates), replace(outcome, repaired=repaired)

    def request_check_of_unsent(self, updates: Sequence[ContainerUpdate]) -> None:
        """Request a check of updates that no reply carries; starting containers follow later."""
        starting = self.containers.starting
        self.request_check([u.container_id for u in updates if u.container_id not in starting])

    def request_check(self, container_ids: Collection[str]) -> None:
        """Request a check of these containers, whose update may not have arrived."""
        if not self._current.observe:
            self.confirmations[WriteTarget.CGROUP].require_confirmation(
                container_ids, self._current.clock.time()
            )

    # --- marks ------------------------------------------------------------------------------------

    @property
    def mark_key(self) -> str:
        """The annotation that a mark stands for."""
        return f"{self._current.machine.settings.prefix}/{ASSIGNED_KEY}"

    def with_mark(self, container: Container) -> Container:
        """Add the mark of its cgroup to a container's annotations.

        Such a container was created without the agent, or moved since the runtime recorded it.
        """
        key, cgroup = self.mark_key, CgroupPlace(container.cgroups_path, container.pid)
        if container.id in self._current.state.allocations:
            return container
        text, resources = self.writer.reader.read_mark(cgroup, key), container.resources
        if not text:
            return container
        if key in container.annotations:
            if not is_signed(text, container.id, self._current.machine.key):
                return container
            resources = replace(resources, cpus="", mems="")
        annotations = {**container.annotations, key: text}
        return replace(container, annotations=annotations, resources=resources)

    def write_mark(self, container_id: str) -> None:
        """Write the mark of a cgroup, since annotations of a running container cannot change."""
        allocation = self._current.state.allocations.get(container_id)
        cgroup = self.containers.cgroup_of(container_id)
        if allocation is not None and not self._current.observe:
            text = encode_assignment(
                allocation, self._current.cpus_of(allocation), self._current.machine.key
            )
            self.writer.write_mark(cgroup, self.mark_key, text)


# --- Comparing, in a thread ---


def observe_cgroups(
    reader: CgroupReader,
    desired: NodeSnapshot,
    cgroups: Sequence[tuple[str, CgroupPlace]],
    pause: Callable[[float], object] = time.sleep,
) -> CgroupCheckResult:
    """Read cgroups and compare them with one state; runs in a thread.

    The thread pauses between batches, so the loop can run.

    Raises:
        OSError: the cgroup file system does not exist.
    """
    if not reader.detect_hierarchy():
        raise FileNotFoundError(errno.ENOENT, "no cgroup file system here", reader.hierarchy)
    count, drifts = 0, list[Drift]()
    for start in range(0, len(cgroups), READ_BATCH):
        if start:
            pause(THREAD_PAUSE_S)
        batch = observe_cgroup_batch(reader, desired, cgroups[start : start + READ_BATCH])
        count += batch.cgroup_count
        drifts += batch.corrections
    return CgroupCheckResult(count, tuple(sorted(drifts, key=lambda d: d.sort_key)))


def observe_cgroup_batch(
    reader: CgroupReader, desired: NodeSnapshot, cgroups: Sequence[tuple[str, CgroupPlace]]
) -> CgroupCheckResult:
    """Compare one batch, including the CFS quota of containers whose CPU limit was lifted."""
    by_id, observed = dict(cgroups), read_actual_cgroups(reader, cgroups)
    for container_id, real in observed.items():
        allocation = desired.state.allocations.get(container_id)
        if allocation is not None and allocation.lifted_quota is not None:
            quota, period = reader.read_cfs_limit(by_id[container_id])
            observed[container_id] = replace(real, quota=quota, cfs_period=period)
    drifts = list[Drift]()
    for drift in plan_corrections(desired, observed):
        blocker = partial(reader.blocking_cgroup_text, by_id[drift.container_id])
        cpus_obstacle = blocker("cpuset.cpus", str(drift.cpus))
        mems_obstacle = blocker("cpuset.mems", str(drift.mems))
        drifts.append(drift.without_blocked_lists(cpus_obstacle, mems_obstacle))
    return CgroupCheckResult(len(observed), tuple(drifts))
