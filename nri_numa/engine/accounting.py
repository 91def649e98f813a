"""Free CPUs of each NUMA node, floors and quotas: worked out here and nowhere else.

Admission, the text of a refusal, the API, the metrics, the page and the simulation all ask these
functions, so that what is said to be free is admitted, and never more than that.

Two bounds hold for the CPUs of a NUMA node, and the lower one counts:

* the accounting of what was promised,
  ``total × oversale × capacity factor − Σ requests bound to it``;
* what runs there: containers without CPUs of their own run on the shared pool, so they cannot be
  promised more than ``pool × oversale``. CPUs that are owned, siblings kept idle for an
  owner, and what the kubelet granted serve no others, however much is oversold.

CPUs are withheld from the shared pool when they are owned, or kept idle beside owned ones; listed
CPUs (``numacpu`` without ``cpus: exclusive``) stay in the pool, and cannot be owned unless the
list is soft. Quotas and the floor of the pool are looked at when something new is granted: who
holds more than a quota that was lowered keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    take_cpus,
)
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
from nri_numa.engine.state import Allocation, NodeState, union_cpus
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import count_text, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import (
    ALL_CPUS_AMOUNT,
    CPUAmount,
    IsolatedCPUs,
    NamespacePatternQuota,
)
from nri_numa.model.workload import SMT, BusySchedule, PodSandbox

MANY_CPUS: Final = 2
"""The least number of CPUs of a container that isolated ones may not suit."""


def count_free_exclusive_by_node(
    node: NodeSnapshot, free: CPUSet, smt: SMT, left: Mapping[int, int]
) -> dict[int, int]:
    """By NUMA node, how many CPUs one more container could own there.

    No more than are free, than the accounting has, and than the pool can lose: what is promised to
    containers without CPUs of their own must still run there. ``full-core`` counts CPUs of whole
    cores only; ``isolate`` counts cores, each of which costs the pool all of its threads.
    """
    machine, pool = node.machine, node.pool.bits
    sizes = _free_core_sizes_by_node(machine, free) if smt in (SMT.FULL_CORE, SMT.ISOLATE) else {}
    counts: dict[int, int] = {}
    milli_of_cpu = max(1, machine.shared_milli_of(1))
    for i, cpus in machine.allowed_cpus_by_node.items():
        pool_count = (cpus.bits & pool).bit_count()
        promised = -(-node.state.shared_milli(i, cpus) // milli_of_cpu)
        isolated_count = (cpus.bits & free.bits & ~pool).bit_count()
        spare = max(0, pool_count - promised) + isolated_count
        if smt is SMT.ISOLATE:
            # As many cores as the pool can lose, whichever are taken.
            count = sum(1 for threads in accumulate(sizes.get(i, ())) if threads <= spare)
        elif smt is SMT.FULL_CORE:
            cores = sizes.get(i, [])
            count = min(sum(cores), spare, left.get(i, 0) // 1000)
            if cores and min(cores) == max(cores):
                count -= count % cores[0]
        else:
            count = min((cpus.bits & free.bits).bit_count(), spare)
        counts[i] = min(count, left.get(i, 0) // 1000)
    return counts


def whole_core_counts(
    machine: NodeModel, free: CPUSet, counts: dict[int, int], need: int
) -> dict[int, int]:
    """Counts for ``full-core``: less on NUMA nodes whose cores never make ``need``, if others do.

    If none do they stay: it is refused for its number, not for a place.
    """
    limited = dict(counts)
    for i, sizes in _free_core_sizes_by_node(machine, free).items():
        sums = 1  # bit n: some of these cores have n threads together
        for threads in sizes:
            sums |= sums << threads
        if not sums >> need & 1:
            limited[i] = min(counts.get(i, 0), (sums & ((1 << need) - 1)).bit_length() - 1)
    return limited if any(n >= need for n in limited.values()) else counts


def _free_core_sizes_by_node(machine: NodeModel, free: CPUSet) -> dict[int, list[int]]:
    """By NUMA node, the threads of each wholly free core, largest first."""
    index: AllocatorIndex = machine.allocator_index
    whole_cores = index.whole_cores(free.bits)
    sizes: dict[int, list[int]] = {}
    for core in machine.topology.cores.values():
        if core.numa_node is not None and core.cpus and whole_cores >> core.cpus.first_id & 1:
            sizes.setdefault(core.numa_node, []).append(len(core.cpus))
    for cores in sizes.values():
        cores.sort(reverse=True)
    return sizes


def loads_by_cpu(state: NodeState) -> dict[int, BusySchedule]:
    """CPU to the load of the exclusive container that owns it, where it has one."""
    return {
        cpu: a.load
        for a in state.allocations.values()
        if a.exclusive and a.load is not None
        for cpu in a.cpus
    }


def take_avoiding_contended(
    case: PlacementRequest, request: TakeRequest, limits: Mapping[int, int]
) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
    """Choose CPUs beside those that others have and use, on no NUMA node more than can be owned.

    CPUs of soft lists are left out where others on the same NUMA nodes are as good. The kubelet's
    order, CPUs that are preferred and loads to be paired with take no notice of lists. CPUs that
    belong to no NUMA node have no limit.
    """
    machine, state = case.node.machine, case.node.state
    request = replace(
        request,
        loads=loads_by_cpu(state) if request.smt is SMT.PAIR else {},
        unavailable_cpus=state.unavailable_cpus,
        contended_cpus=foreign_or_grantable_cpus(state, machine.topology, machine.settings),
        listed=yielding_list_cpus(state, machine.topology),
    )
    chosen_cpus = _take_within_node_limits(machine, request, limits)
    if (
        not isinstance(chosen_cpus, ChosenCPUs)
        or not (chosen_cpus.cpus - request.current_cpus) & request.listed
        or request.prefer
        or request.smt is SMT.PAIR
        or request.settings.kubelet.cpu_order
    ):
        return chosen_cpus
    unlisted = replace(request, free_cpus=request.free_cpus - request.listed)
    unlisted_cpus = _take_within_node_limits(machine, unlisted, limits)
    is_equivalent = isinstance(unlisted_cpus, ChosenCPUs) and _cpu_choice_key(
        machine, unlisted_cpus
    ) == _cpu_choice_key(machine, chosen_cpus)
    return unlisted_cpus if is_equivalent else chosen_cpus


def _cpu_choice_key(machine: NodeModel, chosen_cpus: ChosenCPUs) -> tuple[object, ...]:
    """Key of CPUs that are as good as each other."""
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
) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
    topology = machine.topology
    chosen_cpus = take_cpus(topology, request, machine.allocator_index)
    for _ in limits:
        numa_node = (
            _first_exceeded_node(machine, request, chosen_cpus, limits)
            if isinstance(chosen_cpus, ChosenCPUs)
            else None
        )
        if numa_node is None:
            return chosen_cpus
        # Of that NUMA node leave what the allocator itself would take first.
        node_cpus = machine.allowed_cpus_by_node[numa_node]
        current_here = request.current_cpus & node_cpus
        within_limit = take_cpus(
            topology,
            replace(
                request,
                count=max(limits[numa_node], len(current_here)),
                free_cpus=request.free_cpus & node_cpus,
                prefer=request.prefer & node_cpus,
                current_cpus=current_here,
                affinity=None,
            ),
            machine.allocator_index,
        )
        free_cpus = request.free_cpus - node_cpus
        if isinstance(within_limit, ChosenCPUs):
            free_cpus = free_cpus | within_limit.cpus | within_limit.idle
        request = replace(request, free_cpus=free_cpus)
        chosen_cpus = take_cpus(topology, request, machine.allocator_index)
    return chosen_cpus


def _first_exceeded_node(
    machine: NodeModel, request: TakeRequest, chosen_cpus: ChosenCPUs, limits: Mapping[int, int]
) -> int | None:
    """The lowest NUMA node whose limit the choice exceeds."""
    for i in sorted(limits):
        bits = machine.allowed_cpus_by_node[i].bits
        count = (chosen_cpus.cpus.bits & bits).bit_count()
        if count > max(limits[i], (request.current_cpus.bits & bits).bit_count()):
            return i
    return None


def split_cpu_milli(milli: int, numa_nodes: NUMASet, room: Mapping[int, int]) -> dict[int, int]:
    """Book a shared container on the NUMA nodes it may run on: evenly, as far as each has that.

    It may run on any of them, so one that is nearly full gives what it has and the others the
    rest. What fits nowhere (it was let in all the same) is spread evenly.
    """
    if len(numa_nodes) == 1:
        return {numa_nodes.first_id: milli}
    allocated = dict.fromkeys(numa_nodes, 0)
    unplaced = milli
    # Least room first, then the lowest id: what a small one cannot give is shared by the larger.
    order = sorted(numa_nodes, key=lambda i: (room.get(i, 0), i))
    for n, i in enumerate(order):
        allocated[i] = min(room.get(i, 0), -(-unplaced // (len(order) - n)))
        unplaced -= allocated[i]
    part, remainder = divmod(unplaced, len(order)) if order else (0, 0)
    for n, i in enumerate(sorted(order)):
        allocated[i] += part + (1 if n < remainder else 0)
    return allocated


def check_exclusive_limits(
    case: PlacementRequest, who: str, cpus: CPUSet, idle: CPUSet
) -> Rejection | None:
    """Refuse exclusive CPUs that the floor of the pool or a quota does not allow."""
    withheld = cpus | idle
    return check_pool_floor(case.node, who, withheld) or _check_quotas(case, who, withheld, idle)


# --- the floor of the shared pool -----------------------------------------------------------------


def exclusive_candidate_cpus(node: NodeSnapshot, count: int = 1) -> CPUSet:
    """CPUs that a container of so many may own, before the floors of the pool are looked at."""
    machine, bits = node.machine, node.exclusive_pool_bits
    if machine.settings.isolated is IsolatedCPUs.ONLY:
        bits &= machine.topology.isolated.bits
    never = machine.settings.reserved_cpus.bits | node.state.listed_cpus.bits
    return CPUSet.from_bits(bits & ~never & ~machine.avoided_isolated_cpus(count).bits)


def max_exclusive_above_pool_floor(node: NodeSnapshot, smt: SMT, count: int = 1) -> int:
    """How many CPUs a container of ``count`` could own at all, so that the pool keeps its floor.

    Where cores differ in their threads, fewer are named for ``isolate`` than might be had.
    """
    machine, pool = node.machine, node.pool
    apart = exclusive_candidate_cpus(node, count) - pool
    only = machine.withheld_isolated_cpus and machine.settings.isolated is IsolatedCPUs.ONLY
    total = len(apart) + (0 if only else max(0, len(pool) - machine.pool_floor))
    threads = machine.topology.threads_per_core
    if smt is SMT.ISOLATE:
        return total // threads
    uniform = len({len(offsets) for _, offsets in machine.allocator_index.core_shapes}) == 1
    return total - total % threads if smt is SMT.FULL_CORE and uniform else total


def pool_floor_text(node: NodeSnapshot, smt: SMT, count: int) -> str:
    """What the shared pool keeps, where no more than that is short of so many exclusive CPUs."""
    machine, most = node.machine, max_exclusive_above_pool_floor(node, smt, count)
    each = machine.topology.threads_per_core if smt is SMT.ISOLATE else 1
    if not most < count <= len(exclusive_candidate_cpus(node, count)) // each:
        return ""
    return f"; the shared pool keeps {count_text(machine.pool_floor, 'CPU')} (sharedPool.cpus)"


def cpus_above_floors(
    node: NodeSnapshot, free: CPUSet, held: CPUSet = NO_CPUS, *, pair: bool = False
) -> CPUSet:
    """Free CPUs without those that the shared pool and its groups keep.

    ``held`` are those that a container has already; ``pair`` is as in `_group_floor_cpus`.
    """
    free = free - _cpus_withheld_for_pool_floor(node, free - held, held)
    return free - _group_floor_cpus(node, free, held, pair=pair)


def _cpus_withheld_for_pool_floor(
    node: NodeSnapshot, free: CPUSet, held: CPUSet = NO_CPUS
) -> CPUSet:
    """Free CPUs that no exclusive grant may take, so that each NUMA node keeps its floor.

    Where isolated CPUs may be owned instead, CPUs are also kept for the floor of the machine and
    for what is promised to containers that share. Kept are those that spare most whole cores:
    threads of cores in use first, then from the highest core and CPU down. The same CPUs from one
    decision to the next, while they last.
    """
    machine, pool = node.machine, node.pool - held
    if not (machine.node_pool_floors or machine.withheld_isolated_cpus):
        return NO_CPUS
    topology, floor_bits = machine.topology, 0
    in_use = machine.allocator_index.threads_of(
        machine.allocator_index.cores_touched(topology.allowed.bits & ~free.bits)
    )

    def select_floor_bits(cpus: CPUSet, count: int) -> int:
        order = sorted(cpus, key=lambda i: (not in_use >> i & 1, -topology.cpus[i].core, -i))
        return sum(1 << i for i in order[: max(0, count)])

    for i, cpus in machine.allowed_cpus_by_node.items():
        pool_here = pool & cpus
        floor_here = machine.node_pool_floors.get(i, 0)
        if machine.withheld_isolated_cpus:
            promised = -(-node.state.shared_milli(i, cpus) // max(1, machine.shared_milli_of(1)))
            floor_here = max(floor_here, promised)
        floor_bits |= select_floor_bits(pool_here & free, floor_here - len(pool_here - free))
    if machine.withheld_isolated_cpus:
        pool_rest = CPUSet.from_bits(floor_bits) | (pool - free)
        floor_bits |= select_floor_bits(pool - pool_rest, machine.pool_floor - len(pool_rest))
    return CPUSet.from_bits(floor_bits)


def check_pool_floor(node: NodeSnapshot, who: str, withheld: CPUSet) -> Rejection | None:
    """Why these CPUs stay in the shared pool; None where it can lose them."""
    machine, pool = node.machine, node.pool
    withheld = withheld & pool
    if not withheld:
        return None  # isolated CPUs are no part of it
    places: list[tuple[CPUSet, int, NUMASet | None]] = [(pool, machine.pool_floor, None)]
    for i, keep in machine.node_pool_floors.items():
        if withheld & machine.allowed_cpus_by_node[i]:
            places.append((pool & machine.allowed_cpus_by_node[i], keep, NUMASet([i])))
    for here, keep, numa_nodes in places:
        left = len(here - withheld)
        if left >= keep:
            continue
        where = "" if numa_nodes is None else f" of {numa_text(numa_nodes)}"
        key = "sharedPool.cpus" if numa_nodes is None else "sharedPool.numaNodeCPUs"
        pool_text = f"the shared pool{where or ' of the machine'}"
        reason, rule = (
            RejectionReason.SHARED_POOL_FLOOR,
            f"{pool_text} keeps {count_text(keep, 'CPU')}",
        )
        if numa_nodes is None and not left:
            reason, rule, key = (
                RejectionReason.SHARED_POOL_EMPTY,
                "the shared pool is never empty",
                "",
            )
        return Rejection(
            reason=reason,
            detail=f"{who} would leave {left} of the {count_text(len(here), 'CPU')} in the shared "
            f"pool{where} for other containers; expected at least {keep} to stay"
            + (f" ({key})" if key else "")
            + exclusive_holders_text(node.state, numa_nodes),
            rule=rule,
            allows_best_effort=numa_nodes is not None,
        )
    return None


# --- quotas ---------------------------------------------------------------------------------------


def _check_quotas(
    case: PlacementRequest, who: str, withheld: CPUSet, idle: CPUSet
) -> Rejection | None:
    machine, state, namespace = case.node.machine, case.node.state, case.pod.namespace
    limits, allocations = machine.settings.limits, state.allocations.values()
    used, more = len(state.exclusive | state.idle_siblings), len(withheld)

    def check_quota_limit(
        name: str, kind: str, amount: CPUAmount, used: int, more: int, holders: Iterable[Allocation]
    ) -> Rejection | None:
        limit = amount.cpus_of_total(machine.cpu_count)
        if not more or amount == ALL_CPUS_AMOUNT or used + more <= limit:
            return None
        return _quota_rejection(who, name, kind, limit, used, more, holders)

    idlers, owners = (
        (a for a in allocations if a.idle_siblings),
        (a for a in allocations if a.exclusive),
    )
    amount = limits.quota.exclusive
    refused = check_quota_limit(
        "quotas.idleCPUs",
        "idle siblings",
        limits.idle_siblings,
        len(state.idle_siblings),
        len(idle),
        idlers,
    ) or check_quota_limit("quotas.exclusiveCPUs", "exclusive CPUs", amount, used, more, owners)
    entry = _namespace_quota(machine, case.pod)
    if refused is not None or entry is None:
        return refused
    mine = [a for a in allocations if a.exclusive and a.namespace == namespace]
    used, kind = (
        len(union_cpus(a.cpus | a.idle_siblings for a in mine)),
        f"exclusive CPUs of namespace {namespace}",
    )
    return check_quota_limit(
        f"{entry.name}.exclusiveCPUs", kind, entry.quota.exclusive, used, more, mine
    )


def check_listed_cpus_quota(case: PlacementRequest, who: str, cpus: CPUSet) -> Rejection | None:
    """Refuse a list of CPUs above a quota; nobody could own them any more.

    A list that the request pays for is within every quota; soft ones are never refused.
    """
    machine, state, pod = case.node.machine, case.node.state, case.pod
    if cpus <= state.listed_cpus or case.demand.cpu_requested_milli >= 1000 * len(cpus):
        return None
    # Alone, reserved CPUs withhold nothing: they cannot be owned anyway.
    reserved = machine.settings.reserved_cpus
    allocations = [state.allocations[i] for i in state.listed]
    entry = _namespace_quota(machine, pod)
    quotas = [
        ("quotas.listedCPUs", "listed CPUs", machine.settings.limits.quota.listed, allocations)
    ]
    if entry is not None and entry.quota.listed != ALL_CPUS_AMOUNT:
        mine = [a for a in allocations if a.namespace == pod.namespace]
        kind = f"listed CPUs of namespace {pod.namespace}"
        quotas.append((f"{entry.name}.listedCPUs", kind, entry.quota.listed, mine))
    for name, kind, amount, holders in quotas:
        used = union_cpus(a.cpus for a in holders) - reserved
        limit, more = _listed_quota_cpu_count(machine, amount), len(cpus - reserved - used)
        if len(used) + more > limit:
            return _quota_rejection(who, name, kind, limit, len(used), more, holders)
    return None


def _listed_quota_cpu_count(machine: NodeModel, amount: CPUAmount) -> int:
    """A quota of lists; a part of a small machine is at least a core, and two CPUs."""
    count = amount.cpus_of_total(machine.cpu_count)
    return max(count, 2, machine.topology.threads_per_core) if amount.percent else count


def _namespace_quota(machine: NodeModel, pod: PodSandbox) -> NamespacePatternQuota | None:
    return next(
        (
            entry
            for entry in machine.settings.limits.namespaces
            if any(fnmatchcase(pod.namespace, p) for p in entry.namespaces)
        ),
        None,
    )


def _quota_rejection(
    who: str,
    name: str,
    what: str,
    limit: int,
    used: int,
    wanted: int,
    holders: Iterable[Allocation],
) -> Rejection:
    return Rejection(
        reason=RejectionReason.QUOTA_EXCEEDED,
        detail=f"{who} would be over the quota of {limit} {what} ({name}): {used} are used and "
        f"{wanted} are asked for, expected at most {max(0, limit - used)} "
        f"more{holder_list_text(holders)}",
        rule=f"{name} allows {limit} {what}",
    )


def _group_floor_cpus(
    node: NodeSnapshot, free: CPUSet, held: CPUSet = NO_CPUS, *, pair: bool = False
) -> CPUSet:
    """CPUs that are not given away, so that no group of shared containers leaves its NUMA nodes.

    One for each group that has nothing there but free CPUs; one may do for several. With ``pair``
    the other threads of cores in use are what the container looks for.
    """
    machine, floor_bits = node.machine, 0
    for key in sorted(node.state.shared_groups):
        if key < 0:
            continue
        group_bits = node.pool.bits & machine.topology.cpu_bits_of(key)
        spare = group_bits & ~held.bits
        if not spare or group_bits & ~free.bits or spare & floor_bits:
            continue
        # The least loss is a thread whose core is in use already, or one of a whole core where
        # such threads are wanted; then the highest number.
        cores = machine.allocator_index.threads_of(machine.allocator_index.whole_cores(free.bits))
        bits = spare & (cores if pair else ~cores) or spare
        floor_bits |= 1 << bits.bit_length() - 1
    return CPUSet.from_bits(floor_bits)


class SlotCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive CPUs, counted.

    Attributes:
        allocated: by NUMA node, CPUs of containers that hold slots for them.
    """

    allocated: dict[int, int]
    free: dict[int, int]
    holders: tuple[Allocation, ...]

    @property
    def total_slots(self) -> int:
        """Slots that the scheduler may count."""
        return sum(self.allocated.values()) + sum(self.free.values())


