"""The NodeResourceTopology of a node: from the agent's document, and when it is written. Pure.

The form is that of topology.node.k8s.io/v1alpha2 (noderesourcetopology-api of the Topology Aware
Scheduling working group); what is in which field is what the scheduler's plugin
NodeResourceTopologyMatch reads. Zones, resources and costs are in the order of their ids, so that
the same machine makes the same text.

That plugin drops what it has set aside for pods of a node when the fingerprint in the object is the
one that it works out of the pods it knows there. The rule is that of
k8stopologyawareschedwg/podfingerprint v0.2: of each pod xxh64(name, seed xxh64(namespace)), the
numbers in ascending order, and xxh64 of their bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource, Verb
from nri_numa.model.counted_containers import (
    COUNTED_CONTAINERS_NRT_ATTRIBUTE,
    encode_counted_container_hashes,
)
from nri_numa.publisher.desired_objects import micro_time_text
from nri_numa.publisher.outbox import AppliedObjectOutput, node_owner_reference
from nri_numa.text import HUGEPAGES_PREFIX
from nri_numa.web.responses import Zone, Zones

Object = dict[str, Any]

TOPOLOGY_API_VERSION: Final = "topology.node.k8s.io/v1alpha2"
TOPOLOGY_KIND: Final = "NodeResourceTopology"
RELEASE_COUNT_ANNOTATION: Final = "freed"
"""Annotation below the prefix: how often CPUs were released; see `RELEASE_TOUCH_DELAY_S`."""
RENEWED_ANNOTATION: Final = "renewed"
VALIDITY_ANNOTATION: Final = "valid-seconds"
"""Annotations below the prefix where the object has a validity: another text after each renewal,
and after how many seconds of the same text the object should not be believed."""
SCHEDULER_CRASHING_ZONE_ID: Final = 64
"""No zone has this id: the plugin has 64 places and looks only whether an id is above 64, so
``node-64`` ends kube-scheduler with an index out of range. It passes over higher ids."""
MIN_MAX_NUMA_NODES: Final = 8
"""The plugin takes eight NUMA nodes where nothing is said, as the kubelet does; with less than
there are it gives scores below zero, and the scheduler then fails the pod's whole cycle."""
GUARANTEED_QOS: Final = "Guaranteed"
AGENT_ATTRIBUTE: Final = "agent"
NOT_READY_VALUE: Final = "not-ready"
"""The attribute that says whether containers are being placed, and what it says if not."""
MEASURED_FACTOR_ATTRIBUTE: Final = "measured-factor"
EXCLUSIVE_AFTER_MOVES_ATTRIBUTE: Final = "exclusive-cpus-after-moving"
ZONE_ATTRIBUTES: Final = (
    "free-exclusive-cpus", "shared-cpus", "free-cpu-milli", "threads-per-core", "capacity-factor",
    MEASURED_FACTOR_ATTRIBUTE, EXCLUSIVE_AFTER_MOVES_ATTRIBUTE,
)  # fmt: skip
"""Of each zone, below the prefix; factors only where they are not 1."""
FINGERPRINT_ATTRIBUTE: Final = "nodeTopologyPodsFingerprint"
FINGERPRINT_METHOD_ATTRIBUTE: Final = "nodeTopologyPodsFingerprintMethod"
EXCLUSIVE_FINGERPRINT_METHOD: Final = "with-exclusive-resources"
"""The method that counts Guaranteed pods only, whose requests are taken from one NUMA node."""
FIELD_MANAGER: Final = "nri-numa-publish"
"""Owns our fields."""
RELEASE_TOUCH_DELAY_S: Final = 7.0
"""Seconds after which the object is changed again when something was given back. The write wakes
pods that the plugin refused, but it looks at the object only once in its cacheResyncPeriodSeconds
(5 is its documents' least); what was woken before that is refused from old numbers, and nothing
would wake it again."""
SERVER_PRUNE_ERROR_TEXT: Final = "failed to prune fields"
"""In the API server's words when an entry of managedFields is of a version that lacks our fields.
Applying never works again until these entries are taken away."""
_FINGERPRINT_VERSION: Final = "pfp0v001"
_OWNED_FIELD_KEYS: Final = ("f:zones", "f:attributes")
_BINARY_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti")


