"""Which devices of a resource go with a NUMA affinity.

A device may belong to several NUMA nodes. The kubelet once judged such a device by whichever of its
NUMA nodes came first when they were sorted by their number of devices, so that a device on NUMA
nodes 0 and 1 could end up as *unaligned* for the affinity {1}. The NUMA nodes inside the affinity
must come first, those outside after them, and devices without NUMA nodes last.
"""

from __future__ import annotations

from typing import NamedTuple

from nri_numa.engine.values.workload import Device, DeviceRequest
from nri_numa.machine.cpuset import NUMASet


class FilteredDevices(NamedTuple):
    """The available devices of a resource in three classes.

    Attributes:
        aligned: at least one of their NUMA nodes lies in the affinity.
        unaligned: all of their NUMA nodes lie outside it.
        no_affinity: they belong to no NUMA node, or nobody asks.
    """

    aligned: tuple[Device, ...]
    unaligned: tuple[Device, ...]
    no_affinity: tuple[Device, ...]


def filter_devices_by_affinity(request: DeviceRequest, affinity: NUMASet | None) -> FilteredDevices:
    """Class the available devices of a resource by an affinity.

    Order within a class: NUMA nodes with the fewest available devices first, so that those with
    many keep them for larger requests; then the NUMA node's number, then the device's id.

    Args:
        request: all devices known of the resource; the count is not looked at.
        affinity: the chosen NUMA nodes. None, or a resource none of whose devices belongs to a
            NUMA node, puts every device into ``no_affinity``.
    """
    free = sorted((d for d in request.devices if d.available), key=lambda d: d.id)
    if affinity is None or not any(d.numa_nodes for d in request.devices):
        return FilteredDevices((), (), tuple(free))
    population: dict[int, int] = {}
    for device in free:
        for i in device.numa_nodes:
            population[i] = population.get(i, 0) + 1
    # Order: inside the affinity before outside, fewest devices first, then the number.
    order = sorted(population, key=lambda i: (i not in affinity, population[i], i))
    place = {i: k for k, i in enumerate(order)}
    first = {d.id: min(place[i] for i in d.numa_nodes) for d in free if d.numa_nodes}
    # Order: the first of a device's NUMA nodes in that order, then its id.
    placed = sorted((d for d in free if d.numa_nodes), key=lambda d: (first[d.id], d.id))
    inside = sum(1 for i in order if i in affinity)
    return FilteredDevices(
        tuple(d for d in placed if first[d.id] < inside),
        tuple(d for d in placed if first[d.id] >= inside),
        tuple(d for d in free if not d.numa_nodes),
    )
