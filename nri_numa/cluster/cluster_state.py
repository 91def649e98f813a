"""The state of a cluster: published resources, facts of Nodes, and assumed pods.

A pod is *assumed* from its binding until the node's object counts it. The object of ``nri-numa
publish`` lists the containers that its numbers count (`nri_numa.model.counted_containers`), and
these are not subtracted a second time. That depends on the assumed pod and the object alone, in any
order and with any delay. An assumed pod is forgotten when it has left the phase Pending and was
counted, or when it no longer exists.

The object of another publisher lists no containers, so the moment is unknown. The pod is then
forgotten some time after it left the phase Pending. Until then it may be counted twice, which hides
free resources for seconds, but never allocates them twice.
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
"""Seconds after which a node should count a started pod; `nri-numa publish` needs one."""
_MAX_SHARED_NODES: Final = 1000
"""Outdated resources that stay cached, in case a node has equal ones again."""


class AssumedPod(Struct, frozen=True, kw_only=True):
    """A pod that has a node and that the node may not count yet.

    Attributes:
        numa_nodes: NUMA nodes by container, from its annotation.
        charge: resources that it takes, if it has no annotation.
        expires_at: time at which the pod must be read; infinity while it is Pending.
        counted_by_node: containers that its node's object has counted, also in an earlier state.
        left_at: time at which the pod left the phase Pending; infinity before.
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
        """UID of the pod."""
        return self.request.uid

    @property
    def left_pending(self) -> bool:
        """True if the pod has left the phase Pending."""
        return self.left_at < inf

    @property
    def non_init_containers(self) -> frozenset[str]:
        """Containers that run after the pod's start.

        Init containers that end before are excluded: the resources after the start are assumed.
        Containers that the kubelet alone aligns are excluded, too: no object lists them.
        """
        return frozenset([c.container for c in self.request.containers if not c.is_init])

    @property
    def is_started_and_counted(self) -> bool:
        """True if the pod has started and all of its containers were counted."""
        return (
            self.left_pending
            and bool(self.request.containers)
            and self.non_init_containers <= self.counted_by_node
        )

    def containers_counted_by(self, room: NodeResources) -> frozenset[str]:
        """Return the pod's containers that the numbers of a node count."""
        hashes, names = (room.counted_containers or "").split(), self.non_init_containers
        return frozenset([n for n in names if counted_container_hash(self.uid, n) in hashes])

    def is_nameable_by(self, room: NodeResources) -> bool:
        """Return True if the object of a node lists the pod once it counts it."""
        return room.counted_containers is not None and bool(self.request.containers)

    def uncounted_containers(self, room: NodeResources) -> frozenset[str]:
        """Return the containers that the numbers of a node do not count yet.

        A counted container that is no longer listed has ended, if its pod has started.
        """
        earlier = self.counted_by_node if self.left_pending else frozenset()
        return self.non_init_containers - self.containers_counted_by(room) - earlier

    def uncounted_charge(self, room: NodeResources) -> ResourceCounts | None:
        """Return the charge to subtract from a node's published resources; None for none."""
        request, missing = self.request, self.uncounted_containers(room)
        if request.containers and not missing:
            return None
        partly = len(missing) < len(self.non_init_containers)
        if partly and request.pod_scope_request is None and self.numa_nodes:
            containers = tuple(c for c in request.containers if c.container in missing)
            request = replace(request, containers=containers)
        elif self.charge is not None or not self.numa_nodes:
            return self.charge
        return room.charge_of_placed_pod(request, self.numa_nodes)


