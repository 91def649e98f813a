"""How long the checkpoint's records take to write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nri_numa.observe.metrics import Metrics
from nri_numa.store.checkpoint import CheckpointStore


class TimedStore:
    """A checkpoint store whose writes show in the metrics."""

    def __init__(self, store: CheckpointStore, metrics: Metrics) -> None:
        self._store = store
        self._observe = metrics.checkpoint_write.observe

    def record(self, changes: Mapping[str, dict[str, Any] | None]) -> None:
        """Write, and measure it."""
        started = time.perf_counter()
        self._store.record(changes)
        self._observe(time.perf_counter() - started)
