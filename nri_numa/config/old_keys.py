"""Keys that the configuration had before: each is refused by a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OLD_KEYS: Final[Mapping[str, str]] = {
    "room.keep": (
        "is gone: nothing moves before a pod waits for it; expected the key to be left out "
        "(room.moves makes room for a pod that waits)"
    ),
}
"""Dotted path of a key or section to the sentence about it."""
