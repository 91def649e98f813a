"""``kubectl numa cluster``: the NUMA nodes of all nodes, from what the API server has. Pure.

It stands beside ``kubectl-numa`` and needs nothing but Python 3.9. What is read are the
NodeResourceTopology objects that ``nri-numa publish`` writes, Nodes for the annotation ``drained``,
and Pending pods for those that a node refused. Objects may come from other programs and may have
been edited: what cannot be read makes its node an unknown one, with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import IO, Any, Iterable, Iterator, NamedTuple

Object = dict[str, Any]

_ZONE = re.compile(r"node-([0-9]{1,4})", re.ASCII)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[0-9]{1,2}|[A-Za-z]{0,2})", re.ASCII)
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES.update({f"{c}i": float(1024 ** (n + 1)) for n, c in enumerate("KMGTP")})
_ITEMS = re.compile(r'"items"\s*:\s*(\[|null)')
_BETWEEN = re.compile(r"[\s,]*")
_PIECE = 1 << 18
"""Characters of a list that are read at once: some Nodes, with all that a kubelet writes there."""
MAX_NODES = 100
"""Nodes, and pods that are stuck, that people are shown where they do not ask for all."""
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)
"""What objects of another form than ours make; all of it is their fault and none of ours."""


def quantity(value: object) -> int:
    """A quantity of Kubernetes, rounded down.

    Raises:
        ValueError: it is none.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} is no quantity")
    number, suffix = match.groups()
    if suffix.startswith("e") and len(suffix) > 1:
        return math.floor(float(number + suffix))
    if suffix not in _SUFFIXES:
        raise ValueError(f"{str(value)[:40]!r} has an unknown unit")
    if suffix == "" and number.isdigit():
        return int(number)
    return math.floor(float(number) * _SUFFIXES[suffix])


def ids(text: str) -> set[int]:
    """A list of NUMA nodes such as ``0-1,4``.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, "".join(text.split()).split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) > 1023:
            raise ValueError(part)
        found.update(range(int(first), int(last or first) + 1))
    return found


def listed(numbers: Iterable[int]) -> str:
    """NUMA nodes as a list such as ``0-1,4``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def harmless(text: str) -> str:
    """``text`` with what could move a cursor written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- what there is --------------------------------------------------------------------------------


def items(printed: IO[str]) -> Iterator[Object]:
    """The objects of a list, one after another, while it is printed.

    Raises:
        ValueError: it is no list, or its end is missing.
    """
    decode, text, at = json.JSONDecoder().raw_decode, "", -1
    while more := printed.read(_PIECE):
        text, at = text[max(at, 0) :] + more, min(at, 0)
        if at < 0:
            begin = _ITEMS.search(text)
            if begin is None:
                continue
            at = begin.end() if begin[1] == "[" else begin.start(1)
        while True:
            at = _BETWEEN.match(text, at).end()
            if text.startswith(("]", "null"), at):
                while printed.read(_PIECE):
                    pass
                return
            try:
                found, at = decode(text, at)
            except ValueError:
                break  # the rest of it comes
            yield found
    raise ValueError("the end of the list is missing")


def document(shown: list[Object], stuck: list[Object]) -> Object:
    """All nodes, as ``-o json`` prints them.

    Args:
        shown: `machines`.
        stuck: `stuck_containers` of pods that are Pending.
    """
    on = {(s["node"], s["namespace"], s["pod"]) for s in stuck}
    often = Counter(node for node, _, _ in on)
    for one in shown:
        one["stuckPods"] = often[one["name"]]
    counted = [one for one in shown if not one["problem"]]
    return {
        "nodes": shown,
        "stuckPods": sorted(stuck, key=lambda s: (s["node"], s["namespace"], s["pod"])),
        "total": {
            "nodes": len(shown),
            "unknownNodes": len(shown) - len(counted),
            "exclusiveCpus": sum(one["exclusiveCpus"] for one in counted),
            "freeExclusiveCpus": sum(one["freeExclusiveCpus"] for one in counted),
            "largestExclusiveRequest": max(
                (one["largestExclusiveRequest"] for one in counted), default=0
            ),
            "fragmentation": _fragmentation(
                sum(one["largestExclusiveRequest"] for one in counted),
                sum(_at_best(one) for one in counted),
            ),
        },
    }


def name_of(one: Object) -> str:
    """The object's name."""
    return str((one.get("metadata") or {}).get("name", ""))


