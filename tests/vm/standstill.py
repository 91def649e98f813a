"""For how long the guest stood still: an emulated processor whose turn did not come.

Programs under test have limits that nobody can set and that a real machine never meets. A shim of
containerd's that does not answer within a tenth of a second is taken for dead: its address goes to
a new one, and its containers die when containerd starts again. A case that failed while the machine
stood still for longer than that says something of the host and nothing of nri-numa, so it is tried
again; one that failed otherwise has failed. Whoever passes says what happened before
(tests/README.md).
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from tests.beds.vm_records import Outcome, Result

STEP_S: Final = 0.05
"""Seconds between two looks at the clock."""
TOO_LONG_S: Final = 1.0
"""Seconds; ten times the shortest limit of a program that a pod's start meets."""
TRIES: Final = 3


class NeverAgain(AssertionError):
    """What must not be, however slow a machine is: the case has failed at once."""


class Standstill:
    """Looks at the clock all the time; the longest that it was late is how long all stood still."""

    def __init__(self) -> None:
        self._longest = 0.0

    def start(self) -> None:
        """Look from now on, until the program ends."""
        threading.Thread(target=self._watch, name="standstill", daemon=True).start()

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(STEP_S)
            self._longest = max(self._longest, time.monotonic() - before - STEP_S)

    def longest(self) -> float:
        """Seconds, since the last time that this was asked."""
        found, self._longest = self._longest, 0.0
        return found


def insist(
    attempt: Callable[[], Result], standstill: Standstill, say: Callable[[str], object]
) -> Result:
    """Run a case, and once more as long as it failed while the machine stood still.

    Returns:
        The result of the last try; its notes begin with what the others came to.
    """
    before: list[str] = []
    for left in reversed(range(TRIES)):
        standstill.longest()
        result = attempt()
        still = standstill.longest()
        say(f"{result.case} {result.outcome.value}, stood still for {still:.2f} s at most")
        failed = result.outcome is Outcome.FAILED and not result.final
        if not failed or still < TOO_LONG_S or not left:
            break
        before.append(f"tried again, since the machine stood still for {still:.1f} s:")
        before += result.detail.splitlines()
    return msgspec.structs.replace(result, notes=[*before, *result.notes])
