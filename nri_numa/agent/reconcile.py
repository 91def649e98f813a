"""Cgroups as the node state means them: desired against observed, and what is done about it.

*Desired* is the node state. *Observed* are the cpuset files of containers and what systemd has for
their scopes, read in a thread, some at a time with pauses, and compared there (`observe`): the loop
is given only containers that are not as meant. They are looked at

- after each reply that changes others, each start, each Synchronize and each update that no request
  asked for. What differs then did not arrive: a runtime that takes an update down has not
  necessarily applied it. It is *late*, and put right at once by writing the cgroup, since the
  runtime's own record is right already, or through the runtime where cgroups cannot be written;
- every ``reconcile.interval``, and within a second of a write of its files (inotify). What differs
  then, and in the same way a second later, is *drift*: the cgroup was rewritten. It is put right
  through the runtime, whose record is put right by that as well. From NRI 0.12.1 on the runtime is
  called. Before that the only safe call is a second registration, which is dear, and can hang
  containerd 2.1 for good when a sandbox is removed in the same moment: so there the cgroup is
  written and the record follows with the next reply, and only where cgroups cannot be written a
  registration is made.

A repair of drift counts when it is read back. What the kernel would refuse, because of a cgroup
above or below, is not sent: that cgroup is named, and the repair follows when it is out of the way.
A container that is rewritten again and again is not fought for ever: after ``maxRepairs`` within
`REPAIR_WINDOW` that is reported, and it is left until the window has passed (docs/adr/0012).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from nri_numa.agent.loop import Clock
from nri_numa.config import parse_duration
from nri_numa.engine.decision import Machine
from nri_numa.engine.resync import Correction, plan_corrections
from nri_numa.engine.state import Kind, NodeState, effective_cpus
from nri_numa.machine.cgroups import (
    CgroupPlace,
    CgroupReader,
    CgroupWriter,
    Scopes,
    observe_all,
)
from nri_numa.machine.cpuset_watch import CpusetWatch
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Observed
from nri_numa.model.workload import ContainerUpdate
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import What
from nri_numa.runtime import PushResult

if TYPE_CHECKING:
    from nri_numa.agent.agent import Agent
    from nri_numa.agent.daemon import Daemon
    from nri_numa.agent.links import RuntimeConnection

log = get_logger("reconcile")

REPAIR_WINDOW: Final = 600.0
"""Seconds in which repairs of one container are counted."""
STILL: Final = 5.0
"""Seconds without a change in any cgroup, after which the runtime is taken to be through."""
TURN: Final = 0.01
"""Seconds between two verifications while there is something to verify."""
SHARE: Final = 10
"""A look is followed by this many times its own length of rest: a tenth of a core at most."""
AT_ONCE: Final = 25
"""Cgroups written in one go, each some tens of microseconds."""
BATCH: Final = 25
"""Containers read without a pause: about a millisecond."""
PAUSE: Final = 0.002
"""Seconds in which the thread wants nothing, so that the loop gets its turn."""
STEP: Final = 1.0
"""Seconds between two looks at containers whose cpuset was written."""
SETTLE: Final = 1.0
"""Seconds between the two looks: an update that rides on an answer has arrived by then."""
LOGGED_AT_ONCE: Final = 20
"""Lines of one round about single containers; a thousand at once would keep requests waiting."""
READ_BACK: Final = 0.2
"""Seconds between a push and reading back what became of it."""
CHUNK: Final = 32
"""Corrections of one push. Each push may cost the runtime a picture of the whole node."""
BLIND_ROUNDS: Final = 3
"""Rounds without any cgroup after which that is said; one may fall between create and start."""
UNMOVED: Final = "the runtime took the update, and the cgroup is as before"
RACES: Final = 3
"""Pushes of one round for containers that meanwhile were meant to have something else."""
PENDING_SECONDS: Final = 2.0
"""How long an update waits for a reply before it is sent by itself."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round came to, by container id.

    Attributes:
        seen: containers that have a cgroup.
        drifted: not as meant, and that after the second look too.
        repaired: put right, as read back.
        given_up: repaired so often lately that it is left to what rewrites it.
    """

    seen: int = 0
    drifted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()


Agree = Callable[[CgroupPlace, CPUSet, NUMASet], str]
"""Lets systemd have for a scope what its cgroup has; why it has not, see `Scopes.agree`."""


class Observation(msgspec.Struct, frozen=True):
    """What a look at some containers showed.

    Attributes:
        seen: how many have a cgroup.
        corrections: those that are not as meant.
        behind: by container id, why systemd has something else for a cgroup that is as meant.
    """

    seen: int
    corrections: tuple[Correction, ...]
    behind: Mapping[str, str] = msgspec.field(default_factory=dict)


class _Due(msgspec.Struct, frozen=True):
    """When a container is to be verified.

    Attributes:
        at: time of the first look.
        answered: requests that were answered by then; with one more the runtime, which applies the
            updates of a reply before its next request, is through. None where it applies nothing.
        since: Unix time of the first reply that has not been verified yet.
    """

    at: float
    answered: int | None
    since: float


class Reconciler:
    """Compares cgroups with the node state, and puts them right."""

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        runtime: RuntimeConnection,
        *,
        writer: CgroupWriter,
        scopes: Scopes,
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._metrics = metrics
        self._runtime = runtime
        self._writer = writer
        self._scopes = scopes
        self._clock = clock
        self._due: dict[str, _Due] = {}
        self._unsure: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._pending_since: float | None = None
        self._pushing: asyncio.Task[None] | None = None
        self._repairs: dict[str, deque[float]] = {}
        self._given_up: set[str] = set()
        self._reported: dict[str, str] = {}
        self._unmoved: set[str] = set()
        self._unreadable = self._unwritable = self._behind = self._unwatched = ""
        self._blind = 0
        agent.reconciler = self
        writer.held_up = self._held_up

    # --- after replies, starts and Synchronize ----------------------------------------------------

    def schedule_verification(self, ids: Collection[str], applying: int = 0) -> None:
        """Look at these containers as soon as the runtime has applied so many updates."""
        at = self._clock.monotonic() + (STILL if applying else 0.0)
        answered, now = self._runtime.answered if applying else None, self._clock.time()
        for container_id in ids:
            known = self._due.get(container_id)
            self._due[container_id] = _Due(at, answered, now if known is None else known.since)
        self._wake.set()

    async def run_verification(self) -> None:
        """Verify until cancelled."""
        while True:
            await self._wake.wait()
            began = self._clock.monotonic()
            try:
                await self.verify()
            except Exception:
                # Drift is looked for as well; containers are placed without either.
                self._metrics.internal_errors.inc()
                log.exception("verifying failed")
            if not self._due:
                self._wake.clear()
            await self._clock.sleep(max(TURN, SHARE * (self._clock.monotonic() - began)))

    async def verify(self) -> None:
        """Look at the containers that are due, and put right what is not as meant."""
        if self._writer.busy:
            return  # whatever is read now may be written over in a moment
        due, differences = self._take_due(), self._agent.differences
        found = await self._observe(due) if due else None
        if found is None:
            return
        self._wait_for_runtime(due, found.corrections)
        since = {i: one.since for i, one in due.items()}
        ours = [c for c in found.corrections if self._ours(c)]
        differences.update([i for i in due if i not in self._due], ours, since)
        left = [c for c in found.corrections if not c.blocked]
        if self._agent.observe or not left:
            return
        right, failed = await self._written(left)
        if failed:
            right += await self._repaired(failed, "late containers not put right")
        self._report_late(right, since)

    def _take_due(self) -> dict[str, _Due]:
        """Take out what is due; containers being started are looked at when they run."""
        now, answered, agent = self._clock.monotonic(), self._runtime.answered, self._agent
        ready: dict[str, _Due] = {}
        for container_id, one in self._due.items():
            if one.answered is not None and one.answered < answered:
                ready[container_id] = replace(one, answered=None)
            elif one.at <= now or container_id not in agent.places:
                ready[container_id] = one
        for container_id in ready:
            del self._due[container_id]
        return {i: one for i, one in ready.items() if i in agent.places and i not in agent.starting}

    def _wait_for_runtime(self, due: Mapping[str, _Due], wrong: Sequence[Correction]) -> None:
        """Look once more, later, at those whose updates the runtime may still be applying.

        That it is through shows only in its next request. Without one it is taken to be through
        when nothing changed between two looks.
        """
        unsure = {
            c.container_id: c.found for c in wrong if due[c.container_id].answered is not None
        }
        if unsure and unsure != self._unsure:
            at = self._clock.monotonic() + STILL
            for container_id in unsure:
                self._due.setdefault(container_id, replace(due[container_id], at=at))
            self._unsure = unsure
        else:
            self._unsure = {}

    def _ours(self, correction: Correction) -> bool:
        """Whether it is still meant, and not on its way anew."""
        overtaken = self._agent.is_overtaken(correction.update)
        return not (overtaken or correction.container_id in self._due)

    async def _written(
        self, corrections: Sequence[Correction]
    ) -> tuple[list[Correction], list[Correction]]:
        """Write cgroups: which are right now, and which could not be written."""
        right: list[Correction] = []
        failed: list[Correction] = []
        for number, correction in enumerate(corrections):
            if number % AT_ONCE == AT_ONCE - 1:
                await self._clock.sleep(0)
            container_id = correction.container_id
            place = self._agent.places.get(container_id)
            if place is None or not self._ours(correction):
                continue  # looked at again when what is on its way has arrived
            written = self._writer.write(place, str(correction.cpus), str(correction.mems))
            if written.problem and self._writer.busy:
                self.schedule_verification([container_id])
            elif written.problem:
                if written.problem != self._unwritable:
                    problem = self._unwritable = written.problem
                    log.warning("cgroup not written: the runtime is asked instead", problem=problem)
                failed.append(correction)
            elif not written.missing:
                self._agent.differences.forget(container_id)
                right.append(correction)
                if place.by_systemd:
                    self.schedule_verification([container_id])  # systemd has not got it yet
        return right, failed

    def _held_up(self, place: CgroupPlace) -> None:
        """Say that a write takes long, and look what came of it when it is through."""
        self._metrics.writes_held_up.inc()
        ids = [i for i, each in self._agent.places.items() if each == place]
        self.schedule_verification(ids)
        log.warning(
            "the kernel holds up writes of cpusets",
            ids=",".join(i[:12] for i in ids),
            because="another program's write of cpuset.mems moves memory",
        )

    def _report_late(self, right: Sequence[Correction], since: Mapping[str, float]) -> None:
        self._metrics.late_repairs.inc(len(right))
        for correction in right:
            known = self._agent.state.allocations.get(correction.container_id)
            if known is not None and known.kind is not Kind.UNBOUND:
                self._agent.notices.about(known, What.LATE, f"{correction.found}; put right")
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

    # --- regularly --------------------------------------------------------------------------------

    async def run_rounds(self, daemon: Daemon) -> None:
        """Look for drift until cancelled, and every second at containers whose cpuset was written.

        ``reconcile.interval`` 0 does neither until it is changed.
        """
        waited = step = 0.0
        written: set[str] = set()
        with CpusetWatch(self._writer.reader) as watch:
            while True:
                # In small steps, so that a reloaded interval counts at once.
                await self._clock.sleep(step)
                self._agent.differences.count_on()
                self.push_pending()
                settings = daemon.config.reconcile
                interval = parse_duration(settings.interval)
                if interval <= 0:
                    waited, step = 0.0, STEP
                    continue
                waited += step
                whole = waited >= interval
                waited = 0.0 if whole else waited
                step = min(STEP, interval - waited)
                starting = self._agent.starting
                places = {i: p for i, p in self._agent.places.items() if i not in starting}
                written |= await asyncio.to_thread(watch.written, places)
                self._report_unwatched(watch.problem)
                ready = {i for i in written if self._arrived(i)}
                written = (written & places.keys()) - ready
                if not (whole or ready):
                    continue
                try:
                    await self.round(
                        max_repairs=settings.max_repairs,
                        settle=min(SETTLE, interval),
                        without_runtime=settings.without_runtime,
                        only=None if whole else ready,
                    )
                except Exception:
                    # Containers are placed as well without it.
                    self._metrics.internal_errors.inc()
                    log.exception("reconcile failed")

    async def round(
        self,
        *,
        max_repairs: int = 3,
        window: float = REPAIR_WINDOW,
        settle: float = SETTLE,
        without_runtime: bool = False,
        only: Collection[str] | None = None,
    ) -> Round:
        """Look at every container once, and repair what is not as meant; times are in seconds.

        One that was repaired ``max_repairs`` times within ``window`` is left. ``without_runtime``
        writes cgroups while the runtime cannot be reached; ``only`` looks at these containers
        instead.
        """
        # Before the runtime has said what runs, what we remember may be long over.
        agent = self._agent
        if not agent.synchronized:
            return Round()
        differed = set(agent.differences.known) if only is None else set(only)
        looked, pool_changes = self._clock.time(), agent.pool_changes
        # A cgroup that the OCI runtime is just making may have no list yet.
        ids = agent.places if only is None else only
        first = await self._observe([i for i in ids if i not in agent.starting], quotas=True)
        if first is None:
            return Round()
        drifting = {c.container_id for c in first.corrections}
        if only is None:
            self._report_obstacles(first)
            self._forget_all_but(drifting, window)
        agent.differences.forget(*(differed - drifting))
        suspects = [c for c in first.corrections if self._arrived(c.container_id)]
        if not suspects:
            return Round(seen=first.seen)
        await self._clock.sleep(settle)
        before = {c.container_id: (c.cpus, c.mems) for c in suspects}
        second = await self._observe(before, quotas=True)
        if second is None:
            return Round(seen=first.seen)
        # Owners that come and go get the same CPUs again and again, so that two looks may see the
        # same and mean two different owners. Every change rewrites all that follow the pool.
        quiet = agent.pool_changes == pool_changes
        drifted = [
            c
            for c in second.corrections
            if self._arrived(c.container_id)
            and (c.cpus, c.mems) == before[c.container_id]
            and (quiet or not c.follows_pool)
        ]
        self._report(drifted)
        open_to_repair = [c for c in drifted if not (c.blocked or agent.observe)]
        fought = {c.container_id for c in open_to_repair if self._fought(c, max_repairs, window)}
        wrong = {c.container_id for c in second.corrections}
        agent.differences.update(  # of the unsure, what was known stays
            [i for i in before if i not in wrong],
            drifted,
            dict.fromkeys((c.container_id for c in drifted), looked),
            fought,
        )
        repairs = [c for c in open_to_repair if c.container_id not in fought]
        repaired: list[Correction] = []
        if repairs and (self._runtime.active or without_runtime):
            repaired = await self._repaired(repairs, "drift not repaired")
            self._report_repaired(repaired)
        return Round(
            seen=first.seen,
            drifted=tuple(c.container_id for c in drifted),
            repaired=tuple(c.container_id for c in repaired),
            given_up=tuple(c.container_id for c in drifted if c.container_id in fought),
        )

    def _arrived(self, container_id: str) -> bool:
        """Whether it runs, what is meant was sent, and the runtime is through with it."""
        agent = self._agent
        under_way = container_id in agent.starting or agent.is_pending(container_id)
        known = container_id in agent.state.allocations
        return known and not (under_way or container_id in self._due)

    def _report(self, drifted: Sequence[Correction]) -> None:
        """Count and say drift, once for as long as it stays the same."""
        new = [c for c in drifted if self._reported.get(c.container_id) != c.found]
        self._metrics.drift_found.inc(len(new))
        self._reported.update((c.container_id, c.found) for c in new)
        for correction in new:
            self._notice(correction, correction.found)
        observed = self._agent.observe
        _log_each(
            log.warning,
            "drift found",
            "more drift found",
            new,
            lambda c: {"repairable": not c.blocked, "observed": observed},
        )

    def _notice(self, correction: Correction, message: str, reason: str = "") -> None:
        allocation = self._agent.state.allocations.get(correction.container_id)
        if allocation is not None and not self._agent.observe:
            self._agent.notices.about(allocation, What.DRIFT, message, reason=reason)

    def _fought(self, correction: Correction, max_repairs: int, window: float) -> bool:
        container_id = correction.container_id
        past = self._repairs.get(container_id, deque())
        while past and past[0] <= self._clock.monotonic() - window:
            past.popleft()
        if len(past) < max_repairs:
            self._given_up.discard(container_id)
            return False
        if container_id not in self._given_up:
            self._given_up.add(container_id)
            self._metrics.drift_fights.inc()
            message = f"{correction.found}; put right {len(past)} times and rewritten again"
            self._notice(correction, message, "GivenUp")
            log.warning(
                "drift not repaired any more: another program keeps rewriting this container's "
                "cgroup",
                container=correction.name,
                id=container_id[:12],
                found=correction.found,
                repairs=len(past),
                window_seconds=round(window),
            )
        return True

    def _forget_all_but(self, drifting: set[str], window: float) -> None:
        """Drop what is remembered of containers that are right again, or are not there any more."""
        for container_id in self._reported.keys() - drifting:
            del self._reported[container_id]
        self._unmoved &= drifting
        oldest = self._clock.monotonic() - window
        for container_id in self._repairs.keys() - drifting:
            past = self._repairs[container_id]
            # Repairs outside the window are dropped before the next one, which may then fail.
            live = container_id in self._agent.state.allocations
            if not (live and past and past[-1] > oldest):
                del self._repairs[container_id]
                self._given_up.discard(container_id)

    def _report_repaired(self, right: Sequence[Correction]) -> None:
        self._metrics.drift_repaired.inc(len(right))
        for c in right:
            past = self._repairs.setdefault(c.container_id, deque())
            past.append(self._clock.monotonic())
            self._reported.pop(c.container_id, None)
            self._unmoved.discard(c.container_id)
        _log_each(log.info, "drift repaired", "more drift repaired", right)

    # --- looking ----------------------------------------------------------------------------------

    async def _observe(self, ids: Iterable[str], *, quotas: bool = False) -> Observation | None:
        """Read and compare in a thread; None when nothing can be read."""
        agent = self._agent
        places = [(i, place) for i in ids if (place := agent.places.get(i)) is not None]
        if not places:
            return Observation(0, ())
        state = agent.state
        # Only as long as the state is the one of now.
        agree = partial(self._scopes.agree, still=lambda: agent.state is state)
        try:
            return await asyncio.to_thread(
                observe,
                self._writer.reader,
                agent.machine,
                state,
                places,
                agent.narrowed_at,
                quotas=quotas,
                agree=None if agent.observe else agree,
            )
        except OSError as error:
            self._say_unreadable(f"{error.filename}: {error.strerror}")
            return None

    def _say_unreadable(self, problem: str) -> None:
        """Say once that drift cannot be found, and once that it can again."""
        if problem and not self._unreadable:
            log.warning("drift is not looked for", problem=problem)
        elif self._unreadable and not problem:
            log.info("drift is looked for again")
        self._unreadable = problem

    def _report_unwatched(self, problem: str) -> None:
        """Say once that drift is found by rounds alone."""
        if problem and problem != self._unwatched:
            log.warning("some cpusets are not watched: their drift is found later", problem=problem)
        self._unwatched = problem

    def _report_obstacles(self, found: Observation) -> None:
        """Say once what keeps a round from seeing or keeping things right, and once its end."""
        problem = next(iter(found.behind.values()), "")
        if problem and not self._behind:
            count = len(found.behind)
            log.warning(
                "systemd has other CPUs for scopes than cgroups", count=count, problem=problem
            )
        elif self._behind and not problem:
            log.info("systemd has the CPUs that cgroups have again")
        self._behind = problem
        places = len(self._agent.places)
        self._blind = self._blind + 1 if places and not found.seen else 0
        if not self._blind:
            self._say_unreadable("")
        elif self._blind >= BLIND_ROUNDS:
            hierarchy = self._writer.reader.hierarchy
            self._say_unreadable(f"none of {places} containers has a cgroup below {hierarchy}")

    # --- sending ----------------------------------------------------------------------------------

    async def _repaired(self, corrections: Sequence[Correction], event: str) -> list[Correction]:
        """Send corrections and read them back; those that are right now.

        ``event`` is logged when they cannot be sent.
        """
        left = list(corrections)
        right: list[Correction] = []
        for _ in range(RACES):
            taken = await self._send_in_chunks(left, event)
            if not taken:
                break
            await self._clock.sleep(READ_BACK)
            sent = {c.container_id: (c.cpus, c.mems) for c in taken}
            found = await self._observe(sent, quotas=True)
            if found is None:
                break
            wrong = {c.container_id: c for c in found.corrections}
            live = self._agent.state.allocations
            # What systemd may undo is not right yet, and its return would be no fight.
            right += [
                c
                for c in taken
                if (i := c.container_id) in live and i not in wrong and i not in found.behind
            ]
            self._say_unmoved([c for i, c in wrong.items() if (c.cpus, c.mems) == sent[i]])
            # Meant to have something else since: our push may have overtaken the answer to a
            # request. What still has what was meant when we sent it is for the next round.
            left = [c for i, c in wrong.items() if not c.blocked and (c.cpus, c.mems) != sent[i]]
            if not left:
                break
        self._agent.differences.forget(*(c.container_id for c in right))
        return right

    async def _send_in_chunks(
        self, corrections: Sequence[Correction], event: str
    ) -> list[Correction]:
        """Send in the order of the plan, a few at a time; those that the runtime took.

        Wherever this ends, what was sent is right, and the next round goes on from there.
        """
        for start in range(0, len(corrections), CHUNK):
            result = await self.send([c.update for c in corrections[start : start + CHUNK]])
            if not result.ok:
                left = len(corrections) - start
                log.warning(event, containers=left, detail=result.detail)
                return list(corrections[:start])
        return list(corrections)

    async def send(self, updates: Sequence[ContainerUpdate]) -> PushResult:
        """Send updates, at most one for each container, by the way that is safe.

        While the runtime cannot be reached cgroups are written: its own record is right then, and
        what only it can write (limits of CPUs and memory) fails.
        """
        runtime, agent = self._runtime, self._agent
        if runtime.active and runtime.takes_updates:
            return await runtime.push(updates)
        left: list[ContainerUpdate] = []
        for number, update in enumerate(updates):
            if number % AT_ONCE == AT_ONCE - 1:
                await self._clock.sleep(0)
            if agent.is_overtaken(update):
                continue
            limits = (update.cpu_quota, update.cpu_shares, update.memory_limit)
            place = agent.places.get(update.container_id, CgroupPlace())
            if any(limit is not None for limit in limits) or (
                self._writer.write(place, update.cpus, update.mems).problem
            ):
                left.append(update)
            elif runtime.active:
                agent.ride(update)
        if not left:
            return PushResult()
        if runtime.active:
            return await runtime.push(left)
        ids = ", ".join(u.container_id[:12] for u in left[:8])
        return PushResult(f"not written, and no runtime to ask: {ids}")

    def _say_unmoved(self, corrections: Sequence[Correction]) -> None:
        """Say once that the runtime took an update and the cgroup is as before.

        That is no repair: it is tried again in each round.
        """
        new = [c for c in corrections if c.container_id not in self._unmoved]
        self._unmoved.update(c.container_id for c in new)
        for correction in new:
            self._notice(correction, f"{correction.found}; not put right: {UNMOVED}")
        _log_each(
            log.warning,
            "drift not repaired",
            "more drift not repaired",
            new,
            lambda c: {"because": UNMOVED},
        )

    def push_pending(self) -> None:
        """Send updates that have waited long enough for a reply to ride on.

        A push may wait for a quiet moment of the runtime itself, so it is a task of its own.
        """
        if self._pushing is not None and not self._pushing.done():
            return
        if not self._agent.has_pending or not self._runtime.active:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = self._clock.monotonic()
        elif self._clock.monotonic() - self._pending_since >= PENDING_SECONDS:
            self._pending_since = None
            self._pushing = asyncio.create_task(self._push_pending(), name="push")

    async def _push_pending(self) -> None:
        updates = self._agent.take_pending()
        result = await self.send(updates)
        if result.ok:
            self._agent.overtaken(updates)
            self.schedule_verification([u.container_id for u in updates])
        else:
            log.warning("updates not pushed", count=len(updates), detail=result.detail)
            self._agent.put_back(updates)


def _log_each(
    say: Callable[..., None],
    event: str,
    more: str,
    corrections: Sequence[Correction],
    fields: Callable[[Correction], dict[str, object]] = lambda c: {},
) -> None:
    """A line for each of the first, and one with the number of all others."""
    for c in corrections[:LOGGED_AT_ONCE]:
        say(event, container=c.name, id=c.container_id[:12], found=c.found, **fields(c))
    if len(corrections) > LOGGED_AT_ONCE:
        say(more, containers=len(corrections) - LOGGED_AT_ONCE)


# --- Looking, in a thread ---


def observe(
    reader: CgroupReader,
    machine: Machine,
    state: NodeState,
    places: Sequence[tuple[str, CgroupPlace]],
    narrowed_at: float | None,
    pause: Callable[[float], object] = time.sleep,
    *,
    quotas: bool = False,
    agree: Agree | None = None,
) -> Observation:
    """Read cgroups and compare them with one state; runs in a thread.

    The interpreter is held for a batch at a time only. With ``quotas`` the CPU limit counts too, of
    containers whose limit was lifted; ``agree`` lets systemd have what cgroups have that are right.

    Raises:
        OSError: the cgroup file system is not there at all.
    """
    if not reader.available():
        raise FileNotFoundError(errno.ENOENT, "no cgroup file system here", reader.hierarchy)
    seen, where = 0, dict(places)
    found: list[Correction] = []
    behind: dict[str, str] = {}
    for start in range(0, len(places), BATCH):
        if start:
            pause(PAUSE)
        observed = observe_all(reader, places[start : start + BATCH])
        seen += len(observed)
        if quotas:
            _add_quotas(reader, state, places[start : start + BATCH], observed)
        corrections = plan_corrections(machine, state, observed, narrowed_at)
        if agree is not None and reader.unified:
            right = observed.keys() - {c.container_id for c in corrections}
            behind |= _behind(machine, state, {i: where[i] for i in right}, observed, agree)
        for one in corrections:
            way = partial(reader.in_the_way, where[one.container_id])
            found.append(
                one.kept_from(way("cpuset.cpus", str(one.cpus)), way("cpuset.mems", str(one.mems)))
            )
    return Observation(seen, tuple(sorted(found, key=lambda correction: correction.order)), behind)


def _behind(
    machine: Machine,
    state: NodeState,
    right: Mapping[str, CgroupPlace],
    observed: Mapping[str, Observed],
    agree: Agree,
) -> dict[str, str]:
    """Of containers whose cgroups are as meant, those for which systemd has something else."""
    pool = state.pool(machine.topology, machine.settings)
    found: dict[str, str] = {}
    for container_id, place in right.items():
        allocation = state.allocations.get(container_id)
        if not place.by_systemd or allocation is None or allocation.kind is Kind.FOREIGN:
            continue
        cpus = effective_cpus(allocation, pool, machine.topology, state.withheld_bits) or pool
        # One that was never bound has no list of its own, and systemd has none for it.
        if observed[container_id].cpus & machine.topology.online != cpus:
            continue
        try:
            problem = agree(place, cpus, allocation.mems & machine.topology.memory_nodes)
        except OSError as error:
            found[container_id] = f"no answer over D-Bus: {error.strerror or error}"
            break  # each would wait as long
        if problem:
            found[container_id] = problem
    return found


def _add_quotas(
    reader: CgroupReader,
    state: NodeState,
    places: Sequence[tuple[str, CgroupPlace]],
    observed: dict[str, Observed],
) -> None:
    for container_id, place in places:
        allocation = state.allocations.get(container_id)
        if container_id in observed and allocation is not None and allocation.quota is not None:
            quota = reader.quota(place)
            observed[container_id] = replace(observed[container_id], quota=quota)


# --- What containers really have ---


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has instead of what is meant.

    Attributes:
        cpus: kernel list that it can really use.
        mems: kernel list of its memory nodes.
        meant_cpus: kernel list that it should be able to use; empty where it is so.
        meant_mems: kernel list of memory nodes, likewise.
        since: Unix time from which on it was so, as far as seen.
        intruder: it can run on CPUs that another container owns.
        obstacle: which cgroup keeps it from what is meant; empty when none does.
        found: what the cgroup says, for people.
        given_up: it was put right again and again, and is left to what rewrites it.
    """

    cpus: str
    mems: str
    meant_cpus: str = ""
    meant_mems: str = ""
    since: float
    intruder: bool
    found: str
    obstacle: str = ""
    given_up: bool = False

    @property
    def text(self) -> str:
        """Both sides: ``meant 4-7, has 0-7; memory nodes: meant 0, has 0-1``.

        What is neither is said as it was found.
        """
        parts = []
        if self.meant_cpus:
            parts.append(f"meant {self.meant_cpus}, has {self.cpus or 'none'}")
        if self.meant_mems:
            parts.append(f"memory nodes: meant {self.meant_mems}, has {self.mems or 'none'}")
        if parts and self.obstacle:
            parts.append(self.obstacle)
        return "; ".join(parts) or self.found


