"""What nodes publish of their NUMA nodes: NodeResourceTopology objects, read into `NodeRoom`.

The objects (``topology.node.k8s.io/v1alpha2``) may come from ``nri-numa publish`` or another
publisher, and may have been edited by hand. What cannot be read makes the node an unknown one, with
the reason; nothing here raises.

An amount is read as what is certain: a zone that says nothing of the CPUs that can be exclusive has
the whole ones of what is available.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.kube.requests import annotations_of
from nri_numa.model.charged import CHARGED
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy, Scope
from nri_numa.scheduler.node_room import Column, NodeRoom, Resource, Unreadable
from nri_numa.text import BadQuantity, quantity

NODE: Final = "Node"
_PREFIX: Final = "node-"
_READY: Final = "ready"
_LOCAL, _REMOTE = 10, 20
"""The kernel's distances where firmware gives none (drivers/acpi/numa)."""
_MOST: Final = 1 << 62
_ITEMS: Final = 4096
"""Zones, costs, resources or attributes in one list; ten times what the largest machine has."""
RENEWED: Final = "renewed"
VALID: Final = "valid-seconds"
LONGEST: Final = 7 * 86400
"""Seconds; what is longer is not meant."""


class _Bad(Exception):
    """What is wrong, where, and what was expected."""


def read(document: Mapping[str, Any], prefix: str) -> NodeRoom | Unreadable:
    """Read one object."""
    try:
        return _room(document, prefix)
    except _Bad as error:
        return Unreadable(str(error))


