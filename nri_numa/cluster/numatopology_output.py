"""Volcano's Numatopology of one Node: what is still to be done about it. Pure.

Fields that somebody else owns (Volcano's own exporter) are not taken: one object has one writer.
"""

from __future__ import annotations

import re
from typing import Final

from nri_numa.cluster import numatopology
from nri_numa.cluster.outbox import Shelf
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Form, Outcome, Request, Resource, Result, Verb
from nri_numa.cluster.topology_output import SLOWLY
from nri_numa.text import harmless

_KEY: Final = "object"


class NumatopologyOutput:
    """One Numatopology.

    Args:
        node: name of the Node, and of the object.

    Attributes:
        problem: why the object is not written, and what to do, as a sentence; else empty.
    """

    def __init__(self, node: str) -> None:
        self.name = "numatopology"
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""
        self._node = node
        self._wanted: numatopology.Object | None = None
        self._sent: numatopology.Object | None = None
        self._owner_uid = ""
        self._failures: Shelf[str] = Shelf(1)

    def want(self, spec: numatopology.Object | None) -> None:
        """It should be this; None when the agent has said nothing for a while."""
        if spec is None:
            spec = self._wanted and numatopology.silent(self._wanted)
        if spec != self._wanted:
            self._wanted = spec
            self._failures.want(_KEY, self)

    def due(self, now: float) -> Request | None:
        """The Node's UID first, then the object."""
        if self.next_due() > now:
            return None
        if not self._owner_uid:
            return Request(
                output=self.name, verb=Verb.GET, resource=Resource.NODES, name=self._node
            )
        assert self._wanted is not None  # noqa: S101  # `next_due` says so
        return Request(
            output=self.name,
            verb=Verb.PATCH,
            resource=Resource.NUMATOPOLOGIES,
            name=self._node,
            form=Form.APPLY,
            body=numatopology.body(self._node, self._owner_uid, self._wanted),
        )

    def next_due(self) -> float:
        """When the next request may be made."""
        if not self.waiting():
            return float("inf")
        return max(self.hold_until, self._failures.next_due())

    def waiting(self) -> int:
        """1 while the object is not known to be as it should."""
        if self._wanted is None:
            return 0
        return int(not self._owner_uid or self._wanted != self._sent)

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        result = outcome.result
        if result is Result.DONE and request.resource is Resource.NODES:
            self._owner_uid = outcome.documents[0]["metadata"].get("uid") or "-"
        elif result is Result.DONE:
            self._sent, self.problem = request.body["spec"], ""
            self._failures.drop(_KEY)
            self._failures.want(_KEY, self)
        elif result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
        elif result is Result.UNKNOWN:
            self._later(f"{outcome.text}; Volcano brings its definition", now, jitter)
        elif result is Result.CONFLICT:
            names = ", ".join(sorted(set(re.findall(r'with "([^"]*)"', outcome.text))))
            self._later(
                f"its fields belong to {harmless(names or 'somebody')[:200]}; stop that, or leave "
                "publish.numatopology off",
                now,
                jitter,
            )
        elif result is Result.INVALID:
            self._later(f"{outcome.text}; is its definition another one?", now, jitter)
        else:  # the Node is not registered yet
            self._owner_uid = ""
            self._failures.later(_KEY, now, jitter)

    def _later(self, problem: str, now: float, jitter: float) -> None:
        self.problem = problem
        self.hold_until = now + SLOWLY * (0.8 + 0.4 * jitter)

    def resync(self) -> None:
        """Look at the Node again, and apply the object once more."""
        self._owner_uid, self._sent = "", None
