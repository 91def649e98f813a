"""What the NUMA nodes of one node have and have free, as counts, and what pods take of it.

Which CPUs they are is known on the node alone. Columns hold one number for each NUMA node, in the
order of `NodeRoom.ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.engine.align.hints import Distances
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.workload import SMT, Policy, Scope
from nri_numa.scheduler.pod_request import ContainerRequest, PodRequest

Column = tuple[int, ...]


class Resource(Struct, frozen=True, gc=False):
    """A resource by NUMA node: what containers can have, and what of it is free."""

    name: str
    capacity: Column
    free: Column


class Counts(Struct, frozen=True, gc=False):
    """What is free while containers are placed one after another, or what a pod takes of it.

    Attributes:
        exclusive: CPUs that can be exclusive and have their whole time free; of a pod, with
            siblings that are kept idle.
        milli: thousandths of a CPU, of exclusive ones too.
        others: memory and huge pages in bytes, devices by number, by name.
    """

    exclusive: Column
    milli: Column
    others: Mapping[str, Column]

    def after(self, request: ContainerRequest, kept: int, places: Sequence[int]) -> Counts:
        """What is free once a container is there.

        Args:
            request: of the container; it takes what is allocated to it, not what it may use.
            kept: its exclusive CPUs, with siblings that stay idle.
            places: its NUMA nodes, as positions in the columns; the first are filled first.
        """
        exclusive, milli, others = list(self.exclusive), list(self.milli), self.others
        if request.exclusive:
            _take(exclusive, places, kept)
            _take(milli, places, request.exclusive, 1000)
        if request.paid_milli:
            _take(milli, places, request.paid_milli)
        for place in places:
            whole = milli[place] // 1000
            if exclusive[place] > whole:
                exclusive[place] = max(0, whole)
        for name, amount in request.paid:
            if name in others:
                column = list(others[name])
                _take(column, places, amount)
                others = {**others, name: tuple(column)}
        return Counts(tuple(exclusive), tuple(milli), others)

    def less(self, after: Counts) -> Counts | None:
        """What was taken between this state and a later one; None for nothing that is counted."""
        exclusive = _difference(self.exclusive, after.exclusive)
        milli = _difference(self.milli, after.milli)
        others = {
            name: _difference(column, after.others[name])
            for name, column in self.others.items()
            if column != after.others[name]
        }
        return Counts(exclusive, milli, others) if others or any(exclusive) or any(milli) else None


class NodeRoom(Struct, frozen=True, kw_only=True, dict=True, cache_hash=True):
    """The NUMA nodes of one node. Nodes with equal rooms share verdicts, so rooms are keys.

    Attributes:
        ids: NUMA nodes, ascending; there may be holes.
        distances: row by row, in the order of ``ids``.
        cpu: thousandths of a CPU for containers that share.
        exclusive: whole CPUs, and those that can be exclusive.
        after_moving: as ``exclusive``, what is free for one container once movable ones moved;
            empty where that is no more, and while pods are on their way.
        others: memory and huge pages in bytes, devices by number, by name.
        factor: share of its capacity that each NUMA node gives to containers, in thousandths.
        threads: of a core.
        policy, scope: of the kubelet's Topology Manager.
        aligns_cpus: the kubelet pins CPUs, as far as is known.
        aligns_memory: the kubelet pins memory.
        silent: its agent does not place containers now.
        together: whole CPUs that can be exclusive in all, where a floor or a quota makes that less
            than the sum; None where nothing says it.
        charged: `nri_numa.model.charged.marks` of the containers that the numbers count; None where
            the object does not say which these are.
    """

    ids: tuple[int, ...]
    distances: tuple[Column, ...]
    cpu: Resource
    exclusive: Resource
    others: tuple[Resource, ...]
    factor: Column
    after_moving: Column = ()
    threads: int = 1
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    aligns_cpus: bool = True
    aligns_memory: bool = False
    silent: bool = False
    together: int | None = None
    charged: str | None = None

    @cached_property
    def start(self) -> Counts:
        """What is free, as containers are placed from it."""
        free = zip(self.exclusive.free, self.cpu.free, strict=True)
        whole = tuple([min(n, m // 1000) for n, m in free])
        return Counts(whole, self.cpu.free, {one.name: one.free for one in self.others})

    @property
    def moved(self) -> Self:
        """The same once movable containers moved, to judge one container by."""
        free = zip(self.cpu.free, self.after_moving, strict=True)
        return replace(
            self,
            exclusive=replace(self.exclusive, free=self.after_moving),
            cpu=replace(self.cpu, free=tuple([max(m, 1000 * n) for m, n in free])),
        )

    @cached_property
    def capacity(self) -> Mapping[str, Column]:
        """Of `others`, by name."""
        return {one.name: one.capacity for one in self.others}

    def distance(self, one: int, other: int) -> int:
        """Distance between two NUMA nodes, of the firmware's table."""
        return self.distances[self.ids.index(one)][self.ids.index(other)]

    @property
    def sums_of_distances(self) -> Distances:
        """Of its firmware's table; one object for all nodes that are built alike."""
        return _sums_of_distances(self.ids, self.distances)

    def places(self, numa_nodes: NUMASet) -> list[int]:
        """Positions of NUMA nodes in the columns; others than it has are passed over."""
        bits = numa_nodes.bits
        return [place for place, i in enumerate(self.ids) if bits >> i & 1]

    def kept(self, request: ContainerRequest) -> int:
        """CPUs that a container keeps to itself, with siblings that stay idle."""
        return request.exclusive * (self.threads if request.smt is SMT.ISOLATE else 1)

    def charge(self, chosen: Iterable[tuple[ContainerRequest, Sequence[int]]]) -> Counts | None:
        """What containers take that are placed one after another; those that end give it back.

        With what movable ones take elsewhere that have to move for them.
        """
        after = self.start
        for one, places in chosen:
            if places and not one.ends:
                after = after.after(one, self.kept(one), places)
        charge = self.start.less(after)
        left = zip(after.exclusive, after.milli, strict=True)
        short = [place for place, both in enumerate(left) if min(both) < 0]
        if charge is None or not self.after_moving or len(short) != 1:
            return charge
        # What moves leaves this NUMA node for others; for which of them, the node decides.
        (place,) = short
        cpus = self.after_moving[place] - self.start.exclusive[place]
        return replace(
            charge,
            exclusive=_elsewhere(charge.exclusive, place, cpus),
            milli=_elsewhere(charge.milli, place, 1000 * cpus),
        )

    def charge_of(self, request: PodRequest, placed: Mapping[str, NUMASet]) -> Counts | None:
        """What a pod takes whose NUMA nodes stand in its annotation, by container."""
        whole = next(iter(placed.values()), NO_NUMA_NODES)
        return self.charge(
            (one, self.places(placed.get(one.container, NO_NUMA_NODES) if one.container else whole))
            for one in request.aligned
        )

    def less(self, charges: Iterable[Counts]) -> Self:
        """What pods leave of it; nothing goes below zero."""
        if not (charges := list(charges)):
            return self
        found = self._changed(charges, -1, lambda capacity, n: max(0, n))
        if self.together is None:
            return found
        together = max(0, self.together - _exclusive(charges))
        # One NUMA node has no more than the node has in all.
        column = tuple([min(count, together) for count in found.exclusive.free])
        return replace(found, together=together, exclusive=replace(found.exclusive, free=column))

    def plus(self, charges: Sequence[Counts]) -> Self:
        """The same with what pods take given back; nothing goes above what there is."""
        found = self._changed(charges, 1, min)
        if self.together is None:
            return found
        return replace(found, together=self.together + _exclusive(charges))

    def _changed(
        self, charges: Sequence[Counts], sign: int, limit: Callable[[int, int], int]
    ) -> Self:
        def changed(resource: Resource, columns: Iterable[Column]) -> Resource:
            free = list(resource.free)
            for column in columns:
                # The node's NUMA nodes may have changed since: then it is of another machine.
                if len(column) == len(free):
                    free = [n + sign * amount for n, amount in zip(free, column, strict=True)]
            return replace(resource, free=tuple(map(limit, resource.capacity, free)))

        return replace(
            self,
            after_moving=(),
            cpu=changed(self.cpu, (one.milli for one in charges)),
            exclusive=changed(self.exclusive, (one.exclusive for one in charges)),
            others=tuple(
                changed(
                    stock, (one.others[stock.name] for one in charges if stock.name in one.others)
                )
                for stock in self.others
            ),
        )


