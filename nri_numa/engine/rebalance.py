"""Rebalancing: moves of running containers after which a rejected container fits.

A strict policy rejects a container if CPUs and memory suffice in sum, but on no single NUMA node.
This module plans moves of other containers, by their own policies, as a value. With movable
containers `admit_by_moving` turns a plan into a decision.

The search order is by cost: bytes to migrate, then number of containers, then their ids. Sums by
NUMA node select candidates; `nri_numa.engine.admit` then verifies them on the state without the
movers. The search is one `StepwiseSearch`, limited to `MAX_SEARCH_WORK` while a request waits. The
limit is in units of work, not in time, so the result is deterministic.

Only containers on one NUMA node move. Containers of a pod with ``scope: pod`` move only if it has
no other container, because a move would separate them.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from heapq import heappop, heappush, nlargest
from itertools import count
from operator import add, le, sub
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.engine.accounting import exclusive_candidate_cpus, max_exclusive_above_pool_floor
from nri_numa.engine.admit import build_adjustment, place_container
from nri_numa.engine.captions import moved_caption
from nri_numa.engine.decision import Admitted, ContainerMove, PlacementRequest, Rejected
from nri_numa.engine.desired import NodeSnapshot, updates_between
from nri_numa.engine.place.needs import exclusive_cpu_count_text, pod_demand
from nri_numa.engine.pod_admission import admission_work, admit_pod, count_expected_containers
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    NO_CHARGE,
    Allocation,
    ContainerKind,
    NodeState,
    charges_with_cpu_removed,
)
from nri_numa.model.cpuset import NO_CPUS, NUMASet
from nri_numa.model.machine import cpus_text, human_milli, join_words, numa_text
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import (
    NO_CHANGED_IDS,
    SMT,
    Bind,
    ChangedStateIds,
    Container,
    ContainerUpdate,
    CPUMode,
    PodSandbox,
    Scope,
)
from nri_numa.text import human_bytes

MAX_MOVES: Final = 3
"""Maximum number of containers that move for one."""
MAX_SEARCH_WORK: Final = 20_000
"""Units of work of a search while a request waits. A unit takes up to a microsecond, so that all of
it takes less than 25 ms on 512 CPUs with 1,000 containers (`python -m bench --only room`)."""
MAX_DEFERRED_SEARCH_WORK: Final = 10 * MAX_SEARCH_WORK
"""Units of work of a search that continues after the answer."""
_LOOK_WORK: Final = 1
"""Units for examining one container, or one pair of a mover and a NUMA node."""
_MOVER_WORK: Final = 4
"""Units for the sums of one mover."""
_PARTIAL_WORK: Final = 12
"""Units for creating a partial plan by displacing a mover, or for expanding one."""


T = TypeVar("T")
SearchSteps = Generator[int, None, T]
"""Generator that yields units of work, before or after doing them, and returns the result."""


class StepwiseSearch(Generic[T]):
    """A search that can run in parts, all on one state.

    Attributes:
        used: units of work so far.
    """

    def __init__(self, generator: SearchSteps[T]) -> None:
        self._steps, self._next, self.used = generator, 0, 0

    def run_steps(self, units: int) -> T | None:
        """Run at least one step, up to ``units`` of work; None if the search has not ended."""
        used = 0
        try:
            while not used or used + self._next <= units:
                self.used, used = self.used + self._next, used + self._next
                self._next = next(self._steps)
        except StopIteration as ended:
            result: T = ended.value
            return result
        return None


class MovePlan(msgspec.Struct, frozen=True):
    """Moves after which a rejected container fits.

    Attributes:
        state: state with the newcomer, and the movers at their targets.
        admitted: decision about the rejected container on the state without the movers.
        moves: moves in the order of placement.
    """

    state: NodeState
    admitted: Admitted
    moves: tuple[ContainerMove, ...]


def plan_moves(
    node: NodeSnapshot,
    rejected: Rejected,
    *,
    exempt: Collection[str] = (),
    max_moves: int = MAX_MOVES,
    running: bool = False,
    purpose: str = "",
) -> SearchSteps[MovePlan | None]:
    """Plan the cheapest moves after which a rejected container fits with its policy; else None.

    Containers in ``exempt`` and of its own pod do not move. Memory of ``running`` containers counts
    on both NUMA nodes until it has migrated, so they free only CPUs. ``purpose`` is recorded in the
    moved allocations.
    """
    requested, demand = rejected.trace.requested, rejected.trace.demand
    if requested is None or demand is None or not rejected.reason.allows_moves:
        return None
    pod_uid, allocations = rejected.trace.pod.uid, node.state.allocations
    yield _LOOK_WORK * len(allocations)
    movers = [
        a
        for i, a in allocations.items()
        if i not in exempt and a.pod_uid != pod_uid and _can_move(node, a)
    ]
    if requested.scope is Scope.POD:
        demand = pod_demand(rejected.trace.pod, demand)
    yield _MOVER_WORK * len(movers)
    search = _PlanSearch(node, demand, movers, max_moves, running=running)
    while (targets := (yield from search.next_plan())) is not None:
        yield _verification_work(node, rejected, len(targets))
        plan = _verify_plan(node, rejected, targets, purpose, running=running)
        if plan is not None:
            return plan
    return None


def admit_by_moving(
    node: NodeSnapshot, rejected: Rejected, exempt: Collection[str] = ()
) -> Admitted | Rejected:
    """Admit a rejected container by moving movable ones; rejected again if that fails.

    Containers in ``exempt`` do not move. If `MAX_SEARCH_WORK` does not suffice, the container is
    rejected, and `continued_move_search` may continue.
    """
    search = StepwiseSearch(_make_room_by_moving(node, rejected, exempt))
    decision = search.run_steps(MAX_SEARCH_WORK)
    return replace(rejected, is_search_spent=True) if decision is None else decision


def continued_move_search(
    node: NodeSnapshot, rejected: Rejected, exempt: Collection[str] = (), *, is_deferred: bool
) -> StepwiseSearch[Admitted | Rejected]:
    """Continue a search that spent its budget, up to `MAX_DEFERRED_SEARCH_WORK`.

    With ``is_deferred`` the container comes again later, and the state is without it. Without a
    plan the rejection names blocking containers only if they would really be moved.
    """
    return StepwiseSearch(
        _make_room_by_moving(node, rejected, exempt, is_deferred=is_deferred, must_move=True)
    )


def _make_room_by_moving(
    node: NodeSnapshot,
    rejected: Rejected,
    exempt: Collection[str],
    *,
    is_deferred: bool = False,
    must_move: bool = False,
) -> SearchSteps[Admitted | Rejected]:
    """Admit a container, now or ``is_deferred``, by moving others.

    There is no search if one attempt for the pod would exceed `MAX_SEARCH_WORK`.
    """
    if rejected.is_about_later_container or _verification_work(node, rejected, 0) > MAX_SEARCH_WORK:
        return rejected
    pod, container = rejected.trace.pod, rejected.trace.container
    allocations = node.state.allocations
    yield _LOOK_WORK * len(allocations)
    immovable_ids = _immovable_ids(node.state, exempt)
    ids = immovable_ids | {i for i, a in allocations.items() if not a.movable}
    plan, max_moves = None, min(MAX_MOVES, node.machine.settings.rebalance_moves)
    purpose = f"make room for {pod.full_name}/{container.name}"
    if max_moves and len(ids) < len(allocations):
        plan = yield from plan_moves(
            node, rejected, exempt=ids, max_moves=max_moves, running=True, purpose=purpose
        )
    if plan is None:
        return (yield from explain_blockers(node, rejected, immovable_ids, must_move=must_move))
    return _with_moves(node, plan, container.id, is_deferred=is_deferred)


def _with_moves(
    node: NodeSnapshot, plan: MovePlan, container_id: str, *, is_deferred: bool
) -> Admitted:
    """Return the decision with the moves of a plan; without a newcomer that ``is_deferred``."""
    decision, moves = plan.admitted, plan.moves
    newcomer = decision.allocation
    newcomer = replace(newcomer, reason=f"{newcomer.reason}; {fits_after_moves_text(moves)}")
    change = decision.change
    if is_deferred:
        base = node.state.without_allocation(*(m.before.container_id for m in moves))
        state = _state_with_moves(node.state, base, moves)
        change = NO_CHANGED_IDS
    else:
        state = replace(plan.state, allocations={**plan.state.allocations, container_id: newcomer})
    moved_ids = {m.after.container_id for m in moves}
    node_after = node.with_state(state)
    move_updates = tuple(
        ContainerUpdate(
            m.after.container_id, cpus=str(node_after.cpuset_of(m.after)), mems=str(m.after.mems)
        )
        for m in moves
    )
    pool_changes = updates_between(node, node_after, skip=container_id)
    return replace(
        decision,
        state=state,
        allocation=newcomer,
        adjustment=build_adjustment(
            node_after, decision.allocation, decision.adjustment.memory_policy
        ),
        trace=replace(decision.trace, pool_after=node_after.pool),
        change=ChangedStateIds(
            (*change.containers, *sorted(moved_ids)),
            tuple(dict.fromkeys((*change.pods, *(m.after.pod_uid for m in moves)))),
        ),
        updates=(*move_updates, *(u for u in pool_changes if u.container_id not in moved_ids)),
        moves=moves,
    )


def movable_exclusive_by_node(node: NodeSnapshot, exempt: Collection[str] = ()) -> dict[int, int]:
    """Estimate by NUMA node the exclusive CPUs that `admit_by_moving` could free there.

    It frees no memory for the newcomer, because memory counts on both sides until it has migrated.
    """
    state, max_moves = node.state, node.machine.settings.rebalance_moves
    immovable_ids = _immovable_ids(state, exempt)
    movers = [
        a
        for i, a in state.allocations.items()
        if a.movable and a.exclusive and i not in immovable_ids and _can_move(node, a)
    ]
    if not (movers and max_moves):
        return {}
    return _PlanSearch(node, Demand(), movers, max_moves, running=True).freed_by_node()


def state_after_migration(decision: Admitted) -> NodeState:
    """Return the state after the memory of moved containers has migrated."""
    state = decision.state
    for move in decision.moves:
        migrated = move.after.with_migration_finished
        state = state.without_allocation(migrated.container_id).with_allocation(migrated)
    return state


def move_purpose_text(allocation: Allocation) -> str:
    """Format the end of a sentence, `` to make room for shop/web/app``; empty without a move."""
    return f" to {allocation.moved_for}" if allocation.moved_for else ""


def fits_after_moves_text(moves: Collection[ContainerMove]) -> str:
    """``fits after moving shop/db-3/app (2 GiB) from NUMA node 1 to 0``."""
    texts = [
        f"{m.before.full_name} ({human_bytes(_migrated_bytes(m.before))}) {move_text(m)}"
        if m.after.migrating_from
        else f"{m.before.full_name} {move_text(m)}"
        for m in moves
    ]
    return f"fits after moving {join_words(texts)}"


def move_text(move: ContainerMove) -> str:
    """``from NUMA node 1 to 0``, or ``from CPU 0 to 5``."""
    source, target = move.before, move.after
    if source.numa_nodes != target.numa_nodes:
        return f"from {numa_text(source.numa_nodes)} to {target.numa_nodes}"
    return f"from {cpus_text(source.cpus)} to {target.cpus}"


def explain_blockers(
    node: NodeSnapshot, rejected: Rejected, immovable_ids: Collection[str], *, must_move: bool
) -> SearchSteps[Rejected]:
    """Add the containers that block a rejected one, if a few moves would make it fit.

    Containers in ``immovable_ids`` never move. The text suggests making others movable if the
    search then finds a plan; with ``must_move`` only that text is added.
    """
    plan = yield from plan_moves(node, rejected)
    if plan is None:
        return rejected
    moves, max_moves = plan.moves, node.machine.settings.rebalance_moves
    text = f"it would fit if {join_words([*map(_displaced_container_text, moves)])}"
    moved_ids = {m.before.container_id for m in moves}
    if moved_ids.isdisjoint(immovable_ids) and len(moves) <= max_moves:
        unmovable = [m for m in moves if not m.before.movable]
        if not unmovable:
            text += "; all are movable, but their memory becomes free only after the move"
        elif (yield from _plan_if_movable(node, rejected, moved_ids, immovable_ids)) is not None:
            text = f"it would fit if {join_words([*map(_mover_text, unmovable)])} were movable"
            return replace(rejected, room_text=text)
    return rejected if must_move else replace(rejected, room_text=text)


def _plan_if_movable(
    node: NodeSnapshot, rejected: Rejected, ids: Collection[str], immovable_ids: Collection[str]
) -> SearchSteps[MovePlan | None]:
    """Plan the moves that would be made if these containers were movable, too."""
    allocations, max_moves = node.state.allocations, node.machine.settings.rebalance_moves
    exempt = {i for i, a in allocations.items() if not (a.movable or i in ids)} | {*immovable_ids}
    yield _LOOK_WORK * len(allocations)
    return (yield from plan_moves(node, rejected, exempt=exempt, max_moves=max_moves, running=True))


def _mover_text(move: ContainerMove) -> str:
    allocation = move.before
    memory = f", {human_bytes(_migrated_bytes(allocation))}" if allocation.mems else ""
    cpus = human_milli(allocation.cpu_milli)
    if allocation.exclusive:
        cpus = exclusive_cpu_count_text(len(allocation.cpus))
    return f"{allocation.full_name} ({cpus}{memory})"


def _displaced_container_text(move: ContainerMove) -> str:
    source, target, text = move.before, move.after, _mover_text(move)
    if source.numa_nodes == target.numa_nodes:
        return f"{text} had {cpus_text(target.cpus)} instead of {source.cpus}"
    return f"{text} were on {numa_text(target.numa_nodes)} instead of {source.numa_nodes}"


def _immovable_ids(state: NodeState, exempt: Collection[str]) -> set[str]:
    """Return ids of containers that never move: exempt, granted, or with huge pages."""
    return {
        i
        for i, a in state.allocations.items()
        if a.hugepages or i in exempt or state.kubelet.cpus_of(a.pod_uid, a.container, i)
    }


def _can_move(node: NodeSnapshot, a: Allocation) -> bool:
    pod = node.state.pods[a.pod_uid]
    return (
        a.kind in COMPUTED_KINDS
        and not (a.reserved_at or a.immovable)
        and len(a.numa_nodes) == 1
        and a.numa_nodes <= node.machine.alignable_nodes
        and a.mems <= a.numa_nodes
        and (pod.affinity is None or len(pod.containers) == 1)
    )


def _migrated_bytes(a: Allocation) -> int:
    """Maximum bytes that migrate with a container: its memory and huge pages."""
    return a.memory_bytes + sum(a.hugepages.values()) if a.mems else 0


# --- candidates by sums ---------------------------------------------------------------------------


ResourceVector = tuple[int, ...]
"""Thousandths of a CPU, exclusive CPUs, bytes of memory, and of huge pages by size."""


class _MoveItem(NamedTuple):
    """A container to place: a mover, or the newcomer, which has no allocation yet.

    Attributes:
        needs: amounts that must be free on the target.
        charge: amounts that it is charged with there.
        released: amounts that it frees on its current NUMA node.
        bytes: bytes that migrate with it.
        current_node: its current NUMA node; -1 for the newcomer.
        container_id: id of a mover.
    """

    needs: ResourceVector
    charge: ResourceVector
    released: ResourceVector
    bytes: int = 0
    current_node: int = -1
    container_id: str = ""
    mover: Allocation | None = None

    def fits_on(self, i: int, amounts: ResourceVector) -> bool:
        """True if free amounts suffice on a NUMA node; on its own, its charge that stays counts."""
        demand = self.needs
        if i == self.current_node:
            demand = _subtract_amounts(demand, _subtract_amounts(self.charge, self.released))
        return _covers_needs(demand, amounts)

    def equivalence_key(self, *, on_same_node: bool) -> tuple[object, ...]:
        """Return a key that is equal for interchangeable movers.

        Sizes are rounded down to an eighth, so a few bytes make no difference. Movers that stay on
        their NUMA node differ by their CPUs.
        """
        a = self.mover
        assert a is not None  # noqa: S101
        sizes = map(_round_down_to_leading_bits, self.needs + self.charge)
        return (self.needs[1], *sizes, a.kind, a.policy, on_same_node and a.cpus)


class _PartialPlan(NamedTuple):
    """A plan that is not complete.

    Attributes:
        pending: containers still to be placed; the first one is next.
        cleared_node: NUMA node that is being cleared for the next one; None if none is chosen.
        first_mover_index: index of the first mover there that may still be displaced.
        fits_unmoved: the sums sufficed before, so movers may stay there on other CPUs.
        targets: movers that are placed, with their NUMA nodes.
    """

    pending: tuple[_MoveItem, ...]
    free_by_node: Mapping[int, ResourceVector]
    cleared_node: int | None = None
    first_mover_index: int = 0
    fits_unmoved: bool = False
    displaced_ids: tuple[str, ...] = ()
    targets: _MoverTargets = ()


_MoverTargets = tuple[tuple[Allocation, int], ...]
PlanCost = tuple[int, int, tuple[str, ...]]
_Child = tuple[PlanCost, PlanCost, _PartialPlan]
"""Minimum cost of a plan, its cost so far, and the plan."""


class _PlanSearch:
    """Search for plans that suffice by sums, the cheapest first.

    Of the children of a partial plan only the cheapest is created, and the next one when that is
    expanded, so few plans are created even with many containers.
    """

    def __init__(
        self,
        node: NodeSnapshot,
        demand: Demand,
        movers: Collection[Allocation],
        max_moves: int,
        *,
        running: bool,
    ) -> None:
        self._most, self._running = max_moves, running
        sizes = {size for a in movers for size in a.hugepages} | set(demand.hugepages)
        self._sizes = sorted(sizes)
        self._free = self._free_by_node(node)
        # Movers by id, and by bytes, then id.
        self._by_id = self._movers_by_node(movers)
        self._by_bytes = {
            i: sorted(items, key=lambda m: m.bytes) for i, items in self._by_id.items()
        }
        self._max_released = {
            i: self._max_released_by_count(items) for i, items in self._by_id.items() if items
        }
        self._used = 0
        self._serial = count()
        self._heap: list[tuple[PlanCost, int, PlanCost, _PartialPlan, Iterator[_Child]]] = []
        newcomer = self._newcomer_item(demand)
        # Moves free CPUs on a NUMA node, but do not change the total.
        total = tuple(map(sum, zip(*self._free.values(), strict=True)))[:2]
        max_exclusive = max_exclusive_above_pool_floor(node, SMT.ANY, demand.exclusive_cpus)
        if demand.exclusive_cpus <= max_exclusive and _covers_needs(newcomer.charge[:2], total):
            self._push_children(_single_child((0, 0, ()), _PartialPlan((newcomer,), self._free)))

    def _free_by_node(self, node: NodeSnapshot) -> dict[int, ResourceVector]:
        machine, cpus, memory = node.machine, node.free_cpu_milli, node.free_memory
        pages = [node.free_hugepages(size) for size in self._sizes]
        candidates, allowed = exclusive_candidate_cpus(node), machine.allowed_cpus_by_node
        return {
            i: (cpus[i], len(candidates & allowed[i]), memory[i], *(p[i] for p in pages))
            for i in sorted(machine.alignable_nodes)
        }

    def _movers_by_node(self, movers: Collection[Allocation]) -> dict[int, list[_MoveItem]]:
        items_by_node: dict[int, list[_MoveItem]] = {i: [] for i in self._free}
        for a in sorted(movers, key=lambda a: a.container_id):
            item = self._mover_item(a)
            items_by_node[item.current_node].append(item)
        return items_by_node

    def _max_released_by_count(self, items: Collection[_MoveItem]) -> list[ResourceVector]:
        """Maximum amounts that 0, 1, … of these movers release."""
        amounts = zip(*(m.released for m in items), strict=True)
        columns = [nlargest(self._most, column) for column in amounts]
        return [tuple(sum(column[:n]) for column in columns) for n in range(self._most + 1)]

    def _newcomer_item(self, demand: Demand) -> _MoveItem:
        cpus = demand.exclusive_cpus
        shared_milli = min(demand.cpu_milli, demand.cpu_requested_milli)
        size = (1000 * cpus or demand.cpu_milli, cpus, demand.memory_bytes)
        charge = (1000 * cpus or shared_milli, cpus, demand.memory_requested)
        pages = tuple([demand.hugepages.get(size, 0) for size in self._sizes])
        return _MoveItem((*size, *pages), (*charge, *pages), ())

    def _mover_item(self, a: Allocation) -> _MoveItem:
        base_charge = next(iter(a.charges.values()), NO_CHARGE)
        cpus = len(a.cpus) if a.exclusive else 0
        owned = cpus + len(a.idle_siblings)
        pages = [a.hugepages.get(size, 0) if a.mems else 0 for size in self._sizes]
        booked_pages = [base_charge.hugepages.get(size, 0) for size in self._sizes]
        size = (1000 * cpus or a.cpu_milli, owned, a.memory_bytes if a.mems else 0, *pages)
        charge = (base_charge.cpu_milli, owned, base_charge.memory, *booked_pages)
        released = (*charge[:2], *(0 for _ in charge[2:])) if self._running else charge
        current_node, migrated_bytes = a.numa_nodes.first_id, _migrated_bytes(a)
        return _MoveItem(size, charge, released, migrated_bytes, current_node, a.container_id, a)

    def freed_by_node(self) -> dict[int, int]:
        """Count by NUMA node the exclusive CPUs that its movers free, the largest movers first."""
        counts = dict.fromkeys(self._free, 0)
        for i, items in self._by_id.items():
            amounts, budget = dict(self._free), self._most
            for item in sorted(items, key=lambda m: -m.released[1]):  # then by id, as they are
                fitting = [j for j, v in amounts.items() if j != i and item.fits_on(j, v)]
                if fitting and budget:
                    fullest = min(fitting, key=lambda j: (amounts[j], j))
                    amounts[fullest] = _subtract_amounts(amounts[fullest], item.charge)
                    counts[i] += item.released[1]
                    budget -= 1
        return counts

    def next_plan(self) -> SearchSteps[_MoverTargets | None]:
        """Find the next plan: movers in the order of placement; None if there is none."""
        while self._heap:
            _, _, cost, partial, siblings = heappop(self._heap)
            work_before = self._used
            self._push_children(siblings)
            for children in self._expand_plan(partial, cost) if partial.pending else ():
                self._push_children(children)
            yield _PARTIAL_WORK + self._used - work_before
            if not partial.pending:
                return partial.targets
        return None

    def _push_children(self, children: Iterator[_Child]) -> None:
        """Push the first child on the heap; the others follow when it is expanded."""
        child = next(children, None)
        if child is not None:
            heappush(self._heap, (child[0], next(self._serial), *child[1:], children))

    def _expand_plan(self, p: _PartialPlan, cost: PlanCost) -> Iterator[Iterator[_Child]]:
        """Yield the children of a partial plan, one iterator each, the cheapest first."""
        item, is_cleared = p.pending[0], p.cleared_node is not None
        numa_nodes = [*p.free_by_node] if p.cleared_node is None else [p.cleared_node]
        self._used += _LOOK_WORK * len(numa_nodes)
        fitting = [i for i in numa_nodes if item.fits_on(i, p.free_by_node[i])]
        if item.mover is not None and not is_cleared and fitting:
            for i in self._target_nodes(p, fitting):
                yield self._place_item(p, cost, i)
            return
        if p.cleared_node in fitting:
            yield self._place_item(p, cost, p.cleared_node)
        for i in numa_nodes:
            if i != item.current_node and i in self._max_released:
                fits_newcomer = item.mover is None and not is_cleared and i in fitting
                yield self._displacing_plans(p, cost, i, fits=p.fits_unmoved or fits_newcomer)

    def _target_nodes(self, p: _PartialPlan, fitting: Collection[int]) -> set[int]:
        """Select the fullest that fits, then the lowest id; and the mover's own if it may stay."""
        fullest = min(fitting, key=lambda i: (p.free_by_node[i], i))
        current_node = p.pending[0].current_node
        if p.fits_unmoved and current_node in fitting:
            return {fullest, current_node}
        return {fullest}

    def _displacing_plans(
        self, p: _PartialPlan, cost: PlanCost, i: int, *, fits: bool
    ) -> Iterator[_Child]:
        """Yield plans in which one mover leaves NUMA node ``i`` for the first pending container.

        The cheapest is first; the cost is 0 if that container ``fits`` by sums, because the mover
        may stay on other CPUs.
        """
        limits, max_moves = self._max_released[i], self._most - len(p.displaced_ids)
        lacking = _subtract_amounts(p.pending[0].needs, p.free_by_node[i])
        fewest = next((n for n in range(1, max_moves + 1) if _covers_needs(lacking, limits[n])), 0)
        if not fewest:
            return
        movers = (self._by_id if fits else self._by_bytes)[i]
        positions = range(p.first_mover_index, len(movers) - fewest + 1)
        min_released = _subtract_amounts(lacking, limits[max_moves - 1])
        for position in self._distinct_movers(p, movers, positions, min_released, fits=fits):
            mover = movers[position]
            displaced_ids = tuple(sorted((*p.displaced_ids, mover.container_id)))
            bytes_so_far = cost[0] + (0 if fits else mover.bytes)
            following = movers[position + 1 : position + fewest]
            min_bytes = bytes_so_far + (0 if fits else sum(m.bytes for m in following))
            # The largest first, equal ones in the order of displacement.
            pending = sorted((*p.pending[1:], mover), key=lambda m: m.needs, reverse=True)
            yield (
                (min_bytes, len(p.displaced_ids) + fewest, displaced_ids),
                (bytes_so_far, len(displaced_ids), displaced_ids),
                _PartialPlan(
                    (p.pending[0], *pending),
                    {**p.free_by_node, i: tuple(map(add, p.free_by_node[i], mover.released))},
                    i,
                    position + 1,
                    fits,
                    displaced_ids,
                    p.targets,
                ),
            )

    def _distinct_movers(
        self,
        p: _PartialPlan,
        movers: list[_MoveItem],
        positions: range,
        minimum: ResourceVector,
        *,
        fits: bool,
    ) -> Iterator[int]:
        """Yield positions of movers that release enough, one of each equivalence class."""
        keys = set()
        for position in positions:
            self._used += _LOOK_WORK
            mover = movers[position]
            if mover.container_id in p.displaced_ids or not _covers_needs(minimum, mover.released):
                continue
            key = mover.equivalence_key(on_same_node=fits)
            if key not in keys:
                keys.add(key)
                self._used += _PARTIAL_WORK
                yield position

    def _place_item(self, p: _PartialPlan, cost: PlanCost, i: int) -> Iterator[_Child]:
        item = p.pending[0]
        charge = item.released if i == item.current_node else item.charge
        is_displaced = p.fits_unmoved and item.mover is not None and i != item.current_node
        cost = (cost[0] + (item.bytes if is_displaced else 0), *cost[1:])
        return _single_child(
            cost,
            p._replace(
                pending=p.pending[1:],
                free_by_node={**p.free_by_node, i: _subtract_amounts(p.free_by_node[i], charge)},
                cleared_node=None,
                first_mover_index=0,
                targets=p.targets if item.mover is None else (*p.targets, (item.mover, i)),
            ),
        )


