"""Properties of systemd scopes: systemd would write its older values back to cgroups.

If systemd made a container's cgroup, its scope gets the same cpuset afterwards. A lifted CPU limit
is lifted there too: crun lifts that of its inner cgroup alone.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.confirmations import WriteTarget
from nri_numa.agent.current_state import CurrentState
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.cgroups import SystemdScopes
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce

log = get_logger("reconcile")

SYNC_DELAY_S: Final = 1.0
"""Seconds before lists are sent to systemd, so repeated changes are sent once."""


class SystemdSync:
    """Sends the cpusets of cgroups to systemd.

    Attributes:
        target_id: container whose scope systemd may be writing; else empty.
    """

    def __init__(
        self, current: CurrentState, cgroups: CgroupUpdates, scopes: SystemdScopes
    ) -> None:
        self._current, self._cgroups, self._scopes = current, cgroups, scopes
        self._confirmations = cgroups.confirmations[WriteTarget.SYSTEMD]
        self._problems = ReportOnce(log)
        self._lock = asyncio.Lock()
        self.target_id = ""

    async def run_systemd_sync(self) -> None:
        """Synchronize systemd until cancelled; no request waits for it."""
        wake = self._confirmations.wake
        while True:
            await wake.wait()
            await self._current.clock.sleep(SYNC_DELAY_S)
            wake.clear()
            await self.sync_systemd()

    async def sync_systemd(self) -> None:
        """Send systemd the pending properties, one after the other; failures wait for a round.

        systemd writes the cgroup itself. So no value older than the agent's last write is sent, and
        if a write happens meanwhile, the cgroup is repaired afterwards.
        """
        async with self._lock:
            await self._sync_pending_scopes()

    async def _sync_pending_scopes(self) -> None:
        cgroups, confirmations = self._cgroups, self._confirmations
        containers = cgroups.containers
        while (container_id := next(confirmations.required_ids(), None)) is not None:
            if cgroups.writer.is_write_held_up:  # their cpusets are not known yet
                confirmations.wake.set()
                break
            del confirmations.entries[container_id]
            if not containers.is_settled(container_id):
                continue
            write_count, self.target_id = containers.write_counts[container_id], container_id
            sync = partial(self._sync_scope, container_id, self._current.desired, write_count)
            try:
                problem = await asyncio.to_thread(sync)
            except Exception as error:  # D-Bus errors are of several kinds
                error_text = getattr(error, "strerror", None) or error
                for unanswered_id in (
                    container_id,
                    *confirmations.take_required(confirmations.entries),
                ):
                    finding = f"no answer over D-Bus: {error_text}"  # each would wait as long
                    confirmations.record_finding(unanswered_id, finding)
                break
            finally:
                self.target_id = ""
            if containers.write_counts[container_id] != write_count:
                cgroups.repair_cgroups([container_id])
                cgroups.queue_systemd_sync([container_id])
            elif problem:
                confirmations.record_finding(container_id, problem)
        for removed_id in confirmations.entries.keys() - containers.cgroup_places.keys():
            del confirmations.entries[removed_id]
        findings = [entry.finding for entry in confirmations.entries.values() if entry.finding]
        self._problems.report(
            "systemd scopes differ from cgroups",
            "different" if findings else "",
            "systemd scopes equal to cgroups again",
            container_count=len(findings),
            problem=next(iter(findings), ""),
        )

    def _sync_scope(self, container_id: str, desired: NodeSnapshot, write_count: int) -> str:
        """Compare systemd's properties with the desired ones, and set them; runs in a thread.

        Nothing is sent once the cgroup was written more often than ``write_count``.

        Returns:
            The problem; empty if systemd has the same values.
        """
        containers = self._cgroups.containers
        cgroup = containers.cgroup_places.get(container_id)
        allocation = desired.state.allocations.get(container_id)
        if cgroup is None or allocation is None or allocation.kind is ContainerKind.FOREIGN:
            return ""
        topology = desired.machine.topology
        cpus = desired.usable_cpus_of(allocation)
        mems = allocation.mems & topology.memory_nodes
        real = self._cgroups.writer.reader.read_actual_cgroup(cgroup)
        # A container that was never pinned has no list, and systemd has none for it.
        if real is None or real.cpus & topology.online != cpus:
            return ""
        if mems and real.mems & topology.memory_nodes != mems:
            return ""  # its memory is migrating: systemd would move it at once
        return self._scopes.sync_scope(
            cgroup,
            cpus,
            mems,
            lambda: containers.write_counts[container_id] == write_count,
            lift_quota=allocation.lifted_quota is not None,
        )