def build_topology_contents(prefix: str, found: Zones) -> Object:
    """Attributes and zones of the object."""
    zones = {zone.id: zone for zone in found.zones}
    listed = [i for i in range(_listed_zone_count(zones)) if i != SCHEDULER_CRASHING_ZONE_ID]
    counted = [(pod.namespace, pod.name) for pod in found.pods if pod.qos == GUARANTEED_QOS]
    devices = found.devices_problem
    attributes = {
        "topologyManagerPolicy": found.policy,
        "topologyManagerScope": found.scope,
        # As the kubelet's own exporters say them; absent where its managers pin nothing.
        "cpuManagerPolicy": found.cpu_manager_policy,
        "memoryManagerPolicy": found.memory_manager_policy,
        "topologyManagerMaxNUMANodes": max(MIN_MAX_NUMA_NODES, len(listed)),
        FINGERPRINT_ATTRIBUTE: pods_fingerprint(counted),
        FINGERPRINT_METHOD_ATTRIBUTE: EXCLUSIVE_FINGERPRINT_METHOD,
        f"{prefix}/{AGENT_ATTRIBUTE}": "ready" if found.ready else NOT_READY_VALUE,
        # What the whole node can give, where an agent says it.
        f"{prefix}/free-exclusive-cpus": found.free_exclusive_cpus,
        # Tells a NUMA node without devices from one whose devices are not known.
        f"{prefix}/devices": None if devices is None else "unknown" if devices else "counted",
        # Which containers the numbers count; empty for none, which tells it from not saying it.
        f"{prefix}/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}": None
        if found.counted_containers is None
        else encode_counted_container_hashes(
            (one.pod_uid, one.name) for one in found.counted_containers
        ),
    }
    sockets = sorted({zone.socket for zone in found.zones if zone.socket is not None})
    return {
        "attributes": _attribute_list(attributes),
        "zones": [
            *(
                _build_zone(prefix, zones[i], found, listed)
                if i in zones
                else {"name": f"node-{i}", "type": "Node"}
                for i in listed
            ),
            *({"name": f"socket-{i}", "type": "Socket"} for i in sockets),
        ],
    }


def _attribute_list(values: Mapping[str, object]) -> list[Object]:
    """Those that have a value."""
    return [{"name": name, "value": str(it)} for name, it in values.items() if it is not None]


def _listed_zone_count(zones: Mapping[int, Zone]) -> int:
    """How many NUMA nodes are listed: the plugin takes the id for the place in the list.

    So a missing id is an empty zone. Memory far away (NUMA node 252 of a machine whose CPUs are on
    0 and 8) would make hundreds of those; no container has all it needs there, and it is left out.
    """
    count = max((i for i, zone in zones.items() if zone.cpus), default=-1) + 1
    while count in zones:
        count += 1
    return count


def contents_with_agent_not_ready(prefix: str, what: Object) -> Object:
    """The same for an agent that does not answer any more: its last numbers, not ready."""
    name = f"{prefix}/{AGENT_ATTRIBUTE}"
    kept = [one for one in what["attributes"] if one["name"] != name]
    return {**what, "attributes": [*kept, {"name": name, "value": NOT_READY_VALUE}]}


def without_volatile_amounts(found: Zones) -> Zones:
    """What of the agent's document does not follow the kernel's free memory up and down."""
    return replace(
        found,
        zones=tuple(
            replace(
                zone,
                memory_available_bytes=0,
                exclusive_cpus_after_moves=None,
                huge_pages=tuple(replace(pages, available_bytes=0) for pages in zone.huge_pages),
            )
            for zone in found.zones
        ),
    )


