"""The Topology Manager's policies: from demands to one NUMA mask and a verdict.

================  =========================================  ======================================
policy            hints used                                 admits
================  =========================================  ======================================
best-effort       all                                        always
restricted        all                                        when the result is preferred
single-numa-node  preferred ones with one NUMA node or none  when the result is preferred; a result
                                                             of all NUMA nodes loses its mask
================  =========================================  ======================================

For machines of up to `nri_numa.engine.align.hints.EXACT_UPTO` NUMA nodes verdict, mask and
preferred flag are the kubelet's, given its tie-break (no ``rank``) and its widths (no
``one_width``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from math import comb
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.align.hints import (
    EXACT_UPTO,
    Amounts,
    DeviceDemand,
    Distances,
    Hint,
    HintDemand,
    Hints,
    Merge,
    Order,
    ResourceDemand,
    Steps,
    hints_of,
    result_class,
    together,
)
from nri_numa.model.cpuset import NUMASet, ids_of
from nri_numa.model.machine import counted, human_milli, numa_text
from nri_numa.model.workload import Policy
from nri_numa.text import human_bytes

SAMPLES = 4
"""Hints and losing candidates that are listed."""

# NUMA nodes spelled out in a sentence before it is cut.
_SPELLED_OUT = 8


class Problem(msgspec.Struct, frozen=True, dict=True):
    """What is merged, kept so that a result can be explained later.

    Attributes:
        prefer_closest: of equally wide masks the one with the least average distance is best, the
            kubelet's ``prefer-closest-numa-nodes``; not under single-numa-node.
        rank: what is best next, see `Order`: 0 the best, or without ranks as the kubelet.
        one_width: what the neediest resource needs on an empty machine is narrow enough for all;
            the kubelet wants each to need that many NUMA nodes.
    """

    demands: tuple[HintDemand, ...]
    numa_ids: NUMASet
    policy: Policy
    distance: Callable[[int, int], int]
    prefer_closest: bool = True
    rank: Mapping[int, int] | None = None
    one_width: bool = False

    def merge(self, distances: Distances | None = None) -> Merge:
        """The hints of each demand, with fresh steps to look for a mask.

        Who merges often for one machine hands in its distances.
        """
        single, steps = self.policy is Policy.SINGLE_NUMA_NODE, Steps()
        return Merge(
            lists=hints_of(
                self.demands, self.numa_ids, steps, one_width=self.one_width and not single
            ),
            machine=self.numa_ids.bits,
            order=Order(self.numa_ids, self.rank),
            distances=(
                distances or Distances(self.distance)
                if self.prefer_closest and not single
                else None
            ),
            single=single,
            steps=steps,
        )


class HintState(StrEnum):
    """What a resource answered."""

    NONE = "no wish"
    IMPOSSIBLE = "impossible"
    MASKS = "masks"


class NodeAmount(msgspec.Struct, frozen=True, rename="camel"):
    """What one NUMA node has of a resource."""

    numa_node: int
    free: int
    capacity: int
    enough: bool


class ResourceSummary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What one resource asked and which masks suit it; explanations say it as it is here.

    Attributes:
        preferred_width: NUMA nodes an empty machine would need; 0 without masks.
        narrowest_width: NUMA nodes needed now; 0 when no mask suits.
        narrowest_count: how many of the narrowest width; None on machines too large.
    """

    resource: str
    need: int = msgspec.field(name="needed")
    unit: str
    state: HintState = msgspec.field(name="wish")
    preferred_width: int = msgspec.field(default=0, name="idealNumaNodes")
    narrowest_width: int = msgspec.field(default=0, name="neededNumaNodes")
    hints: list[Hint] = msgspec.field(default_factory=list, name="sets")
    hint_count: int | None = msgspec.field(default=0, name="setCount")
    narrowest_count: int | None = 0
    every_set: bool = False
    numa_nodes: list[NodeAmount]
    text: str = ""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A mask that lost.

    Attributes:
        separated_by: what put the winner before it: ``preferred``, ``width``, ``distance``,
            ``rank`` or ``id``.
    """

    affinity: NUMASet = msgspec.field(name="numaNodes")
    preferred: bool
    separated_by: str
    text: str


def unit_of(demand: HintDemand) -> str:
    """The unit of a demand's quantities."""
    if demand.unit is not None:
        return demand.unit
    return "bytes" if demand.resource.startswith(("memory", "hugepages")) else ""


