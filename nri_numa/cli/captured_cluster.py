"""A cluster as ``kubectl get noderesourcetopologies,nodes,pods -A -o json`` prints it.

It is read as the scheduler's watches would bring it: nodes with what they publish, pods on their
way as holds, and the others as what a node could get back. Where a pod fits on no node, the fewest
pods of one node are searched that would have to move, by trying.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import combinations, islice
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.controller.evictor import movable
from nri_numa.engine.room import MOST_MOVES
from nri_numa.errors import AgentError
from nri_numa.kube.requests import mapping
from nri_numa.model.cpuset import ListFormatError, NUMASet
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.fit import Fits, fit
from nri_numa.scheduler.node_room import Counts, NodeRoom
from nri_numa.scheduler.nodes import Hold, Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.scheduler.published import read
from nri_numa.simulate.manifests import shown

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
    """A pod that has NUMA nodes of its node, and is charged for them there.

    Where it is ``movable`` its workload makes it again, perhaps elsewhere, when it is evicted.
    Its ``movers`` may change NUMA nodes while they run: each as a pod of one container.
    """

    name: str
    node: str
    charge: Counts
    request: PodRequest
    movable: bool
    movers: tuple[Running, ...] = ()


class Captured(Struct, frozen=True):
    """A cluster: what nodes publish, with pods on their way to them, and what was odd.

    The names, in order, are those of all nodes, without an object too; ``pods`` counts them all.
    """

    nodes: Nodes
    names: tuple[str, ...]
    cordoned: frozenset[str]
    running: tuple[Running, ...]
    pods: int = 0
    notes: tuple[str, ...] = ()


def captured(documents: Iterable[object], reader: PodReader, prefix: str) -> Captured:
    """Read a capture: lists of objects, or objects, as kubectl prints them.

    The reader has the settings of the nodes, as the prefix of annotations and attributes is theirs.

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
        metadata = mapping(one.get("metadata"))
        name = metadata.get("name")
        if not isinstance(name, str) or not name:
            raise CaptureError(f"a {kind} has no metadata.name; expected what {EXPECTED} prints")
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
    running = [_pod(key, one, known, reader, prefix) for key, one in sorted(pods.items())]
    names = {key[1:] for key in (nodes or topologies)}
    if lost := known.names - names:
        notes.append(
            f"NodeResourceTopology without a Node, passed over: {', '.join(sorted(lost)[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}."
        )
    standing = tuple(filter(None, running))
    return Captured(
        known, tuple(sorted(names)), frozenset(cordoned), standing, len(pods), tuple(notes)
    )


def _objects(documents: Iterable[object]) -> Iterator[Document]:
    for one in documents:
        if not isinstance(one, Mapping):
            raise CaptureError(f"is {shown(one)}, expected what {EXPECTED} prints")
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
    name: str, document: Document, nodes: Nodes, reader: PodReader, prefix: str
) -> Running | None:
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
    placed = _assigned(document, prefix) or placed
    movers = [
        Running(f"{name}/{one.container}", node, its, replace(request, containers=(one,)), True)
        for one in request.containers
        if request.together is None and one.container in request.movable and not one.ends
        if len(placed.get(one.container, ())) == 1
        if (its := room.charge_of(replace(request, containers=(one,)), placed)) is not None
    ]
    charge = room.charge_of(request, placed)
    moves = movable(document), tuple(movers)
    return None if charge is None else Running(name, node, charge, request, *moves)


def _assigned(document: Document, prefix: str) -> dict[str, NUMASet]:
    """NUMA nodes by container, as the node says in the annotation ``assigned``."""
    annotations = mapping(mapping(document.get("metadata")).get("annotations"))
    try:
        said = json.loads(annotations.get(f"{prefix}/assigned", "{}"))
        return {name: NUMASet.parse(one["mems"]) for name, one in said.items() if one["mems"]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ListFormatError):
        return {}


# --- what would have to move ----------------------------------------------------------------------


