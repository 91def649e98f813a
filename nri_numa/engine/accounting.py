"""Free CPUs of each NUMA node, pool floors and quotas.

Admission, rejections, the API, metrics, the page and the simulation all use these functions, so the
CPUs that are reported as free are exactly those that are admitted.

Two limits hold for the CPUs of a NUMA node, and the lower one counts:

* allocated CPUs, ``total × overcommit × capacity factor − Σ requests charged to it``;
* usable CPUs: containers without exclusive CPUs run on the shared pool, so no more than
  ``pool × overcommit`` can be allocated to them. Exclusive CPUs, idle siblings and CPUs that the
  kubelet granted serve no other containers, whatever the overcommit.

Exclusive CPUs and idle siblings are withheld from the shared pool. Listed CPUs (``numacpu`` without
``cpus: exclusive``) stay in the pool, and cannot become exclusive unless the list yields. Quotas
and pool floors are checked for new exclusive CPUs only: a container above a lowered quota keeps its
CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import ChosenCPUs, TakeRequest, TakeResult, take_cpus
from nri_numa.engine.cpus.index import AllocatorIndex
from nri_numa.engine.decision import PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.foreign_pins import (
    exclusive_holders_text,
    foreign_or_grantable_cpus,
    holder_list_text,
    yielding_list_cpus,
)
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet, union_cpus
from nri_numa.model.machine import count_text, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import ALL_CPUS_AMOUNT, CPUAmount, IsolatedCPUs, NamespacePatternQuota
from nri_numa.model.workload import SMT, BusySchedule, PodSandbox

MANY_CPUS: Final = 2
"""Minimum CPUs of a container for which isolated CPUs may not be suitable."""


def count_free_exclusive_by_node(
    node: NodeSnapshot, free_cpus: CPUSet, smt: SMT, free_milli: Mapping[int, int]
) -> dict[int, int]:
    """Count by NUMA node the CPUs that one more container could have exclusively.

    The limits are the free CPUs, ``free_milli``, and the CPUs that the pool does not need for
    requests of shared containers. ``full-core`` counts CPUs of whole cores only; ``isolate`` counts
    cores, each of which takes all of its threads from the pool.
    """
    machine, pool = node.machine, node.pool.bits
    counts_cores = smt in (SMT.FULL_CORE, SMT.ISOLATE)
    sizes = _free_core_sizes_by_node(machine, free_cpus) if counts_cores else {}
    counts: dict[int, int] = {}
    milli_of_cpu = max(1, machine.shared_milli_of(1))
    for i, cpus in machine.allowed_cpus_by_node.items():
        pool_count = (cpus.bits & pool).bit_count()
        promised = -(-node.state.shared_milli(i, cpus) // milli_of_cpu)
        isolated_count = (cpus.bits & free_cpus.bits & ~pool).bit_count()
        spare = max(0, pool_count - promised) + isolated_count
        if smt is SMT.ISOLATE:
            # The number of cores that the pool can lose, whichever are taken.
            count = sum(1 for threads in accumulate(sizes.get(i, ())) if threads <= spare)
        elif smt is SMT.FULL_CORE:
            cores = sizes.get(i, [])
            count = min(sum(cores), spare, free_milli.get(i, 0) // 1000)
            if cores and min(cores) == max(cores):
                count -= count % cores[0]
        else:
            count = min((cpus.bits & free_cpus.bits).bit_count(), spare)
        counts[i] = min(count, free_milli.get(i, 0) // 1000)
    return counts


def whole_core_counts(
    machine: NodeModel, free_cpus: CPUSet, counts: dict[int, int], need: int
) -> dict[int, int]:
    """Reduce counts for ``full-core`` on NUMA nodes whose cores cannot add up to ``need``.

    Unchanged if no NUMA node can: the rejection is then about the number, not about a NUMA node.
    """
    limited = dict(counts)
    for i, sizes in _free_core_sizes_by_node(machine, free_cpus).items():
        sums = 1  # bit n: some of these cores have n threads together
        for threads in sizes:
            sums |= sums << threads
        if not sums >> need & 1:
            limited[i] = min(counts.get(i, 0), (sums & ((1 << need) - 1)).bit_length() - 1)
    return limited if any(n >= need for n in limited.values()) else counts


def _free_core_sizes_by_node(machine: NodeModel, free_cpus: CPUSet) -> dict[int, list[int]]:
    """Return by NUMA node the thread counts of wholly free cores, largest first."""
    index: AllocatorIndex = machine.allocator_index
    whole_cores = index.whole_cores(free_cpus.bits)
    sizes: dict[int, list[int]] = {}
    for core in machine.topology.cores.values():
        if core.numa_node is not None and core.cpus and whole_cores >> core.cpus.first_id & 1:
            sizes.setdefault(core.numa_node, []).append(len(core.cpus))
    for cores in sizes.values():
        cores.sort(reverse=True)
    return sizes


def loads_by_cpu(state: NodeState) -> dict[int, BusySchedule]:
    """Map exclusive CPUs to the load of their holder, if it has one."""
    return {
        cpu: a.load
        for a in state.allocations.values()
        if a.exclusive and a.load is not None
        for cpu in a.cpus
    }


def take_avoiding_contended(
    case: PlacementRequest, request: TakeRequest, limits: Mapping[int, int]
) -> TakeResult:
    """Take CPUs within the limits of each NUMA node, contended ones last.

    CPUs of yielding lists are avoided if others on the same NUMA nodes are equivalent. The
    kubelet's order, preferred CPUs and loads to pair with take precedence over lists. CPUs outside
    of all NUMA nodes have no limit.
    """
    machine, state = case.node.machine, case.node.state
    request = replace(
        request,
        loads=loads_by_cpu(state) if request.smt is SMT.PAIR else {},
        unavailable_cpus=state.unavailable_cpus,
        contended_cpus=foreign_or_grantable_cpus(state, machine.topology, machine.settings),
    )
    listed_cpus = yielding_list_cpus(state, machine.topology)
    chosen_cpus = _take_within_node_limits(machine, request, limits)
    if (
        not isinstance(chosen_cpus, ChosenCPUs)
        or not (chosen_cpus.cpus - request.current_cpus) & listed_cpus
        or request.prefer
        or request.smt is SMT.PAIR
        or request.settings.kubelet.cpu_order
    ):
        return chosen_cpus
    unlisted = replace(request, free_cpus=request.free_cpus - listed_cpus)
    unlisted_cpus = _take_within_node_limits(machine, unlisted, limits)
    is_equivalent = isinstance(unlisted_cpus, ChosenCPUs) and _cpu_choice_key(
        machine, unlisted_cpus
    ) == _cpu_choice_key(machine, chosen_cpus)
    return unlisted_cpus if is_equivalent else chosen_cpus


def _cpu_choice_key(machine: NodeModel, chosen_cpus: ChosenCPUs) -> tuple[object, ...]:
    """Key that is equal for equivalent choices of CPUs."""
    index: AllocatorIndex = machine.allocator_index
    cpus = chosen_cpus.cpus.bits
    return (
        machine.topology.numa_of(chosen_cpus.cpus),
        sum(1 for group in index.l3_groups if group.bits & cpus),
        index.cores_touched(cpus).bit_count(),
        *((cpus & kind).bit_count() for kind in (index.isolated, index.nohz_full, index.efficient)),
    )


def _take_within_node_limits(
    machine: NodeModel, request: TakeRequest, limits: Mapping[int, int]
) -> TakeResult:
    index = machine.allocator_index
    chosen_cpus = take_cpus(index, request)
    for _ in limits:
        if not isinstance(chosen_cpus, ChosenCPUs):
            return chosen_cpus
        numa_node = _first_exceeded_node(machine, request, chosen_cpus, limits)
        if numa_node is None:
            return chosen_cpus
        # Keep the CPUs of that NUMA node that the allocator would take first.
        node_cpus = machine.allowed_cpus_by_node[numa_node]
        current_here = request.current_cpus & node_cpus
        request_here = replace(
            request,
            count=max(limits[numa_node], len(current_here)),
            free_cpus=request.free_cpus & node_cpus,
            prefer=request.prefer & node_cpus,
            current_cpus=current_here,
            affinity=None,
        )
        within_limit = take_cpus(index, request_here)
        free_cpus = request.free_cpus - node_cpus
        if isinstance(within_limit, ChosenCPUs):
            free_cpus = free_cpus | within_limit.cpus | within_limit.idle
        request = replace(request, free_cpus=free_cpus)
        chosen_cpus = take_cpus(index, request)
    return chosen_cpus


def _first_exceeded_node(
    machine: NodeModel, request: TakeRequest, chosen_cpus: ChosenCPUs, limits: Mapping[int, int]
) -> int | None:
    """Lowest NUMA node whose limit the choice exceeds; None without one."""
    for i in sorted(limits):
        bits = machine.allowed_cpus_by_node[i].bits
        count = (chosen_cpus.cpus.bits & bits).bit_count()
        if count > max(limits[i], (request.current_cpus.bits & bits).bit_count()):
            return i
    return None


def split_cpu_milli(milli: int, numa_nodes: NUMASet, room: Mapping[int, int]) -> dict[int, int]:
    """Split a shared container's milli CPUs evenly over its NUMA nodes, limited by their room.

    A NUMA node with less than an even part gives what is free there. An amount that fits nowhere
    (of a container that was admitted anyway) is spread evenly.
    """
    if len(numa_nodes) == 1:
        return {numa_nodes.first_id: milli}
    allocated = dict.fromkeys(numa_nodes, 0)
    unplaced = milli
    # Least room first, then the lowest id, so the remainder goes to NUMA nodes with more room.
    order = sorted(numa_nodes, key=lambda i: (room.get(i, 0), i))
    for n, i in enumerate(order):
        allocated[i] = min(room.get(i, 0), -(-unplaced // (len(order) - n)))
        unplaced -= allocated[i]
    part, remainder = divmod(unplaced, len(order)) if order else (0, 0)
    for n, i in enumerate(sorted(order)):
        allocated[i] += part + (1 if n < remainder else 0)
    return allocated


def check_exclusive_limits(
    case: PlacementRequest, subject: str, cpus: CPUSet, idle_siblings: CPUSet
) -> Rejection | None:
    """Reject exclusive CPUs that violate a pool floor or a quota."""
    withheld = cpus | idle_siblings
    return check_pool_floor(case.node, subject, withheld) or _check_exclusive_quotas(
        case, subject, withheld, idle_siblings
    )


# --- pool floors ----------------------------------------------------------------------------------


def exclusive_candidate_cpus(node: NodeSnapshot, count: int = 1) -> CPUSet:
    """CPUs that may be exclusive to a container of ``count``, before pool floors."""
    machine, bits = node.machine, node.exclusive_pool_bits
    if machine.settings.isolated is IsolatedCPUs.ONLY:
        bits &= machine.topology.isolated.bits
    excluded_bits = machine.settings.reserved_cpus.bits | node.state.listed_cpus.bits
    return CPUSet.from_bits(bits & ~excluded_bits & ~machine.avoided_isolated_cpus(count).bits)


def max_exclusive_above_pool_floor(node: NodeSnapshot, smt: SMT, count: int) -> int:
    """Count the CPUs that a container of ``count`` could have exclusively above the pool floor.

    For ``isolate`` the count may be too low if cores have different numbers of threads.
    """
    machine, pool = node.machine, node.pool
    isolated_cpus = exclusive_candidate_cpus(node, count) - pool
    is_isolated = machine.withheld_isolated_cpus and machine.settings.isolated is IsolatedCPUs.ONLY
    total = len(isolated_cpus) + (0 if is_isolated else max(0, len(pool) - machine.pool_floor))
    threads = machine.topology.threads_per_core
    if smt is SMT.ISOLATE:
        return total // threads
    uniform = len({len(offsets) for _, offsets in machine.allocator_index.core_shapes}) == 1
    return total - total % threads if smt is SMT.FULL_CORE and uniform else total


def pool_floor_text(node: NodeSnapshot, smt: SMT, count: int) -> str:
    """Clause about the pool floor if it alone prevents so many exclusive CPUs; else empty."""
    machine, max_cpus = node.machine, max_exclusive_above_pool_floor(node, smt, count)
    threads = machine.topology.threads_per_core if smt is SMT.ISOLATE else 1
    if not max_cpus < count <= len(exclusive_candidate_cpus(node, count)) // threads:
        return ""
    return f"; the shared pool keeps {count_text(machine.pool_floor, 'CPU')} (sharedPool.minCPUs)"


def cpus_above_floors(
    node: NodeSnapshot, free_cpus: CPUSet, own_cpus: CPUSet = NO_CPUS, *, pair: bool = False
) -> CPUSet:
    """Remove the CPUs that the shared pool and its groups keep from free CPUs.

    ``own_cpus`` are the container's current ones; ``pair`` is as in `_group_floor_cpus`.
    """
    free_cpus = free_cpus - _cpus_withheld_for_pool_floor(node, free_cpus - own_cpus, own_cpus)
    return free_cpus - _group_floor_cpus(node, free_cpus, own_cpus, pair=pair)


def _cpus_withheld_for_pool_floor(
    node: NodeSnapshot, free_cpus: CPUSet, own_cpus: CPUSet
) -> CPUSet:
    """Select free CPUs that cannot become exclusive, so each NUMA node keeps its pool floor.

    If isolated CPUs may be exclusive instead, CPUs are also kept for the machine's floor and for
    requests of shared containers. Order: threads of cores in use, which keep most cores whole, then
    the highest core, then the highest CPU. So consecutive decisions keep the same CPUs.
    """
    machine, pool = node.machine, node.pool - own_cpus
    if not (machine.node_pool_floors or machine.withheld_isolated_cpus):
        return NO_CPUS
    topology, index, floor_bits = machine.topology, machine.allocator_index, 0
    in_use = index.threads_of(index.cores_touched(topology.allowed.bits & ~free_cpus.bits))

    def select_floor_bits(cpus: CPUSet, count: int) -> int:
        order = sorted(cpus, key=lambda i: (not in_use >> i & 1, -topology.cpus[i].core, -i))
        return sum(1 << i for i in order[: max(0, count)])

    for i, cpus in machine.allowed_cpus_by_node.items():
        pool_here = pool & cpus
        floor_here = machine.node_pool_floors.get(i, 0)
        if machine.withheld_isolated_cpus:
            promised = -(-node.state.shared_milli(i, cpus) // max(1, machine.shared_milli_of(1)))
            floor_here = max(floor_here, promised)
        count = floor_here - len(pool_here - free_cpus)
        floor_bits |= select_floor_bits(pool_here & free_cpus, count)
    if machine.withheld_isolated_cpus:
        pool_rest = CPUSet.from_bits(floor_bits) | (pool - free_cpus)
        floor_bits |= select_floor_bits(pool - pool_rest, machine.pool_floor - len(pool_rest))
    return CPUSet.from_bits(floor_bits)


def check_pool_floor(node: NodeSnapshot, subject: str, withheld: CPUSet) -> Rejection | None:
    """Reject withheld CPUs that a pool floor needs; None if the pool can lose them."""
    machine, pool = node.machine, node.pool
    withheld = withheld & pool
    if not withheld:
        return None  # isolated CPUs are not in the pool
    pools: list[tuple[CPUSet, int, NUMASet | None]] = [(pool, machine.pool_floor, None)]
    for i, floor in machine.node_pool_floors.items():
        if withheld & machine.allowed_cpus_by_node[i]:
            pools.append((pool & machine.allowed_cpus_by_node[i], floor, NUMASet([i])))
    for cpus, floor, numa_nodes in pools:
        remainder = len(cpus - withheld)
        if remainder >= floor:
            continue
        nodes_text = "" if numa_nodes is None else f" of {numa_text(numa_nodes)}"
        key = "sharedPool.minCPUs" if numa_nodes is None else "sharedPool.minCPUsPerNUMANode"
        reason = RejectionReason.SHARED_POOL_FLOOR
        rule = f"the shared pool{nodes_text or ' of the machine'} keeps {count_text(floor, 'CPU')}"
        if numa_nodes is None and not remainder:
            reason, rule = RejectionReason.SHARED_POOL_EMPTY, "the shared pool is never empty"
            key = ""
        return Rejection(
            reason=reason,
            detail=f"{subject} would leave {remainder} of the {count_text(len(cpus), 'CPU')} in "
            f"the shared pool{nodes_text} for other containers; expected at least {floor} to stay"
            + (f" ({key})" if key else "")
            + exclusive_holders_text(node.state, numa_nodes),
            rule=rule,
            allows_best_effort=numa_nodes is not None,
        )
    return None


# --- quotas ---------------------------------------------------------------------------------------


class _Quota(NamedTuple):
    """A quota and its use.

    Attributes:
        used: CPUs that count against it now.
        scope_text: whose quota it is; empty for that of all namespaces.
    """

    key: str
    noun: str
    amount: CPUAmount
    used: int
    holders: Iterable[Allocation]
    scope_text: str = ""


def _check_quota(machine: NodeModel, subject: str, quota: _Quota, count: int) -> Rejection | None:
    """Reject ``count`` CPUs if the quota has fewer left."""
    limit, used = quota.amount.cpus_of_total(machine.cpu_count), quota.used
    if quota.amount == ALL_CPUS_AMOUNT or used + count <= limit:
        return None
    quota_text = f"{count_text(limit, quota.noun)}{quota.scope_text}"
    return Rejection(
        reason=RejectionReason.QUOTA_EXCEEDED,
        detail=f"{subject} would exceed the quota of {quota_text} ({quota.key}): {used} used, "
        f"{count} requested; expected at most {max(0, limit - used)} "
        f"more{holder_list_text(quota.holders)}",
        rule=f"{quota.key} allows {quota_text}",
    )


def _check_exclusive_quotas(
    case: PlacementRequest, subject: str, withheld: CPUSet, idle_siblings: CPUSet
) -> Rejection | None:
    machine, state, namespace = case.node.machine, case.node.state, case.pod.namespace
    limits, allocations = machine.settings.limits, state.allocations.values()
    rejection, noun = None, "exclusive CPU"
    if idle_siblings:
        amount, used = limits.idle_siblings, len(state.idle_siblings)
        holders = (a for a in allocations if a.idle_siblings)
        quota = _Quota("quotas.idleSiblings", "idle sibling", amount, used, holders)
        rejection = _check_quota(machine, subject, quota, len(idle_siblings))
    amount, used = limits.quota.exclusive, len(state.exclusive | state.idle_siblings)
    holders = (a for a in allocations if a.exclusive)
    quota = _Quota("quotas.exclusiveCPUs", noun, amount, used, holders)
    rejection = rejection or _check_quota(machine, subject, quota, len(withheld))
    entry = _namespace_quota(machine, case.pod)
    if rejection is not None or entry is None:
        return rejection
    mine = [a for a in allocations if a.exclusive and a.namespace == namespace]
    used = len(union_cpus(a.cpus | a.idle_siblings for a in mine))
    key, scope_text = f"{entry.name}.exclusiveCPUs", f" of namespace {namespace}"
    quota = _Quota(key, noun, entry.quota.exclusive, used, mine, scope_text)
    return _check_quota(machine, subject, quota, len(withheld))


def check_listed_cpus_quota(case: PlacementRequest, subject: str, cpus: CPUSet) -> Rejection | None:
    """Reject a list of CPUs above a quota, because listed CPUs cannot become exclusive.

    A list whose CPUs are requested is within every quota; yielding lists are never rejected.
    """
    machine, state, pod = case.node.machine, case.node.state, case.pod
    if cpus <= state.listed_cpus or case.demand.cpu_requested_milli >= 1000 * len(cpus):
        return None
    # Reserved CPUs do not count: they cannot become exclusive anyway.
    reserved = machine.settings.reserved_cpus
    allocations = [state.allocations[i] for i in state.listed]
    entry = _namespace_quota(machine, pod)
    quotas = [("quotas.listedCPUs", "", machine.settings.limits.quota.listed, allocations)]
    if entry is not None and entry.quota.listed != ALL_CPUS_AMOUNT:
        mine = [a for a in allocations if a.namespace == pod.namespace]
        scope_text = f" of namespace {pod.namespace}"
        quotas.append((f"{entry.name}.listedCPUs", scope_text, entry.quota.listed, mine))
    for key, scope_text, amount, holders in quotas:
        used = union_cpus(a.cpus for a in holders) - reserved
        if amount.percent:  # at least one core and two CPUs
            limit = amount.cpus_of_total(machine.cpu_count)
            amount = CPUAmount(max(limit, 2, machine.topology.threads_per_core))
        quota = _Quota(key, "listed CPU", amount, len(used), holders, scope_text)
        rejection = _check_quota(machine, subject, quota, len(cpus - reserved - used))
        if rejection is not None:
            return rejection
    return None


def _namespace_quota(machine: NodeModel, pod: PodSandbox) -> NamespacePatternQuota | None:
    for entry in machine.settings.limits.namespaces:
        if any(fnmatchcase(pod.namespace, pattern) for pattern in entry.namespaces):
            return entry
    return None


def _group_floor_cpus(
    node: NodeSnapshot, free_cpus: CPUSet, own_cpus: CPUSet, *, pair: bool
) -> CPUSet:
    """Select free CPUs to keep, so every group of shared containers has a CPU on its NUMA nodes.

    One CPU for each group that has only free CPUs there; one CPU may serve several groups. With
    ``pair`` the container prefers threads of cores in use, so a thread of a whole core is kept.
    """
    index, topology, floor_bits = node.machine.allocator_index, node.machine.topology, 0
    for key in sorted(node.state.shared_groups):
        if key < 0:
            continue
        group_bits = node.pool.bits & topology.cpu_bits_of(key)
        spare = group_bits & ~own_cpus.bits
        if not spare or group_bits & ~free_cpus.bits or spare & floor_bits:
            continue
        # A thread of a core in use, or with `pair` one of a whole core; then the highest number.
        cores = index.threads_of(index.whole_cores(free_cpus.bits))
        bits = spare & (cores if pair else ~cores) or spare
        floor_bits |= 1 << bits.bit_length() - 1
    return CPUSet.from_bits(floor_bits)


class SlotCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of exclusive CPUs by NUMA node.

    Attributes:
        allocated: CPUs of containers with slots.
    """

    allocated: dict[int, int]
    free: dict[int, int]
    holders: tuple[Allocation, ...]

    @property
    def total_slots(self) -> int:
        """Total of slots that the scheduler may count."""
        return sum(self.allocated.values()) + sum(self.free.values())