def amount_text(amount: int, unit: str, *, free: bool = False) -> str:
    """``1.5 GiB``, ``0.5 CPUs``, ``3``; what is free is rounded down."""
    if unit in ("millicpu", "cpus"):
        return human_milli(amount if unit == "millicpu" else 1000 * amount)
    return human_bytes(amount, free=free) if unit == "bytes" else str(amount)


def _free(amount: int, unit: str) -> str:
    """``1.5 GiB free``, ``2 CPUs free for exclusive use``: CPUs to share may be more."""
    use = " for exclusive use" if unit == "cpus" else ""
    return f"{amount_text(amount, unit, free=True)} free{use}"


def _number(amount: int, unit: str) -> str:
    """CPUs of a machine beside those that are needed."""
    return amount_text(amount, unit, free=True).removesuffix("s").removesuffix(" CPU")


def nodes_text(count: int) -> str:
    """``1 NUMA node``, ``2 NUMA nodes``."""
    return counted(count, "NUMA node")


def free_text(numa_nodes: Sequence[NodeAmount], unit: str) -> str:
    """``NUMA node 0: 2 of 8 CPUs free for exclusive use; NUMA node 1: …``."""
    parts = [
        f"NUMA node {n.numa_node}: {_number(n.free, unit)} of {_free(n.capacity, unit)}"
        for n in numa_nodes[:_SPELLED_OUT]
    ]
    rest = numa_nodes[_SPELLED_OUT:]
    if rest:
        parts.append(f"{len(rest)} more with at most {_free(max(n.free for n in rest), unit)}")
    return "; ".join(parts)


def _some_masks(hints: Hints, merge: Merge) -> tuple[list[int], int | None, int | None, bool]:
    """Some masks, narrowest first; how many, how many of the least width, and whether all are.

    One mask and no numbers on machines with too many to look at.
    """
    if len(merge.order.nodes) > EXACT_UPTO:
        mask = hints.cover().narrowest(merge.order, None, merge.steps)
        return [] if mask is None else [mask], None, None, _poorest_do(hints, mask or 0)
    found = hints.cover().every()
    found.sort(key=int.bit_count)
    least, widest = found[0].bit_count(), found[:SAMPLES][-1].bit_count()
    narrowest = sum(1 for m in found if m.bit_count() == least)
    every = narrowest == comb(hints.universe.bit_count(), least) > 1
    some = [m for m in found if m.bit_count() <= widest]
    # Order: width, then the tie-break.
    some.sort(key=lambda m: (m.bit_count(), merge.order.key(m)))
    return some[:SAMPLES], len(found), narrowest, every


def _poorest_do(hints: Hints, mask: int) -> bool:
    """Whether even the poorest NUMA nodes, as many as the mask has, would do."""
    width = mask.bit_count()
    poorest = [sorted(q.amounts.get(i, 0) for i in ids_of(hints.universe)) for q in hints.free]
    return (
        hints.groups is None
        and not hints.required
        and mask != hints.universe
        and all(q.parts is None for q in hints.free)
        and all(sum(p[:width]) >= q.need for p, q in zip(poorest, hints.free, strict=True))
    )


_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def sets_text(sets: Sequence[str], every: bool, count: int | None) -> str:
    """``any two of them``, ``NUMA nodes 0-1 or 0,2``, ``… or 20 other sets``."""
    if not sets:
        return "other NUMA nodes"
    width = len(NUMASet.parse(sets[0]))
    if every:
        return f"any {_NUMBERS[width] if width < len(_NUMBERS) else width} of them"
    same = [s for s in sets if len(NUMASet.parse(s)) == width]
    more = (count or 0) - len(same)
    others = f" or {counted(more, 'other set')}" if more > 0 else ""
    many = "s" if width > 1 or len(same) > 1 else ""
    return f"NUMA node{many} {' or '.join(same)}{others}"


def _summary_text(summary: ResourceSummary, demand: HintDemand) -> str:
    what = summary.resource
    need = amount_text(demand.need, summary.unit)
    if summary.state is HintState.NONE:
        if demand.need <= 0:
            return f"{what}: {need} asked for, so any place suits"
        if isinstance(demand, DeviceDemand):
            return f"{what}: {need} needed, of devices that belong to no NUMA node"
        return f"{what}: {need} needed, which no mask has; left to the allocation to refuse"
    free = free_text(summary.numa_nodes, summary.unit)
    if summary.state is HintState.IMPOSSIBLE:
        return f"{what}: {need} needed, {lacking(summary, demand)} ({free})"
    now = nodes_text(summary.narrowest_width)
    if summary.narrowest_width == summary.preferred_width:
        return f"{what}: {need} needed, fits on {now} ({free})"
    return (
        f"{what}: {need} needed, on an empty machine {nodes_text(summary.preferred_width)} would "
        f"do, now it takes {now} ({free})"
    )


