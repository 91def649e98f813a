"""Keys of earlier configurations, and what stands in their place now.

Deleted with the first release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_RULE: Final = "is gone, expected kubeletCompatibility: {except: {%s: true}} instead of %s"

OLD_KEYS: Final[Mapping[str, str]] = {
    "kubeletTies": _RULE % ("ties", "true"),
    "kubeletMemory": _RULE % ("memory", "true"),
    "kubeletCPUs": _RULE % ("cpus", "true"),
    "staticCPUs": _RULE % ("staticCPUs", "true"),
    "cpuOrder": _RULE % ("cpuOrder", "kubelet"),
    "distributeAcrossNUMA": _RULE % ("distributeCPUsAcrossNUMA", "true"),
    "distributeAcrossCores": _RULE % ("distributeCPUsAcrossCores", "true"),
    "alignBySocket": _RULE % ("alignBySocket", "true"),
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
"""By dotted path, the sentence that refuses the key."""


def old_key_problems(path: str, value: Any) -> Iterator[str]:
    """The sentences about a key that is no longer known, or about the old keys in its mapping."""
    if path in OLD_KEYS:
        yield OLD_KEYS[path]
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from old_key_problems(f"{path}.{key}", below)