def slot_capacity(node: NodeSnapshot) -> SlotCapacity:
    """Count what is held with slots and what could still be given.

    The scheduler has one number for the whole machine and subtracts what pods request, also those
    that have not started yet: a container that starts moves from the second part to the first, and
    the sum stays. Exclusive CPUs without slots, idle siblings, what is allocated to containers that
    share, and the floors of the shared pool are in neither.

    What becomes of siblings is counted as the configured defaults say; rules and annotations that
    say something else cost more than is counted here (``smt: isolate``). Quotas of single
    namespaces are the business of a ResourceQuota.
    """
    holders = tuple(a for _, a in sorted(node.state.allocations.items()) if a.slots)
    allocated = {
        i: sum((a.cpus.bits & cpus.bits).bit_count() for a in holders)
        for i, cpus in node.machine.allowed_cpus_by_node.items()
    }
    free, total = _free_exclusive_with_total(node)
    # What is too much for the machine as a whole is taken from where most is free, of equals from
    # the highest NUMA node.
    for _ in range(sum(free.values()) - max(0, total)):
        free[max(free, key=lambda i: (free[i], i))] -= 1
    return SlotCapacity(allocated=allocated, free=free, holders=holders)


def max_exclusive_by_node(node: NodeSnapshot) -> dict[int, int]:
    """By NUMA node, how many exclusive CPUs one more container could have there and nowhere else.

    `slot_capacity` splits what the machine as a whole can give between its NUMA nodes, so that the
    sum is right; here each NUMA node is counted as if the container went to it.
    """
    left, most = _free_exclusive_with_total(node)
    return {i: max(0, min(count, most)) for i, count in left.items()}


