"""NodeResourceTopology objects, read into `NodeResources`.

The objects (``topology.node.k8s.io/v1alpha2``) may come from ``nri-numa publish`` or another
publisher, and may have been edited by hand. An unreadable object makes the node unknown, with a
reason; nothing here raises.

Amounts are read conservatively: a zone without a number of exclusive CPUs has the whole CPUs of its
available amount.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.cluster.node_resources import (
    AmountByPosition,
    NodeResource,
    NodeResources,
    UnreadableTopology,
)
from nri_numa.kube.requests import annotations_of
from nri_numa.model.counted_containers import COUNTED_CONTAINERS_NRT_ATTRIBUTE
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy, Scope
from nri_numa.text import BadQuantity, parse_exact_quantity

NODE_ZONE_TYPE: Final = "Node"
_ZONE_NAME_PREFIX: Final = "node-"
_READY_VALUE: Final = "ready"
_LOCAL_DISTANCE, _REMOTE_DISTANCE = 10, 20
"""The kernel's distances if the firmware has none (drivers/acpi/numa)."""
_MAX_AMOUNT: Final = 1 << 62
_MAX_LIST_ITEMS: Final = 4096
"""Zones, costs, resources or attributes in one list; ten times what the largest machine has."""
RENEWED_AT_ANNOTATION: Final = "renewed-at"
VALIDITY_ANNOTATION: Final = "validity-seconds"
MAX_TOPOLOGY_VALIDITY_S: Final = 7 * 86400
"""Seconds; a longer validity is reduced to it."""


class _InvalidTopology(Exception):
    """An invalid object; the text has the path, the value and what was expected."""


def _unexpected_value(subject: str, value: object, expectation: str) -> _InvalidTopology:
    return _InvalidTopology(f"{subject} is {_value_text(value)}, expected {expectation}")


def decode_topology(document: Mapping[str, Any], prefix: str) -> NodeResources | UnreadableTopology:
    """Read one object."""
    try:
        return _read_resources(document, prefix)
    except _InvalidTopology as error:
        return UnreadableTopology(str(error))


