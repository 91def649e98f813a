"""What kept an alignment from being a preferred one: the resource that failed, need against have.

The first clause of every refusal is made here or by `short`. Resources that are judged together
(memory and huge pages) fail together; named is the one that is short by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nri_numa.engine.align.families import Family
from nri_numa.engine.align.hint_reasons import (
    HintState,
    Problem,
    ResourceSummary,
    amount_text,
    free_text,
    lacking,
    nodes_text,
    sets_text,
    summarize,
)
from nri_numa.engine.align.hints import Amounts, HintDemand, ResourceDemand, together
from nri_numa.engine.align.merge import preferred_mask
from nri_numa.engine.align.search import Order
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import counted, numa_text

DIFFERENT_WIDTHS: Final = "different numbers of NUMA nodes needed"
"""In the clause when no mask can be preferred by all, on an empty machine either."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why not.

    Attributes:
        text: one clause: resource, need, have.
        detail: what each NUMA node has free; may be empty.
        widths: no state of the machine would help, see `DIFFERENT_WIDTHS`.
    """

    text: str
    detail: str = ""
    widths: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def short(resource: str, need: str, have: str) -> str:
    """The first clause of a refusal: ``memory: 4.0 GiB needed, 3.0 GiB free on NUMA node 0``."""
    return f"{resource}: {need} needed, {have}"


def reason(problem: Problem, affinity: NUMASet | None, preferred: bool) -> str:
    """The outcome in one sentence."""
    if problem.policy is Policy.NONE:
        return "policy none looks at no NUMA nodes"
    if preferred:
        if affinity is None or affinity == problem.numa_ids:
            return "every NUMA node suits"
        return f"{numa_text(affinity, 'suits', 'suit')} every resource"
    return str(shortage(problem))


_Looked = tuple[ResourceSummary, Family, HintDemand]


def shortage(problem: Problem) -> Shortage:
    """Which resource, or which several, kept the result from being a preferred one."""
    families = problem.families(problem.steps())
    looked = list(zip(summarize(problem), families, problem.demands, strict=True))
    impossible = [one for one in looked if one[0].state is HintState.IMPOSSIBLE]
    if impossible:
        # What the machine lacks comes before what is not free, and that before what is both but
        # not together; then in the order of the demands.
        summary, _, demand = min(impossible, key=lambda one: _severity(one[0], one[2]))
        return _alone(summary, lacking(summary, demand))
    hinting = [one for one in looked if one[0].state is HintState.MASKS]
    order = problem.order()
    for _, family, _ in hinting:
        group = [one for one in hinting if one[1] is family]
        if problem.policy is Policy.SINGLE_NUMA_NODE:
            if not any(family.prefers(1 << i) for i in order.nodes):
                return _wider(group, problem, order, 1)
        elif preferred_mask([family], problem.numa_ids.bits, order, None, problem.steps()) is None:
            return _wider(group, problem, order, family.width)
    widths = {s.preferred_width for s, _, _ in hinting}
    if problem.policy is not Policy.SINGLE_NUMA_NODE and len(widths) > 1:
        told = ", ".join(f"{_amount(s)} on {nodes_text(s.preferred_width)}" for s, _, _ in hinting)
        names = " and ".join(s.resource for s, _, _ in hinting)
        return Shortage(f"{names}: {DIFFERENT_WIDTHS}: {told}", widths=True)
    return _apart(hinting, problem, order)


def _severity(summary: ResourceSummary, demand: HintDemand) -> int:
    if not isinstance(demand, ResourceDemand):
        return 2
    if sum(n.capacity for n in summary.numa_nodes) < demand.need:
        return 0
    return 1 if sum(n.free for n in summary.numa_nodes) < demand.need else 3


def _wider(group: Sequence[_Looked], problem: Problem, order: Order, width: int) -> Shortage:
    """One list of hints is nowhere as narrow as it should be: whose fault that is."""
    for summary, _, demand in group:
        if not isinstance(demand, ResourceDemand):
            continue
        free = _most(demand, demand.available, problem.numa_ids, width)
        if free >= demand.need:
            continue
        capacity = _most(demand, demand.capacity, problem.numa_ids, width)
        where = "one NUMA node" if width == 1 else f"{width} NUMA nodes"
        if capacity < demand.need:
            text = f"more than the {amount_text(capacity, summary.unit)} of any {where}"
        else:
            text = f"at most {amount_text(free, summary.unit)} free on {where}"
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
    # There is enough of it, as was looked at above: groups of NUMA nodes keep it from there.
    have = f"at most {amount_text(most, summary.unit)} free on one NUMA node"
    return _alone(summary, f"{have}, which is tied to others by the kubelet's rules")


def _most(demand: ResourceDemand, amounts: Amounts, numa_ids: NUMASet, width: int) -> int:
    """What the richest ``width`` NUMA nodes have."""
    found = together(demand.near, amounts)
    return sum(sorted((max(0, found.get(i, 0)) for i in numa_ids), reverse=True)[:width])


def _apart(looked: Sequence[_Looked], problem: Problem, order: Order) -> Shortage:
    """Each has a place, and they have none in common."""
    names = " and ".join(s.resource for s, _, _ in looked)
    lists = [id(f) for _, f, _ in looked]
    told = ", ".join(
        f"{_amount(s)} on "
        + (
            _by_itself(d, problem.numa_ids)
            if isinstance(d, ResourceDemand) and lists.count(id(f)) > 1
            else _where(s, f, problem, order)
        )
        for s, f, d in looked
    )
    return Shortage(f"{names}: each fits, but not on the same NUMA nodes: {told}")


def _by_itself(demand: ResourceDemand, numa_ids: NUMASet) -> str:
    """Where a resource fits that is judged together with others."""
    free = together(demand.near, demand.available)
    alone = NUMASet(i for i in numa_ids if free.get(i, 0) >= demand.need)
    if alone:
        return numa_text(alone)
    widths = range(2, len(numa_ids))
    enough = (w for w in widths if _most(demand, demand.available, numa_ids, w) >= demand.need)
    return nodes_text(next(enough, len(numa_ids)))


def _where(summary: ResourceSummary, family: Family, problem: Problem, order: Order) -> str:
    """Where one resource could go by itself."""
    if family.width == 1 or problem.policy is Policy.SINGLE_NUMA_NODE:
        return numa_text(NUMASet(i for i in order.nodes if family.prefers(1 << i)))
    preferred = [h.affinity for h in summary.hints if h.preferred and h.affinity is not None]
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
