"""Making room: which running containers would have to be elsewhere so that a refused one fits.

A strict policy refuses a container for which CPUs and memory are there in sum, but on no one NUMA
node. Which others are in the way, and where they could be by their own policies, is worked out
here, as a value. Of those that are movable `admit_by_moving` makes a decision, by which they move.

The search is by cost: bytes to migrate, then number of containers, then their ids. Sums by NUMA
node say what is worth a try; whether it fits is said by the engine that decides for real,
`nri_numa.engine.admit`, on the state without the movers. All of it is one `StepwiseSearch`, which a
request does `MAX_SEARCH_WORK` of, counted in work and not in time, so that it ends alike
everywhere.

Only containers on one NUMA node move, and those of a pod with ``scope: pod`` only if it has no
other container: moving one of several would part them.
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
from nri_numa.model.machine import cpus_text, human_milli, numa_text
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
"""Containers that move for one."""
MAX_SEARCH_WORK: Final = 20_000
"""Units of work of a search while a request waits. A unit takes up to a microsecond, so that all of
it takes less than 25 ms on 512 CPUs with 1,000 containers (`python -m bench --only room`)."""
MAX_DEFERRED_SEARCH_WORK: Final = 10 * MAX_SEARCH_WORK
"""The same of what goes on after the answer."""
_LOOK_WORK: Final = 1
"""Units for one container, or a pair of a mover and a NUMA node, that is looked at."""
_MOVER_WORK: Final = 4
"""Units for the sums of one mover."""
_PARTIAL_WORK: Final = 12
"""Units for a partial plan that is made by taking out a mover, or is taken up."""


T = TypeVar("T")
SearchSteps = Generator[int, None, T]
"""Yields units of work, before or after they are done, and returns what was found."""


class StepwiseSearch(Generic[T]):
    """A search that can be done in pieces, all of them about one state.

    Attributes:
        used: units of work so far.
    """

    def __init__(self, steps: SearchSteps[T]) -> None:
        self._steps, self._next, self.used = steps, 0, 0

    def run_steps(self, units: int) -> T | None:
        """Do one step, and more up to so many units; None where these were not enough to end."""
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
    """Moves after which a refused container fits.

    Attributes:
        state: with the newcomer, and the movers where they end.
        admitted: the decision about the refused container, as if the movers were nowhere.
        moves: in the order in which they are placed.
        targets: where each goes, the newcomer first.
    """

    state: NodeState
    admitted: Admitted
    moves: tuple[ContainerMove, ...]
    targets: _Places


def plan_moves(
    node: NodeSnapshot,
    refused: Rejected,
    *,
    still: Collection[str] = (),
    max_moves: int = MAX_MOVES,
    running: bool = False,
    moved_for: str = "",
) -> SearchSteps[MovePlan | None]:
    """The cheapest moves after which a refused container fits with its policy; None without any.

    None of the containers in ``still`` moves, and none of its own pod. Of containers that are
    ``running`` memory is on both sides until it has moved, so that they leave only CPUs to others.
    ``moved_for`` says what they move for.
    """
    requested, demand = refused.trace.requested, refused.trace.demand
    if requested is None or demand is None or not refused.reason.allows_moves:
        return None
    pod_uid, allocations = refused.trace.pod.uid, node.state.allocations
    yield _LOOK_WORK * len(allocations)
    movers = [
        a
        for i, a in allocations.items()
        if i not in still and a.pod_uid != pod_uid and _can_move(node, a)
    ]
    if requested.scope is Scope.POD:
        demand = pod_demand(refused.trace.pod, demand)
    yield _MOVER_WORK * len(movers)
    search = _PlanSearch(node, demand, movers, max_moves, running=running)
    while (places := (yield from search.next_plan())) is not None:
        yield _verification_work(node, refused, len(places) - 1)
        plan = _verify_plan(node, refused, places, moved_for, running=running)
        if plan is not None:
            return plan
    return None


def admit_by_moving(
    node: NodeSnapshot, refused: Rejected, still: Collection[str] = ()
) -> Admitted | Rejected:
    """The container that was refused, once movable ones make room; refused where they cannot.

    None of the containers in ``still`` moves. Where `MAX_SEARCH_WORK` does not suffice, it is
    refused and `continued_move_search` may go on.
    """
    decision = StepwiseSearch(_make_room_by_moving(node, refused, still)).run_steps(MAX_SEARCH_WORK)
    return replace(refused, is_search_spent=True) if decision is None else decision


def continued_move_search(
    node: NodeSnapshot, refused: Rejected, still: Collection[str] = (), *, is_deferred: bool
) -> StepwiseSearch[Admitted | Rejected]:
    """Go on after a refusal whose search spent its budget; `MAX_DEFERRED_SEARCH_WORK` at most.

    Where the container ``is_deferred``, which comes again later, the state is without it. Where no
    moves let it in, the refusal says what is in the way only if those moves would be made.
    """
    return StepwiseSearch(
        _make_room_by_moving(node, refused, still, is_deferred=is_deferred, must_move=True)
    )


def _make_room_by_moving(
    node: NodeSnapshot,
    refused: Rejected,
    still: Collection[str] = (),
    *,
    is_deferred: bool = False,
    must_move: bool = False,
) -> SearchSteps[Admitted | Rejected]:
    """Make room for a container that comes now or ``is_deferred``.

    There is no search for a pod of which one try would be more than `MAX_SEARCH_WORK`.
    """
    if refused.is_about_later_container or _verification_work(node, refused, 0) > MAX_SEARCH_WORK:
        return refused
    pod, container = refused.trace.pod, refused.trace.container
    allocations = node.state.allocations
    yield _LOOK_WORK * len(allocations)
    immovable_ids = _immovable_ids(node.state, still)
    stay = immovable_ids | {i for i, a in allocations.items() if not a.movable}
    plan, max_moves = None, min(MAX_MOVES, node.machine.settings.rebalance_moves)
    moved_for = f"make room for {pod.full_name}/{container.name}"
    if max_moves and len(stay) < len(allocations):
        plan = yield from plan_moves(
            node, refused, still=stay, max_moves=max_moves, running=True, moved_for=moved_for
        )
    if plan is None:
        return (yield from explain_blockers(node, refused, immovable_ids, must_move=must_move))
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
        after = _state_with_moves(node.state, base, moves)
        change = NO_CHANGED_IDS
    else:
        after = replace(plan.state, allocations={**plan.state.allocations, container_id: newcomer})
    moved_ids = {m.after.container_id for m in moves}
    node_after = node.with_state(after)
    move_updates = tuple(
        ContainerUpdate(
            m.after.container_id,
            cpus=str(node_after.cpuset_of(m.after)),
            mems=str(m.after.mems),
        )
        for m in moves
    )
    pool_changes = updates_between(node, node_after, skip=container_id)
    return replace(
        decision,
        state=after,
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


def movable_exclusive_by_node(node: NodeSnapshot, still: Collection[str] = ()) -> dict[int, int]:
    """By NUMA node, exclusive CPUs that `admit_by_moving` could free there, as sums say.

    It frees no memory for the newcomer: that is on both sides until it has moved.
    """
    state, max_moves = node.state, node.machine.settings.rebalance_moves
    immovable_ids = _immovable_ids(state, still)
    movers = [
        a
        for i, a in state.allocations.items()
        if a.movable and a.exclusive and i not in immovable_ids and _can_move(node, a)
    ]
    if not (movers and max_moves):
        return {}
    return _PlanSearch(node, Demand(), movers, max_moves, running=True).freed_by_node()


def state_after_migration(decision: Admitted) -> NodeState:
    """The state once the memory of those that made room has moved, too."""
    state = decision.state
    for move in decision.moves:
        state = state.without_allocation(move.after.container_id).with_allocation(
            move.after.with_migration_finished
        )
    return state


def move_purpose_text(allocation: Allocation) -> str:
    """`` to make room for shop/web/app``, as the end of a sentence; empty where it did not move."""
    return f" to {allocation.moved_for}" if allocation.moved_for else ""


def fits_after_moves_text(moves: Collection[ContainerMove]) -> str:
    """``fits after moving shop/db-3/app (2 GiB) from NUMA node 1 to 0``."""
    texts = [
        f"{m.before.full_name} ({human_bytes(_migrated_bytes(m.before))}) {move_text(m)}"
        if m.after.migrating_from
        else f"{m.before.full_name} {move_text(m)}"
        for m in moves
    ]
    return f"fits after moving {' and '.join(texts)}"


def move_text(move: ContainerMove) -> str:
    """``from NUMA node 1 to 0``, or ``from CPU 0 to 5``."""
    before, after = move.before, move.after
    if before.numa_nodes != after.numa_nodes:
        return f"from {numa_text(before.numa_nodes)} to {after.numa_nodes}"
    return f"from {cpus_text(before.cpus)} to {after.cpus}"


def explain_blockers(
    node: NodeSnapshot, refused: Rejected, immovable_ids: Collection[str], *, must_move: bool
) -> SearchSteps[Rejected]:
    """The refusal, saying what would have to be elsewhere where a few containers are in the way.

    Those in ``immovable_ids`` never move, movable or not. That others would have to be movable is
    said where the search for moves finds them once they are. With ``must_move`` nothing else is.
    """
    plan = yield from plan_moves(node, refused)
    if plan is None:
        return refused
    moves, max_moves = plan.moves, node.machine.settings.rebalance_moves
    text = f"it would fit if {' and '.join(map(_displaced_container_text, moves))}"
    moved_ids = {m.before.container_id for m in moves}
    if moved_ids.isdisjoint(immovable_ids) and len(moves) <= max_moves:
        unmovable = [m for m in moves if not m.before.movable]
        if not unmovable:
            text += ": movable, but memory is free only once it has moved"
        elif (yield from _plan_if_movable(node, refused, moved_ids, immovable_ids)) is not None:
            text = f"it would fit if {' and '.join(map(_mover_text, unmovable))} were movable"
            return replace(refused, room_text=text)
    return refused if must_move else replace(refused, room_text=text)


def _plan_if_movable(
    node: NodeSnapshot, refused: Rejected, ids: Collection[str], immovable_ids: Collection[str]
) -> SearchSteps[MovePlan | None]:
    """The moves that are made once these containers are movable, too."""
    allocations, max_moves = node.state.allocations, node.machine.settings.rebalance_moves
    still = {i for i, a in allocations.items() if not (a.movable or i in ids)} | {*immovable_ids}
    yield _LOOK_WORK * len(allocations)
    return (yield from plan_moves(node, refused, still=still, max_moves=max_moves, running=True))


def _mover_text(move: ContainerMove) -> str:
    allocation = move.before
    memory = f", {human_bytes(_migrated_bytes(allocation))}" if allocation.mems else ""
    cpus = (
        exclusive_cpu_count_text(len(allocation.cpus))
        if allocation.exclusive
        else human_milli(allocation.cpu_milli)
    )
    return f"{allocation.full_name} ({cpus}{memory})"


def _displaced_container_text(move: ContainerMove) -> str:
    before, after = move.before, move.after
    if before.numa_nodes == after.numa_nodes:
        return f"{_mover_text(move)} had {cpus_text(after.cpus)} instead of {before.cpus}"
    return (
        f"{_mover_text(move)} were on {numa_text(after.numa_nodes)} instead of {before.numa_nodes}"
    )


def _immovable_ids(state: NodeState, still: Collection[str]) -> set[str]:
    """Ids of containers that never move: with huge pages, the pool would move with them."""
    return {
        i
        for i, a in state.allocations.items()
        if a.hugepages or i in still or state.kubelet.cpus_of(a.pod_uid, a.container, i)
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
    """Bytes that have to migrate with it, at most: what it may use."""
    return a.memory_bytes + sum(a.hugepages.values()) if a.mems else 0


# --- what is worth a try --------------------------------------------------------------------------


ResourceVector = tuple[int, ...]
"""Thousandths of a CPU, whole CPUs to own, memory, and huge pages by size."""


class _MoveItem(NamedTuple):
    """Something to place: a mover, or the newcomer, which is no allocation yet.

    Attributes:
        needs: what must be free where it goes.
        charge: what it takes there.
        released: what it gives back where it was.
        bytes: that migrate with it.
        current_node: the NUMA node where it is.
    """

    needs: ResourceVector
    charge: ResourceVector
    released: ResourceVector
    bytes: int = 0
    current_node: int = -1
    mover: Allocation | None = None

    @property
    def container_id(self) -> str:
        """Id of a mover."""
        assert self.mover is not None  # noqa: S101
        return self.mover.container_id

    def fits_on(self, i: int, free: ResourceVector) -> bool:
        """True if so much is enough on a NUMA node; what stays behind need not come back."""
        needs = self.needs
        if i == self.current_node:
            needs = tuple(
                n - b + g for n, b, g in zip(needs, self.charge, self.released, strict=True)
            )
        return _covers_needs(needs, free)

    def equivalence_key(self, *, on_same_node: bool) -> tuple[object, ...]:
        """The same for movers of which one is as good as another.

        Sizes count to an eighth, for else a byte would make two of them. On other CPUs of its NUMA
        node none is like another.
        """
        a = self.mover
        assert a is not None  # noqa: S101
        sizes = map(_round_down_to_leading_bits, self.needs + self.charge)
        return (self.needs[1], *sizes, a.kind, a.policy, on_same_node and a.cpus)


class _PartialPlan(NamedTuple):
    """A plan on its way.

    Attributes:
        pending: still to be placed; the first of them next.
        cleared_node: the NUMA node that is being cleared for it; None where none is chosen.
        first_mover_index: the movers there before this one in order are not taken out any more.
        fits_unmoved: there was room by the sums before: movers may stay, on other CPUs.
    """

    pending: tuple[_MoveItem, ...]
    free_by_node: Mapping[int, ResourceVector]
    cleared_node: int | None = None
    first_mover_index: int = 0
    fits_unmoved: bool = False
    displaced_ids: tuple[str, ...] = ()
    placed: _Places = ()


_Places = tuple[tuple[_MoveItem, int], ...]
PlanCost = tuple[int, int, tuple[str, ...]]
_Child = tuple[PlanCost, PlanCost, _PartialPlan]
"""What a plan will cost at least, what it costs so far, and the plan."""


class _PlanSearch:
    """The plans that are worth a try by sums, the cheapest first.

    Of what follows a partial plan only the cheapest is made, and the next one when that is taken
    up: however many containers there are, few plans are made.
    """

    def __init__(
        self,
        node: NodeSnapshot,
        demand: Demand,
        movers: Collection[Allocation],
        most: int,
        *,
        running: bool,
    ) -> None:
        self._most, self._running = most, running
        sizes = {size for a in movers for size in a.hugepages} | set(demand.hugepages)
        self._sizes = sorted(sizes)
        self._free = self._free_by_node(node)
        # By id; and by bytes, then by id.
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
        # Moves make no CPUs, whatever they free on a NUMA node.
        total = tuple(map(sum, zip(*self._free.values(), strict=True)))[:2]
        max_exclusive = max_exclusive_above_pool_floor(node, SMT.ANY, demand.exclusive_cpus)
        if demand.exclusive_cpus <= max_exclusive and _covers_needs(newcomer.charge[:2], total):
            self._push_children(_single_child((0, 0, ()), _PartialPlan((newcomer,), self._free)))

    def _free_by_node(self, node: NodeSnapshot) -> dict[int, ResourceVector]:
        machine, cpus, memory = node.machine, node.free_cpu_milli, node.free_memory
        pages = [node.free_hugepages(size) for size in self._sizes]
        candidates = exclusive_candidate_cpus(node)
        return {
            i: (
                cpus[i],
                len(candidates & machine.allowed_cpus_by_node[i]),
                memory[i],
                *(p[i] for p in pages),
            )
            for i in sorted(machine.alignable_nodes)
        }

    def _movers_by_node(self, movers: Collection[Allocation]) -> dict[int, list[_MoveItem]]:
        items_by_node: dict[int, list[_MoveItem]] = {i: [] for i in self._free}
        for a in sorted(movers, key=lambda a: a.container_id):
            item = self._mover_item(a)
            items_by_node[item.current_node].append(item)
        return items_by_node

    def _max_released_by_count(self, items: Collection[_MoveItem]) -> list[ResourceVector]:
        """Most that 0, 1, … of these movers give back."""
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
        booked = next(iter(a.charges.values()), NO_CHARGE)
        cpus = len(a.cpus) if a.exclusive else 0
        owned = cpus + len(a.idle_siblings)
        pages = [a.hugepages.get(size, 0) if a.mems else 0 for size in self._sizes]
        booked_pages = [booked.hugepages.get(size, 0) for size in self._sizes]
        size = (1000 * cpus or a.cpu_milli, owned, a.memory_bytes if a.mems else 0, *pages)
        charge = (booked.cpu_milli, owned, booked.memory, *booked_pages)
        released = (*charge[:2], *(0 for _ in charge[2:])) if self._running else charge
        return _MoveItem(size, charge, released, _migrated_bytes(a), next(iter(a.numa_nodes)), a)

    def freed_by_node(self) -> dict[int, int]:
        """By NUMA node, CPUs to own that its movers leave there, those with the most first."""
        freed = dict.fromkeys(self._free, 0)
        for i, items in self._by_id.items():
            amounts, moves = dict(self._free), self._most
            for item in sorted(items, key=lambda m: -m.released[1]):  # then by id, as they are
                fitting = [j for j, free in amounts.items() if j != i and item.fits_on(j, free)]
                if fitting and moves:
                    fullest = min(fitting, key=lambda j: (amounts[j], j))
                    amounts[fullest] = _subtract_amounts(amounts[fullest], item.charge)
                    freed[i] += item.released[1]
                    moves -= 1
        return freed

    def next_plan(self) -> SearchSteps[_Places | None]:
        """The NUMA node of each, the newcomer first; None when there are no more plans."""
        while self._heap:
            _, _, cost, partial, siblings = heappop(self._heap)
            work_before = self._used
            self._push_children(siblings)
            for children in self._expand_plan(partial, cost) if partial.pending else ():
                self._push_children(children)
            yield _PARTIAL_WORK + self._used - work_before
            if not partial.pending:
                return partial.placed
        return None

    def _push_children(self, children: Iterator[_Child]) -> None:
        """Put the first of them on the heap; the others follow when it is taken up."""
        child = next(children, None)
        if child is not None:
            heappush(self._heap, (child[0], next(self._serial), *child[1:], children))

    def _expand_plan(self, p: _PartialPlan, cost: PlanCost) -> Iterator[Iterator[_Child]]:
        """The next steps of a partial plan: each way begins with the cheapest."""
        item, is_cleared = p.pending[0], p.cleared_node is not None
        numa_nodes = [*p.free_by_node] if p.cleared_node is None else [p.cleared_node]
        self._used += _LOOK_WORK * len(numa_nodes)
        fitting = [i for i in numa_nodes if item.fits_on(i, p.free_by_node[i])]
        if item.mover is not None and not is_cleared and fitting:
            for i in self._destinations(p, fitting):
                yield self._place_item(p, cost, i)
            return
        if p.cleared_node in fitting:
            yield self._place_item(p, cost, p.cleared_node)
        for i in numa_nodes:
            if i != item.current_node and i in self._max_released:
                fits_newcomer = item.mover is None and not is_cleared and i in fitting
                yield self._displacements(p, cost, i, fits=p.fits_unmoved or fits_newcomer)

    def _destinations(self, p: _PartialPlan, fitting: Collection[int]) -> set[int]:
        """The fullest that fits, then the lowest id; or where the mover was, on other CPUs."""
        fullest = min(fitting, key=lambda i: (p.free_by_node[i], i))
        current_node = p.pending[0].current_node
        if p.fits_unmoved and current_node in fitting:
            return {fullest, current_node}
        return {fullest}

    def _displacements(
        self, p: _PartialPlan, cost: PlanCost, i: int, *, fits: bool
    ) -> Iterator[_Child]:
        """Each mover that leaves NUMA node ``i`` for the first that is pending, cheapest first.

        It costs nothing where that one ``fits`` by the sums: the mover may stay, on other CPUs.
        """
        limits, moves_left = self._max_released[i], self._most - len(p.displaced_ids)
        lacking = _subtract_amounts(p.pending[0].needs, p.free_by_node[i])
        fewest = next((n for n in range(1, moves_left + 1) if _covers_needs(lacking, limits[n])), 0)
        if not fewest:
            return
        movers = (self._by_id if fits else self._by_bytes)[i]
        positions = range(p.first_mover_index, len(movers) - fewest + 1)
        min_released = _subtract_amounts(lacking, limits[moves_left - 1])
        for position in self._distinct_movers(p, movers, positions, min_released, fits=fits):
            mover = movers[position]
            displaced_ids = tuple(sorted((*p.displaced_ids, mover.container_id)))
            bytes_so_far = cost[0] + (0 if fits else mover.bytes)
            following = movers[position + 1 : position + fewest]
            min_bytes = bytes_so_far + (0 if fits else sum(m.bytes for m in following))
            # The largest first; those that are alike in the order in which they were taken out.
            pending = sorted((*p.pending[1:], mover), key=lambda m: m.needs, reverse=True)
            yield (
                (min_bytes, len(p.displaced_ids) + fewest, displaced_ids),
                (bytes_so_far, len(displaced_ids), displaced_ids),
                _PartialPlan(
                    (p.pending[0], *pending),
                    {**p.free_by_node, i: _add_amounts(p.free_by_node[i], mover.released)},
                    i,
                    position + 1,
                    fits,
                    displaced_ids,
                    p.placed,
                ),
            )

    def _distinct_movers(
        self,
        p: _PartialPlan,
        movers: list[_MoveItem],
        positions: range,
        least: ResourceVector,
        *,
        fits: bool,
    ) -> Iterator[int]:
        """Positions of the movers that release enough; of those that are alike the first."""
        keys = set()
        for position in positions:
            self._used += _LOOK_WORK
            mover = movers[position]
            if mover.container_id in p.displaced_ids or not _covers_needs(least, mover.released):
                continue
            key = mover.equivalence_key(on_same_node=fits)
            if key not in keys:
                keys.add(key)
                self._used += _PARTIAL_WORK
                yield position

    def _place_item(self, p: _PartialPlan, cost: PlanCost, i: int) -> Iterator[_Child]:
        item = p.pending[0]
        charge = item.released if i == item.current_node else item.charge
        has_moved = p.fits_unmoved and item.mover is not None and i != item.current_node
        cost = (cost[0] + (item.bytes if has_moved else 0), *cost[1:])
        return _single_child(
            cost,
            p._replace(
                pending=p.pending[1:],
                free_by_node={**p.free_by_node, i: _subtract_amounts(p.free_by_node[i], charge)},
                cleared_node=None,
                first_mover_index=0,
                placed=(*p.placed, (item, i)),
            ),
        )


def _single_child(cost: PlanCost, partial: _PartialPlan) -> Iterator[_Child]:
    return iter([(cost, cost, partial)])


def _round_down_to_leading_bits(amount: int) -> int:
    """The amount without its last eighth, and less."""
    shift = max(0, amount.bit_length() - 4)
    return amount >> shift << shift


def _covers_needs(needs: ResourceVector, amounts: ResourceVector) -> bool:
    return all(map(le, needs, amounts))


def _add_amounts(total: ResourceVector, amounts: ResourceVector) -> ResourceVector:
    return tuple(map(add, total, amounts))


def _subtract_amounts(total: ResourceVector, amounts: ResourceVector) -> ResourceVector:
    return tuple(map(sub, total, amounts))


# --- what the engine says -------------------------------------------------------------------------


def _demand_of(a: Allocation) -> Demand:
    """The demand of a running container, by its allocation."""
    charges = [*a.charges.values()]
    return Demand(
        cpu_milli=a.cpu_milli,
        exclusive_cpus=len(a.cpus) if a.exclusive else 0,
        memory_bytes=a.memory_bytes if a.mems else 0,
        hugepages=a.hugepages if a.mems else {},
        cpu_requested_milli=sum(c.cpu_milli for c in charges),
        memory_requested=sum(c.memory for c in charges),
    )


def _verification_work(node: NodeSnapshot, refused: Rejected, movers: int) -> int:
    """Units of work of a `_verify_plan`: admissions of a pod's named containers, and movers."""
    admission = admission_work(node)
    return (
        admission * max(1, count_expected_containers(node.machine, refused.trace.pod))
        + admission * movers // 2
    )


