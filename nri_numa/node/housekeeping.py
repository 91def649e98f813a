"""What the agent does every second beside the runtime's requests.

Nothing of it may keep a container waiting: each part is short, or happens in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, cast

from nri_numa.config import AgentConfig, parse_duration
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.node.agent import Agent
from nri_numa.node.explanations import ExplanationFile
from nri_numa.node.loop import GapWatch
from nri_numa.node.reload import Rereading
from nri_numa.node.runtime_lock import RuntimeLock
from nri_numa.node.sending import PendingPush
from nri_numa.node.unmatched import UnmatchedAnnotations
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notify import Notifier
from nri_numa.runtime import AnswerWatch
from nri_numa.store.checkpoint import CheckpointStore

# --- Memory that is not used any more goes back to the kernel ---

GROWN: Final = 2 << 20
"""Bytes of resident memory more than after the last time that make it worth a look."""
TRIM_REST: Final = 5
"""Rounds between two times at least: a busy node needs again what it gave back."""
_KEPT: Final = 1 << 18
"""Bytes left at the end of the heap, for the requests that come next."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of resident memory; 0 where nobody tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _malloc_trim() -> Callable[[int], object]:
    """The C library's ``malloc_trim(3)``; nothing where it is none of GNU's, or out of reach."""
    try:
        import ctypes

        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = (ctypes.c_size_t,)
    except (ImportError, OSError, AttributeError):
        return lambda kept: None
    return cast(Callable[[int], object], trim)


_trim: Final = _malloc_trim()


def give_back() -> None:
    """Give free pages of the heap back."""
    _trim(_KEPT)


class Trim:
    """Gives memory back after it was needed for a moment.

    Args:
        resident: bytes of resident memory.
        give_back: does it; takes a few milliseconds for ten megabytes.
    """

    def __init__(
        self,
        resident: Callable[[], int] = resident,
        give_back: Callable[[], object] = give_back,
    ) -> None:
        self._resident = resident
        self._give_back = give_back
        self._least = 0
        self._rest = 0

    def look(self) -> None:
        """One round: look whether there is something to give back."""
        if self._rest:
            self._rest -= 1
            return
        now = self._resident()
        if now - self._least < GROWN:
            self._least = min(self._least, now)
            return
        self._give_back()
        self._least = self._resident()
        self._rest = TRIM_REST


# --- Calls that the runtime does not answer ---

log = get_logger("daemon")


class Unanswered:
    """Looks at how long a call has waited.

    Args:
        agent: is told to show it.
        metrics: have it as a figure.
        calls: of ours that wait for an answer.

    Attributes:
        sentence: what does not answer; empty while nothing waits too long.
    """

    def __init__(self, agent: Agent, metrics: Metrics, calls: AnswerWatch) -> None:
        self.sentence = ""
        self._agent = agent
        self._metrics = metrics
        self._calls = calls

    def look(self, limit_s: float) -> None:
        """Compare the longest wait with a limit in seconds."""
        what, seconds = self._calls.waiting()
        self._metrics.runtime_unanswered.set(seconds)
        hung = seconds >= limit_s
        if hung and not self.sentence:
            self.sentence = (
                f"the runtime has not answered a {what} for {seconds:.0f} s: either a container "
                "takes that long to stop, or the runtime hangs and starts no pods any more"
            )
            log.error(
                "the runtime does not answer",
                call=what,
                seconds=round(seconds),
                remedy="if no container is in its grace period, restart the runtime: containers "
                "go on running",
            )
            self._agent.notify()
        elif not hung and self.sentence:
            self.sentence = ""
            log.info("the runtime answers again")
            self._agent.notify()


# --- Every second ---

TICK: Final = 1.0
"""Seconds between two rounds."""
MEMORY_EVERY: Final = 5
HOTPLUG_EVERY: Final = 5
"""Rounds between two looks at memory and at what changes on a machine."""
EXPLANATIONS_EVERY: Final = 10
"""Rounds between two looks at whether there are new explanations to save."""
GAPS: Final = 120
"""Rounds that the recent longest gap of the event loop is taken over."""
BLIND_EVERY: Final = 15
"""Rounds between two pictures of the node on runtimes that tell launched plugins nothing."""


class Housekeeping:
    """The rounds.

    Args:
        agent, metrics, notifier, store, claim, explanations, unmatched, rereading, pending,
            unanswered: whose turn comes in each round, or every few.
        reader: of cgroups.
        gaps: knows how long the event loop kept others waiting.
        look: asks the runtime for a picture of the node; gives why it failed, empty when not.

    Attributes:
        blind: whether the runtime does not tell the plugins it launched what runs already.
    """

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        notifier: Notifier,
        *,
        store: CheckpointStore,
        claim: RuntimeLock,
        explanations: ExplanationFile,
        unmatched: UnmatchedAnnotations,
        gaps: GapWatch,
        look: Callable[[], Awaitable[str]],
        rereading: Rereading,
        pending: PendingPush,
        unanswered: Unanswered,
        reader: CgroupReader,
    ) -> None:
        self.blind = False
        self._agent = agent
        self._metrics = metrics
        self._notifier = notifier
        self._store = store
        self._claim = claim
        self._explanations = explanations
        self._unmatched = unmatched
        self._watch = gaps
        self._look = look
        self._rereading = rereading
        self._pending = pending
        self._unanswered = unanswered
        self._reader = reader
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._look_in = 0
        self._trim = Trim()

    async def run(self, config: Callable[[], AgentConfig], active: Callable[[], bool]) -> None:
        """Go on until cancelled.

        Args:
            config: in force.
            active: whether the link is in use.
        """
        round_number = 0
        while True:
            await asyncio.sleep(TICK)
            round_number += 1
            if round_number % MEMORY_EVERY == 0:
                await self._rereading.read_memory(self._agent)
            if round_number % HOTPLUG_EVERY == 0:
                await self._rereading.look(self._agent)
                self._agent.look_at_kept(self._reader)
            self._store.maintain()
            self._claim.share()
            if round_number % EXPLANATIONS_EVERY == 0:
                self._explanations.save_soon()
                self._unmatched.look()
            collect(round_number)
            self._trim.look()
            if self.blind and active():
                await self._look_around()
            self._pending.round(active=active())
            self._unanswered.look(parse_duration(config().runtime.hung_after))
            self._notifier.watchdog()
            self._gaps.append(self._watch.take())
            self._metrics.loop_lag(max(self._gaps))

    async def _look_around(self) -> None:
        """Learn what runs from a runtime that does not tell the plugins it launched.

        Such a runtime (NRI before 0.7) sends no stop for containers older than itself either, so
        looking once is not enough.
        """
        self._look_in -= 1
        if self._look_in > 0:
            return
        # The runtime opens its socket only after its plugins are up, so the first tries may fail.
        detail = await self._look()
        if detail:
            log.debug("picture of the node not read yet", detail=detail)
        else:
            self._look_in = BLIND_EVERY


def collect(round_number: int) -> None:
    """Look for garbage between requests; the older it is, the more seldom, as the collector does.

    The youngest objects are those of one second. Everything takes 20 ms with 1,000 containers.
    """
    gc.collect(2 if round_number % 600 == 0 else 1 if round_number % 10 == 0 else 0)
