"""The NodeResourceTopology of a node: from the agent's document, and when it is written. Pure.

The form is that of topology.node.k8s.io/v1alpha2 (noderesourcetopology-api of the Topology Aware
Scheduling working group); the fields have the meaning that the scheduler's plugin
NodeResourceTopologyMatch expects. Zones, resources and costs are sorted by id, so equal machines
have equal texts.

That plugin forgets its assumed pods of a node when the object's fingerprint is the one that it
computes from the pods it knows there. The rule is that of k8stopologyawareschedwg/podfingerprint
v0.2: of each pod xxh64(name, seed xxh64(namespace)), the numbers in ascending order, and xxh64 of
their bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.config.sections import Publish
from nri_numa.config.values import parse_duration
from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource, Verb
from nri_numa.model.counted_containers import (
    COUNTED_CONTAINERS_NRT_ATTRIBUTE,
    encode_counted_container_hashes,
)
from nri_numa.publisher.outbox import AppliedObjectOutput
from nri_numa.text import hugepages_resource_name, micro_time_text
from nri_numa.web.responses import Zone, Zones

Object = dict[str, Any]

RELEASE_COUNTER_ANNOTATION: Final = "release-counter"
"""Annotation below the prefix that counts releases of CPUs; see `RELEASE_TOUCH_DELAY_S`."""
RENEWED_AT_ANNOTATION: Final = "renewed-at"
VALIDITY_ANNOTATION: Final = "validity-seconds"
"""Annotations below the prefix of an object with a validity: the time of the last renewal, and the
seconds after which an object that was not renewed has expired."""
SCHEDULER_CRASHING_ZONE_ID: Final = 64
"""No zone has this id: the plugin's array has 64 entries and it rejects only ids above 64, so
``node-64`` ends kube-scheduler with an index out of range. Higher ids are ignored."""
MIN_MAX_NUMA_NODES: Final = 8
"""Default of the plugin and the kubelet. A value below the actual number of NUMA nodes causes
negative scores, and the scheduler then fails the pod's whole cycle."""
GUARANTEED_QOS: Final = "Guaranteed"
AGENT_STATE_ATTRIBUTE: Final = "agent-state"
NOT_READY_VALUE: Final = "not-ready"
"""Attribute for the agent's state, and its value if the agent places no containers."""
MEASURED_CAPACITY_FACTOR_ATTRIBUTE: Final = "measured-capacity-factor"
EXCLUSIVE_AFTER_MOVES_ATTRIBUTE: Final = "exclusive-cpus-after-moves"
ZONE_ATTRIBUTES: Final = (
    "free-exclusive-cpus", "shared-cpus", "free-cpu-milli", "threads-per-core", "capacity-factor",
    MEASURED_CAPACITY_FACTOR_ATTRIBUTE, EXCLUSIVE_AFTER_MOVES_ATTRIBUTE,
)  # fmt: skip
"""Attributes of each zone, below the prefix; factors only if they are not 1."""
FINGERPRINT_ATTRIBUTE: Final = "nodeTopologyPodsFingerprint"
FINGERPRINT_METHOD_ATTRIBUTE: Final = "nodeTopologyPodsFingerprintMethod"
EXCLUSIVE_FINGERPRINT_METHOD: Final = "with-exclusive-resources"
"""Method that counts Guaranteed pods only, whose requests are taken from one NUMA node."""
FIELD_MANAGER: Final = "nri-numa-publish"
"""Field manager of the publisher's fields."""
RELEASE_TOUCH_DELAY_S: Final = 7.0
"""Seconds after a release until the object is changed again. A write wakes pods that the plugin
rejected, but it reads the object only once in its cacheResyncPeriodSeconds (at least 5 by its
documentation). Pods that wake before that are rejected by old numbers, and would not wake again."""
SERVER_PRUNE_ERROR_TEXT: Final = "failed to prune fields"
"""Part of the API server's error if an entry of managedFields has a version without these fields.
Every apply fails until the entries are removed."""
_FINGERPRINT_VERSION: Final = "pfp0v001"
_OWNED_FIELD_KEYS: Final = ("f:zones", "f:attributes")