def _build_zone(prefix: str, zone: Zone, found: Zones, listed: Container[int]) -> Object:
    values: dict[str, object] = {
        "free-exclusive-cpus": zone.free_exclusive_cpus,
        EXCLUSIVE_AFTER_MOVES_ATTRIBUTE: zone.exclusive_cpus_after_moves,
        "shared-cpus": zone.shared_cpus,
        "free-cpu-milli": zone.cpu_available_milli,
        "threads-per-core": found.threads_per_core,
    }
    for key, factor in (
        ("capacity-factor", zone.capacity_factor),
        (MEASURED_FACTOR_ATTRIBUTE, zone.measured_capacity_factor),
    ):
        if factor != 1:
            values[key] = f"{factor:.6f}".rstrip("0").rstrip(".")
    parent = {} if zone.socket is None else {"parent": f"socket-{zone.socket}"}
    # The plugin reads the id from the name.
    costs = sorted((one.id, one.value) for one in zone.distances if one.id in listed)
    return {
        "name": f"node-{zone.id}",
        "type": "Node",
        **parent,
        "attributes": _attribute_list({f"{prefix}/{key}": value for key, value in values.items()}),
        "costs": [{"name": f"node-{i}", "value": value} for i, value in costs],
        "resources": list(_zone_resources(zone, shares=found.defaults_to_shared)),
    }


def _zone_resources(zone: Zone, *, shares: bool) -> Iterable[Object]:
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
        yield _resource_amounts("cpu", zone.cpus, allocatable, left)
    if zone.memory_bytes:
        yield _resource_amounts(
            "memory",
            zone.memory_bytes,
            zone.memory_allocatable_bytes,
            zone.memory_available_bytes,
        )
        for pages in zone.huge_pages:
            yield _resource_amounts(
                hugepages_resource_name(pages.size_bytes),
                pages.capacity_bytes,
                pages.allocatable_bytes,
                pages.available_bytes,
            )
    for devices in zone.devices:
        # The kubelet names the healthy ones only.
        yield _resource_amounts(
            devices.resource, devices.allocatable, devices.allocatable, devices.available
        )


def _resource_amounts(resource: str, capacity: int, allocatable: int, left: int) -> Object:
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


def hugepages_resource_name(size: int) -> str:
    """Name of huge pages of a size in bytes, as Kubernetes writes it: ``hugepages-2Mi``."""
    power = 0
    while power < len(_BINARY_SUFFIXES) - 1 and size and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{HUGEPAGES_PREFIX}{size}{_BINARY_SUFFIXES[power]}"


def build_topology_object(node: str, uid: str, annotations: dict[str, str], what: Object) -> Object:
    """The whole object, as it is applied; `uid` is the Node's as it is now."""
    metadata = {
        "name": node,
        "annotations": annotations,
        "ownerReferences": [node_owner_reference(node, uid)],
    }
    return {"apiVersion": TOPOLOGY_API_VERSION, "kind": TOPOLOGY_KIND, "metadata": metadata, **what}


def has_more_available(before: Object | None, after: Object) -> bool:
    """Whether somewhere more is available than before; yes where nothing is known of before."""
    if before is None:
        return True
    old = _available_by_resource(before)
    return any(amount > old.get(key, 0) for key, amount in _available_by_resource(after).items())


def _available_by_resource(what: Object) -> dict[tuple[str, str], int]:
    return {
        (zone["name"], one["name"]): int(one["available"])
        for zone in what["zones"]
        for one in zone.get("resources", ())
    }


