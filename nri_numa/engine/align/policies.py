"""The Topology Manager's policies: from hint providers to one NUMA mask and a verdict.

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
    DeviceDemand,
    DistanceSums,
    Hint,
    HintMerge,
    HintProvider,
    Hints,
    MaskOrder,
    NodeAmount,
    SearchBudget,
    compute_hints,
    unpreferred_rank,
)
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet, ids_of
from nri_numa.model.machine import Unit, count_text, join_words, listed_words_text, numa_text
from nri_numa.model.reasons import DEVICE_REMEDY
from nri_numa.model.workload import Policy
from nri_numa.text import human_bytes

MAX_SAMPLE_MASKS = 4
"""Hints and losing candidates that are listed."""

# NUMA nodes spelled out in a sentence before it is cut.
_MAX_LISTED_NUMA_NODES = 8


class AlignmentRequest(msgspec.Struct, frozen=True, dict=True):
    """Hint providers, and how to merge their hints; kept so that a result can be explained later.

    Attributes:
        prefer_closest_numa_nodes: of equally wide masks the one with the least average distance is
            best, the kubelet's ``prefer-closest-numa-nodes``; not under single-numa-node.
        rank: what is best next, see `MaskOrder`: 0 the best, or without ranks as the kubelet.
        one_width: what the neediest resource needs on an empty machine is narrow enough for all;
            the kubelet wants each to need that many NUMA nodes.
    """

    demands: tuple[HintProvider, ...]
    numa_ids: NUMASet
    policy: Policy
    distance: Callable[[int, int], int]
    prefer_closest_numa_nodes: bool = True
    rank: Mapping[int, int] | None = None
    one_width: bool = False

    def build_merge(self, distances: DistanceSums | None = None) -> HintMerge:
        """The hints of each provider, with a fresh budget; distances of a machine may be kept."""
        single, budget = self.policy is Policy.SINGLE_NUMA_NODE, SearchBudget()
        return HintMerge(
            hint_lists=compute_hints(
                self.demands, self.numa_ids, budget, one_width=self.one_width and not single
            ),
            all_nodes_mask=self.numa_ids.bits,
            order=MaskOrder(self.numa_ids, self.rank),
            distances=(
                distances or DistanceSums(self.distance)
                if self.prefer_closest_numa_nodes and not single
                else None
            ),
            single=single,
            budget=budget,
        )


class HintState(StrEnum):
    """Kind of answer of a hint provider."""

    NO_HINT = "none"
    IMPOSSIBLE = "impossible"
    MASKS = "masks"


class ResourceSummary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Need of one resource and the masks that suit it; explanations show it as it is here.

    Attributes:
        preferred_width: NUMA nodes an empty machine would need; 0 without masks.
        narrowest_width: NUMA nodes needed now; 0 when no mask suits.
        narrowest_count: how many of the narrowest width; None on machines too large.
    """

    resource: str
    need: int = msgspec.field(name="demand")
    unit: Unit
    state: HintState = msgspec.field(name="hint")
    preferred_width: int = msgspec.field(default=0, name="preferredNumaNodes")
    narrowest_width: int = msgspec.field(default=0, name="minNumaNodes")
    hints: list[Hint] = msgspec.field(default_factory=list, name="sets")
    hint_count: int | None = msgspec.field(default=0, name="setCount")
    narrowest_count: int | None = 0
    all_sets_fit: bool = False
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


def free_by_node_text(numa_nodes: Sequence[NodeAmount], unit: Unit) -> str:
    """``NUMA node 0: 2 of 8 CPUs free for exclusive use; NUMA node 1: …``."""
    parts = [
        f"NUMA node {n.numa_node}: {unit.amount_text_without_cpu_noun(n.free, free=True)} of "
        f"{unit.free_text(n.capacity)}"
        for n in numa_nodes[:_MAX_LISTED_NUMA_NODES]
    ]
    unlisted = numa_nodes[_MAX_LISTED_NUMA_NODES:]
    if unlisted:
        max_free = unit.free_text(max(n.free for n in unlisted))
        parts.append(f"{len(unlisted)} more with at most {max_free}")
    return "; ".join(parts)


