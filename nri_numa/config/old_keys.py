"""Keys and values of earlier configurations, and their replacements.

Deleted with the first release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_NEW: Final = "is gone, expected %s"
_EVICTIONS: Final = _NEW % "controller.evictions.%s"
_ALL_EVICTIONS: Final = _EVICTIONS + ", one for all evictions"
_USAGE: Final = _NEW % "containerUsage.%s"
_RULE: Final = _NEW % "kubeletCompatibility: {except: {%s: true}} instead of %s"

OLD_KEYS: Final[Mapping[str, str]] = {
    "oversale": _NEW % "cpuOvercommit",
    "liftQuota": _NEW % "disableCFSQuota",
    "environment": _NEW % "injectEnvironment",
    "keepExclusiveCPUs": _NEW % "podReservationTimeout",
    "strictReserved": _NEW % "strictCPUReservation",
    "preferClosest": _NEW % "preferClosestNUMANodes",
    "cores": _NEW % "preferredCores",
    "memoryOnlyNodes": _NEW % "memoryOnlyNUMANodes.ids",
    "memoryTiers": _NEW % "memoryOnlyNUMANodes.memoryTiers",
    "strategy: most-left": _NEW % "most-memory",
    "kubeletTies": _RULE % ("ties", "true"),
    "kubeletMemory": _RULE % ("memory", "true"),
    "kubeletCPUs": _RULE % ("cpus", "true"),
    "staticCPUs": _RULE % ("staticCPUs", "true"),
    "cpuOrder": _RULE % ("cpuOrder", "kubelet"),
    "distributeAcrossNUMA": _RULE % ("distributeCPUsAcrossNUMA", "true"),
    "distributeAcrossCores": _RULE % ("distributeCPUsAcrossCores", "true"),
    "alignBySocket": _RULE % ("alignBySocket", "true"),
    "permissions[].keys": _NEW % "permissions[].allowedKeys",
    "permissions[].values": _NEW % "permissions[].allowedValues",
    "permissions[].unpaidCPUs": _NEW % "permissions[].allowUnrequestedCPUs",
    "permissions[].reservedCPUs": _NEW % "permissions[].allowReservedCPUs",
    "permissions[].otherwise": _NEW % "permissions[].onDenied: reject or ignore",
    "permissions[].onDenied: refuse": _NEW % "reject",
    "quotas.idleCPUs": _NEW % "quotas.idleSiblings",
    "sharedPool.cpus": _NEW % "sharedPool.minCPUs",
    "sharedPool.numaNodeCPUs": _NEW % "sharedPool.minCPUsPerNUMANode",
    "room": _NEW % "rebalance",
    "room.moves": _NEW % "rebalance.maxMoves",
    "room.keep": (
        "is gone: containers move only for one that would be rejected; expected no such key "
        "(rebalance.maxMoves limits those moves)"
    ),
    "room.farPages": (
        "is gone: memory migrates only if its container moves; expected no such key "
        "(containerUsage.memory: read shows remote memory)"
    ),
    "room.budget": (
        "is gone with room.keep and room.farPages, which it limited; expected no such key"
    ),
    "reconcile.withoutRuntime": _NEW % "reconcile.repairWithoutRuntime",
    "runtime.hungAfter": _NEW % "runtime.registrationTimeout",
    "kubelet.override": _NEW % "kubelet.overrideGrants",
    "devices.nodes": _NEW % "devices.deviceNodes",
    "devices.variables": _NEW % "devices.sriovVariables",
    "devices.network": _NEW % "devices.networkInterfaces",
    "devices.count": _NEW % "devices.countFree",
    "devices.cdiDirectories": _NEW % "devices.cdiSpecDirs",
    "devicePlugin.topology": _NEW % "devicePlugin.advertiseTopology",
    "devicePlugin.directory": _NEW % "devicePlugin.socketDir",
    "dra.handover": _NEW % "dra.handoverDir",
    "dra.cdiDirectory": _NEW % "devices.cdiSpecDirs, of which the driver uses the last one",
    "publish.capacity": _NEW % "publish.nodeCapacity",
    "publish.nodeResourceTopologyTouch": _NEW % "publish.nodeResourceTopologyTouchOnRelease",
    "publish.rate": _NEW % "publish.apiQPS",
    "publish.resync": _NEW % "publish.resyncInterval",
    "publish.credentials": _NEW % "publish.credentialsDir",
    "controller.silent": _NEW % "controller.onStaleSource",
    "controller.leastTime": _NEW % "controller.minUpdateInterval",
    "controller.smoothing": _NEW % "controller.smoothingTime",
    "controller.rate": _NEW % "controller.apiQPS",
    "controller.credentials": _NEW % "controller.credentialsDir",
    "controller.drain": _NEW % "controller.evictions.drainedNUMANodes",
    "controller.drain.evict": _EVICTIONS % "drainedNUMANodes.evict",
    "controller.drain.after": _EVICTIONS % "drainedNUMANodes.delay",
    "controller.drain.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.drain.dryRun": _ALL_EVICTIONS % "dryRun",
    "controller.stuck": _NEW % "controller.evictions.stuckPods",
    "controller.stuck.evict": _EVICTIONS % "stuckPods.evict",
    "controller.stuck.partlyRunning": _EVICTIONS % "stuckPods.includeRunning",
    "controller.stuck.after": _EVICTIONS % "stuckPods.delay",
    "controller.stuck.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.stuck.perWorkload": _ALL_EVICTIONS % "maxPerWorkloadPerHour",
    "controller.stuck.dryRun": _ALL_EVICTIONS % "dryRun",
    "controller.steal": _NEW % "controller.evictions.cpuSteal",
    "controller.steal.evict": _EVICTIONS % "cpuSteal.evict",
    "controller.steal.below": _EVICTIONS % "cpuSteal.belowFactor",
    "controller.steal.after": _EVICTIONS % "cpuSteal.delay",
    "controller.steal.atMost": _EVICTIONS % "cpuSteal.maxAffectedFraction",
    "controller.steal.perMinute": _ALL_EVICTIONS % "maxPerMinute",
    "controller.steal.perWorkload": _ALL_EVICTIONS % "maxPerWorkloadPerHour",
    "controller.steal.dryRun": _ALL_EVICTIONS % "dryRun",
    "scheduler.unknownNodes": _NEW % "scheduler.onMissingTopology: reject or allow",
    "scheduler.onMissingTopology: refuse": _NEW % "reject",
    "scheduler.narrow": _NEW % "scheduler.filterToBest",
    "scheduler.settle": _NEW % "scheduler.topologyReportDelay",
    "scheduler.lease": _NEW % "scheduler.leaseName",
    "scheduler.credentials": _NEW % "scheduler.credentialsDir",
    "memoryLocality": _NEW % "containerUsage",
    "memoryLocality.enabled": _USAGE % "memory: read",
    "memoryLocality.metric": _USAGE % "memory: metric",
    "memoryLocality.interval": _USAGE % "interval",
    "cpuWaiting": _NEW % "containerUsage",
    "cpuWaiting.enabled": _USAGE % "cpuPressure: read",
    "cpuWaiting.metric": _USAGE % "cpuPressure: metric",
    "cpuWaiting.interval": _USAGE % "interval",
    "measuredCapacity.mode: observe": _NEW % "report",
    "measuredCapacity.mode: act": _NEW % "enforce",
    "measuredCapacity.floor": _NEW % "measuredCapacity.minFactor",
}
"""By dotted path, or path and value, the sentence that rejects it. An item of a list is ``[]``."""


def old_key_problems(path: list[Any], value: Any) -> Iterator[tuple[list[Any], str]]:
    """Yield path and sentence of the old keys in a mapping, or of the key itself."""
    problems = [
        problem
        for key, below in (value.items() if isinstance(value, Mapping) else ())
        for problem in old_key_problems([*path, key], below)
    ]
    sentence = OLD_KEYS.get(_pattern_of_path(path))
    if not problems and sentence:
        problems = [(path, sentence)]
    yield from problems


def old_value_sentence(path: list[Any], value: Any) -> str | None:
    """Return the sentence of a value that had another name, or None."""
    return OLD_KEYS.get(f"{_pattern_of_path(path)}: {value}")


def _pattern_of_path(path: list[Any]) -> str:
    parts = ["[]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")
