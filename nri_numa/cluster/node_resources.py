"""What the NUMA nodes of one node have and have free, as counts, and what pods take of it.

Which CPUs they are is known on the node alone. Columns hold one number for each NUMA node, in the
order of `NodeResources.ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.cluster.pod_request import ContainerRequest, PodRequest
from nri_numa.engine.align.hints import DistanceSums
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.workload import SMT, Policy, Scope

AmountByPosition = tuple[int, ...]


class NodeResource(Struct, frozen=True, gc=False):
    """A resource by NUMA node: what containers can have, and what of it is free."""

    name: str
    capacity: AmountByPosition
    free: AmountByPosition


class ResourceCounts(Struct, frozen=True, gc=False):
    """What is free while containers are placed one after another, or what a pod takes of it.

    Attributes:
        exclusive: CPUs that can be exclusive and have their whole time free; of a pod, with
            siblings that are kept idle.
        milli: thousandths of a CPU, of exclusive ones too.
        other_resources: memory and huge pages in bytes, devices by number, by name.
    """

    exclusive: AmountByPosition
    milli: AmountByPosition
    other_resources: Mapping[str, AmountByPosition]

    def with_container(
        self, request: ContainerRequest, kept: int, places: Sequence[int]
    ) -> ResourceCounts:
        """What is free once a container is there.

        Args:
            request: of the container; it takes what is allocated to it, not what it may use.
            kept: its exclusive CPUs, with siblings that stay idle.
            places: its NUMA nodes, as positions in the columns; the first are filled first.
        """
        exclusive, milli, others = list(self.exclusive), list(self.milli), self.other_resources
        if request.exclusive_cpus:
            _subtract_units(exclusive, places, kept)
            _subtract_units(milli, places, request.exclusive_cpus, 1000)
        if request.charged_milli:
            _subtract_units(milli, places, request.charged_milli)
        for place in places:
            whole = milli[place] // 1000
            if exclusive[place] > whole:
                exclusive[place] = max(0, whole)
        for name, amount in request.charged_amounts:
            if name in others:
                column = list(others[name])
                _subtract_units(column, places, amount)
                others = {**others, name: tuple(column)}
        return ResourceCounts(tuple(exclusive), tuple(milli), others)

    def difference_to(self, after: ResourceCounts) -> ResourceCounts | None:
        """What was taken between this state and a later one; None for nothing that is counted."""
        exclusive = _subtract_columns(self.exclusive, after.exclusive)
        milli = _subtract_columns(self.milli, after.milli)
        others = {
            name: _subtract_columns(column, after.other_resources[name])
            for name, column in self.other_resources.items()
            if column != after.other_resources[name]
        }
        return (
            ResourceCounts(exclusive, milli, others)
            if others or any(exclusive) or any(milli)
            else None
        )


class NodeResources(Struct, frozen=True, kw_only=True, dict=True, cache_hash=True):
    """The NUMA nodes of one node. Nodes with equal rooms share verdicts, so rooms are keys.

    Attributes:
        ids: NUMA nodes, ascending; there may be holes.
        distances: row by row, in the order of ``ids``.
        cpu: thousandths of a CPU for containers that share.
        exclusive: whole CPUs, and those that can be exclusive.
        exclusive_after_moves: as ``exclusive``, what is free for one container once movable ones
            moved; empty where that is no more, and while pods are on their way.
        other_resources: memory and huge pages in bytes, devices by number, by name.
        factor: share of its capacity that each NUMA node gives to containers, in thousandths.
        threads_per_core: of a core.
        policy, scope: of the kubelet's Topology Manager.
        aligns_cpus: the kubelet pins CPUs, as far as is known.
        aligns_memory: the kubelet pins memory.
        agent_not_ready: its agent does not place containers now.
        exclusive_limit: whole CPUs that can be exclusive in all, where a floor or a quota makes
            that less than the sum; None where nothing says it.
        counted_containers: of those that the numbers count, as
            `nri_numa.model.counted_containers.encode_counted_container_hashes` says; None where
            the object does not say which these are.
    """

    ids: tuple[int, ...]
    distances: tuple[AmountByPosition, ...]
    cpu: NodeResource
    exclusive: NodeResource
    other_resources: tuple[NodeResource, ...]
    factor: AmountByPosition
    exclusive_after_moves: AmountByPosition = ()
    threads_per_core: int = 1
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    aligns_cpus: bool = True
    aligns_memory: bool = False
    agent_not_ready: bool = False
    exclusive_limit: int | None = None
    counted_containers: str | None = None

    @cached_property
    def free_counts(self) -> ResourceCounts:
        """What is free, as containers are placed from it."""
        free = zip(self.exclusive.free, self.cpu.free, strict=True)
        whole = tuple([min(n, m // 1000) for n, m in free])
        return ResourceCounts(
            whole, self.cpu.free, {one.name: one.free for one in self.other_resources}
        )

    @property
    def with_exclusive_after_moves(self) -> Self:
        """The same once movable containers moved, to judge one container by."""
        free = zip(self.cpu.free, self.exclusive_after_moves, strict=True)
        return replace(
            self,
            exclusive=replace(self.exclusive, free=self.exclusive_after_moves),
            cpu=replace(self.cpu, free=tuple([max(m, 1000 * n) for m, n in free])),
        )

    @cached_property
    def capacity_by_resource(self) -> Mapping[str, AmountByPosition]:
        """Of `others`, by name."""
        return {one.name: one.capacity for one in self.other_resources}

    def distance(self, one: int, other: int) -> int:
        """Distance between two NUMA nodes, of the firmware's table."""
        return self.distances[self.ids.index(one)][self.ids.index(other)]

    @property
    def sums_of_distances(self) -> DistanceSums:
        """Of its firmware's table; one object for all nodes that are built alike."""
        return _sums_of_distances(self.ids, self.distances)

    def positions_of(self, numa_nodes: NUMASet) -> list[int]:
        """Positions of NUMA nodes in the columns; others than it has are passed over."""
        bits = numa_nodes.bits
        return [place for place, i in enumerate(self.ids) if bits >> i & 1]

    def cpus_with_idle_siblings(self, request: ContainerRequest) -> int:
        """CPUs that a container keeps to itself, with siblings that stay idle."""
        return request.exclusive_cpus * (self.threads_per_core if request.smt is SMT.ISOLATE else 1)

    def charge_of_containers(
        self, chosen: Iterable[tuple[ContainerRequest, Sequence[int]]]
    ) -> ResourceCounts | None:
        """What containers take that are placed one after another; those that end give it back.

        With what movable ones take elsewhere that have to move for them.
        """
        after = self.free_counts
        for one, places in chosen:
            if places and not one.is_init:
                after = after.with_container(one, self.cpus_with_idle_siblings(one), places)
        charge = self.free_counts.difference_to(after)
        left = zip(after.exclusive, after.milli, strict=True)
        short = [place for place, both in enumerate(left) if min(both) < 0]
        if charge is None or not self.exclusive_after_moves or len(short) != 1:
            return charge
        # What moves leaves this NUMA node for others; for which of them, the node decides.
        (place,) = short
        cpus = self.exclusive_after_moves[place] - self.free_counts.exclusive[place]
        return replace(
            charge,
            exclusive=_shift_charge_to_other_nodes(charge.exclusive, place, cpus),
            milli=_shift_charge_to_other_nodes(charge.milli, place, 1000 * cpus),
        )

    def charge_of_placed_pod(
        self, request: PodRequest, placed: Mapping[str, NUMASet]
    ) -> ResourceCounts | None:
        """What a pod takes whose NUMA nodes stand in its annotation, by container."""
        whole = next(iter(placed.values()), NO_NUMA_NODES)
        return self.charge_of_containers(
            (
                one,
                self.positions_of(
                    placed.get(one.container, NO_NUMA_NODES) if one.container else whole
                ),
            )
            for one in request.plugin_aligned_requests
        )

    def minus_pods(self, charges: Iterable[ResourceCounts]) -> Self:
        """What pods leave of it; nothing goes below zero."""
        if not (charges := list(charges)):
            return self
        found = self._without_charges(charges)
        if self.exclusive_limit is None:
            return found
        together = max(0, self.exclusive_limit - _sum_exclusive_cpus(charges))
        # One NUMA node has no more than the node has in all.
        column = tuple([min(count, together) for count in found.exclusive.free])
        return replace(
            found, exclusive_limit=together, exclusive=replace(found.exclusive, free=column)
        )

    def _without_charges(self, charges: Sequence[ResourceCounts]) -> Self:
        def take(resource: NodeResource, columns: Iterable[AmountByPosition]) -> NodeResource:
            free = list(resource.free)
            for column in columns:
                # The node's NUMA nodes may have changed since: then it is of another machine.
                if len(column) == len(free):
                    free = [n - amount for n, amount in zip(free, column, strict=True)]
            return replace(resource, free=tuple([max(0, n) for n in free]))

        return replace(
            self,
            exclusive_after_moves=(),
            cpu=take(self.cpu, (one.milli for one in charges)),
            exclusive=take(self.exclusive, (one.exclusive for one in charges)),
            other_resources=tuple(
                take(
                    stock,
                    (
                        one.other_resources[stock.name]
                        for one in charges
                        if stock.name in one.other_resources
                    ),
                )
                for stock in self.other_resources
            ),
        )