def _sample_masks(hints: Hints, merge: HintMerge) -> tuple[list[int], int | None, int | None, bool]:
    """Some masks, narrowest first; how many, how many of the least width, and whether all are.

    One mask and no numbers on machines with too many to look at.
    """
    if len(merge.order.nodes) > EXACT_MERGE_MAX_NODES:
        mask = hints.mask_requirement().narrowest_mask(merge.order, None, merge.budget)
        all_sets_fit = _is_every_node_set_sufficient(hints, mask or 0)
        return [] if mask is None else [mask], None, None, all_sets_fit
    masks = hints.mask_requirement().satisfying_masks()
    masks.sort(key=int.bit_count)
    min_width, max_width = masks[0].bit_count(), masks[:MAX_SAMPLE_MASKS][-1].bit_count()
    narrowest_count = sum(1 for m in masks if m.bit_count() == min_width)
    all_sets_fit = narrowest_count == comb(hints.universe.bit_count(), min_width) > 1
    samples = [m for m in masks if m.bit_count() <= max_width]
    # Order: width, then the tie-break.
    samples.sort(key=lambda m: (m.bit_count(), merge.order.sort_key(m)))
    return samples[:MAX_SAMPLE_MASKS], len(masks), narrowest_count, all_sets_fit


def _is_every_node_set_sufficient(hints: Hints, mask: int) -> bool:
    """Check if even the poorest NUMA nodes, as many as the mask has, would do."""
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


def numa_node_sets_text(sets: Sequence[str], all_sets_fit: bool, count: int | None) -> str:
    """``any two of them``, ``NUMA nodes 0-1 or 0,2``, ``… or 20 other sets``."""
    if not sets:
        return "other NUMA nodes"
    width = len(NUMASet.parse(sets[0]))
    if all_sets_fit:
        return f"any {_NUMBER_WORDS[width] if width < len(_NUMBER_WORDS) else width} of them"
    smallest_sets = [s for s in sets if len(NUMASet.parse(s)) == width]
    unlisted = (count or 0) - len(smallest_sets)
    unlisted_text = f" or {count_text(unlisted, 'other set')}" if unlisted > 0 else ""
    plural = "s" if width > 1 or len(smallest_sets) > 1 else ""
    return f"NUMA node{plural} {' or '.join(smallest_sets)}{unlisted_text}"


def _summary_text(summary: ResourceSummary, provider: HintProvider) -> str:
    need = f"{summary.resource}: {summary.unit.amount_text(provider.need)}"
    if summary.state is HintState.NO_HINT:
        if provider.need <= 0:
            return f"{need} needed, every NUMA node suits"
        return f"{need} needed, {provider.no_hint_text()}"
    free_text = free_by_node_text(summary.numa_nodes, summary.unit)
    if summary.state is HintState.IMPOSSIBLE:
        return f"{need} needed, {provider.find_obstacle(summary.numa_nodes).text} ({free_text})"
    nodes_text = count_text(summary.narrowest_width, "NUMA node")
    if summary.narrowest_width == summary.preferred_width:
        return f"{need} needed, fits on {nodes_text} ({free_text})"
    return (
        f"{need} needed, fits on {nodes_text}, "
        f"on an empty machine on {summary.preferred_width} ({free_text})"
    )


def _rejected_mask(mask: int, preferred: bool, ranking: tuple[str, str]) -> RejectedMask:
    affinity = NUMASet.from_bits(mask)
    separated_by, text = ranking
    return RejectedMask(
        affinity=affinity, preferred=preferred, separated_by=separated_by, text=text
    )


def _explain_ranking(winner: int, loser: int, neediest: int, merge: HintMerge) -> tuple[str, str]:
    """Name what separates two masks of which both, or neither, are preferred; and say it."""
    loser_width, winner_width, distances = loser.bit_count(), winner.bit_count(), merge.distances
    if loser_width != winner_width:
        if loser_width < neediest:
            min_width = f"the {count_text(neediest, 'NUMA node')} that the neediest resource takes"
            return "width", f"fewer than {min_width}"
        return "width", f"{count_text(loser_width, 'NUMA node')} instead of {winner_width}"
    if distances is not None and distances.total_distance(winner) != distances.total_distance(
        loser
    ):
        loser_average, winner_average = (
            distances.total_distance(mask) / loser_width**2 for mask in (loser, winner)
        )
        return "distance", f"average distance {loser_average:g} instead of {winner_average:g}"
    if merge.order.by_value:
        return "id", "the lower numbers are taken"
    return "rank", "lower rank by the strategy"


