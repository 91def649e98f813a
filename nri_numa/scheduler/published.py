"""What nodes publish of their NUMA nodes: NodeResourceTopology objects, read into small tables.

The objects (``topology.node.k8s.io/v1alpha2``) may come from ``nri-numa publish`` or from somebody
else, and may have been edited by hand. What cannot be read makes the node an unknown one, with the
reason; nothing here raises.

An amount is read as what is certain: a zone that says nothing of the CPUs that can be exclusive has
the whole ones of what is available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nri_numa.charged import CHARGED
from nri_numa.engine.values.workload import Policy, Scope
from nri_numa.machine.cpuset import NUMASet
from nri_numa.scheduler.front import FRONTS, Front
from nri_numa.text import BadQuantity, quantity

NODE: Final = "Node"
_PREFIX: Final = "node-"
_READY: Final = "ready"
_LOCAL, _REMOTE = 10, 20
"""The kernel's distances where firmware tells none (drivers/acpi/numa)."""
_MOST: Final = 1 << 62
_ITEMS: Final = 4096
"""Zones, costs, resources or attributes in one list; ten times what the largest machine has."""

Column = tuple[int, ...]
"""A quantity by NUMA node, in the order of ``Table.ids``."""


@dataclass(frozen=True, slots=True)
class Stock:
    """One resource: what an empty machine has, and what is left of it."""

    name: str
    there: Column
    left: Column


@dataclass(frozen=True, slots=True)
class Table:
    """One node's NUMA nodes.

    Attributes:
        ids: NUMA nodes, ascending; there may be holes.
        distances: row by row, in the order of ``ids``.
        cpu: thousandths of a CPU for containers that share.
        exclusive: whole CPUs, and those that can be exclusive.
        others: memory and huge pages in bytes, by name.
        factor: share of its capacity that each NUMA node gives to containers, in thousandths.
        threads: threads of a core.
        policy: of the kubelet's Topology Manager.
        scope: of it.
        aligns_cpus: the kubelet pins CPUs, as far as it is told.
        aligns_memory: likewise memory.
        silent: its agent does not place containers now.
        together: whole CPUs that can be exclusive in all, where a floor or a quota makes that less
            than the sum; None where nothing says it.
        charged: `nri_numa.charged.marks` of the containers that the numbers count. Nodes that
            differ in nothing else are judged alike, so it is no part of equality.
        whole: CPUs that can be exclusive and have their whole time left.
        alike: all NUMA nodes are equally far from themselves, as on any real machine.
        memory: of `others`; None where the object does not name it.
        fronts: what the cheap look prepared, by `nri_numa.scheduler.front.front_index`.
    """

    ids: tuple[int, ...]
    distances: tuple[Column, ...]
    cpu: Stock
    exclusive: Stock
    others: tuple[Stock, ...]
    factor: Column
    threads: int = 1
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    aligns_cpus: bool = True
    aligns_memory: bool = False
    silent: bool = False
    together: int | None = None
    charged: str = field(default="", compare=False)
    whole: Column = field(init=False, repr=False, compare=False)
    alike: bool = field(init=False, repr=False, compare=False)
    memory: Stock | None = field(init=False, repr=False, compare=False)
    fronts: list[Front | None] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out once what is asked about for each pod, and the hash: tables are keys."""
        left = zip(self.exclusive.left, self.cpu.left, strict=True)
        object.__setattr__(self, "whole", tuple([min(n, m // 1000) for n, m in left]))
        own = {row[place] for place, row in enumerate(self.distances)}
        object.__setattr__(self, "alike", len(own) == 1)
        memory = next((stock for stock in self.others if stock.name == "memory"), None)
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "fronts", [None] * FRONTS)
        parts = (self.ids, self.cpu, self.exclusive, self.others, self.policy, self.threads)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def numa_ids(self) -> NUMASet:
        """Its NUMA nodes as a set."""
        return NUMASet(self.ids)

    def distance(self, one: int, other: int) -> int:
        """Distance between two NUMA nodes, of the firmware's table."""
        return self.distances[self.ids.index(one)][self.ids.index(other)]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that says nothing certain; ``why`` is a sentence without the node's name."""

    why: str


