"""Does a pod fit on a node, on which of its NUMA nodes, and if not, what is missing?

The judge is the engine: `nri_numa.engine.align.policies.align` merges and judges as it does on the
node, with the same strategy among NUMA nodes that suit equally well. What the node alone knows, the
numbers of the CPUs, is replaced by counts: where free CPUs are scattered over cores, a yes here can
still become a no there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nri_numa.engine.align.hints import HintDemand, ResourceDemand
from nri_numa.engine.align.policies import align
from nri_numa.engine.place.computed import Asked, measures
from nri_numa.engine.values.workload import SMT, OnFailure, Policy, Scope, Strategy
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.machine.model import counted
from nri_numa.scheduler.published import Table
from nri_numa.scheduler.room import Room, kept_of, places_of
from nri_numa.scheduler.shortage import STRICT, part_of_a_core, short
from nri_numa.scheduler.verdict import Fits, Short, Verdict
from nri_numa.scheduler.wish import Need, Wish


def judge(table: Table, wish: Wish, strategy: Strategy) -> Verdict:
    """Judge one node.

    Args:
        table: of the node, with everything taken away that is promised.
        wish: of the pod; one that is not wrong.
        strategy: which of equally good NUMA nodes.
    """
    found: Verdict = Fits()
    if wish.needs:
        needs = wish.needs if wish.together is None else (wish.together,)
        found = _place_all(table, needs, strategy)
        if isinstance(found, Fits):
            found = _in_all(table, found)
        if isinstance(found, Short):
            return found
        if wish.together is not None:
            together = found.places[0][1] if found.places else NO_NUMA_NODES
            found = replace(found, places=tuple((n.container, together) for n in wish.needs))
    if wish.kubelets and table.policy is not Policy.NONE:
        kubelets = tuple(_by_kubelet(need, table) for need in wish.kubelets)
        if table.scope is Scope.POD and len(kubelets) > 1:
            kubelets = (_sum(kubelets),)
        theirs = _place_all(table, kubelets, strategy)
        if isinstance(theirs, Short) or not wish.needs:
            return replace(theirs, places=()) if isinstance(theirs, Fits) else theirs
    return found


def _in_all(table: Table, found: Fits) -> Verdict:
    """The same, or that the node as a whole has too few for several containers or NUMA nodes."""
    asked = sum(found.charge.exclusive) if found.charge is not None else 0
    if table.together is None or asked <= table.together:
        return found
    return Short(counted(asked, "exclusive CPU"), unit="cpus", most=table.together)


def _by_kubelet(need: Need, table: Table) -> Need:
    """A need as the kubelet of this node sees it."""
    amounts = need.amounts if table.aligns_memory else ()
    return replace(
        need,
        policy=table.policy,
        exclusive=need.exclusive if table.aligns_cpus else 0,
        amounts=amounts,
        paid=amounts,
        on_failure=OnFailure.REJECT if table.policy in STRICT else OnFailure.WIDEN,
    )


def _sum(needs: Sequence[Need]) -> Need:
    staying, ending = [n for n in needs if not n.ends], [n for n in needs if n.ends]
    names = sorted({name for need in needs for name, _ in need.amounts})

    def peak(of: dict[int, int]) -> int:
        return max(sum(of[id(n)] for n in staying), max((of[id(n)] for n in ending), default=0))

    amounts = tuple(
        (name, peak({id(n): dict(n.amounts).get(name, 0) for n in needs})) for name in names
    )
    count = peak({id(n): n.exclusive for n in needs})
    return replace(
        needs[0], container="", ends=False, exclusive=count, amounts=amounts, paid=amounts
    )


def _place_all(table: Table, needs: Sequence[Need], strategy: Strategy) -> Verdict:
    room = Room(table)
    places: list[tuple[str, NUMASet]] = []
    together = 0
    width, wider = 0, False
    for need in needs:
        inside = room.copy() if need.ends else room
        found = _place(inside, need, strategy)
        if isinstance(found, Short):
            if need.on_failure is not OnFailure.UNPINNED:
                return found
            wider = True
            continue
        numa_nodes, ideal = found
        together |= numa_nodes.bits
        width, wider = max(width, len(numa_nodes)), wider or not ideal
        places.append((need.container, numa_nodes))
    used = [place for place, i in enumerate(table.ids) if together >> i & 1]
    return Fits(
        places=tuple(places),
        charge=room.charge(),
        width=width,
        wider=wider,
        left=min((room.scarcest(place) for place in used), default=1000),
        factor=min((table.factor[place] for place in used), default=1000),
    )


def _place(room: Room, need: Need, strategy: Strategy) -> tuple[NUMASet, bool] | Short:
    """Choose NUMA nodes for one need, and take what it is paid for there."""
    table, threads = room.table, room.table.threads
    if need.smt is SMT.FULL_CORE and need.exclusive % threads:
        return part_of_a_core(need, threads)
    kept = kept_of(need, table)
    policy = Policy.BEST_EFFORT if need.policy is Policy.NONE else need.policy
    demands, asked = _demands(room, need, kept)
    order = measures(asked, table.ids, strategy)
    keys = sorted(
        (any(left[i] < amount for amount, left, _ in asked), measure, i)
        for i, measure in zip(table.ids, order, strict=True)
    )
    ranks = {key[-1]: place for place, key in enumerate(keys)}
    if not keys[0][0] and table.alike:
        # One NUMA node has room for all of it: what the engine would say, at a tenth of the cost.
        place = table.ids.index(keys[0][-1])
        room.take([place], need, kept)
        return NUMASet([keys[0][-1]]), True
    found = align(
        demands,
        numa_ids=table.numa_ids,
        policy=policy,
        distance=table.distance,
        rank=ranks,
        one_width=True,
    )
    preferred = found.preferred
    if not found.admitted:
        if need.on_failure is not OnFailure.WIDEN:
            return short(room, need, kept)
        policy, preferred = Policy.BEST_EFFORT, False
        found = align(
            demands,
            numa_ids=table.numa_ids,
            policy=policy,
            distance=table.distance,
            rank=ranks,
            one_width=True,
        )
    chosen = table.numa_ids if found.affinity is None else found.affinity
    for name, amount, column in room.columns(need, kept):
        if name == "millicpu":
            continue  # CPU time is shared: what is short makes it slow, and nothing is refused
        if sum(column[p] for p in places_of(table, chosen)) >= amount:
            continue
        if policy in STRICT or sum(column) < amount:
            return short(room, need, kept)
        chosen, preferred = table.numa_ids, False
    # The best first, then by id.
    room.take(sorted(places_of(table, chosen), key=lambda p: ranks[table.ids[p]]), need, kept)
    return chosen, preferred


def _demands(room: Room, need: Need, kept: int) -> tuple[list[HintDemand], list[Asked]]:
    """What the engine is asked, as it asks itself in `nri_numa.engine.place.needs`."""
    table = room.table
    demands: list[HintDemand] = []
    asked: list[Asked] = []
    for name, amount, column in room.columns(need, kept):
        if name in ("cpus", "millicpu"):
            there = room.by_id((table.exclusive if name == "cpus" else table.cpu).there)
            least = amount if name == "cpus" else max(1, amount)
            share, resource, unit = None, "cpu", name
        else:
            there = room.by_id(room.there.get(name, [0] * len(table.ids)))
            least, share, resource, unit = amount, "memory", name, "bytes"
        left = room.by_id(column)
        # An empty NUMA node has what it has left at least, whatever was written.
        there = {i: max(n, left[i]) for i, n in there.items()}
        demands.append(
            ResourceDemand(
                resource=resource,
                need=least,
                capacity=there,
                available=left,
                share=share,
                unit=unit,
            )
        )
        asked.append((least, left, there))
    return demands, asked


def surely(table: Table, wish: Wish) -> Short | None:
    """The cheap look: a reason why a pod cannot fit, found without choosing NUMA nodes.

    Only what no policy could change is looked at, so None says nothing.
    """
    if wish.together is not None:
        needs: tuple[Need, ...] = (wish.together,)
    else:
        needs = wish.needs
    for need in needs:
        if not need.exclusive or need.on_failure is not OnFailure.REJECT:
            continue
        left = table.exclusive.left
        single = need.policy is Policy.SINGLE_NUMA_NODE
        if (max(left) if single else sum(left)) < need.exclusive:
            room = Room(table)
            return short(room, need, kept_of(need, table))
    return None
