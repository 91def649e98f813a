"""The Topology Manager's policies: from demands to one NUMA mask and a verdict.

================  =========================================  ======================================
policy            hints used                                 admits
================  =========================================  ======================================
none              none                                       always, without affinity
best-effort       all                                        always
restricted        all                                        when the result is preferred
single-numa-node  preferred ones with one NUMA node or none  when the result is preferred; a result
                                                             of all NUMA nodes loses its mask
================  =========================================  ======================================

For machines of up to `nri_numa.engine.align.merge.EXACT_UPTO` NUMA nodes verdict, mask and
preferred flag are the kubelet's, given its tie-break (no ``rank``) and its widths (no
``one_width``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nri_numa.engine.align.hint_reasons import (
    Candidate,
    Problem,
    ResourceSummary,
    runners_up,
    summarize,
)
from nri_numa.engine.align.hints import HintDemand
from nri_numa.engine.align.merge import EXACT_UPTO, STEP_LIMIT, merge, one_numa_node, single_mask
from nri_numa.engine.align.search import Distances, Order, Steps
from nri_numa.engine.align.shortage import Shortage, reason, shortage
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NUMASet


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The outcome of a merge under a policy.

    Attributes:
        admitted: the policy lets the container in.
        affinity: NUMA nodes its resources should come from; None for no restriction. Filled for
            refusals of ``restricted`` too: it is where best-effort would have put the container.
        preferred: no wider than an empty machine would have required: for every resource, or with
            ``one_width`` for the neediest one.
        exact: False when a search on a large machine stopped early and this is the best it found.
        steps: NUMA nodes tried, a measure of the work.
        problem: the inputs. What explains the outcome is worked out from them when asked for, so
            a decision costs nothing for explanations that nobody reads.
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
        text = reason(self.problem, self.affinity, self.preferred)
        if self.exact:
            return text
        return f"{text} (the best found in {self.steps} steps; a better one may exist)"

    @cached_property
    def shortage(self) -> Shortage:
        """What kept it from being a preferred one; meant for results that are not."""
        return shortage(self.problem)

    @cached_property
    def resources(self) -> tuple[ResourceSummary, ...]:
        """What each resource asked and which NUMA masks suit it, in the order of the demands."""
        return summarize(self.problem)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best masks that lost, best first, with what separated them from the winner."""
        return tuple(runners_up(self.problem, self.affinity, self.preferred))


def align(
    demands: Sequence[HintDemand],
    *,
    numa_ids: NUMASet,
    policy: Policy,
    distance: Callable[[int, int], int],
    prefer_closest: bool = True,
    rank: Mapping[int, int] | None = None,
    one_width: bool = False,
    exact_upto: int = EXACT_UPTO,
    step_limit: int = STEP_LIMIT,
) -> Alignment:
    """Merge what the demands prefer and judge it by a policy.

    Order of equally wide masks: average distance (when ``prefer_closest``, and not under
    single-numa-node), then rank, then the mask's integer value; see `Order`.

    Args:
        demands: in any order; the result does not depend on it.
        numa_ids: the machine's NUMA nodes.
        policy: ``none`` admits without looking.
        distance: SLIT distance between two NUMA nodes.
        prefer_closest: the kubelet's ``prefer-closest-numa-nodes``.
        rank: NUMA node to rank, 0 the best; None reproduces the kubelet's tie-break.
        one_width: what the neediest resource needs on an empty machine is narrow enough for all.
            The kubelet wants each to need that many NUMA nodes.
        exact_upto: largest number of NUMA nodes at which every mask may be looked at.
        step_limit: bound of the search on larger machines.
    """
    problem = Problem(
        demands=tuple(demands),
        numa_ids=numa_ids,
        policy=policy,
        distance=distance,
        prefer_closest=prefer_closest,
        rank=rank,
        exact_upto=exact_upto,
        step_limit=step_limit,
        one_width=one_width,
    )
    if policy is Policy.NONE:
        return Alignment(
            admitted=True, affinity=None, preferred=False, exact=True, steps=0, problem=problem
        )
    machine = numa_ids.bits
    single = policy is Policy.SINGLE_NUMA_NODE
    near = distance if prefer_closest and not single else None
    quick = one_numa_node(demands, machine, near, rank)
    steps = Steps(None if len(numa_ids) <= exact_upto else step_limit)
    if quick is not None:
        mask, preferred = quick, True
        steps.used = len(numa_ids)
    else:
        order = Order(tuple(numa_ids), rank)
        families = problem.families(steps)
        if single:
            found = single_mask(families, order)
            preferred = found is not None
            mask = machine if found is None or found == -1 else found
        else:
            distances = None if near is None else Distances(near)
            merged = merge(families, machine, order, distances, steps, exact_upto)
            mask, preferred = merged.mask, merged.preferred
    return Alignment(
        admitted=preferred or policy is Policy.BEST_EFFORT,
        affinity=None if single and mask == machine else NUMASet.from_bits(mask),
        preferred=preferred,
        exact=steps.exact,
        steps=steps.used,
        problem=problem,
    )
