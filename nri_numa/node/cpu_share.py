"""How much of one CPU a thread may have: a token bucket over its CPU time. Pure.

A thread that gives way still costs whoever comes while it is at work: it holds the interpreter's
lock for the rest of its piece, and it has a CPU that the runtime may want. So the one that serves
HTTP stands still most of the time, however much it is asked for (docs/adr/0017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.2
"""Of one CPU, in the long run. The runtime meets the thread at work in one request of five at most,
and on a machine of two CPUs a client who never stops leaves nine tenths to others."""
BURST: Final = 0.05
"""Seconds of CPU time at once after a rest: a scrape of 1,000 containers (2 ms for its text), or
the page with its files and lists, also on a machine that is several times as slow."""
HURRIED: Final = 0.5
"""The same while newcomers find no place: a probe is found by accepting those before it, 0.1 ms for
each of a thousand, and the kubelet waits for a second."""
LONGEST: Final = 0.02
"""Seconds of one pause. A probe is accepted, read and answered in some five rounds of the loop: all
its pauses together are a tenth of the second that the kubelet gives it, whatever is served in
these rounds."""


@dataclass(slots=True)
class CPUShare:
    """The bucket; full at the start.

    Args:
        share: of one CPU, in the long run; more than 0.
        hurried: the same while there is a reason to hurry.
        burst: seconds of CPU time that can be saved up.
        longest: seconds of one pause; what would take longer to pay back is forgiven.

    Attributes:
        hurry: whether there is one now.
    """

    share: float = SHARE
    hurried: float = HURRIED
    burst: float = BURST
    longest: float = LONGEST
    hurry: bool = False
    _last: tuple[float, float] | None = None
    _saved: float = 0.0

    def pause(self, now: float, used: float) -> float:
        """Seconds to stand still before the next piece of work; 0 while something is saved up.

        Args:
            now: seconds that only grow.
            used: CPU time of the thread so far, in seconds.
        """
        if self._last is None:
            self._last, self._saved = (now, used), self.burst
        share = self.hurried if self.hurry else self.share
        earned = share * (now - self._last[0])
        spent = used - self._last[1]
        self._last = now, used
        self._saved = min(self.burst, self._saved + earned) - spent
        self._saved = max(self._saved, -share * self.longest)
        return max(0.0, -self._saved / share)
