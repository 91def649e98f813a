"""Cgroups as the node state means them: desired against observed, and what is done about it.

*Desired* is the node state. *Observed* are the cpuset files of containers, read in a thread, some
at a time with pauses, and compared there (`observe_cgroups`): the loop is given only containers
that may not be as meant, looks at them once more, and writes them in the same go, so that nothing
can change in between. They are looked at

- when something writes their files (inotify), and every ``reconcile.interval``. What differs then
  is *drift*;
- when they start, and when a write of ours did not come to pass. What differs then is *late*.

Cgroups are written directly. The runtime is asked for what cannot be written, and for CPU limits,
which it remembers: from NRI 0.12.1 on by a call, before that by a second registration, which is
dear, and hangs containerd (2.1.9, 2.4.2) for good when a sandbox is removed in the same moment.

What the kernel would refuse, because of a cgroup above or below, is not written: that cgroup is
named, and the repair follows when it is out of the way. A container that is rewritten again and
again is reported and left (`nri_numa.agent.drift_policy`). systemd, where it made a cgroup, is
given the same set afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from nri_numa.agent.drift_policy import (
    REPAIR_COUNT_WINDOW_S,
    RepairHistory,
    RepairPlan,
    plan_repairs,
)
from nri_numa.agent.loop import Clock
from nri_numa.config import parse_duration
from nri_numa.engine.desired import Drift, NodeSnapshot, plan_corrections
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.cgroups import (
    CgroupPlace,
    CgroupReader,
    CgroupWriter,
    SystemdScopes,
    read_actual_cgroups,
)
from nri_numa.machine.cpuset_watch import CpusetWatch
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import NoticedEventKind, NoticeMessageReason

if TYPE_CHECKING:
    from nri_numa.agent.agent import Agent
    from nri_numa.agent.daemon import Daemon
    from nri_numa.agent.links import RuntimeConnection

log = get_logger("reconcile")

WRITE_CHECK_INTERVAL_S: Final = 0.01
"""Seconds between a write and the look at it, and between two looks."""
CHECK_REST_RATIO: Final = 10
"""A look is followed by this many times its own length of rest: a tenth of a core at most."""
WRITE_BATCH: Final = 25
"""Cgroups written in one go, each some tens of microseconds."""
READ_BATCH: Final = 25
"""Containers read without a pause: about a millisecond."""
THREAD_PAUSE_S: Final = 0.002
"""Seconds in which the thread wants nothing, so that the loop gets its turn."""
LOOP_POLL_INTERVAL_S: Final = 1.0
"""Seconds after which it is seen that a round is due, that the kernel takes writes again, and what
to give to systemd: what changes again meanwhile is given once."""
PUSH_DELAY_S: Final = 1.0
"""Seconds before a push: an update that rides on an answer has arrived by then."""
MAX_CONTAINER_LINES_PER_ROUND: Final = 20
"""Lines of one round about single containers; a thousand at once would keep requests waiting."""
READ_BACK_DELAY_S: Final = 0.2
"""Seconds between a push and reading back what became of it."""
PUSH_BATCH: Final = 32
"""Corrections of one push. Each push may cost the runtime a picture of the whole node."""
BLIND_ROUNDS_BEFORE_REPORT: Final = 3
"""Rounds without any cgroup after which that is said; one may fall between create and start."""
UPDATE_WITHOUT_EFFECT_TEXT: Final = "the runtime took the update, and the cgroup is as before"


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one round came to, by container id.

    Attributes:
        cgroup_count: containers that have a cgroup.
        drifted: not as meant, and that after the second look too.
        repaired: put right, as read back.
        abandoned: repaired so often lately that it is left to what rewrites it.
    """

    cgroup_count: int = 0
    drifted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


class CgroupCheckResult(msgspec.Struct, frozen=True):
    """What a look at some containers showed.

    Attributes:
        cgroup_count: how many have a cgroup.
        corrections: those that are not as meant.
    """

    cgroup_count: int
    corrections: tuple[Drift, ...]


