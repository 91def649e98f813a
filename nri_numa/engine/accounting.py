"""What is free on each NUMA node: worked out here and nowhere else.

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

import msgspec
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTAlignmentRefused,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.index import AllocatorIndex
from nri_numa.engine.decision import Case, Machine
from nri_numa.engine.others import given_last, holders_text, listed_softly, named
from nri_numa.engine.state import Allocation, NodeState, union
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import counted, numa_text
from nri_numa.model.settings import (
    EVERYTHING,
    CPUAmount,
    CPUOrder,
    IsolatedCPUs,
    NamespaceQuota,
)
from nri_numa.model.workload import SMT, Load, PodSandbox, Refusal


def exclusive_left(
    machine: Machine, state: NodeState, free: CPUSet, smt: SMT, left: Mapping[int, int]
) -> dict[int, int]:
    """By NUMA node, how many CPUs one more container could own there.

    No more than are free, than the accounting has, and than the pool can lose: what is promised to
    containers without CPUs of their own must still run there. ``full-core`` counts CPUs of whole
    cores only; ``isolate`` counts cores, each of which costs the pool all of its threads.
    """
    pool = state.pool_bits(machine.topology, machine.settings)
    sizes = _core_sizes(machine, free) if smt in (SMT.FULL_CORE, SMT.ISOLATE) else {}
    found: dict[int, int] = {}
    each = max(1, machine.serves(1))
    for i, cpus in machine.node_cpus.items():
        here = (cpus.bits & pool).bit_count()
        needed = -(-state.shared_milli(i, cpus) // each)
        apart = (cpus.bits & free.bits & ~pool).bit_count()
        spare = max(0, here - needed) + apart
        if smt is SMT.ISOLATE:
            # As many cores as the pool can lose, whichever are taken.
            count = sum(1 for lost in accumulate(sizes.get(i, ())) if lost <= spare)
        elif smt is SMT.FULL_CORE:
            cores = sizes.get(i, [])
            count = min(sum(cores), spare, left.get(i, 0) // 1000)
            if cores and min(cores) == max(cores):
                count -= count % cores[0]
        else:
            count = min((cpus.bits & free.bits).bit_count(), spare)
        found[i] = min(count, left.get(i, 0) // 1000)
    return found


def _core_sizes(machine: Machine, free: CPUSet) -> dict[int, list[int]]:
    """By NUMA node, the threads of each wholly free core, largest first."""
    index: AllocatorIndex = machine.index
    whole = index.whole(free.bits)
    sizes: dict[int, list[int]] = {}
    for core in machine.topology.cores.values():
        if core.numa_node is not None and core.cpus and whole >> core.cpus.first & 1:
            sizes.setdefault(core.numa_node, []).append(len(core.cpus))
    for cores in sizes.values():
        cores.sort(reverse=True)
    return sizes


def loads_of(state: NodeState) -> dict[int, Load]:
    """CPU to the load of the exclusive container that owns it, where it has one."""
    return {
        cpu: a.load
        for a in state.allocations.values()
        if a.owned and a.load is not None
        for cpu in a.cpus
    }


def take_beside_others(
    case: Case, request: TakeRequest, limits: Mapping[int, int]
) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
    """Choose CPUs beside those that others have and use, on no NUMA node more than can be owned.

    CPUs of soft lists are left out where others on the same NUMA nodes are as good. The kubelet's
    order, CPUs that are preferred and loads to be paired with take no notice of lists. CPUs that
    belong to no NUMA node have no limit.
    """
    machine, state = case.machine, case.state
    request = replace(
        request,
        loads=loads_of(state) if request.smt is SMT.PAIR else {},
        busy=state.withheld,
        last=given_last(state, machine.topology, machine.settings),
        listed=listed_softly(state, machine.topology),
    )
    taken = _take_within(machine, request, limits)
    if (
        not isinstance(taken, ChosenCPUs)
        or not (taken.cpus - request.held) & request.listed
        or request.prefer
        or request.smt is SMT.PAIR
        or request.settings.cpu_order is CPUOrder.KUBELET
    ):
        return taken
    rest = replace(request, available=request.available - request.listed)
    others = _take_within(machine, rest, limits)
    alike = isinstance(others, ChosenCPUs) and _sort(machine, others) == _sort(machine, taken)
    return others if alike else taken


def _sort(machine: Machine, chosen: ChosenCPUs) -> tuple[object, ...]:
    """What makes some CPUs as good as others."""
    ix: AllocatorIndex = machine.index
    cpus = chosen.cpus.bits
    return (
        machine.topology.numa_of(chosen.cpus),
        sum(1 for group in ix.l3_groups if group.bits & cpus),
        ix.touched(cpus).bit_count(),
        *((cpus & kind).bit_count() for kind in (ix.isolated, ix.nohz_full, ix.efficient)),
    )


def _take_within(
    machine: Machine, request: TakeRequest, limits: Mapping[int, int]
) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
    topology = machine.topology
    taken = take_cpus(topology, request, machine.index)
    for _ in limits:
        over = _over(machine, request, taken, limits) if isinstance(taken, ChosenCPUs) else None
        if over is None:
            return taken
        # Of that NUMA node leave what the allocator itself would take first.
        here = machine.node_cpus[over]
        held = request.held & here
        keep = take_cpus(
            topology,
            replace(
                request,
                count=max(limits[over], len(held)),
                available=request.available & here,
                prefer=request.prefer & here,
                held=held,
                affinity=None,
            ),
            machine.index,
        )
        rest = request.available - here
        if isinstance(keep, ChosenCPUs):
            rest = rest | keep.cpus | keep.idle
        request = replace(request, available=rest)
        taken = take_cpus(topology, request, machine.index)
    return taken


def _over(
    machine: Machine, request: TakeRequest, chosen: ChosenCPUs, limits: Mapping[int, int]
) -> int | None:
    """The lowest NUMA node of which too much was chosen."""
    for i in sorted(limits):
        bits = machine.node_cpus[i].bits
        count = (chosen.cpus.bits & bits).bit_count()
        if count > max(limits[i], (request.held.bits & bits).bit_count()):
            return i
    return None


def share_out(milli: int, numa_nodes: NUMASet, left: Mapping[int, int]) -> dict[int, int]:
    """Book a shared container on the NUMA nodes it may run on: evenly, as far as each has that.

    It may run on any of them, so one that is nearly full gives what it has and the others the
    rest. What fits nowhere (it was let in all the same) is spread evenly.
    """
    if len(numa_nodes) == 1:
        return {numa_nodes.first: milli}
    allocated = dict.fromkeys(numa_nodes, 0)
    rest = milli
    # Least room first, then the lowest id: what a small one cannot give is shared by the larger.
    order = sorted(numa_nodes, key=lambda i: (left.get(i, 0), i))
    for n, i in enumerate(order):
        allocated[i] = min(left.get(i, 0), -(-rest // (len(order) - n)))
        rest -= allocated[i]
    each, odd = divmod(rest, len(order)) if order else (0, 0)
    for n, i in enumerate(sorted(order)):
        allocated[i] += each + (1 if n < odd else 0)
    return allocated


def grant_refused(case: Case, who: str, cpus: CPUSet, idle: CPUSet) -> Refusal | None:
    """Why a container may not own these CPUs: the floor of the pool, or a quota."""
    withheld = cpus | idle
    return below_floor(case.machine, case.state, who, withheld) or _over_quota(
        case, who, withheld, idle
    )


# --- the floor of the shared pool -----------------------------------------------------------------


def ownable(machine: Machine, state: NodeState) -> CPUSet:
    """CPUs that a container may own, before the floors of the pool are looked at."""
    settings = machine.settings
    bits = state.grantable(machine.topology, settings)
    if settings.isolated is IsolatedCPUs.ONLY:
        bits &= machine.topology.isolated.bits
    return CPUSet.from_bits(bits & ~(settings.reserved_cpus.bits | state.listed_cpus.bits))


def ownable_at_most(machine: Machine, state: NodeState, smt: SMT) -> int:
    """How many CPUs one more container could own at all, so that the pool keeps its floor.

    Where cores differ in their threads, fewer are named for ``isolate`` than might be had.
    """
    pool = state.pool(machine.topology, machine.settings)
    apart = ownable(machine, state) - pool
    only = machine.isolated and machine.settings.isolated is IsolatedCPUs.ONLY
    most = len(apart) + (0 if only else max(0, len(pool) - machine.floor))
    threads = machine.topology.threads_per_core
    if smt is SMT.ISOLATE:
        return most // threads
    uniform = len({len(offsets) for _, offsets in machine.index.shapes}) == 1
    return most - most % threads if smt is SMT.FULL_CORE and uniform else most


def floor_text(machine: Machine, state: NodeState, smt: SMT, count: int) -> str:
    """What the shared pool keeps, where no more than that is short of so many exclusive CPUs."""
    most = ownable_at_most(machine, state, smt)
    each = machine.topology.threads_per_core if smt is SMT.ISOLATE else 1
    if not most < count <= len(ownable(machine, state)) // each:
        return ""
    return f"; the shared pool keeps {counted(machine.floor, 'CPU')} (sharedPool.cpus)"


def kept_for_pool(machine: Machine, state: NodeState, pool: CPUSet, free: CPUSet) -> CPUSet:
    """Free CPUs that no exclusive grant may take, so that each NUMA node keeps its floor.

    Where isolated CPUs may be owned instead, CPUs are also kept for the floor of the machine and
    for what is promised to containers that share. Kept are those that spare most whole cores:
    threads of cores in use first, then from the highest core and CPU down. The same CPUs from one
    decision to the next, while they last.
    """
    if not (machine.numa_floors or machine.isolated):
        return NO_CPUS
    topology, kept = machine.topology, 0
    in_use = machine.index.members(machine.index.touched(topology.allowed.bits & ~free.bits))

    def keep(here: CPUSet, most: int) -> int:
        order = sorted(here, key=lambda i: (not in_use >> i & 1, -topology.cpus[i].core, -i))
        return sum(1 << i for i in order[: max(0, most)])

    for i, cpus in machine.node_cpus.items():
        here = pool & cpus
        floor_here = machine.numa_floors.get(i, 0)
        if machine.isolated:
            promised = -(-state.shared_milli(i, cpus) // max(1, machine.serves(1)))
            floor_here = max(floor_here, promised)
        kept |= keep(here & free, floor_here - len(here - free))
    if machine.isolated:
        stays = CPUSet.from_bits(kept) | (pool - free)
        kept |= keep(pool - stays, machine.floor - len(stays))
    return CPUSet.from_bits(kept)


def below_floor(machine: Machine, state: NodeState, who: str, withheld: CPUSet) -> Refusal | None:
    """Why these CPUs stay in the shared pool; None where it can lose them."""
    pool = state.pool(machine.topology, machine.settings)
    withheld = withheld & pool
    if not withheld:
        return None  # isolated CPUs are no part of it
    places: list[tuple[CPUSet, int, NUMASet | None]] = [(pool, machine.floor, None)]
    for i, keep in machine.numa_floors.items():
        if withheld & machine.node_cpus[i]:
            places.append((pool & machine.node_cpus[i], keep, NUMASet([i])))
    for here, keep, node in places:
        left = len(here - withheld)
        if left >= keep:
            continue
        where = "" if node is None else f" of {numa_text(node)}"
        key = "sharedPool.cpus" if node is None else "sharedPool.numaNodeCPUs"
        pool_text = f"the shared pool{where or ' of the machine'}"
        reason, rule = "SharedPoolFloor", f"{pool_text} keeps {counted(keep, 'CPU')}"
        if node is None and not left:
            reason, rule, key = "SharedPoolEmpty", "the shared pool is never empty", ""
        return Refusal(
            reason=reason,
            message=f"{who} would leave {left} of the {counted(len(here), 'CPU')} in the shared "
            f"pool{where} for other containers; expected at least {keep} to stay"
            + (f" ({key})" if key else "")
            + holders_text(state, node),
            rule=rule,
            widenable=node is not None,
        )
    return None


# --- quotas ---------------------------------------------------------------------------------------


def _over_quota(case: Case, who: str, withheld: CPUSet, idle: CPUSet) -> Refusal | None:
    machine, state, namespace = case.machine, case.state, case.pod.namespace
    limits, every = machine.settings.limits, state.allocations.values()
    used, more = len(state.owned | state.idle), len(withheld)

    def over(
        name: str, what: str, amount: CPUAmount, used: int, more: int, holders: Iterable[Allocation]
    ) -> Refusal | None:
        limit = amount.of(machine.cpu_count)
        if not more or amount == EVERYTHING or used + more <= limit:
            return None
        return _refused(who, name, what, limit, used, more, holders)

    idlers, owners = (a for a in every if a.idle), (a for a in every if a.owned)
    amount = limits.quota.exclusive
    refused = over(
        "quotas.idleCPUs", "idle siblings", limits.idle, len(state.idle), len(idle), idlers
    ) or over("quotas.exclusiveCPUs", "exclusive CPUs", amount, used, more, owners)
    entry = _entry(machine, case.pod)
    if refused is not None or entry is None:
        return refused
    mine = [a for a in every if a.owned and a.namespace == namespace]
    used, what = (
        len(union(a.cpus | a.idle for a in mine)),
        f"exclusive CPUs of namespace {namespace}",
    )
    return over(f"{entry.name}.exclusiveCPUs", what, entry.quota.exclusive, used, more, mine)


def list_refused(case: Case, who: str, cpus: CPUSet) -> Refusal | None:
    """Why a container may not list these CPUs, which could not be owned any more.

    A list that the request pays for is within every quota; soft ones are never refused.
    """
    machine, state, pod = case.machine, case.state, case.pod
    if cpus <= state.listed_cpus or case.demand.cpu_paid_milli >= 1000 * len(cpus):
        return None
    # Alone, reserved CPUs withhold nothing: they cannot be owned anyway.
    reserved = machine.settings.reserved_cpus
    every = [state.allocations[i] for i in state.listed]
    entry = _entry(machine, pod)
    quotas = [("quotas.listedCPUs", "listed CPUs", machine.settings.limits.quota.listed, every)]
    if entry is not None and entry.quota.listed != EVERYTHING:
        mine = [a for a in every if a.namespace == pod.namespace]
        what = f"listed CPUs of namespace {pod.namespace}"
        quotas.append((f"{entry.name}.listedCPUs", what, entry.quota.listed, mine))
    for name, what, amount, holders in quotas:
        used = union(a.cpus for a in holders) - reserved
        limit, more = _listed_at_most(machine, amount), len(cpus - reserved - used)
        if len(used) + more > limit:
            return _refused(who, name, what, limit, len(used), more, holders)
    return None


def _listed_at_most(machine: Machine, amount: CPUAmount) -> int:
    """A quota of lists; a part of a small machine is at least a core, and two CPUs."""
    count = amount.of(machine.cpu_count)
    return max(count, 2, machine.topology.threads_per_core) if amount.percent else count


def _entry(machine: Machine, pod: PodSandbox) -> NamespaceQuota | None:
    return next(
        (
            entry
            for entry in machine.settings.limits.namespaces
            if any(fnmatchcase(pod.namespace, p) for p in entry.namespaces)
        ),
        None,
    )


def _refused(
    who: str,
    name: str,
    what: str,
    limit: int,
    used: int,
    wanted: int,
    holders: Iterable[Allocation],
) -> Refusal:
    return Refusal(
        reason="QuotaExceeded",
        message=f"{who} would be over the quota of {limit} {what} ({name}): {used} are used and "
        f"{wanted} are asked for, expected at most {max(0, limit - used)} more{named(holders)}",
        rule=f"{name} allows {limit} {what}",
    )


def kept_for_groups(
    machine: Machine,
    state: NodeState,
    pool: CPUSet,
    free: CPUSet,
    held: CPUSet = NO_CPUS,
    *,
    pair: bool = False,
) -> CPUSet:
    """CPUs that are not given away, so that no group of shared containers leaves its NUMA nodes.

    One for each group that has nothing there but free CPUs; one may do for several. With ``pair``
    the other threads of cores in use are what the container looks for.
    """
    kept = 0
    for key in sorted(state.groups):
        if key < 0:
            continue
        theirs = pool.bits & machine.topology.bits_of(key)
        spare = theirs & ~held.bits
        if not spare or theirs & ~free.bits or spare & kept:
            continue
        # The least loss is a thread whose core is in use already, or one of a whole core where
        # such threads are wanted; then the highest number.
        whole = machine.index.members(machine.index.whole(free.bits))
        bits = spare & (whole if pair else ~whole) or spare
        kept |= 1 << bits.bit_length() - 1
    return CPUSet.from_bits(kept)


class SlotCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive CPUs, counted.

    Attributes:
        held: by NUMA node, CPUs of containers that hold slots for them.
    """

    held: dict[int, int]
    free: dict[int, int]
    holders: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        """What the scheduler may count."""
        return sum(self.held.values()) + sum(self.free.values())