def drained(node: Object, prefix: str) -> str:
    """What a Node's annotation says of drained NUMA nodes."""
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(f"{prefix}/drained", "")).strip()


def machines(topologies: Iterable[Object], known: dict[str, str], prefix: str) -> list[Object]:
    """What is shown of each node, by name.

    Args:
        topologies: NodeResourceTopology objects, of which no more is kept.
        known: `drained` of every Node, by name.
        prefix: of annotations and attributes.
    """
    shown = {
        name: _node(name, one, known.get(name, ""), prefix)
        for one in topologies
        for name in [name_of(one)]
    }
    for name in known.keys() - shown.keys():
        shown[name] = _node(name, None, known[name], prefix)
    return [shown[name] for name in sorted(shown)]


def _node(name: str, published: Object | None, said: str, prefix: str) -> Object:
    made: Object = {
        "name": name, "problem": "", "agentReady": True, "policy": "", "drained": "",
        "exclusiveCpus": 0, "freeExclusiveCpus": 0, "largestExclusiveRequest": 0,
        "fragmentation": 0.0, "zones": [],
    }  # fmt: skip
    drained: set[int] = set()
    try:
        drained = ids(said)
        made["drained"] = listed(drained)
    except _UNREADABLE:
        made["drained"] = "unreadable"
    if published is None:
        made["problem"] = "no NodeResourceTopology says what its NUMA nodes have"
        return made
    try:
        attributes = _attributes(published)
        made["agentReady"] = attributes.get(f"{prefix}/agent", "ready") == "ready"
        made["policy"] = attributes.get("topologyManagerPolicy", "")
        zones = [
            _zone(zone, prefix, drained)
            for zone in published.get("zones") or []
            if zone.get("type") == "Node" and zone.get("resources")
        ]
    except _UNREADABLE as error:
        made["problem"] = f"its NodeResourceTopology cannot be read: {str(error)[:100]}"
        return made
    made["zones"] = sorted(zones, key=lambda zone: zone["id"])
    made["exclusiveCpus"] = sum(zone["exclusiveCpus"] for zone in zones)
    made["freeExclusiveCpus"] = sum(zone["freeExclusiveCpus"] for zone in zones)
    made["largestExclusiveRequest"] = max((z["freeExclusiveCpus"] for z in zones), default=0)
    made["fragmentation"] = _fragmentation(made["largestExclusiveRequest"], _at_best(made))
    return made


def _zone(zone: Object, prefix: str, drained: set[int]) -> Object:
    match = _ZONE.fullmatch(str(zone["name"]))
    if match is None:
        raise ValueError(f"zone {str(zone['name'])[:40]!r}, expected node-0 and so on")
    amounts = {one["name"]: one for one in zone["resources"]}
    attributes = _attributes(zone)

    def amount(resource: str, key: str) -> int:
        one = amounts.get(resource)
        if one is None:
            return 0
        return min(quantity(one[key]), quantity(one["allocatable"]))

    there = amount("cpu", "allocatable")
    # A node without exclusive CPUs in it has the whole ones of what is available.
    free = attributes.get(f"{prefix}/free-exclusive-cpus", str(amount("cpu", "available")))
    factor = float(attributes.get(f"{prefix}/capacity-factor", "1"))
    if not (free.isdigit() and len(free) < 10 and 0 <= factor <= 1):
        raise ValueError(f"zone {zone['name']}: {free[:20]!r} CPUs, capacity factor {factor}")
    return {
        "id": int(match.group(1)),
        "exclusiveCpus": there,
        "freeExclusiveCpus": min(int(free), there),
        "memoryBytes": amount("memory", "allocatable"),
        "freeMemoryBytes": amount("memory", "available"),
        "capacityFactor": factor,
        "drained": int(match.group(1)) in drained,
    }