class TopologyOutput(AppliedObjectOutput):
    """The NodeResourceTopology of one Node.

    Another owner of its zones (NFD's topology updater, the resource topology exporter, koordlet, an
    editor) is named once and not fought.

    Args:
        force: take the fields from other owners.
        validity: seconds after which readers may not believe it where it is not renewed; 0 for
            none.
        touch: change it again where something was given back, see `RELEASE_TOUCH_DELAY_S`.
    """

    resource = Resource.TOPOLOGIES
    failure_text = "the NodeResourceTopology is not written"
    missing_definition_hint = "apply config/kubernetes/publish-topology/crd.yaml"
    alternative = (
        "stop that, or leave publish.nodeResourceTopology off, or set "
        "publish.nodeResourceTopologyForce"
    )

    def __init__(
        self,
        node: str,
        prefix: str,
        *,
        force: bool = False,
        validity: float = 0.0,
        touch: bool = True,
    ) -> None:
        super().__init__("topology", node, force=force)
        self._touch = touch
        self._prefix, self._validity, self._renewed = prefix, validity, ""
        self._key = f"{prefix}/{RELEASE_COUNT_ANNOTATION}"
        self._steady: Zones | None = None
        self._applied_last: Object | None = None
        self._object_uid = ""
        self._silent = self._object_read = self._reset = self._cured = False
        self._freed, self._touch_at = 0, float("inf")

    def renew_validity(self, wall: float) -> None:
        """It holds since this Unix time in seconds; written where it has a validity."""
        self._renewed = micro_time_text(wall)

    def set_desired(self, found: Zones | None) -> None:
        """This is what the agent says; None when it has said nothing for a while.

        Free memory goes up and down by itself: it is taken over when something else changed, and
        at every look. If the agent said nothing yet, an earlier publisher's object is looked for.
        """
        self._silent = found is None
        if found is None:
            if self._wanted is not None:
                self._wanted, self._steady = (
                    contents_with_agent_not_ready(self._prefix, self._wanted),
                    None,
                )
        elif (still := without_volatile_amounts(found)) != self._steady:
            self._steady, self._wanted = still, build_topology_contents(self._prefix, found)

    def _build_object(self) -> Object:
        annotations = {self._key: str(self._freed)}
        if self._validity:
            annotations[f"{self._prefix}/{RENEWED_ANNOTATION}"] = self._renewed
            annotations[f"{self._prefix}/{VALIDITY_ANNOTATION}"] = f"{self._validity:.0f}"
        return build_topology_object(self._node, self._owner_uid, annotations, self._wanted)

    def pending_count(self) -> int:
        """1 while it is not known to be there as it should, and whose it is."""
        looks = self._silent or self._wanted is not None
        return int(looks and not self._object_read) or super().pending_count()

    def next_due_at(self) -> float:
        """When the next request may be made."""
        return (
            super().next_due_at() if self.pending_count() else max(self.hold_until, self._touch_at)
        )

    def _next_request(self, now: float) -> APIRequest | None:
        """The Node's UID first, then who owns the object, then the object."""
        if not self._owner_uid and self._wanted is not None:
            return self._node_read_request()
        if not self._object_read:
            return self._new_request(Verb.GET, self.resource, self._object)
        if self._reset:
            clean = [{"op": "replace", "path": "/metadata/managedFields", "value": [{}]}]
            return self._new_request(
                Verb.PATCH, self.resource, self._object, form=ContentType.JSON, body=clean
            )
        if self._touch_at <= now:
            self._freed, self._touch_at = self._freed + 1, float("inf")
        return self._apply_request()

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        result = outcome.result
        about = request.resource is self.resource
        if (
            about
            and request.verb is Verb.GET
            and result in (OutcomeKind.SUCCEEDED, OutcomeKind.MISSING)
        ):
            self._on_object_read(outcome.documents[0] if outcome.documents else {}, now, jitter)
        elif result is OutcomeKind.SUCCEEDED and request.form is ContentType.JSON:
            self._reset = False
        elif (
            result is OutcomeKind.FAILED
            and SERVER_PRUNE_ERROR_TEXT in outcome.text
            and not self._cured
        ):
            self._reset = self._cured = True
        else:
            if result not in (OutcomeKind.SUCCEEDED, OutcomeKind.FAILED, OutcomeKind.FORBIDDEN):
                self._object_read = self._reset = False
            super()._on_outcome(request, outcome, now, jitter)

    def _on_object_read(self, document: Mapping[str, Any], now: float, jitter: float) -> None:
        metadata = document.get("metadata") or {}
        self._object_read, self._sent, self._object_uid = True, None, metadata.get("uid", "")
        freed = str((metadata.get("annotations") or {}).get(self._key))
        if freed.isdecimal() and len(freed) < 16:
            self._freed = max(self._freed, int(freed))
        managed = metadata.get("managedFields") or ()
        others = other_field_managers(managed)
        if others and not self._force:
            self._object_read = False
            self._block_on_field_owners(others, now, jitter)
        elif self._wanted is None and managed and not others and "zones" in document:
            # An earlier publisher of ours left it, perhaps with `ready` in it.
            left = {key: document.get(key) or [] for key in ("attributes", "zones")}
            self._wanted = contents_with_agent_not_ready(self._prefix, left)

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now: float) -> None:
        if self._touch and has_more_available(self._applied_last, request.body):
            self._touch_at = now + RELEASE_TOUCH_DELAY_S
        self._applied_last = request.body
        uid = document["metadata"].get("uid", "")
        if self._object_uid and uid != self._object_uid:
            # It was taken away: perhaps by the garbage collector, because the Node is another one.
            self._owner_uid = ""
        self._object_uid = uid

    def schedule_resync(self) -> None:
        """Look at the Node and at the object again, and apply it once more."""
        super().schedule_resync()
        self._steady, self._object_read, self._cured = None, False, False