class Reconciler:
    """Compares cgroups with the node state, and puts them right."""

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        runtime: RuntimeConnection,
        *,
        writer: CgroupWriter,
        scopes: SystemdScopes,
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._metrics = metrics
        self._runtime = runtime
        self._writer = writer
        self._scopes = scopes
        self._clock = clock
        self._undelivered: dict[str, float] = {}
        self._written: set[str] = set()
        self._wake = asyncio.Event()
        self._untold: dict[str, None] = {}
        self._tell = asyncio.Event()
        self._behind: dict[str, str] = {}
        self._push_target = ""
        self._repairs = RepairHistory()
        self._given_up: set[str] = set()
        self._reported: dict[str, str] = {}
        self._unmoved: set[str] = set()
        self._unreadable = self._unwritable = self._unwatched = ""
        self._blind = 0
        agent.reconciler = self
        writer.held_up = self._on_slow_write
        if problem := writer.unwritable_cpuset_reason():
            log.warning(
                "cgroups cannot be written: the runtime is asked, and no container moves",
                problem=problem,
            )

    # --- when to look -----------------------------------------------------------------------------

    def request_check(self, ids: Collection[str]) -> None:
        """Look at these soon: what they were meant to have may not have arrived."""
        now = self._clock.time()
        for container_id in ids:
            self._undelivered.setdefault(container_id, now)
        self._wake.set()

    def _on_slow_write(self, ids: Collection[str], in_kernel: bool) -> None:
        """Say that writes take long, and look what came of them when they are through."""
        self._metrics.writes_held_up.inc()
        log.warning(
            "writes of cpusets take long",
            ids=",".join(i[:12] for i in list(ids)[:MAX_CONTAINER_LINES_PER_ROUND]),
            because="the kernel has another change of cgroups under way"
            if in_kernel
            else "the thread that writes got no CPU in time",
        )
        self.request_check(ids)

    async def run_checks(self, daemon: Daemon) -> None:
        """Look at what was written or may be late until cancelled.

        With ``reconcile.interval`` 0 nothing that others write is looked at.
        """
        loop = asyncio.get_running_loop()
        with CpusetWatch(self._writer.reader) as watch:
            if watch.fd >= 0:
                loop.add_reader(watch.fd, self._on_watch_readable, watch)
            try:
                while True:
                    await self._wake.wait()
                    await self._clock.sleep(
                        WRITE_CHECK_INTERVAL_S
                    )  # who writes CPUs also writes memory nodes
                    self._wake.clear()
                    began = self._clock.monotonic()
                    starting = self._agent.starting
                    watch.watch_containers(
                        {i: p for i, p in self._agent.cgroup_places.items() if i not in starting}
                    )
                    self._report_watch_problem(watch.problem)
                    if (
                        self._writer.is_write_held_up
                    ):  # what is read now may be written over in a moment
                        await self._clock.sleep(LOOP_POLL_INTERVAL_S)
                        self._wake.set()
                        continue
                    written, self._written = self._written, set()
                    drifts = parse_duration(daemon.config.reconcile.interval) > 0
                    await self._run_round(
                        daemon, self._undelivered.keys() | (written if drifts else ())
                    )
                    took = self._clock.monotonic() - began
                    await self._clock.sleep(max(WRITE_CHECK_INTERVAL_S, CHECK_REST_RATIO * took))
            finally:
                loop.remove_reader(watch.fd)

    def _on_watch_readable(self, watch: CpusetWatch) -> None:
        self._written |= watch.pop_written()
        self._wake.set()

    async def run_periodic_rounds(self, daemon: Daemon) -> None:
        """Look at everything in each ``reconcile.interval``, until cancelled; 0 is never."""
        waited = step = 0.0
        while True:
            # In small steps, so that a reloaded interval counts at once.
            await self._clock.sleep(step)
            self._agent.differences.accumulate_seconds()
            interval = parse_duration(daemon.config.reconcile.interval)
            waited = waited + step if interval > 0 else 0.0
            if interval > 0 and waited >= interval:
                waited = 0.0
                await self._run_round(daemon, None)
            step = (
                min(LOOP_POLL_INTERVAL_S, interval - waited)
                if interval > 0
                else LOOP_POLL_INTERVAL_S
            )

    async def _run_round(self, daemon: Daemon, only: Collection[str] | None) -> None:
        settings = daemon.config.reconcile
        try:
            await self.reconcile(
                max_repairs=settings.max_repairs,
                without_runtime=settings.without_runtime,
                only=only,
            )
        except Exception:
            # Containers are placed as well without it.
            self._metrics.internal_errors.inc()
            log.exception("reconcile failed")

    async def reconcile(
        self,
        *,
        max_repairs: int = 3,
        without_runtime: bool = False,
        only: Collection[str] | None = None,
    ) -> RoundResult:
        """Look at every container once, and repair what is not as meant.

        One that was repaired ``max_repairs`` times within `REPAIR_COUNT_WINDOW_S` is left.
        ``without_runtime`` repairs drift while the runtime cannot be reached; ``only`` looks at
        these containers instead.
        """
        # Before the runtime has said what runs, what we remember may be long over.
        agent = self._agent
        if not agent.current.synchronized or self._writer.is_write_held_up:
            return RoundResult()
        ids = [
            i for i in (agent.cgroup_places if only is None else only) if agent.is_cgroup_settled(i)
        ]
        late = {i: since for i in ids if (since := self._undelivered.get(i)) is not None}
        self._undelivered = (
            {} if only is None else {i: t for i, t in self._undelivered.items() if i not in only}
        )
        looked = self._clock.time()
        first = await self._observe_cgroups(ids)
        if first is None:
            return RoundResult()
        suspects = [c.container_id for c in first.corrections]
        agent.differences.remove_repaired(*(set(ids) - set(suspects)))
        if only is None:
            agent.unconfirmed_ids.clear()
            self._report_blindness(first.cgroup_count)
            self._retain_drifting(set(suspects))
        drifted, new, abandoned = list[Drift](), list[Drift](), set[str]()
        right, left = list[Drift](), list[Drift]()
        for start in range(0, len(suspects), WRITE_BATCH):
            if start:
                await self._clock.sleep(0)
            batch = suspects[start : start + WRITE_BATCH]
            # From here to the write nothing else happens.
            wrong = agent.find_corrections(batch)
            plan = plan_repairs(
                wrong,
                self._repairs,
                self._clock.monotonic(),
                late=late.keys(),
                updating=agent.unconfirmed_ids | {self._push_target},
                max_repairs=max_repairs,
                observe=agent.current.observe,
                may_repair=self._runtime.is_synchronized or without_runtime,
            )
            new += self._record_drift(plan.drifted)
            abandoned |= self._report_abandoned(plan)
            began = dict.fromkeys(batch, looked) | late
            agent.differences.update_drift(batch, wrong, began, abandoned)
            drifted += plan.drifted
            done, failed = self._write_corrections(plan.writes)
            right += done
            left += failed
        observed = agent.current.observe
        _log_each(
            log.warning,
            "drift found",
            "more drift found",
            new,
            lambda c: {"repairable": not c.is_report_only, "observed": observed},
        )
        right += await self._push_corrections(left)
        self._report_late_repairs([c for c in right if c.container_id in late], late)
        repaired = [c for c in right if c in drifted]
        self._report_repaired(repaired)
        if self._runtime.over_cri:  # no answer of ours changes its record, which may be older
            await self._runtime.push_updates([c.to_update for c in repaired])
        if only is None:
            self.queue_systemd_sync(ids)
        return RoundResult(
            cgroup_count=first.cgroup_count,
            drifted=tuple(c.container_id for c in drifted),
            repaired=tuple(c.container_id for c in repaired),
            abandoned=tuple(c.container_id for c in drifted if c.container_id in abandoned),
        )

    # --- what is said -----------------------------------------------------------------------------

    def _report_late_repairs(self, right: Sequence[Drift], since: Mapping[str, float]) -> None:
        self._metrics.late_repairs.inc(len(right))
        for correction in right:
            known = self._agent.current.state.allocations.get(correction.container_id)
            if known is not None and known.kind is not ContainerKind.UNPINNED:
                self._agent.notices.add_for_allocation(
                    known, NoticedEventKind.UNDELIVERED_UPDATE, f"{correction.finding}; put right"
                )
        now = self._clock.time()
        _log_each(
            log.warning,
            "late container put right",
            "more late containers put right",
            right,
            lambda c: {
                "on_owned_cpus": c.rank == 0,
                "seconds": round(now - since[c.container_id], 3),
            },
        )

    def _record_drift(self, drifted: Sequence[Drift]) -> list[Drift]:
        """Count and note drift, once for as long as it stays the same; what of it is new."""
        new = [c for c in drifted if self._reported.get(c.container_id) != c.finding]
        self._metrics.drift_found.inc(len(new))
        self._reported.update((c.container_id, c.finding) for c in new)
        for correction in new:
            self._add_drift_notice(correction, correction.finding)
        return new

    def _add_drift_notice(
        self, correction: Drift, message: str, reason: str = NoticeMessageReason.NONE
    ) -> None:
        allocation = self._agent.current.state.allocations.get(correction.container_id)
        if allocation is not None and not self._agent.current.observe:
            self._agent.notices.add_for_allocation(
                allocation, NoticedEventKind.DRIFT, message, reason=reason
            )

    def _report_abandoned(self, plan: RepairPlan) -> set[str]:
        """Say once which containers are left to what rewrites them; returns all of these."""
        abandoned = {c.container_id for c in plan.abandoned}
        self._given_up -= {c.container_id for c in plan.writes}
        for correction in plan.abandoned:
            if correction.container_id in self._given_up:
                continue
            repairs = self._repairs.count(correction.container_id, self._clock.monotonic())
            self._metrics.drift_fights.inc()
            message = f"{correction.finding}; put right {repairs} times and rewritten again"
            self._add_drift_notice(correction, message, NoticeMessageReason.REPAIRS_ABANDONED)
            log.warning(
                "drift not repaired any more: another program keeps rewriting this container's "
                "cgroup",
                container=correction.name,
                id=correction.container_id[:12],
                found=correction.finding,
                repairs=repairs,
                window_seconds=round(REPAIR_COUNT_WINDOW_S),
            )
        self._given_up |= abandoned
        return abandoned

    def _retain_drifting(self, drifting: set[str]) -> None:
        """Drop what is remembered of containers that are right again, or are not there any more."""
        for container_id in self._reported.keys() - drifting:
            del self._reported[container_id]
        self._unmoved &= drifting
        self._repairs.retain(
            drifting, self._agent.current.state.allocations, self._clock.monotonic()
        )
        self._given_up = {i for i in self._given_up if i in drifting or i in self._repairs}

    def _report_repaired(self, right: Sequence[Drift]) -> None:
        self._metrics.drift_repaired.inc(len(right))
        for c in right:
            self._repairs.add(c.container_id, self._clock.monotonic())
            self._reported.pop(c.container_id, None)
            self._unmoved.discard(c.container_id)
        _log_each(log.info, "drift repaired", "more drift repaired", right)

    # --- looking ----------------------------------------------------------------------------------

    def _running_cgroups(self, ids: Iterable[str]) -> list[tuple[str, CgroupPlace]]:
        return [(i, self._agent.cgroup_places[i]) for i in ids if self._agent.is_cgroup_settled(i)]

    async def _observe_cgroups(self, ids: Iterable[str]) -> CgroupCheckResult | None:
        """Read and compare in a thread; None when nothing can be read."""
        agent, places = self._agent, self._running_cgroups(ids)
        if not places:
            return CgroupCheckResult(0, ())
        look = partial(observe_cgroups, self._writer.reader, agent.current.desired, places)
        try:
            return await asyncio.to_thread(look)
        except OSError as error:
            self._report_unreadable(f"{error.filename}: {error.strerror}")
            return None

    def _report_unreadable(self, problem: str) -> None:
        """Say once that drift cannot be found, and once that it can again."""
        if problem and not self._unreadable:
            log.warning("drift is not looked for", problem=problem)
        elif self._unreadable and not problem:
            log.info("drift is looked for again")
        self._unreadable = problem

    def _report_watch_problem(self, problem: str) -> None:
        """Say once that drift is found by rounds alone."""
        if problem and problem != self._unwatched:
            log.warning("some cpusets are not watched: their drift is found later", problem=problem)
        self._unwatched = problem

    def _report_blindness(self, seen: int) -> None:
        """Say once that no container has a cgroup, and once the end of that."""
        places = len(self._agent.cgroup_places)
        self._blind = self._blind + 1 if places and not seen else 0
        if not self._blind:
            self._report_unreadable("")
        elif self._blind >= BLIND_ROUNDS_BEFORE_REPORT:
            hierarchy = self._writer.reader.hierarchy
            self._report_unreadable(f"none of {places} containers has a cgroup below {hierarchy}")

    # --- repairing --------------------------------------------------------------------------------

    def _write_corrections(self, corrections: Sequence[Drift]) -> tuple[list[Drift], list[Drift]]:
        """Write cgroups: which are right now, and which the runtime has to be asked for."""
        agent, right, left = self._agent, list[Drift](), list[Drift]()
        # What systemd may undo is not right yet, and its return would be no fight.
        unsure = self._behind.keys() | self._untold.keys()
        done = agent.apply_corrections(corrections)
        for correction in corrections:
            one = done[correction.container_id]
            if one.problem and self._writer.is_write_held_up:
                continue
            if one.problem and one.problem != self._unwritable:
                problem = self._unwritable = one.problem
                log.warning("cgroup not written: the runtime is asked instead", problem=problem)
            if one.problem or correction.quota:
                left.append(correction)
            elif not one.missing:
                agent.differences.remove_repaired(correction.container_id)
                right += [] if correction.container_id in unsure else [correction]
        return right, left

    async def _push_corrections(self, corrections: Sequence[Drift]) -> list[Drift]:
        """Ask the runtime for what is still wrong, a few at a time, and read it back.

        In the order of the plan: wherever this ends, what was sent is right, and the next round
        goes on from there.
        """
        if not corrections:
            return []
        await self._clock.sleep(PUSH_DELAY_S)
        wrong = self._agent.find_corrections(c.container_id for c in corrections)
        sent: list[Drift] = []
        for start in range(0, len(wrong), PUSH_BATCH):
            chunk = wrong[start : start + PUSH_BATCH]
            result = await self._runtime.push_updates([c.to_update for c in chunk])
            if not result.succeeded:
                left = len(wrong) - start
                log.warning("containers not put right", containers=left, detail=result.detail)
                break
            sent += chunk
        if sent:
            await self._clock.sleep(READ_BACK_DELAY_S)
        now = {
            c.container_id: c for c in self._agent.find_corrections(c.container_id for c in sent)
        }
        self._report_without_effect([c for c in now.values() if c in sent])
        self._agent.differences.remove_repaired(
            *(i for c in sent if (i := c.container_id) not in now)
        )
        return [c for c in corrections if c in sent and c.container_id not in now]

    def _report_without_effect(self, corrections: Sequence[Drift]) -> None:
        """Say once that the runtime took an update and the cgroup is as before.

        That is no repair: it is tried again in each round.
        """
        new = [c for c in corrections if c.container_id not in self._unmoved]
        self._unmoved.update(c.container_id for c in new)
        for correction in new:
            self._add_drift_notice(
                correction, f"{correction.finding}; not put right: {UPDATE_WITHOUT_EFFECT_TEXT}"
            )
        _log_each(
            log.warning,
            "drift not repaired",
            "more drift not repaired",
            new,
            lambda c: {"because": UPDATE_WITHOUT_EFFECT_TEXT},
        )

    # --- systemd ----------------------------------------------------------------------------------

    def queue_systemd_sync(self, ids: Iterable[str]) -> None:
        """Have systemd given what the cgroups of those of these that it made have, soon."""
        if self._writer.reader.unified and not self._agent.current.observe:
            places = self._agent.cgroup_places
            self._untold |= {i: None for i in ids if i in places and places[i].is_systemd_managed}
            if self._untold:
                self._tell.set()

    async def run_systemd_sync(self) -> None:
        """Give systemd what cgroups have, until cancelled: no request waits for it."""
        while True:
            await self._tell.wait()
            await self._clock.sleep(LOOP_POLL_INTERVAL_S)
            self._tell.clear()
            await self.sync_systemd()

    async def sync_systemd(self) -> None:
        """Give systemd what cgroups have, one after the other; what fails waits for a round.

        systemd writes the cgroup itself. So nothing is sent that was meant before the last write of
        ours, and where that comes while systemd is at work, the cgroup is put right afterwards.
        """
        agent, said = self._agent, bool(self._behind)
        while self._untold:
            if self._writer.is_write_held_up:  # what they will have is not known
                self._tell.set()
                break
            container_id = next(iter(self._untold))
            del self._untold[container_id]
            self._behind.pop(container_id, None)
            if not agent.is_cgroup_settled(container_id):
                continue
            write_count, self._push_target = agent.write_counts[container_id], container_id
            agree = partial(self._sync_scope, container_id, agent.current.desired, write_count)
            try:
                problem = await asyncio.to_thread(agree)
            except Exception as error:  # refused by the bus, whose errors are of several kinds, too
                why = getattr(error, "strerror", None) or error
                self._behind |= dict.fromkeys(
                    [container_id, *self._untold], f"no answer over D-Bus: {why}"
                )
                self._untold.clear()  # each would wait as long
                break
            finally:
                self._push_target = ""
            if agent.write_counts[container_id] != write_count:
                agent.repair_cgroups([container_id])
                self.queue_systemd_sync([container_id])
            elif problem:
                self._behind[container_id] = problem
        self._behind = {i: why for i, why in self._behind.items() if i in self._agent.cgroup_places}
        if self._behind and not said:
            count, problem = len(self._behind), next(iter(self._behind.values()))
            log.warning(
                "systemd has other CPUs for scopes than cgroups", count=count, problem=problem
            )
        elif said and not self._behind:
            log.info("systemd has the CPUs that cgroups have again")

    def _sync_scope(self, container_id: str, desired: NodeSnapshot, write_count: int) -> str:
        """Compare systemd's properties with those that are meant, and set them; runs in a thread.

        Nothing of what was ``desired`` is sent once the cgroup was written more often than
        ``write_count``.

        Returns:
            Why systemd has something else; empty where it has the same.
        """
        place = self._agent.cgroup_places.get(container_id)
        allocation = desired.state.allocations.get(container_id)
        if place is None or allocation is None or allocation.kind is ContainerKind.FOREIGN:
            return ""
        topology = desired.machine.topology
        cpus = desired.usable_cpus_of(allocation)
        mems = allocation.mems & topology.memory_nodes
        real = self._writer.reader.read_actual_cgroup(place)
        # One that was never bound has no list of its own, and systemd has none for it.
        if real is None or real.cpus & topology.online != cpus:
            return ""
        if mems and real.mems & topology.memory_nodes != mems:
            return ""  # its memory is on its way: systemd would have it moved in one go
        return self._scopes.sync_scope(
            place, cpus, mems, lambda: self._agent.write_counts[container_id] == write_count
        )