def build_topology_contents(prefix: str, document: Zones) -> Object:
    """Build attributes and zones of the object."""
    zones = {zone.id: zone for zone in document.zones}
    listed = [i for i in range(_listed_zone_count(zones)) if i != SCHEDULER_CRASHING_ZONE_ID]
    counted_pods = [(pod.namespace, pod.name) for pod in document.pods if pod.qos == GUARANTEED_QOS]
    devices = document.devices_problem
    attributes = {
        "topologyManagerPolicy": document.policy,
        "topologyManagerScope": document.scope,
        # As in the kubelet's own exporters; absent if its managers pin nothing.
        "cpuManagerPolicy": document.cpu_manager_policy,
        "memoryManagerPolicy": document.memory_manager_policy,
        "topologyManagerMaxNUMANodes": max(MIN_MAX_NUMA_NODES, len(listed)),
        FINGERPRINT_ATTRIBUTE: pods_fingerprint(counted_pods),
        FINGERPRINT_METHOD_ATTRIBUTE: EXCLUSIVE_FINGERPRINT_METHOD,
        f"{prefix}/{AGENT_STATE_ATTRIBUTE}": "ready" if document.ready else NOT_READY_VALUE,
        # Limit of the whole node, if the agent reports it.
        f"{prefix}/free-exclusive-cpus": document.free_exclusive_cpus,
        # Distinguishes a NUMA node without devices from one with unknown devices.
        f"{prefix}/device-counts": None if devices is None else "unknown" if devices else "counted",
        # Containers that the numbers count; empty for none, None if the agent does not say.
        f"{prefix}/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}": None
        if document.counted_containers is None
        else encode_counted_container_hashes(
            (c.pod_uid, c.name) for c in document.counted_containers
        ),
    }
    sockets = sorted({zone.socket for zone in document.zones if zone.socket is not None})
    return {
        "attributes": _attribute_list(attributes),
        "zones": [
            *(
                _build_zone(prefix, zones[i], document, listed)
                if i in zones
                else {"name": f"node-{i}", "type": "Node"}
                for i in listed
            ),
            *({"name": f"socket-{i}", "type": "Socket"} for i in sockets),
        ],
    }


def _attribute_list(values: Mapping[str, object]) -> list[Object]:
    """Return the attributes that have a value."""
    return [{"name": name, "value": str(v)} for name, v in values.items() if v is not None]


def _listed_zone_count(zones: Mapping[int, Zone]) -> int:
    """Return the number of listed NUMA nodes: the plugin uses the id as the index in the list.

    So a missing id is an empty zone. A high memory-only id (NUMA node 252 of a machine with CPUs on
    0 and 8) would need hundreds of them; no container fits on it alone, and it is omitted.
    """
    count = max((i for i, zone in zones.items() if zone.cpus), default=-1) + 1
    while count in zones:
        count += 1
    return count


def contents_with_agent_not_ready(prefix: str, contents: Object) -> Object:
    """Return the contents for an agent that no longer answers: its last numbers, not ready."""
    name = f"{prefix}/{AGENT_STATE_ATTRIBUTE}"
    attributes = [a for a in contents["attributes"] if a["name"] != name]
    return {**contents, "attributes": [*attributes, {"name": name, "value": NOT_READY_VALUE}]}


def without_volatile_amounts(document: Zones) -> Zones:
    """Return the agent's document without amounts that vary with the kernel's free memory."""
    return replace(
        document,
        zones=tuple(
            replace(
                zone,
                memory_available_bytes=0,
                exclusive_cpus_after_moves=None,
                huge_pages=tuple(replace(pages, available_bytes=0) for pages in zone.huge_pages),
            )
            for zone in document.zones
        ),
    )


