"""Which of equally good NUMA nodes first: ``strategy``.

See docs/adr/0031-spread-by-the-scarcest-share.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nri_numa.engine.align.hints import Amounts, together
from nri_numa.engine.case import Case
from nri_numa.engine.cpus.smt import partners
from nri_numa.engine.others.elsewhere import given_last, listed_softly
from nri_numa.engine.place.needs import ResourceTable, loads_of
from nri_numa.engine.values.workload import SMT, Strategy

WHOLE = 1 << 40
"""What a NUMA node has, when shares of it are compared; a larger number rounds less."""


def rank(case: Case, table: ResourceTable) -> dict[int, int] | None:
    """Rank NUMA nodes by strategy: 0 is tried first among equally good ones.

    Order: NUMA nodes that would hold the container by themselves before others; those that the
    scheduler held for it; for CPUs of its own those with enough that no container is pinned to;
    those with enough isolated CPUs, or others, as set; for ``smt: pair`` those with enough beside
    opposite loads; those with CPUs that the pod had before (the kubelet's rule: its hints
    contain all CPUs of finished init containers); for containers without devices those without
    free ones; then by strategy, then the lowest id.

    * ``spread``: the least share in use, once the container is there, of whatever is scarcest
      there (CPUs, memory, huge pages); then of the next scarcest.
    * ``pack``: the reverse: the fullest that fits.
    * ``most-left``: the most memory left; without memory, and among equals, the most CPU left.

    Returns:
        None when ties are broken as the kubelet does.
    """
    machine, settings = case.machine, case.machine.settings
    if settings.kubelet_ties:
        return None
    asked = _asked(case, table)
    need, ids = case.demand.exclusive_cpus, machine.place_ids
    quiet = _quiet(case, table) if need else None
    kernels = (_suiting_isolation(case, table) or None) if need else None
    beside = (_beside_opposite(case, table) or None) if need else None
    placed = case.requested.placed.bits
    former = table.former.bits
    beside_devices: Collection[int] = ()
    if case.reading is not None and not (case.container.devices or case.container.pod_devices):
        beside_devices = [i for i, free in case.reading.devices.items() if free]
    short = {i for amount, left, _ in asked for i in ids if left[i] < amount}
    keys = [
        (
            i in short,
            placed != 0 and not placed >> i & 1,
            quiet is not None and quiet[i] < need,
            kernels is not None and kernels[i] < need,
            beside is not None and beside[i] < need,
            former != 0 and not machine.node_cpus[i].bits & former,
            i in beside_devices,
            measure,
            i,
        )
        for i, measure in zip(ids, measures(asked, ids, settings.strategy), strict=True)
    ]
    keys.sort()
    return {key[-1]: place for place, key in enumerate(keys)}


Asked = tuple[int, Amounts, Amounts]
"""How much is needed, what is left and what there is, by NUMA node."""


def _asked(case: Case, table: ResourceTable) -> list[Asked]:
    """Everything that is asked for: CPUs, memory, huge pages."""
    machine, demand = case.machine, case.demand
    if demand.exclusive_cpus:
        asked: list[Asked] = [(demand.exclusive_cpus, table.free_by_node, machine.cpu_counts)]
    else:
        asked = [(demand.cpu_milli, table.cpu_left, machine.shared_total)]
    near = machine.tiers.near
    if demand.memory_bytes and table.memory_left:
        left, there = together(near, table.memory_left), together(near, machine.memory_capacity)
        asked.append((demand.memory_bytes, left, there))
    for size, left in sorted(table.hugepages_left.items()):
        there = together(near, machine.hugepages_capacity(size))
        asked.append((demand.hugepages[size], together(near, left), there))
    return asked


def measures(asked: list[Asked], ids: tuple[int, ...], strategy: Strategy) -> list[tuple[int, ...]]:
    """By NUMA node, what its place among others is worked out from; the least is tried first.

    Args:
        asked: CPUs first, then memory, then huge pages.
        ids: NUMA nodes.
        strategy: see `rank`.
    """
    if strategy is Strategy.MOST_LEFT:
        by = asked[1:2] + asked[:1]
        return [tuple([-left[i] for _, left, _ in by]) for i in ids]
    # The shares of each resource that would be in use, largest first.
    columns = [
        [(there[i] - left[i] + need) * WHOLE // there[i] if there[i] > 0 else WHOLE for i in ids]
        for need, left, there in asked
    ]
    rows: list[tuple[int, ...]]
    if len(columns) == 2:  # CPUs and memory: every second container
        rows = [(a, b) if a >= b else (b, a) for a, b in zip(*columns, strict=True)]
    else:
        rows = [tuple(sorted(row, reverse=True)) for row in zip(*columns, strict=True)]
    if strategy is Strategy.PACK:
        return [tuple([-share for share in row]) for row in rows]
    return rows


def _quiet(case: Case, table: ResourceTable) -> Mapping[int, int] | None:
    """By NUMA node, free CPUs that no container is pinned to, or may be; None where all are."""
    machine, state = case.machine, case.state
    last = given_last(state, machine.topology, machine.settings)
    last = last | listed_softly(state, machine.topology)
    if not last:
        return None
    bits = table.free.bits & ~last.bits
    return {i: (cpus.bits & bits).bit_count() for i, cpus in machine.node_cpus.items()}


def _suiting_isolation(case: Case, table: ResourceTable) -> Mapping[int, int]:
    """By NUMA node, free CPUs that are isolated, or are not, as ``isolatedCPUs`` says."""
    machine = case.machine
    good = machine.index.suiting_isolation(machine.settings) & table.free.bits
    if good == table.free.bits:
        return {}
    return {i: (cpus.bits & good).bit_count() for i, cpus in machine.node_cpus.items()}


def _beside_opposite(case: Case, table: ResourceTable) -> Mapping[int, int]:
    """By NUMA node, free CPUs of cores that run opposite loads only; for ``smt: pair``."""
    if case.smt is not SMT.PAIR:
        return {}
    machine = case.machine
    known = partners(case.requested.load, loads_of(case.state))
    index = machine.index
    cores = index.touched(known.opposite) & ~index.touched(known.same)
    bits = index.members(cores) & table.free.bits
    return (
        {i: (cpus.bits & bits).bit_count() for i, cpus in machine.node_cpus.items()} if bits else {}
    )
