"""A cluster: what its nodes publish and say, and what is held for pods on their way to them.

A pod is *held* from the moment it has its node until the node's object counts it. The object of
``nri-numa publish`` names the containers that its numbers count
(`nri_numa.model.counted_containers`), and
what it names is not subtracted a second time: that follows from the hold and the object alone,
in whatever order they came, and however late. A hold ends when its pod left the phase Pending and
was counted, or when there is no such pod any more.

The object of another publisher names no container, which leaves the moment open. Then a hold ends a
while after the pod left the phase Pending. Until then the pod may be counted twice, which costs
room for seconds and never gives it to two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Final, Self

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.cluster.node_facts import NodeFacts, read_node
from nri_numa.cluster.node_resources import NodeResources, ResourceCounts, UnreadableTopology
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.topology_reader import TopologyValidity
from nri_numa.kube.requests import text_in_section
from nri_numa.model.counted_containers import counted_container_hash
from nri_numa.model.cpuset import NUMASet

NodeInfo = NodeResources | UnreadableTopology
UNCOUNTED_POD_WARNING_S: Final = 60.0
"""Seconds after which a node should count a pod that started; `nri-numa publish` takes one."""
_MAX_SHARED_NODES: Final = 1000
"""Rooms that are gone and may be kept, in case that a node is like them again."""


class AssumedPod(Struct, frozen=True, kw_only=True):
    """Room that is kept for one pod.

    Attributes:
        numa_nodes: NUMA nodes by container, as its annotation says.
        charge: what it takes, where nothing of it is in an annotation.
        expires_at: when it is to be judged by more than what is watched; infinity while its pod is
            on its way.
        counted_by_node: containers that its node's object counted, be it in an earlier state.
        left_at: when its pod left the phase Pending; infinity while it is on its way.
    """

    request: PodRequest
    node: str
    numa_nodes: Mapping[str, NUMASet] = {}
    charge: ResourceCounts | None = None
    assumed_at: float
    expires_at: float = inf
    counted_by_node: frozenset[str] = frozenset()
    left_at: float = inf

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.request.uid

    @property
    def left_pending(self) -> bool:
        """Whether the pod is not on its way any more."""
        return self.left_at < inf

    @property
    def non_init_containers(self) -> frozenset[str]:
        """Containers that the pod has in the end.

        Those that end before the others start are not among them: what the pod takes in the end is
        held. Nor is what the kubelet alone aligns, and there nothing is ever named.
        """
        return frozenset([one.container for one in self.request.containers if not one.is_init])

    @property
    def is_started_and_counted(self) -> bool:
        """Whether its pod has started, and all of it was counted."""
        return (
            self.left_pending
            and bool(self.request.containers)
            and self.non_init_containers <= self.counted_by_node
        )

    def containers_counted_by(self, room: NodeResources) -> frozenset[str]:
        """Containers of it that the numbers of a node count."""
        named = room.counted_containers.split() if room.counted_containers else ()
        return frozenset(
            [
                name
                for name in self.non_init_containers
                if counted_container_hash(self.uid, name) in named
            ]
        )

    def is_nameable_by(self, room: NodeResources) -> bool:
        """Whether the object of a node says when it counts the pod."""
        return room.counted_containers is not None and bool(self.request.containers)

    def uncounted_containers(self, room: NodeResources) -> frozenset[str]:
        """Containers that the numbers of a node do not count yet.

        One that was counted and is not any more has ended, once its pod has started.
        """
        earlier = self.counted_by_node if self.left_pending else frozenset()
        return self.non_init_containers - self.containers_counted_by(room) - earlier

    def uncounted_charge(self, room: NodeResources) -> ResourceCounts | None:
        """What is to be subtracted from what a node publishes."""
        request, missing = self.request, self.uncounted_containers(room)
        if request.containers and not missing:
            return None
        partly = len(missing) < len(self.non_init_containers)
        if partly and request.pod_scope_request is None and self.numa_nodes:
            rest = tuple(one for one in request.containers if one.container in missing)
            return room.charge_of_placed_pod(replace(request, containers=rest), self.numa_nodes)
        if self.charge is None and self.numa_nodes:
            return room.charge_of_placed_pod(request, self.numa_nodes)
        return self.charge


class ClusterState:
    """What is known of the nodes, and what is held on them.

    Attributes:
        revision: another number after each change of what is known or held.
    """

    def __init__(self, prefix: str) -> None:
        self.revision = 0
        self._prefix = prefix
        self._validity = TopologyValidity(prefix)
        self._facts: dict[str, NodeFacts] = {}
        self._nodes: dict[str, NodeInfo] = {}
        self._rooms: dict[str, NodeInfo] = {}
        self._equal: dict[NodeResources, NodeResources] = {}
        self._holds: dict[str, AssumedPod] = {}
        self._by_node: dict[str, set[str]] = {}

    @classmethod
    def from_documents(cls, documents: Iterable[Mapping[str, Any]], reader: PodReader) -> Self:
        """Read the objects of one moment, each with its kind, as watches would bring them.

        A pod that has not left the phase Pending is held on the node that it was sent to.
        """
        state = cls(reader.prefix)
        for document in documents:
            name = text_in_section(document, "metadata", "name")
            match document.get("kind"):
                case "NodeResourceTopology":
                    state.update_topology(name, document, 0.0)
                case "Node":
                    state.update_node(name, document)
                case "Pod" if text_in_section(document, "status", "phase") == "Pending":
                    pod = assumed_pod_of(document, reader, 0.0)
                    if pod is not None and pod.numa_nodes:
                        state.assume_pod(pod)
        return state

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def node_names(self) -> frozenset[str]:
        """Nodes that have a NodeResourceTopology."""
        return frozenset(self._nodes)

    @property
    def all_node_names(self) -> frozenset[str]:
        """Nodes that have a Node, or a NodeResourceTopology."""
        return frozenset(self._nodes.keys() | self._facts.keys())

    @property
    def unreadable_count(self) -> int:
        """How many objects say nothing certain."""
        return sum(isinstance(known, UnreadableTopology) for known in self._nodes.values())

    @property
    def assumed_pods(self) -> Mapping[str, AssumedPod]:
        """Holds by uid of the pod."""
        return self._holds

    def facts(self, name: str) -> NodeFacts | None:
        """What a Node says; None for one that is not known."""
        return self._facts.get(name)

    def published_resources(self, name: str) -> NodeInfo | None:
        """What a node publishes, without regard to holds."""
        return self._nodes.get(name)

    def free_resources(self, name: str) -> NodeInfo | None:
        """What a node has free for others; None for one without an object.

        Equal rooms are one object, so verdicts about them are found without a comparison.
        """
        found = self._rooms.get(name)
        if found is None:
            found = self._nodes.get(name)
            if isinstance(found, NodeResources):
                found = self._shared(self._without_holds(name, found))
            if found is not None:
                self._rooms[name] = found
        return found

    def _without_holds(self, name: str, room: NodeResources) -> NodeResources:
        holds = [self._holds[uid] for uid in sorted(self._by_node.get(name, ()))]
        charges = [one.uncounted_charge(room) for one in holds]
        room = room.minus_pods(one for one in charges if one is not None)
        return replace(room, counted_containers="") if room.counted_containers != "" else room

    def _shared(self, room: NodeResources) -> NodeResources:
        if len(self._equal) >= len(self._nodes) + _MAX_SHARED_NODES:
            self._equal = {room: room for room in self.rooms()}
        return self._equal.setdefault(room, room)

    def rooms(self) -> set[NodeResources]:
        """What nodes have free for others, as far as it was asked for since it changed."""
        return {room for room in self._rooms.values() if isinstance(room, NodeResources)}

    # --- what is there ----------------------------------------------------------------------------

    def update_node(self, name: str, document: Mapping[str, Any]) -> None:
        """A Node exists, new or changed."""
        facts = read_node(name, document, self._prefix)
        if self._facts.get(name) != facts:
            self._facts[name] = facts
            self.revision += 1

    def remove_node(self, name: str) -> None:
        """A Node does not exist any more."""
        self._facts.pop(name, None)
        self.revision += 1

    def update_topology(self, name: str, document: Mapping[str, Any], now: float) -> bool:
        """A NodeResourceTopology exists; whether its node has more of something than before."""
        return self.update_resources(name, self._validity.decode_with_validity(name, document, now))

    def remove_topology(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._validity.forget_node(name)
        self._nodes.pop(name, None)
        self._on_changed(name)

    def expire_topologies(self, now: float) -> list[str]:
        """Time has passed: nodes whose object is not valid any more, and was until now."""
        return [name for name in self._validity.expired_nodes(now) if self._silence_agent(name)]

    def update_resources(self, name: str, known: NodeInfo) -> bool:
        """A node publishes something; whether it has more room of something than before."""
        before, was = self.free_resources(name), self._nodes.get(name)
        if was == known:
            return False
        self._nodes[name] = known
        self._on_changed(name)
        for uid in sorted(self._by_node.get(name, ())):
            hold = self._holds[uid] = _with_count_state(self._holds[uid], known)
            if hold.is_started_and_counted:
                self.forget_pod(uid)
        return _has_more_free(before, self.free_resources(name))

    def _silence_agent(self, name: str) -> bool:
        """A node's object says nothing of its agent any more; whether it did."""
        known = self._nodes.get(name)
        if not isinstance(known, NodeResources) or known.agent_not_ready:
            return False
        self.update_resources(name, replace(known, agent_not_ready=True))
        return True

    def _on_changed(self, name: str) -> None:
        """Something was published or is held differently."""
        self._rooms.pop(name, None)
        self.revision += 1

    # --- pods on their way ------------------------------------------------------------------------

    def assume_pod(self, hold: AssumedPod) -> None:
        """Keep room for a pod until it is counted; an earlier hold of the same pod is replaced."""
        self.forget_pod(hold.uid)
        hold = _with_count_state(hold, self._nodes.get(hold.node))
        if hold.is_started_and_counted:
            return
        self._holds[hold.uid] = hold
        self._by_node.setdefault(hold.node, set()).add(hold.uid)
        self._on_changed(hold.node)

    def pod_left_pending(self, uid: str, at: float, until: float) -> AssumedPod | None:
        """A pod is not on its way any more; its hold if that ended, because its node counts it.

        Otherwise it ends when an object says that the pod is counted, or is judged anew.
        """
        hold = self._holds.get(uid)
        if hold is None:
            return None
        self._on_changed(hold.node)
        hold = self._holds[uid] = replace(
            hold, left_at=min(at, hold.left_at), expires_at=min(until, hold.expires_at)
        )
        return self.forget_pod(uid) if hold.is_started_and_counted else None

    def pod_pending_again(self, uid: str, until: float = inf) -> None:
        """A pod is on its way, although it may have seemed to have left."""
        hold = self._holds.get(uid)
        if hold is not None and (hold.left_pending or hold.expires_at != until):
            self._on_changed(hold.node)
            self._holds[uid] = replace(hold, left_at=inf, expires_at=until)

    def postpone_hold_check(self, uid: str, until: float) -> None:
        """Judge a hold, if it is still there, at another time."""
        if uid in self._holds:
            self._holds[uid] = replace(self._holds[uid], expires_at=until)

    def forget_pod(self, uid: str) -> AssumedPod | None:
        """End a hold; None where there is none."""
        hold = self._holds.pop(uid, None)
        if hold is None:
            return None
        uids = self._by_node[hold.node]
        uids.discard(uid)
        if not uids:
            del self._by_node[hold.node]
        self._on_changed(hold.node)
        return hold

    def due_assumed_pods(self, now: float) -> list[AssumedPod]:
        """Holds that are to be judged, those that waited longest first."""
        found = [hold for hold in self._holds.values() if hold.expires_at <= now]
        return sorted(found, key=lambda hold: (hold.expires_at, hold.uid))

    def late_assumed_pods(self, now: float) -> list[AssumedPod]:
        """Holds of pods that started a while ago and that their nodes do not count, by uid."""
        found = [
            hold for hold in self._holds.values() if now - hold.left_at >= UNCOUNTED_POD_WARNING_S
        ]
        return sorted(found, key=lambda hold: hold.uid)