def _build_zone(prefix: str, zone: Zone, document: Zones, listed: Container[int]) -> Object:
    values: dict[str, object] = {
        "free-exclusive-cpus": zone.free_exclusive_cpus,
        EXCLUSIVE_AFTER_MOVES_ATTRIBUTE: zone.exclusive_cpus_after_moves,
        "shared-cpus": zone.shared_cpus,
        "free-cpu-milli": zone.cpu_available_milli,
        "threads-per-core": document.threads_per_core,
    }
    for key, factor in (
        ("capacity-factor", zone.capacity_factor),
        (MEASURED_CAPACITY_FACTOR_ATTRIBUTE, zone.measured_capacity_factor),
    ):
        if factor != 1:
            values[key] = f"{factor:.6f}".rstrip("0").rstrip(".")
    parent = {} if zone.socket is None else {"parent": f"socket-{zone.socket}"}
    # The plugin reads the id from the name.
    costs = sorted((d.id, d.value) for d in zone.distances if d.id in listed)
    return {
        "name": f"node-{zone.id}",
        "type": "Node",
        **parent,
        "attributes": _attribute_list({f"{prefix}/{key}": value for key, value in values.items()}),
        "costs": [{"name": f"node-{i}", "value": value} for i, value in costs],
        "resources": list(_zone_resources(zone, defaults_to_shared=document.defaults_to_shared)),
    }


def _zone_resources(zone: Zone, *, defaults_to_shared: bool) -> Iterable[Object]:
    """Return capacity, allocatable and available of each resource.

    CPUs are those that can be exclusive, as for a Guaranteed container with a policy and a whole
    number of CPUs; if CPUs are shared by default, whole CPUs of the free CPU time.
    """
    if zone.cpus:
        if defaults_to_shared:
            allocatable = zone.cpu_allocatable_milli // 1000
            available = zone.cpu_available_milli // 1000
        else:
            allocatable, available = zone.exclusive_cpus, zone.free_exclusive_cpus
        yield _resource_amounts("cpu", zone.cpus, allocatable, available)
    if zone.memory_bytes:
        yield _resource_amounts(
            "memory", zone.memory_bytes, zone.memory_allocatable_bytes, zone.memory_available_bytes
        )
        for pages in zone.huge_pages:
            yield _resource_amounts(
                hugepages_resource_name(pages.size_bytes),
                pages.capacity_bytes,
                pages.allocatable_bytes,
                pages.available_bytes,
            )
    for devices in zone.devices:
        # The kubelet reports healthy devices only.
        yield _resource_amounts(
            devices.resource, devices.allocatable, devices.allocatable, devices.available
        )


def _resource_amounts(resource: str, capacity: int, allocatable: int, available: int) -> Object:
    """Clamp the amounts to 0 ≤ available ≤ allocatable ≤ capacity.

    With overcommit allocatable may exceed the capacity, which is raised to it.
    """
    allocatable = max(0, allocatable)
    return {
        "name": resource,
        "capacity": str(max(capacity, allocatable)),
        "allocatable": str(allocatable),
        "available": str(min(max(0, available), allocatable)),
    }


def has_more_available(old_contents: Object | None, contents: Object) -> bool:
    """Return True if more of any resource is available than before, also if that is None."""
    if old_contents is None:
        return True
    amounts = _available_by_resource(old_contents)
    return any(
        amount > amounts.get(key, 0) for key, amount in _available_by_resource(contents).items()
    )


def _available_by_resource(contents: Object) -> dict[tuple[str, str], int]:
    return {
        (zone["name"], resource["name"]): int(resource["available"])
        for zone in contents["zones"]
        for resource in zone.get("resources", ())
    }


