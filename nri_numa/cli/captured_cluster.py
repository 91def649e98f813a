"""A cluster as ``kubectl get noderesourcetopologies,nodes,pods -A -o json`` prints it.

It is read as the scheduler's watches would bring it: nodes with what they publish, pods on their
way as holds, and the others as what a node could get back. Where a pod fits on no node, the fewest
pods of one node are searched that would have to move, by trying.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from msgspec import Struct

from nri_numa.controller.evictor import movable
from nri_numa.errors import AgentError
from nri_numa.kube.requests import mapping
from nri_numa.model.cpuset import ListFormatError, NUMASet
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.fit import Fits, Verdict, fit
from nri_numa.scheduler.node_room import Counts, NodeRoom
from nri_numa.scheduler.nodes import Hold, Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.scheduler.published import read

EXPECTED: Final = "kubectl get noderesourcetopologies,nodes,pods --all-namespaces -o json"
_KINDS: Final = ("NodeResourceTopology", "Node", "Pod")
_OVER: Final = ("Succeeded", "Failed")

LARGEST: Final = 4
"""Pods of a set; moving more of them is another question."""
TRIES: Final = 20_000
"""Sets that are judged, some seconds of work."""
_KEPT: Final = 20
"""Sets of the smallest size that are compared by where their pods could go."""

Document = Mapping[str, Any]


class CaptureError(AgentError):
    """What was given is no capture of a cluster; the text says what was expected."""


class Running(Struct, frozen=True):
    """A pod that has NUMA nodes of its node.

    Attributes:
        name: namespace and name.
        node: where it is.
        charge: what it takes there.
        request: what it asks for.
        movable: its workload makes it again, perhaps elsewhere, when it is evicted.
    """

    name: str
    node: str
    charge: Counts
    request: PodRequest
    movable: bool


class Captured(Struct, frozen=True):
    """A cluster.

    Attributes:
        nodes: what they publish, and pods on their way to them.
        names: of all nodes, in order; those without an object too.
        cordoned: those that take no new pods.
        running: pods that have NUMA nodes.
        pods: how many there are.
        notes: what was odd, one sentence each.
    """

    nodes: Nodes
    names: tuple[str, ...]
    cordoned: frozenset[str]
    running: tuple[Running, ...]
    pods: int = 0
    notes: tuple[str, ...] = ()


def captured(documents: Iterable[object], reader: PodReader, prefix: str) -> Captured:
    """Read a capture.

    Args:
        documents: lists of objects, or objects, as kubectl prints them.
        reader: of pods, with the settings of the nodes.
        prefix: of annotations and attributes.

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
    known = Nodes()
    for key, one in topologies.items():
        known.put(key[1:], read(one, prefix))
    notes = [f"Passed over: {', '.join(sorted(others))}."] if others else []
    if not nodes:
        notes.append("It has no Nodes: all nodes with a NodeResourceTopology count as ready.")
    if not pods:
        notes.append("It has no pods: what would have to move is not known.")
    cordoned = {
        key[1:] for key, one in nodes.items() if mapping(one.get("spec")).get("unschedulable")
    }
    running: list[Running] = []
    for key, one in sorted(pods.items()):
        made = _pod(one, known, reader, prefix)
        if made is not None:
            node, charge, request = made
            running.append(Running(key, node, charge, request, movable(one)))
    names = {key[1:] for key in (nodes or topologies)}
    if lost := known.names - names:
        notes.append(
            f"NodeResourceTopology without a Node, passed over: {', '.join(sorted(lost)[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}."
        )
    return Captured(
        known, tuple(sorted(names)), frozenset(cordoned), tuple(running), len(pods), tuple(notes)
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
    document: Document, nodes: Nodes, reader: PodReader, prefix: str
) -> tuple[str, Counts, PodRequest] | None:
    """Take a pod in: as a hold when it is on its way, else what it takes of its node."""
    node = mapping(document.get("spec")).get("nodeName")
    phase = mapping(document.get("status")).get("phase")
    room = nodes.published(node) if isinstance(node, str) else None
    if not isinstance(node, str) or not isinstance(room, NodeRoom) or phase in _OVER:
        return None
    request, placed = reader.request(document), reader.placed(document)
    if request.nothing or request.wrong:
        return None
    if phase == "Pending":
        if placed:
            nodes.hold(
                Hold(request=request, node=node, places=placed, since=0.0, until=float("inf"))
            )
        return None
    charge = room.charge_of(request, _assigned(document, prefix) or placed)
    return None if charge is None else (node, charge, request)