NOTHING_KNOWN = NodeRoom(
    ids=(),
    distances=(),
    cpu=Resource("cpu", (), ()),
    exclusive=Resource("cpu", (), ()),
    others=(),
    factor=(),
)
"""The room of a node of which nothing is known."""


@lru_cache(maxsize=64)
def _sums_of_distances(ids: tuple[int, ...], rows: tuple[Column, ...]) -> Distances:
    place = {numa_node: n for n, numa_node in enumerate(ids)}
    return Distances(lambda one, other: rows[place[one]][place[other]])


class Unreadable(Struct, frozen=True):
    """An object that says nothing certain; ``why`` is a sentence without the node's name."""

    why: str


def _exclusive(charges: Iterable[Counts]) -> int:
    return sum(sum(one.exclusive) for one in charges)


def _take(column: list[int], places: Sequence[int], amount: int, unit: int = 1) -> None:
    """Take units, the first places first; what fits nowhere is counted on the first."""
    if len(places) > 1:
        for place in places:
            part = min(amount, max(0, column[place] // unit))
            column[place] -= part * unit
            amount -= part
    column[places[0]] -= amount * unit


def _elsewhere(column: Column, place: int, amount: int) -> Column:
    """So much is taken everywhere but at one place, which gets it back."""
    return tuple([n - amount if i == place else n + amount for i, n in enumerate(column)])


def _difference(before: Column, after: Column) -> Column:
    return tuple([b - a for b, a in zip(before, after, strict=True)])
