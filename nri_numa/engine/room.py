"""Making room: which running containers would have to be elsewhere so that a refused one fits.

A strict policy refuses a container for which CPUs and memory are there in sum, but on no one NUMA
node. Which others are in the way, and where they could be by their own policies, is worked out
here, as a value. Of those that are movable `with_room` makes a decision, by which they move.

The search is by cost: bytes to migrate, then number of containers, then their ids. Sums by NUMA
node say what is worth a try; whether it fits is said by the engine that decides for real,
`nri_numa.engine.admit`, on the state without the movers. All of it is one `Search`, which a request
does `WORK_LIMIT` of, counted in work and not in time, so that it ends alike everywhere.

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

from nri_numa.engine.accounting import ownable, ownable_at_most
from nri_numa.engine.admit import adjustment, admit, place, pool_updates, without_each
from nri_numa.engine.align.hints import EXACT_UPTO
from nri_numa.engine.decision import Admitted, Case, Machine, Move, Reading, Refused
from nri_numa.engine.place.needs import exclusive_text, pod_demand
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import (
    COMPUTED,
    NOTHING,
    Allocation,
    Kind,
    NodeState,
    effective_cpus,
    without_cpus,
)
from nri_numa.engine.whole import admit_whole, limits, named_containers
from nri_numa.model.cpuset import NO_CPUS, NUMASet
from nri_numa.model.machine import counted, cpus_text, human_milli, numa_text
from nri_numa.model.workload import (
    NO_CHANGE,
    SMT,
    Bind,
    Container,
    ContainerUpdate,
    CPUMode,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Refusal,
    Requested,
    Scope,
    StateChange,
)
from nri_numa.text import human_bytes

MOST_MOVES: Final = 3
"""Containers that move for one."""
WORK_LIMIT: Final = 20_000
"""Units of work of a search while a request waits. A unit takes up to a microsecond, so that all of
it takes less than 25 ms on 512 CPUs with 1,000 containers (`python -m bench --only room`)."""
LATER_WORK_LIMIT: Final = 10 * WORK_LIMIT
"""The same of what goes on after the answer."""
_LOOK_WORK: Final = 1
"""Units for one container, or a pair of a mover and a NUMA node, that is looked at."""
_MOVER_WORK: Final = 4
"""Units for the sums of one mover."""
_PARTIAL_WORK: Final = 12
"""Units for a partial plan that is made by taking out a mover, or is taken up."""
_ADMISSION_WORK: Final = 350
"""Units for an admission that is tried, beside one for each CPU, and two for each container and for
each set of NUMA nodes."""
_SHORT: Final = ("TopologyAffinityError", "NotEnoughCPUs", "NotEnoughMemory", "SMTAlignmentError")
"""Refusals that are for want of room."""


T = TypeVar("T")
Steps = Generator[int, None, T]
"""Yields units of work, before or after they are done, and returns what was found."""


class Search(Generic[T]):
    """A search that can be done in pieces, all of them about one state.

    Attributes:
        used: units of work so far.
    """

    def __init__(self, steps: Steps[T]) -> None:
        self._steps, self._next, self.used = steps, 0, 0

    def work(self, units: int) -> T | None:
        """Do one step, and more up to so many units; None where these were not enough to end."""
        used = 0
        try:
            while not used or used + self._next <= units:
                self.used, used = self.used + self._next, used + self._next
                self._next = next(self._steps)
        except StopIteration as ended:
            found: T = ended.value
            return found
        return None


class Plan(msgspec.Struct, frozen=True):
    """How a refused container fits.

    Attributes:
        state: with the newcomer, and the movers where they end.
        newcomer: the decision about the refused container, as if the movers were nowhere.
        moves: in the order in which they are placed.
        places: where each goes, the newcomer first.
    """

    state: NodeState
    newcomer: Admitted
    moves: tuple[Move, ...]
    places: _Places


def make_room(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None = None,
    *,
    still: Collection[str] = (),
    most: int = MOST_MOVES,
    running: bool = False,
    now: float = 0.0,
    why: str = "",
) -> Steps[Plan | None]:
    """The cheapest moves after which a refused container fits with its policy; None without any.

    None of the containers in ``still`` moves, and none of its own pod. Of containers that are
    ``running`` memory is on both sides until it has moved, so that they leave only CPUs to others.
    ``why`` they move ends the reason of each.
    """
    requested, demand = refused.trace.requested, refused.trace.demand
    if requested is None or demand is None or refused.reason not in _SHORT:
        return None
    own = refused.trace.pod.uid
    yield _LOOK_WORK * len(state.allocations)
    movers = [
        a
        for i, a in state.allocations.items()
        if i not in still and a.pod_uid != own and _can_move(machine, state, a)
    ]
    if requested.scope is Scope.POD:
        demand = pod_demand(refused.trace.pod, demand)
    yield _MOVER_WORK * len(movers)
    search = _PlanSearch(machine, state, reading, demand, movers, most, running=running)
    while (places := (yield from search.next_plan())) is not None:
        yield _try_work(machine, state, refused, len(places) - 1)
        plan = _tried(machine, state, refused, reading, places, now, why, running=running)
        if plan is not None:
            return plan
    return None


def with_room(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None,
    now: float,
    still: Collection[str] = (),
) -> Admitted | Refused:
    """The container that was refused, once movable ones make room; refused where they cannot.

    None of the containers in ``still`` moves. Where `WORK_LIMIT` does not suffice, it is refused
    and `room_search` may go on.
    """
    found = Search(_with_room(machine, state, refused, reading, now, still)).work(WORK_LIMIT)
    return replace(refused, is_search_spent=True) if found is None else found


def room_search(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None,
    now: float,
    still: Collection[str] = (),
    *,
    is_deferred: bool,
) -> Search[Admitted | Refused]:
    """What goes on after a refusal whose search spent its budget; for `LATER_WORK_LIMIT` at most.

    Where the container ``is_deferred``, which comes again later, the state is without it. Where no
    moves let it in, the refusal says what is in the way only if those moves would be made.
    """
    steps = _with_room(
        machine, state, refused, reading, now, still, is_deferred=is_deferred, must_move=True
    )
    return Search(steps)


def _with_room(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None,
    now: float,
    still: Collection[str] = (),
    *,
    keep: str = "",
    is_deferred: bool = False,
    must_move: bool = False,
    most: int = MOST_MOVES,
) -> Steps[Admitted | Refused]:
    """Make room for a container that comes now or ``is_deferred``, or to ``keep`` it, in words.

    There is no search for a pod of which one try would be more than `WORK_LIMIT`.
    """
    if refused.is_about_later_container or _try_work(machine, state, refused, 0) > WORK_LIMIT:
        return refused
    pod, container = refused.trace.pod, refused.trace.container
    yield _LOOK_WORK * len(state.allocations)
    tied = _tied(state, still)
    stay = tied | {i for i, a in state.allocations.items() if not a.movable}
    plan, most = None, min(most, machine.settings.room_moves)
    why = f"{_MOVED}{keep or f'make room for {pod.full_name}/{container.name}'}"
    if most and len(stay) < len(state.allocations):
        plan = yield from make_room(
            machine, state, refused, reading, still=stay, most=most, running=True, now=now, why=why
        )
    if plan is None:
        if keep:
            return refused
        return (yield from in_the_way(machine, state, refused, reading, tied, must_move=must_move))
    return _with_moves(
        machine, state, plan, container.id, ahead=bool(keep), is_deferred=is_deferred
    )


def _with_moves(
    machine: Machine,
    state: NodeState,
    plan: Plan,
    container_id: str,
    *,
    ahead: bool,
    is_deferred: bool,
) -> Admitted:
    """The decision with the moves of a plan; the newcomer is not in the state where it comes later.

    It comes later, too, where the moves are ``ahead`` of need.
    """
    decision, moves = plan.newcomer, plan.moves
    if ahead:
        moves = tuple(Move(m.before, replace(m.after, ahead=True)) for m in moves)
    newcomer = decision.allocation
    newcomer = replace(newcomer, reason=f"{newcomer.reason}; {after_moving(moves)}")
    its = decision.change
    if ahead or is_deferred:
        after = _moved_in(state, without_each(state, (m.before for m in moves)), moves)
        its = NO_CHANGE
    else:
        after = replace(plan.state, allocations={**plan.state.allocations, container_id: newcomer})
    moving = {m.after.container_id for m in moves}
    pool = after.pool(machine.topology, machine.settings)
    own = tuple(
        ContainerUpdate(
            m.after.container_id,
            cpus=str(effective_cpus(m.after, pool, machine.topology, after.withheld_bits)),
            mems=str(m.after.mems),
            ignore_failure=True,
        )
        for m in moves
    )
    others = pool_updates(machine, state, after, skip=container_id)
    cpus = effective_cpus(newcomer, pool, machine.topology, after.withheld_bits)
    return replace(
        decision,
        state=after,
        allocation=newcomer,
        adjustment=adjustment(
            machine, decision.allocation, cpus, decision.adjustment.memory_policy
        ),
        trace=replace(decision.trace, pool_after=pool),
        change=StateChange(
            (*its.containers, *sorted(moving)),
            tuple(dict.fromkeys((*its.pods, *(m.after.pod_uid for m in moves)))),
        ),
        updates=(*own, *(u for u in others if u.container_id not in moving)),
        moves=moves,
    )


def freed_by_moving(
    machine: Machine, state: NodeState, reading: Reading | None, still: Collection[str] = ()
) -> dict[int, int]:
    """By NUMA node, exclusive CPUs that `with_room` could free there, as sums say.

    It frees no memory for the newcomer: that is on both sides until it has moved.
    """
    tied, most = _tied(state, still), machine.settings.room_moves
    movers = [
        a
        for i, a in state.allocations.items()
        if a.movable and a.owned and i not in tied and _can_move(machine, state, a)
    ]
    if not (movers and most):
        return {}
    return _PlanSearch(machine, state, reading, Demand(), movers, most, running=True).freed()


def all_arrived(decision: Admitted) -> NodeState:
    """The state once the memory of those that made room has moved, too."""
    state = decision.state
    for move in decision.moves:
        state = state.without(move.after.container_id).with_allocation(move.after.arrived)
    return state


_MOVED: Final = "; moved to "
"""In the reason of one that moved."""


def keep_room(
    machine: Machine,
    state: NodeState,
    reading: Reading | None,
    now: float,
    still: Collection[str],
    most: int,
) -> Admitted | None:
    """Moves, ``most`` of them, after which a request of ``room_keep`` would fit on one NUMA node.

    None where it fits as it is, or in no way. The state is the one without it.
    """
    cpus, memory = machine.settings.room_keep
    pod = PodSandbox(id="", uid="", namespace="", name="", qos=QoSClass.GUARANTEED)
    container = Container(id="", pod_id="", name="", resources=limits(1000 * cpus, memory))
    requested = Requested(
        policy=Policy.SINGLE_NUMA_NODE,
        cpus=CPUMode.EXCLUSIVE if cpus else CPUMode.SHARED,
        on_failure=OnFailure.REJECT,
        given=frozenset({"policy", "cpus", "on-failure"}),
    )
    decision = admit(machine, state, pod, container, reading, now, resolved=requested)
    if isinstance(decision, Admitted):
        return None
    what = [counted(cpus, "CPU")] if cpus else []
    keep = f"keep room for {', '.join(what + ([human_bytes(memory)] if memory else []))}"
    steps = _with_room(machine, state, decision, reading, now, still, keep=keep, most=most)
    found = Search(steps).work(WORK_LIMIT)
    return found if isinstance(found, Admitted) else None


def short_of_memory(
    state: NodeState, reading: Reading | None, used: Mapping[str, Mapping[int, int]]
) -> NUMASet:
    """NUMA nodes with less free memory than containers there have allocated and not used yet.

    ``used`` has bytes by container and NUMA node; one that is not in it uses nothing.
    """
    free = {} if reading is None else reading.memory
    owed = dict.fromkeys(free, 0)
    for container_id, a in state.allocations.items():
        for i in owed.keys() & a.charges.keys():
            owed[i] += max(0, a.charges[i].memory - used.get(container_id, {}).get(i, 0))
    return NUMASet(i for i, n in free.items() if n < owed[i])


def for_whom(allocation: Allocation) -> str:
    """`` to make room for shop/web/app``, as the end of a sentence; empty where it did not move."""
    _, moved, what = allocation.reason.partition(_MOVED)
    return f" to {what}" if moved else ""


def after_moving(moves: Collection[Move]) -> str:
    """``fits after moving shop/db-3/app (2 GiB) from NUMA node 1 to 0``."""
    each = [
        f"{m.before.full_name} ({human_bytes(_memory(m.before))}) {went(m)}"
        if m.after.leaves
        else f"{m.before.full_name} {went(m)}"
        for m in moves
    ]
    return f"fits after moving {' and '.join(each)}"


def went(move: Move) -> str:
    """``from NUMA node 1 to 0``, or ``from CPU 0 to 5``."""
    before, after = move.before, move.after
    if before.numa_nodes != after.numa_nodes:
        return f"from {numa_text(before.numa_nodes)} to {after.numa_nodes}"
    return f"from {cpus_text(before.cpus)} to {after.cpus}"


def in_the_way(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None,
    tied: Collection[str],
    *,
    must_move: bool,
) -> Steps[Refused]:
    """The refusal, saying what would have to be elsewhere where a few containers are in the way.

    Of those that are ``tied`` none could move, movable or not. With ``must_move`` nothing is said
    but of moves that would be made if all of them were movable.
    """
    plan = yield from make_room(machine, state, refused, reading)
    if plan is None:
        return refused
    moves = plan.moves
    text = "" if must_move else f"it would fit if {' and '.join(map(_text, moves))}"
    free = not any(m.before.container_id in tied for m in moves)
    if free and len(moves) <= machine.settings.room_moves:
        unmovable = [m for m in moves if not m.before.movable]
        yield _try_work(machine, state, refused, len(moves))
        at_once = _tried(machine, state, refused, reading, plan.places, running=True) is not None
        if unmovable and at_once:
            text = f"it would fit if {' and '.join(map(_who, unmovable))} were movable"
        elif text and not (unmovable or at_once):
            text += ": movable, but memory is free only once it has moved"
    return replace(refused, room_text=text)


def _who(move: Move) -> str:
    before = move.before
    memory = f", {human_bytes(_memory(before))}" if before.mems else ""
    what = exclusive_text(len(before.cpus)) if before.owned else human_milli(before.cpu_milli)
    return f"{before.full_name} ({what}{memory})"


def _text(move: Move) -> str:
    before, after = move.before, move.after
    if before.numa_nodes == after.numa_nodes:
        return f"{_who(move)} had {cpus_text(after.cpus)} instead of {before.cpus}"
    return f"{_who(move)} were on {numa_text(after.numa_nodes)} instead of {before.numa_nodes}"


def _tied(state: NodeState, still: Collection[str]) -> set[str]:
    """Those that do not move, movable or not; of huge pages the pool would move with them."""
    return {
        i
        for i, a in state.allocations.items()
        if a.hugepages or i in still or state.kubelet.cpus_of(a.pod_uid, a.container, i)
    }


def _can_move(machine: Machine, state: NodeState, a: Allocation) -> bool:
    pod = state.pods[a.pod_uid]
    return (
        a.kind in COMPUTED
        and not (a.ended or a.fixed)
        and len(a.numa_nodes) == 1
        and a.numa_nodes <= machine.places
        and a.mems <= a.numa_nodes
        and (pod.affinity is None or len(pod.containers) == 1)
    )


def _memory(a: Allocation) -> int:
    """Bytes that have to migrate with it, at most: what it may use."""
    return a.memory_bytes + sum(a.hugepages.values()) if a.mems else 0


# --- what is worth a try --------------------------------------------------------------------------


Amounts = tuple[int, ...]
"""Thousandths of a CPU, whole CPUs to own, memory, and huge pages by size."""


class _Item(NamedTuple):
    """Something to place: a mover, or the newcomer, which is no allocation yet.

    Attributes:
        needs: what must be free where it goes.
        books: what it takes there.
        gives: what it gives back where it was.
        bytes: that migrate with it.
        home: the NUMA node where it is.
    """

    needs: Amounts
    books: Amounts
    gives: Amounts
    bytes: int = 0
    home: int = -1
    mover: Allocation | None = None

    def fits(self, i: int, left: Amounts) -> bool:
        """Whether so much is enough on a NUMA node; what stays behind need not come back."""
        needs = self.needs
        if i == self.home:
            needs = tuple(n - b + g for n, b, g in zip(needs, self.books, self.gives, strict=True))
        return _fits(needs, left)

    def likeness(self, *, free: bool) -> tuple[object, ...]:
        """The same for movers of which one is as good as another.

        Sizes count to an eighth, for else a byte would make two of them. On other CPUs of its NUMA
        node none is like another.
        """
        a = self.mover
        assert a is not None  # noqa: S101
        sizes = map(_leading_bits, self.needs + self.books)
        return (self.needs[1], *sizes, a.kind, a.policy, free and a.cpus)


class _Partial(NamedTuple):
    """A plan on its way.

    Attributes:
        pending: still to be placed; the first of them next.
        at: the NUMA node that is being cleared for it; None where none is chosen.
        since: the movers there before this one in order are not taken out any more.
        free: there was room by the sums before: movers may stay, on other CPUs.
    """

    pending: tuple[_Item, ...]
    left: Mapping[int, Amounts]
    at: int | None = None
    since: int = 0
    free: bool = False
    out: tuple[str, ...] = ()
    placed: _Places = ()


_Places = tuple[tuple[_Item, int], ...]
Cost = tuple[int, int, tuple[str, ...]]
_Child = tuple[Cost, Cost, _Partial]
"""What a plan will cost at least, what it costs so far, and the plan."""


class _PlanSearch:
    """The plans that are worth a try by sums, the cheapest first.

    Of what follows a partial plan only the cheapest is made, and the next one when that is taken
    up: however many containers there are, few plans are made.
    """

    def __init__(
        self,
        machine: Machine,
        state: NodeState,
        reading: Reading | None,
        demand: Demand,
        movers: Collection[Allocation],
        most: int,
        *,
        running: bool,
    ) -> None:
        self._most, self._running = most, running
        sizes = {size for a in movers for size in a.hugepages} | set(demand.hugepages)
        self._sizes = sorted(sizes)
        cpus, memory = machine.cpu_left(state), machine.memory_left(state, reading)
        pages = [machine.hugepages_left(size, state, reading) for size in self._sizes]
        own = ownable(machine, state)
        self._left: dict[int, Amounts] = {
            i: (cpus[i], len(own & machine.node_cpus[i]), memory[i], *(p[i] for p in pages))
            for i in sorted(machine.places)
        }
        # By id; and by bytes, then by id.
        self._by_id: dict[int, list[_Item]] = {i: [] for i in self._left}
        for a in sorted(movers, key=lambda a: a.container_id):
            item = self._mover(a)
            self._by_id[item.home].append(item)
        self._by_bytes = {
            i: sorted(items, key=lambda m: m.bytes) for i, items in self._by_id.items()
        }
        # By NUMA node, what so many movers give back at most.
        self._given = {
            i: [tuple(sum(column[:n]) for column in columns) for n in range(most + 1)]
            for i, items in self._by_id.items()
            if (columns := [nlargest(most, c) for c in zip(*(m.gives for m in items), strict=True)])
        }
        self._used = 0
        self._serial = count()
        self._heap: list[tuple[Cost, int, Cost, _Partial, Iterator[_Child]]] = []
        newcomer = self._newcomer(demand)
        # Moves make no CPUs, whatever they free on a NUMA node.
        total = tuple(map(sum, zip(*self._left.values(), strict=True)))[:2]
        most_own = ownable_at_most(machine, state, SMT.ANY)
        if demand.exclusive_cpus <= most_own and _fits(newcomer.books[:2], total):
            self._push(_single_child((0, 0, ()), _Partial((newcomer,), self._left)))

    def _newcomer(self, demand: Demand) -> _Item:
        own = demand.exclusive_cpus
        shared = min(demand.cpu_milli, demand.cpu_paid_milli)
        needs = (1000 * own or demand.cpu_milli, own, demand.memory_bytes)
        books = (1000 * own or shared, own, demand.memory_paid)
        pages = tuple([demand.hugepages.get(size, 0) for size in self._sizes])
        return _Item((*needs, *pages), (*books, *pages), ())

    def _mover(self, a: Allocation) -> _Item:
        charge = next(iter(a.charges.values()), NOTHING)
        cpus = len(a.cpus) if a.owned else 0
        own = cpus + len(a.idle)
        pages = [a.hugepages.get(size, 0) if a.mems else 0 for size in self._sizes]
        held = [charge.hugepages.get(size, 0) for size in self._sizes]
        needs = (1000 * cpus or a.cpu_milli, own, a.memory_bytes if a.mems else 0, *pages)
        books = (charge.cpu_milli, own, charge.memory, *held)
        gives = (*books[:2], *(0 for _ in books[2:])) if self._running else books
        return _Item(needs, books, gives, _memory(a), next(iter(a.numa_nodes)), a)

    def freed(self) -> dict[int, int]:
        """By NUMA node, CPUs to own that its movers leave there, those with the most first."""
        found = dict.fromkeys(self._left, 0)
        for i, items in self._by_id.items():
            left, most = dict(self._left), self._most
            for item in sorted(items, key=lambda m: -m.gives[1]):  # then by id, as they are
                fitting = [j for j, n in left.items() if j != i and item.fits(j, n)]
                if fitting and most:
                    fullest = min(fitting, key=lambda j: (left[j], j))
                    left[fullest] = _minus(left[fullest], item.books)
                    found[i] += item.gives[1]
                    most -= 1
        return found

    def next_plan(self) -> Steps[_Places | None]:
        """Where each goes, the newcomer first; None when there are no more plans."""
        while self._heap:
            _, _, cost, partial, siblings = heappop(self._heap)
            before = self._used
            self._push(siblings)
            for children in self._expand(partial, cost) if partial.pending else ():
                self._push(children)
            yield _PARTIAL_WORK + self._used - before
            if not partial.pending:
                return partial.placed
        return None

    def _push(self, children: Iterator[_Child]) -> None:
        """Put the first of them on the heap; the others follow when it is taken up."""
        child = next(children, None)
        if child is not None:
            heappush(self._heap, (child[0], next(self._serial), *child[1:], children))

    def _expand(self, p: _Partial, cost: Cost) -> Iterator[Iterator[_Child]]:
        """What can be done next with a partial plan: each way begins with the cheapest."""
        item, left = p.pending[0], p.left
        numa_nodes = [*left] if p.at is None else [p.at]
        self._used += _LOOK_WORK * len(numa_nodes)
        fitting = [i for i in numa_nodes if item.fits(i, left[i])]
        if item.mover is not None and p.at is None and fitting:
            # The fullest that fits, then the lowest id; or where it was, on other CPUs.
            fullest = min(fitting, key=lambda i: (left[i], i))
            for i in {fullest, item.home} if p.free and item.home in fitting else {fullest}:
                yield self._put(p, cost, i)
            return
        if p.at in fitting:
            yield self._put(p, cost, p.at)
        for i in numa_nodes:
            if i != item.home and i in self._given:
                free = p.free or (item.mover is None and p.at is None and i in fitting)
                yield self._evictions(p, cost, i, free=free)

    def _evictions(self, p: _Partial, cost: Cost, i: int, *, free: bool) -> Iterator[_Child]:
        """Each mover that leaves NUMA node ``i`` for the first that is pending, cheapest first.

        Of those that are alike the first that may be enough.
        """
        left, given, rest = p.left[i], self._given[i], self._most - len(p.out)
        lacking = _minus(p.pending[0].needs, left)
        fewest = next((n for n in range(1, rest + 1) if _fits(lacking, given[n])), 0)
        movers = (self._by_id if free else self._by_bytes)[i]
        least = _minus(lacking, given[rest - 1])
        seen = set()
        for at in range(p.since, len(movers) - fewest + 1) if fewest else ():
            self._used += _LOOK_WORK
            mover = movers[at]
            a = mover.mover
            assert a is not None  # noqa: S101
            if a.container_id in p.out or not _fits(least, mover.gives):
                continue
            if (alike := mover.likeness(free=free)) in seen:
                continue
            seen.add(alike)
            self._used += _PARTIAL_WORK
            out = tuple(sorted((*p.out, a.container_id)))
            costs = (cost[0] + (0 if free else mover.bytes), len(out), out)
            more = 0 if free else sum(m.bytes for m in movers[at + 1 : at + fewest])
            # The largest first; those that are alike in the order in which they were taken out.
            pending = sorted((*p.pending[1:], mover), key=lambda m: m.needs, reverse=True)
            without = {**p.left, i: _plus(left, mover.gives)}
            after = _Partial((p.pending[0], *pending), without, i, at + 1, free, out, p.placed)
            yield (costs[0] + more, len(p.out) + fewest, out), costs, after

    def _put(self, p: _Partial, cost: Cost, i: int) -> Iterator[_Child]:
        item = p.pending[0]
        takes = item.gives if i == item.home else item.books
        left = {**p.left, i: _minus(p.left[i], takes)}
        moved = p.free and item.mover is not None and i != item.home
        cost = (cost[0] + (item.bytes if moved else 0), *cost[1:])
        return _single_child(
            cost,
            p._replace(
                pending=p.pending[1:], left=left, at=None, since=0, placed=(*p.placed, (item, i))
            ),
        )


def _single_child(cost: Cost, partial: _Partial) -> Iterator[_Child]:
    return iter([(cost, cost, partial)])


def _leading_bits(amount: int) -> int:
    """The amount without its last eighth, and less."""
    rest = max(0, amount.bit_length() - 4)
    return amount >> rest << rest


def _fits(needs: Amounts, left: Amounts) -> bool:
    return all(map(le, needs, left))


def _plus(left: Amounts, amounts: Amounts) -> Amounts:
    return tuple(map(add, left, amounts))


def _minus(left: Amounts, amounts: Amounts) -> Amounts:
    return tuple(map(sub, left, amounts))


# --- what the engine says -------------------------------------------------------------------------


def _demand_of(a: Allocation) -> Demand:
    """What a running container needs, by what is remembered of it."""
    paid = [*a.charges.values()]
    return Demand(
        cpu_milli=a.cpu_milli,
        exclusive_cpus=len(a.cpus) if a.owned else 0,
        memory_bytes=a.memory_bytes if a.mems else 0,
        hugepages=a.hugepages if a.mems else {},
        cpu_paid_milli=sum(c.cpu_milli for c in paid),
        memory_paid=sum(c.memory for c in paid),
    )


def _try_work(machine: Machine, state: NodeState, refused: Refused, movers: int) -> int:
    """Units of work of a `_tried`: admissions of a pod that names its containers, and movers."""
    masks = 1 << min(EXACT_UPTO, len(machine.places))
    one = _ADMISSION_WORK + machine.cpu_count + 2 * (len(state.allocations) + masks)
    return one * max(1, named_containers(machine, refused.trace.pod)) + one * movers // 2


def _tried(
    machine: Machine,
    state: NodeState,
    refused: Refused,
    reading: Reading | None,
    places: _Places,
    now: float = 0.0,
    why: str = "",
    *,
    running: bool,
) -> Plan | None:
    """Have the engine place the newcomer, and then each mover; None where it refuses."""
    _, *others = places
    movers = [(m.mover, i) for m, i in others if m.mover is not None]
    rest = without_each(state, (a for a, _ in movers))
    for a, i in movers:
        if running and i not in a.numa_nodes:
            rest = rest.with_allocation(_left_behind(a))
        elif reading is not None:
            reading = reading.with_own(a)
    trace = refused.trace
    decision = admit_whole(machine, rest, trace.pod, trace.container, reading, now, trace.requested)
    if not isinstance(decision, Admitted):
        return None
    after, moves, last = decision.state, [], decision.allocation
    for a, i in movers:
        reading = None if reading is None else reading.with_own(last, -1)
        moved = _moved(machine, after, a, i, reading)
        if moved is None:
            return None
        if running:
            if (moved.numa_nodes == a.numa_nodes) is not (i in a.numa_nodes):
                return None  # its memory was booked otherwise
            moved = moved.after(a)
            if a.container_id in after.allocations:
                after = after.without(a.container_id)
        moved = replace(moved, reason=f"{moved.reason}{why}")
        after, last = after.with_allocation(moved), moved.arrived
        moves.append(Move(a, moved))
    return Plan(_moved_in(state, after, moves), decision, tuple(moves), places)


def _left_behind(a: Allocation) -> Allocation:
    """Its memory, which is where it was until it has moved."""
    charges = without_cpus(a.charges)
    return replace(a, kind=Kind.UNBOUND, cpus=NO_CPUS, idle=NO_CPUS, owned=False, charges=charges)


def _moved_in(before: NodeState, after: NodeState, moves: Collection[Move]) -> NodeState:
    """The state with those that moved, and with what is remembered of their pods."""
    late = [m.after for m in moves if m.after.container_id not in after.allocations]
    after, pods = after.with_allocation(*late), dict(after.pods)
    for move in moves:
        # What it had before is nothing to come back to.
        record = before.pods[move.before.pod_uid]
        chosen = None if record.affinity is None else move.after.numa_nodes
        pods[record.uid] = replace(after.pods[record.uid], former=record.former, affinity=chosen)
    return replace(after, pods=pods)


def _moved(
    machine: Machine,
    state: NodeState,
    a: Allocation,
    numa_node: int,
    reading: Reading | None,
) -> Allocation | None:
    """What a mover gets, by its own policy; None where that is worse than what it had."""
    smt = a.smt if a.owned else SMT.ANY
    case = Case(
        machine,
        state,
        PodSandbox(id=a.pod_id, uid=a.pod_uid, namespace=a.namespace, name=a.pod, qos=a.qos),
        Container(id=a.container_id, pod_id=a.pod_id, name=a.container),
        Requested(
            bind=Bind.CPU_MEM if a.mems else Bind.CPU,
            policy=a.policy,
            cpus=CPUMode.EXCLUSIVE if a.owned else CPUMode.SHARED,
            smt=smt,
            load=a.load,
            given=frozenset({"cpus"} if smt is SMT.SPREAD else {"cpus", "smt"}),
            placed=NUMASet([numa_node]),
        ),
        _demand_of(a),
        reading,
        a.policy,
        again=True,
    )
    placed = place(case)
    if (
        isinstance(placed, Refusal)
        or placed.kind is not a.kind
        or len(placed.numa_nodes | placed.mems) > 1
        or bool(placed.mems) is not bool(a.mems)
        or (a.preferred and not placed.preferred)
    ):
        return None
    return replace(
        a,
        cpus=placed.cpus,
        idle=placed.idle,
        numa_nodes=placed.numa_nodes,
        mems=placed.mems,
        charges=placed.charges,
        preferred=placed.preferred,
        reason=placed.reason,
        ahead=False,
    )