def _single_child(cost: PlanCost, partial: _PartialPlan) -> Iterator[_Child]:
    return iter([(cost, cost, partial)])


def _round_down_to_leading_bits(amount: int) -> int:
    """Round down to the leading four bits."""
    shift = max(0, amount.bit_length() - 4)
    return amount >> shift << shift


def _covers_needs(demand: ResourceVector, amounts: ResourceVector) -> bool:
    return all(map(le, demand, amounts))


def _subtract_amounts(total: ResourceVector, amounts: ResourceVector) -> ResourceVector:
    return tuple(map(sub, total, amounts))


# --- verification ---------------------------------------------------------------------------------


def _demand_of(a: Allocation) -> Demand:
    """Derive the demand of a running container from its allocation."""
    charges = [*a.charges.values()]
    return Demand(
        cpu_milli=a.cpu_milli,
        exclusive_cpus=len(a.cpus) if a.exclusive else 0,
        memory_bytes=a.memory_bytes if a.mems else 0,
        hugepages=a.hugepages if a.mems else {},
        cpu_requested_milli=sum(c.cpu_milli for c in charges),
        memory_requested=sum(c.memory for c in charges),
    )


def _verification_work(node: NodeSnapshot, rejected: Rejected, movers: int) -> int:
    """Units of work of a `_verify_plan`: admissions of a pod's named containers, and movers."""
    admission = admission_work(node)
    containers = max(1, count_expected_containers(node.machine, rejected.trace.pod))
    return admission * containers + admission * movers // 2


