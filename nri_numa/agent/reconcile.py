"""Reconciliation of cgroups with the node state.

*Desired* is the node state. *Actual* are the cpuset files of containers. A thread reads and
compares them in batches with pauses (`observe_cgroups`). The loop gets only containers that may
differ, reads them again, and writes them without an await in between. Containers are compared

- when another program writes their files (inotify), and every ``reconcile.interval``. A difference
  then is *drift*;
- when they start, and when a write of the agent failed. A difference then is an *undelivered
update*.

Cgroups are written directly. The runtime gets updates that cannot be written, and CPU limits, which
it records: from NRI 0.12.1 on by a call, before that by a second registration, which is expensive,
and hangs containerd (2.1.9, 2.4.2) if a sandbox is removed at the same moment.

If a cgroup above or below would make the kernel refuse a write, that cgroup is named, and the
repair follows later. A container that is rewritten repeatedly is reported and left
(`nri_numa.agent.drift_policy`). systemd gets the same set afterwards for the cgroups it made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from nri_numa.agent.agent import Agent
from nri_numa.agent.cgroup_updates import CgroupCheckResult, observe_cgroups
from nri_numa.agent.confirmations import TRY_COUNT_WINDOW_S, WriteTarget
from nri_numa.agent.drift_policy import DriftRepairPlan, plan_repairs
from nri_numa.agent.reload import ConfigInForce
from nri_numa.agent.systemd_sync import SystemdSync
from nri_numa.config import parse_duration
from nri_numa.engine.desired import Drift
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.cpuset_watch import CpusetWatch
from nri_numa.model.workload import ContainerUpdate
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import NoticedEventKind, NoticeMessageReason
from nri_numa.observe.reports import ReportOnce

log = get_logger("reconcile")

WRITE_CHECK_INTERVAL_S: Final = 0.01
"""Seconds between a write and its check, and between two checks."""
CHECK_REST_RATIO: Final = 10
"""Pause after a check, as a multiple of its duration: a tenth of a core at most."""
WRITE_BATCH: Final = 25
"""Cgroups written in one batch, each some tens of microseconds."""
LOOP_POLL_INTERVAL_S: Final = 1.0
"""Seconds between two checks that a round is due, or the kernel accepts writes again."""
PUSH_DELAY_S: Final = 1.0
"""Seconds before a push: an update in an answer has arrived by then."""
MAX_CONTAINER_LINES_PER_ROUND: Final = 20
"""Log lines of one round about single containers; a thousand at once would delay requests."""
READ_BACK_DELAY_S: Final = 0.2
"""Seconds between a push and reading back its result."""
PUSH_BATCH: Final = 32
"""Corrections of one push; each may cost the runtime a Synchronize of the whole node."""
BLIND_ROUNDS_BEFORE_REPORT: Final = 3
"""Rounds without any cgroup before that is reported; one may fall between create and start."""
UPDATE_WITHOUT_EFFECT_TEXT: Final = "the runtime accepted the update, but the cgroup did not change"


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one round, by container id.

    Attributes:
        cgroup_count: number of containers with a cgroup.
        drifted: containers with drift, confirmed by a second read.
        repaired: repaired containers, as read back.
        abandoned: containers that were repaired too often lately, and are left.
    """

    cgroup_count: int = 0
    drifted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


class RuntimeStatus(Protocol):
    """Kind and state of the link to the runtime."""

    over_cri: bool

    @property
    def is_synchronized(self) -> bool:
        """True if registered and synchronized."""


PushUpdates = Callable[[Sequence[ContainerUpdate]], Awaitable[str]]
"""Function that sends the runtime updates that answer no event."""