def slot_capacity(node: NodeSnapshot) -> SlotCapacity:
    """Count exclusive CPUs that are allocated with slots, and those that are free.

    The scheduler subtracts the requests of all pods from one number for the machine, so the sum
    must not change when a container starts: its CPUs move from ``free`` to ``allocated``. Neither
    part has exclusive CPUs without slots, idle siblings, CPUs that are allocated to shared
    containers, or the pool floors.

    Siblings are counted by the configured defaults; rules and annotations with ``smt: isolate``
    need more CPUs than are counted here. Quotas of single namespaces are left to a ResourceQuota.
    """
    holders = tuple(a for _, a in sorted(node.state.allocations.items()) if a.slots)
    allocated = {
        i: sum((a.cpus.bits & cpus.bits).bit_count() for a in holders)
        for i, cpus in node.machine.allowed_cpus_by_node.items()
    }
    free_by_node, total = _free_exclusive_with_total(node)
    # The excess over the machine's total is subtracted where most is free, among equals from the
    # highest NUMA node.
    for _ in range(sum(free_by_node.values()) - max(0, total)):
        free_by_node[max(free_by_node, key=lambda i: (free_by_node[i], i))] -= 1
    return SlotCapacity(allocated=allocated, free=free_by_node, holders=holders)


def max_exclusive_by_node(node: NodeSnapshot) -> dict[int, int]:
    """Count by NUMA node, each by itself, the exclusive CPUs of one more container there."""
    counts, total = _free_exclusive_with_total(node)
    return {i: max(0, min(count, total)) for i, count in counts.items()}