def _verify_plan(
    node: NodeSnapshot,
    refused: Rejected,
    targets: _Places,
    moved_for: str = "",
    *,
    running: bool,
) -> MovePlan | None:
    """Have the engine place the newcomer, and then each mover; None where it refuses."""
    _, *mover_targets = targets
    movers = [(m.mover, i) for m, i in mover_targets if m.mover is not None]
    base, reading = (
        node.state.without_allocation(*(a.container_id for a, _ in movers)),
        node.reading,
    )
    for a, i in movers:
        if running and i not in a.numa_nodes:
            base = base.with_allocation(_allocation_without_cpus(a))
        elif reading is not None:
            reading = reading.with_own_charges_added(a)
    trace = refused.trace
    decision = admit_pod(
        replace(node, state=base, reading=reading), trace.pod, trace.container, trace.requested
    )
    if not isinstance(decision, Admitted):
        return None
    after, moves, placed = decision.state, [], decision.allocation
    for a, i in movers:
        reading = None if reading is None else reading.with_own_charges_added(placed, -1)
        moved = _place_mover(replace(node, state=after, reading=reading), a, i)
        if moved is None or _has_same_place(a, moved):
            return None  # what fits only while it is away does not fit
        if running:
            if (moved.numa_nodes == a.numa_nodes) is not (i in a.numa_nodes):
                return None  # its memory was booked otherwise
            moved = moved.with_migration_started(a)
            if a.container_id in after.allocations:
                after = after.without_allocation(a.container_id)
        moved = replace(moved, reason=moved_caption(moved.reason, moved_for), moved_for=moved_for)
        after, placed = after.with_allocation(moved), moved.with_migration_finished
        moves.append(ContainerMove(a, moved))
    return MovePlan(_state_with_moves(node.state, after, moves), decision, tuple(moves), targets)


def _has_same_place(a: Allocation, b: Allocation) -> bool:
    return (a.cpus, a.idle_siblings, a.numa_nodes) == (b.cpus, b.idle_siblings, b.numa_nodes)


def _allocation_without_cpus(a: Allocation) -> Allocation:
    """Its memory, which is where it was until it has moved."""
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
    before: NodeState, after: NodeState, moves: Collection[ContainerMove]
) -> NodeState:
    """The state with those that moved, and with what is remembered of their pods."""
    missing = [m.after for m in moves if m.after.container_id not in after.allocations]
    after, pods = after.with_allocation(*missing), dict(after.pods)
    for move in moves:
        # What it had before is nothing to come back to.
        record = before.pods[move.before.pod_uid]
        affinity = None if record.affinity is None else move.after.numa_nodes
        pods[record.uid] = replace(
            after.pods[record.uid], previous=record.previous, affinity=affinity
        )
    return replace(after, pods=pods)


def _place_mover(node: NodeSnapshot, a: Allocation, numa_node: int) -> Allocation | None:
    """Place a mover by its own policy; None where that is worse than what it had."""
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