def _attributes(one: Object) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in one.get("attributes") or []:
        found.setdefault(item["name"], str(item["value"]))
    return found


def _at_best(node: Object) -> int:
    """CPUs of the largest request that fits one NUMA node if what is free were together."""
    largest = max((zone["exclusiveCpus"] for zone in node["zones"]), default=0)
    return min(node["freeExclusiveCpus"], largest)


def _fragmentation(largest: int, at_best: int) -> float:
    """Part of the largest possible request that is lost because free CPUs lie apart: 0 to 1."""
    return round(1 - largest / at_best, 3) if at_best > 0 else 0.0


# --- pods that a node refused ---------------------------------------------------------------------


def refusal(space: str, pod: str, message: str) -> list[str] | None:
    """Reason and clause of our refusal in a kubelet's message; None where it is not ours."""
    who = f"pod {space}/{pod}, container "
    match = re.search(rf"\b([A-Z][A-Za-z]{{2,60}}): ({re.escape(who)}.*)", message, re.DOTALL)
    return [match.group(1), match.group(2)] if match else None


def stuck_containers(pod: Object) -> list[Object]:
    """Containers of a pod that its node refuses to place, again and again."""
    found: list[Object] = []
    try:
        metadata, status = pod["metadata"], pod.get("status") or {}
        space, name = metadata["namespace"], metadata["name"]
        for kind in ("initContainerStatuses", "containerStatuses"):
            for one in status.get(kind) or []:
                waiting = (one.get("state") or {}).get("waiting") or {}
                refused = refusal(space, name, str(waiting.get("message", "")))
                if refused is not None:
                    found.append(
                        {
                            "namespace": space,
                            "pod": name,
                            "container": one["name"],
                            "node": (pod.get("spec") or {}).get("nodeName", ""),
                            "reason": refused[0],
                            "message": refused[1],
                        }
                    )
    except _UNREADABLE:
        return found
    return found


# --- how it is shown ------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table; of those with a number above 0 the largest is left out first."""

    title: str
    spare: int = 0


NODES = (
    Column("NODE"), Column("NUMA", 5), Column("FREE"), Column("OF", 4), Column("LARGEST"),
    Column("FRAGMENTED", 3), Column("MEMORY FREE", 6), Column("FACTOR", 2), Column("DRAINED", 1),
    Column("STUCK", 1),
)  # fmt: skip
ZONES = (
    Column("NODE"), Column("NUMA NODE"), Column("FREE"), Column("OF", 4), Column("MEMORY FREE", 3),
    Column("OF", 5), Column("FACTOR", 2), Column("DRAINED", 1),
)  # fmt: skip


def text(found: Object, width: int | None, *, wide: bool, limit: int | None) -> list[str]:
    """The document for people.

    Args:
        found: of `document`.
        width: columns of the terminal; None for as wide as it gets.
        wide: a row for each NUMA node.
        limit: so many nodes and stuck pods; None for all.
    """
    # Order: nodes with stuck pods, those that take nothing, drained ones, those with less than
    # their whole capacity, all others; then by name.
    known = sorted((one for one in found["nodes"] if not one["problem"]), key=_well)
    unknown = [one for one in found["nodes"] if one["problem"]]
    rows = [_node_row(one) for one in known[:limit]]
    if wide:
        rows = [_zone_row(one["name"], zone) for one in known[:limit] for zone in one["zones"]]
    lines, spared = table(ZONES if wide else NODES, rows, width) if rows else ([], "")
    lines += [""] if rows else []
    if spared:
        lines.append(f"Not shown for want of width: {spared}.")
    total = found["total"]
    lines.append(
        f"{total['freeExclusiveCpus']} of {total['exclusiveCpus']} exclusive CPUs are free on "
        f"{total['nodes'] - total['unknownNodes']} nodes; the largest request that fits one NUMA "
        f"node is {total['largestExclusiveRequest']}, {total['fragmentation']:.0%} fragmented."
    )
    away = [one for one in known if not one["agentReady"]]
    shown = {
        "nodes": ["" for one in known],
        "such nodes": [
            f"Node {one['name']}: {one['problem'] or 'its agent does not place containers now'}."
            for one in unknown + away
        ],
        "stuck pods": [
            f"Stuck: {one['namespace']}/{one['pod']} on {one['node']}, container "
            f"{one['container']}: {one['reason']} (kubectl numa why {one['pod']} "
            f"-n {one['namespace']})"
            for one in found["stuckPods"]
        ],
    }
    for what, of in shown.items():
        lines += filter(None, of[:limit])
        if limit is not None and len(of) > limit:
            lines.append(f"{len(of) - limit} more {what}: --all.")
    return lines