DIFFERENT_WIDTHS_TEXT: Final = "different numbers of NUMA nodes needed"
"""In the clause when no mask can be preferred by all, on an empty machine either."""


class Shortage(msgspec.Struct, frozen=True):
    """The resource, or the several, that did not fit, as a clause.

    Attributes:
        width_conflict: no state of the machine would help, see `DIFFERENT_WIDTHS_TEXT`.
    """

    text: str
    detail: str = ""
    width_conflict: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def shortage_clause(resource: str, need: str, available: str) -> str:
    """The first clause of a refusal: ``memory: 4 GiB needed, 3 GiB free on NUMA node 0``."""
    return f"{resource}: {need} needed, {available}"


def byte_shortage_clause(resource: str, need: int, free_bytes: int, nodes_text: str) -> str:
    """The same of memory or huge pages; ``nodes_text`` goes on after ``3 GiB free``."""
    available = f"{human_bytes(free_bytes, free=True)} free{nodes_text}"
    return shortage_clause(resource, human_bytes(need), available)


class NamedDevice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A device of a resource, and its NUMA nodes."""

    resource: str
    id: str
    numa_nodes: NUMASet

    @property
    def text(self) -> str:
        """``gpu-0``; with its kind if the id alone does not say what it is."""
        is_named = "/" in self.resource and not self.id.isdecimal()
        return self.id if is_named else f"{self.resource} {self.id}"


class MisalignedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of a container that keep it from a preferred place.

    Attributes:
        given: the devices.
        apart: they are on different NUMA nodes; otherwise other resources are missing there.
        is_kubelet_choice: the kubelet allocated all of them.
        alternative: devices beside which the container would have a preferred place; None if the
            kubelet does not say what it has, empty if it has none.
        numa_nodes: of the alternative.
    """

    given: tuple[NamedDevice, ...]
    apart: bool
    is_kubelet_choice: bool = False
    alternative: tuple[NamedDevice, ...] | None = None
    numa_nodes: NUMASet = NO_NUMA_NODES

    @property
    def remedy(self) -> str:
        """Setting of the kubelet with which it aligns devices; empty if that would not help."""
        return DEVICE_REMEDY if self.alternative else ""

    @property
    def clause(self) -> str:
        """``the kubelet gave a (NUMA node 0) and b (NUMA node 1); c would be on …``."""
        device_texts = [f"{d.text} ({numa_text(d.numa_nodes)})" for d in self.given]
        giver = "the kubelet gave" if self.is_kubelet_choice else "it has"
        clause = f"{giver} {listed_words_text(device_texts)}"
        if not self.alternative:
            none_text = ", and no free ones are better aligned"
            return clause if self.alternative is None else clause + none_text
        count = len(self.alternative)
        both_text = " both" if count == 2 else " all" if count > 2 else ""
        names = listed_words_text([d.text for d in self.alternative])
        return (
            f"{clause}; {names} would{both_text} be on {numa_text(self.numa_nodes)} "
            f"(the kubelet aligns devices with {self.remedy})"
        )


_ResourceEntry = tuple[ResourceSummary, Hints, HintProvider]


