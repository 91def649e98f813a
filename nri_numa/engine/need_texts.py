"""Needs and what is left, in the words of a refusal."""

from __future__ import annotations

from nri_numa.engine.decision import Machine
from nri_numa.engine.demand import Demand
from nri_numa.engine.hint_reasons import DIFFERENT_WIDTHS
from nri_numa.engine.needs import Books
from nri_numa.engine.placement import (
    human_bytes,
    human_milli,
    per_node,
)
from nri_numa.engine.policies import Alignment
from nri_numa.engine.workload import (
    Bind,
    Container,
    PodSandbox,
    Policy,
    Scope,
    Wishes,
)


def needed_text(demand: Demand, wishes: Wishes) -> str:
    """What a container needs, in words: ``2 exclusive CPUs and 4.0 GiB memory``."""
    parts: list[str] = []
    if demand.exclusive_cpus:
        parts.append(exclusive_text(demand.exclusive_cpus))
    elif demand.cpu_milli:
        parts.append(human_milli(demand.cpu_milli))
    if wishes.bind is Bind.CPU_MEM:
        if demand.memory_bytes:
            parts.append(f"{human_bytes(demand.memory_bytes)} memory")
        for size, amount in sorted(demand.hugepages.items()):
            parts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    if not parts:
        return "a place to run"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def exclusive_text(count: int) -> str:
    """``1 exclusive CPU``, ``4 exclusive CPUs``."""
    return f"{count} exclusive CPU{'' if count == 1 else 's'}"


def left_text(machine: Machine, demand: Demand, wishes: Wishes, books: Books) -> str:
    """What is free of the things needed: ``NUMA node 0: 3 CPUs, 1.0 GiB memory; …``."""
    parts: dict[int, str] = {}
    for i in machine.numa_ids:
        texts: list[str] = []
        if demand.exclusive_cpus:
            count = min(books.free_by_node.get(i, 0), books.cpu_left.get(i, 0) // 1000)
            texts.append(human_milli(count * 1000))
        elif demand.cpu_milli:
            texts.append(human_milli(books.cpu_left.get(i, 0)))
        if wishes.bind is Bind.CPU_MEM:
            if demand.memory_bytes:
                texts.append(f"{human_bytes(books.memory_left.get(i, 0))} memory")
            for size in sorted(demand.hugepages):
                left = books.hugepages_left[size].get(i, 0)
                texts.append(f"{human_bytes(left)} in huge pages of {human_bytes(size)}")
        parts[i] = ", ".join(texts) or human_milli(books.cpu_left.get(i, 0))
    return per_node(parts)


def affinity_message(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    books: Books,
    policy: Policy,
    alignment: Alignment,
) -> str:
    """One line: what was needed, on how many NUMA nodes, and what each had."""
    verb = "all its containers together need" if wishes.scope is Scope.POD else "it needs"
    needs = f"pod {pod.full_name}, container {container.name}: {verb} {needed_text(demand, wishes)}"
    left = left_text(machine, demand, wishes, books)
    if policy is Policy.RESTRICTED and alignment.reason.startswith(DIFFERENT_WIDTHS):
        # The kubelet's verdict. More free CPUs or memory would not change it.
        return (
            f"{needs}, and {alignment.reason}; policy {policy} wants one number for all, as the "
            f"kubelet's does, so take best-effort; free: {left}"
        )
    limit = (
        "one NUMA node"
        if policy is Policy.SINGLE_NUMA_NODE
        else "no more NUMA nodes than an empty machine would need"
    )
    return f"{needs} on {limit} (policy {policy}); free: {left}"
