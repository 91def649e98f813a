"""Whether a node's object is still being renewed by whoever publishes it. Pure.

A publisher that dies leaves its last numbers behind, and ``ready`` in them. Where it says so
(``publish.nodeResourceTopologyValidity``), the object has two annotations: ``renewed``, which is
another text after each renewal, and ``valid-seconds``. As with a Lease clocks are never compared:
an object is stale when its text has been the same for so long by the reader's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RENEWED: Final = "renewed"
VALID: Final = "valid-seconds"
LONGEST: Final = 7 * 86400
"""Seconds; what is longer is not meant."""


class Freshness:
    """Until when each object holds.

    Args:
        prefix: of the annotations.
    """

    def __init__(self, prefix: str) -> None:
        self._renewed, self._valid = f"{prefix}/{RENEWED}", f"{prefix}/{VALID}"
        self._known: dict[str, tuple[str, float]] = {}

    def seen(self, name: str, document: Mapping[str, Any], now: float) -> bool:
        """An object is there; whether it holds. One that names no validity holds for ever."""
        metadata = document.get("metadata")
        annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
        found = annotations if isinstance(annotations, Mapping) else {}
        text, seconds = found.get(self._renewed), _seconds(found.get(self._valid))
        if not isinstance(text, str) or seconds is None:
            self._known.pop(name, None)
            return True
        before = self._known.get(name)
        until = before[1] if before is not None and before[0] == text else now + seconds
        self._known[name] = text, until
        return now < until

    def gone(self, name: str) -> None:
        """An object is gone."""
        self._known.pop(name, None)

    def stale(self, now: float) -> list[str]:
        """Objects that hold no more."""
        return [name for name, (_, until) in self._known.items() if until <= now]


def _seconds(text: object) -> int | None:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 6):
        return None
    return min(int(text), LONGEST) or None
