"""A cluster as ``kubectl get noderesourcetopologies,nodes,pods -A -o json`` prints it.

It is read as the scheduler's watches would tell it: nodes with what they publish, pods on their way
as holds, and the others as what could be taken from a node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nri_numa.engine.request.placed import read_placed
from nri_numa.errors import AgentError
from nri_numa.machine.cpuset import ListFormatError, NUMASet
from nri_numa.scheduler.fleet import Fleet, Hold
from nri_numa.scheduler.moving import Running
from nri_numa.scheduler.pods import Reader, placed_annotation
from nri_numa.scheduler.published import Table, read
from nri_numa.scheduler.room import charge_of
from nri_numa.scheduler.verdict import Charge
from nri_numa.scheduler.wish import Wish

EXPECTED: Final = "kubectl get noderesourcetopologies,nodes,pods --all-namespaces -o json"
_KINDS: Final = ("NodeResourceTopology", "Node", "Pod")
_OVER: Final = ("Succeeded", "Failed")

Document = Mapping[str, Any]


class CaptureError(AgentError):
    """What was given is no capture of a cluster; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A cluster.

    Attributes:
        fleet: its nodes, and pods on their way to them.
        nodes: names of all nodes, in order; those without an object too.
        cordoned: those that take no new pods.
        running: pods that have NUMA nodes.
        pods: how many there are.
        notes: what was odd, one sentence each.
    """

    fleet: Fleet
    nodes: tuple[str, ...]
    cordoned: frozenset[str]
    running: tuple[Running, ...]
    pods: int = 0
    notes: tuple[str, ...] = field(default=())


def captured(
    documents: Iterable[object],
    reader: Reader,
    prefix: str,
    movable: Callable[[Document], bool],
) -> Captured:
    """Read a capture.

    Args:
        documents: lists of objects, or objects, as kubectl prints them.
        reader: of pods, with the settings of the nodes.
        prefix: of annotations and attributes.
        movable: whether somebody makes a pod again that was evicted.

    Raises:
        CaptureError: it is something else, or has no NodeResourceTopology.
    """
    found: dict[str, dict[str, Document]] = {kind: {} for kind in _KINDS}
    others: set[str] = set()
    for one in _objects(documents):
        kind = one.get("kind")
        if not isinstance(kind, str) or kind not in found:
            others.add(kind[:60] if isinstance(kind, str) else "something without a kind")
            continue
        metadata = one.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str) or not name:
            raise CaptureError(f"a {kind} has no metadata.name; expected what {EXPECTED} prints")
        assert isinstance(metadata, Mapping)  # noqa: S101  # it has a name
        found[kind][f"{metadata.get('namespace', '')}/{name}"] = one
    topologies, nodes, pods = (found[kind] for kind in _KINDS)
    if not topologies:
        seen = ", ".join(sorted([*others, *(kind for kind in _KINDS if found[kind])])) or "nothing"
        raise CaptureError(
            f"has no NodeResourceTopology, but {seen}; expected what {EXPECTED} prints, where "
            "nri-numa publish writes them (publish.nodeResourceTopology)"
        )
    fleet = Fleet()
    for key, one in topologies.items():
        fleet.put(key[1:], read(one, prefix))
    notes = [f"Passed over: {', '.join(sorted(others))}."] if others else []
    if not nodes:
        notes.append("It has no Nodes: all nodes with a NodeResourceTopology count as ready.")
    if not pods:
        notes.append("It has no pods: what would have to move is not known.")
    cordoned = {
        key[1:] for key, one in nodes.items() if _mapping(one.get("spec")).get("unschedulable")
    }
    running: list[Running] = []
    for key, one in sorted(pods.items()):
        made = _pod(key, one, fleet, reader, prefix)
        if made is not None:
            node, charge, wish = made
            running.append(Running(key, node, charge, wish, movable(one)))
    names = {key[1:] for key in (nodes or topologies)}
    if lost := fleet.names - names:
        notes.append(
            f"NodeResourceTopology without a Node, passed over: {', '.join(sorted(lost)[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}."
        )
    return Captured(
        fleet, tuple(sorted(names)), frozenset(cordoned), tuple(running), len(pods), tuple(notes)
    )


def _objects(documents: Iterable[object]) -> Iterator[Document]:
    for one in documents:
        if not isinstance(one, Mapping):
            raise CaptureError(f"is {type(one).__name__}, expected what {EXPECTED} prints")
        items = one.get("items")
        if isinstance(items, list) and str(one.get("kind", "List")).endswith("List"):
            # The kind of a typed list's items is not written on each of them.
            kind = str(one.get("kind", "")).removesuffix("List")
            yield from _objects(
                {"kind": kind, **item} if kind and isinstance(item, Mapping) else item
                for item in items
            )
        else:
            yield one


def _pod(
    key: str, document: Document, fleet: Fleet, reader: Reader, prefix: str
) -> tuple[str, Charge, Wish] | None:
    """Take a pod in: as a hold when it is on its way, else what it takes of its node."""
    node = _mapping(document.get("spec")).get("nodeName")
    phase = _mapping(document.get("status")).get("phase")
    table = fleet.published(node) if isinstance(node, str) else None
    if not isinstance(node, str) or not isinstance(table, Table) or phase in _OVER:
        return None
    wish = reader.wish(document)
    text = placed_annotation(document, prefix)
    placed = (read_placed(text) if text is not None else None) or {}
    if wish.nothing or wish.wrong:
        return None
    if phase == "Pending":
        if placed:
            hold = Hold(wish=wish, node=node, places=placed, since=0.0, until=float("inf"))
            fleet.hold(hold)
        return None
    charge = charge_of(table, wish, _assigned(document, prefix) or placed)
    return None if charge is None else (node, charge, wish)


def _assigned(document: Document, prefix: str) -> dict[str, NUMASet]:
    """NUMA nodes by container, as the node says in the annotation ``assigned``."""
    annotations = _mapping(_mapping(document.get("metadata")).get("annotations"))
    try:
        said = json.loads(annotations.get(f"{prefix}/assigned", "{}"))
        return {name: NUMASet.parse(one["mems"]) for name, one in said.items() if one["mems"]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ListFormatError):
        return {}


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}
