"""An output that keeps one part of one Node as it should be: look first, then write. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nri_numa.cluster.outbox import LONGEST_PAUSE, Shelf
from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb


class OneNode:
    """What of the Node is known; which part of it that is, the classes made of this one say.

    Args:
        output: its name.
        node: name of the Node.
    """

    def __init__(self, output: str, node: str) -> None:
        self.name = output
        self.dropped = 0
        self.hold_until = 0.0
        self._node = node
        self._asked = self._looked = False
        self._failures: Shelf[str] = Shelf(1)

    def _take(self, document: Mapping[str, Any]) -> None:
        """This came when the Node was read or written."""
        raise NotImplementedError

    def _write(self) -> Request | None:
        """What makes the part that was seen into the wanted one; None when it is."""
        raise NotImplementedError

    def _ask(self) -> None:
        """Something is wanted from now on."""
        self._asked = True
        self._failures.want("node", self)

    def due(self, now: float) -> Request | None:
        """Look first, then write the difference."""
        if not self._asked or max(self.hold_until, self._failures.next_due()) > now:
            return None
        if not self._looked:
            return Request(
                output=self.name, verb=Verb.GET, resource=Resource.NODES, name=self._node
            )
        return self._write()

    def next_due(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, self._failures.next_due()) if self.waiting() else float("inf")

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        if outcome.result is Result.DONE:
            (document,) = outcome.documents
            self._take(document)
            self._looked = True
            if request.verb is Verb.PATCH and self._write() is not None:
                # Somebody else writes the same: not faster than once in a while.
                self._failures.later("node", now, jitter)
            else:
                self._failures.drop("node")
                self._failures.want("node", self)
        elif outcome.result is Result.FORBIDDEN:
            self.hold_until = now + LONGEST_PAUSE  # somebody must mend a role first
        else:  # not registered yet, or deleted: it is looked for until it is there
            self._looked = False
            self._failures.later("node", now, jitter)

    def waiting(self) -> int:
        """1 while the Node is not known to be as it should."""
        return int(self._asked and (not self._looked or self._write() is not None))

    def resync(self) -> None:
        """Look at the Node again."""
        self._looked = False
