"""The verbs filter and prioritize: many nodes, one pod.

One text for each class of reasons, with the best number of all nodes of that class: kube-scheduler
counts texts by equality, and the condition of a pod that is shown to people is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from nri_numa.model.workload import Strategy
from nri_numa.scheduler.fit import Fits, Short, Verdict, fit, narrowest
from nri_numa.scheduler.node_room import NOTHING_KNOWN, NodeRoom, Unreadable
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_request import PodRequest

NO_OBJECT: Final = "no NodeResourceTopology says what its NUMA nodes have"
SILENT: Final = "its agent does not place containers now"
NOT_READABLE: Final = "its NodeResourceTopology cannot be read"
_ROOMS: Final = 20_000
"""Rooms whose verdicts are remembered for one kind of pods."""
_REQUESTS: Final = 32
"""Kinds of pods for which verdicts are remembered."""


class Filtered(Struct):
    """The outcome of a filter.

    Attributes:
        fits: in the order of the question; of a narrow filter those that suit best.
        failed: reason by node, where waiting or preemption may help.
        hopeless: reason by node, where neither does.
    """

    fits: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    hopeless: dict[str, str] = field(default_factory=dict)


class CandidateIndex:
    """Verdicts of nodes for pods. Each distinct room is judged once for equal pods.

    Args:
        unknown_fits: pods that ask for something may go to nodes of which nothing is known.
        narrow: of the nodes with room `filter` names those that suit best, where `prioritize` is
            not called (docs/adr/0059-sums-first.md).
    """

    def __init__(
        self,
        nodes: Nodes,
        strategy: Strategy,
        *,
        unknown_fits: bool = False,
        narrow: bool = False,
    ) -> None:
        self._nodes, self._strategy = nodes, strategy
        self._unknown_fits, self._narrow = unknown_fits, narrow
        self._known: dict[tuple[object, ...], dict[NodeRoom, Verdict]] = {}

    def verdict(self, request: PodRequest, node: str) -> Verdict:
        """Whether a node has room for a pod now, and where."""
        return self._verdicts(request, (node,))[0]

    def filter(self, request: PodRequest, names: Sequence[str]) -> Filtered:
        """Which nodes have room, and why the others have not."""
        if request.nothing:
            return Filtered(fits=list(names))
        if request.wrong:
            return Filtered(hopeless=dict.fromkeys(names, request.wrong))
        result = Filtered()
        grades: list[int] = []
        groups: dict[tuple[object, ...], list[tuple[str, Short]]] = {}
        for name, found in zip(names, self._verdicts(request, names), strict=True):
            if isinstance(found, Short):
                groups.setdefault(found.group, []).append((name, found))
            else:
                result.fits.append(name)
                grades.append(found.grade)
        if self._narrow and request.ours and grades:
            least = narrowest(max(grades), self._strategy)
            fits = zip(result.fits, grades, strict=True)
            result.fits = [name for name, grade in fits if grade >= least]
        for members in groups.values():
            first = members[0][1]
            text = first.text(max(short.most for _, short in members))
            (result.hopeless if first.never else result.failed).update(
                dict.fromkeys([name for name, _ in members], text)
            )
        return result

    def prioritize(self, request: PodRequest, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, the larger the better; nothing for a pod that asks for nothing."""
        if request.nothing or request.wrong:
            return []
        verdicts = zip(names, self._verdicts(request, names), strict=True)
        return [(name, found.score if isinstance(found, Fits) else 0) for name, found in verdicts]

    def why(self, node: str) -> str:
        """What cannot be read in a node's object; empty where all can."""
        known = self._nodes.published(node)
        return known.why if isinstance(known, Unreadable) else ""

    def _verdicts(self, request: PodRequest, names: Sequence[str]) -> list[Verdict]:
        key = request.key
        known = self._known.get(key)
        if known is None or len(known) >= _ROOMS:
            if len(self._known) >= _REQUESTS:
                del self._known[next(iter(self._known))]
            known = self._known[key] = {}
        verdicts: list[Verdict] = []
        for room in map(self._nodes.room, names):
            if not isinstance(room, NodeRoom) or (room.silent and request.ours):
                verdicts.append(self._without_room(request, room))
                continue
            found = known.get(room)
            if found is None:
                found = known[room] = fit(room, request, self._strategy)
            verdicts.append(found)
        return verdicts

    def _without_room(self, request: PodRequest, known: NodeRoom | Unreadable | None) -> Verdict:
        if isinstance(known, NodeRoom):
            return Short(SILENT)
        if self._unknown_fits or not request.ours:
            return Fits(NOTHING_KNOWN, request)
        return Short(NO_OBJECT if known is None else NOT_READABLE, never=True)