class TopologyOutput(AppliedObjectOutput):
    """The NodeResourceTopology of one Node.

    Another field manager of its zones (NFD's topology updater, the resource topology exporter,
    koordlet, an editor) is reported once, and its fields stay.
    """

    name, resource, kind = "topology", Resource.TOPOLOGIES, "NodeResourceTopology"
    failure_text = "NodeResourceTopology not written"
    missing_definition_hint = "apply config/kubernetes/publish-topology/crd.yaml"
    alternative = (
        "stop that, or leave publish.nodeResourceTopology off, or set "
        "publish.nodeResourceTopologyForce"
    )

    def __init__(self, node: str, prefix: str, config: Publish) -> None:
        super().__init__(node, force=config.node_resource_topology_force)
        self._touch = config.node_resource_topology_touch_on_release
        self._validity_s = parse_duration(config.node_resource_topology_validity)
        self._prefix, self._renewed = prefix, ""
        self._key = f"{prefix}/{RELEASE_COUNTER_ANNOTATION}"
        self._steady: Zones | None = None
        self._applied_last: Object | None = None
        self._object_uid = ""
        self._silent = self._object_read = self._reset = self._cured = False
        self._freed, self._touch_at = 0, float("inf")

    def renew_validity(self, wall: float) -> None:
        """Set the time of the renewal, in Unix seconds; written if the object has a validity."""
        self._renewed = micro_time_text(wall)

    def set_desired(self, zones: Zones | None) -> None:
        """Set the agent's document; None if the agent no longer answers.

        Free memory varies by itself: it is written when another amount has changed, and at every
        resync. Before the agent's first answer an earlier publisher's object is read.
        """
        self._silent = zones is None
        if zones is None:
            if self._wanted is not None:
                self._wanted = contents_with_agent_not_ready(self._prefix, self._wanted)
                self._steady = None
        elif (steady_zones := without_volatile_amounts(zones)) != self._steady:
            self._steady, self._wanted = steady_zones, build_topology_contents(self._prefix, zones)

    def _build_object(self) -> Object:
        annotations = {self._key: str(self._freed)}
        if self._validity_s:
            annotations[f"{self._prefix}/{RENEWED_AT_ANNOTATION}"] = self._renewed
            annotations[f"{self._prefix}/{VALIDITY_ANNOTATION}"] = f"{self._validity_s:.0f}"
        document = super()._build_object()
        document["metadata"]["annotations"] = annotations
        return document

    def _build_contents(self) -> Object:
        return dict(self._wanted)

    def pending_count(self) -> int:
        """Return 1 while the object or its field managers are not known to be as desired."""
        is_active = self._silent or self._wanted is not None
        return int(is_active and not self._object_read) or super().pending_count()

    def next_due_at(self) -> float:
        """Return when the next request may be made."""
        if self.pending_count():
            return super().next_due_at()
        return max(self.hold_until, self._touch_at)

    def _next_request(self, now_s: float) -> APIRequest | None:
        """Return a read of the Node's UID first, then of the field managers, then the apply."""
        if not self._owner_uid and self._wanted is not None:
            return self._node_read_request()
        if not self._object_read:
            return self._new_request(Verb.GET, self.resource, self._object)
        if self._reset:
            clean = [{"op": "replace", "path": "/metadata/managedFields", "value": [{}]}]
            return self._new_request(
                Verb.PATCH, self.resource, self._object, form=ContentType.JSON, body=clean
            )
        if self._touch_at <= now_s:
            self._freed, self._touch_at = self._freed + 1, float("inf")
        return self._apply_request()

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        result = outcome.result
        is_object_read = request.resource is self.resource and request.verb is Verb.GET
        is_prune_error = result is OutcomeKind.FAILED and SERVER_PRUNE_ERROR_TEXT in outcome.text
        if is_object_read and result in (OutcomeKind.SUCCEEDED, OutcomeKind.MISSING):
            self._on_object_read(outcome.documents[0] if outcome.documents else {}, now_s, jitter)
        elif result is OutcomeKind.SUCCEEDED and request.form is ContentType.JSON:
            self._reset = False
        elif is_prune_error and not self._cured:
            self._reset = self._cured = True
        else:
            if result not in (OutcomeKind.SUCCEEDED, OutcomeKind.FAILED, OutcomeKind.FORBIDDEN):
                self._object_read = self._reset = False
            super()._on_outcome(request, outcome, now_s, jitter)

    def _on_object_read(self, document: Mapping[str, Any], now_s: float, jitter: float) -> None:
        metadata = document.get("metadata") or {}
        self._object_read, self._sent, self._object_uid = True, None, metadata.get("uid", "")
        count_text = str((metadata.get("annotations") or {}).get(self._key))
        if count_text.isdecimal() and len(count_text) < 16:
            self._freed = max(self._freed, int(count_text))
        managed = metadata.get("managedFields") or ()
        managers = other_field_managers(managed)
        if managers and not self._force:
            self._object_read = False
            self._block_on_field_owners(managers, now_s, jitter)
        elif self._wanted is None and managed and not managers and "zones" in document:
            # An earlier publisher left it, perhaps with `ready` in it.
            contents = {key: document.get(key) or [] for key in ("attributes", "zones")}
            self._wanted = contents_with_agent_not_ready(self._prefix, contents)

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now_s: float) -> None:
        if self._touch and has_more_available(self._applied_last, request.body):
            self._touch_at = now_s + RELEASE_TOUCH_DELAY_S
        self._applied_last = request.body
        uid = document["metadata"].get("uid", "")
        if self._object_uid and uid != self._object_uid:
            # It was deleted, perhaps by the garbage collector because the Node is another one.
            self._owner_uid = ""
        self._object_uid = uid

    def schedule_resync(self) -> None:
        """Read the Node and the object again, and apply the object."""
        super().schedule_resync()
        self._steady, self._object_read, self._cured = None, False, False


