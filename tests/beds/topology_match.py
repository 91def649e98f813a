"""The filter of the scheduler's plugin NodeResourceTopologyMatch, as far as a test needs it.

Written from what the plugin does (kubernetes-sigs/scheduler-plugins, ``pkg/noderesourcetopology``
of August 2026), not from its text: which of an object's zones could take a pod.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Requests = Mapping[str, int]
"""Amount of each resource; CPUs in thousandths, all else in bytes or pieces."""

_NAME = re.compile(r"node-([0-9]+)")

_PLACES = 64
"""Of the plugin's array, which is indexed with ids up to and including this one."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What the plugin reads of a pod."""

    apps: Sequence[Requests]
    inits: Sequence[Requests] = field(default_factory=tuple)
    qos: str = "Guaranteed"


def passes(found: Mapping[str, Any], pod: Pod) -> bool:
    """Whether the plugin lets a pod onto the node.

    Raises:
        IndexError: as the plugin panics, and kube-scheduler with it.
    """
    names = {one["name"]: one["value"] for one in found.get("attributes", ())}
    requested = {name for one in (*pod.apps, *pod.inits) for name, amount in one.items() if amount}
    if pod.qos == "BestEffort" and all(_native(name) for name in requested):
        return True
    if names.get("topologyManagerPolicy") != "single-numa-node":
        return True
    zones = _zones(found)
    if names.get("topologyManagerScope") == "pod":
        return _fitting(zones, _whole(pod), pod.qos) is not None
    if any(_fitting(zones, one, pod.qos) is None for one in pod.inits):
        return False
    for one in pod.apps:
        place = _fitting(zones, one, pod.qos)
        if place is None:
            return False
        for name, amount in one.items():
            if name in zones[place]:
                zones[place][name] -= amount
    return True


def _zones(found: Mapping[str, Any]) -> dict[int, dict[str, int]]:
    """What is available, by id, of the zones whose name and type the plugin knows."""
    zones: dict[int, dict[str, int]] = {}
    for one in found["zones"]:
        name = _NAME.fullmatch(one["name"])
        if name and one["type"] == "Node":
            if int(name[1]) > _PLACES:
                continue
            if int(name[1]) == _PLACES:
                raise IndexError(f"index out of range [{_PLACES}] with length {_PLACES}")
            zones[int(name[1])] = {
                each["name"]: int(each["available"]) * (1000 if each["name"] == "cpu" else 1)
                for each in one.get("resources", ())
            }
    return dict(sorted(zones.items()))


def _whole(pod: Pod) -> dict[str, int]:
    needed: dict[str, int] = {}
    for one in pod.apps:
        for name, amount in one.items():
            needed[name] = needed.get(name, 0) + amount
    for one in pod.inits:
        for name, amount in one.items():
            needed[name] = max(needed.get(name, 0), amount)
    return needed


def _fitting(zones: dict[int, dict[str, int]], needed: Requests, qos: str) -> int | None:
    """The lowest zone that fits all of it; the first one where nothing is asked for."""
    left = list(zones)
    for name, amount in needed.items():
        if not amount:
            continue
        if not any(name in zone for zone in zones.values()):
            if _native(name):
                return None
            continue
        anywhere = qos != "Guaranteed" and _native(name)
        left = [i for i in left if name in zones[i] and (anywhere or zones[i][name] >= amount)]
    return left[0] if left else None


def _native(name: str) -> bool:
    return "/" not in name or "kubernetes.io/" in name
