"""The NodeResourceTopology of a node, from the agent's document of its NUMA nodes. Pure.

The form is that of topology.node.k8s.io/v1alpha2 (noderesourcetopology-api of the Topology Aware
Scheduling working group); what is in which field is what the scheduler's plugin
NodeResourceTopologyMatch reads. Zones, resources and costs are in the order of their ids, so that
the same machine makes the same text.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.charged import CHARGED, marks
from nri_numa.cluster import fingerprint
from nri_numa.http.responses import Zone, Zones
from nri_numa.text import HUGEPAGES

Object = dict[str, Any]

API_VERSION: Final = "topology.node.k8s.io/v1alpha2"
KIND: Final = "NodeResourceTopology"
FREED: Final = "freed"
"""Annotation below the prefix that counts how often something was given back; see `TopologyOutput`
in `nri_numa.cluster.topology_output`."""
RENEWED: Final = "renewed"
VALID: Final = "valid-seconds"
"""Annotations below the prefix where the object has a validity: another text after each renewal,
and after how many seconds of the same text nobody should believe the object."""
UNLISTED: Final = 64
"""No zone has this id: the plugin has 64 places and looks only whether an id is above 64, so
``node-64`` ends kube-scheduler with an index out of range. It passes over higher ids."""
SMALLEST_MOST: Final = 8
"""The plugin takes eight NUMA nodes where nothing is said, as the kubelet does; with less than
there are it gives scores below zero, and the scheduler then fails the pod's whole cycle."""
GUARANTEED: Final = "Guaranteed"
MEASURED_FACTOR: Final = "measured-factor"
ZONE_ATTRIBUTES: Final = (
    "free-exclusive-cpus", "shared-cpus", "free-cpu-milli", "threads-per-core", "capacity-factor",
    MEASURED_FACTOR,
)  # fmt: skip
"""Of each zone, below the prefix; factors only where they are not 1."""
_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti")


def contents(prefix: str, found: Zones) -> Object:
    """Attributes and zones of the object.

    Args:
        prefix: of our own attributes.
        found: what the agent says.
    """
    zones = {zone.id: zone for zone in found.zones}
    listed = [i for i in range(_listed(zones)) if i != UNLISTED]
    counted = [(pod.namespace, pod.name) for pod in found.pods if pod.qos == GUARANTEED]
    return {
        "attributes": [
            _attribute("topologyManagerPolicy", found.policy),
            _attribute("topologyManagerScope", found.scope),
            _attribute("topologyManagerMaxNUMANodes", max(SMALLEST_MOST, len(listed))),
            _attribute(fingerprint.NAME, fingerprint.fingerprint(counted)),
            _attribute(fingerprint.METHOD, fingerprint.EXCLUSIVE),
            agent(prefix, ready=found.ready),
            *_together(prefix, found),
            *_devices(prefix, found),
            *charged(prefix, found),
        ],
        "zones": [
            *(
                _zone(prefix, zones[i], found, listed)
                if i in zones
                else {"name": name(i), "type": "Node"}
                for i in listed
            ),
            *(
                {"name": socket(i), "type": "Socket"}
                for i in sorted({zone.socket for zone in found.zones if zone.socket is not None})
            ),
        ],
    }


def _listed(zones: Mapping[int, Zone]) -> int:
    """How many NUMA nodes are listed: the plugin takes the id for the place in the list.

    So a missing id is an empty zone. Memory far away (NUMA node 252 of a machine whose CPUs are on
    0 and 8) would make hundreds of those; no container has all it needs there, and it is left out.
    """
    count = max((i for i, zone in zones.items() if zone.cpus), default=-1) + 1
    while count in zones:
        count += 1
    return count


def silent(prefix: str, what: Object) -> Object:
    """The same for an agent that does not answer any more: its last numbers, not ready."""
    word = agent(prefix, ready=False)
    kept = [one for one in what["attributes"] if one["name"] != word["name"]]
    return {**what, "attributes": [*kept, word]}


def agent(prefix: str, *, ready: bool) -> Object:
    """The attribute that says whether containers are being placed."""
    return _attribute(f"{prefix}/agent", "ready" if ready else "not-ready")


def _together(prefix: str, found: Zones) -> Iterable[Object]:
    """The attribute that says what the whole node can give, where an agent says it."""
    if found.free_exclusive_cpus is not None:
        yield _attribute(f"{prefix}/free-exclusive-cpus", found.free_exclusive_cpus)


def _devices(prefix: str, found: Zones) -> Iterable[Object]:
    """The attribute that tells a NUMA node without devices from one whose devices nobody knows."""
    if found.devices_problem is not None:
        yield _attribute(f"{prefix}/devices", "unknown" if found.devices_problem else "counted")