def other_field_managers(managed: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of other owners of zones or attributes, in ``metadata.managedFields``."""
    return sorted(
        {
            str(one.get("manager", ""))
            for one in managed
            if one.get("manager") != FIELD_MANAGER
            and any(field in (one.get("fieldsV1") or {}) for field in _OWNED_FIELD_KEYS)
        }
    )


def pods_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """The text for pods, each by namespace and name, in any order."""
    hashes = sorted(xxh64(name.encode(), xxh64(namespace.encode(), 0)) for namespace, name in pods)
    joined = b"".join(one.to_bytes(8, "little") for one in hashes)
    return f"{_FINGERPRINT_VERSION}{xxh64(joined, 0):016x}"


# --- xxHash, 64 bits: github.com/Cyan4973/xxHash, doc/xxhash_spec.md -----------------------------

_UINT64_MASK: Final = (1 << 64) - 1
_XXH64_PRIME_1: Final = 0x9E3779B185EBCA87
_XXH64_PRIME_2: Final = 0xC2B2AE3D27D4EB4F
_XXH64_PRIME_3: Final = 0x165667B19E3779F9
_XXH64_PRIME_4: Final = 0x85EBCA77C2B2AE63
_XXH64_PRIME_5: Final = 0x27D4EB2F165667C5


def xxh64(data: bytes, seed: int) -> int:
    """The hash of 64 bits, as xxHash works it out."""
    at = 0
    if len(data) >= 32:
        lanes = [
            seed + _XXH64_PRIME_1 + _XXH64_PRIME_2,
            seed + _XXH64_PRIME_2,
            seed,
            seed - _XXH64_PRIME_1,
        ]
        for at in range(0, len(data) - 31, 32):
            lanes = [
                _xxh64_round(lane, _read_uint(data, at + 8 * n)) for n, lane in enumerate(lanes)
            ]
        at += 32
        found = sum(
            _rotate_left_64(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)
        )
        for lane in lanes:
            found = (
                (found ^ _xxh64_round(0, lane)) * _XXH64_PRIME_1 + _XXH64_PRIME_4
            ) & _UINT64_MASK
    else:
        found = seed + _XXH64_PRIME_5
    found += len(data)
    while at + 8 <= len(data):
        found = (
            _rotate_left_64(found ^ _xxh64_round(0, _read_uint(data, at)), 27) * _XXH64_PRIME_1
            + _XXH64_PRIME_4
        )
        at += 8
    if at + 4 <= len(data):
        found = (
            _rotate_left_64(found ^ (_read_uint(data, at, 4) * _XXH64_PRIME_1), 23) * _XXH64_PRIME_2
            + _XXH64_PRIME_3
        )
        at += 4
    for byte in data[at:]:
        found = _rotate_left_64(found ^ (byte * _XXH64_PRIME_5), 11) * _XXH64_PRIME_1
    found &= _UINT64_MASK
    found = ((found ^ (found >> 33)) * _XXH64_PRIME_2) & _UINT64_MASK
    found = ((found ^ (found >> 29)) * _XXH64_PRIME_3) & _UINT64_MASK
    return found ^ (found >> 32)


def _read_uint(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _rotate_left_64(number: int, by: int) -> int:
    number &= _UINT64_MASK
    return (number << by | number >> (64 - by)) & _UINT64_MASK


def _xxh64_round(lane: int, word: int) -> int:
    return _rotate_left_64(lane + word * _XXH64_PRIME_2, 31) * _XXH64_PRIME_1 & _UINT64_MASK
