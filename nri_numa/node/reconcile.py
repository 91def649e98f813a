"""Drift: somebody rewrote a container's cgroup. Found by reading, repaired through the runtime.

Every round reads the real cgroup files in a thread, some at a time with pauses, and compares there:
the loop only ever hears of containers that are not as meant. A container whose file was written
(inotify) is looked at within a second, without waiting for the round. Those that are not as meant
are looked at once more after a moment, because an update may have been on its way. What remains is
repaired through the runtime, whose own record of the container is put right by that as well, and
read back: a repair counts when the kernel says so. What the kernel would refuse, because of a
cgroup above or below, is not sent: that cgroup is named, and the repair follows when it is out of
the way.

Somebody who rewrites the same container again and again is not fought for ever. After
``maxRepairs`` within `REPAIR_WINDOW` that is reported, and the container left to them until the
window has passed.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.config import AgentConfig, parse_duration
from nri_numa.engine.decision import Machine
from nri_numa.engine.resync import Correction, plan_corrections
from nri_numa.engine.state import Kind, NodeState, effective_cpus
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, Scopes, observe_all
from nri_numa.machine.cpuset import CPUSet, NUMASet
from nri_numa.machine.cpuset_watch import CpusetWatch
from nri_numa.machine.model import Observed
from nri_numa.node.agent import Agent
from nri_numa.node.sending import Push
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import What

log = get_logger("reconcile")

REPAIR_WINDOW: Final = 600.0
"""Seconds in which repairs of one container are counted."""
BATCH: Final = 25
"""Containers read without a pause: about a millisecond."""
PAUSE: Final = 0.002
"""Seconds in which the thread wants nothing, so that the loop gets its turn."""
STEP: Final = 1.0
"""Seconds between two looks at whose cpuset was written."""
SETTLE: Final = 1.0
"""Seconds between the two looks: an update that rides on an answer has arrived by then."""
SAID_AT_ONCE: Final = 20
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


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round came to, by container id.

    Attributes:
        seen: containers that have a cgroup.
        drifted: not as meant, and that after the second look too.
        repaired: put right, as read back.
        given_up: repaired so often lately that it is left to whoever rewrites it.
    """

    seen: int = 0
    drifted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()


Agree = Callable[[CgroupPlace, CPUSet, NUMASet], str]
"""Lets systemd have for a scope what its cgroup has; why it has not, see `Scopes.agree`."""


class _Look(msgspec.Struct, frozen=True):
    """What a look at some containers showed.

    Attributes:
        seen: how many have a cgroup.
        corrections: those that are not as meant.
        behind: by container id, why systemd has something else for a cgroup that is as meant.
    """

    seen: int
    corrections: tuple[Correction, ...]
    behind: Mapping[str, str] = msgspec.field(default_factory=dict)