class DriftReports:
    """Reports the results of rounds, each once while it stays the same."""

    def __init__(self, agent: Agent) -> None:
        self._current, self._clock = agent.current, agent.current.clock
        self._notices, self._metrics = agent.history.notices, agent.metrics
        self._confirmations = agent.cgroups.confirmations[WriteTarget.CGROUP]

    def report_failure(self) -> None:
        """Count and log the exception that ended a round."""
        self._metrics.internal_errors.inc()
        log.exception("reconcile round failed")

    def report_late_repairs(self, drifts: Sequence[Drift], times: Mapping[str, float]) -> None:
        """Report repaired undelivered updates; ``times`` are Unix times by container id."""
        self._metrics.undelivered_updates_repaired.inc(len(drifts))
        for correction in drifts:
            record = self._current.state.allocations.get(correction.container_id)
            if record is not None and record.kind is not ContainerKind.UNPINNED:
                self._notices.add_for_allocation(
                    record, NoticedEventKind.UNDELIVERED_UPDATE, f"{correction.finding}; repaired"
                )
        time_s = self._clock.time()
        _log_each(
            log.warning,
            "undelivered update repaired",
            "more undelivered updates repaired",
            drifts,
            lambda c: {
                "on_exclusive_cpus": c.rank == 0,
                "duration_s": round(time_s - times[c.container_id], 3),
            },
        )

    def report_drift(self, drifted: Sequence[Drift]) -> None:
        """Count, note and log drift, once for as long as it stays the same."""
        new_drifts = [
            c for c in drifted if self._confirmations.record_finding(c.container_id, c.finding)
        ]
        for correction in new_drifts:
            self._add_drift_notice(correction, correction.finding)
        self._metrics.drift_found.inc(len(new_drifts))
        observed = self._current.observe
        _log_each(
            log.warning,
            "drift found",
            "more drift found",
            new_drifts,
            lambda c: {"repairable": not c.is_report_only, "observe": observed},
        )

    def _add_drift_notice(
        self, correction: Drift, message: str, reason: str = NoticeMessageReason.NONE
    ) -> None:
        allocation = self._current.state.allocations.get(correction.container_id)
        if allocation is not None and not self._current.observe:
            self._notices.add_for_allocation(
                allocation, NoticedEventKind.DRIFT, message, reason=reason
            )

    def report_abandoned(self, abandoned: Sequence[Drift], writes: Sequence[Drift]) -> None:
        """Report abandoned containers once; those in ``writes`` are no longer abandoned."""
        for written in writes:
            if entry := self._confirmations.entries.get(written.container_id):
                entry.is_abandoned = False
        for correction in abandoned:
            entry = self._confirmations.get_entry(correction.container_id)
            if entry.is_abandoned:
                continue
            entry.is_abandoned = True
            repairs = len(entry.recent_tries(self._clock.monotonic()))
            self._metrics.drift_repairs_abandoned.inc()
            message = f"{correction.finding}; repaired {repairs} times, and rewritten each time"
            self._add_drift_notice(correction, message, NoticeMessageReason.REPAIRS_ABANDONED)
            log.warning(
                "drift repairs abandoned",
                **_drift_log_fields(
                    correction, "another program keeps rewriting this container's cgroup"
                ),
                repair_count=repairs,
                window_s=round(TRY_COUNT_WINDOW_S),
            )

    def report_repaired(self, drifts: Sequence[Drift]) -> None:
        """Count and log repaired drift."""
        self._metrics.drift_repaired.inc(len(drifts))
        time_s = self._clock.monotonic()
        for repaired in drifts:
            entry = self._confirmations.get_entry(repaired.container_id)
            entry.tries = (*entry.recent_tries(time_s), time_s)
            entry.finding, entry.is_without_effect = "", False
        _log_each(log.info, "drift repaired", "more drift repaired", drifts)

    def report_without_effect(self, corrections: Sequence[Drift]) -> None:
        """Report once that an update of the runtime did not change the cgroup.

        It is tried again in each round.
        """
        new_corrections = list[Drift]()
        for correction in corrections:
            entry = self._confirmations.get_entry(correction.container_id)
            if entry.is_without_effect:
                continue
            entry.is_without_effect = True
            new_corrections.append(correction)
            self._add_drift_notice(
                correction, f"{correction.finding}; not repaired: {UPDATE_WITHOUT_EFFECT_TEXT}"
            )
        _log_each(
            log.warning,
            "drift not repaired",
            "more drift not repaired",
            new_corrections,
            lambda c: {"problem": f"{c.finding}; {UPDATE_WITHOUT_EFFECT_TEXT}"},
        )


