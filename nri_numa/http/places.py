"""Who may stay connected: places for everybody, fairly, and a few kept for probes.

What the node pays for clients is bounded by the number of places, whatever they do with them. When
all are taken, whoever waits between two requests makes room first, then the client that has more
than its share. A newcomer who finds no place still gets a short hearing in the *reserve*, where
only probes are answered: a plugin under attack must not be restarted for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

MAX_CONNECTIONS = 128
MAX_RESERVE = 256
GRACE: Final = 0.02
"""Seconds that a newcomer in the reserve is heard at least, if it takes a pause in accepting."""

LINE: Final = 32
"""Newcomers without a pause that are a line: more than the scrapers, controllers and browsers that
happen to come at the same time."""


class Line:
    """Knows whether newcomers stand in line where clients connect to, and with them maybe a probe.

    Args:
        tell: told whether there is a line, each time that this may be otherwise.
    """

    def __init__(self, tell: Callable[[bool], object]) -> None:
        self._tell = tell
        self._came: Counter[object] = Counter()

    def came(self, listener: object) -> None:
        """One more has come at this socket, and there was no pause."""
        self._came[listener] += 1
        if self._came[listener] == LINE:
            self._tell(True)

    def nobody(self, listener: object) -> None:
        """Nobody stands at this socket now."""
        del self._came[listener]
        self._tell(any(came >= LINE for came in self._came.values()))

    def end(self) -> None:
        """Nobody can come any more."""
        self._came.clear()
        self._tell(False)


def _nothing() -> None:
    """Nothing to close any more."""


@dataclass(eq=False, slots=True)
class ConnectionPlace:
    """One connection's right to be there.

    Attributes:
        client: its address.
        close: ends the connection.
        reserve: only probes are answered, and one request.
        idle_since: when it began to wait for its next request; None while it has one, or has not
            made its first.
        since: when it came.
        answered: requests answered so far.
    """

    client: str
    since: float
    close: Callable[[], object] = _nothing
    reserve: bool = False
    idle_since: float | None = None
    answered: int = 0


@dataclass(slots=True)
class ConnectionPlaces:
    """All of them.

    Args:
        limit: places for everybody.
        reserve: further ones in which probes are answered.
        clock: seconds that only grow.
    """

    limit: int = field(default_factory=lambda: MAX_CONNECTIONS)
    reserve: int = field(default_factory=lambda: MAX_RESERVE)
    clock: Callable[[], float] = time.monotonic
    _taken: dict[ConnectionPlace, None] = field(default_factory=dict)
    _reserve: dict[ConnectionPlace, None] = field(default_factory=dict)
    _clients: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._taken) + len(self._reserve)

    def pause(self) -> float:
        """Seconds until one more newcomer can be heard without cutting another short."""
        if len(self._taken) < self.limit or len(self._reserve) < self.reserve:
            return 0.0
        oldest = next(iter(self._reserve))
        return max(0.0, oldest.since + GRACE - self.clock())

    def take(self, client: str) -> ConnectionPlace:
        """A place for a newcomer; somebody else may lose theirs for it."""
        place = ConnectionPlace(client, self.clock())
        if len(self._taken) >= self.limit:
            victim = self._idle() or self._greedy(client)
            if victim is None:
                place.reserve = True
                if len(self._reserve) >= self.reserve:
                    self._end(next(iter(self._reserve)))
                self._reserve[place] = None
                return place
            self._end(victim)
        self._taken[place] = None
        self._clients[client] += 1
        return place

    def leave(self, place: ConnectionPlace) -> None:
        """A connection ended; once more does no harm."""
        place.close = _nothing  # it knows the connection, which knows its place
        self._reserve.pop(place, None)
        if place in self._taken:
            del self._taken[place]
            self._clients[place.client] -= 1
            if not self._clients[place.client]:
                del self._clients[place.client]

    def close(self) -> None:
        """End every connection."""
        for place in [*self._taken, *self._reserve]:
            self._end(place)

    def _end(self, place: ConnectionPlace) -> None:
        close = place.close
        self.leave(place)
        close()

    def _idle(self) -> ConnectionPlace | None:
        """Who waits longest between two requests: a client that reconnects loses nothing."""
        waiting = [(p.idle_since, n, p) for n, p in enumerate(self._taken) if p.idle_since]
        return min(waiting)[2] if waiting else None

    def _greedy(self, newcomer: str) -> ConnectionPlace | None:
        """The oldest connection of the client with most of them, where a newcomer has fewer."""
        client, most = self._clients.most_common(1)[0]
        if most <= self._clients[newcomer] + 1:
            return None
        return next(p for p in self._taken if p.client == client)
