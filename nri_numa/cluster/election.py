"""Takes part in the election that a Lease is: asks the API server, and says whether we lead.

The rules are those of `nri_numa.cluster.lease`; here are the clock and the connection. A Lease has
a connection of its own, because renewing it must not wait behind anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from nri_numa.cluster.lease import DEADLINE, Lease
from nri_numa.cluster.requests import Outcome, Request, Result

LEAST: Final = 0.05
"""Seconds between two requests at least."""
LONGEST: Final = 1.0
"""Seconds between two looks at the clock at most."""
GIVING_BACK: Final = 3.0
"""Seconds that the end of a replica waits for its Lease to be given back."""


class Election:
    """One replica's part in it.

    Attributes:
        since: when it began to lead, by its clock; infinity when it never did.

    Args:
        lease: what is won.
        ask: does a request, and never raises.
        duration: seconds of the Lease.
        clock: seconds that only grow.
        wall: Unix time in seconds.
        jitter: from 0 to 1, another one each time.
        told: what came of each request.
        changed: told whether we lead, and who holds the Lease, whenever the former changes.
        limit: seconds that one request may take; half of what a renewal has, so that another one
            fits, unless told.
    """

    def __init__(
        self,
        lease: Lease,
        ask: Callable[[Request], Awaitable[Outcome]],
        *,
        duration: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        jitter: Callable[[], float],
        told: Callable[[Request, Outcome], object] = lambda request, outcome: None,
        changed: Callable[[bool, str], object] = lambda leads, holder: None,
        limit: float | None = None,
    ) -> None:
        self._lease, self._ask = lease, ask
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._told, self._changed = told, changed
        self._limit = duration * DEADLINE / 2 if limit is None else limit
        self._led = False
        self.since = float("inf")

    @property
    def leads(self) -> bool:
        """Whether this replica may work, now."""
        return self._lease.leads(self._clock())

    @property
    def holder(self) -> str:
        """Who holds the Lease, as far as known; empty for nobody."""
        return self._lease.holder

    async def run(self) -> None:
        """Take part until cancelled."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = await self.step()

    async def step(self) -> float:
        """Do what is due; the result is the seconds until the next time."""
        now = self._clock()
        self._lease.tell_time(self._wall())
        request = self._lease.due(now)
        if request is not None:
            outcome = await self._answered(request)
            self._lease.done(request, outcome, self._clock(), self._jitter())
            self._told(request, outcome)
        if self.leads != self._led:
            self._led = not self._led
            self.since = self._clock() if self._led else self.since
            self._changed(self._led, self.holder)
        return max(LEAST, min(LONGEST, self._lease.next_due() - self._clock()))

    async def give_back(self) -> None:
        """Let another one lead at once; for the end."""
        request = self._lease.release()
        if request is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVING_BACK):
                    await self._ask(request)

    async def _answered(self, request: Request) -> Outcome:
        try:
            async with asyncio.timeout(self._limit):
                return await self._ask(request)
        except TimeoutError:
            return Outcome(result=Result.UNREACHABLE, text="the API server did not answer in time")
