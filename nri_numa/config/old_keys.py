"""Keys of earlier configurations, and their replacements.

Deleted with the first release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_EVICTIONS: Final = "is gone, expected controller.evictions.%s"
_ALL_EVICTIONS: Final = _EVICTIONS + ", one for all evictions"
_USAGE: Final = "is gone, expected containerUsage.%s"
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
        "(containerUsage.memory: read shows whose memory is far)"
    ),
    "room.budget": (
        "is gone with room.keep and room.farPages, of which it was; expected the key to be left out"
    ),
    "controller.drain.evict": _EVICTIONS % "drainedNUMANodes.evict",
    "controller.drain.after": _EVICTIONS % "drainedNUMANodes.delay",
    "controller.drain.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.drain.dryRun": _ALL_EVICTIONS % "dryRun",
    "controller.stuck.evict": _EVICTIONS % "stuckPods.evict",
    "controller.stuck.partlyRunning": _EVICTIONS % "stuckPods.includeRunning",
    "controller.stuck.after": _EVICTIONS % "stuckPods.delay",
    "controller.stuck.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.stuck.perWorkload": _ALL_EVICTIONS % "maxPerWorkloadPerHour",
    "controller.stuck.dryRun": _ALL_EVICTIONS % "dryRun",
    "controller.steal.evict": _EVICTIONS % "cpuSteal.evict",
    "controller.steal.below": _EVICTIONS % "cpuSteal.belowFactor",
    "controller.steal.after": _EVICTIONS % "cpuSteal.delay",
    "controller.steal.atMost": _EVICTIONS % "cpuSteal.maxAffectedFraction",
    "controller.steal.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.steal.perWorkload": _ALL_EVICTIONS % "maxPerWorkloadPerHour",
    "controller.steal.dryRun": _ALL_EVICTIONS % "dryRun",
    "memoryLocality.enabled": _USAGE % "memory: read",
    "memoryLocality.metric": _USAGE % "memory: metric",
    "memoryLocality.interval": _USAGE % "interval",
    "cpuWaiting.enabled": _USAGE % "cpuPressure: read",
    "cpuWaiting.metric": _USAGE % "cpuPressure: metric",
    "cpuWaiting.interval": _USAGE % "interval",
}
"""By dotted path, the sentence that refuses the key."""


def old_key_problems(path: list[Any], value: Any) -> Iterator[tuple[list[Any], str]]:
    """Yield path and sentence of an old key, or of the old keys in a mapping."""
    if sentence := OLD_KEYS.get(".".join(map(str, path))):
        yield path, sentence
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from old_key_problems([*path, key], below)
