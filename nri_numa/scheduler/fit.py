"""The rule: does a pod fit on a node, on which of its NUMA nodes, and if not, what is missing?

A container that one NUMA node has room for goes to one under every policy; which one says the
strategy (`nri_numa.engine.place.computed.measures`). One that none has room for is merged and
judged by `nri_numa.engine.align.policies.align`, as on the node. What the node alone knows, the
numbers of the CPUs, is replaced by counts: where free CPUs are scattered over cores, a pod that
fits here can still be refused there.

What judging costs is counted (`Work`). Containers beyond what one node may cost are judged each by
itself, by sums: none of them is refused that the node would take, and the node decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.engine.align.hints import EXACT_UPTO, ResourceDemand
from nri_numa.engine.align.policies import Problem, align, amount_text, nodes_text
from nri_numa.engine.place.computed import measures
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import counted
from nri_numa.model.workload import SMT, OnFailure, Policy, Scope, Strategy
from nri_numa.scheduler.node_room import Column, Counts, NodeRoom
from nri_numa.scheduler.pod_request import DEVICE, ContainerRequest, PodRequest, peak

STRICT: Final = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
MOST_SCORE: Final = 10
"""MaxExtenderPriority of kube-scheduler; it checks nothing."""
SLACK: Final = 2
"""Of three points for room: as good is a node that is not left nearly full beside empty ones."""
MERGE_WORK: Final = 10
"""Work of the smallest merge of hints; one for each 16 hints that are looked at comes to it."""
MAX_NODE_WORK: Final = 2000
"""Work for one node, about 20 ms, after which its containers are judged by sums alone. 64 wide ones
on eight NUMA nodes are below."""
_WIDEST: Final = 128
"""Twice the NUMA nodes up to which fewer come first; no machine that is sold has so many."""


class Work:
    """What judging costs: one for a container that sums decide, more for a merge of hints.

    A unit is some 10 µs (bench/extender.py).

    Attributes:
        done: so far.
        limit: of a whole question; the nodes beyond are judged by sums alone.
    """

    __slots__ = ("_until", "done", "limit")

    def __init__(self, limit: float = inf) -> None:
        self.done, self.limit = 0, limit
        self._until = limit

    @property
    def spent(self) -> bool:
        """Whether sums alone judge what comes next of this node."""
        return self.done >= self._until

    def begin_node(self) -> None:
        """Judge another node."""
        self._until = min(self.limit, self.done + MAX_NODE_WORK)

    def add_merge(self, numa_nodes: int, steps: int) -> None:
        """Count a merge, which looks at all sets of a few NUMA nodes, and searches among many."""
        hints = 1 << numa_nodes if numa_nodes <= EXACT_UPTO else steps * numa_nodes
        self.done += MERGE_WORK + hints // 16


class Fits(Struct, frozen=True, gc=False):
    """The pod fits.

    Attributes:
        request: of the pod, or of one like it.
        chosen: what was placed, one after another, and positions of its NUMA nodes.
        grade: see `grade`; 0 where nothing is aligned, and below all others where it ``moves``.
        moves: movable containers have to move for it, which the node decides.
        by_sums: some containers are not among ``chosen``: each has room by itself, and whether all
            have the node decides.
    """

    room: NodeRoom
    request: PodRequest
    chosen: tuple[tuple[ContainerRequest, Sequence[int]], ...] = ()
    grade: int = 0
    moves: bool = False
    by_sums: bool = False

    @property
    def places(self) -> tuple[tuple[str, NUMASet], ...]:
        """NUMA nodes by container, in the order in which they start."""
        ids, request = self.room.ids, self.request
        if not request.containers:
            return ()  # the kubelet chooses
        found = [
            (one.container, NUMASet(ids[place] for place in places)) for one, places in self.chosen
        ]
        if request.together is None:
            return tuple(found)
        both = found[0][1] if found else NUMASet()
        return tuple((one.container, both) for one in request.containers)

    @property
    def charge(self) -> Counts | None:
        """What the pod takes; None where that is nothing that is counted."""
        return self.room.charge(self.chosen)

    @property
    def score(self) -> int:
        """0 to 10, for `prioritize`."""
        return self.grade & 15


class Short(Struct, frozen=True, gc=False):
    """The pod does not fit: one class of reasons, and how near this node comes.

    Attributes:
        need: what is needed and where: ``needs 12 exclusive CPUs on one NUMA node``; the whole
            reason without ``unit``.
        unit: of ``most``, as `nri_numa.engine.align.policies.amount_text` knows it.
        most: the most that is free there, or that there is at all.
        never: waiting does not help: an empty node has too little.
    """

    need: str
    unit: str = ""
    most: int = 0
    never: bool = False

    @property
    def group(self) -> tuple[object, ...]:
        """What reasons of one class share."""
        return self.need, self.never

    def text(self, most: int) -> str:
        """The reason for all nodes of a class; ``most`` is the most of any of them."""
        if not self.unit:
            return self.need
        amount = amount_text(most, self.unit).removesuffix("s").removesuffix(" CPU")
        use = " for exclusive use" if self.unit == "cpus" else ""
        return f"{self.need}; {'most there is' if self.never else f'most free{use}'}: {amount}"


Verdict = Fits | Short


def fit(
    room: NodeRoom, request: PodRequest, strategy: Strategy, work: Work | None = None
) -> Verdict:
    """Whether a pod that is not wrong fits into what a node has free, less all that is held.

    What it costs is added to ``work``.
    """
    work = work or Work()
    work.begin_node()
    found = _fit(room, request, strategy, work)
    if isinstance(found, Short) and room.after_moving:
        moved = _fit(room.moved, request, strategy, work)
        # What moves for one container is not there for the next.
        if isinstance(moved, Fits) and (
            moved.by_sums or [len(places) for _, places in moved.chosen] == [1]
        ):
            return replace(moved, room=room, grade=0, moves=True)
    return found


def _fit(room: NodeRoom, request: PodRequest, strategy: Strategy, work: Work) -> Verdict:
    found: Verdict = Fits(room, request)
    if request.containers:
        found = _fit_all(room, request, request.aligned, strategy, room.together, work)
        if isinstance(found, Short):
            return found
    if request.kubelets and room.policy is not Policy.NONE:
        kubelets: tuple[ContainerRequest, ...] = tuple(
            [_by_kubelet(one, room) for one in request.kubelets]
        )
        if room.scope is Scope.POD and len(kubelets) > 1:
            kubelets = (peak(kubelets),)
        by_kubelet = _fit_all(room, request, kubelets, strategy, None, work)
        if isinstance(by_kubelet, Short) or not request.containers:
            return by_kubelet
        if by_kubelet.by_sums:
            return replace(found, by_sums=True)
    return found


def _by_kubelet(request: ContainerRequest, room: NodeRoom) -> ContainerRequest:
    """A request as the kubelet of this node sees it."""
    amounts = tuple(
        [(name, n) for name, n in request.amounts if room.aligns_memory or DEVICE in name]
    )
    return replace(
        request,
        policy=room.policy,
        exclusive=request.exclusive if room.aligns_cpus else 0,
        amounts=amounts,
        paid=amounts,
        on_failure=OnFailure.REJECT if room.policy in STRICT else OnFailure.WIDEN,
    )


def _fit_all(
    room: NodeRoom,
    request: PodRequest,
    containers: Sequence[ContainerRequest],
    strategy: Strategy,
    most: int | None,
    work: Work,
) -> Verdict:
    """Place containers one after another; ``most`` exclusive CPUs are free in all."""
    free, width, wider, by_sums = room.start, 0, False, False
    chosen: list[tuple[ContainerRequest, Sequence[int]]] = []
    used: list[int] = []
    for one in containers:
        if one.amounts and DEVICE in one.amounts[-1][0]:
            # kube-scheduler counts those that the node names for no NUMA node.
            known = [a for a in one.amounts if a[0] in room.capacity or DEVICE not in a[0]]
            one = replace(one, amounts=tuple(known))
        work.done += 1
        by_sums = by_sums or work.spent
        found = _place(room, room.start if by_sums else free, one, strategy, work)
        if isinstance(found, Short):
            if one.on_failure is not OnFailure.UNPINNED:
                return found
            wider = True
            continue
        if by_sums:
            continue
        places, ideal = found
        used += places
        width, wider = max(width, len(places)), wider or not ideal
        chosen.append((one, places))
        if not one.ends:
            free = free.after(one, room.kept(one), places)
    if by_sums:
        return Fits(room, request, tuple(chosen), by_sums=True)
    if not used:
        return Fits(room, request)
    if most is not None and (cpus := sum(room.start.exclusive) - sum(free.exclusive)) > most:
        return Short(f"needs {counted(cpus, 'exclusive CPU')}", "cpus", most)
    # What is free afterwards of the scarcer one of CPU time and memory, where that is scarcest.
    left, factor = 1000, 1000
    memory, capacity = free.others.get("memory"), room.capacity.get("memory", ())
    for place in used:
        whole, there = room.cpu.capacity[place], capacity[place] if memory else 0
        share = 1000 * free.milli[place] // whole if whole else 1000 if there else 0
        if memory and there:
            share = min(share, 1000 * memory[place] // there)
        left, factor = min(left, max(0, share)), min(factor, room.factor[place])
    return Fits(room, request, tuple(chosen), grade(width, wider, left, factor, strategy))


def _asks(room: NodeRoom, free: Counts, request: ContainerRequest, kept: int) -> list[Any]:
    """How much is asked of each resource, what is free and what there is: CPUs first."""
    asks: list[tuple[int, Column, Column]]
    if request.exclusive:
        asks = [(kept, free.exclusive, room.exclusive.capacity)]
    else:
        asks = [(max(1, request.milli), free.milli, room.cpu.capacity)]
    for name, amount in request.amounts:
        if name in free.others:
            asks.append((amount, free.others[name], room.capacity[name]))
        else:
            none = (0,) * len(room.ids)
            asks.append((amount, none, none))
    return asks


def _place(
    room: NodeRoom, free: Counts, request: ContainerRequest, strategy: Strategy, work: Work
) -> tuple[Sequence[int], bool] | Short:
    """Positions of the NUMA nodes for one container, the best first; and no wider than ideal.

    None of them where work is spent: then sums say that some set may do.
    """
    if request.smt is SMT.FULL_CORE and request.exclusive % room.threads:
        cpus, threads = counted(request.exclusive, "exclusive CPU"), counted(room.threads, "thread")
        return Short(f"needs {cpus} in whole cores of {threads}", never=True)
    asks = _asks(room, free, request, room.kept(request))
    fitting: Sequence[int] = range(len(room.ids))
    for least, column, _ in asks:
        fitting = [place for place in fitting if column[place] >= least]
    if len(fitting) > 1:
        fitting = (min(_by_strategy(asks, fitting, strategy))[1],)
    if fitting:
        return fitting, True
    needs = _needs(request, tuple([(least, capacity) for least, _, capacity in asks]))
    single = request.policy is Policy.SINGLE_NUMA_NODE
    if (single and request.on_failure is not OnFailure.WIDEN) or needs.too_few(asks):
        return needs.short(asks)
    return ((), False) if work.spent else _place_wide(room, request, asks, strategy, needs, work)


def _by_strategy(
    asks: list[Any], places: Sequence[int], strategy: Strategy
) -> Iterable[tuple[tuple[int, ...], int]]:
    """Places with what the engine ranks them by; the least is tried first."""
    # A column is read by place as a mapping is by NUMA node.
    return zip(measures(asks, tuple(places), strategy), places, strict=True)


def _place_wide(
    room: NodeRoom,
    request: ContainerRequest,
    asks: list[Any],
    strategy: Strategy,
    needs: _Needs,
    work: Work,
) -> tuple[Sequence[int], bool] | Short:
    """The same where no NUMA node has room for all of it: as the node's Topology Manager does."""
    ids = room.ids
    order = [place for _, place in sorted(_by_strategy(asks, range(len(ids)), strategy))]
    demands = [
        ResourceDemand(
            resource=name if unit in ("bytes", "devices") else "cpu",
            need=least,
            capacity=dict(zip(ids, capacity, strict=True)),
            available=dict(zip(ids, free, strict=True)),
            share="memory" if unit == "bytes" else None,
            unit=unit,
        )
        for (name, unit), (least, free, capacity) in zip(_units(request), asks, strict=True)
    ]
    problem = Problem(
        demands=tuple(demands),
        numa_ids=NUMASet(ids),
        policy=Policy.BEST_EFFORT if request.policy is Policy.NONE else request.policy,
        distance=room.distance,
        rank={ids[place]: rank for rank, place in enumerate(order)},
        one_width=True,
    )
    distances = room.sums_of_distances
    found, policy = align(problem, distances), problem.policy
    work.add_merge(len(ids), found.steps)
    ideal = found.preferred
    if not found.admitted:
        if request.on_failure is not OnFailure.WIDEN:
            return needs.short(asks)
        policy, ideal = Policy.BEST_EFFORT, False
        found = align(replace(problem, policy=policy), distances)
        work.add_merge(len(ids), found.steps)
    everywhere = range(len(ids))
    chosen = everywhere if found.affinity is None else room.places(found.affinity)
    for (_, unit), (least, free, _) in zip(_units(request), asks, strict=True):
        # CPU time is shared: what is short makes it slow, and nothing is refused.
        if unit == "millicpu" or sum(free[place] for place in chosen) >= least:
            continue
        if policy in STRICT or sum(free) < least:
            return needs.short(asks)
        chosen, ideal = everywhere, False
    return [place for place in order if place in chosen], ideal