def _shortage_at_width(
    group: Sequence[_ResourceEntry], problem: AlignmentRequest, order: MaskOrder, width: int
) -> Shortage:
    """Find whose fault it is that a list of hints has no mask of ``width`` NUMA nodes."""
    single = problem.policy is Policy.SINGLE_NUMA_NODE
    for summary, _, provider in group:
        max_free = provider.max_amount_on(problem.numa_ids, width, empty=False)
        if max_free is None or max_free >= provider.need:
            continue
        text = _over_capacity_text(summary, provider, problem, width) or (
            f"at most {summary.unit.free_text(max_free)} on {_numa_node_width_text(width)}"
        )
        if not single:
            nodes_text = count_text(summary.narrowest_width, "NUMA node")
            text += f"; fits on {nodes_text}, on an empty machine on {summary.preferred_width}"
        return _single_shortage(summary, text)
    if len(group) > 1:
        return _no_common_nodes_shortage(group, problem, order)
    summary = group[0][0]
    if not single:
        return Shortage(summary.text)
    max_free = max((n.free for n in summary.numa_nodes), default=0)
    free_text = f"at most {summary.unit.free_text(max_free)} on one NUMA node"
    if max_free >= summary.need:  # groups of NUMA nodes keep it from there
        free_text += ", which the kubelet's rules tie to others"
    return _single_shortage(summary, free_text)


def _over_capacity_text(
    summary: ResourceSummary, provider: HintProvider, problem: AlignmentRequest, width: int
) -> str:
    """Say that no ``width`` NUMA nodes have that much, however empty; else empty.

    Where the whole machine has not, the provider's obstacle says so.
    """
    capacity = provider.max_amount_on(problem.numa_ids, width, empty=True)
    if capacity is None or capacity >= provider.need:
        return ""
    if sum(n.capacity for n in summary.numa_nodes) < provider.need:
        return ""
    capacity_text = summary.unit.amount_text(capacity, free=True)
    return f"more than the {capacity_text} of any {_numa_node_width_text(width)}, even an empty one"


def _numa_node_width_text(width: int) -> str:
    return "one NUMA node" if width == 1 else f"{width} NUMA nodes"


def _no_common_nodes_shortage(
    entries: Sequence[_ResourceEntry], problem: AlignmentRequest, order: MaskOrder
) -> Shortage:
    """Say that each resource has a place, and that they have none in common."""
    names = join_words([s.resource for s, _, _ in entries])
    lists = [id(f) for _, f, _ in entries]
    texts = ", ".join(
        f"{_need_text(s)} on "
        + (
            _resource_nodes_text(p, problem.numa_ids)
            if lists.count(id(f)) > 1
            else _preferred_nodes_text(s, f, problem, order)
        )
        for s, f, p in entries
    )
    return Shortage(f"{names}: each fits, but not on the same NUMA nodes: {texts}")


def _resource_nodes_text(provider: HintProvider, numa_ids: NUMASet) -> str:
    """NUMA nodes, or how many, that one resource fits on whose list others share."""

    def has_enough(nodes: NUMASet, width: int) -> bool:
        return (provider.max_amount_on(nodes, width, empty=False) or 0) >= provider.need

    single_nodes = NUMASet(i for i in numa_ids if has_enough(NUMASet([i]), 1))
    if single_nodes:
        return numa_text(single_nodes)
    widths = (width for width in range(2, len(numa_ids)) if has_enough(numa_ids, width))
    return count_text(next(widths, len(numa_ids)), "NUMA node")


def _preferred_nodes_text(
    summary: ResourceSummary, hints: Hints, problem: AlignmentRequest, order: MaskOrder
) -> str:
    """NUMA nodes that one resource would prefer by itself."""
    if hints.width == 1 or problem.policy is Policy.SINGLE_NUMA_NODE:
        return numa_text(NUMASet(i for i in order.nodes if hints.prefers_mask(1 << i)))
    sets = [str(h.affinity) for h in summary.hints if h.preferred]
    return numa_node_sets_text(sets, summary.all_sets_fit, summary.narrowest_count)


def _need_text(summary: ResourceSummary) -> str:
    text = _quantity_text(summary.need, summary.unit)
    return f"{text} {summary.resource}" if summary.unit is Unit.NUMBER else text


def _quantity_text(need: int, unit: Unit) -> str:
    """A need; only exclusive CPUs are counted as whole ones."""
    return count_text(need, "exclusive CPU") if unit is Unit.CPUS else unit.amount_text(need)