def search(
    request: PodRequest,
    rooms: Mapping[str, NodeRoom],
    running: Iterable[Running],
    strategy: Strategy,
    *,
    tries: int = TRIES,
) -> dict[str, Any]:
    """Find the fewest pods of one node without which a pod fits there, in at most so many tries.

    Rooms are what each node has left for others, by name, of those that may get it; pods that no
    workload makes again stay. The answer, a part of the document, has the pod's node and NUMA nodes
    then, and where each of the pods that move fits, empty for nowhere. The search was ``cut`` when
    not all sets of up to `LARGEST` pods were judged.
    """
    by_node: dict[str, list[Running]] = {}
    for one in running:
        if one.movable and one.node in rooms:
            by_node.setdefault(one.node, []).append(one)
    tried = 0
    judge = lru_cache(maxsize=None)(partial(fit, strategy=strategy))

    def fits_without(node: str, pods: Iterable[Running]) -> Fits | None:
        nonlocal tried
        tried += 1
        verdict = judge(rooms[node].plus([one.charge for one in pods]), request)
        return verdict if isinstance(verdict, Fits) else None

    hopeful = [
        (node, sorted(pods, key=lambda one: one.name))
        for node, pods in sorted(by_node.items())
        if tried < tries and fits_without(node, pods)
    ]
    found: list[tuple[str, tuple[Running, ...], Fits]] = []
    for size in range(1, LARGEST + 1):
        for node, pods in hopeful:
            for chosen in combinations(pods, size):
                if tried >= tries or len(found) >= _KEPT:
                    break
                if verdict := fits_without(node, chosen):
                    found.append((node, chosen, verdict))
        if found:
            break
    cut = tried >= tries or (not found and any(len(pods) > LARGEST for _, pods in hopeful))
    moves: list[dict[str, Any]] = []
    for node, chosen, verdict in found:
        others, pods_to = {name: room for name, room in rooms.items() if name != node}, []
        for one in chosen:
            to = ""
            for name, room in sorted(others.items()):
                if isinstance(there := judge(room, one.request), Fits):
                    to = name
                    if there.charge is not None:
                        others[name] = room.less([there.charge])
                    break
            pods_to.append({"pod": one.name, "fitsOn": to})
        moves.append({"node": node, "numaNodes": numa_nodes(verdict), "pods": pods_to})
    # Those first whose pods have somewhere to go; then by names, which are total.
    best = min(
        moves,
        key=lambda one: (
            sum(not pod["fitsOn"] for pod in one["pods"]),
            one["node"],
            [pod["pod"] for pod in one["pods"]],
        ),
        default={"node": "", "numaNodes": {}, "pods": []},
    )
    return {**best, "setsTried": tried, "cut": cut}


def moving(
    verdict: Fits, node: str, running: Iterable[Running], strategy: Strategy
) -> list[dict[str, Any]]:
    """Movable containers of one node that make room there by sums, and where each goes.

    The fewest bytes first, then the fewest containers, as the node chooses.
    """
    room, request = verdict.room, verdict.request
    movers = [one for pod in running if pod.node == node for one in pod.movers]
    size = {one.name: sum(one.charge.others.get("memory", ())) for one in movers}
    sets = [
        (sum(size[one.name] for one in chosen), n, [one.name for one in chosen], chosen)
        for n in range(1, MOST_MOVES + 1)
        for chosen in islice(combinations(movers, n), TRIES)
    ]
    for *_, chosen in sorted(sets, key=lambda one: one[:3])[:TRIES]:
        # Their memory is on both sides until it has moved.
        given = room.plus([replace(one.charge, others={}) for one in chosen])
        new, to = fit(given, request, strategy), []
        if not isinstance(new, Fits) or new.places != verdict.places or new.charge is None:
            continue
        rest = given.less([new.charge])
        for one in chosen:
            there = fit(rest, one.request, strategy)
            where = next(iter(numa_nodes(there).values()), "") if isinstance(there, Fits) else ""
            if not isinstance(there, Fits) or there.charge is None or not where.isdigit():
                break
            rest = rest.less([there.charge])
            to.append({"container": one.name, "bytes": size[one.name], "numaNode": where})
        else:
            return to
    return []


def numa_nodes(verdict: Fits) -> dict[str, str]:
    """NUMA nodes by container."""
    return {name: str(numa_nodes) for name, numa_nodes in verdict.places}