def _verify_plan(
    node: NodeSnapshot, rejected: Rejected, targets: _MoverTargets, purpose: str, *, running: bool
) -> MovePlan | None:
    """Place the newcomer and then each mover with the engine; None if one is rejected."""
    base = node.state.without_allocation(*(a.container_id for a, _ in targets))
    reading = node.reading
    for a, i in targets:
        if running and i not in a.numa_nodes:
            base = base.with_allocation(_allocation_without_cpus(a))
        elif reading is not None:
            reading = reading.with_own_charges_added(a)
    trace = rejected.trace
    decision = admit_pod(
        replace(node, state=base, reading=reading), trace.pod, trace.container, trace.requested
    )
    if not isinstance(decision, Admitted):
        return None
    state, moves, placed = decision.state, [], decision.allocation
    for a, i in targets:
        reading = None if reading is None else reading.with_own_charges_added(placed, -1)
        target = _place_mover(replace(node, state=state, reading=reading), a, i)
        if target is None or _has_same_place(a, target):
            return None  # the newcomer does not fit beside it
        if running:
            if (target.numa_nodes == a.numa_nodes) is not (i in a.numa_nodes):
                return None  # its memory was charged differently
            target = target.with_migration_started(a)
            if a.container_id in state.allocations:
                state = state.without_allocation(a.container_id)
        target = replace(target, reason=moved_caption(target.reason, purpose), moved_for=purpose)
        state, placed = state.with_allocation(target), target.with_migration_finished
        moves.append(ContainerMove(a, target))
    return MovePlan(_state_with_moves(node.state, state, moves), decision, tuple(moves))


