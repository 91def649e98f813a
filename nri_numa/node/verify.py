"""Looks right away: did what was decided arrive in the cgroups of those it concerns?

A runtime that takes an update down has not necessarily applied it: the container may have been on
its way to its start, or ended and begun anew. So after every reply that changes others, after each
start and after a synchronisation the cgroups of the containers concerned are read, in a thread and
within a budget, and what differs is put right at once: by writing the cgroup, since the runtime's
own record is right already, or through the runtime where cgroups cannot be written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.resync import Correction
from nri_numa.engine.state import Kind
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, CgroupWriter
from nri_numa.machine.scopes import Scopes
from nri_numa.node.agent import Agent
from nri_numa.node.reconcile import READ_BACK, SAID_AT_ONCE, agreement, look
from nri_numa.node.sending import Push
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import What

log = get_logger("verify")

STILL: Final = 5.0
"""Seconds without a change in any cgroup, after which the runtime is taken to be through."""
TURN: Final = 0.01
"""Seconds between two looks while there is something to look at."""
SHARE: Final = 10
"""A look is followed by this many times its own length of rest: a tenth of a core at most."""
AT_ONCE: Final = 10
"""Cgroups written in one go, each some tens of microseconds."""


class _Due(msgspec.Struct, frozen=True):
    """When a container is worth a look.

    Attributes:
        at: time of the first look.
        handled: requests that were answered by then; with one more the runtime, which applies the
            updates of a reply before it asks again, is through. None where it applies nothing.
        since: Unix time of the first reply that nobody has verified yet.
    """

    at: float
    handled: int | None
    since: float


class Verifier:
    """Reads back what replies should have brought about. One task on the loop.

    Args:
        agent: has the state; its `concern` is set.
        metrics: counted into.
        push: sends updates that no request asked for.
        reader: reads cgroups.
        scopes: systemd's view of them.
        writer: writes them.
        handled: how many requests of the runtime have been answered.
        now: seconds of a clock that never jumps.
        wall: Unix time.
        sleep: waits.
    """

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        push: Push,
        *,
        reader: CgroupReader,
        scopes: Scopes,
        writer: CgroupWriter,
        handled: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._agent = agent
        self._metrics = metrics
        self._push = push
        self._reader = reader
        self._scopes = scopes
        self._writer = writer
        self._handled = handled
        self._now = now
        self._wall = wall
        self._sleep = sleep
        self._due: dict[str, _Due] = {}
        self._unsure: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._trouble = ""
        agent.concern = self.concern
        writer.held_up = self._held_up

    def concern(self, container_ids: Collection[str], applying: int = 0) -> None:
        """Look at these containers as soon as the updates for them have been applied.

        Args:
            container_ids: who.
            applying: how many updates the runtime applies first.
        """
        at = self._now() + (STILL if applying else 0.0)
        handled, wall = self._handled() if applying else None, self._wall()
        fresh = _Due(at, handled, wall)
        for container_id in container_ids:
            known = self._due.get(container_id)
            self._due[container_id] = fresh if known is None else _Due(at, handled, known.since)
        self._wake.set()

    def awaits(self, container_id: str) -> bool:
        """Whether this one is to be looked at: the runtime may still be applying its update."""
        return container_id in self._due

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._wake.wait()
            began = self._now()
            try:
                await self.look()
            except Exception:
                # Drift is looked for as well; containers are placed without either.
                self._metrics.internal_errors.inc()
                log.exception("verifying failed")
            if not self._due:
                self._wake.clear()
            await self._sleep(max(TURN, SHARE * (self._now() - began)))

    async def look(self) -> None:
        """Look at whoever is due, and put right what is not as meant."""
        if self._writer.busy:
            return  # whatever is read now may be written over in a moment
        due = self._take()
        if not due:
            return
        agent = self._agent
        places = {i: place for i in due if (place := agent.places.get(i)) is not None}
        wrong = await self._wrong(places)
        if wrong is None:
            return
        self._wait_for_runtime(due, wrong)
        since = {i: one.since for i, one in due.items()}
        agent.differences.looked(
            [i for i in due if i not in self._due], [c for c in wrong if self._ours(c)], since
        )
        left = [c for c in wrong if not c.blocked]
        if agent.observe or not left:
            return
        right, failed = await self._write(left, places)
        if failed:
            right += await self._through_runtime(failed, places)
        self._tell(right, since)

    # --- inside -----------------------------------------------------------------------------------

    def _take(self) -> dict[str, _Due]:
        """Take out whoever is due; containers being started are looked at when they run."""
        now, handled, agent = self._now(), self._handled(), self._agent
        ready: dict[str, _Due] = {}
        for container_id, one in self._due.items():
            if one.handled is not None and one.handled < handled:
                ready[container_id] = replace(one, handled=None)
            elif one.at <= now or container_id not in agent.places:
                ready[container_id] = one
        for container_id in ready:
            del self._due[container_id]
        return {i: one for i, one in ready.items() if i in agent.places and i not in agent.starts}

    def _wait_for_runtime(self, due: Mapping[str, _Due], wrong: Sequence[Correction]) -> None:
        """Look once more, later, at those whose updates the runtime may still be applying.

        It tells when it is through only by its next request. Without one it is taken to be through
        when nothing changed between two looks.
        """
        unsure = {c.container_id: c.found for c in wrong if due[c.container_id].handled is not None}
        if unsure and unsure != self._unsure:
            at = self._now() + STILL
            for container_id in unsure:
                self._due.setdefault(container_id, replace(due[container_id], at=at))
            self._unsure = unsure
        else:
            self._unsure = {}

    async def _wrong(self, places: Mapping[str, CgroupPlace]) -> list[Correction] | None:
        """Read and compare in a thread; None when nothing can be read."""
        agent = self._agent
        if not places:
            return []
        known = list(places.items())
        try:
            found = await asyncio.to_thread(
                partial(look, agree=agreement(agent, self._scopes)),
                self._reader,
                agent.machine,
                agent.state,
                known,
                agent.narrowed_at,
            )
        except OSError as error:
            log.debug("cgroups not read", problem=str(error))
            return None
        return list(found.corrections)

    def _ours(self, correction: Correction) -> bool:
        """Whether it is still meant, and not on its way anew."""
        overtaken = self._agent.is_overtaken(correction.update)
        return not (overtaken or correction.container_id in self._due)

    async def _write(
        self, corrections: Sequence[Correction], places: Mapping[str, CgroupPlace]
    ) -> tuple[list[Correction], list[Correction]]:
        """Write cgroups: who has what is meant now, and whose cgroup could not be written."""
        right: list[Correction] = []
        failed: list[Correction] = []
        for number, correction in enumerate(corrections):
            if number % AT_ONCE == AT_ONCE - 1:
                await self._sleep(0)
            if not self._ours(correction):
                continue  # looked at again when what is on its way has arrived
            place = places[correction.container_id]
            written = self._writer.write(place, str(correction.cpus), str(correction.mems))
            if written.problem and self._writer.busy:
                self.concern([correction.container_id])
            elif written.problem:
                self._say_trouble(written.problem)
                failed.append(correction)
            elif not written.missing:
                self._agent.differences.forget(correction.container_id)
                right.append(correction)
                if place.by_systemd:
                    self.concern([correction.container_id])  # systemd has not got it yet
        return right, failed

    async def _through_runtime(
        self, corrections: Sequence[Correction], places: Mapping[str, CgroupPlace]
    ) -> list[Correction]:
        result = await self._push([c.update for c in corrections])
        if not result.ok:
            log.warning("late containers not put right", detail=result.detail)
            return []
        await self._sleep(READ_BACK)
        ids = [c.container_id for c in corrections]
        wrong = await self._wrong({i: places[i] for i in ids})
        if wrong is None:
            return []
        self._agent.differences.looked(ids, [c for c in wrong if self._ours(c)])
        still = {c.container_id for c in wrong}
        return [c for c in corrections if c.container_id not in still]

    def _held_up(self, place: CgroupPlace) -> None:
        """Say that a write takes long, and look what came of it when it is through."""
        self._metrics.writes_held_up.inc()
        ids = [i for i, each in self._agent.places.items() if each == place]
        self.concern(ids)
        log.warning(
            "the kernel holds up writes of cpusets",
            ids=",".join(i[:12] for i in ids),
            because="somebody's write of cpuset.mems moves memory",
        )

    def _say_trouble(self, problem: str) -> None:
        if problem != self._trouble:
            log.warning("cgroup not written: the runtime is asked instead", problem=problem)
        self._trouble = problem

    def _tell(self, right: Sequence[Correction], since: Mapping[str, float]) -> None:
        self._metrics.late_repairs.inc(len(right))
        for correction in right:
            known = self._agent.state.allocations.get(correction.container_id)
            if known is not None and known.kind is not Kind.UNBOUND:
                self._agent.notices.about(known, What.LATE, f"{correction.found}; put right")
        for correction in right[:SAID_AT_ONCE]:
            log.warning(
                "late container put right",
                container=correction.name,
                id=correction.container_id[:12],
                found=correction.found,
                on_owned_cpus=correction.rank == 0,
                seconds=round(self._wall() - since[correction.container_id], 3),
            )
        if len(right) > SAID_AT_ONCE:
            log.warning("more late containers put right", containers=len(right) - SAID_AT_ONCE)
