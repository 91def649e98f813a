"""Field names of earlier checkpoints and ``assigned`` annotations, and their replacements.

The agent reads format 1 and writes format 2. Deleted with the first release.
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

_OLD_FIELDS: Final = {new: old for old, new in NEW_FIELDS.items()}


def with_new_names(
    document: Mapping[str, Any], new_names: Mapping[str, str] = NEW_FIELDS
) -> dict[str, Any]:
    """Return a document of format 1 with the names of format 2."""
    return {new_names.get(key, key): value for key, value in document.items()}


def with_old_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's document of format 2 with the names of format 1."""
    return {_OLD_FIELDS.get(key, key): value for key, value in document.items()}
