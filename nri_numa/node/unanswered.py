"""Says when the runtime does not answer calls of ours, and when it does again."""

from __future__ import annotations

from nri_numa.node.agent import Agent
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.runtime import AnswerWatch

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
