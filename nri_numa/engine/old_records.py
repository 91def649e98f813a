"""Names of earlier checkpoints and annotations, and their replacements.

The agent reads format 1 of checkpoints and ``assigned``, and writes format 2. Deleted with the
first release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OLD_FORMAT: Final = 1
"""Format with the old names; annotations in it have no number."""

NEW_FIELDS: Final[Mapping[str, str]] = {
    "numa": "numaNodes",
    "preferred": "aligned",
    "idle": "idleSiblings",
    "owned": "exclusive",
    "soft": "yieldingCPUs",
    "leaves": "migratingFrom",
    "fixed": "immovable",
    "pod_id": "podID",
    "pod_uid": "podUID",
    "cpu_milli": "cpuMilli",
    "moved_for": "movedFor",
    "unpinned_for": "unpinnedFor",
    "unpinned_memory": "unpinnedMemory",
}
"""New name by old name, of a container's fields in both."""

NEW_POD_FIELDS: Final[Mapping[str, str]] = {"pod_id": "podID", "former": "previous"}
"""New name by old name, of a pod's fields in checkpoints."""

OLD_VALUES: Final[Mapping[tuple[str, str], str]] = {("on-failure", "widen"): "best-effort"}
"""New value by key and old value: users set these, so new pods with an old one are rejected."""

OLD_WRITTEN_KEYS: Final[Mapping[str, str]] = {
    "scheduled-numa-nodes": "placed",
    "container-resources": "containers",
}
"""Old key by new key: the extender wrote these, so they are read on pods that it bound before."""

_OLD_FIELDS: Final = {new: old for old, new in NEW_FIELDS.items()}


def with_new_names(
    document: Mapping[str, Any], new_names: Mapping[str, str] = NEW_FIELDS
) -> dict[str, Any]:
    """Return a document of format 1 with the names of format 2."""
    return {new_names.get(key, key): value for key, value in document.items()}


def with_old_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's document of format 2 with the names of format 1."""
    return {_OLD_FIELDS.get(key, key): value for key, value in document.items()}


def old_value_expectation(key: str, value: str) -> str:
    """Return what is expected instead of an old value, after *expected*."""
    return f"{OLD_VALUES[key, value]}, the new name of {value}"


def old_value_sentence(name: str, key: str, value: str) -> str:
    """Return the sentence about an old value of an existing pod, in the annotation ``name``."""
    return (
        f"annotation {name} is {value!r}, expected {old_value_expectation(key, value)}; "
        "running containers stay as they are, and the pod's next container is rejected"
    )