def total_free_exclusive(node: NodeSnapshot) -> int:
    """Count the exclusive CPUs that containers could still have in all, by machine limits, too."""
    counts, total = _free_exclusive_with_total(node)
    return max(0, min(sum(counts.values()), total))


def _free_exclusive_with_total(node: NodeSnapshot) -> tuple[dict[int, int], int]:
    """Return free exclusive CPUs by NUMA node, and the machine's total.

    They suit any number of CPUs, so isolated CPUs that larger containers do not get are left out.
    """
    smt = SMT(node.machine.settings.defaults.get("smt", SMT.ANY))
    free_cpus = exclusive_candidate_cpus(node, MANY_CPUS)
    free_cpus = cpus_above_floors(node, free_cpus, pair=smt is SMT.PAIR)
    counts = count_free_exclusive_by_node(node, free_cpus, smt, node.free_cpu_milli)
    total = max_exclusive_above_pool_floor(node, smt, MANY_CPUS)
    return counts, min(total, _free_in_machine_exclusive_quota(node, smt))


def _free_in_machine_exclusive_quota(node: NodeSnapshot, smt: SMT) -> int:
    machine, state = node.machine, node.state
    limits, total = machine.settings.limits, machine.cpu_count
    count = limits.quota.exclusive.cpus_of_total(total) - len(state.exclusive | state.idle_siblings)
    if smt is SMT.ISOLATE:
        threads = machine.topology.threads_per_core
        count //= threads
        if threads > 1:
            idle_count = limits.idle_siblings.cpus_of_total(total) - len(state.idle_siblings)
            count = min(count, idle_count // (threads - 1))
    return count
