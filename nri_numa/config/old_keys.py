"""Keys that the configuration had before: each is refused by a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OLD_KEYS: Final[Mapping[str, str]] = {
    "room.keep": (
        "is gone: nothing moves before a pod waits for it; expected the key to be left out "
        "(room.moves makes room for a pod that waits)"
    ),
    "room.farPages": (
        "is gone: memory moves with its container only; expected the key to be left out "
        "(memoryLocality.enabled shows whose memory is far)"
    ),
    "room.budget": (
        "is gone with room.keep and room.farPages, of which it was; expected the key to be left out"
    ),
}
"""Dotted path of a key or section to the sentence about it."""
