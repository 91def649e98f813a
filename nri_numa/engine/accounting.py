"""What is free on each NUMA node: worked out here and nowhere else.

Admission, the text of a refusal, the API, the metrics, the page and the simulation all ask these
functions, so that what is said to be free is admitted, and never more than that.

Two bounds hold for the CPUs of a NUMA node, and the lower one counts:

* the accounting of what was promised,
  ``total × oversale × capacity factor − Σ requests bound to it``;
* what runs there: containers without CPUs of their own run on the shared pool, so they cannot be
  promised more than ``pool × oversale``. CPUs that somebody owns, siblings kept idle for an
  owner, and what the kubelet granted serve nobody else, however much is oversold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nri_numa.engine.cpus.allocator import Taken, TakeRequest, take_cpus
from nri_numa.engine.cpus.index import AllocatorIndex
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import CPUOrder
from nri_numa.engine.values.workload import SMT
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet

if TYPE_CHECKING:
    from nri_numa.engine.cpus.allocator import NotEnoughCPUs, SMTAlignmentRefused
    from nri_numa.engine.decision import Machine


def cpu_left(machine: Machine, state: NodeState) -> dict[int, int]:
    """By NUMA node, thousandths of a CPU that can still be promised; never negative."""
    left = dict(machine.cpu_total)
    for i, charge in state.charges.items():
        if i in left:
            rest = left[i] - charge.cpu_milli
            left[i] = rest if rest > 0 else 0
    withdrawn = state.withheld_bits
    if withdrawn:
        serving = state.grantable(machine.topology, machine.settings).bits
        for i, cpus in machine.node_cpus.items():
            if cpus.bits & withdrawn:
                serves = machine.serves((cpus.bits & serving).bit_count())
                left[i] = max(0, min(left[i], serves - shared_milli(state, i, cpus)))
    return left


def shared_left(machine: Machine, state: NodeState, left: dict[int, int]) -> dict[int, int]:
    """By NUMA node, thousandths that can still be promised to containers that share.

    Args:
        machine: where.
        state: as it is.
        left: `cpu_left`, which counts isolated CPUs that only owners get.
    """
    if not machine.isolated:
        return left
    pool = state.pool(machine.topology, machine.settings).bits
    return {
        i: max(
            0,
            min(
                left[i],
                machine.serves((cpus.bits & pool).bit_count()) - shared_milli(state, i, cpus),
            ),
        )
        for i, cpus in machine.node_cpus.items()
    }


def exclusive_left(
    machine: Machine, state: NodeState, free: CPUSet, smt: SMT, left: Mapping[int, int]
) -> dict[int, int]:
    """By NUMA node, how many CPUs one more container could own there.

    No more than are free, than the accounting has, and than the pool can lose: what is promised
    to containers without CPUs of their own must still run there.

    Args:
        machine: where.
        state: as it is.
        free: CPUs that may be owned: grantable, not reserved, not listed.
        smt: ``full-core`` counts CPUs of whole cores only; ``isolate`` counts cores, each of which
            costs the pool all of its threads.
        left: `cpu_left`.
    """
    pool = state.pool(machine.topology, machine.settings).bits
    sizes = _core_sizes(machine, free) if smt in (SMT.FULL_CORE, SMT.ISOLATE) else {}
    found: dict[int, int] = {}
    for i, cpus in machine.node_cpus.items():
        here = (cpus.bits & pool).bit_count()
        needed = -(-shared_milli(state, i, cpus) // max(1, machine.serves(1)))
        apart = (cpus.bits & free.bits & ~pool).bit_count()
        spare = max(0, here - needed) + apart
        if smt is SMT.ISOLATE:
            count = _how_many(sizes.get(i, []), spare)
        elif smt is SMT.FULL_CORE:
            cores = sizes.get(i, [])
            count = min(sum(cores), spare)
            if cores and min(cores) == max(cores):
                count -= count % cores[0]
        else:
            count = min((cpus.bits & free.bits).bit_count(), spare)
        found[i] = min(count, left.get(i, 0) // 1000)
    return found


def shared_milli(state: NodeState, numa_node: int, cpus: CPUSet) -> int:
    """Thousandths promised on a NUMA node to containers without CPUs of their own.

    An owner is allocated exactly its CPUs. One that is offline is no longer seen among them and
    counts as promised to others, which errs on the safe side.
    """
    owned = (cpus.bits & state.owned.bits).bit_count()
    return max(0, state.charge(numa_node).cpu_milli - 1000 * owned)


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


def _how_many(sizes: list[int], spare: int) -> int:
    """How many cores the pool can lose, whichever are taken."""
    count = 0
    for size in sizes:
        spare -= size
        if spare < 0:
            break
        count += 1
    return count


def take_within(
    machine: Machine, request: TakeRequest, limits: Mapping[int, int]
) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
    """Choose CPUs, on no NUMA node more than can be owned there.

    CPUs of soft lists are left out where others on the same NUMA nodes are as good. The kubelet's
    order, CPUs that are preferred and loads to be paired with take no notice of lists.

    Args:
        machine: where.
        request: what is wanted.
        limits: `exclusive_left`; CPUs that belong to no NUMA node have no limit.
    """
    taken = _take_within(machine, request, limits)
    if (
        not isinstance(taken, Taken)
        or not (taken.cpus - request.held) & request.listed
        or request.prefer
        or request.smt is SMT.PAIR
        or request.settings.cpu_order is CPUOrder.KUBELET
    ):
        return taken
    rest = replace(request, available=request.available - request.listed)
    others = _take_within(machine, rest, limits)
    alike = isinstance(others, Taken) and _sort(machine, others) == _sort(machine, taken)
    return others if alike else taken


def _sort(machine: Machine, taken: Taken) -> tuple[object, ...]:
    """What makes some CPUs as good as others."""
    ix: AllocatorIndex = machine.index
    cpus = taken.cpus.bits
    return (
        machine.topology.numa_of(taken.cpus),
        sum(1 for group in ix.l3_groups if group.bits & cpus),
        ix.touched(cpus).bit_count(),
        *((cpus & kind).bit_count() for kind in (ix.isolated, ix.nohz_full, ix.efficient)),
    )


def _take_within(
    machine: Machine, request: TakeRequest, limits: Mapping[int, int]
) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
    topology = machine.topology
    taken = take_cpus(topology, request, machine.index)
    for _ in limits:
        over = _over(machine, request, taken, limits) if isinstance(taken, Taken) else None
        if over is None:
            return taken
        # Of that NUMA node leave what the allocator itself would take first.
        here = machine.node_cpus[over]
        keep = take_cpus(
            topology,
            replace(
                request,
                count=limits[over],
                available=request.available & here,
                prefer=request.prefer & here,
                held=NO_CPUS,
                affinity=None,
            ),
            machine.index,
        )
        rest = request.available - here
        if isinstance(keep, Taken):
            rest = rest | keep.cpus | keep.idle
        request = replace(request, available=rest)
        taken = take_cpus(topology, request, machine.index)
    return taken


def _over(
    machine: Machine, request: TakeRequest, taken: Taken, limits: Mapping[int, int]
) -> int | None:
    """The lowest NUMA node of which too much was taken."""
    for i in sorted(limits):
        bits = machine.node_cpus[i].bits
        count = (taken.cpus.bits & bits).bit_count()
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
