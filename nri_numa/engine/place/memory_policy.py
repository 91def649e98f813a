"""The memory policy of a container that has its place: ``mempolicy``, on its own memory nodes.

A policy is set before the program runs or never: nothing can change that of a running process from
outside. So a container that runs already goes without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from nri_numa.engine.case import Case
from nri_numa.engine.place.placement import Placed
from nri_numa.engine.request.permissions import asked_by_pod
from nri_numa.engine.state import NOTHING, Charge, Kind
from nri_numa.engine.values.memory_policy import MemoryPolicy, MemoryPolicySetting
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import OnFailure, Requested
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import numa_text

KEY: Final = "mempolicy"


def with_memory_policy(case: Case, placed: Placed, *, running: bool) -> Placed | Refusal:
    """Add the memory policy that was asked for, or say why there is none.

    Args:
        case: what was asked for, which is not `MemoryPolicy.DEFAULT`.
        placed: what the container gets besides.
        running: its program runs already.

    Returns:
        A refusal where the runtime or the kernel does not have the policy, unless the container
        may be widened; and where an annotation asks for a policy on memory nodes that the container
        does not have. A rule or a default speaks for many containers, so there it has no effect.
    """
    mode = case.requested.mempolicy
    if running:
        return _without(placed, mode, "the container runs already")
    if placed.kind is Kind.FOREIGN:
        return _without(placed, mode, "somebody else pins the container")
    if mode.on_nodes and not placed.mems:
        if asked_by_pod(case.requested, KEY):
            return without_nodes(case.requested, case.who)
        return _without(placed, mode, "nothing pins the memory of the container")
    missing = case.machine.memory_policies.refused.get(mode)
    if missing is None:
        placed = replace(placed, charges=in_turn(case, mode, placed.mems, placed.charges))
        setting = MemoryPolicySetting(mode, _nodes(mode, placed))
        step = f"mempolicy: {mode}{_on(setting.nodes)}, from its first instruction"
        return replace(placed, memory_policy=setting, steps=(*placed.steps, step))
    if case.on_failure is OnFailure.WIDEN:
        made = _without(placed, mode, missing.partition(";")[0])
        return replace(made, warnings=(*placed.warnings, made.steps[-1]))
    return Refusal(
        reason="MemoryPolicyUnsupported",
        message=f"{_text(case.requested, case.who)}, but {missing}",
        rule="a memory policy must be known to the kernel and to all who hand it on",
    )


def in_turn(
    case: Case, mode: MemoryPolicy, mems: NUMASet, charges: Mapping[int, Charge]
) -> Mapping[int, Charge]:
    """Memory as it will be used where it comes from its NUMA nodes in turn, by their weights.

    The kubelet's rules know no memory policies.

    Args:
        case: says what is left.
        mode: the policy of the container.
        mems: its memory nodes.
        charges: what is allocated for it, node by node.
    """
    if not mode.in_turn or len(mems) < 2 or case.machine.settings.kubelet_memory:
        return charges
    weights = {i: case.machine.memory_policies.weight(mode, i) for i in mems}
    whole = NOTHING
    for charge in charges.values():
        whole = whole.plus(charge)
    memory = _by_weight(whole.memory, weights, case.memory_left)
    pages: dict[int, dict[int, int]] = {}
    for size, amount in whole.hugepages.items():
        left = case.hugepages_left()[size]
        shares = _by_weight(amount // size, weights, {i: n // size for i, n in left.items()})
        for i, count in shares.items():
            pages.setdefault(i, {})[size] = count * size
    found = {
        i: Charge(charges.get(i, NOTHING).cpu_milli, memory.get(i, 0), pages.get(i, {}))
        for i in sorted({*charges, *mems})
    }
    return {i: charge for i, charge in found.items() if charge != NOTHING}


def _by_weight(amount: int, weights: Mapping[int, int], left: Mapping[int, int]) -> dict[int, int]:
    """Share an amount out; what a NUMA node lacks comes from the others, what all lack from one."""
    taken: dict[int, int] = {}
    # Least room for its weight first, then by id: what it cannot give is shared by the others.
    order = sorted(weights, key=lambda i: (left.get(i, 0) // weights[i], i))
    for n, i in enumerate(order):
        among = sum(weights[j] for j in order[n:])
        taken[i] = min(left.get(i, 0), -(-amount * weights[i] // among))
        amount -= taken[i]
    taken[min(order)] += amount
    return taken


def without_nodes(requested: Requested, who: str) -> Refusal:
    """A policy on memory nodes for a container that has none, and what was expected.

    Args:
        requested: what was asked for.
        who: the start of the message: pod and container.
    """
    return Refusal(
        reason="MemoryPolicyWithoutNodes",
        message=f"{_text(requested, who)}, but nothing pins the memory of the container; "
        "expected numamem, or a policy that pins its memory",
        rule="a memory policy is about the memory nodes that the container is pinned to",
    )


def _nodes(mode: MemoryPolicy, placed: Placed) -> NUMASet:
    if not mode.on_nodes:
        return NUMASet()
    if mode is not MemoryPolicy.PREFERRED:
        return placed.mems
    # The kernel would take the first of several: of those beside its CPUs, if there are such.
    return NUMASet([(placed.numa_nodes & placed.mems or placed.mems).first])


def _on(nodes: NUMASet) -> str:
    return f" on {numa_text(nodes)}" if nodes else ""


def _without(placed: Placed, mode: MemoryPolicy, why: str) -> Placed:
    return replace(placed, steps=(*placed.steps, f"mempolicy: {mode} has no effect: {why}"))


def _text(requested: Requested, who: str) -> str:
    source = requested.sources.get(KEY, KEY)
    return f"{who}: {KEY} is '{requested.mempolicy}' ({source})"