def lacking(summary: ResourceSummary, demand: HintDemand) -> str:
    """Why no mask suits, as the end of a clause."""
    unit = summary.unit
    capacity = sum(n.capacity for n in summary.numa_nodes)
    free = sum(n.free for n in summary.numa_nodes)
    if isinstance(demand, DeviceDemand):
        return demand.obstacle()
    if capacity < demand.need:
        if demand.resource == "cpu":
            return f"this machine has {_number(capacity, unit)} for containers"
        return f"all NUMA nodes that may serve it have {amount_text(capacity, unit, free=True)}"
    if free < demand.need:
        return f"{_free(free, unit)} on all NUMA nodes together"
    return f"{_free(free, unit)}, but {demand.obstacle()}"


def _candidate(mask: int, preferred: bool, why: tuple[str, str]) -> Candidate:
    affinity = NUMASet.from_bits(mask)
    return Candidate(affinity=affinity, preferred=preferred, separated_by=why[0], text=why[1])


def _behind(winner: int, loser: int, neediest: int, merge: Merge) -> tuple[str, str]:
    """What separates two masks of which both, or neither, are preferred."""
    wide, narrow, distances = loser.bit_count(), winner.bit_count(), merge.distances
    if wide != narrow:
        if wide < neediest:
            needs = f"the {nodes_text(neediest)} that the neediest resource takes"
            return "width", f"it is narrower than {needs}"
        return "width", f"it takes {nodes_text(wide)} instead of {narrow}"
    if distances is not None and distances.total(winner) != distances.total(loser):
        far, near = (distances.total(mask) / wide**2 for mask in (loser, winner))
        average = f"average distance {far:g} instead of {near:g}"
        return "distance", f"its NUMA nodes are farther apart: {average}"
    if merge.order.by_value:
        return "id", "its NUMA nodes have higher numbers"
    return "rank", "the strategy ranks it lower"


DIFFERENT_WIDTHS: Final = "different numbers of NUMA nodes needed"
"""In the clause when no mask can be preferred by all, on an empty machine either."""


class Shortage(msgspec.Struct, frozen=True):
    """Why not.

    Attributes:
        widths: no state of the machine would help, see `DIFFERENT_WIDTHS`.
    """

    text: str
    detail: str = ""
    widths: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def short(resource: str, need: str, have: str) -> str:
    """The first clause of a refusal: ``memory: 4 GiB needed, 3 GiB free on NUMA node 0``."""
    return f"{resource}: {need} needed, {have}"


def short_of_bytes(resource: str, need: int, have: int, where: str) -> str:
    """The same of memory or huge pages; ``where`` goes on after ``3 GiB free``."""
    return short(resource, human_bytes(need), f"{human_bytes(have, free=True)} free{where}")


_Entry = tuple[ResourceSummary, Hints, HintDemand]


def _severity(summary: ResourceSummary, demand: HintDemand) -> int:
    if not isinstance(demand, ResourceDemand):
        return 2
    if sum(n.capacity for n in summary.numa_nodes) < demand.need:
        return 0
    return 1 if sum(n.free for n in summary.numa_nodes) < demand.need else 3


def _wider(group: Sequence[_Entry], problem: Problem, order: Order, width: int) -> Shortage:
    """One list of hints is nowhere as narrow as it should be: whose fault that is."""
    for summary, _, demand in group:
        if not isinstance(demand, ResourceDemand):
            continue
        free = _most(demand, demand.available, problem.numa_ids, width)
        if free >= demand.need:
            continue
        text = _excess(summary, demand, problem, width)
        text = text or f"at most {_free(free, summary.unit)} on {_numa_nodes(width)}"
        if problem.policy is not Policy.SINGLE_NUMA_NODE:
            would = nodes_text(summary.preferred_width)
            now = summary.narrowest_width
            text += f": on an empty machine {would} would do, now it takes {now}"
        return _alone(summary, text)
    if len(group) > 1:
        return _apart(group, problem, order)
    summary = group[0][0]
    if problem.policy is not Policy.SINGLE_NUMA_NODE:
        return Shortage(summary.text)
    most = max((n.free for n in summary.numa_nodes), default=0)
    # There is enough of it, as was entries at above: groups of NUMA nodes keep it from there.
    have = f"at most {_free(most, summary.unit)} on one NUMA node"
    return _alone(summary, f"{have}, which is tied to others by the kubelet's rules")


