"""Keys and values of earlier annotations, and their replacements.

Deleted with the first release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OLD_VALUES: Final[Mapping[tuple[str, str], str]] = {("on-failure", "widen"): "best-effort"}
"""New value by key and old value: users set these, so new pods with an old one are rejected."""

OLD_WRITTEN_KEYS: Final[Mapping[str, str]] = {
    "scheduled-numa-nodes": "placed",
    "container-resources": "containers",
}
"""Old key by new key: the extender wrote these, so they are read on pods that it bound before."""


def old_value_expectation(key: str, value: str) -> str:
    """Return what is expected instead of an old value, after *expected*."""
    return f"{OLD_VALUES[key, value]}, the new name of {value}"


def old_value_sentence(name: str, key: str, value: str) -> str:
    """Return the sentence about an old value of an existing pod, in the annotation ``name``."""
    return (
        f"annotation {name} is {value!r}, expected {old_value_expectation(key, value)}; "
        "running containers stay as they are, and the pod's next container is rejected"
    )
