"""The Topology Manager's policies: from demands to one NUMA mask and a verdict.

================  =========================================  ======================================
policy            hints used                                 admits
================  =========================================  ======================================
best-effort       all                                        always
restricted        all                                        when the result is preferred
single-numa-node  preferred ones with one NUMA node or none  when the result is preferred; a result
                                                             of all NUMA nodes loses its mask
================  =========================================  ======================================

For machines of up to `nri_numa.engine.align.hints.EXACT_MERGE_MAX_NODES` NUMA nodes verdict, mask
and preferred flag are the kubelet's, given its tie-break (no ``rank``) and its widths (no
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
    EXACT_MERGE_MAX_NODES,
    AmountsByNode,
    DeviceDemand,
    DistanceSums,
    Hint,
    HintDemand,
    HintMerge,
    Hints,
    MaskOrder,
    ResourceDemand,
    SearchBudget,
    compute_hints,
    sum_by_cpu_node,
    unpreferred_rank,
)
from nri_numa.model.cpuset import NUMASet, ids_of
from nri_numa.model.machine import count_text, human_milli, numa_text
from nri_numa.model.workload import Policy
from nri_numa.text import human_bytes

MAX_SAMPLE_MASKS = 4
"""Hints and losing candidates that are listed."""

# NUMA nodes spelled out in a sentence before it is cut.
_MAX_LISTED_NUMA_NODES = 8


class AlignmentRequest(msgspec.Struct, frozen=True, dict=True):
    """What is merged, kept so that a result can be explained later.

    Attributes:
        prefer_closest: of equally wide masks the one with the least average distance is best, the
            kubelet's ``prefer-closest-numa-nodes``; not under single-numa-node.
        rank: what is best next, see `MaskOrder`: 0 the best, or without ranks as the kubelet.
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

    def build_merge(self, distances: DistanceSums | None = None) -> HintMerge:
        """The hints of each demand, with fresh steps to look for a mask.

        Who merges often for one machine hands in its distances.
        """
        single, steps = self.policy is Policy.SINGLE_NUMA_NODE, SearchBudget()
        return HintMerge(
            hint_lists=compute_hints(
                self.demands, self.numa_ids, steps, one_width=self.one_width and not single
            ),
            all_nodes_mask=self.numa_ids.bits,
            order=MaskOrder(self.numa_ids, self.rank),
            distances=(
                distances or DistanceSums(self.distance)
                if self.prefer_closest and not single
                else None
            ),
            single=single,
            budget=steps,
        )


class HintState(StrEnum):
    """What a resource answered."""

    NO_HINT = "no wish"
    IMPOSSIBLE = "impossible"
    MASKS = "masks"


class NodeAmount(msgspec.Struct, frozen=True, rename="camel"):
    """What one NUMA node has of a resource."""

    numa_node: int
    free: int
    capacity: int
    is_sufficient: bool = msgspec.field(name="enough")


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
    all_sets_fit: bool = msgspec.field(default=False, name="everySet")
    numa_nodes: list[NodeAmount]
    text: str = ""