def _log_each(
    say: Callable[..., None],
    event: str,
    more: str,
    corrections: Sequence[Drift],
    fields: Callable[[Drift], dict[str, object]] = lambda c: {},
) -> None:
    """A line for each of the first, and one with the number of all others."""
    for c in corrections[:MAX_CONTAINER_LINES_PER_ROUND]:
        say(event, container=c.name, id=c.container_id[:12], found=c.finding, **fields(c))
    if len(corrections) > MAX_CONTAINER_LINES_PER_ROUND:
        say(more, containers=len(corrections) - MAX_CONTAINER_LINES_PER_ROUND)


# --- Looking, in a thread ---


def observe_cgroups(
    reader: CgroupReader,
    desired: NodeSnapshot,
    places: Sequence[tuple[str, CgroupPlace]],
    pause: Callable[[float], object] = time.sleep,
) -> CgroupCheckResult:
    """Read cgroups and compare them with one state; runs in a thread.

    The interpreter is held for a batch at a time only.

    Raises:
        OSError: the cgroup file system is not there at all.
    """
    if not reader.detect_hierarchy():
        raise FileNotFoundError(errno.ENOENT, "no cgroup file system here", reader.hierarchy)
    seen, found = 0, list[Drift]()
    for start in range(0, len(places), READ_BATCH):
        if start:
            pause(THREAD_PAUSE_S)
        some = observe_cgroup_batch(reader, desired, places[start : start + READ_BATCH])
        seen += some.cgroup_count
        found += some.corrections
    return CgroupCheckResult(seen, tuple(sorted(found, key=lambda correction: correction.sort_key)))