def _single_shortage(summary: ResourceSummary, available: str) -> Shortage:
    need = _quantity_text(summary.need, summary.unit)
    clause = shortage_clause(summary.resource, need, available)
    return Shortage(clause, free_by_node_text(summary.numa_nodes, summary.unit))


def _width_conflict_shortage(summaries: Sequence[ResourceSummary]) -> Shortage:
    widths = ", ".join(
        f"{_need_text(s)} on {count_text(s.preferred_width, 'NUMA node')}" for s in summaries
    )
    names = join_words([s.resource for s in summaries])
    return Shortage(f"{names}: {DIFFERENT_WIDTHS_TEXT}: {widths}", width_conflict=True)


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
        """The reason for the outcome, in one sentence without a full stop."""
        affinity = self.affinity
        if not self.preferred:
            text = str(self.shortage)
        elif affinity is None or affinity == self.problem.numa_ids:
            text = "every NUMA node suits"
        else:
            text = f"{numa_text(affinity, 'has', 'have')} room for everything"
        if self.exact:
            return text
        steps_text = f"the search ended after {self.search_steps} steps; a better choice may exist"
        return f"{text} ({steps_text})"

    @cached_property
    def misaligned_devices(self) -> MisalignedDevices | None:
        """The devices, if all other demands would have been preferred without them."""
        problem = self.problem
        devices = tuple(d for d in problem.demands if isinstance(d, DeviceDemand))
        other_demands = tuple(d for d in problem.demands if not isinstance(d, DeviceDemand))
        if self.preferred or not devices or not _is_preferred(problem, other_demands):
            return None
        stocks = [demand.request.stock for demand in devices]
        misaligned = MisalignedDevices(
            given=_list_devices(devices, frozenset(problem.numa_ids)),
            apart=all(d.has_located_devices for d in devices)
            and not _is_preferred(problem, devices),
            is_kubelet_choice=None not in stocks,
        )
        if not any(stocks):
            return misaligned
        choices = tuple(demand.with_choices() for demand in devices)
        alignment = align_demands(replace(problem, demands=(*other_demands, *choices)))
        if not alignment.preferred:
            return replace(misaligned, alternative=())
        nodes = problem.numa_ids if alignment.affinity is None else alignment.affinity
        held_ids = frozenset((device.resource, device.id) for device in misaligned.given)
        return replace(
            misaligned,
            numa_nodes=nodes,
            alternative=_list_devices(choices, frozenset(nodes), preferred=held_ids),
        )

    @cached_property
    def shortage(self) -> Shortage:
        """The resource, or the several, that kept it from being a preferred one."""
        misaligned = self.misaligned_devices
        if misaligned is not None and misaligned.apart:
            resources = dict.fromkeys(device.resource for device in misaligned.given)
            return Shortage(f"{join_words([*resources])}: {misaligned.clause}")
        problem = self.problem
        merge = problem.build_merge()
        entries = list(zip(self.resource_summaries, merge.hint_lists, problem.demands, strict=True))
        impossible = [
            (provider.find_obstacle(summary.numa_nodes), summary, provider)
            for summary, _, provider in entries
            if summary.state is HintState.IMPOSSIBLE
        ]
        if impossible:
            # Order: kind of obstacle, then as the providers are.
            obstacle, summary, provider = min(impossible, key=lambda entry: entry[0].kind)
            excess = _over_capacity_text(summary, provider, problem, 1) if merge.single else ""
            return _single_shortage(summary, excess or obstacle.text)
        hinting = [entry for entry in entries if entry[0].state is HintState.MASKS]
        for _, hints, _ in hinting:
            if replace(merge, hint_lists=[hints], distances=None).preferred_mask() is None:
                group = [entry for entry in hinting if entry[1] is hints]
                width = 1 if merge.single else hints.width
                return _shortage_at_width(group, problem, merge.order, width)
        if not merge.single and len({s.preferred_width for s, _, _ in hinting}) > 1:
            return _width_conflict_shortage([s for s, _, _ in hinting])
        return _no_common_nodes_shortage(hinting, problem, merge.order)

    @cached_property
    def resource_summaries(self) -> tuple[ResourceSummary, ...]:
        """The need of each resource and the masks that suit it, in the order of the providers."""
        problem = self.problem
        merge = problem.build_merge()
        summaries: list[ResourceSummary] = []
        for provider, hints in zip(problem.demands, merge.hint_lists, strict=True):
            summary = ResourceSummary(
                resource=provider.resource,
                need=provider.need,
                unit=provider.amount_unit,
                state=HintState.NO_HINT if hints.nil else HintState.IMPOSSIBLE,
                numa_nodes=provider.amounts_by_node(problem.numa_ids),
            )
            if hints.nil is None:
                masks, count, narrowest_count, all_sets_fit = _sample_masks(hints, merge)
                summary = replace(
                    summary,
                    state=HintState.MASKS,
                    preferred_width=hints.width,
                    narrowest_width=masks[0].bit_count() if masks else 0,
                    hints=[Hint(NUMASet.from_bits(m), hints.prefers_mask(m)) for m in masks],
                    hint_count=count,
                    narrowest_count=narrowest_count,
                    all_sets_fit=all_sets_fit,
                )
            summaries.append(replace(summary, text=_summary_text(summary, provider)))
        return tuple(summaries)

    @cached_property
    def rejected_masks(self) -> tuple[RejectedMask, ...]:
        """The best masks that lost, best first, and what separated each from the winner.

        On machines too large to look at all masks only preferred results are listed.
        """
        problem, preferred = self.problem, self.preferred
        merge = problem.build_merge()
        winner = problem.numa_ids.bits if self.affinity is None else self.affinity.bits
        rejected: list[RejectedMask] = []
        told_masks = {winner}
        while preferred and len(rejected) < MAX_SAMPLE_MASKS:
            mask = merge.preferred_mask(frozenset(told_masks))
            if mask is None:
                break
            told_masks.add(mask)
            rejected.append(_rejected_mask(mask, True, _explain_ranking(winner, mask, 0, merge)))
        if (
            len(rejected) < MAX_SAMPLE_MASKS
            and len(problem.numa_ids) <= EXACT_MERGE_MAX_NODES
            and not merge.single
            and any(f.nil is None for f in merge.hint_lists)
        ):
            masks, neediest = merge.reachable_masks()
            untold_masks = [m for m in masks if m not in told_masks]
            unpreferred = _sort_unpreferred(untold_masks, neediest, merge)
            wide_text = "more NUMA nodes than an empty machine would need, or not the same for all"
            for mask in unpreferred[: MAX_SAMPLE_MASKS - len(rejected)]:
                ranking = "preferred", wide_text
                if not preferred:
                    ranking = _explain_ranking(winner, mask, neediest, merge)
                rejected.append(_rejected_mask(mask, False, ranking))
        return tuple(rejected)


