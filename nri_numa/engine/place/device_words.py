"""Which devices count for a container, and what is said of them once its place is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nri_numa.engine.case import Case
from nri_numa.engine.values.workload import Device, DeviceRequest, DeviceUse, Scope
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import numa_text

MOST_NAMED: Final = 4
"""Devices of one kind that a sentence names; the rest is a number."""


def aligned_devices(case: Case) -> tuple[DeviceRequest, ...]:
    """The devices whose NUMA nodes are hints: none where the pod says ``devices: ignore``.

    Where a pod is placed as a whole, so are the devices of all its containers.
    """
    container, requested = case.container, case.requested
    if requested.devices is DeviceUse.IGNORE:
        return ()
    if requested.scope is Scope.POD:
        return container.pod_devices or container.devices
    return container.devices


def devices_first(case: Case, affinity: NUMASet, room: Mapping[int, int], need: int) -> NUMASet:
    """The NUMA nodes of an affinity that are begun with: those with most of the devices.

    Args:
        case: whose devices.
        affinity: as the policy chose it, which may be wider than CPUs need.
        room: CPUs that could be owned, by NUMA node.
        need: how many are wanted.
    """
    counts = dict.fromkeys(affinity, 0)
    for request in aligned_devices(case):
        for device in request.devices:
            for i in device.numa_nodes:
                if i in counts:
                    counts[i] += 1
    if not any(counts.values()):
        return affinity
    first: list[int] = []
    # Most devices first, then by id, until there are enough CPUs.
    for i in sorted(affinity, key=lambda i: (-counts[i], i)):
        if need > 0:
            first.append(i)
            need -= room.get(i, 0)
    return NUMASet(first)


def device_steps(case: Case, affinity: NUMASet | None) -> tuple[str, ...]:
    """What the devices had to do with it, in sentences.

    Args:
        case: whose devices.
        affinity: the NUMA nodes that were chosen; None for any.
    """
    container = case.container
    if case.requested.devices is DeviceUse.IGNORE:
        names = [_named(one.resource, one.devices) for one in container.devices if one.devices]
        return (f"devices: ignore, so {_and(names)} gave no hint",) if names else ()
    said: list[str] = []
    if affinity is not None:
        for request in aligned_devices(case):
            said += _about(request, affinity)
    return (*said, *container.device_notes)


def _about(request: DeviceRequest, affinity: NUMASet) -> list[str]:
    said: list[str] = []
    inside: list[Device] = []
    outside: list[Device] = []
    # Plain loops: this is on the way of a creation, and whatever is called there may be cold.
    for device in request.devices:
        for i in device.numa_nodes:
            if i in affinity:
                inside.append(device)
                break
        else:
            if device.numa_nodes:
                outside.append(device)
    if inside:
        verb = "are" if len(inside) > 1 else "is"
        what = _named(request.resource, inside)
        said.append(f"on {numa_text(affinity)} because its {what} {verb} there")
    if outside:
        nodes = NUMASet(i for d in outside for i in d.numa_nodes)
        verb = "are" if len(outside) > 1 else "is"
        said.append(
            f"although its {_named(request.resource, outside)} {verb} on {numa_text(nodes)}, "
            f"which is not among them"
        )
    return said


def _named(kind: str, devices: tuple[Device, ...] | list[Device]) -> str:
    """``GPU 0000:3b:00.0``, ``GPU 0000:3b:00.0 and 3 more``."""
    if len(devices) == 1:
        return f"{kind} {devices[0].id}"
    ids = [d.id for d in devices]
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"{kind} {', '.join(ids[:MOST_NAMED])}{more}"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