def _excess(summary: ResourceSummary, demand: HintDemand, problem: Problem, width: int) -> str:
    """That no ``width`` NUMA nodes have that much, however empty; else empty.

    Where the whole machine has not, `lacking` says so.
    """
    if not isinstance(demand, ResourceDemand):
        return ""
    capacity = _most(demand, demand.capacity, problem.numa_ids, width)
    if capacity >= demand.need or sum(n.capacity for n in summary.numa_nodes) < demand.need:
        return ""
    have = amount_text(capacity, summary.unit, free=True)
    return f"more than the {have} of any {_numa_nodes(width)}"


def _numa_nodes(width: int) -> str:
    return "one NUMA node" if width == 1 else f"{width} NUMA nodes"


def _most(demand: ResourceDemand, amounts: Amounts, numa_ids: NUMASet, width: int) -> int:
    """What the richest ``width`` NUMA nodes have."""
    found = together(demand.near, amounts)
    return sum(sorted((max(0, found.get(i, 0)) for i in numa_ids), reverse=True)[:width])


def _apart(entries: Sequence[_Entry], problem: Problem, order: Order) -> Shortage:
    """Each has a place, and they have none in common."""
    names = " and ".join(s.resource for s, _, _ in entries)
    lists = [id(f) for _, f, _ in entries]
    each = ", ".join(
        f"{_amount(s)} on "
        + (
            _by_itself(d, problem.numa_ids)
            if isinstance(d, ResourceDemand) and lists.count(id(f)) > 1
            else _where(s, f, problem, order)
        )
        for s, f, d in entries
    )
    return Shortage(f"{names}: each fits, but not on the same NUMA nodes: {each}")


def _by_itself(demand: ResourceDemand, numa_ids: NUMASet) -> str:
    """Where a resource fits that is judged together with others."""
    free = together(demand.near, demand.available)
    alone = NUMASet(i for i in numa_ids if free.get(i, 0) >= demand.need)
    if alone:
        return numa_text(alone)
    widths = range(2, len(numa_ids))
    enough = (w for w in widths if _most(demand, demand.available, numa_ids, w) >= demand.need)
    return nodes_text(next(enough, len(numa_ids)))


def _where(summary: ResourceSummary, hints: Hints, problem: Problem, order: Order) -> str:
    """Where one resource could go by itself."""
    if hints.width == 1 or problem.policy is Policy.SINGLE_NUMA_NODE:
        return numa_text(NUMASet(i for i in order.nodes if hints.prefers(1 << i)))
    preferred = [h.affinity for h in summary.hints if h.preferred]
    return sets_text([str(a) for a in preferred], summary.every_set, summary.narrowest_count)


def _amount(summary: ResourceSummary) -> str:
    text = _needed(summary.need, summary.unit)
    return text if summary.unit else f"{text} {summary.resource}"


def _needed(need: int, unit: str) -> str:
    """A need; only exclusive CPUs are counted as whole ones."""
    return counted(need, "exclusive CPU") if unit == "cpus" else amount_text(need, unit)


def _alone(summary: ResourceSummary, have: str) -> Shortage:
    need = _needed(summary.need, summary.unit)
    return Shortage(
        short(summary.resource, need, have), free_text(summary.numa_nodes, summary.unit)
    )


