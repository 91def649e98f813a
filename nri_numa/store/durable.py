"""Keeps the checkpoint in step with the state, also through times in which it cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nri_numa.engine.state import NodeState
from nri_numa.engine.values.workload import StateChange
from nri_numa.errors import CheckpointError
from nri_numa.observe.metrics import Metrics
from nri_numa.store import documents

Changes = Mapping[str, dict[str, Any] | None]
"""Documents to write by key; None forgets what stands there."""


class Store(Protocol):
    """Where the state is made durable; see `nri_numa.store.checkpoint`."""

    def record(self, changes: Changes) -> None:
        """Write what one request changed, before it is answered.

        Raises:
            CheckpointError: it is not written; the store remembers it and writes it along with the
                next changes.
        """
        ...


class Durable:
    """Writes what each step changed, and says so once when it cannot be written.

    A node without a checkpoint places containers as well as before. What is lost is the intent
    after a crash, and that is what the metric and the line are for.

    Args:
        store: None keeps everything in memory.
        metrics: counted into.
        now: Unix time in seconds.
        note: logs a line: level, event, fields.

    Attributes:
        problem: why the state cannot be written; empty when it can.
        written_at: Unix time of the last write; None before the first.
    """

    def __init__(
        self,
        store: Store | None,
        metrics: Metrics,
        now: Callable[[], float],
        note: Callable[..., None],
    ) -> None:
        self.problem = ""
        self.written_at: float | None = None
        self._store = store
        self._metrics = metrics
        self._now = now
        self._note = note

    def write(self, before: NodeState, after: NodeState, change: StateChange) -> None:
        """Write the difference between two states.

        Args:
            before: as it was.
            after: as it will be.
            change: the containers and pods that may differ.
        """
        if self._store is None:
            return
        changes = documents.changed_documents(before, after, change)
        if changes or self.problem:
            self._record(self._store, changes)

    def flush(self) -> None:
        """Try again to write what could not be written."""
        if self._store is not None and self.problem:
            self._record(self._store, {})

    def _record(self, store: Store, changes: Changes) -> None:
        try:
            store.record(changes)
        except CheckpointError as error:
            self._metrics.checkpoint_errors.inc()
            if not self.problem:
                self._note("error", "checkpoint not written", error=str(error))
            self.problem = str(error)
            return
        if self.problem:
            self._note("info", "checkpoint written again")
            self.problem = ""
        self.written_at = self._now()
