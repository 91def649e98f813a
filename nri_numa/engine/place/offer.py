"""How many exclusive CPUs this machine has for containers that ask with slots.

The scheduler is told a number for the whole machine and subtracts what pods request, also those
that have not started yet. So what is offered is what containers hold with slots, plus what could
still be given: a container that starts moves from the second part to the first, and the sum stays.
Exclusive CPUs without slots, idle siblings, what is allocated to containers that share, and the
floors of the shared pool are in neither.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nri_numa.engine.accounting import exclusive_left
from nri_numa.engine.decision import Machine
from nri_numa.engine.place.needs import kept_for_groups
from nri_numa.engine.place.quotas import cpu_count, kept_for_pool, ownable, ownable_at_most
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.engine.values.settings import CPUOrder
from nri_numa.engine.values.workload import SMT

_SMTS: Final = {smt.value: smt for smt in SMT}


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive CPUs, counted.

    Attributes:
        held: by NUMA node, CPUs of containers that hold slots for them.
        free: by NUMA node, CPUs that could become exclusive.
        holders: the containers that hold slots, by id.
    """

    held: dict[int, int]
    free: dict[int, int]
    holders: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        """What the scheduler may count."""
        return sum(self.held.values()) + sum(self.free.values())


def offer(machine: Machine, state: NodeState) -> Offer:
    """Count what is held with slots and what could still be given.

    What becomes of siblings is counted as the configured defaults say; rules and annotations that
    say something else cost more than is counted here (``smt: isolate``). Quotas of single
    namespaces are the business of a ResourceQuota.
    """
    holders = tuple(a for _, a in sorted(state.allocations.items()) if a.slots)
    held = {
        i: sum((a.cpus.bits & cpus.bits).bit_count() for a in holders)
        for i, cpus in machine.node_cpus.items()
    }
    return Offer(held=held, free=_free(machine, state), holders=holders)


def largest(machine: Machine, state: NodeState) -> dict[int, int]:
    """By NUMA node, how many exclusive CPUs one more container could have there and nowhere else.

    `offer` splits what the machine as a whole can give between its NUMA nodes, so that the sum is
    right; here each NUMA node is counted as if the container went to it.
    """
    left, most = _left(machine, state)
    return {i: max(0, min(count, most)) for i, count in left.items()}


def together(machine: Machine, state: NodeState) -> int:
    """How many exclusive CPUs containers could have in all.

    Less than `largest` adds up to where the floor of the shared pool, or a quota, is one of the
    whole machine.
    """
    left, most = _left(machine, state)
    return max(0, min(sum(left.values()), most))


def _free(machine: Machine, state: NodeState) -> dict[int, int]:
    left, most = _left(machine, state)
    # What is too much for the machine as a whole is taken from where most is free, of equals from
    # the highest NUMA node.
    for _ in range(sum(left.values()) - max(0, most)):
        left[max(left, key=lambda i: (left[i], i))] -= 1
    return left


def _left(machine: Machine, state: NodeState) -> tuple[dict[int, int], int]:
    """What each NUMA node has left, and what the machine as a whole can give."""
    smt = _smt(machine)
    pool = state.pool(machine.topology, machine.settings)
    free = ownable(machine, state)
    free = free - kept_for_pool(machine, state, pool, free)
    free = free - kept_for_groups(machine, state, pool, free, pair=smt is SMT.PAIR)
    left = exclusive_left(machine, state, free, smt, machine.cpu_left(state))
    most = min(ownable_at_most(machine, state, smt), _quota_left(machine, state, smt))
    return left, most


def _smt(machine: Machine) -> SMT:
    default = machine.settings.defaults.get("smt")
    if default is None:
        kubelet = machine.settings.cpu_order is CPUOrder.KUBELET
        return SMT.ANY if kubelet else SMT.SPREAD
    return _SMTS[default]


def _quota_left(machine: Machine, state: NodeState, smt: SMT) -> int:
    limits, total = machine.settings.limits, cpu_count(machine)
    used = len(state.owned | state.idle)
    left = limits.quota.exclusive.of(total) - used
    if smt is SMT.ISOLATE:
        threads = machine.topology.threads_per_core
        left //= threads
        if threads > 1:
            left = min(left, (limits.idle.of(total) - len(state.idle)) // (threads - 1))
    return left