def charged(prefix: str, found: Zones) -> Iterable[Object]:
    """The attribute that says which containers the numbers count; none where there are none."""
    text = marks((one.pod_uid, one.name) for one in found.charged)
    if text:
        yield _attribute(f"{prefix}/{CHARGED}", text)


def steady(found: Zones) -> Zones:
    """What of the agent's document does not follow the kernel's free memory up and down."""
    return replace(
        found,
        zones=tuple(
            replace(
                zone,
                memory_available_bytes=0,
                huge_pages=tuple(replace(pages, available_bytes=0) for pages in zone.huge_pages),
            )
            for zone in found.zones
        ),
    )


def name(numa_node: int) -> str:
    """Name of the zone of a NUMA node; the plugin reads the id from it."""
    return f"node-{numa_node}"


def socket(number: int) -> str:
    """Name of the zone of a socket."""
    return f"socket-{number}"


def _zone(prefix: str, zone: Zone, found: Zones, listed: Container[int]) -> Object:
    values: dict[str, object] = {
        "free-exclusive-cpus": zone.free_exclusive_cpus,
        "shared-cpus": zone.shared_cpus,
        "free-cpu-milli": zone.cpu_available_milli,
        "threads-per-core": found.threads_per_core,
    }
    for key, factor in (
        ("capacity-factor", zone.capacity_factor),
        (MEASURED_FACTOR, zone.measured_factor),
    ):
        if factor != 1:
            values[key] = f"{factor:.6f}".rstrip("0").rstrip(".")
    parent = {} if zone.socket is None else {"parent": socket(zone.socket)}
    costs = sorted((one.id, one.value) for one in zone.distances if one.id in listed)
    return {
        "name": name(zone.id),
        "type": "Node",
        **parent,
        "attributes": [_attribute(f"{prefix}/{key}", value) for key, value in values.items()],
        "costs": [{"name": name(i), "value": value} for i, value in costs],
        "resources": list(_resources(zone, shares=found.shares)),
    }


def _resources(zone: Zone, *, shares: bool) -> Iterable[Object]:
    """What of each resource there is, may be had, and is left.

    CPUs are those that a container may have exclusively, as a Guaranteed one with a policy and a
    whole number of CPUs gets them; where the defaults say that CPUs are shared, whole CPUs of what
    is not promised yet.
    """
    if zone.cpus:
        if shares:
            allocatable = zone.cpu_allocatable_milli // 1000
            left = zone.cpu_available_milli // 1000
        else:
            allocatable, left = zone.exclusive_cpus, zone.free_exclusive_cpus
        yield _amounts("cpu", zone.cpus, allocatable, left)
    if zone.memory_bytes:
        yield _amounts(
            "memory",
            zone.memory_bytes,
            zone.memory_allocatable_bytes,
            zone.memory_available_bytes,
        )
        for pages in zone.huge_pages:
            yield _amounts(
                page_resource(pages.size_bytes),
                pages.capacity_bytes,
                pages.allocatable_bytes,
                pages.available_bytes,
            )
    for devices in zone.devices:
        # The kubelet names the healthy ones only.
        yield _amounts(
            devices.resource, devices.allocatable, devices.allocatable, devices.available
        )


def _amounts(resource: str, capacity: int, allocatable: int, left: int) -> Object:
    """Numbers in order, whatever they were made of: 0 ≤ available ≤ allocatable ≤ capacity.

    With oversale more can be allocated than there is; that is the capacity then.
    """
    allocatable = max(0, allocatable)
    return {
        "name": resource,
        "capacity": str(max(capacity, allocatable)),
        "allocatable": str(allocatable),
        "available": str(min(max(0, left), allocatable)),
    }


def page_resource(size: int) -> str:
    """Name of huge pages of a size in bytes, as Kubernetes writes it: ``hugepages-2Mi``."""
    power = 0
    while power < len(_SUFFIXES) - 1 and size and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{HUGEPAGES}{size}{_SUFFIXES[power]}"


def _attribute(name: str, value: object) -> Object:
    return {"name": name, "value": str(value)}


def body(node: str, uid: str, annotations: dict[str, str], what: Object) -> Object:
    """The whole object, as it is applied.

    Args:
        node: name of the Node, and so of the object.
        uid: of the Node as it is now: with that of an earlier one the object would be collected.
        annotations: ours.
        what: `contents`.
    """
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": node, "annotations": annotations, "ownerReferences": [owner]},
        **what,
    }


def rose(before: Object | None, after: Object) -> bool:
    """Whether somewhere more is available than before; yes where nothing is known of before."""
    if before is None:
        return True
    old = _available(before)
    return any(amount > old.get(key, 0) for key, amount in _available(after).items())


def _available(what: Object) -> dict[tuple[str, str], int]:
    return {
        (zone["name"], one["name"]): int(one["available"])
        for zone in what["zones"]
        for one in zone.get("resources", ())
    }