class Alignment(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The outcome of a merge under a policy.

    Attributes:
        affinity: NUMA nodes its resources should come from; None for no restriction. Filled for
            refusals of ``restricted`` too: it is where best-effort would have put the container.
        preferred: no wider than an empty machine would have required: for every resource, or with
            ``one_width`` for the neediest one.
        exact: False when a search on a large machine stopped early and this is the best it found.
        problem: the inputs. What explains the outcome is worked out from them when asked for, so
            a decision costs nothing for explanations that are not read.
    """

    admitted: bool
    affinity: NUMASet | None
    preferred: bool
    exact: bool
    steps: int
    problem: Problem

    @cached_property
    def reason(self) -> str:
        """Why it came out so, in one sentence without a full stop."""
        affinity = self.affinity
        if not self.preferred:
            text = str(self.shortage)
        elif affinity is None or affinity == self.problem.numa_ids:
            text = "every NUMA node suits"
        else:
            text = f"{numa_text(affinity, 'suits', 'suit')} every resource"
        if self.exact:
            return text
        return f"{text} (the best found in {self.steps} steps; a better one may exist)"

    @cached_property
    def shortage(self) -> Shortage:
        """Which resource, or which several, kept it from being a preferred one."""
        problem = self.problem
        merge = problem.merge()
        entries = list(zip(self.resources, merge.lists, problem.demands, strict=True))
        impossible = [one for one in entries if one[0].state is HintState.IMPOSSIBLE]
        if impossible:
            # What the machine lacks comes before what is not free, and that before what is both but
            # not together; then in the order of the demands.
            summary, _, demand = min(impossible, key=lambda one: _severity(one[0], one[2]))
            excess = _excess(summary, demand, problem, 1) if merge.single else ""
            return _alone(summary, excess or lacking(summary, demand))
        hinting = [one for one in entries if one[0].state is HintState.MASKS]
        order = merge.order
        for _, hints, _ in hinting:
            if replace(merge, lists=[hints], distances=None).preferred() is None:
                width = 1 if merge.single else hints.width
                return _wider([one for one in hinting if one[1] is hints], problem, order, width)
        widths = {s.preferred_width for s, _, _ in hinting}
        if not merge.single and len(widths) > 1:
            each = ", ".join(
                f"{_amount(s)} on {nodes_text(s.preferred_width)}" for s, _, _ in hinting
            )
            names = " and ".join(s.resource for s, _, _ in hinting)
            return Shortage(f"{names}: {DIFFERENT_WIDTHS}: {each}", widths=True)
        return _apart(hinting, problem, order)

    @cached_property
    def resources(self) -> tuple[ResourceSummary, ...]:
        """What each resource asked and which NUMA masks suit it, in the order of the demands."""
        problem = self.problem
        merge = problem.merge()
        found: list[ResourceSummary] = []
        for demand, hints in zip(problem.demands, merge.lists, strict=True):
            summary = ResourceSummary(
                resource=demand.resource,
                need=demand.need,
                unit=unit_of(demand),
                state=HintState.NONE if hints.nil else HintState.IMPOSSIBLE,
                numa_nodes=[
                    NodeAmount(i, free, capacity, free >= demand.need)
                    for i, free, capacity in demand.amounts(problem.numa_ids)
                ],
            )
            if hints.nil is None:
                masks, count, narrowest, every = _some_masks(hints, merge)
                summary = replace(
                    summary,
                    state=HintState.MASKS,
                    preferred_width=hints.width,
                    narrowest_width=masks[0].bit_count() if masks else 0,
                    hints=[Hint(NUMASet.from_bits(m), hints.prefers(m)) for m in masks],
                    hint_count=count,
                    narrowest_count=narrowest,
                    every_set=every,
                )
            found.append(replace(summary, text=_summary_text(summary, demand)))
        return tuple(found)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best masks that lost, best first, and what separated each from the winner.

        On machines too large to look at all masks only preferred results are listed.
        """
        problem, preferred = self.problem, self.preferred
        merge = problem.merge()
        winner = problem.numa_ids.bits if self.affinity is None else self.affinity.bits
        order, distances = merge.order, merge.distances
        found: list[Candidate] = []
        seen = {winner}
        while preferred and len(found) < SAMPLES:
            mask = merge.preferred(frozenset(seen))
            if mask is None:
                break
            seen.add(mask)
            found.append(_candidate(mask, True, _behind(winner, mask, 0, merge)))
        if (
            len(found) < SAMPLES
            and len(problem.numa_ids) <= EXACT_UPTO
            and not merge.single
            and any(f.nil is None for f in merge.lists)
        ):
            masks, neediest = merge.reachable()
            # Order: as the merge compares results that are not preferred.
            rest = sorted(
                (m for m in masks if m not in seen),
                key=lambda m: (
                    result_class(m.bit_count(), neediest),
                    0 if distances is None else distances.total(m),
                    order.key(m),
                ),
            )
            wide = "it is wider than an empty machine would need, or resources would differ on it"
            for mask in rest[: SAMPLES - len(found)]:
                why = ("preferred", wide) if preferred else _behind(winner, mask, neediest, merge)
                found.append(_candidate(mask, False, why))
        return tuple(found)


def align(problem: Problem, distances: Distances | None = None) -> Alignment:
    """Merge what the demands prefer and judge it by the policy.

    The result does not depend on the order of the demands.
    """
    merge = problem.merge(distances)
    mask, preferred = merge.best()
    return Alignment(
        admitted=preferred or problem.policy is Policy.BEST_EFFORT,
        affinity=None if merge.single and mask == merge.machine else NUMASet.from_bits(mask),
        preferred=preferred,
        exact=merge.steps.exact,
        steps=merge.steps.used,
        problem=problem,
    )
