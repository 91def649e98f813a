"""What the Node's annotations say of its capacity, looked at and handed to the agent. Pure.

The agent asks nobody but the machine it is on, so its publisher looks at the Node for it. The texts
are handed on as they are: the agent judges them, whoever brings them.
"""

from __future__ import annotations

import json

from nri_numa.cluster.outbox import pause
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.offline_capacity import DRAINED, LONGEST, OFFLINE_CAPACITY


class HandoverOutput:
    """Two annotations of one Node, as a document for the agent.

    Attributes:
        document: for the agent's file; empty before the Node was seen.
        problem: why a text is not handed on, as a sentence; empty when both are.

    Args:
        node: its name.
        prefix: of the annotations.
        interval: seconds between two looks.
    """

    def __init__(self, node: str, prefix: str, interval: float) -> None:
        self.name = "handover"
        self.dropped = 0
        self.hold_until = 0.0
        self.document = ""
        self.problem = ""
        self._node, self._prefix, self._interval = node, prefix, interval
        self._failures = 0

    def due(self, now: float) -> Request | None:
        """A look at the Node when it is time for one."""
        if self.hold_until > now:
            return None
        return Request(output=self.name, verb=Verb.GET, resource=Resource.NODES, name=self._node)

    def next_due(self) -> float:
        """When that is."""
        return self.hold_until

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Take what the Node says; one that cannot be seen says what it said before."""
        if outcome.result is Result.DONE:
            (document,) = outcome.documents
            self._take(document.get("metadata", {}).get("annotations") or {})
            self._failures = 0
            self.hold_until = now + self._interval * (0.9 + 0.2 * jitter)
            return
        self._failures += 1
        forbidden = outcome.result is Result.FORBIDDEN
        self.hold_until = now + (FORBIDDEN_PAUSE if forbidden else pause(self._failures, jitter))

    def _take(self, annotations: dict[str, str]) -> None:
        texts: dict[str, str] = {}
        self.problem = ""
        for key in (OFFLINE_CAPACITY, DRAINED):
            texts[key] = str(annotations.get(f"{self._prefix}/{key}", ""))
        document = json.dumps(texts, separators=(",", ":"))
        if len(document) > LONGEST:
            # The agent would refuse it too, and go on with what it knows.
            self.problem = (
                f"the annotations {OFFLINE_CAPACITY} and {DRAINED} have {len(document)} bytes "
                f"together, expected {LONGEST} at most"
            )
            return
        self.document = document

    def waiting(self) -> int:
        """Nothing is ever behind: looking is all there is to do."""
        return 0

    def resync(self) -> None:
        """Looks come by themselves."""