def other_field_managers(managed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the other managers of zones or attributes, from ``metadata.managedFields``."""
    managers = {
        str(entry.get("manager", ""))
        for entry in managed
        if any(field in (entry.get("fieldsV1") or {}) for field in _OWNED_FIELD_KEYS)
    }
    return sorted(managers - {FIELD_MANAGER})


def pods_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, each by namespace and name, in any order."""
    hashes = sorted(xxh64(name.encode(), xxh64(namespace.encode(), 0)) for namespace, name in pods)
    joined = b"".join(digest.to_bytes(8, "little") for digest in hashes)
    return f"{_FINGERPRINT_VERSION}{xxh64(joined, 0):016x}"


# --- xxHash, 64 bits: github.com/Cyan4973/xxHash, doc/xxhash_spec.md -----------------------------

_UINT64_MASK: Final = (1 << 64) - 1
_XXH64_PRIME_1: Final = 0x9E3779B185EBCA87
_XXH64_PRIME_2: Final = 0xC2B2AE3D27D4EB4F
_XXH64_PRIME_3: Final = 0x165667B19E3779F9
_XXH64_PRIME_4: Final = 0x85EBCA77C2B2AE63
_XXH64_PRIME_5: Final = 0x27D4EB2F165667C5


def xxh64(data: bytes, seed: int) -> int:
    """Compute the 64-bit xxHash."""
    offset = 0
    if len(data) >= 32:
        lanes = [
            seed + _XXH64_PRIME_1 + _XXH64_PRIME_2,
            seed + _XXH64_PRIME_2,
            seed,
            seed - _XXH64_PRIME_1,
        ]
        for offset in range(0, len(data) - 31, 32):
            lanes = [
                _xxh64_round(lane, _read_uint(data, offset + 8 * n)) for n, lane in enumerate(lanes)
            ]
        offset += 32
        acc = sum(
            _rotate_left_64(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)
        )
        for lane in lanes:
            acc = ((acc ^ _xxh64_round(0, lane)) * _XXH64_PRIME_1 + _XXH64_PRIME_4) & _UINT64_MASK
    else:
        acc = seed + _XXH64_PRIME_5
    acc += len(data)
    while offset + 8 <= len(data):
        acc = (
            _rotate_left_64(acc ^ _xxh64_round(0, _read_uint(data, offset)), 27) * _XXH64_PRIME_1
            + _XXH64_PRIME_4
        )
        offset += 8
    if offset + 4 <= len(data):
        acc = (
            _rotate_left_64(acc ^ (_read_uint(data, offset, 4) * _XXH64_PRIME_1), 23)
            * _XXH64_PRIME_2
            + _XXH64_PRIME_3
        )
        offset += 4
    for byte in data[offset:]:
        acc = _rotate_left_64(acc ^ (byte * _XXH64_PRIME_5), 11) * _XXH64_PRIME_1
    acc &= _UINT64_MASK
    acc = ((acc ^ (acc >> 33)) * _XXH64_PRIME_2) & _UINT64_MASK
    acc = ((acc ^ (acc >> 29)) * _XXH64_PRIME_3) & _UINT64_MASK
    return acc ^ (acc >> 32)


def _read_uint(data: bytes, offset: int, size: int = 8) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def _rotate_left_64(number: int, bits: int) -> int:
    number &= _UINT64_MASK
    return (number << bits | number >> (64 - bits)) & _UINT64_MASK


def _xxh64_round(lane: int, value: int) -> int:
    return _rotate_left_64(lane + value * _XXH64_PRIME_2, 31) * _XXH64_PRIME_1 & _UINT64_MASK
