"""A device that was found, and what becomes of several of them. Pure.

Whatever is found is a hint where its container should be, and no grant: the device is used or not
whatever is said here. So a device of which nothing is known gives no hint, and a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from nri_numa.engine.values.workload import MOST_DEVICES, Device, DeviceRequest
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import numa_text

MOST_NOTES: Final = 8

DISK: Final = "disk"


class Found(NamedTuple):
    """One device.

    Attributes:
        kind: what people call it: ``GPU``, ``NIC``, or a resource name of the kubelet's.
        id: its PCI address where it has one, else its name in sysfs.
        numa_nodes: where it is; empty where nobody knows.
    """

    kind: str
    id: str
    numa_nodes: frozenset[int] = frozenset()


class Hints(NamedTuple):
    """What the engine is given: requests by kind, and sentences about what gives no hint."""

    requests: tuple[DeviceRequest, ...] = ()
    notes: tuple[str, ...] = ()


def hints(found: Iterable[Found], places: NUMASet, notes: Iterable[str] = ()) -> Hints:
    """Make hints of devices.

    A device that several sources tell of counts once, under its first kind, on the NUMA nodes of
    all of them. NUMA nodes where no container can be placed (offline, without CPUs, or of another
    machine) are no hint.

    Args:
        found: in the order of the sources, the surest first.
        places: the NUMA nodes that alignment chooses from.
        notes: what is to be said besides.
    """
    nodes: dict[str, frozenset[int]] = {}
    kinds: dict[str, str] = {}
    for one in found:
        kinds.setdefault(one.id, one.kind)
        nodes[one.id] = nodes.get(one.id, frozenset()) | one.numa_nodes
    said = list(dict.fromkeys(notes))
    by_kind: dict[str, list[Device]] = {}
    for id, kind in kinds.items():
        usable = frozenset(i for i in nodes[id] if i in places)
        if usable:
            by_kind.setdefault(kind, []).append(Device(id=id, numa_nodes=usable))
        elif nodes[id]:
            where = numa_text(NUMASet(sorted(nodes[id])))
            said.append(f"its {kind} {id} is on {where}, where no CPUs are: no hint")
        else:
            said.append(f"its {kind} {id} tells no NUMA node: no hint")
    total = sum(len(devices) for devices in by_kind.values())
    if total > MOST_DEVICES:
        by_kind = {}
        said.insert(0, f"it has {total} devices, more than {MOST_DEVICES}: no hint")
    if len(said) > MOST_NOTES:
        said[MOST_NOTES - 1 :] = [f"and {len(said) - MOST_NOTES + 1} more such devices"]
    # Order: by kind, then by id.
    return Hints(
        tuple(
            DeviceRequest(
                resource=kind,
                count=len(devices),
                devices=tuple(sorted(devices, key=lambda d: d.id)),
            )
            for kind, devices in sorted(by_kind.items())
        ),
        tuple(said),
    )
