"""The verbs filter and prioritize: many nodes, one pod.

One text for each class of reasons, with the best number of all nodes of that class: the scheduler
counts texts by equality, and the condition of a pod that is shown to people is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.fleet import Fleet, Known
from nri_numa.scheduler.glance import Glance, glance_of
from nri_numa.scheduler.judge import judge, surely
from nri_numa.scheduler.published import Table, Unreadable
from nri_numa.scheduler.scoring import graded, narrowest, score_of
from nri_numa.scheduler.verdict import Fits, Short, Verdict
from nri_numa.scheduler.wish import Wish

NO_OBJECT: Final = "no NodeResourceTopology says what its NUMA nodes have"
SILENT: Final = "its agent does not place containers now"
NOT_READABLE: Final = "its NodeResourceTopology cannot be read"
_REMEMBERED: Final = 20_000
"""Nodes about which something is remembered for one kind of pods."""
_KINDS: Final = 32
"""Kinds of pods for which something is remembered."""


Found = Short | int
"""What is short, or a grade (`nri_numa.scheduler.scoring.grade`)."""


@dataclass(slots=True)
class _Kind:
    """Pods that ask alike, and what was found for them.

    Attributes:
        glance: the cheap look at nodes.
        known: what was found of rooms, by their ids; equal nodes share it. With the rooms
            themselves, so that the ids stay theirs.
        nodes: the same by name of the node, as long as its room is the same.
        judged: the whole verdict of rooms, likewise, of those where somebody was to be bound.
        seen: up to which change of the fleet `nodes` holds.
    """

    glance: Glance | None
    known: dict[int, tuple[Table, Found]] = field(default_factory=dict)
    nodes: dict[str, Found] = field(default_factory=dict)
    judged: dict[int, tuple[Table, Verdict]] = field(default_factory=dict)
    seen: int = 0


def _full(kind: _Kind) -> bool:
    return max(len(kind.known), len(kind.nodes), len(kind.judged)) >= _REMEMBERED


@dataclass(frozen=True, slots=True)
class Filtered:
    """What comes of a filter.

    Attributes:
        fits: in the order in which they were asked; of a narrow filter those that suit best.
        failed: reason by node, where waiting or preemption may help.
        hopeless: reason by node, where it does not.
    """

    fits: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)


class Panel:
    """Judges nodes, and remembers what was found about equal nodes and equal pods.

    Args:
        fleet: what is known of the nodes.
        strategy: which of equally good NUMA nodes, and nodes.
        unknown_fits: pods that ask for something may go to nodes of which nothing is known.
        narrow: of the nodes with room `filter` names those that suit best, for who does not ask
            `prioritize` (docs/adr/0059-sums-first.md).

    Attributes:
        judged: how often nothing was remembered.
    """

    def __init__(
        self,
        fleet: Fleet,
        strategy: Strategy,
        *,
        unknown_fits: bool = False,
        narrow: bool = False,
    ) -> None:
        self._fleet = fleet
        self._strategy = strategy
        self._unknown_fits, self._narrow = unknown_fits, narrow
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self.judged = 0

    def verdict(self, wish: Wish, node: str) -> Verdict:
        """Whether one node has room for a pod that asks for something, now, and where."""
        room = self._fleet.room(node)
        if isinstance(room, Table) and not (room.silent and wish.ours):
            return self._judged(room, wish)
        found = self._without_table(wish, room)
        return found if isinstance(found, Short) else Fits()

    def _judged(self, room: Table, wish: Wish) -> Verdict:
        """What the rules of the node say; replicas on equal nodes are judged once."""
        judged = self._kind(wish).judged
        before = judged.get(id(room))
        if before is not None:
            return before[1]
        found = surely(room, wish) or judge(room, wish, self._strategy)
        judged[id(room)] = room, found
        return found

    def _look(self, wish: Wish, kind: _Kind, nodes: Sequence[tuple[str, Table]]) -> None:
        """Find out of nodes what nobody remembers; several may have one room."""
        rooms = {id(room): room for _, room in nodes}
        self.judged += len(rooms)
        glance, known = kind.glance, kind.known
        tables = list(rooms.values())
        grades = glance.grades(tables) if glance is not None else [None] * len(tables)
        for room, grade in zip(tables, grades, strict=True):
            found: Found | None = grade
            if found is None and glance is not None:
                found = glance.look(room)
            if found is None:
                verdict = self._judged(room, wish)
                found = verdict if isinstance(verdict, Short) else graded(verdict, self._strategy)
            known[id(room)] = room, found
        for name, room in nodes:
            kind.nodes[name] = known[id(room)][1]

    def _kind(self, wish: Wish) -> _Kind:
        """What was found of equal pods."""
        found = self._kinds.get(wish.key)
        if found is None or _full(found):
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            now, _ = self._fleet.changed(0)
            found = self._kinds[wish.key] = _Kind(glance_of(wish, self._strategy), seen=now)
        return found

    def _without_table(self, wish: Wish, room: Known | None) -> Found:
        if isinstance(room, Table):
            return Short(SILENT)
        if self._unknown_fits or not wish.ours:
            return 0
        return Short(NO_OBJECT if room is None else NOT_READABLE, never=True)

    def _found(self, wish: Wish, names: Sequence[str]) -> Mapping[str, Found]:
        """By node a grade where the pod fits, or what is short; of more nodes than were asked."""
        kind = self._kind(wish)
        found = kind.nodes
        kind.seen, changed = self._fleet.changed(kind.seen)
        if changed is None:
            found.clear()
        else:
            for name in changed:
                found.pop(name, None)
        if not (missing := [name for name in names if name not in found]):
            return found
        known, ours = kind.known, wish.ours
        anew: list[tuple[str, Table]] = []
        for name, room in zip(missing, self._fleet.rooms(missing), strict=True):
            if not isinstance(room, Table) or (ours and room.silent):
                found[name] = self._without_table(wish, room)
                continue
            # Equal rooms are one object while the fleet knows them (`Fleet.room`).
            before = known.get(id(room))
            if before is None:
                anew.append((name, room))
            else:
                found[name] = before[1]
        if anew:
            self._look(wish, kind, anew)
        return found

    def filter(self, wish: Wish, names: Sequence[str]) -> Filtered:
        """Which nodes have room, and why the others have not."""
        if wish.nothing:
            return Filtered(fits=list(names))
        if wish.wrong:
            return Filtered(hopeless=dict.fromkeys(names, wish.wrong))
        result = Filtered()
        fits: list[str] = []
        groups: dict[tuple[object, ...], list[tuple[str, Short]]] = {}
        found = self._found(wish, names)
        for name in names:
            one = found[name]
            if isinstance(one, Short):
                groups.setdefault(one.group, []).append((name, one))
            else:
                fits.append(name)
        result.fits.extend(self._best(fits, found) if self._narrow and wish.ours else fits)
        for members in groups.values():
            first = members[0][1]
            text = reason(first, max(short.most for _, short in members))
            (result.hopeless if first.never else result.failed).update(
                dict.fromkeys([name for name, _ in members], text)
            )
        return result

    def _best(self, fits: list[str], found: Mapping[str, Found]) -> list[str]:
        """Those of the nodes with room that suit about as well as the best one."""
        if len(fits) < 2:
            return fits
        grades = [cast(int, found[name]) for name in fits]
        least = narrowest(max(grades), self._strategy)
        return [name for name, grade in zip(fits, grades, strict=True) if grade >= least]

    def prioritize(self, wish: Wish, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, the larger the better; nothing for a pod without a wish."""
        if wish.nothing or wish.wrong:
            return []
        found = self._found(wish, names)
        return [
            (name, 0 if isinstance(one := found[name], Short) else score_of(one)) for name in names
        ]

    def why(self, node: str) -> str:
        """What cannot be read in a node's object; empty where all can."""
        known = self._fleet.published(node)
        return known.why if isinstance(known, Unreadable) else ""


def reason(short: Short, most: int) -> str:
    """The text of a class of reasons."""
    if short.what in (NO_OBJECT, NOT_READABLE, SILENT):
        return short.what
    return short.text(most)