def _is_preferred(problem: AlignmentRequest, demands: tuple[HintProvider, ...]) -> bool:
    return align_demands(replace(problem, demands=demands)).preferred


def _list_devices(
    demands: Sequence[DeviceDemand],
    numa_nodes: frozenset[int],
    preferred: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[NamedDevice, ...]:
    """List as many devices on NUMA nodes as each demand needs.

    Order: as the demands are; then the preferred ones, given as resource and id; then by id.
    """
    return tuple(
        NamedDevice(resource=demand.resource, id=device.id, numa_nodes=NUMASet(device.numa_nodes))
        for demand in demands
        for device in sorted(
            (d for d in demand.request.devices if d.numa_nodes & numa_nodes),
            key=lambda d: ((demand.resource, d.id) not in preferred, d.id),
        )[: demand.need]
    )


def _sort_unpreferred(masks: list[int], neediest: int, merge: HintMerge) -> list[int]:
    """Order: as the merge compares results that are not preferred."""
    distances = merge.distances
    return sorted(
        masks,
        key=lambda m: (
            unpreferred_rank(m.bit_count(), neediest),
            0 if distances is None else distances.total_distance(m),
            merge.order.sort_key(m),
        ),
    )


def align_demands(problem: AlignmentRequest, distances: DistanceSums | None = None) -> Alignment:
    """Merge what the hint providers, in any order, prefer, and judge it by the policy."""
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