def _assigned(document: Document, prefix: str) -> dict[str, NUMASet]:
    """NUMA nodes by container, as the node says in the annotation ``assigned``."""
    annotations = mapping(mapping(document.get("metadata")).get("annotations"))
    try:
        said = json.loads(annotations.get(f"{prefix}/assigned", "{}"))
        return {name: NUMASet.parse(one["mems"]) for name, one in said.items() if one["mems"]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ListFormatError):
        return {}


# --- what would have to move ----------------------------------------------------------------------


class Moves(Struct, frozen=True):
    """A set of pods.

    Attributes:
        node: where they are, and where the pod fits without them.
        places: its NUMA nodes by container then.
        pods: that would have to move, and where each of them fits; empty for nowhere.
    """

    node: str
    places: tuple[tuple[str, str], ...]
    pods: tuple[tuple[str, str], ...]


class Search(Struct, frozen=True):
    """What was found.

    Attributes:
        moves: the smallest set that was found; None where none was.
        tried: sets that were judged.
        cut: not all sets of up to `LARGEST` pods were.
    """

    moves: Moves | None
    tried: int
    cut: bool


def search(
    request: PodRequest,
    rooms: Mapping[str, NodeRoom],
    running: Iterable[Running],
    strategy: Strategy,
    *,
    tries: int = TRIES,
) -> Search:
    """Find the fewest pods of one node without which a pod fits there.

    Args:
        request: of the pod.
        rooms: what each node has left for others, by name; those that may get it.
        running: pods that have NUMA nodes; those that no workload makes again stay.
        strategy: which of equally good NUMA nodes.
        tries: sets that are judged at most.
    """
    by_node: dict[str, list[Running]] = {}
    for one in running:
        if one.movable and one.node in rooms:
            by_node.setdefault(one.node, []).append(one)
    known: dict[NodeRoom, Verdict] = {}

    def fits(room: NodeRoom) -> Verdict:
        found = known.get(room)
        if found is None:
            found = known[room] = fit(room, request, strategy)
        return found

    tried = 0
    hopeful: list[tuple[str, list[Running]]] = []
    for node in sorted(by_node):
        if tried >= tries:
            return Search(None, tried, cut=True)
        tried += 1
        everything = rooms[node].plus([one.charge for one in by_node[node]])
        if isinstance(fits(everything), Fits):
            hopeful.append((node, sorted(by_node[node], key=lambda one: one.name)))
    found: list[tuple[str, tuple[Running, ...], Fits]] = []
    for size in range(1, LARGEST + 1):
        for node, pods in hopeful:
            for chosen in combinations(pods, size):
                if tried >= tries or len(found) >= _KEPT:
                    break
                tried += 1
                room = rooms[node].plus([one.charge for one in chosen])
                verdict = fits(room)
                if isinstance(verdict, Fits):
                    found.append((node, chosen, verdict))
        if found or tried >= tries:
            break
    cut = tried >= tries or (not found and any(len(pods) > LARGEST for _, pods in hopeful))
    if not found:
        return Search(None, tried, cut)
    moves = [_moves(node, pods, verdict, rooms, strategy) for node, pods, verdict in found]
    # Those first whose pods have somewhere to go; then by names, which are total.
    best = min(moves, key=lambda one: (sum(not to for _, to in one.pods), one.node, one.pods))
    return Search(best, tried, cut)


def _moves(
    node: str,
    pods: Sequence[Running],
    verdict: Fits,
    rooms: Mapping[str, NodeRoom],
    strategy: Strategy,
) -> Moves:
    charges: dict[str, list[Counts]] = {}
    where: list[tuple[str, str]] = []
    for one in pods:
        to = ""
        known: dict[NodeRoom, Verdict] = {}
        for name in sorted(rooms):
            if name == node:
                continue
            room = rooms[name].less(charges.get(name, []))
            found = known.get(room)
            if found is None:
                found = known[room] = fit(room, one.request, strategy)
            if isinstance(found, Fits):
                to = name
                if found.charge is not None:
                    charges.setdefault(name, []).append(found.charge)
                break
        where.append((one.name, to))
    places = tuple((name, str(numa_nodes)) for name, numa_nodes in verdict.places)
    return Moves(node, places, tuple(where))
