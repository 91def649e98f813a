"""How much of the machine may be withheld from others: quotas, and the floor of the shared pool.

CPUs are withheld from the shared pool when they are owned, or kept idle beside owned ones; listed
CPUs (``numacpu`` without ``cpus: exclusive``) stay in the pool, and nobody can own them unless the
list is soft. Quotas are
looked at when something new is granted: who holds more than a quota that was lowered keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from nri_numa.engine.accounting import shared_milli
from nri_numa.engine.case import Case
from nri_numa.engine.decision import Machine
from nri_numa.engine.others.holders import holders_text, named
from nri_numa.engine.state import Allocation, NodeState, union
from nri_numa.engine.values.limits import EVERYTHING, CPUAmount, NamespaceQuota
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.settings import IsolatedCPUs
from nri_numa.engine.values.workload import SMT, PodSandbox
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.machine.model import counted


def grant_refused(case: Case, who: str, cpus: CPUSet, idle: CPUSet) -> Refusal | None:
    """Why a container may not own these CPUs: the floor of the pool, or a quota.

    Args:
        case: whose container it is.
        who: the start of the sentence.
        cpus: what it would own.
        idle: the siblings that would be kept idle for it.
    """
    withheld = cpus | idle
    return _below_floor(case.machine, case.state, who, withheld) or _over_quota(
        case, who, withheld, idle
    )


def cpu_count(machine: Machine) -> int:
    """What percentages are of: CPUs that containers may use, or could if they were online."""
    topology = machine.topology
    return len(topology.present - (topology.online - topology.allowed))


# --- the floor of the shared pool -----------------------------------------------------------------


def floor(machine: Machine) -> int:
    """CPUs that stay in the shared pool of the machine; isolated ones do not count.

    Unless it is configured: where reserved CPUs are part of the pool, the operator has said what
    the system needs, and one is enough; else a twentieth of the CPUs, at least one.
    """
    settings, total = machine.settings, cpu_count(machine) - len(machine.isolated)
    if settings.limits.pool is not None:
        return max(1, settings.limits.pool.of(total))
    if settings.reserved_cpus and not settings.strict_reserved:
        return 1
    return max(1, total // 20)


def ownable(machine: Machine, state: NodeState) -> CPUSet:
    """CPUs that a container may own, before the floors of the pool are looked at."""
    settings = machine.settings
    bits = state.grantable(machine.topology, settings).bits
    if settings.isolated is IsolatedCPUs.ONLY:
        bits &= machine.topology.isolated.bits
    return CPUSet.from_bits(bits & ~(settings.reserved_cpus.bits | state.listed_cpus.bits))


def ownable_at_most(machine: Machine, state: NodeState, smt: SMT) -> int:
    """How many CPUs one more container could own at all, so that the pool keeps its floor.

    Where cores differ in their threads, fewer are named for ``isolate`` than might be had.

    Args:
        machine: where.
        state: as it is.
        smt: what is to become of siblings.
    """
    pool = state.pool(machine.topology, machine.settings)
    apart = ownable(machine, state) - pool
    only = machine.isolated and machine.settings.isolated is IsolatedCPUs.ONLY
    most = len(apart) + (0 if only else max(0, len(pool) - floor(machine)))
    threads = machine.topology.threads_per_core
    if smt is SMT.ISOLATE:
        return most // threads
    uniform = len({len(offsets) for _, offsets in machine.index.shapes}) == 1
    return most - most % threads if smt is SMT.FULL_CORE and uniform else most


def kept_for_pool(machine: Machine, state: NodeState, pool: CPUSet, free: CPUSet) -> CPUSet:
    """Free CPUs that no exclusive grant may take, so that each NUMA node keeps its floor.

    Where isolated CPUs may be owned instead, CPUs are also kept for the floor of the machine and
    for what is promised to containers that share.

    Args:
        machine: topology and settings.
        state: whose containers share.
        pool: the shared pool.
        free: what could be owned.

    Returns:
        Those that spare most whole cores: threads of cores in use first, then from the highest
        core and CPU down. The same CPUs from one decision to the next, while they last.
    """
    amount = machine.settings.limits.numa_pool
    if amount == CPUAmount(0) and not machine.isolated:
        return NO_CPUS
    topology, kept = machine.topology, 0
    in_use = machine.index.members(machine.index.touched(topology.allowed.bits & ~free.bits))

    def keep(here: CPUSet, most: int) -> int:
        order = sorted(here, key=lambda i: (not in_use >> i & 1, -topology.cpus[i].core, -i))
        return sum(1 << i for i in order[: max(0, most)])

    for i, cpus in machine.node_cpus.items():
        here = pool & cpus
        floor_here = amount.of(len(cpus - machine.isolated))
        if machine.isolated:
            promised = -(-shared_milli(state, i, cpus) // max(1, machine.serves(1)))
            floor_here = max(floor_here, promised)
        kept |= keep(here & free, floor_here - len(here - free))
    if machine.isolated:
        stays = CPUSet.from_bits(kept) | (pool - free)
        kept |= keep(pool - stays, floor(machine) - len(stays))
    return CPUSet.from_bits(kept)


def _below_floor(machine: Machine, state: NodeState, who: str, withheld: CPUSet) -> Refusal | None:
    pool = state.pool(machine.topology, machine.settings)
    withheld = withheld & pool
    if not withheld:
        return None  # isolated CPUs are no part of it
    left, keep = pool - withheld, floor(machine)
    if not left:
        return Refusal(
            reason="SharedPoolEmpty",
            message=f"{who} would leave 0 of the {counted(len(pool), 'CPU')} in the shared pool "
            f"for other containers; expected at least {keep} to stay{holders_text(state)}",
            rule="the shared pool is never empty",
        )
    if len(left) < keep:
        return Refusal(
            reason="SharedPoolFloor",
            message=f"{who} would leave {len(left)} of the {counted(len(pool), 'CPU')} in the "
            f"shared pool for other containers; expected at least {keep} to stay (sharedPool.cpus)"
            + holders_text(state),
            rule=f"the shared pool of the machine keeps {counted(keep, 'CPU')}",
        )
    amount = machine.settings.limits.numa_pool
    for i, cpus in machine.node_cpus.items():
        keep = amount.of(len(cpus - machine.isolated))
        if withheld & cpus and len(left & cpus) < keep:
            return Refusal(
                reason="SharedPoolFloor",
                message=f"{who} would leave {len(left & cpus)} of the "
                f"{counted(len(pool & cpus), 'CPU')} in the shared pool of NUMA node {i} for other "
                f"containers; expected at least {keep} to stay (sharedPool.numaNodeCPUs)"
                + holders_text(state, NUMASet([i])),
                rule=f"the shared pool of NUMA node {i} keeps {counted(keep, 'CPU')}",
                widenable=True,
            )
    return None


# --- quotas ---------------------------------------------------------------------------------------


def _over_quota(case: Case, who: str, withheld: CPUSet, idle: CPUSet) -> Refusal | None:
    machine, state, pod = case.machine, case.state, case.pod
    limits, total = machine.settings.limits, cpu_count(machine)
    if idle:
        limit = limits.idle.of(total)
        if len(state.idle) + len(idle) > limit:
            return _refused(
                who, "quotas.idleCPUs", "idle siblings", limit, len(state.idle), len(idle),
                (a for a in state.allocations.values() if a.idle),
            )  # fmt: skip
    used = state.owned | state.idle
    if limits.quota.exclusive != EVERYTHING:
        limit = limits.quota.exclusive.of(total)
        if len(used) + len(withheld) > limit:
            return _refused(
                who, "quotas.exclusiveCPUs", "exclusive CPUs", limit, len(used), len(withheld),
                (a for a in state.allocations.values() if a.owned),
            )  # fmt: skip
    entry = _entry(machine, pod)
    if entry is not None and entry.quota.exclusive != EVERYTHING:
        limit = entry.quota.exclusive.of(total)
        mine = [a for a in state.allocations.values() if a.owned and a.namespace == pod.namespace]
        taken = len(union(a.cpus | a.idle for a in mine))
        if taken + len(withheld) > limit:
            what = f"exclusive CPUs of namespace {pod.namespace}"
            name = f"{entry.name}.exclusiveCPUs"
            return _refused(who, name, what, limit, taken, len(withheld), mine)
    return None


def list_refused(case: Case, who: str, cpus: CPUSet) -> Refusal | None:
    """Why a container may not list these CPUs, which nobody could own any more.

    A list that the request pays for is within every quota; soft ones are not asked.

    Args:
        case: whose container it is.
        who: the start of the sentence.
        cpus: the shared list.
    """
    machine, state, pod = case.machine, case.state, case.pod
    new = cpus - state.listed_cpus
    if not new or case.demand.cpu_paid_milli >= 1000 * len(cpus):
        return None
    limits = machine.settings.limits
    # Alone, reserved CPUs withhold nothing: nobody can own them anyway.
    reserved = machine.settings.reserved_cpus
    new, used = new - reserved, state.listed_cpus - reserved
    limit = _listed_at_most(machine, limits.quota.listed)
    if len(used) + len(new) > limit:
        return _refused(
            who, "quotas.listedCPUs", "listed CPUs", limit, len(used), len(new),
            (state.allocations[i] for i in state.listed),
        )  # fmt: skip
    entry = _entry(machine, pod)
    if entry is None or entry.quota.listed == EVERYTHING:
        return None
    mine = [
        state.allocations[i]
        for i in state.listed
        if state.allocations[i].namespace == pod.namespace
    ]
    before = union(a.cpus for a in mine) - reserved
    limit = _listed_at_most(machine, entry.quota.listed)
    asked = len(cpus - reserved - before)
    if len(before) + asked > limit:
        what = f"listed CPUs of namespace {pod.namespace}"
        return _refused(who, f"{entry.name}.listedCPUs", what, limit, len(before), asked, mine)
    return None


def _listed_at_most(machine: Machine, amount: CPUAmount) -> int:
    """A quota of lists; a part of a small machine is at least a core, and two CPUs."""
    count = amount.of(cpu_count(machine))
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
    asked: int,
    holders: Iterable[Allocation],
) -> Refusal:
    return Refusal(
        reason="QuotaExceeded",
        message=f"{who} would be over the quota of {limit} {what} ({name}): {used} are used and "
        f"{asked} are asked for, expected at most {max(0, limit - used)} more{named(holders)}",
        rule=f"{name} allows {limit} {what}",
    )