def observe_cgroup_batch(
    reader: CgroupReader, desired: NodeSnapshot, places: Sequence[tuple[str, CgroupPlace]]
) -> CgroupCheckResult:
    """The same in one go. Of containers whose CPU limit was lifted, it counts too."""
    where, observed = dict(places), read_actual_cgroups(reader, places)
    for container_id, real in observed.items():
        allocation = desired.state.allocations.get(container_id)
        if allocation is not None and allocation.lifted_quota is not None:
            observed[container_id] = replace(real, quota=reader.read_cfs_quota(where[container_id]))
    found = list[Drift]()
    for one in plan_corrections(desired, observed):
        way = partial(reader.blocking_cgroup_text, where[one.container_id])
        found.append(
            one.without_blocked_lists(
                way("cpuset.cpus", str(one.cpus)), way("cpuset.mems", str(one.mems))
            )
        )
    return CgroupCheckResult(len(observed), tuple(found))


# --- What containers really have ---


class DriftStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has instead of what is meant.

    Attributes:
        cpus: kernel list that it can really use.
        mems: kernel list of its memory nodes.
        desired_cpus: kernel list that it should be able to use; empty where it is so.
        desired_mems: kernel list of memory nodes, likewise.
        observed_at: Unix time from which on it was so, as far as seen.
        on_exclusive_cpus: it can run on CPUs that another container owns.
        obstacle: which cgroup keeps it from what is meant; empty when none does.
        finding: what the cgroup says, for people.
        repairs_abandoned: it was put right again and again, and is left to what rewrites it.
    """

    cpus: str
    mems: str
    desired_cpus: str = ""
    desired_mems: str = ""
    observed_at: float
    on_exclusive_cpus: bool
    finding: str
    obstacle: str = ""
    repairs_abandoned: bool = False

    @property
    def difference_text(self) -> str:
        """Both sides: ``meant 4-7, has 0-7; memory nodes: meant 0, has 0-1``.

        What is neither is said as it was found.
        """
        parts = []
        if self.desired_cpus:
            parts.append(f"meant {self.desired_cpus}, has {self.cpus or 'none'}")
        if self.desired_mems:
            parts.append(f"memory nodes: meant {self.desired_mems}, has {self.mems or 'none'}")
        if parts and self.obstacle:
            parts.append(self.obstacle)
        return "; ".join(parts) or self.finding


DriftById = Mapping[str, DriftStatus]
"""By container id; never changes, so that it can be read from any thread."""


class DriftTable:
    """What containers really have, by id, wherever it is not what they are meant to have.

    `status`, `explain`, the API and the page show it beside the decision, and metrics count how
    long a container could run on CPUs that another one owns. Every change replaces `known` as a
    whole, so that any thread can read it.

    Attributes:
        known: all of them at this moment.
    """

    def __init__(self, metrics: Metrics, clock: Clock, agent: Agent) -> None:
        self._metrics = metrics
        self._clock = clock
        self._agent = agent
        self._counted = clock.time()
        self.known: DriftById = MappingProxyType({})

    def update_drift(
        self,
        container_ids: Iterable[str],
        corrections: Iterable[Drift],
        since: Mapping[str, float],
        given_up: Collection[str] = (),
    ) -> None:
        """Take in what a look at some containers showed; the others of them are as meant.

        ``since`` are Unix times from which on it can have been so; ``given_up`` are those that are
        left to what rewrites them.
        """
        self.accumulate_seconds()
        wrong = {c.container_id: c for c in corrections}
        after = dict(self.known)
        for container_id in container_ids:
            if container_id not in wrong:
                after.pop(container_id, None)
        for container_id, one in wrong.items():
            known = after.get(container_id)
            began = known.observed_at if known else since[container_id]
            intruder = one.rank == 0
            if known and known.on_exclusive_cpus != intruder:
                began = self._counted
            if intruder and not (known and known.on_exclusive_cpus):
                self._metrics.neighbours_seen.inc()
                self._metrics.neighbour_seconds.inc(max(0.0, self._counted - began))
            after[container_id] = DriftStatus(
                cpus=str(one.actual.effective_cpus),
                mems=str(one.actual.effective_mems),
                desired_cpus=str(one.desired_cpus),
                desired_mems=str(one.desired_mems),
                observed_at=began,
                on_exclusive_cpus=intruder,
                finding=one.finding,
                obstacle=one.obstacle,
                repairs_abandoned=container_id in given_up,
            )
        self._replace_drift(after)

    def remove_repaired(self, *container_ids: str) -> None:
        """They are as meant, or gone."""
        gone = self.known.keys() & set(container_ids)
        if not gone:
            return
        self.accumulate_seconds()
        self._replace_drift({i: one for i, one in self.known.items() if i not in gone})

    def accumulate_seconds(self) -> None:
        """Count the seconds since the last call of those on exclusive CPUs of others."""
        now = self._clock.time()
        seconds, self._counted = max(0.0, now - self._counted), now
        self._metrics.neighbour_seconds.inc(
            seconds * sum(d.on_exclusive_cpus for d in self.known.values())
        )

    def _replace_drift(self, after: dict[str, DriftStatus]) -> None:
        if after == self.known:
            return
        self.known = MappingProxyType(after)
        self._metrics.neighbours.set(sum(one.on_exclusive_cpus for one in after.values()))
        self._agent.current.notify()