class Reconciler:
    """Looks for drift and repairs it. One task; everything but reading happens on the loop."""

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        push: Push,
        *,
        reader: CgroupReader,
        scopes: Scopes,
        active: Callable[[], bool] = lambda: True,
        awaited: Callable[[str], bool] = lambda container_id: False,
        alone: Push | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Make a reconciler.

        Args:
            agent: has the state.
            metrics: counted into.
            push: sends updates that no request asked for.
            reader: reads cgroups.
            scopes: systemd's view of them.
            awaited: whether the runtime may still be applying an update of a container.
            active: whether the runtime can be reached; without it, drift waits for the next
                synchronisation, which repairs it too.
            alone: makes updates true without the runtime, where that is wanted.
            now: seconds of a clock that never jumps.
            wall: Unix time, the clock of decisions.
            sleep: waits.
        """
        self._agent = agent
        self._metrics = metrics
        self._push = push
        self._reader = reader
        self._scopes = scopes
        self._active = active
        self._awaited = awaited
        self._alone = alone
        self._now = now
        self._wall = wall
        self._sleep = sleep
        self._repairs: dict[str, deque[float]] = {}
        self._given_up: set[str] = set()
        self._said: dict[str, str] = {}
        self._unmoved: set[str] = set()
        self._trouble = ""
        self._behind = ""
        self._unwatched = ""
        self._blind = 0

    async def run(self, config: Callable[[], AgentConfig]) -> None:
        """Do rounds until cancelled, and look every second at containers whose cpuset was written.

        ``reconcile.interval`` 0 does neither until it is changed.
        """
        waited = step = 0.0
        written: set[str] = set()
        with CpusetWatch(self._reader) as watch:
            while True:
                # In small steps, so that a reloaded interval counts at once.
                await self._sleep(step)
                self._agent.differences.count_on()
                settings = config().reconcile
                interval = parse_duration(settings.interval)
                if interval <= 0:
                    waited, step = 0.0, STEP
                    continue
                waited += step
                whole = waited >= interval
                waited = 0.0 if whole else waited
                step = min(STEP, interval - waited)
                starts = self._agent.starts
                places = {i: p for i, p in self._agent.places.items() if i not in starts}
                written |= await asyncio.to_thread(watch.written, places)
                self._say_unwatched(watch.problem)
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
        """Look at every container once, and repair what is not as meant.

        Args:
            max_repairs: repairs of one container within ``window`` before it is given up.
            window: seconds.
            settle: seconds between the two looks.
            without_runtime: repair by ourselves while the runtime cannot be reached.
            only: look at these containers instead.
        """
        # Before the runtime has told what runs, what we remember may be long gone.
        if not self._agent.synchronized:
            return Round()
        differed = set(self._agent.differences) if only is None else set(only)
        looked, pool_changes = self._wall(), self._agent.pool_changes
        first = await self._look(only)
        if first is None:
            return Round()
        drifting = {c.container_id for c in first.corrections}
        if only is None:
            self._forget_all_but(drifting, window)
        self._agent.differences.forget(*(differed - drifting))
        suspects = [c for c in first.corrections if self._arrived(c.container_id)]
        if not suspects:
            return Round(seen=first.seen)
        await self._sleep(settle)
        second = await self._look({c.container_id for c in suspects})
        if second is None:
            return Round(seen=first.seen)
        before = {c.container_id: c for c in suspects}
        # Owners that come and go get the same CPUs again and again, so that two looks may see the
        # same and mean two different owners. Every change rewrites all that follow the pool.
        quiet = self._agent.pool_changes == pool_changes
        drifted = [
            c
            for c in second.corrections
            if self._arrived(c.container_id)
            and (c.cpus, c.mems) == (before[c.container_id].cpus, before[c.container_id].mems)
            and (quiet or not c.follows_pool)
        ]
        given_up: list[str] = []
        repairs: list[Correction] = []
        self._report(drifted)
        for correction in drifted:
            if correction.blocked or self._agent.observe:
                continue
            if self._fought(correction, max_repairs, window):
                given_up.append(correction.container_id)
            else:
                repairs.append(correction)
        self._show(suspects, second, drifted, given_up, looked)
        push = self._push if self._active() else self._alone if without_runtime else None
        repaired = await self._repair(repairs, push) if repairs and push is not None else []
        return Round(
            seen=first.seen,
            drifted=tuple(c.container_id for c in drifted),
            repaired=tuple(repaired),
            given_up=tuple(given_up),
        )

    # --- looking ----------------------------------------------------------------------------------

    def _notice(self, correction: Correction, message: str, reason: str = "") -> None:
        allocation = self._agent.state.allocations.get(correction.container_id)
        if allocation is not None and not self._agent.observe:
            self._agent.notices.about(allocation, What.DRIFT, message, reason=reason)

    async def _look(self, only: Collection[str] | None) -> _Look | None:
        """Read and compare in a thread; None when nothing can be read.

        A cgroup that the OCI runtime is just making may have no list yet.
        """
        agent = self._agent
        ids = agent.places if only is None else only
        known = [(i, agent.places[i]) for i in ids if i in agent.places and i not in agent.starts]
        if not known:
            return _Look(0, ())
        try:
            found = await asyncio.to_thread(
                partial(look, quotas=True, agree=agreement(agent, self._scopes)),
                self._reader,
                agent.machine,
                agent.state,
                known,
                agent.narrowed_at,
            )
        except OSError as error:
            self._unreadable(f"{error.filename}: {error.strerror}")
            return None
        if only is None:
            self._say_behind(found.behind)
            self._blind = 0 if found.seen else self._blind + 1
            if not self._blind:
                self._unreadable("")
            elif self._blind >= BLIND_ROUNDS:
                self._unreadable(
                    f"none of {len(known)} containers has a cgroup below {self._reader.hierarchy}"
                )
        return found

    def _unreadable(self, problem: str) -> None:
        """Say once that drift cannot be found, and once that it can again."""
        if problem and not self._trouble:
            log.warning("drift is not looked for", problem=problem)
        elif self._trouble and not problem:
            log.info("drift is looked for again")
        self._trouble = problem

    def _say_behind(self, behind: Mapping[str, str]) -> None:
        """Say once that systemd may undo what cgroups have, and once that it will not any more."""
        problem = next(iter(behind.values()), "")
        if problem and not self._behind:
            log.warning(
                "systemd has other CPUs for scopes than cgroups", count=len(behind), problem=problem
            )
        elif self._behind and not problem:
            log.info("systemd has the CPUs that cgroups have again")
        self._behind = problem

    def _say_unwatched(self, problem: str) -> None:
        """Say once that drift is found by rounds alone."""
        if problem and problem != self._unwatched:
            log.warning("some cpusets are not watched: their drift is found later", problem=problem)
        self._unwatched = problem

    def _arrived(self, container_id: str) -> bool:
        """Whether it runs, what is meant was sent, and the runtime is through with it."""
        agent = self._agent
        under_way = container_id in agent.starts or agent.is_pending(container_id)
        known = container_id in agent.state.allocations
        return known and not (under_way or self._awaited(container_id))

    # --- judging ----------------------------------------------------------------------------------

    def _report(self, drifted: Sequence[Correction]) -> None:
        """Count and say drift, once for as long as it stays the same."""
        new = [c for c in drifted if self._said.get(c.container_id) != c.found]
        self._metrics.drift_found.inc(len(new))
        self._said.update((c.container_id, c.found) for c in new)
        for correction in new:
            self._notice(correction, correction.found)
        for correction in new[:SAID_AT_ONCE]:
            log.warning(
                "drift found",
                container=correction.name,
                id=correction.container_id[:12],
                found=correction.found,
                repairable=not correction.blocked,
                observed=self._agent.observe,
            )
        if len(new) > SAID_AT_ONCE:
            log.warning("more drift found", containers=len(new) - SAID_AT_ONCE)

    def _show(
        self,
        suspects: Sequence[Correction],
        second: _Look,
        drifted: Sequence[Correction],
        given_up: Collection[str],
        since: float,
    ) -> None:
        """Let everybody see what containers really have; of the unsure, what was known stays."""
        wrong = {c.container_id for c in second.corrections}
        self._agent.differences.looked(
            [c.container_id for c in suspects if c.container_id not in wrong],
            drifted,
            {c.container_id: since for c in drifted},
            given_up,
        )

    def _fought(self, correction: Correction, max_repairs: int, window: float) -> bool:
        container_id = correction.container_id
        past = self._repairs.get(container_id, deque())
        while past and past[0] <= self._now() - window:
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
                "drift not repaired any more: somebody keeps rewriting this container's cgroup",
                container=correction.name,
                id=container_id[:12],
                found=correction.found,
                repairs=len(past),
                window_seconds=round(window),
            )
        return True

    def _forget_all_but(self, drifting: set[str], window: float) -> None:
        """Drop what is remembered of containers that are right again, or gone."""
        for container_id in self._said.keys() - drifting:
            del self._said[container_id]
        self._unmoved &= drifting
        oldest = self._now() - window
        for container_id, past in list(self._repairs.items()):
            if container_id in drifting:
                continue
            gone = container_id not in self._agent.state.allocations
            # Repairs outside the window are dropped before the next one, which may then fail.
            if gone or not past or past[-1] <= oldest:
                del self._repairs[container_id]
                self._given_up.discard(container_id)

    # --- repairing --------------------------------------------------------------------------------

    async def _repair(self, corrections: Sequence[Correction], push: Push) -> list[str]:
        """Push corrections and read them back; the ids of containers that are right now."""
        names = {c.container_id: c for c in corrections}
        left: Sequence[Correction] = corrections
        right: list[str] = []
        for _ in range(RACES):
            taken = await self._send(left, push)
            if not taken:
                break
            await self._sleep(READ_BACK)
            sent = {c.container_id: (c.cpus, c.mems) for c in taken}
            look_again = await self._look(sent)
            if look_again is None:
                break
            wrong = {c.container_id: c for c in look_again.corrections}
            live = self._agent.state.allocations
            # What systemd may undo is not right yet, and its return would be no fight.
            right += [
                i for i in sent if i in live and i not in wrong and i not in look_again.behind
            ]
            self._say_unmoved([c for i, c in wrong.items() if (c.cpus, c.mems) == sent[i]])
            # Meant to have something else since: our push may have overtaken the answer to a
            # request. Whoever still has what was meant when we sent it is for the next round.
            left = [c for i, c in wrong.items() if not c.blocked and (c.cpus, c.mems) != sent[i]]
            if not left:
                break
        self._metrics.drift_repaired.inc(len(right))
        self._agent.differences.forget(*right)
        for number, container_id in enumerate(right):
            self._repairs.setdefault(container_id, deque()).append(self._now())
            self._said.pop(container_id, None)
            self._unmoved.discard(container_id)
            if number < SAID_AT_ONCE:
                correction = names[container_id]
                log.info(
                    "drift repaired",
                    container=correction.name,
                    id=container_id[:12],
                    found=correction.found,
                )
        if len(right) > SAID_AT_ONCE:
            log.info("more drift repaired", containers=len(right) - SAID_AT_ONCE)
        return right

    def _say_unmoved(self, corrections: Sequence[Correction]) -> None:
        """Say once that the runtime took an update and the cgroup is as before.

        That is no repair: it is tried again in each round.
        """
        new = [c for c in corrections if c.container_id not in self._unmoved]
        self._unmoved.update(c.container_id for c in new)
        for correction in new:
            self._notice(correction, f"{correction.found}; not put right: {UNMOVED}")
        for correction in new[:SAID_AT_ONCE]:
            log.warning(
                "drift not repaired",
                container=correction.name,
                id=correction.container_id[:12],
                found=correction.found,
                because=UNMOVED,
            )

    async def _send(self, corrections: Sequence[Correction], push: Push) -> list[Correction]:
        """Push in the order of the plan, a few at a time; those that the runtime took.

        Wherever this ends, what was sent is right, and the next round goes on from there.
        """
        taken: list[Correction] = []
        for start in range(0, len(corrections), CHUNK):
            chunk = corrections[start : start + CHUNK]
            result = await push([c.update for c in chunk])
            if not result.ok:
                left = len(corrections) - start
                log.warning("drift not repaired", containers=left, detail=result.detail)
                break
            taken += chunk
        return taken


def look(
    reader: CgroupReader,
    machine: Machine,
    state: NodeState,
    places: Sequence[tuple[str, CgroupPlace]],
    narrowed_at: float | None,
    pause: Callable[[float], object] = time.sleep,
    *,
    quotas: bool = False,
    agree: Agree | None = None,
) -> _Look:
    """Read cgroups and compare them with one state; runs in a thread.

    Args:
        reader: reads cgroups.
        machine: topology and settings.
        state: what was meant; a whole one, whatever happens on the loop meanwhile.
        places: container ids and where their cgroups are.
        narrowed_at: see `plan_corrections`.
        pause: lets the loop run; the interpreter is held for a batch at a time only.
        quotas: look at the CPU limit too, of those whose limit was lifted.
        agree: lets systemd have what the cgroups have that are as meant.

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
    return _Look(seen, tuple(sorted(found, key=lambda correction: correction.order)), behind)


def agreement(agent: Agent, scopes: Scopes) -> Agree | None:
    """Let systemd have what cgroups have, as long as the state is the one of now."""
    state = agent.state

    def still() -> bool:
        return agent.state is state

    return None if agent.observe else partial(scopes.agree, still=still)


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
