"""The memory policy of a container that has its place: ``mempolicy``, on its own memory nodes.

A policy is set before the program runs or never: nothing can change that of a running process from
outside. So a container that runs already goes without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nri_numa.engine.case import Case
from nri_numa.engine.place.placement import Placed
from nri_numa.engine.request.permissions import asked_by_pod
from nri_numa.engine.state import Kind
from nri_numa.engine.values.memory_policy import MemoryPolicy, MemoryPolicySetting
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import OnFailure, Requested
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.words import numa_text

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
