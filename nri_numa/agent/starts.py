"""Containers from their creation to the end of their start.

`nri_numa.agent.containers.StartingCpuset` explains why their cgroups are special.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.containers import StartingCpuset
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.history import DecisionHistory
from nri_numa.agent.loop import DeferredTasks
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.machine.cgroups import CgroupWrite
from nri_numa.model.workload import Container
from nri_numa.observe.metrics import Metrics


class ContainerStarts:
    """Corrects cgroups of starting containers in the two moments that are left for it.

    Args:
        sees_starts: True if every start is reported; over CRI short lives are not.
    """

    def __init__(
        self,
        current: CurrentState,
        cgroups: CgroupUpdates,
        history: DecisionHistory,
        tasks: DeferredTasks,
        metrics: Metrics,
        *,
        sees_starts: bool = True,
    ) -> None:
        self._current, self._cgroups, self._history = current, cgroups, history
        self._containers = cgroups.containers
        self._tasks, self._metrics, self._sees_starts = tasks, metrics, sees_starts

    def on_cgroup_made(self, container_id: str) -> None:
        """Correct a new cgroup before its program runs."""
        if not self._current.observe:
            if container_id in self._containers.starting:
                self._containers.started_cgroups[container_id] = None
            self.correct_cgroup(container_id)

    def on_running(self, container_id: str) -> None:
        """Record that it runs, and check its cgroup."""
        self._containers.on_running(container_id)
        # It may have been written while it started.
        self._cgroups.queue_systemd_sync([container_id])
        self._tasks.add(partial(self._cgroups.request_check, (container_id,)))

    def on_synchronized(self, containers: Sequence[Container]) -> None:
        """Record and correct the starting containers of a Synchronize."""
        if not self._current.observe:
            for container in containers:
                if container.starting:
                    self._containers.on_unreported_start(container)
            self.correct_all()

    def report_if_never_started(self, allocation: Allocation | None) -> None:
        """Report an ended or replaced container that was created and never started.

        Another plugin may have set the same fields, or the OCI runtime failed. containerd reports
        its end, CRI-O nothing before the kubelet's next attempt. For a deleted pod the stop of its
        sandbox comes first.
        """
        if allocation is None or self._current.observe or not self._sees_starts:
            return
        container_id = allocation.container_id
        starting, started_cgroups = self._containers.starting, self._containers.started_cgroups
        if container_id in starting and container_id not in started_cgroups:
            self._tasks.add(partial(self._history.reporter.log_undone, allocation))

    def correct_all(self) -> None:
        """Correct each starting container whose cgroup exists."""
        for container_id in tuple(self._containers.started_cgroups):
            self.correct_cgroup(container_id)

    def correct_cgroup(self, container_id: str) -> None:
        """Write the cgroup of a starting container whose desired CPUs have changed."""
        containers = self._containers
        start = containers.starting.get(container_id)
        allocation = self._current.state.allocations.get(container_id)
        if start is None or container_id not in containers.started_cgroups:
            return
        if allocation is None or allocation.kind is ContainerKind.FOREIGN:
            return
        desired_cpus = self._current.desired.cpuset_with_pool_restored(
            allocation, has_cpuset=bool(start.cpus)
        )
        cpus, mems = str(desired_cpus), str(allocation.mems)
        new_cpus = "" if start.cpus == cpus else cpus
        new_mems = "" if start.mems == mems else mems
        if not (new_cpus or new_mems):
            return
        cgroup_write = CgroupWrite(containers.cgroup_of(container_id), new_cpus, new_mems)
        written = self._cgroups.write_cgroups({container_id: cgroup_write})[container_id]
        if not (written.problem or written.missing):
            lists = StartingCpuset(cpus or start.cpus, mems or start.mems)
            containers.starting[container_id] = lists
        if written.changed:
            self._metrics.start_corrections.inc()
        if written.changed or written.problem:
            report = self._history.reporter.log_start_correction
            self._tasks.add(partial(report, allocation, cpus, written.problem))