class Reconciler:
    """Compares cgroups with the node state, and repairs them."""

    def __init__(
        self,
        agent: Agent,
        systemd: SystemdSync,
        runtime: RuntimeStatus,
        push_updates: PushUpdates,
        in_force: ConfigInForce,
    ) -> None:
        self._current, self._cgroups, self._drift = agent.current, agent.cgroups, agent.drift
        self._runtime, self._push_updates = runtime, push_updates
        self._systemd, self._in_force = systemd, in_force
        self._confirmations = agent.cgroups.confirmations[WriteTarget.CGROUP]
        self._reports = DriftReports(agent)
        self._written: set[str] = set()
        self._problems = ReportOnce(log)
        self._blind = 0
        if problem := agent.cgroups.writer.unwritable_cpuset_reason():
            log.warning(
                "cgroups not writable",
                problem=f"{problem}; the runtime is sent each correction, and no container moves",
            )

    # --- schedule ---------------------------------------------------------------------------------

    async def run_checks(self) -> None:
        """Check written cgroups and undelivered updates until cancelled.

        With ``reconcile.interval`` 0 writes of other programs are not checked.
        """
        loop, clock = asyncio.get_running_loop(), self._current.clock
        confirmations, containers = self._confirmations, self._cgroups.containers
        with CpusetWatch(self._cgroups.writer.reader) as watch:
            if watch.fd >= 0:
                loop.add_reader(watch.fd, self._on_watch_readable, watch)
            try:
                while True:
                    await confirmations.wake.wait()
                    # A writer of CPUs usually writes memory nodes, too.
                    await clock.sleep(WRITE_CHECK_INTERVAL_S)
                    confirmations.wake.clear()
                    start_time = clock.monotonic()
                    cgroups, starting = containers.cgroup_places, containers.starting
                    watch.watch_containers({i: p for i, p in cgroups.items() if i not in starting})
                    self._problems.report("cpusets not watched", watch.problem)
                    # A blocked write may still change what is read now.
                    if self._cgroups.writer.is_write_held_up:
                        await clock.sleep(LOOP_POLL_INTERVAL_S)
                        confirmations.wake.set()
                        continue
                    targets, written = set(confirmations.required_ids()), self._written
                    self._written = set()
                    if parse_duration(self._in_force.config.reconcile.interval) > 0:
                        targets |= written
                    await self._run_round(targets)
                    cost_s = clock.monotonic() - start_time
                    await clock.sleep(max(WRITE_CHECK_INTERVAL_S, CHECK_REST_RATIO * cost_s))
            finally:
                loop.remove_reader(watch.fd)

    def _on_watch_readable(self, watch: CpusetWatch) -> None:
        self._written |= watch.pop_written()
        self._confirmations.wake.set()

    async def run_periodic_rounds(self) -> None:
        """Check all containers every ``reconcile.interval`` until cancelled; 0 is never."""
        waited = pause_s = 0.0
        while True:
            # In small steps, so a reloaded interval applies at once.
            await self._current.clock.sleep(pause_s)
            self._drift.accumulate_seconds()
            interval = parse_duration(self._in_force.config.reconcile.interval)
            waited = waited + pause_s if interval > 0 else 0.0
            if interval > 0 and waited >= interval:
                waited = 0.0
                await self._run_round()
            pause_s = min(LOOP_POLL_INTERVAL_S, interval - waited if interval > 0 else math.inf)

    async def _run_round(self, targets: Collection[str] | None = None) -> None:
        try:
            await self.reconcile(targets)
        except Exception:
            # Placement works without it.
            self._reports.report_failure()

    async def reconcile(self, targets: Collection[str] | None = None) -> RoundResult:
        """Check every container once, or only ``targets``, and repair those that differ."""
        # Before the first Synchronize the restored state may be outdated.
        current, cgroups, containers = self._current, self._cgroups, self._cgroups.containers
        if not current.synchronized or cgroups.writer.is_write_held_up:
            return RoundResult()
        ids = [
            i for i in (containers.cgroup_places if targets is None else targets)
            if containers.is_settled(i)
        ]  # fmt: skip
        confirmations = self._confirmations
        taken_ids = confirmations.entries if targets is None else targets
        required = confirmations.take_required(tuple(taken_ids))
        due_at = {i: required[i] for i in ids if i in required}
        starts = dict.fromkeys(ids, current.clock.time()) | due_at
        result = await self._observe_cgroups(ids)
        if result is None:
            return RoundResult()
        suspects = [c.container_id for c in result.corrections]
        self._drift.remove_repaired(*(set(ids) - set(suspects)))
        if targets is None:
            containers.unconfirmed_ids.clear()
            self._report_blindness(result.cgroup_count)
            time_s = current.clock.monotonic()
            confirmations.retain_drifting(set(suspects), current.state.allocations, time_s)
        drifted, abandoned, writes = list[Drift](), list[Drift](), list[Drift]()
        drifts, unwritten = list[Drift](), list[Drift]()
        for start in range(0, len(suspects), WRITE_BATCH):
            if start:
                await current.clock.sleep(0)
            batch = suspects[start : start + WRITE_BATCH]
            plan, applied, failed = self._repair_batch(batch, due_at, starts)
            drifted += plan.drifted
            abandoned += plan.abandoned
            writes += plan.writes
            drifts += applied
            unwritten += failed
        self._reports.report_drift(drifted)
        self._reports.report_abandoned(abandoned, writes)
        drifts += await self._push_corrections(unwritten)
        self._reports.report_late_repairs([c for c in drifts if c.container_id in due_at], due_at)
        repaired = [c for c in drifts if c in drifted]
        self._reports.report_repaired(repaired)
        if self._runtime.over_cri:  # the runtime's record may be older
            await self._push_updates([c.to_update for c in repaired])
        if targets is None:
            cgroups.queue_systemd_sync(ids)
        return RoundResult(
            cgroup_count=result.cgroup_count,
            drifted=tuple(c.container_id for c in drifted),
            repaired=tuple(c.container_id for c in repaired),
            abandoned=tuple(c.container_id for c in abandoned),
        )

    def _repair_batch(
        self,
        container_ids: Sequence[str],
        undelivered: Collection[str],
        starts: Mapping[str, float],
    ) -> tuple[DriftRepairPlan, list[Drift], list[Drift]]:
        """Read some containers again and write them, without an await in between.

        Returns:
            The plan, the applied corrections, and those for the runtime.
        """
        settings = self._in_force.config.reconcile
        time_s, count_tries = self._current.clock.monotonic(), self._confirmations.count_tries
        drifts = self._cgroups.find_corrections(container_ids)
        plan = plan_repairs(
            drifts,
            undelivered=undelivered,
            updating=self._cgroups.containers.unconfirmed_ids | {self._systemd.target_id},
            exhausted={i for i in container_ids if count_tries(i, time_s) >= settings.max_repairs},
            observe=self._current.observe,
            may_repair=self._runtime.is_synchronized or settings.repair_without_runtime,
        )
        abandoned = {c.container_id for c in plan.abandoned}
        self._drift.update_drift(container_ids, drifts, starts, abandoned)
        return plan, *self._write_corrections(plan.writes)

    # --- comparing --------------------------------------------------------------------------------

    async def _observe_cgroups(self, ids: Iterable[str]) -> CgroupCheckResult | None:
        """Read and compare in a thread; None if nothing can be read."""
        pairs = self._cgroups.containers.settled_places(ids)
        if not pairs:
            return CgroupCheckResult(0, ())
        reader, desired = self._cgroups.writer.reader, self._current.desired
        try:
            return await asyncio.to_thread(observe_cgroups, reader, desired, pairs)
        except OSError as error:
            self._report_unreadable(f"{error.filename}: {error.strerror}")
            return None

    def _report_unreadable(self, problem: str) -> None:
        """Report once that drift cannot be found, and once the end of that."""
        state, end_event = "unreadable" if problem else "", "drift check resumed"
        self._problems.report("drift check suspended", state, end_event, problem=problem)

    def _report_blindness(self, cgroup_count: int) -> None:
        """Report once that no container has a cgroup, and once the end of that."""
        count = len(self._cgroups.containers.cgroup_places)
        self._blind = self._blind + 1 if count and not cgroup_count else 0
        if not self._blind:
            self._report_unreadable("")
        elif self._blind >= BLIND_ROUNDS_BEFORE_REPORT:
            hierarchy = self._cgroups.writer.reader.hierarchy
            self._report_unreadable(f"none of {count} containers has a cgroup below {hierarchy}")

    # --- repairing --------------------------------------------------------------------------------

    def _write_corrections(self, corrections: Sequence[Drift]) -> tuple[list[Drift], list[Drift]]:
        """Write cgroups; returns the applied corrections, and those for the runtime."""
        applied, unwritten = list[Drift](), list[Drift]()
        # systemd may still undo a write, and that would not be another program's drift.
        pending_ids = set(self._cgroups.confirmations[WriteTarget.SYSTEMD].entries)
        outcomes = self._cgroups.apply_corrections(corrections)
        for correction in corrections:
            outcome = outcomes[correction.container_id]
            if outcome.problem and self._cgroups.writer.is_write_held_up:
                continue
            if outcome.problem:
                self._problems.report("cgroup not written", outcome.problem)
            if outcome.problem or correction.quota:
                unwritten.append(correction)
            elif not outcome.missing:
                self._drift.remove_repaired(correction.container_id)
                applied += [] if correction.container_id in pending_ids else [correction]
        return applied, unwritten

    async def _push_corrections(self, corrections: Sequence[Drift]) -> list[Drift]:
        """Push remaining corrections to the runtime in batches, and read them back.

        In the order of the plan: if this is interrupted, the next round continues from there.
        """
        if not corrections:
            return []
        await self._current.clock.sleep(PUSH_DELAY_S)
        pending = self._cgroups.find_corrections(c.container_id for c in corrections)
        sent: list[Drift] = []
        for start in range(0, len(pending), PUSH_BATCH):
            chunk = pending[start : start + PUSH_BATCH]
            if problem := await self._push_updates([c.to_update for c in chunk]):
                unsent = len(pending) - start
                log.warning("corrections not sent", container_count=unsent, problem=problem)
                break
            sent += chunk
        if any(correction.quota for correction in sent):
            await self._systemd.sync_systemd()  # crun leaves the quota of the scope
        if sent:
            await self._current.clock.sleep(READ_BACK_DELAY_S)
        drift_by_id = {
            c.container_id: c for c in self._cgroups.find_corrections(c.container_id for c in sent)
        }
        self._reports.report_without_effect([c for c in drift_by_id.values() if c in sent])
        self._drift.remove_repaired(*(i for c in sent if (i := c.container_id) not in drift_by_id))
        return [c for c in corrections if c in sent and c.container_id not in drift_by_id]


def _drift_log_fields(drift: Drift, obstacle: str = "") -> dict[str, object]:
    return {
        "pod": drift.pod,
        "container": drift.container,
        "id": drift.container_id[:12],
        "problem": "; ".join(filter(None, (drift.finding, obstacle))),
    }


def _log_each(
    log_function: Callable[..., None],
    event: str,
    summary_event: str,
    corrections: Sequence[Drift],
    fields: Callable[[Drift], dict[str, object]] = lambda c: {},
) -> None:
    """Log a line for each of the first corrections, and one with the number of the others."""
    for c in corrections[:MAX_CONTAINER_LINES_PER_ROUND]:
        log_function(event, **(_drift_log_fields(c) | fields(c)))
    if len(corrections) > MAX_CONTAINER_LINES_PER_ROUND:
        log_function(
            summary_event, container_count=len(corrections) - MAX_CONTAINER_LINES_PER_ROUND
        )