Known = Mapping[str, Difference]
"""By container id; never changes, so that it can be read from any thread."""


class Differences:
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
        self.known: Known = MappingProxyType({})

    def update(
        self,
        container_ids: Iterable[str],
        corrections: Iterable[Correction],
        since: Mapping[str, float] | None = None,
        given_up: Collection[str] | None = None,
    ) -> None:
        """Take in what a look at some containers showed; the others of them are as meant.

        ``since`` are Unix times from which on it can have been so, where that is known;
        ``given_up`` are those that are left to what rewrites them, None: as before.
        """
        self.count_on()
        wrong = {c.container_id: c for c in corrections}
        after = dict(self.known)
        for container_id in container_ids:
            if container_id not in wrong:
                after.pop(container_id, None)
        for container_id, one in wrong.items():
            known = after.get(container_id)
            began = known.since if known else (since or {}).get(container_id, self._clock.time())
            intruder = one.rank == 0
            if known and known.intruder != intruder:
                began = self._counted
            if intruder and not (known and known.intruder):
                self._metrics.neighbours_seen.inc()
                self._metrics.neighbour_seconds.inc(max(0.0, self._counted - began))
            if given_up is None:
                left = known is not None and known.given_up
            else:
                left = container_id in given_up
            after[container_id] = Difference(
                cpus=str(one.has_cpus),
                mems=str(one.has_mems),
                meant_cpus=str(one.meant_cpus),
                meant_mems=str(one.meant_mems),
                since=began,
                intruder=intruder,
                found=one.found,
                obstacle=one.obstacle,
                given_up=left,
            )
        self._swap(after)

    def forget(self, *container_ids: str) -> None:
        """They are as meant, or gone."""
        gone = self.known.keys() & set(container_ids)
        if not gone:
            return
        self.count_on()
        self._swap({i: one for i, one in self.known.items() if i not in gone})

    def count_on(self) -> None:
        """Count the seconds since the last call of those on exclusive CPUs of others."""
        now = self._clock.time()
        seconds, self._counted = max(0.0, now - self._counted), now
        self._metrics.neighbour_seconds.inc(seconds * sum(d.intruder for d in self.known.values()))

    def _swap(self, after: dict[str, Difference]) -> None:
        if after == self.known:
            return
        self.known = MappingProxyType(after)
        self._metrics.neighbours.set(sum(one.intruder for one in after.values()))
        self._agent.notify()
