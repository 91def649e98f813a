"""Release of pod reservations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.history import DecisionHistory
from nri_numa.engine import admit
from nri_numa.engine.pod_reservation import (
    expired_reservations,
    soft_reservations,
    with_sandbox_stopped,
)
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.machine.cgroups import is_sandbox_removed
from nri_numa.model.workload import ChangedStateIds

RELEASE_UNSTARTED_AFTER_S: Final = 120.0
"""Seconds after which the kubelet abandons a start (its ``runtimeRequestTimeout``)."""
MAX_CREATION_S: Final = 30.0
"""Seconds in which an OCI runtime makes a container's cgroup, also on a busy node."""


class PodReservations:
    """Makes reservations soft and ends them, by sandboxes and time (docs/adr/0015).

    Args:
        replace_state: applies another node state, in which these ids changed.
        forget_container: drops a container's facts beside the state.
    """

    def __init__(
        self,
        current: CurrentState,
        cgroups: CgroupUpdates,
        history: DecisionHistory,
        replace_state: Callable[[NodeState, ChangedStateIds], None],
        forget_container: Callable[[str], None],
    ) -> None:
        self._current, self._containers = current, cgroups.containers
        self._cgroups, self._history, self._clock = cgroups, history, current.clock
        self._replace_state, self._forget_container = replace_state, forget_container

    def stop_sandbox(self, uid: str, sandbox: str) -> None:
        """Make a pod's reservations soft."""
        state_after = with_sandbox_stopped(self._current.state, uid, sandbox, self._clock.time())
        if state_after is not self._current.state:
            self._replace_state(state_after, ChangedStateIds((), (uid,)))
            self._update_soft_ids()

    def failed_creations(self) -> list[Allocation]:
        """List allocations of containers whose creation failed, oldest first, then by container id.

        A runtime that reports no such failure makes the cgroup within the creation.
        """
        if self._current.reports_failed_creations:
            return []
        latest_creation = self._clock.time() - MAX_CREATION_S
        failures = [a for a in self._unstarted_without_cgroup() if a.assigned_at <= latest_creation]
        return sorted(failures, key=lambda a: (a.assigned_at, a.container_id))

    def _unstarted_without_cgroup(self) -> list[Allocation]:
        state, reader = self._current.state, self._cgroups.writer.reader
        return [
            a for i in self._containers.starting
            if (a := state.allocations.get(i)) and reader.is_removed(self._containers.cgroup_of(i))
        ]  # fmt: skip

    def allow_late_starts(self, failures: Iterable[Allocation]) -> None:
        """Let released containers be admitted as unknown ones if they start after all."""
        for allocation in failures:
            self._containers.ended.pop(allocation.container_id, None)

    def _update_soft_ids(self) -> None:
        """Update soft reservations, which schedulers count as free; they also depend on time."""
        soft = (*soft_reservations(self._current.snapshot()), *self.failed_creations())
        soft_ids = frozenset(a.container_id for a in soft)
        if soft_ids != self._current.soft_ids:
            self._current.set_soft_ids(soft_ids)
            self._current.notify()

    def release_expired(self) -> None:
        """Release expired and useless reservations; called every few seconds.

        A runtime does not report the stop of a sandbox older than itself, over CRI no stop at all,
        and none while the agent is not registered: the cgroup of the pod's latest sandbox shows it.
        Nor does it report a failed start, whose cgroup does not exist.
        """
        state, reader = self._current.state, self._cgroups.writer.reader
        reservations = [a for a in state.allocations.values() if a.reserved_at]
        unstarted = self._unstarted_without_cgroup()
        sandboxes = {
            a.pod_uid: state.pods[a.pod_uid].sandbox_cgroup for a in (*reservations, *unstarted)
        }
        uids = {uid for uid, path in sandboxes.items() if path and is_sandbox_removed(reader, path)}
        seconds = RELEASE_UNSTARTED_AFTER_S
        if self._current.reports_failed_creations:
            seconds = max(self._current.machine.settings.reservation_seconds, seconds)
        latest_start = self._clock.time() - seconds
        failures = [a for a in unstarted if a.assigned_at <= latest_start or a.pod_uid in uids]
        for uid in sorted(uids):
            self.stop_sandbox(uid, state.pods[uid].pod_id)
        self.release_reservations(expired_reservations(self._current.snapshot()) + failures)
        self._update_soft_ids()
        self.allow_late_starts(failures)

    def release_of_stopped(self) -> None:
        """Release reservations of pods without a sandbox, for grants or running containers."""
        state = self._current.state
        reservations = [a for a in state.allocations.values() if a.reserved_at]
        self.release_reservations([a for a in reservations if state.pods[a.pod_uid].stopped_at])

    def release_reservations(self, reservations: Sequence[Allocation]) -> None:
        """Release these reservations."""
        if not reservations:
            return
        released = admit.release_reservations(self._current.desired, reservations)
        self._replace_state(released.state, released.change)
        for allocation in reservations:
            self._forget_container(allocation.container_id)
            self._history.reporter.log_reservation_released(allocation)
        self._cgroups.request_check_of_unsent(self._cgroups.schedule_cpu_return(released.updates))