def _read_resources(document: Mapping[str, Any], prefix: str) -> NodeResources:
    if document.get("apiVersion") not in (None, "topology.node.k8s.io/v1alpha2"):
        raise _unexpected_value("apiVersion", document["apiVersion"], "v1alpha2")
    zones: dict[int, Mapping[str, Any]] = {}
    for number, zone in enumerate(_require_list(document.get("zones"), "zones")):
        if not isinstance(zone, Mapping):
            raise _unexpected_value(f"zones[{number}]", zone, "a zone")
        if zone.get("type") != NODE_ZONE_TYPE:
            continue
        numa_node = _parse_numa_id(zone.get("name"), f"zones[{number}].name")
        if numa_node in zones:
            raise _InvalidTopology(f"zone {_ZONE_NAME_PREFIX}{numa_node} is there twice")
        zones[numa_node] = zone
    ids = tuple(sorted(i for i, zone in zones.items() if zone.get("resources")))
    if not ids:
        raise _InvalidTopology(f"no zone of type {NODE_ZONE_TYPE} has resources")
    attributes = _attributes_by_name(document.get("attributes"), "attributes")
    resources = _resources_by_name(ids, zones)
    cpu = resources.pop("cpu", None)
    if cpu is None:
        raise _InvalidTopology("no zone has the resource cpu")
    whole_cpus = [n // 1000 for n in cpu.capacity]
    exclusive: list[int] = []
    exclusive_after_moves: list[int] = []
    factors: list[int] = []
    milli: list[int] = []
    threads, exclusive_name = 1, f"{prefix}/free-exclusive-cpus"
    for i, free_milli, max_cpus in zip(ids, cpu.free, whole_cpus, strict=True):
        path = f"zone {_ZONE_NAME_PREFIX}{i}"
        values = _attributes_by_name(zones[i].get("attributes"), path)
        parse_integer = partial(_parse_integer_attribute, values, path)
        # The resource counts CPUs that may be exclusive; shared containers use their free time.
        milli.append(parse_integer(f"{prefix}/free-cpu-milli", free_milli))
        exclusive.append(min(parse_integer(exclusive_name, free_milli // 1000), max_cpus))
        cpus_after_moves = parse_integer(f"{prefix}/exclusive-cpus-after-moves", 0)
        exclusive_after_moves.append(max(exclusive[-1], min(cpus_after_moves, max_cpus)))
        threads = max(threads, parse_integer(f"{prefix}/threads-per-core", 1))
        factors.append(_parse_capacity_factor(values.get(f"{prefix}/capacity-factor"), path))
    return NodeResources(
        ids=ids,
        distances=tuple(_parse_distance_row(zones[i].get("costs"), i, ids) for i in ids),
        cpu=NodeResource("cpu", tuple(map(max, cpu.capacity, milli)), tuple(milli)),
        exclusive=NodeResource("cpu", tuple(whole_cpus), tuple(exclusive)),
        exclusive_after_moves=(
            tuple(exclusive_after_moves) if exclusive_after_moves != exclusive else ()
        ),
        other_resources=tuple(resources[name] for name in sorted(resources)),
        factor=tuple(factors),
        threads_per_core=threads,
        policy=_parse_policy(attributes),
        scope=Scope.POD if attributes.get("topologyManagerScope") == Scope.POD else Scope.CONTAINER,
        aligns_cpus=attributes.get("cpuManagerPolicy", "static") == "static",
        aligns_memory=attributes.get("memoryManagerPolicy") == "Static",
        agent_not_ready=attributes.get(f"{prefix}/agent-state", _READY_VALUE) != _READY_VALUE,
        exclusive_limit=(
            _parse_integer_attribute(attributes, "attributes", exclusive_name, 0)
            if exclusive_name in attributes
            else None
        ),
        counted_containers=attributes.get(f"{prefix}/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}"),
    )


def _parse_policy(attributes: Mapping[str, str]) -> Policy:
    name = "topologyManagerPolicy"
    text = attributes.get(name, Policy.NONE)
    try:
        return Policy(text)
    except ValueError:
        raise _unexpected_value(f"attribute {name}", text, f"one of {', '.join(Policy)}") from None


def _resources_by_name(
    ids: tuple[int, ...], zones: Mapping[int, Mapping[str, Any]]
) -> dict[str, NodeResource]:
    """Read the resources by name; a zone has 0 of a resource that it does not list."""
    capacity: dict[str, list[int]] = {}
    available: dict[str, list[int]] = {}
    for position, i in enumerate(ids):
        zone_path = f"zone {_ZONE_NAME_PREFIX}{i}"
        for number, resource in enumerate(_require_list(zones[i]["resources"], zone_path)):
            path = f"{zone_path}, resources[{number}]"
            name = resource.get("name") if isinstance(resource, Mapping) else None
            if not isinstance(name, str):
                raise _InvalidTopology(f"{path} has no name")
            path = f"{zone_path}, {_printable_name(name)}"
            factor = 1000 if name == "cpu" else 1
            allocatable = _parse_amount(resource, "allocatable", path, factor)
            free_amount = _parse_amount(resource, "available", path, factor)
            if name not in capacity:
                capacity[name], available[name] = [0] * len(ids), [0] * len(ids)
            capacity[name][position] = allocatable
            available[name][position] = min(allocatable, free_amount)
    return {
        name: NodeResource(name, tuple(capacity[name]), tuple(available[name])) for name in capacity
    }


def _parse_amount(resource: Mapping[str, Any], key: str, path: str, factor: int) -> int:
    """Read a quantity, rounded down to whole units."""
    value = resource.get(key)
    if isinstance(value, str) and len(value) < 19 and value.isascii() and value.isdigit():
        return int(value) * factor
    try:
        amount = int(parse_exact_quantity(value) * factor)
    except BadQuantity as error:
        raise _unexpected_value(f"{path}: {key}", value, str(error)) from None
    if amount > _MAX_AMOUNT:
        raise _unexpected_value(f"{path}: {key}", value, "what some machine has")
    return amount


def _parse_distance_row(value: object, me: int, ids: tuple[int, ...]) -> AmountByPosition:
    distances: dict[int, int] = {}
    for number, cost in enumerate(_require_list(value, f"zone {_ZONE_NAME_PREFIX}{me}, costs")):
        path = f"zone {_ZONE_NAME_PREFIX}{me}, costs[{number}]"
        if not isinstance(cost, Mapping):
            raise _unexpected_value(path, cost, "name and value")
        amount = cost.get("value")
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount <= 10_000:
            raise _unexpected_value(f"{path}: value", amount, "a distance such as 21")
        name = cost.get("name")
        if isinstance(name, str) and name.startswith(_ZONE_NAME_PREFIX):
            distances.setdefault(_parse_numa_id(name, f"{path}: name"), amount)
    return tuple(distances.get(i, _LOCAL_DISTANCE if i == me else _REMOTE_DISTANCE) for i in ids)


def _attributes_by_name(value: object, path: str) -> dict[str, str]:
    """Read the attributes by name; the first of two with one name counts."""
    attributes: dict[str, str] = {}
    for number, item in enumerate(_require_list(value, path)):
        name = item.get("name") if isinstance(item, Mapping) else None
        text = item.get("value") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise _InvalidTopology(f"{path}: attributes[{number}] is no name and value, both texts")
        attributes.setdefault(name, text)
    return attributes


def _parse_integer_attribute(
    attributes: Mapping[str, str], path: str, name: str, default: int
) -> int:
    text = attributes.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise _unexpected_value(f"{path}: attribute {name}", text, "a whole number")
    return int(text)


def _parse_capacity_factor(text: str | None, path: str) -> int:
    if text is None:
        return 1000
    try:
        factor = parse_exact_quantity(text)
    except BadQuantity:
        factor = None
    if factor is None or factor > 1:
        raise _unexpected_value(f"{path}: capacity-factor", text, "a number from 0 to 1")
    return int(factor * 1000)


def _parse_numa_id(name: object, path: str) -> int:
    digits = name.removeprefix(_ZONE_NAME_PREFIX) if isinstance(name, str) else ""
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 6 and digits != name
    if not is_number or int(digits) >= NUMASet.LIMIT:
        raise _unexpected_value(path, name, f"{_ZONE_NAME_PREFIX}0 and so on")
    return int(digits)


def _require_list(value: object, path: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_LIST_ITEMS:
        raise _unexpected_value(path, value, f"a list of at most {_MAX_LIST_ITEMS}")
    return value


def _value_text(value: object) -> str:
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def _printable_name(name: str) -> str:
    return name if name.isprintable() and len(name) <= 80 else _value_text(name)


class TopologyValidity:
    """Expiry times of objects.

    A publisher that stops leaves its last numbers behind, with ``ready`` in them. With
    ``publish.nodeResourceTopologyValidity`` the object has two annotations: ``renewed-at``, whose
    text differs after each renewal, and ``validity-seconds``. As with a Lease, clocks are never
    compared: an object expires if its text has not changed for that time by the reader's own clock.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._renewed_key = f"{prefix}/{RENEWED_AT_ANNOTATION}"
        self._validity_key = f"{prefix}/{VALIDITY_ANNOTATION}"
        self._known: dict[str, tuple[str, float]] = {}

    def decode_with_validity(
        self, name: str, document: Mapping[str, Any], now_s: float
    ) -> NodeResources | UnreadableTopology:
        """Read an object; the agent of an expired object counts as not ready."""
        room = decode_topology(document, self._prefix)
        if not self._record_validity(name, document, now_s) and isinstance(room, NodeResources):
            return replace(room, agent_not_ready=True)
        return room

    def _record_validity(self, name: str, document: Mapping[str, Any], now_s: float) -> bool:
        """Record an object; return True if it is valid, as always without a validity."""
        annotations = annotations_of(document)
        text = annotations.get(self._renewed_key)
        seconds = _parse_validity_seconds(annotations.get(self._validity_key))
        if not isinstance(text, str) or seconds is None:
            self._known.pop(name, None)
            return True
        known_text, expires_at = self._known.get(name, (None, 0.0))
        expires_at = expires_at if known_text == text else now_s + seconds
        self._known[name] = text, expires_at
        return now_s < expires_at

    def forget_node(self, name: str) -> None:
        """Forget an object that no longer exists."""
        self._known.pop(name, None)

    def expired_nodes(self, now_s: float) -> list[str]:
        """Return the nodes whose object has expired."""
        return [name for name, (_, expires_at) in self._known.items() if expires_at <= now_s]


def _parse_validity_seconds(text: object) -> int | None:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 6):
        return None
    return min(int(text), MAX_TOPOLOGY_VALIDITY_S) or None
