"""All nodes: what they publish, and what is held for pods that are on their way to them.

A pod is *held* from the moment it has its node until the node's object counts it. The object of
``nri-numa publish`` names the containers that its numbers count (`nri_numa.model.charged`), and
what it names is not subtracted a second time: that follows from the hold and the object alone,
in whatever order they came, and however late. A hold ends when its pod left the phase Pending and
was counted, or when there is no such pod any more.

The object of another publisher names no container, which leaves the moment open. Then a hold ends a
while after the pod left the phase Pending. Until then the pod may be counted twice, which costs
room for seconds and never gives it to two.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.model.charged import mark
from nri_numa.model.cpuset import NUMASet
from nri_numa.scheduler.node_room import Counts, NodeRoom, Unreadable
from nri_numa.scheduler.pod_request import PodRequest

Known = NodeRoom | Unreadable
LATE_S: Final = 60.0
"""Seconds after which a node should count a pod that started; `nri-numa publish` takes one."""
_REMEMBERED: Final = 1000
"""Rooms that are gone and may be kept, in case that a node is like them again."""


class Hold(Struct, frozen=True, kw_only=True):
    """Room that is kept for one pod.

    Attributes:
        places: NUMA nodes by container, as its annotation says.
        charge: what it takes, where nothing of it is in an annotation.
        until: when it is to be judged by more than what is watched; infinity while its pod is on
            its way.
        counted: containers that its node's object counted, be it in an earlier state.
        left_at: when its pod left the phase Pending; infinity while it is on its way.
    """

    request: PodRequest
    node: str
    places: Mapping[str, NUMASet] = {}
    charge: Counts | None = None
    since: float
    until: float = inf
    counted: frozenset[str] = frozenset()
    left_at: float = inf

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.request.uid

    @property
    def left(self) -> bool:
        """Whether the pod is not on its way any more."""
        return self.left_at < inf

    @property
    def staying(self) -> frozenset[str]:
        """Containers that the pod has in the end.

        Those that end before the others start are not among them: what the pod takes in the end is
        held. Nor is what the kubelet alone aligns, and there nothing is ever named.
        """
        return frozenset([one.container for one in self.request.containers if not one.ends])

    @property
    def over(self) -> bool:
        """Whether its pod has started, and all of it was counted."""
        return self.left and bool(self.request.containers) and self.staying <= self.counted

    def named_by(self, room: NodeRoom) -> frozenset[str]:
        """Containers of it that the numbers of a node count."""
        named = room.charged.split() if room.charged else ()
        return frozenset([name for name in self.staying if mark(self.uid, name) in named])

    def is_nameable_by(self, room: NodeRoom) -> bool:
        """Whether the object of a node says when it counts the pod."""
        return room.charged is not None and bool(self.request.containers)

    def open(self, room: NodeRoom) -> frozenset[str]:
        """Containers that the numbers of a node do not count yet.

        One that was counted and is not any more has ended, once its pod has started.
        """
        earlier = self.counted if self.left else frozenset()
        return self.staying - self.named_by(room) - earlier

    def counted_by(self, room: NodeRoom) -> bool:
        """Whether the numbers of a node count all of it."""
        return bool(self.request.containers) and not self.open(room)

    def charge_on(self, room: NodeRoom) -> Counts | None:
        """What is to be subtracted from what a node publishes."""
        request, missing = self.request, self.open(room)
        if request.containers and not missing:
            return None
        partly = len(missing) < len(self.staying)
        if partly and request.together is None and self.places:
            rest = tuple(one for one in request.containers if one.container in missing)
            return room.charge_of(replace(request, containers=rest), self.places)
        if self.charge is None and self.places:
            return room.charge_of(request, self.places)
        return self.charge


class Nodes:
    """What is known of the nodes, and what is held on them."""

    def __init__(self) -> None:
        self._nodes: dict[str, Known] = {}
        self._rooms: dict[str, Known] = {}
        self._equal: dict[NodeRoom, NodeRoom] = {}
        self._holds: dict[str, Hold] = {}
        self._by_node: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def names(self) -> frozenset[str]:
        """Nodes that have an object."""
        return frozenset(self._nodes)

    @property
    def unreadable(self) -> int:
        """How many objects say nothing certain."""
        return sum(isinstance(known, Unreadable) for known in self._nodes.values())

    @property
    def holds(self) -> Mapping[str, Hold]:
        """Holds by uid of the pod."""
        return self._holds

    def published(self, name: str) -> Known | None:
        """What a node publishes, without regard to holds."""
        return self._nodes.get(name)

    def room(self, name: str) -> Known | None:
        """What a node has free for others; None for one without an object.

        Equal rooms are one object, so verdicts about them are found without a comparison.
        """
        found = self._rooms.get(name)
        if found is None:
            found = self._nodes.get(name)
            if isinstance(found, NodeRoom):
                holds = [self._holds[uid] for uid in sorted(self._by_node.get(name, ()))]
                charges = [one.charge_on(found) for one in holds]
                found = found.less(one for one in charges if one is not None)
                found = replace(found, charged="") if found.charged != "" else found
                if len(self._equal) >= len(self._nodes) + _REMEMBERED:
                    self._equal = {room: room for room in self.rooms()}
                found = self._equal.setdefault(found, found)
            if found is not None:
                self._rooms[name] = found
        return found

    def rooms(self) -> set[NodeRoom]:
        """What nodes have free for others, as far as it was asked for since it changed."""
        return {room for room in self._rooms.values() if isinstance(room, NodeRoom)}

    def put(self, name: str, known: Known) -> bool:
        """A node publishes something; whether it has more room of something than before."""
        before, was = self.room(name), self._nodes.get(name)
        if was == known:
            return False
        self._nodes[name] = known
        self._rooms.pop(name, None)
        for uid in sorted(self._by_node.get(name, ())):
            hold = self._holds[uid] = _counted(self._holds[uid], known)
            if hold.over:
                self.release(uid)
        return _more(before, self.room(name))

    def silence(self, name: str) -> bool:
        """A node's object is not valid any more: its agent is silent; whether it was not."""
        known = self._nodes.get(name)
        if not isinstance(known, NodeRoom) or known.silent:
            return False
        self.put(name, replace(known, silent=True))
        return True

    def remove(self, name: str) -> None:
        """A node's object does not exist any more."""
        self._nodes.pop(name, None)
        self._rooms.pop(name, None)

    def hold(self, hold: Hold) -> None:
        """Keep room for a pod until it is counted; an earlier hold of the same pod is replaced."""
        self.release(hold.uid)
        hold = _counted(hold, self._nodes.get(hold.node))
        if hold.over:
            return
        self._holds[hold.uid] = hold
        self._by_node.setdefault(hold.node, set()).add(hold.uid)
        self._rooms.pop(hold.node, None)

    def leaves(self, uid: str, at: float, until: float) -> Hold | None:
        """A pod is not on its way any more; its hold if that ended, because its node counts it.

        Otherwise it ends when an object says that the pod is counted, or is judged anew.
        """
        hold = self._holds.get(uid)
        if hold is None:
            return None
        self._rooms.pop(hold.node, None)
        hold = self._holds[uid] = replace(
            hold, left_at=min(at, hold.left_at), until=min(until, hold.until)
        )
        return self.release(uid) if hold.over else None

    def stays(self, uid: str, until: float = inf) -> None:
        """A pod is on its way, although it may have seemed to have left."""
        hold = self._holds.get(uid)
        if hold is not None and (hold.left or hold.until != until):
            self._rooms.pop(hold.node, None)
            self._holds[uid] = replace(hold, left_at=inf, until=until)

    def postpone(self, uid: str, until: float) -> None:
        """Judge a hold, if it is still there, at another time."""
        if uid in self._holds:
            self._holds[uid] = replace(self._holds[uid], until=until)

    def release(self, uid: str) -> Hold | None:
        """End a hold; None where there is none."""
        hold = self._holds.pop(uid, None)
        if hold is None:
            return None
        uids = self._by_node[hold.node]
        uids.discard(uid)
        if not uids:
            del self._by_node[hold.node]
        self._rooms.pop(hold.node, None)
        return hold

    def due(self, now: float) -> list[Hold]:
        """Holds that are to be judged, those that waited longest first."""
        found = [hold for hold in self._holds.values() if hold.until <= now]
        return sorted(found, key=lambda hold: (hold.until, hold.uid))

    def late(self, now: float) -> list[Hold]:
        """Holds of pods that started a while ago and that their nodes do not count, by uid."""
        found = [hold for hold in self._holds.values() if now - hold.left_at >= LATE_S]
        return sorted(found, key=lambda hold: hold.uid)


def _counted(hold: Hold, known: Known | None) -> Hold:
    """The same, with what an object says of it."""
    named = hold.named_by(known) if isinstance(known, NodeRoom) else frozenset()
    return hold if named <= hold.counted else replace(hold, counted=hold.counted | named)


def _more(before: Known | None, after: Known | None) -> bool:
    """Whether a node has more of something."""
    if not isinstance(after, NodeRoom):
        return False
    if not isinstance(before, NodeRoom) or before.ids != after.ids:
        return True
    if (before.silent and not after.silent) or (before.together or 0) < (after.together or 0):
        return True
    was = {one.name: one.free for one in before.others}
    pairs = [(before.cpu.free, after.cpu.free), (before.exclusive.free, after.exclusive.free)]
    if after.after_moving:
        pairs.append((before.after_moving, after.after_moving))
    pairs += [(was.get(one.name, ()), one.free) for one in after.others]
    return any(
        len(old) != len(new) or any(n > w for w, n in zip(old, new, strict=True))
        for old, new in pairs
    )