def slot_capacity(machine: Machine, state: NodeState) -> SlotCapacity:
    """Count what is held with slots and what could still be given.

    The scheduler has one number for the whole machine and subtracts what pods request, also those
    that have not started yet: a container that starts moves from the second part to the first, and
    the sum stays. Exclusive CPUs without slots, idle siblings, what is allocated to containers that
    share, and the floors of the shared pool are in neither.

    What becomes of siblings is counted as the configured defaults say; rules and annotations that
    say something else cost more than is counted here (``smt: isolate``). Quotas of single
    namespaces are the business of a ResourceQuota.
    """
    holders = tuple(a for _, a in sorted(state.allocations.items()) if a.slots)
    held = {
        i: sum((a.cpus.bits & cpus.bits).bit_count() for a in holders)
        for i, cpus in machine.node_cpus.items()
    }
    free, most = _left(machine, state)
    # What is too much for the machine as a whole is taken from where most is free, of equals from
    # the highest NUMA node.
    for _ in range(sum(free.values()) - max(0, most)):
        free[max(free, key=lambda i: (free[i], i))] -= 1
    return SlotCapacity(held=held, free=free, holders=holders)


def largest(machine: Machine, state: NodeState) -> dict[int, int]:
    """By NUMA node, how many exclusive CPUs one more container could have there and nowhere else.

    `slot_capacity` splits what the machine as a whole can give between its NUMA nodes, so that the
    sum is right; here each NUMA node is counted as if the container went to it.
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


def _left(machine: Machine, state: NodeState) -> tuple[dict[int, int], int]:
    """What each NUMA node has left, and what the machine as a whole can give."""
    smt = SMT(machine.settings.defaults.get("smt", SMT.ANY))
    pool = state.pool(machine.topology, machine.settings)
    free = ownable(machine, state)
    free = free - kept_for_pool(machine, state, pool, free)
    free = free - kept_for_groups(machine, state, pool, free, pair=smt is SMT.PAIR)
    left = exclusive_left(machine, state, free, smt, machine.cpu_left(state))
    most = min(ownable_at_most(machine, state, smt), _quota_left(machine, state, smt))
    return left, most


def _quota_left(machine: Machine, state: NodeState, smt: SMT) -> int:
    limits, total = machine.settings.limits, machine.cpu_count
    left = limits.quota.exclusive.of(total) - len(state.owned | state.idle)
    if smt is SMT.ISOLATE:
        threads = machine.topology.threads_per_core
        left //= threads
        if threads > 1:
            left = min(left, (limits.idle.of(total) - len(state.idle)) // (threads - 1))
    return left
