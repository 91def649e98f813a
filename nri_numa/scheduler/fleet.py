"""All nodes: what they publish, and what is promised to pods that are on their way to them.

A pod is *held* from the moment it is bound until its node's object counts it. The object of
``nri-numa publish`` names the containers that its numbers count (`nri_numa.charged`), and what it
names is not taken away a second time: that follows from the hold and the object alone, in whatever
order they came. A hold ends when its pod left the phase Pending and was counted.

An object that names nobody (of another publisher, or an older one) leaves the moment open. Then it
is bounded: a while after the pod left the phase Pending, at once when it is being deleted, and
after a limit in any case. Until then the pod may be counted twice, which costs room for seconds and
never promises it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nri_numa.charged import mark
from nri_numa.machine.cpuset import NUMASet
from nri_numa.scheduler.published import Stock, Table, Unreadable
from nri_numa.scheduler.room import charge_of, without
from nri_numa.scheduler.verdict import Charge
from nri_numa.scheduler.wish import Wish

Known = Table | Unreadable
_REMEMBERED: Final = 20_000
"""Rooms of which one object is kept for all; verdicts about more are not remembered either."""
_JOURNAL: Final = 8192
"""Changes of rooms that are kept for those who remember something of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A promise to one pod.

    Attributes:
        wish: of the pod.
        node: where it goes.
        places: NUMA nodes by container, as its annotation says.
        charge: what it takes, where nothing of it is in an annotation.
        since: when it was made.
        until: when it ends.
        counted: its node's object counted all of it, be it in an earlier state.
        left: the pod is not on its way any more.
    """

    wish: Wish
    node: str
    places: Mapping[str, NUMASet] = field(default_factory=dict)
    charge: Charge | None = None
    since: float
    until: float
    counted: bool = False
    left: bool = False

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.wish.uid

    def open(self, table: Table) -> list[str]:
        """Containers that the numbers of a table do not count yet.

        Containers that end before the others start are not among them: what the pod takes in the
        end is held. Nor is what the kubelet alone aligns, and there nothing is ever named.
        """
        staying = [need.container for need in self.wish.needs if not need.ends]
        if not table.charged:
            return staying
        named = table.charged.split()
        return [name for name in staying if mark(self.uid, name) not in named]

    def counted_by(self, table: Table) -> bool:
        """Whether the numbers of a table count all of it."""
        return bool(self.wish.needs) and not self.open(table)

    def charge_on(self, table: Table) -> Charge | None:
        """What is to be taken away from a table for it."""
        missing = self.open(table)
        if self.wish.needs and not missing:
            return None
        partly = len(missing) < sum(not need.ends for need in self.wish.needs)
        if partly and self.wish.together is None and self.places:
            needs = tuple(need for need in self.wish.needs if need.container in missing)
            return charge_of(table, replace(self.wish, needs=needs), self.places)
        if self.charge is None and self.places:
            return charge_of(table, self.wish, self.places)
        return self.charge


class Fleet:
    """What is known of the nodes, and who is held on them."""

    def __init__(self) -> None:
        self._nodes: dict[str, Known] = {}
        self._rooms: dict[str, Known] = {}
        self._alike: dict[Table, Table] = {}
        self._holds: dict[str, Hold] = {}
        self._by_node: dict[str, set[str]] = {}
        self._changed: list[str] = []
        self._dropped = 0

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
        """Who is held, by uid of the pod."""
        return self._holds

    def published(self, name: str) -> Known | None:
        """What a node publishes, promises not taken away."""
        return self._nodes.get(name)

    def room(self, name: str) -> Known | None:
        """What a node has left for others; None for one without an object."""
        found = self._rooms.get(name)
        if found is None:
            found = self._nodes.get(name)
            if isinstance(found, Table):
                found = self._shared(_left(found, self._charges(name, found)))
            if found is not None:
                self._rooms[name] = found
        return found

    def rooms(self, names: Sequence[str]) -> list[Known | None]:
        """The same of many."""
        known = self._rooms
        return [known.get(name) or self.room(name) for name in names]

    def changed(self, since: int) -> tuple[int, Sequence[str] | None]:
        """Nodes whose room is another one.

        Args:
            since: what was answered before; 0 at first.

        Returns:
            What to ask with next time, and the nodes; None where so many changed that who
            remembers something had better forget it.
        """
        now = self._dropped + len(self._changed)
        if since == now:
            return now, ()
        return now, self._changed[since - self._dropped :] if since >= self._dropped else None

    def _stale(self, name: str) -> None:
        """What a node has left is to be worked out again."""
        self._rooms.pop(name, None)
        self._changed.append(name)
        if len(self._changed) >= _JOURNAL:
            half = _JOURNAL // 2
            del self._changed[:half]
            self._dropped += half

    def _shared(self, room: Table) -> Table:
        """One object for all nodes with equal rooms.

        Verdicts are looked up by it, some hundred at a time: the same object is not compared.
        """
        room = replace(room, charged="") if room.charged else room
        if len(self._alike) >= _REMEMBERED:
            self._alike.clear()
        return self._alike.setdefault(room, room)

    def _charges(self, name: str, table: Table) -> list[Charge]:
        holds = [self._holds[uid] for uid in sorted(self._by_node.get(name, ()))]
        return [charge for hold in holds if (charge := hold.charge_on(table)) is not None]

    def put(self, name: str, known: Known) -> bool:
        """Take in what a node publishes; whether it has more room of something than before."""
        before, was = self.room(name), self._nodes.get(name)
        if was == known and _charged(was) == _charged(known):
            return False
        self._nodes[name] = known
        self._stale(name)
        for uid in sorted(self._by_node.get(name, ())):
            hold = self._holds[uid] = _looked(self._holds[uid], known)
            if hold.counted and hold.left:
                self.release(uid)
        return _grown(before, self.room(name))

    def remove(self, name: str) -> None:
        """A node's object is gone."""
        self._nodes.pop(name, None)
        self._stale(name)

    def hold(self, hold: Hold) -> None:
        """Promise; a promise to the same pod before is replaced."""
        self.release(hold.uid)
        self._holds[hold.uid] = _looked(hold, self._nodes.get(hold.node))
        self._by_node.setdefault(hold.node, set()).add(hold.uid)
        self._stale(hold.node)

    def leaves(self, uid: str, until: float) -> Hold | None:
        """A pod is not on its way any more.

        Args:
            uid: of the pod.
            until: when its hold ends, where no object says earlier that it is counted.

        Returns:
            Its hold if that ended, because its node counted it.
        """
        hold = self._holds.get(uid)
        if hold is None:
            return None
        if hold.counted:
            return self.release(uid)
        self._holds[uid] = replace(hold, left=True, until=min(until, hold.until))
        return None

    def stays(self, uid: str, until: float) -> None:
        """A pod is on its way, although it looked as if it had left."""
        hold = self._holds.get(uid)
        if hold is not None and hold.left:
            self._holds[uid] = replace(hold, left=False, until=until)

    def release(self, uid: str) -> Hold | None:
        """Take a promise back; None where there is none."""
        hold = self._holds.pop(uid, None)
        if hold is None:
            return None
        uids = self._by_node[hold.node]
        uids.discard(uid)
        if not uids:
            del self._by_node[hold.node]
        self._stale(hold.node)
        return hold

    def expire(self, now: float) -> list[Hold]:
        """Take back every promise whose time is over."""
        over = sorted(uid for uid, hold in self._holds.items() if hold.until <= now)
        return [hold for uid in over if (hold := self.release(uid)) is not None]