def _has_same_place(a: Allocation, b: Allocation) -> bool:
    return (a.cpus, a.idle_siblings, a.numa_nodes) == (b.cpus, b.idle_siblings, b.numa_nodes)


def _allocation_without_cpus(a: Allocation) -> Allocation:
    """Reduce an allocation to its memory, which stays until it has migrated."""
    charges = charges_with_cpu_removed(a.charges)
    return replace(
        a,
        kind=ContainerKind.UNPINNED,
        cpus=NO_CPUS,
        idle_siblings=NO_CPUS,
        exclusive=False,
        charges=charges,
    )


def _state_with_moves(
    prior: NodeState, state: NodeState, moves: Collection[ContainerMove]
) -> NodeState:
    """Return the state with moved containers and their pods' records."""
    missing = [m.after for m in moves if m.after.container_id not in state.allocations]
    state, pods = state.with_allocation(*missing), dict(state.pods)
    for move in moves:
        # A moved container must not return to its former CPUs.
        record = prior.pods[move.before.pod_uid]
        affinity = None if record.affinity is None else move.after.numa_nodes
        pods[record.uid] = replace(
            state.pods[record.uid], previous=record.previous, affinity=affinity
        )
    return replace(state, pods=pods)


def _place_mover(node: NodeSnapshot, a: Allocation, numa_node: int) -> Allocation | None:
    """Place a mover by its own policy; None if the placement is worse than before."""
    smt = a.smt if a.exclusive else SMT.ANY
    case = PlacementRequest(
        node,
        PodSandbox(id=a.pod_id, uid=a.pod_uid, namespace=a.namespace, name=a.pod, qos=a.qos),
        Container(id=a.container_id, pod_id=a.pod_id, name=a.container),
        PlacementOptions(
            bind=Bind.CPU_MEM if a.mems else Bind.CPU,
            policy=a.policy,
            cpus=CPUMode.EXCLUSIVE if a.exclusive else CPUMode.SHARED,
            smt=smt,
            load=a.load,
            explicit_keys=frozenset({"cpus"} if smt is SMT.SPREAD else {"cpus", "smt"}),
            scheduled_nodes=NUMASet([numa_node]),
        ),
        _demand_of(a),
        a.policy,
        is_running=True,
    )
    placed = place_container(case)
    if (
        isinstance(placed, Rejection)
        or placed.kind is not a.kind
        or len(placed.numa_nodes | placed.mems) > 1
        or bool(placed.mems) is not bool(a.mems)
        or (a.aligned and not placed.aligned)
    ):
        return None
    return replace(
        a,
        cpus=placed.cpus,
        idle_siblings=placed.idle_siblings,
        numa_nodes=placed.numa_nodes,
        mems=placed.mems,
        charges=placed.charges,
        aligned=placed.aligned,
        is_misaligned=placed.is_misaligned,
        has_shortfall=False,
        reason=placed.reason,
    )
