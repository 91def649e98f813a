"""A cluster as ``kubectl get noderesourcetopologies,nodes,pods -A -o json`` prints it.

It is read as the scheduler's watches would bring it: nodes with what they publish, pods on their
way as holds, and the others as what a node could get back. Where a pod fits on no node, the fewest
pods of one node are searched that would have to move, by trying.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import combinations, islice, product
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.cluster.manifests import value_text
from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import is_finished, is_recreated
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.engine.rebalance import MAX_MOVES
from nri_numa.errors import AgentError
from nri_numa.kube.requests import mapping_or_empty, text_in_section
from nri_numa.model.cpuset import ListFormatError, NUMASet
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.fit import Fit, Verdict, evaluate_fit
from nri_numa.scheduler.nodes import AssumedPod, SchedulerCache

CAPTURE_COMMAND: Final = "kubectl get noderesourcetopologies,nodes,pods --all-namespaces -o json"
_CAPTURED_KINDS: Final = ("NodeResourceTopology", "Node", "Pod")

MAX_MOVED_PODS: Final = 4
"""Pods of a set; moving more of them is another question."""
MAX_MOVE_SETS: Final = 20_000
"""Sets that are judged, some seconds of work."""
_MAX_COMPARED_SETS: Final = 20
"""Sets of the smallest size that are compared by where their pods could go."""

Document = Mapping[str, Any]


class CaptureError(AgentError):
    """What was given is no capture of a cluster; the text says what was expected."""


class ChargedPod(Struct, frozen=True):
    """A pod that has NUMA nodes of its node, and is charged for them there.

    Where it is ``movable`` its workload makes it again, perhaps elsewhere, when it is evicted.
    Its ``movers`` may change NUMA nodes while they run: each as a pod of one container.
    """

    name: str
    node: str
    charge: ResourceCounts
    request: PodRequest
    movable: bool
    movers: tuple[ChargedPod, ...] = ()


class CapturedCluster(Struct, frozen=True):
    """A cluster: what nodes publish, with pods on their way to them, and what was odd.

    The names, in order, are those of all nodes, without an object too; ``pods`` counts them all.
    """

    nodes: SchedulerCache
    names: tuple[str, ...]
    cordoned: frozenset[str]
    running: tuple[ChargedPod, ...]
    pods: int = 0
    notes: tuple[str, ...] = ()


def parse_capture(documents: Iterable[object], reader: PodReader, prefix: str) -> CapturedCluster:
    """Read a capture: lists of objects, or objects, as kubectl prints them.

    The reader has the settings of the nodes, as the prefix of annotations and attributes is theirs.

    Raises:
        CaptureError: it is something else, or has no NodeResourceTopology.
    """
    found: dict[str, dict[str, Document]] = {kind: {} for kind in _CAPTURED_KINDS}
    others: set[str] = set()
    for one in _flatten_objects(documents):
        kind = one.get("kind")
        if not isinstance(kind, str) or kind not in found:
            others.add(kind[:60] if isinstance(kind, str) else "something without a kind")
            continue
        metadata = mapping_or_empty(one.get("metadata"))
        name = metadata.get("name")
        if not isinstance(name, str) or not name:
            raise CaptureError(
                f"a {kind} has no metadata.name; expected what {CAPTURE_COMMAND} prints"
            )
        found[kind][f"{metadata.get('namespace', '')}/{name}"] = one
    topologies, nodes, pods = (found[kind] for kind in _CAPTURED_KINDS)
    if not topologies:
        seen = (
            ", ".join(sorted([*others, *(kind for kind in _CAPTURED_KINDS if found[kind])]))
            or "nothing"
        )
        raise CaptureError(
            f"has no NodeResourceTopology, but {seen}; expected what {CAPTURE_COMMAND} prints, "
            "where "
            "nri-numa publish writes them (publish.nodeResourceTopology)"
        )
    known = SchedulerCache()
    for key, one in topologies.items():
        known.update_node(key[1:], decode_topology(one, prefix))
    notes = [f"Passed over: {', '.join(sorted(others))}."] if others else []
    if not nodes:
        notes.append("It has no Nodes: all nodes with a NodeResourceTopology count as ready.")
    if not pods:
        notes.append("It has no pods: what would have to move is not known.")
    cordoned = {
        key[1:]
        for key, one in nodes.items()
        if mapping_or_empty(one.get("spec")).get("unschedulable")
    }
    running = [
        _add_captured_pod(key, one, known, reader, prefix) for key, one in sorted(pods.items())
    ]
    names = {key[1:] for key in (nodes or topologies)}
    if lost := known.node_names - names:
        notes.append(
            f"NodeResourceTopology without a Node, passed over: {', '.join(sorted(lost)[:5])}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}."
        )
    standing = tuple(filter(None, running))
    return CapturedCluster(
        known, tuple(sorted(names)), frozenset(cordoned), standing, len(pods), tuple(notes)
    )


def _flatten_objects(documents: Iterable[object]) -> Iterator[Document]:
    for one in documents:
        if not isinstance(one, Mapping):
            raise CaptureError(f"is {value_text(one)}, expected what {CAPTURE_COMMAND} prints")
        items = one.get("items")
        if isinstance(items, list) and str(one.get("kind", "List")).endswith("List"):
            # The kind of a typed list's items is not written on each of them.
            kind = str(one.get("kind", "")).removesuffix("List")
            yield from _flatten_objects(
                {"kind": kind, **item} if kind and isinstance(item, Mapping) else item
                for item in items
            )
        else:
            yield one


def _add_captured_pod(
    name: str, document: Document, nodes: SchedulerCache, reader: PodReader, prefix: str
) -> ChargedPod | None:
    """Take a pod in: as a hold when it is on its way, else what it takes of its node."""
    node = mapping_or_empty(document.get("spec")).get("nodeName")
    phase = text_in_section(document, "status", "phase")
    room = nodes.published_resources(node) if isinstance(node, str) else None
    if not isinstance(node, str) or not isinstance(room, NodeResources) or is_finished(document):
        return None
    request, placed = reader.read_pod_request(document), reader.scheduled_numa_nodes(document)
    if request.is_unconstrained or request.invalid_reason:
        return None
    if phase == "Pending":
        if placed:
            nodes.assume_pod(
                AssumedPod(
                    request=request,
                    node=node,
                    numa_nodes=placed,
                    assumed_at=0.0,
                    expires_at=float("inf"),
                )
            )
        return None
    placed = _assigned_numa_nodes(document, prefix) or placed
    movers = [
        ChargedPod(f"{name}/{one.container}", node, its, replace(request, containers=(one,)), True)
        for one in request.containers
        if request.pod_scope_request is None
        and one.container in request.movable
        and not one.is_init
        if len(placed.get(one.container, ())) == 1
        if (its := room.charge_of_placed_pod(replace(request, containers=(one,)), placed))
        is not None
    ]
    charge = room.charge_of_placed_pod(request, placed)
    moves = is_recreated(document), tuple(movers)
    return None if charge is None else ChargedPod(name, node, charge, request, *moves)


def _assigned_numa_nodes(document: Document, prefix: str) -> dict[str, NUMASet]:
    """NUMA nodes by container, as the node says in the annotation ``assigned``."""
    annotations = mapping_or_empty(mapping_or_empty(document.get("metadata")).get("annotations"))
    try:
        said = json.loads(annotations.get(f"{prefix}/assigned", "{}"))
        return {name: NUMASet.parse(one["mems"]) for name, one in said.items() if one["mems"]}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ListFormatError):
        return {}


# --- what would have to move ----------------------------------------------------------------------


def find_blocking_pods(
    request: PodRequest,
    rooms: Mapping[str, NodeResources],
    running: Iterable[ChargedPod],
    strategy: Strategy,
    *,
    tries: int = MAX_MOVE_SETS,
) -> dict[str, Any]:
    """Find the fewest pods of one node without which a pod fits there, in at most so many tries.

    Rooms are what each node has left for others, by name, of those that may get it; pods that no
    workload makes again stay. The answer, a part of the document, has the pod's node and NUMA nodes
    then, and where each of the pods that move fits, empty for nowhere. The search was ``cut`` when
    not all sets of up to `MAX_MOVED_PODS` pods were judged.
    """
    pods_by_node: dict[str, list[ChargedPod]] = {}
    for pod in running:
        if pod.movable and pod.node in rooms:
            pods_by_node.setdefault(pod.node, []).append(pod)
    tried = 0
    judge = lru_cache(maxsize=None)(partial(evaluate_fit, strategy=strategy))

    def fits_without_pods(node: str, pods: Iterable[ChargedPod]) -> Fit | None:
        nonlocal tried
        tried += 1
        verdict = judge(rooms[node].plus_pods([pod.charge for pod in pods]), request)
        return verdict if isinstance(verdict, Fit) else None

    hopeful = [
        (node, sorted(pods, key=lambda pod: pod.name))
        for node, pods in sorted(pods_by_node.items())
        if tried < tries and fits_without_pods(node, pods)
    ]
    moves: list[dict[str, Any]] = []
    for size, (node, pods) in product(range(1, MAX_MOVED_PODS + 1), hopeful):
        if moves and len(moves[0]["pods"]) < size:
            break
        for subset in combinations(pods, size):
            if tried >= tries or len(moves) >= _MAX_COMPARED_SETS:
                break
            if fit := fits_without_pods(node, subset):
                others = {name: room for name, room in rooms.items() if name != node}
                targets = _find_targets(subset, others, judge)
                moves.append({"node": node, "numaNodes": nodes_by_container(fit), "pods": targets})
    cut = tried >= tries or (not moves and any(len(pods) > MAX_MOVED_PODS for _, pods in hopeful))
    # Those first whose pods have somewhere to go; then by names, which are total.
    best = min(
        moves,
        key=lambda move: (
            sum(not pod["fitsOn"] for pod in move["pods"]),
            move["node"],
            [pod["pod"] for pod in move["pods"]],
        ),
        default={"node": "", "numaNodes": {}, "pods": []},
    )
    return {**best, "setsTried": tried, "cut": cut}


def _find_targets(
    pods: Iterable[ChargedPod],
    rooms: dict[str, NodeResources],
    judge: Callable[[NodeResources, PodRequest], Verdict],
) -> list[dict[str, str]]:
    """Where each pod fits beside those before it, empty for nowhere; takes it from the rooms."""
    targets = []
    for pod in pods:
        target = ""
        for name, room in sorted(rooms.items()):
            if isinstance(fit := judge(room, pod.request), Fit):
                target = name
                if fit.pod_charge is not None:
                    rooms[name] = room.minus_pods([fit.pod_charge])
                break
        targets.append({"pod": pod.name, "fitsOn": target})
    return targets


def find_moving_containers(
    verdict: Fit, node: str, running: Iterable[ChargedPod], strategy: Strategy
) -> list[dict[str, Any]]:
    """Movable containers of one node that make room there by sums, and where each goes.

    The fewest bytes first, then the fewest containers, as the node chooses.
    """
    room, request = verdict.room, verdict.request
    movers = [one for pod in running if pod.node == node for one in pod.movers]
    size = {one.name: sum(one.charge.other_resources.get("memory", ())) for one in movers}
    sets = [
        (sum(size[one.name] for one in chosen), n, [one.name for one in chosen], chosen)
        for n in range(1, MAX_MOVES + 1)
        for chosen in islice(combinations(movers, n), MAX_MOVE_SETS)
    ]
    for *_, chosen in sorted(sets, key=lambda one: one[:3])[:MAX_MOVE_SETS]:
        # Their memory is on both sides until it has moved.
        given = room.plus_pods([replace(one.charge, other_resources={}) for one in chosen])
        new, to = evaluate_fit(given, request, strategy), []
        if (
            not isinstance(new, Fit)
            or new.numa_nodes != verdict.numa_nodes
            or new.pod_charge is None
        ):
            continue
        rest = given.minus_pods([new.pod_charge])
        for one in chosen:
            there = evaluate_fit(rest, one.request, strategy)
            where = (
                next(iter(nodes_by_container(there).values()), "") if isinstance(there, Fit) else ""
            )
            if not isinstance(there, Fit) or there.pod_charge is None or not where.isdigit():
                break
            rest = rest.minus_pods([there.pod_charge])
            to.append({"container": one.name, "bytes": size[one.name], "numaNode": where})
        else:
            return to
    return []


def nodes_by_container(verdict: Fit) -> dict[str, str]:
    """NUMA nodes by container."""
    return {name: str(numa_nodes) for name, numa_nodes in verdict.numa_nodes}