def assumed_pod_of(document: Mapping[str, Any], reader: PodReader, now: float) -> AssumedPod | None:
    """What is to be held for a pod that has a node; None where it asks for nothing."""
    node, request = text_in_section(document, "spec", "nodeName"), reader.read_pod_request(document)
    if request.is_unconstrained or request.invalid_reason or not node:
        return None
    return AssumedPod(
        request=request,
        node=node,
        numa_nodes=reader.scheduled_numa_nodes(document),
        assumed_at=now,
    )


def _with_count_state(hold: AssumedPod, known: NodeInfo | None) -> AssumedPod:
    """The same, with what an object says of it."""
    named = hold.containers_counted_by(known) if isinstance(known, NodeResources) else frozenset()
    return (
        hold
        if named <= hold.counted_by_node
        else replace(hold, counted_by_node=hold.counted_by_node | named)
    )


def _has_more_free(before: NodeInfo | None, after: NodeInfo | None) -> bool:
    """Whether a node has more of something."""
    if not isinstance(after, NodeResources):
        return False
    if not isinstance(before, NodeResources) or before.ids != after.ids:
        return True
    if (before.agent_not_ready and not after.agent_not_ready) or (before.exclusive_limit or 0) < (
        after.exclusive_limit or 0
    ):
        return True
    was = {one.name: one.free for one in before.other_resources}
    pairs = [(before.cpu.free, after.cpu.free), (before.exclusive.free, after.exclusive.free)]
    if after.exclusive_after_moves:
        pairs.append((before.exclusive_after_moves, after.exclusive_after_moves))
    pairs += [(was.get(one.name, ()), one.free) for one in after.other_resources]
    return any(
        len(old) != len(new) or any(n > w for w, n in zip(old, new, strict=True))
        for old, new in pairs
    )