def _well(one: Object) -> tuple[int, int, str]:
    """How well a node is, the worst first."""
    lowered = any(zone["capacityFactor"] < 1 for zone in one["zones"])
    signs = (one["stuckPods"], not one["agentReady"], one["drained"], lowered, True)
    return [bool(sign) for sign in signs].index(True), -one["stuckPods"], one["name"]


def _node_row(one: Object) -> list[str]:
    zones = one["zones"]
    factors = sorted({zone["capacityFactor"] for zone in zones}) or [1]
    ends = factors if len(factors) == 1 else [factors[0], factors[-1]]
    return [
        one["name"],
        str(len(zones)),
        "+".join(str(zone["freeExclusiveCpus"]) for zone in zones) or "0",
        str(one["exclusiveCpus"]),
        str(one["largestExclusiveRequest"]),
        f"{one['fragmentation']:.0%}",
        size(sum(zone["freeMemoryBytes"] for zone in zones)),
        "-".join(f"{factor:g}" for factor in ends),
        one["drained"] or "-",
        str(one["stuckPods"]),
    ]


def _zone_row(name: str, zone: Object) -> list[str]:
    return [
        name,
        str(zone["id"]),
        str(zone["freeExclusiveCpus"]),
        str(zone["exclusiveCpus"]),
        size(zone["freeMemoryBytes"]),
        size(zone["memoryBytes"]),
        f"{zone['capacityFactor']:g}",
        "yes" if zone["drained"] else "-",
    ]


def size(amount: int) -> str:
    """Bytes as ``512Mi``, ``62.6Gi``."""
    value = float(amount)
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if value < 1024:
            return (
                f"{value:.0f}{unit}" if value >= 100 or value.is_integer() else f"{value:.1f}{unit}"
            )
        value /= 1024
    return f"{value:.1f}Pi"


def table(
    columns: Iterable[Column], rows: list[list[str]], width: int | None
) -> tuple[list[str], str]:
    """Lines of a table; where it is too wide, columns are left out, then the first is broken.

    And the titles of those that are left out.

    Nothing is cut: a name that another command takes is there to its last letter.
    """
    heads = list(columns)
    shown = list(range(len(heads)))
    widths = [
        max([len(head.title), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)
    ]

    def total() -> int:
        return sum(widths[i] for i in shown) + 2 * (len(shown) - 1)

    if width is not None:
        for i in sorted(shown, key=lambda i: -heads[i].spare):
            if heads[i].spare and total() > width:
                shown.remove(i)
        over = total() - width
        if over > 0:
            widths[0] = max(8, widths[0] - over)
    lines: list[str] = []
    for row in [[head.title for head in heads], *rows]:
        name = row[0]
        first = [name[at : at + widths[0]] for at in range(0, len(name), widths[0])] or [""]
        rest = "  ".join(row[i].ljust(widths[i]) for i in shown[1:])
        lines.append(f"{first[0].ljust(widths[0])}  {rest}".rstrip())
        lines += first[1:]
    return lines, ", ".join(head.title for i, head in enumerate(heads) if i not in shown)


def yaml(value: object, indent: str = "") -> str:
    """A document as YAML: texts are written as JSON writes them, which is YAML too."""
    if isinstance(value, dict) and value:
        return "".join(f"{indent}{key}:{_under(one, indent)}" for key, one in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{indent}-{_under(one, indent)}" for one in value)
    return f"{indent}{json.dumps(value)}\n"


def _under(value: object, indent: str) -> str:
    if isinstance(value, (dict, list)) and value:
        return "\n" + yaml(value, indent + "  ")
    return f" {json.dumps(value)}\n"