def _left(table: Table, charges: Sequence[Charge]) -> Table:
    """A table with promises taken away; a NUMA node has no more than the node has in all."""
    found = without(table, charges)
    if table.together is None:
        return found
    left = max(0, table.together - sum(sum(charge.exclusive) for charge in charges))
    exclusive = found.exclusive
    if max(exclusive.left) > left:
        column = tuple(min(count, left) for count in exclusive.left)
        exclusive = Stock(exclusive.name, exclusive.there, column)
    return replace(found, together=left, exclusive=exclusive)


def _charged(known: Known | None) -> str:
    return known.charged if isinstance(known, Table) else ""


def _looked(hold: Hold, known: Known | None) -> Hold:
    """The same, with what an object tells of it."""
    if hold.counted or not isinstance(known, Table) or not hold.counted_by(known):
        return hold
    return replace(hold, counted=True)


def _grown(before: Known | None, after: Known | None) -> bool:
    if not isinstance(after, Table):
        return False
    if not isinstance(before, Table) or before.ids != after.ids:
        return True
    old = {s.name: s.left for s in before.others}
    pairs = [(before.cpu.left, after.cpu.left), (before.exclusive.left, after.exclusive.left)]
    pairs += [(old.get(s.name, ()), s.left) for s in after.others]
    return any(
        len(was) != len(now) or any(n > w for w, n in zip(was, now, strict=True))
        for was, now in pairs
    )