class ClusterState:
    """The published resources and facts of nodes, and their assumed pods.

    Attributes:
        revision: number that differs after each change.
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
        self._nominations: dict[str, dict[str, tuple[int, ResourceCounts]]] = {}

    @classmethod
    def from_documents(cls, documents: Iterable[Mapping[str, Any]], reader: PodReader) -> Self:
        """Read the objects of one moment, each with its kind, as from watches.

        A Pending pod is assumed on the node that it was bound to.
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
        """Names of nodes with a NodeResourceTopology."""
        return frozenset(self._nodes)

    @property
    def all_node_names(self) -> frozenset[str]:
        """Names of nodes with a Node or a NodeResourceTopology."""
        return frozenset(self._nodes.keys() | self._facts.keys())

    @property
    def unreadable_count(self) -> int:
        """Number of unreadable objects."""
        return sum(isinstance(info, UnreadableTopology) for info in self._nodes.values())

    @property
    def assumed_pods(self) -> Mapping[str, AssumedPod]:
        """Assumed pods by uid."""
        return self._holds

    def node_facts(self, name: str) -> NodeFacts | None:
        """Return the facts of a Node; None for an unknown one."""
        return self._facts.get(name)

    def published_resources(self, name: str) -> NodeInfo | None:
        """Return a node's published resources, including those of assumed pods."""
        return self._nodes.get(name)

    def free_resources(self, name: str) -> NodeInfo | None:
        """Return a node's resources less its assumed pods; None for a node without an object.

        Equal resources are one object, so their cached verdicts are found by identity.
        """
        resources = self._rooms.get(name)
        if resources is None:
            resources = self._nodes.get(name)
            if isinstance(resources, NodeResources):
                resources = self._find_equal_resources(self._without_holds(name, resources))
            if resources is not None:
                self._rooms[name] = resources
        return resources

    def free_resources_for(self, name: str, request: PodRequest) -> NodeInfo | None:
        """Return a node's free resources less those nominated for pods as important as this one."""
        resources = self.free_resources(name)
        charges = self.nominated_charges(name, request)
        return resources.minus_pods(charges) if isinstance(resources, NodeResources) else resources

    def nominated_charges(self, name: str, request: PodRequest) -> list[ResourceCounts]:
        """Return what is reserved on a node for other pods that are as important as this one."""
        return [
            charge
            for uid, (priority, charge) in self._nominations.get(name, {}).items()
            if uid != request.uid and priority >= request.priority
        ]

    def nominate_pod(self, request: PodRequest, node: str, charge: ResourceCounts) -> None:
        """Reserve resources for a pod whose victims leave the node."""
        self._nominations.setdefault(node, {})[request.uid] = request.priority, charge

    def withdraw_nomination(self, uid: str, node: str) -> None:
        """End the reservation for a pod on a node."""
        nominations = self._nominations.get(node, {})
        nominations.pop(uid, None)
        if not nominations:
            self._nominations.pop(node, None)

    def _without_holds(self, name: str, room: NodeResources) -> NodeResources:
        assumed_pods = [self._holds[uid] for uid in sorted(self._by_node.get(name, ()))]
        charges = [item.uncounted_charge(room) for item in assumed_pods]
        room = room.minus_pods(item for item in charges if item is not None)
        return replace(room, counted_containers="") if room.counted_containers != "" else room

    def _find_equal_resources(self, room: NodeResources) -> NodeResources:
        if len(self._equal) >= len(self._nodes) + _MAX_SHARED_NODES:
            self._equal = {room: room for room in self.rooms()}
        return self._equal.setdefault(room, room)

    def rooms(self) -> set[NodeResources]:
        """Return the free resources of nodes that were computed since their last change."""
        return {room for room in self._rooms.values() if isinstance(room, NodeResources)}

    # --- objects ----------------------------------------------------------------------------------

    def update_node(self, name: str, document: Mapping[str, Any]) -> None:
        """Read a new or changed Node."""
        facts = read_node(name, document, self._prefix)
        if self._facts.get(name) != facts:
            self._facts[name] = facts
            self.revision += 1

    def remove_node(self, name: str) -> None:
        """Drop a Node that no longer exists."""
        self._facts.pop(name, None)
        self.revision += 1

    def update_topology(self, name: str, document: Mapping[str, Any], now_s: float) -> bool:
        """Read a NodeResourceTopology; return True if a free amount of its node has increased."""
        info = self._validity.decode_with_validity(name, document, now_s)
        return self.update_resources(name, info)

    def remove_topology(self, name: str) -> None:
        """Drop a NodeResourceTopology that no longer exists."""
        self._validity.forget_node(name)
        self._nodes.pop(name, None)
        self._on_changed(name)

    def expire_topologies(self, now_s: float) -> list[str]:
        """Mark the nodes whose object has expired since the last call, and return their names."""
        return [name for name in self._validity.expired_nodes(now_s) if self._silence_agent(name)]

    def update_resources(self, name: str, info: NodeInfo) -> bool:
        """Set a node's published resources; return True if a free amount has increased."""
        old_room, old_info = self.free_resources(name), self._nodes.get(name)
        if old_info == info:
            return False
        self._nodes[name] = info
        self._on_changed(name)
        for uid in sorted(self._by_node.get(name, ())):
            hold = self._holds[uid] = _with_count_state(self._holds[uid], info)
            if hold.is_started_and_counted:
                self.forget_pod(uid)
        return _has_more_free(old_room, self.free_resources(name))

    def _silence_agent(self, name: str) -> bool:
        """Mark the agent of an expired object as not ready; return False if it was already."""
        info = self._nodes.get(name)
        if not isinstance(info, NodeResources) or info.agent_not_ready:
            return False
        self.update_resources(name, replace(info, agent_not_ready=True))
        return True

    def _on_changed(self, name: str) -> None:
        """Drop a node's cached free resources after a change."""
        self._rooms.pop(name, None)
        self.revision += 1

    # --- assumed pods -----------------------------------------------------------------------------

    def assume_pod(self, hold: AssumedPod) -> None:
        """Assume a pod until it is counted; an earlier record of the pod is replaced."""
        self.forget_pod(hold.uid)
        hold = _with_count_state(hold, self._nodes.get(hold.node))
        if hold.is_started_and_counted:
            return
        self._holds[hold.uid] = hold
        self._by_node.setdefault(hold.node, set()).add(hold.uid)
        self._on_changed(hold.node)

    def pod_left_pending(self, uid: str, exit_time: float, expires_at: float) -> AssumedPod | None:
        """Record that a pod left the phase Pending; return it if its node has counted it.

        Otherwise the pod is forgotten when an object counts it, or after a read of the pod.
        """
        hold = self._holds.get(uid)
        if hold is None:
            return None
        self._on_changed(hold.node)
        hold = self._holds[uid] = replace(
            hold, left_at=min(exit_time, hold.left_at), expires_at=min(expires_at, hold.expires_at)
        )
        return self.forget_pod(uid) if hold.is_started_and_counted else None

    def pod_pending_again(self, uid: str, expires_at: float = inf) -> None:
        """Record that a pod is Pending, although it may have seemed to have started."""
        hold = self._holds.get(uid)
        if hold is not None and (hold.left_pending or hold.expires_at != expires_at):
            self._on_changed(hold.node)
            self._holds[uid] = replace(hold, left_at=inf, expires_at=expires_at)

    def postpone_hold_check(self, uid: str, check_at: float) -> None:
        """Set the time of the next read of an assumed pod."""
        if uid in self._holds:
            self._holds[uid] = replace(self._holds[uid], expires_at=check_at)

    def forget_pod(self, uid: str) -> AssumedPod | None:
        """Forget an assumed pod and return it; None if it was not assumed."""
        hold = self._holds.pop(uid, None)
        if hold is None:
            return None
        uids = self._by_node[hold.node]
        uids.discard(uid)
        if not uids:
            del self._by_node[hold.node]
        self._on_changed(hold.node)
        return hold

    def due_assumed_pods(self, now_s: float) -> list[AssumedPod]:
        """Return the assumed pods that must be read, the longest due first."""
        pods = [hold for hold in self._holds.values() if hold.expires_at <= now_s]
        return sorted(pods, key=lambda hold: (hold.expires_at, hold.uid))

    def late_assumed_pods(self, now_s: float) -> list[AssumedPod]:
        """Return started pods that their nodes should have counted by now, by uid."""
        pods = [h for h in self._holds.values() if now_s - h.left_at >= UNCOUNTED_POD_WARNING_S]
        return sorted(pods, key=lambda hold: hold.uid)


