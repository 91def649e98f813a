"""Late starts over CRI: containers that start before their cpuset is written.

A start is complete when the cgroup has the cpuset, not when the runtime took an update: one that
arrives during the start is recorded and applied to no cgroup. So the agent writes the cgroup as
soon as it sees the container run, which takes tens of microseconds instead of the runtime's tens of
milliseconds; the runtime's record follows. If cgroups cannot be written, a thread reads them until
the runtime's update has arrived.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Final

from nri_numa.agent.agent import Agent
from nri_numa.agent.cgroup_updates import observe_cgroups
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.cgroups import CgroupWrite, read_text
from nri_numa.observe.decisions import container_log_fields
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import LateStartMetrics
from nri_numa.observe.notices import NoticedEventKind, NoticeMessageReason

log = get_logger("late")

FIRST_POLL_S: Final = 0.005
MAX_POLL_S: Final = 0.2
"""Maximum seconds between two reads of a cgroup that is not correct yet."""
MAX_MEASURED_DELAY_S: Final = 10.0
"""Seconds after which a difference counts as drift."""


class LateStarts:
    """Corrects late containers, measures their delay, and reports rejections over CRI."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._clock = agent, agent.current.clock
        self._counts = LateStartMetrics(agent.metrics)
        self._known: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def start_delays(self) -> Mapping[str, float]:
        """Start delays in seconds, by container id; 0 if in time.

        Replaced as a whole, never changed, so any thread may read it.
        """
        return self._known

    def on_start(self, container_id: str, start_time: float, updated: float | None) -> None:
        """Write the cgroup of a container that has run since a Unix time.

        ``updated`` is the time of the runtime's update for it; None without one.
        """
        desired_lists = self._desired_lists(container_id)
        if desired_lists is None:
            return
        cgroup = self._agent.containers.cgroup_places[container_id]
        written = self._agent.cgroups.write_cgroups(
            {container_id: CgroupWrite(cgroup, *desired_lists)}
        )[container_id]
        if written.problem or written.missing:
            return
        start_time = self._process_created_at(cgroup.pid, start_time)
        corrected_at = self._clock.time() if written.changed else updated or start_time
        self._record_delay(container_id, max(0.0, corrected_at - start_time))

    def on_start_update_applied(self, container_id: str, start_time: float) -> None:
        """Measure the start delay after the runtime's update, if it is not known yet."""
        if container_id in self._known or self._desired_lists(container_id) is None:
            return
        task = asyncio.create_task(self._measure_start_delay(container_id, start_time), name="late")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _desired_lists(self, container_id: str) -> tuple[str, str] | None:
        """Return the desired CPU and memory node lists; None if it is not pinned."""
        current = self._agent.current
        allocation = current.state.allocations.get(container_id)
        if allocation is None or allocation.kind is ContainerKind.FOREIGN or current.observe:
            return None
        if container_id not in self._agent.containers.cgroup_places:
            return None
        cpus, mems = current.cpus_of(allocation), str(allocation.mems)
        return (cpus, mems) if cpus or mems else None

    def on_started_despite_rejection(
        self, namespace: str, pod: str, uid: str, container: str, message: str
    ) -> None:
        """Report a container that starts although it was rejected."""
        if self._agent.current.observe:
            return
        self._counts.rejected_running.inc()
        log.warning(
            "rejected container started over CRI",
            pod=f"{namespace}/{pod}",
            container=container,
            problem=message,
        )
        self._agent.history.notices.add_notice(
            NoticedEventKind.UNPINNED,
            f"rejected, but started, because over CRI no start can be prevented: {message}",
            namespace=namespace,
            pod=pod,
            pod_uid=uid,
            container=container,
            reason=NoticeMessageReason.REJECTED_RUNNING,
        )

    def on_rejected_resize_in_force(self, container_id: str, quota: int) -> None:
        """Record the CFS quota that the runtime applied despite the rejection."""
        if not self._agent.current.observe:
            self._agent.record_enforced_quota(container_id, quota)

    async def close(self) -> None:
        """Stop measuring."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _process_created_at(self, pid: int, start_time: float) -> float:
        """Return the time when the kernel made a container's process.

        A runtime records the start when its call returns, long after that on a busy machine.
        """
        try:
            ticks = int(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
        except (OSError, ValueError, IndexError):
            return start_time
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        forked = self._clock.time() - age
        # Without the host's PIDs it may be another process.
        return forked if 0 < start_time - forked < MAX_MEASURED_DELAY_S else start_time

    async def _measure_start_delay(self, container_id: str, start_time: float) -> None:
        agent, delay_s = self._agent, FIRST_POLL_S
        while self._clock.time() - start_time < MAX_MEASURED_DELAY_S:
            cgroup = agent.containers.cgroup_places.get(container_id)
            if cgroup is None or container_id not in agent.current.state.allocations:
                return
            try:
                reader, desired = agent.cgroups.writer.reader, agent.current.desired
                result = await asyncio.to_thread(
                    observe_cgroups, reader, desired, [(container_id, cgroup)]
                )
            except OSError as error:
                log.debug("cgroup not read", problem=str(error))
                return
            if result.cgroup_count and not result.corrections:
                created_at = self._process_created_at(cgroup.pid, start_time)
                self._record_delay(container_id, max(0.0, self._clock.time() - created_at))
                return
            await self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_POLL_S)

    def _record_delay(self, container_id: str, seconds: float) -> None:
        live = self._agent.current.state.allocations
        allocation = live.get(container_id)
        if allocation is None:
            return
        self._known = {i: s for i, s in self._known.items() if i in live} | {container_id: seconds}
        self._counts.late_start.observe(seconds)
        log.info(
            "cpuset written after start",
            **container_log_fields(allocation),
            start_delay_ms=round(seconds * 1000, 1),
        )
        self._agent.current.notify()