class _Bad(Exception):
    """What is wrong, where, and what was expected."""


def read(document: Mapping[str, Any], prefix: str) -> Table | Unreadable:
    """Read one object.

    Args:
        document: as the API server gives it.
        prefix: annotation prefix, which names our attributes.
    """
    try:
        return _table(document, prefix)
    except _Bad as error:
        return Unreadable(str(error))


def _table(document: Mapping[str, Any], prefix: str) -> Table:
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
    stocks = _stocks(ids, zones)
    cpu = stocks.pop("cpu", None)
    if cpu is None:
        raise _Bad("no zone has the resource cpu")
    exclusive: list[int] = []
    factors: list[int] = []
    milli: list[int] = []
    threads = 1
    for place, i in enumerate(ids):
        path = f"zone {_PREFIX}{i}"
        own = _attributes(zones[i].get("attributes"), path)
        # Of those that may be exclusive the resource speaks; others share what is left of time.
        milli.append(_number(own, f"{prefix}/free-cpu-milli", path, cpu.left[place]))
        free = _number(own, f"{prefix}/free-exclusive-cpus", path, cpu.left[place] // 1000)
        exclusive.append(min(free, cpu.there[place] // 1000))
        threads = max(threads, _number(own, f"{prefix}/threads-per-core", path, 1))
        factors.append(_factor(own.get(f"{prefix}/capacity-factor"), path))
    return Table(
        ids=ids,
        distances=tuple(_costs(zones[i].get("costs"), i, ids) for i in ids),
        cpu=Stock("cpu", tuple(map(max, cpu.there, milli)), tuple(milli)),
        exclusive=Stock("cpu", tuple(n // 1000 for n in cpu.there), tuple(exclusive)),
        others=tuple(stocks[name] for name in sorted(stocks)),
        factor=tuple(factors),
        threads=threads,
        policy=_policy(document, attributes),
        scope=Scope.POD if attributes.get("topologyManagerScope") == Scope.POD else Scope.CONTAINER,
        aligns_cpus=attributes.get("cpuManagerPolicy", "static") == "static",
        aligns_memory=attributes.get("memoryManagerPolicy") == "Static",
        silent=attributes.get(f"{prefix}/agent", _READY) != _READY,
        together=_together(attributes, f"{prefix}/free-exclusive-cpus"),
        charged=attributes.get(f"{prefix}/{CHARGED}", ""),
    )


def _together(attributes: Mapping[str, str], name: str) -> int | None:
    return _number(attributes, name, "attributes", 0) if name in attributes else None


def _policy(document: Mapping[str, Any], attributes: Mapping[str, str]) -> Policy:
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


def _stocks(ids: tuple[int, ...], zones: Mapping[int, Mapping[str, Any]]) -> dict[str, Stock]:
    """By resource; one that a zone does not name is not there."""
    there: dict[str, list[int]] = {}
    left: dict[str, list[int]] = {}
    for place, i in enumerate(ids):
        for number, resource in enumerate(_list(zones[i]["resources"], f"zone {_PREFIX}{i}")):
            path = f"zone {_PREFIX}{i}, resources[{number}]"
            name = resource.get("name") if isinstance(resource, Mapping) else None
            if not isinstance(name, str):
                raise _Bad(f"{path} has no name")
            path = f"zone {_PREFIX}{i}, {_plain(name)}"
            factor = 1000 if name == "cpu" else 1
            whole = _amount(resource, "allocatable", path, factor)
            if name not in there:
                there[name], left[name] = [0] * len(ids), [0] * len(ids)
            there[name][place] = whole
            left[name][place] = min(whole, _amount(resource, "available", path, factor))
    return {name: Stock(name, tuple(there[name]), tuple(left[name])) for name in there}


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