NO_NODE_RESOURCES = NodeResources(
    ids=(),
    distances=(),
    cpu=NodeResource("cpu", (), ()),
    exclusive=NodeResource("cpu", (), ()),
    other_resources=(),
    factor=(),
)
"""The room of a node of which nothing is known."""


@lru_cache(maxsize=64)
def _sums_of_distances(ids: tuple[int, ...], rows: tuple[AmountByPosition, ...]) -> DistanceSums:
    place = {numa_node: n for n, numa_node in enumerate(ids)}
    return DistanceSums(lambda one, other: rows[place[one]][place[other]])


class UnreadableTopology(Struct, frozen=True):
    """An object that says nothing certain; ``reason`` is a sentence without the node's name."""

    reason: str


def _sum_exclusive_cpus(charges: Iterable[ResourceCounts]) -> int:
    return sum(sum(one.exclusive) for one in charges)


def _subtract_units(column: list[int], places: Sequence[int], amount: int, unit: int = 1) -> None:
    """Take units, the first places first; what fits nowhere is counted on the first."""
    if len(places) > 1:
        for place in places:
            part = min(amount, max(0, column[place] // unit))
            column[place] -= part * unit
            amount -= part
    column[places[0]] -= amount * unit


def _shift_charge_to_other_nodes(
    column: AmountByPosition, place: int, amount: int
) -> AmountByPosition:
    """So much is taken everywhere but at one place, which gets it back."""
    return tuple([n - amount if i == place else n + amount for i, n in enumerate(column)])


def _subtract_columns(before: AmountByPosition, after: AmountByPosition) -> AmountByPosition:
    return tuple([b - a for b, a in zip(before, after, strict=True)])
