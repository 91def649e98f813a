"""What would have to move so that a pod fits: the fewest pods of one node, by trying. Pure.

Sets are tried in order of size, on one node after another, and judged as the scheduler judges. The
search is bounded; an answer says whether it was cut, because then a smaller set may exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.judge import judge
from nri_numa.scheduler.published import Table
from nri_numa.scheduler.room import with_back, without
from nri_numa.scheduler.verdict import Charge, Fits, Verdict
from nri_numa.scheduler.wish import Wish

LARGEST: Final = 4
"""Pods of a set; who would move more of them asks another question."""
TRIES: Final = 20_000
"""Sets that are judged, some seconds of work."""
_KEPT: Final = 20
"""Sets of the smallest size that are compared by where their pods could go."""


@dataclass(frozen=True, slots=True)
class Running:
    """A pod that has NUMA nodes of its node.

    Attributes:
        name: namespace and name.
        node: where it is.
        charge: what it takes there.
        wish: what it asks for.
        movable: somebody makes it again, perhaps elsewhere, when it is evicted.
    """

    name: str
    node: str
    charge: Charge
    wish: Wish
    movable: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """A set of pods.

    Attributes:
        node: where they are, and where the pod fits without them.
        places: its NUMA nodes by container then.
        pods: that would have to move, and where each of them fits; empty for nowhere.
    """

    node: str
    places: tuple[tuple[str, str], ...]
    pods: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Search:
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
    wish: Wish,
    rooms: Mapping[str, Table],
    running: Iterable[Running],
    strategy: Strategy,
    *,
    tries: int = TRIES,
) -> Search:
    """Find the fewest pods of one node without which a pod fits there.

    Args:
        wish: of the pod.
        rooms: what each node has left for others, by name; those that may get it.
        running: pods that have NUMA nodes; those that nobody makes again stay.
        strategy: which of equally good NUMA nodes.
        tries: sets that are judged at most.
    """
    by_node: dict[str, list[Running]] = {}
    for one in running:
        if one.movable and one.node in rooms:
            by_node.setdefault(one.node, []).append(one)
    known: dict[Table, Verdict] = {}

    def fits(room: Table) -> Verdict:
        found = known.get(room)
        if found is None:
            found = known[room] = judge(room, wish, strategy)
        return found

    tried = 0
    hopeful: list[tuple[str, list[Running]]] = []
    for node in sorted(by_node):
        if tried >= tries:
            return Search(None, tried, cut=True)
        tried += 1
        everything = with_back(rooms[node], [one.charge for one in by_node[node]])
        if isinstance(fits(everything), Fits):
            hopeful.append((node, sorted(by_node[node], key=lambda one: one.name)))
    found: list[tuple[str, tuple[Running, ...], Fits]] = []
    for size in range(1, LARGEST + 1):
        for node, pods in hopeful:
            for chosen in combinations(pods, size):
                if tried >= tries or len(found) >= _KEPT:
                    break
                tried += 1
                room = with_back(rooms[node], [one.charge for one in chosen])
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
    rooms: Mapping[str, Table],
    strategy: Strategy,
) -> Moves:
    taken: dict[str, list[Charge]] = {}
    where: list[tuple[str, str]] = []
    for one in pods:
        to = ""
        known: dict[Table, Verdict] = {}
        for name in sorted(rooms):
            if name == node:
                continue
            room = without(rooms[name], taken.get(name, []))
            found = known.get(room)
            if found is None:
                found = known[room] = judge(room, one.wish, strategy)
            if isinstance(found, Fits):
                to = name
                if found.charge is not None:
                    taken.setdefault(name, []).append(found.charge)
                break
        where.append((one.name, to))
    places = tuple((name, str(numa_nodes)) for name, numa_nodes in verdict.places)
    return Moves(node, places, tuple(where))
