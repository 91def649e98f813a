"""Which request is next: one at a time, no faster than configured, none in vain. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nri_numa.cluster.outbox import Bucket, pause
from nri_numa.cluster.outputs import Output
from nri_numa.cluster.requests import WHOLE, Outcome, Request


class Desk:
    """Takes requests from outputs in turn, and waits for all of them when the server cannot.

    Args:
        outputs: from the most to the least important.
        rate: requests per second.
        burst: at once after a quiet time.
        now: the time, in seconds of a clock that only grows.
    """

    def __init__(self, outputs: Sequence[Output], *, rate: float, burst: float, now: float) -> None:
        self.outputs = tuple(outputs)
        self._bucket = Bucket(rate, burst, now)
        self._hold_until = 0.0
        self.failures = 0

    def next(self, now: float) -> Request | None:
        """The request to make now; whoever gets it must tell what came of it."""
        if self._hold_until > now or self._bucket.wait(now) > 0:
            return None
        for output in self.outputs:
            if (request := output.due(now)) is not None:
                self._bucket.take(now)
                return request
        return None

    def wait(self, now: float) -> float:
        """Seconds until there may be one; infinity while nothing is to be done."""
        due = min((output.next_due() for output in self.outputs), default=float("inf"))
        return max(due - now, self._hold_until - now, self._bucket.wait(now), 0.0)

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request.

        Args:
            request: from `next`.
            outcome: of it.
            now: the time.
            jitter: from 0 to 1.
        """
        if outcome.result in WHOLE:
            self.failures += 1
            # Nobody may come back in the very moment that the server named.
            after = outcome.retry_after * (1 + 0.1 * jitter)
            self._hold_until = now + max(after, pause(self.failures, jitter))
            return
        self.failures = 0
        (output,) = (one for one in self.outputs if one.name == request.output)
        output.done(request, outcome, now, jitter)

    def waiting(self) -> int:
        """How much is still to be sent."""
        return sum(output.waiting() for output in self.outputs)

    def resync(self) -> None:
        """Look at what is really there."""
        for output in self.outputs:
            output.resync()