def total_free_exclusive(node: NodeSnapshot) -> int:
    """How many exclusive CPUs containers could have in all.

    Less than `max_exclusive_by_node` adds up to where the floor of the shared pool, or a quota, is
    one of the whole machine.
    """
    left, most = _free_exclusive_with_total(node)
    return max(0, min(sum(left.values()), most))


def _free_exclusive_with_total(node: NodeSnapshot) -> tuple[dict[int, int], int]:
    """What each NUMA node has left, and what the machine as a whole can give.

    To containers of any number of CPUs, so without isolated ones that several do not get.
    """
    smt = SMT(node.machine.settings.defaults.get("smt", SMT.ANY))
    free = exclusive_candidate_cpus(node, MANY_CPUS)
    free = cpus_above_floors(node, free, pair=smt is SMT.PAIR)
    left = count_free_exclusive_by_node(node, free, smt, node.free_cpu_milli)
    most = min(
        max_exclusive_above_pool_floor(node, smt, MANY_CPUS),
        _free_in_machine_exclusive_quota(node, smt),
    )
    return left, most


def _free_in_machine_exclusive_quota(node: NodeSnapshot, smt: SMT) -> int:
    machine, state = node.machine, node.state
    limits, total = machine.settings.limits, machine.cpu_count
    count = limits.quota.exclusive.cpus_of_total(total) - len(state.exclusive | state.idle_siblings)
    if smt is SMT.ISOLATE:
        threads = machine.topology.threads_per_core
        count //= threads
        if threads > 1:
            count = min(
                count,
                (limits.idle_siblings.cpus_of_total(total) - len(state.idle_siblings))
                // (threads - 1),
            )
    return count