def _room(document: Mapping[str, Any], prefix: str) -> NodeRoom:
    if document.get("apiVersion") not in (None, "topology.node.k8s.io/v1alpha2"):
        raise _Bad(f"apiVersion is {_shown(document['apiVersion'])}, expected v1alpha2")
    zones: dict[int, Mapping[str, Any]] = {}
    for number, zone in enumerate(_list(document.get("zones"), "zones")):
        if not isinstance(zone, Mapping):
            raise _Bad(f"zones[{number}] is {_shown(zone)}, expected a zone")
        if zone.get("type") != NODE:
            continue
        numa_node = _id(zone.get("name"), f"zones[{number}].name")
        if numa_node in zones:
            raise _Bad(f"zone {_PREFIX}{numa_node} is there twice")
        zones[numa_node] = zone
    ids = tuple(sorted(i for i, zone in zones.items() if zone.get("resources")))
    if not ids:
        raise _Bad(f"no zone of type {NODE} has resources")
    attributes = _attributes(document.get("attributes"), "attributes")
    resources = _resources(ids, zones)
    cpu = resources.pop("cpu", None)
    if cpu is None:
        raise _Bad("no zone has the resource cpu")
    exclusive: list[int] = []
    after: list[int] = []
    factors: list[int] = []
    milli: list[int] = []
    threads, exclusive_name = 1, f"{prefix}/free-exclusive-cpus"
    for place, i in enumerate(ids):
        path = f"zone {_PREFIX}{i}"
        own = _attributes(zones[i].get("attributes"), path)
        # The resource counts CPUs that may be exclusive; others share what is free of their time.
        milli.append(_number(own, f"{prefix}/free-cpu-milli", path, cpu.free[place]))
        free = _number(own, exclusive_name, path, cpu.free[place] // 1000)
        exclusive.append(min(free, cpu.capacity[place] // 1000))
        moved = _number(own, f"{prefix}/exclusive-cpus-after-moving", path, 0)
        after.append(max(exclusive[-1], min(moved, cpu.capacity[place] // 1000)))
        threads = max(threads, _number(own, f"{prefix}/threads-per-core", path, 1))
        factors.append(_factor(own.get(f"{prefix}/capacity-factor"), path))
    return NodeRoom(
        ids=ids,
        distances=tuple(_costs(zones[i].get("costs"), i, ids) for i in ids),
        cpu=Resource("cpu", tuple(map(max, cpu.capacity, milli)), tuple(milli)),
        exclusive=Resource("cpu", tuple(n // 1000 for n in cpu.capacity), tuple(exclusive)),
        after_moving=tuple(after) if after != exclusive else (),
        others=tuple(resources[name] for name in sorted(resources)),
        factor=tuple(factors),
        threads=threads,
        policy=_policy(attributes),
        scope=Scope.POD if attributes.get("topologyManagerScope") == Scope.POD else Scope.CONTAINER,
        aligns_cpus=attributes.get("cpuManagerPolicy", "static") == "static",
        aligns_memory=attributes.get("memoryManagerPolicy") == "Static",
        silent=attributes.get(f"{prefix}/agent", _READY) != _READY,
        together=(
            _number(attributes, exclusive_name, "attributes", 0)
            if exclusive_name in attributes
            else None
        ),
        charged=attributes.get(f"{prefix}/{CHARGED}"),
    )


def _policy(attributes: Mapping[str, str]) -> Policy:
    text = attributes.get("topologyManagerPolicy")
    if text is None:
        return Policy.NONE
    try:
        return Policy(text)
    except ValueError:
        expected = ", ".join(Policy)
        raise _Bad(
            f"attribute topologyManagerPolicy is {_shown(text)}, expected one of {expected}"
        ) from None


def _resources(ids: tuple[int, ...], zones: Mapping[int, Mapping[str, Any]]) -> dict[str, Resource]:
    """By resource; one that a zone does not name is not there."""
    capacity: dict[str, list[int]] = {}
    free: dict[str, list[int]] = {}
    for place, i in enumerate(ids):
        for number, resource in enumerate(_list(zones[i]["resources"], f"zone {_PREFIX}{i}")):
            path = f"zone {_PREFIX}{i}, resources[{number}]"
            name = resource.get("name") if isinstance(resource, Mapping) else None
            if not isinstance(name, str):
                raise _Bad(f"{path} has no name")
            path = f"zone {_PREFIX}{i}, {_plain(name)}"
            factor = 1000 if name == "cpu" else 1
            whole = _amount(resource, "allocatable", path, factor)
            if name not in capacity:
                capacity[name], free[name] = [0] * len(ids), [0] * len(ids)
            capacity[name][place] = whole
            free[name][place] = min(whole, _amount(resource, "available", path, factor))
    return {name: Resource(name, tuple(capacity[name]), tuple(free[name])) for name in capacity}


def _amount(resource: Mapping[str, Any], key: str, path: str, factor: int) -> int:
    """What is certain of a quantity: a part of a unit is rounded down."""
    value = resource.get(key)
    if isinstance(value, str) and len(value) < 19 and value.isascii() and value.isdigit():
        return int(value) * factor
    try:
        amount = int(quantity(value) * factor)
    except BadQuantity as error:
        raise _Bad(f"{path}: {key} is {_shown(value)}, expected {error}") from None
    if amount > _MOST:
        raise _Bad(f"{path}: {key} is {_shown(value)}, expected what some machine has")
    return amount


def _costs(value: object, me: int, ids: tuple[int, ...]) -> Column:
    found: dict[int, int] = {}
    for number, cost in enumerate(_list(value, f"zone {_PREFIX}{me}, costs")):
        path = f"zone {_PREFIX}{me}, costs[{number}]"
        if not isinstance(cost, Mapping):
            raise _Bad(f"{path} is {_shown(cost)}, expected name and value")
        amount = cost.get("value")
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount <= 10_000:
            raise _Bad(f"{path}: value is {_shown(amount)}, expected a distance such as 21")
        name = cost.get("name")
        if isinstance(name, str) and name.startswith(_PREFIX):
            found.setdefault(_id(name, f"{path}: name"), amount)
    return tuple(found.get(i, _LOCAL if i == me else _REMOTE) for i in ids)


def _attributes(value: object, path: str) -> dict[str, str]:
    """By name; of two with one name the first."""
    found: dict[str, str] = {}
    for number, item in enumerate(_list(value, path)):
        name = item.get("name") if isinstance(item, Mapping) else None
        text = item.get("value") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise _Bad(f"{path}: attributes[{number}] is no name and value, both texts")
        found.setdefault(name, text)
    return found


def _number(attributes: Mapping[str, str], name: str, path: str, default: int) -> int:
    text = attributes.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise _Bad(f"{path}: attribute {name} is {_shown(text)}, expected a whole number")
    return int(text)


def _factor(text: str | None, path: str) -> int:
    if text is None:
        return 1000
    try:
        factor = quantity(text)
    except BadQuantity:
        factor = None
    if factor is None or factor > 1:
        raise _Bad(f"{path}: capacity-factor is {_shown(text)}, expected a number from 0 to 1")
    return int(factor * 1000)


def _id(name: object, path: str) -> int:
    digits = name.removeprefix(_PREFIX) if isinstance(name, str) else ""
    good = digits.isascii() and digits.isdigit() and len(digits) <= 6 and digits != name
    if not good or int(digits) >= NUMASet.LIMIT:
        raise _Bad(f"{path} is {_shown(name)}, expected {_PREFIX}0 and so on")
    return int(digits)


def _list(value: object, path: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _ITEMS:
        raise _Bad(f"{path} is {_shown(value)}, expected a list of at most {_ITEMS}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def _plain(name: str) -> str:
    return name if name.isprintable() and len(name) <= 80 else _shown(name)


class Freshness:
    """Until when each object is valid.

    A publisher that dies leaves its last numbers behind, and ``ready`` in them. Where it says so
    (``publish.nodeResourceTopologyValidity``), the object has two annotations: ``renewed``, which
    is another text after each renewal, and ``valid-seconds``. As with a Lease clocks are never
    compared: an object is stale when its text has been the same for so long by our own clock.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._renewed, self._valid = f"{prefix}/{RENEWED}", f"{prefix}/{VALID}"
        self._known: dict[str, tuple[str, float]] = {}

    def read(self, name: str, document: Mapping[str, Any], now: float) -> NodeRoom | Unreadable:
        """Read an object; the agent of one that is not valid is silent."""
        known = read(document, self._prefix)
        if not self._seen(name, document, now) and isinstance(known, NodeRoom):
            return replace(known, silent=True)
        return known

    def _seen(self, name: str, document: Mapping[str, Any], now: float) -> bool:
        """An object exists; whether it is valid. One that names no validity is so for ever."""
        found = annotations_of(document)
        text, seconds = found.get(self._renewed), _seconds(found.get(self._valid))
        if not isinstance(text, str) or seconds is None:
            self._known.pop(name, None)
            return True
        before = self._known.get(name)
        until = before[1] if before is not None and before[0] == text else now + seconds
        self._known[name] = text, until
        return now < until

    def remove(self, name: str) -> None:
        """An object does not exist any more."""
        self._known.pop(name, None)

    def stale(self, now: float) -> list[str]:
        """Objects that are not valid any more."""
        return [name for name, (_, until) in self._known.items() if until <= now]


def _seconds(text: object) -> int | None:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 6):
        return None
    return min(int(text), LONGEST) or None