def assumed_pod_of(
    document: Mapping[str, Any], reader: PodReader, now_s: float
) -> AssumedPod | None:
    """Return the assumed pod of a bound pod; None if it has no constraints."""
    node, request = text_in_section(document, "spec", "nodeName"), reader.read_pod_request(document)
    if request.is_unconstrained or request.invalid_reason or not node:
        return None
    return AssumedPod(
        request=request,
        node=node,
        numa_nodes=reader.scheduled_numa_nodes(document),
        assumed_at=now_s,
    )


def _with_count_state(hold: AssumedPod, info: NodeInfo | None) -> AssumedPod:
    """Return an assumed pod with the containers that an object counts."""
    named = hold.containers_counted_by(info) if isinstance(info, NodeResources) else frozenset()
    if named <= hold.counted_by_node:
        return hold
    return replace(hold, counted_by_node=hold.counted_by_node | named)


def _has_more_free(old_info: NodeInfo | None, new_info: NodeInfo | None) -> bool:
    """Return True if a node has more of any resource than before."""
    if not isinstance(new_info, NodeResources):
        return False
    if not isinstance(old_info, NodeResources) or old_info.ids != new_info.ids:
        return True
    agent_became_ready = old_info.agent_not_ready and not new_info.agent_not_ready
    if agent_became_ready or (old_info.exclusive_limit or 0) < (new_info.exclusive_limit or 0):
        return True
    amounts = {r.name: r.free for r in old_info.other_resources}
    pairs = [
        (old_info.cpu.free, new_info.cpu.free),
        (old_info.exclusive.free, new_info.exclusive.free),
    ]
    if new_info.exclusive_after_moves:
        pairs.append((old_info.exclusive_after_moves, new_info.exclusive_after_moves))
    pairs += [(amounts.get(r.name, ()), r.free) for r in new_info.other_resources]
    return any(len(a) != len(b) or any(n > w for w, n in zip(a, b, strict=True)) for a, b in pairs)