def grade(width: int, wider: bool, left: int, factor: int, strategy: Strategy) -> int:
    """What nodes are compared by: fewer NUMA nodes before all else, then the score.

    The score, in the lowest four bits, is 0 to 10: six points for one NUMA node and two less for
    each more, one less where an empty machine would need fewer; up to three for NUMA nodes that are
    full afterwards (``pack``) or empty (otherwise); one for NUMA nodes with their whole capacity.

    Args:
        width: NUMA nodes of the widest container.
        wider: wider than an empty machine would need, or not pinned.
        left: thousandths of the scarcest resource that are free on its NUMA nodes afterwards.
        factor: least capacity factor of these, in thousandths.
        strategy: of the configuration.
    """
    wide = max(0, 6 - 2 * (width - 1) - wider)
    room = 1000 - left if strategy is Strategy.PACK else left
    first = max(0, _WIDEST - 2 * width - wider)
    return first << 4 | min(MOST_SCORE, (1000 * wide + 3 * room + factor + 500) // 1000)


def narrowest(best: int, strategy: Strategy) -> int:
    """The least grade that is about as good as the best one.

    As many NUMA nodes, and a score at most `SLACK` lower; with ``pack`` the same score: what
    kube-scheduler prefers by itself are the emptier ones.
    """
    return max(best & ~15, best - (0 if strategy is Strategy.PACK else SLACK))


# --- what is missing ------------------------------------------------------------------------------


class _Needs(Struct, frozen=True, gc=False):
    """What a container asks of all machines that have the same when they are empty.

    Attributes:
        counted: of each ask whether the container is refused where it is short, as shared CPU time
            is not.
        width: NUMA nodes that it gets at most; None for all of them. Under ``restricted`` as many
            as an empty machine needs where even the poorest are taken.
        texts: of each ask what is said where it is short, and of how many NUMA nodes; None where
            nothing is.
        together: what is said where each is free, but not together.
        never: what an empty machine has too little of.
        hopeless: that alone decides.
    """

    counted: tuple[bool, ...]
    width: int | None
    texts: tuple[tuple[str, str, int] | None, ...]
    together: Short
    never: Short | None
    hopeless: bool = False

    def too_few(self, asks: Iterable[Any]) -> bool:
        """Whether sums alone say that no set of NUMA nodes will do, as it does on a full node."""
        return self.hopeless or any(
            count and _most(free, self.width) < least
            for count, (least, free, _) in zip(self.counted, asks, strict=True)
        )

    def short(self, asks: Iterable[Any]) -> Short:
        """The first resource that is short by itself, else that none fit together."""
        if self.never is not None:
            return self.never
        for text, (least, free, _) in zip(self.texts, asks, strict=True):
            if text is not None and (most := _most(free, text[2])) < max(1, least):
                return Short(text[0], text[1], most)
        return self.together


@lru_cache(maxsize=1024)
def _needs(request: ContainerRequest, asked: tuple[tuple[int, Column], ...]) -> _Needs:
    """What is asked, and what there is; one for all nodes that are built alike."""
    single = request.policy is Policy.SINGLE_NUMA_NODE
    restricted = request.policy is Policy.RESTRICTED
    strict = restricted and request.on_failure is not OnFailure.WIDEN
    never, whats, limit = None, [], "one NUMA node"
    texts: list[tuple[str, str, int] | None] = []
    for (name, unit), (least, capacity) in zip(_units(request), asked, strict=True):
        texts.append(None)
        if unit == "millicpu" and not request.milli:
            continue
        what = _words(name, least, request.exclusive)
        whats.append(what)
        need, width = f"needs {what}", len(capacity)
        if single or restricted:
            # As many as an empty machine would need.
            width = 1 if single else _width(capacity, least)
        if width == 1 or width < len(capacity):
            limit = "one NUMA node" if width == 1 else nodes_text(width)
            need += f" on {limit}"
        texts[-1] = need, unit, width
        if never is None and (most := _most(capacity, width)) < max(1, least):
            never = Short(need, unit, most, never=True)
    widths = [_width(capacity, least, poorest=True) for least, capacity in asked if strict]
    together = " and ".join(whats) or "a place to run"
    found = _Needs(
        counted=tuple([strict or unit != "millicpu" for _, unit in _units(request)]),
        width=max(widths, default=None),
        texts=tuple(texts),
        together=Short(f"needs {together} on {limit}; each is free, but not together"),
        never=never,
    )
    empty = [(least, capacity, capacity) for least, capacity in asked]
    return replace(found, hopeless=never is not None and found.too_few(empty))


def _width(capacity: Column, least: int, *, poorest: bool = False) -> int:
    """How many NUMA nodes have enough when they are empty: the richest, or the poorest ones."""
    sums = accumulate(sorted([max(0, n) for n in capacity], reverse=not poorest))
    return next((n for n, have in enumerate(sums, 1) if have >= least), len(capacity))


def _units(request: ContainerRequest) -> list[tuple[str, str]]:
    """Name and unit of what it asks, as `_asks` lists it."""
    cpu = "cpus" if request.exclusive else "millicpu"
    units = [(name, "devices" if DEVICE in name else "bytes") for name, _ in request.amounts]
    return [(cpu, cpu), *units]


def _words(name: str, amount: int, exclusive: int) -> str:
    """What is asked for of one resource: ``12 exclusive CPUs``."""
    if name == "millicpu":
        return amount_text(amount, name)
    if DEVICE in name:
        return f"{amount} {name}"
    if name != "cpus":
        return f"{amount_text(amount, 'bytes')} of {name}"
    idle = f" with idle siblings ({amount} CPUs)" if amount != exclusive else ""
    return counted(exclusive, "exclusive CPU") + idle


def _most(column: Column, width: int | None) -> int:
    """The most that so many NUMA nodes have; None for all of them."""
    if width == 1:
        return max(0, *column)
    return sum([n for n in sorted(column, reverse=True)[:width] if n > 0])