class RejectedMask(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
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


def _free_amount_text(amount: int, unit: str) -> str:
    """``1.5 GiB free``, ``2 CPUs free for exclusive use``: CPUs to share may be more."""
    use = " for exclusive use" if unit == "cpus" else ""
    return f"{amount_text(amount, unit, free=True)} free{use}"


def _capacity_text(amount: int, unit: str) -> str:
    """CPUs of a machine beside those that are needed."""
    return amount_text(amount, unit, free=True).removesuffix("s").removesuffix(" CPU")


def numa_node_count_text(count: int) -> str:
    """``1 NUMA node``, ``2 NUMA nodes``."""
    return count_text(count, "NUMA node")


def free_by_node_text(numa_nodes: Sequence[NodeAmount], unit: str) -> str:
    """``NUMA node 0: 2 of 8 CPUs free for exclusive use; NUMA node 1: …``."""
    parts = [
        f"NUMA node {n.numa_node}: {_capacity_text(n.free, unit)} of "
        f"{_free_amount_text(n.capacity, unit)}"
        for n in numa_nodes[:_MAX_LISTED_NUMA_NODES]
    ]
    rest = numa_nodes[_MAX_LISTED_NUMA_NODES:]
    if rest:
        parts.append(
            f"{len(rest)} more with at most {_free_amount_text(max(n.free for n in rest), unit)}"
        )
    return "; ".join(parts)


def _sample_masks(hints: Hints, merge: HintMerge) -> tuple[list[int], int | None, int | None, bool]:
    """Some masks, narrowest first; how many, how many of the least width, and whether all are.

    One mask and no numbers on machines with too many to look at.
    """
    if len(merge.order.nodes) > EXACT_MERGE_MAX_NODES:
        mask = hints.mask_requirement().narrowest_mask(merge.order, None, merge.budget)
        return [] if mask is None else [mask], None, None, _any_nodes_suffice(hints, mask or 0)
    found = hints.mask_requirement().satisfying_masks()
    found.sort(key=int.bit_count)
    least, widest = found[0].bit_count(), found[:MAX_SAMPLE_MASKS][-1].bit_count()
    narrowest = sum(1 for m in found if m.bit_count() == least)
    every = narrowest == comb(hints.universe.bit_count(), least) > 1
    some = [m for m in found if m.bit_count() <= widest]
    # Order: width, then the tie-break.
    some.sort(key=lambda m: (m.bit_count(), merge.order.sort_key(m)))
    return some[:MAX_SAMPLE_MASKS], len(found), narrowest, every


def _any_nodes_suffice(hints: Hints, mask: int) -> bool:
    """Whether even the poorest NUMA nodes, as many as the mask has, would do."""
    width = mask.bit_count()
    poorest = [
        sorted(q.amounts.get(i, 0) for i in ids_of(hints.universe)) for q in hints.quantities
    ]
    return (
        hints.groups is None
        and not hints.required
        and mask != hints.universe
        and all(q.parts is None for q in hints.quantities)
        and all(sum(p[:width]) >= q.need for p, q in zip(poorest, hints.quantities, strict=True))
    )


_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def numa_node_sets_text(sets: Sequence[str], every: bool, count: int | None) -> str:
    """``any two of them``, ``NUMA nodes 0-1 or 0,2``, ``… or 20 other sets``."""
    if not sets:
        return "other NUMA nodes"
    width = len(NUMASet.parse(sets[0]))
    if every:
        return f"any {_NUMBER_WORDS[width] if width < len(_NUMBER_WORDS) else width} of them"
    same = [s for s in sets if len(NUMASet.parse(s)) == width]
    more = (count or 0) - len(same)
    others = f" or {count_text(more, 'other set')}" if more > 0 else ""
    many = "s" if width > 1 or len(same) > 1 else ""
    return f"NUMA node{many} {' or '.join(same)}{others}"


def _summary_text(summary: ResourceSummary, demand: HintDemand) -> str:
    what = summary.resource
    need = amount_text(demand.need, summary.unit)
    if summary.state is HintState.NO_HINT:
        if demand.need <= 0:
            return f"{what}: {need} asked for, so any place suits"
        if isinstance(demand, DeviceDemand):
            return f"{what}: {need} needed, of devices that belong to no NUMA node"
        return f"{what}: {need} needed, which no mask has; left to the allocation to refuse"
    free = free_by_node_text(summary.numa_nodes, summary.unit)
    if summary.state is HintState.IMPOSSIBLE:
        return f"{what}: {need} needed, {shortage_text(summary, demand)} ({free})"
    now = numa_node_count_text(summary.narrowest_width)
    if summary.narrowest_width == summary.preferred_width:
        return f"{what}: {need} needed, fits on {now} ({free})"
    return (
        f"{what}: {need} needed, on an empty machine "
        f"{numa_node_count_text(summary.preferred_width)} would "
        f"do, now it takes {now} ({free})"
    )


def shortage_text(summary: ResourceSummary, demand: HintDemand) -> str:
    """Why no mask suits, as the end of a clause."""
    unit = summary.unit
    capacity = sum(n.capacity for n in summary.numa_nodes)
    free = sum(n.free for n in summary.numa_nodes)
    if isinstance(demand, DeviceDemand):
        return demand.shortage_clause()
    if capacity < demand.need:
        if demand.resource == "cpu":
            return f"this machine has {_capacity_text(capacity, unit)} for containers"
        return f"all NUMA nodes that may serve it have {amount_text(capacity, unit, free=True)}"
    if free < demand.need:
        return f"{_free_amount_text(free, unit)} on all NUMA nodes together"
    return f"{_free_amount_text(free, unit)}, but {demand.shortage_clause()}"


def _rejected_mask(mask: int, preferred: bool, why: tuple[str, str]) -> RejectedMask:
    affinity = NUMASet.from_bits(mask)
    return RejectedMask(affinity=affinity, preferred=preferred, separated_by=why[0], text=why[1])


def _explain_ranking(winner: int, loser: int, neediest: int, merge: HintMerge) -> tuple[str, str]:
    """What separates two masks of which both, or neither, are preferred."""
    wide, narrow, distances = loser.bit_count(), winner.bit_count(), merge.distances
    if wide != narrow:
        if wide < neediest:
            needs = f"the {numa_node_count_text(neediest)} that the neediest resource takes"
            return "width", f"it is narrower than {needs}"
        return "width", f"it takes {numa_node_count_text(wide)} instead of {narrow}"
    if distances is not None and distances.total_distance(winner) != distances.total_distance(
        loser
    ):
        far, near = (distances.total_distance(mask) / wide**2 for mask in (loser, winner))
        average = f"average distance {far:g} instead of {near:g}"
        return "distance", f"its NUMA nodes are farther apart: {average}"
    if merge.order.by_value:
        return "id", "its NUMA nodes have higher numbers"
    return "rank", "the strategy ranks it lower"


DIFFERENT_WIDTHS_TEXT: Final = "different numbers of NUMA nodes needed"
"""In the clause when no mask can be preferred by all, on an empty machine either."""


class Shortage(msgspec.Struct, frozen=True):
    """Why not.

    Attributes:
        width_conflict: no state of the machine would help, see `DIFFERENT_WIDTHS_TEXT`.
    """

    text: str
    detail: str = ""
    width_conflict: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def shortage_clause(resource: str, need: str, have: str) -> str:
    """The first clause of a refusal: ``memory: 4 GiB needed, 3 GiB free on NUMA node 0``."""
    return f"{resource}: {need} needed, {have}"


def byte_shortage_clause(resource: str, need: int, have: int, where: str) -> str:
    """The same of memory or huge pages; ``where`` goes on after ``3 GiB free``."""
    return shortage_clause(
        resource, human_bytes(need), f"{human_bytes(have, free=True)} free{where}"
    )


_ResourceEntry = tuple[ResourceSummary, Hints, HintDemand]


def _shortage_severity(summary: ResourceSummary, demand: HintDemand) -> int:
    if not isinstance(demand, ResourceDemand):
        return 2
    if sum(n.capacity for n in summary.numa_nodes) < demand.need:
        return 0
    return 1 if sum(n.free for n in summary.numa_nodes) < demand.need else 3


def _find_narrowing_shortage(
    group: Sequence[_ResourceEntry], problem: AlignmentRequest, order: MaskOrder, width: int
) -> Shortage:
    """One list of hints is nowhere as narrow as it should be: whose fault that is."""
    for summary, _, demand in group:
        if not isinstance(demand, ResourceDemand):
            continue
        free = _max_amount_on(demand, demand.free_amounts, problem.numa_ids, width)
        if free >= demand.need:
            continue
        text = _over_capacity_text(summary, demand, problem, width)
        text = (
            text
            or f"at most {_free_amount_text(free, summary.unit)} on {_numa_node_width_text(width)}"
        )
        if problem.policy is not Policy.SINGLE_NUMA_NODE:
            would = numa_node_count_text(summary.preferred_width)
            now = summary.narrowest_width
            text += f": on an empty machine {would} would do, now it takes {now}"
        return _single_shortage(summary, text)
    if len(group) > 1:
        return _no_common_nodes_shortage(group, problem, order)
    summary = group[0][0]
    if problem.policy is not Policy.SINGLE_NUMA_NODE:
        return Shortage(summary.text)
    most = max((n.free for n in summary.numa_nodes), default=0)
    # There is enough of it, as was entries at above: groups of NUMA nodes keep it from there.
    have = f"at most {_free_amount_text(most, summary.unit)} on one NUMA node"
    return _single_shortage(summary, f"{have}, which is tied to others by the kubelet's rules")


def _over_capacity_text(
    summary: ResourceSummary, demand: HintDemand, problem: AlignmentRequest, width: int
) -> str:
    """That no ``width`` NUMA nodes have that much, however empty; else empty.

    Where the whole machine has not, `shortage_text` says so.
    """
    if not isinstance(demand, ResourceDemand):
        return ""
    capacity = _max_amount_on(demand, demand.capacity, problem.numa_ids, width)
    if capacity >= demand.need or sum(n.capacity for n in summary.numa_nodes) < demand.need:
        return ""
    have = amount_text(capacity, summary.unit, free=True)
    return f"more than the {have} of any {_numa_node_width_text(width)}"


def _numa_node_width_text(width: int) -> str:
    return "one NUMA node" if width == 1 else f"{width} NUMA nodes"


def _max_amount_on(
    demand: ResourceDemand, amounts: AmountsByNode, numa_ids: NUMASet, width: int
) -> int:
    """What the richest ``width`` NUMA nodes have."""
    found = sum_by_cpu_node(demand.attached, amounts)
    return sum(sorted((max(0, found.get(i, 0)) for i in numa_ids), reverse=True)[:width])


def _no_common_nodes_shortage(
    entries: Sequence[_ResourceEntry], problem: AlignmentRequest, order: MaskOrder
) -> Shortage:
    """Each has a place, and they have none in common."""
    names = " and ".join(s.resource for s, _, _ in entries)
    lists = [id(f) for _, f, _ in entries]
    each = ", ".join(
        f"{_need_text(s)} on "
        + (
            _resource_nodes_text(d, problem.numa_ids)
            if isinstance(d, ResourceDemand) and lists.count(id(f)) > 1
            else _preferred_nodes_text(s, f, problem, order)
        )
        for s, f, d in entries
    )
    return Shortage(f"{names}: each fits, but not on the same NUMA nodes: {each}")


def _resource_nodes_text(demand: ResourceDemand, numa_ids: NUMASet) -> str:
    """Where a resource fits that is judged together with others."""
    free = sum_by_cpu_node(demand.attached, demand.free_amounts)
    alone = NUMASet(i for i in numa_ids if free.get(i, 0) >= demand.need)
    if alone:
        return numa_text(alone)
    widths = range(2, len(numa_ids))
    enough = (
        w for w in widths if _max_amount_on(demand, demand.free_amounts, numa_ids, w) >= demand.need
    )
    return numa_node_count_text(next(enough, len(numa_ids)))


def _preferred_nodes_text(
    summary: ResourceSummary, hints: Hints, problem: AlignmentRequest, order: MaskOrder
) -> str:
    """Where one resource could go by itself."""
    if hints.width == 1 or problem.policy is Policy.SINGLE_NUMA_NODE:
        return numa_text(NUMASet(i for i in order.nodes if hints.prefers_mask(1 << i)))
    preferred = [h.affinity for h in summary.hints if h.preferred]
    return numa_node_sets_text(
        [str(a) for a in preferred], summary.all_sets_fit, summary.narrowest_count
    )


def _need_text(summary: ResourceSummary) -> str:
    text = _quantity_text(summary.need, summary.unit)
    return text if summary.unit else f"{text} {summary.resource}"


def _quantity_text(need: int, unit: str) -> str:
    """A need; only exclusive CPUs are counted as whole ones."""
    return count_text(need, "exclusive CPU") if unit == "cpus" else amount_text(need, unit)


def _single_shortage(summary: ResourceSummary, have: str) -> Shortage:
    need = _quantity_text(summary.need, summary.unit)
    return Shortage(
        shortage_clause(summary.resource, need, have),
        free_by_node_text(summary.numa_nodes, summary.unit),
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
    search_steps: int = msgspec.field(name="steps")
    problem: AlignmentRequest

    @cached_property
    def reason_text(self) -> str:
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
        return f"{text} (the best found in {self.search_steps} steps; a better one may exist)"

    @cached_property
    def shortage(self) -> Shortage:
        """Which resource, or which several, kept it from being a preferred one."""
        problem = self.problem
        merge = problem.build_merge()
        entries = list(zip(self.resource_summaries, merge.hint_lists, problem.demands, strict=True))
        impossible = [one for one in entries if one[0].state is HintState.IMPOSSIBLE]
        if impossible:
            # What the machine lacks comes before what is not free, and that before what is both but
            # not together; then in the order of the demands.
            summary, _, demand = min(impossible, key=lambda one: _shortage_severity(one[0], one[2]))
            excess = _over_capacity_text(summary, demand, problem, 1) if merge.single else ""
            return _single_shortage(summary, excess or shortage_text(summary, demand))
        hinting = [one for one in entries if one[0].state is HintState.MASKS]
        order = merge.order
        for _, hints, _ in hinting:
            if replace(merge, hint_lists=[hints], distances=None).preferred_mask() is None:
                width = 1 if merge.single else hints.width
                return _find_narrowing_shortage(
                    [one for one in hinting if one[1] is hints], problem, order, width
                )
        widths = {s.preferred_width for s, _, _ in hinting}
        if not merge.single and len(widths) > 1:
            each = ", ".join(
                f"{_need_text(s)} on {numa_node_count_text(s.preferred_width)}"
                for s, _, _ in hinting
            )
            names = " and ".join(s.resource for s, _, _ in hinting)
            return Shortage(f"{names}: {DIFFERENT_WIDTHS_TEXT}: {each}", width_conflict=True)
        return _no_common_nodes_shortage(hinting, problem, order)

    @cached_property
    def resource_summaries(self) -> tuple[ResourceSummary, ...]:
        """What each resource asked and which NUMA masks suit it, in the order of the demands."""
        problem = self.problem
        merge = problem.build_merge()
        found: list[ResourceSummary] = []
        for demand, hints in zip(problem.demands, merge.hint_lists, strict=True):
            summary = ResourceSummary(
                resource=demand.resource,
                need=demand.need,
                unit=unit_of(demand),
                state=HintState.NO_HINT if hints.nil else HintState.IMPOSSIBLE,
                numa_nodes=[
                    NodeAmount(i, free, capacity, free >= demand.need)
                    for i, free, capacity in demand.free_and_capacity(problem.numa_ids)
                ],
            )
            if hints.nil is None:
                masks, count, narrowest, every = _sample_masks(hints, merge)
                summary = replace(
                    summary,
                    state=HintState.MASKS,
                    preferred_width=hints.width,
                    narrowest_width=masks[0].bit_count() if masks else 0,
                    hints=[Hint(NUMASet.from_bits(m), hints.prefers_mask(m)) for m in masks],
                    hint_count=count,
                    narrowest_count=narrowest,
                    all_sets_fit=every,
                )
            found.append(replace(summary, text=_summary_text(summary, demand)))
        return tuple(found)

    @cached_property
    def rejected_masks(self) -> tuple[RejectedMask, ...]:
        """The best masks that lost, best first, and what separated each from the winner.

        On machines too large to look at all masks only preferred results are listed.
        """
        problem, preferred = self.problem, self.preferred
        merge = problem.build_merge()
        winner = problem.numa_ids.bits if self.affinity is None else self.affinity.bits
        order, distances = merge.order, merge.distances
        found: list[RejectedMask] = []
        seen = {winner}
        while preferred and len(found) < MAX_SAMPLE_MASKS:
            mask = merge.preferred_mask(frozenset(seen))
            if mask is None:
                break
            seen.add(mask)
            found.append(_rejected_mask(mask, True, _explain_ranking(winner, mask, 0, merge)))
        if (
            len(found) < MAX_SAMPLE_MASKS
            and len(problem.numa_ids) <= EXACT_MERGE_MAX_NODES
            and not merge.single
            and any(f.nil is None for f in merge.hint_lists)
        ):
            masks, neediest = merge.reachable_masks()
            # Order: as the merge compares results that are not preferred.
            rest = sorted(
                (m for m in masks if m not in seen),
                key=lambda m: (
                    unpreferred_rank(m.bit_count(), neediest),
                    0 if distances is None else distances.total_distance(m),
                    order.sort_key(m),
                ),
            )
            wide = "it is wider than an empty machine would need, or resources would differ on it"
            for mask in rest[: MAX_SAMPLE_MASKS - len(found)]:
                why = (
                    ("preferred", wide)
                    if preferred
                    else _explain_ranking(winner, mask, neediest, merge)
                )
                found.append(_rejected_mask(mask, False, why))
        return tuple(found)


def align_demands(problem: AlignmentRequest, distances: DistanceSums | None = None) -> Alignment:
    """Merge what the demands prefer and judge it by the policy.

    The result does not depend on the order of the demands.
    """
    merge = problem.build_merge(distances)
    mask, preferred = merge.best_affinity()
    return Alignment(
        admitted=preferred or problem.policy is Policy.BEST_EFFORT,
        affinity=None if merge.single and mask == merge.all_nodes_mask else NUMASet.from_bits(mask),
        preferred=preferred,
        exact=merge.budget.exact,
        search_steps=merge.budget.used,
        problem=problem,
    )
