"""Capacity and free amounts of one node's NUMA nodes, as counts, and the charges of pods.

The CPU numbers are known on the node alone. Columns hold one number for each NUMA node, in the
order of `NodeResources.ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Capacity and free amount of a resource by NUMA node."""

    name: str
    capacity: AmountByPosition
    free: AmountByPosition


class ResourceCounts(Struct, frozen=True, gc=False):
    """Free amounts while containers are placed one after another, or the charge of a pod.

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
        self, request: ContainerRequest, cpus: int, positions: Sequence[int]
    ) -> ResourceCounts:
        """Return the free amounts after placing a container.

        Args:
            request: of the container, charged with its allocated amounts, not its limits.
            cpus: number of its exclusive CPUs, with idle siblings.
            positions: its NUMA nodes, as positions in the columns; the first are filled first.
        """
        exclusive, milli, resources = list(self.exclusive), list(self.milli), self.other_resources
        if request.exclusive_cpus:
            _subtract_units(exclusive, positions, cpus)
            _subtract_units(milli, positions, request.exclusive_cpus, 1000)
        if request.charged_milli:
            _subtract_units(milli, positions, request.charged_milli)
        for position in positions:
            whole_cpus = milli[position] // 1000
            if exclusive[position] > whole_cpus:
                exclusive[position] = max(0, whole_cpus)
        for name, amount in request.charged_amounts:
            if name in resources:
                column = list(resources[name])
                _subtract_units(column, positions, amount)
                resources = {**resources, name: tuple(column)}
        return ResourceCounts(tuple(exclusive), tuple(milli), resources)

    def difference_to(self, later_counts: ResourceCounts) -> ResourceCounts | None:
        """Return the amounts taken between this state and a later one; None for none."""
        return _nonzero_counts(
            _subtract_columns(self.exclusive, later_counts.exclusive),
            _subtract_columns(self.milli, later_counts.milli),
            {
                name: _subtract_columns(column, later_counts.other_resources[name])
                for name, column in self.other_resources.items()
            },
        )


class NodeResources(Struct, frozen=True, kw_only=True, dict=True, cache_hash=True):
    """The NUMA nodes of one node. Nodes with equal resources share verdicts, so these are keys.

    Attributes:
        ids: NUMA nodes, ascending; there may be holes.
        distances: row by row, in the order of ``ids``.
        cpu: thousandths of a CPU for containers in the shared pool.
        exclusive: whole CPUs, and those that can be exclusive.
        exclusive_after_moves: free exclusive CPUs for one container after moves of others; empty if
            that is no more than now, and while pods are assumed.
        other_resources: memory and huge pages in bytes, devices by number, by name.
        factor: capacity factor of each NUMA node, in thousandths.
        threads_per_core: hardware threads of a core.
        policy, scope: of the kubelet's Topology Manager.
        aligns_cpus: the kubelet pins CPUs, or may do so.
        aligns_memory: the kubelet pins memory.
        agent_not_ready: its agent does not place containers now.
        exclusive_limit: whole CPUs that can be exclusive in all, if a floor or a quota makes that
            less than the sum; None if it is unknown.
        counted_containers: containers that the numbers count, in the form of
            `nri_numa.model.counted_containers.encode_counted_container_hashes`; None if the object
            does not list them.
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
        """Free amounts from which containers are placed."""
        pairs = zip(self.exclusive.free, self.cpu.free, strict=True)
        whole_cpus = tuple([min(n, m // 1000) for n, m in pairs])
        return ResourceCounts(
            whole_cpus, self.cpu.free, {r.name: r.free for r in self.other_resources}
        )

    @property
    def with_exclusive_after_moves(self) -> Self:
        """The resources after moves of movable containers, to evaluate one container by."""
        pairs = zip(self.cpu.free, self.exclusive_after_moves, strict=True)
        return replace(
            self,
            exclusive=replace(self.exclusive, free=self.exclusive_after_moves),
            cpu=replace(self.cpu, free=tuple([max(m, 1000 * n) for m, n in pairs])),
        )

    def with_devices_freed(self, devices: Mapping[str, int]) -> Self:
        """Return the resources with more free devices, by resource, wherever they may be."""

        def free_more(resource: NodeResource) -> NodeResource:
            count = devices.get(resource.name, 0)
            columns = zip(resource.free, resource.capacity, strict=True)
            return replace(resource, free=tuple([min(n + count, limit) for n, limit in columns]))

        return replace(
            self,
            other_resources=tuple(
                [free_more(r) if r.name in devices else r for r in self.other_resources]
            ),
        )

    @cached_property
    def capacity_by_resource(self) -> Mapping[str, AmountByPosition]:
        """Capacity of `other_resources`, by name."""
        return {r.name: r.capacity for r in self.other_resources}

    def distance(self, numa_node: int, target: int) -> int:
        """Return the distance between two NUMA nodes, from the firmware's table."""
        return self.distances[self.ids.index(numa_node)][self.ids.index(target)]

    @property
    def sums_of_distances(self) -> DistanceSums:
        """Sums of the firmware's distances; one object for all nodes that are built alike."""
        return _sums_of_distances(self.ids, self.distances)

    def positions_of(self, numa_nodes: NUMASet) -> list[int]:
        """Return the positions of NUMA nodes in the columns; unknown ones are ignored."""
        bits = numa_nodes.bits
        return [position for position, i in enumerate(self.ids) if bits >> i & 1]

    def cpus_with_idle_siblings(self, request: ContainerRequest) -> int:
        """Return the number of a container's exclusive CPUs and idle siblings."""
        return request.exclusive_cpus * (self.threads_per_core if request.smt is SMT.ISOLATE else 1)

    def charge_of_containers(
        self, placements: Iterable[tuple[ContainerRequest, Sequence[int]]]
    ) -> ResourceCounts | None:
        """Return the charge of containers placed in order; init containers that end have none.

        Movable containers that must move for them are charged on the other NUMA nodes.
        """
        counts = self.free_counts
        for c, positions in placements:
            if positions and not c.is_init:
                counts = counts.with_container(c, self.cpus_with_idle_siblings(c), positions)
        charge = self.free_counts.difference_to(counts)
        columns = zip(counts.exclusive, counts.milli, strict=True)
        deficits = [position for position, amounts in enumerate(columns) if min(amounts) < 0]
        if charge is None or not self.exclusive_after_moves or len(deficits) != 1:
            return charge
        # The moved containers leave this NUMA node; the node decides to which others.
        (position,) = deficits
        cpus = self.exclusive_after_moves[position] - self.free_counts.exclusive[position]
        return replace(
            charge,
            exclusive=_shift_charge_to_other_nodes(charge.exclusive, position, cpus),
            milli=_shift_charge_to_other_nodes(charge.milli, position, 1000 * cpus),
        )

    def charge_of_placed_pod(
        self, request: PodRequest, placed: Mapping[str, NUMASet]
    ) -> ResourceCounts | None:
        """Return the charge of a pod by the NUMA nodes of its containers' annotation."""
        return self.charge_of_containers(self._placed_requests(request, placed))

    def _placed_requests(
        self, request: PodRequest, placed: Mapping[str, NUMASet]
    ) -> Iterator[tuple[ContainerRequest, Sequence[int]]]:
        """Yield what the plugin places, and its positions by the NUMA nodes of containers."""
        pod_nodes = next(iter(placed.values()), NO_NUMA_NODES)
        for c in request.plugin_aligned_requests:
            nodes = placed.get(c.container, NO_NUMA_NODES) if c.container else pod_nodes
            yield c, self.positions_of(nodes)

    def min_release_of_pod(
        self, request: PodRequest, placed: Mapping[str, NUMASet]
    ) -> ResourceCounts | None:
        """Return what the end of a placed pod gives back at least; None for nothing.

        A container on several NUMA nodes gives back on each what the others cannot hold: how it was
        split is unknown.
        """
        exclusive, milli = [0] * len(self.ids), [0] * len(self.ids)
        resources = {r.name: [0] * len(self.ids) for r in self.other_resources}
        for c, positions in self._placed_requests(request, placed):
            if c.is_init:
                continue
            cpus, capacity = self.cpus_with_idle_siblings(c), self.exclusive.capacity
            _add_min_shares(exclusive, cpus, positions, capacity)
            cpu_milli = 1000 * c.exclusive_cpus + c.charged_milli
            _add_min_shares(milli, cpu_milli, positions, self.cpu.capacity)
            for name, amount in c.charged_amounts:
                if name in resources:
                    capacity = self.capacity_by_resource[name]
                    _add_min_shares(resources[name], amount, positions, capacity)
        return _nonzero_counts(exclusive, milli, resources)

    def plus_pods(
        self, charges: Iterable[ResourceCounts], movable_charges: Iterable[ResourceCounts] = ()
    ) -> Self:
        """Return the resources with those that pods give back, never above the capacity.

        ``exclusive_after_moves`` may have the CPUs of movable pods already.
        """
        immovable = list(charges)
        if not (charges := [*immovable, *movable_charges]):
            return self
        resources = self._map_columns(_release_columns, charges)
        free_cpus = resources.exclusive.free
        exclusive_after_moves: AmountByPosition = ()
        if self.exclusive_after_moves:
            exclusive = replace(self.exclusive, free=self.exclusive_after_moves)
            column = _release_columns(exclusive, [c.exclusive for c in immovable]).free
            exclusive_after_moves = tuple(map(max, column, free_cpus))
        is_more, limit = exclusive_after_moves != free_cpus, self.exclusive_limit
        return replace(
            resources,
            exclusive_after_moves=exclusive_after_moves if is_more else (),
            exclusive_limit=None if limit is None else limit + _sum_exclusive_cpus(charges),
        )

    def minus_pods(self, charges: Iterable[ResourceCounts]) -> Self:
        """Return the resources less the charges of pods, never below zero."""
        if not (charges := list(charges)):
            return self
        resources = replace(self._map_columns(_charge_columns, charges), exclusive_after_moves=())
        if self.exclusive_limit is None:
            return resources
        total = max(0, self.exclusive_limit - _sum_exclusive_cpus(charges))
        # One NUMA node has no more than the node has in all.
        column = tuple([min(count, total) for count in resources.exclusive.free])
        return replace(
            resources, exclusive_limit=total, exclusive=replace(resources.exclusive, free=column)
        )

    def _map_columns(
        self,
        change: Callable[[NodeResource, Sequence[AmountByPosition]], NodeResource],
        charges: Sequence[ResourceCounts],
    ) -> Self:
        """Return the resources, each changed by its columns of the charges."""
        return replace(
            self,
            cpu=change(self.cpu, [c.milli for c in charges]),
            exclusive=change(self.exclusive, [c.exclusive for c in charges]),
            other_resources=tuple(
                change(
                    r, [c.other_resources[r.name] for c in charges if r.name in c.other_resources]
                )
                for r in self.other_resources
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
"""The resources of a node without a topology."""


@lru_cache(maxsize=64)
def _sums_of_distances(ids: tuple[int, ...], rows: tuple[AmountByPosition, ...]) -> DistanceSums:
    positions = {numa_node: n for n, numa_node in enumerate(ids)}
    return DistanceSums(lambda one, other: rows[positions[one]][positions[other]])


class UnreadableTopology(Struct, frozen=True):
    """An unreadable object; ``reason`` is a sentence without the node's name."""

    reason: str


def _release_columns(resource: NodeResource, columns: Sequence[AmountByPosition]) -> NodeResource:
    sums = map(sum, zip(resource.free, *columns, strict=True))
    return replace(resource, free=tuple(map(min, sums, resource.capacity)))


def _charge_columns(resource: NodeResource, columns: Sequence[AmountByPosition]) -> NodeResource:
    counts = resource.free
    for column in columns:
        # A column of another length is from before a change of the node's NUMA nodes.
        if len(column) == len(counts):
            counts = _subtract_columns(counts, column)
    return replace(resource, free=tuple([max(0, n) for n in counts]))


def _nonzero_counts(
    exclusive: Sequence[int], milli: Sequence[int], resources: Mapping[str, Sequence[int]]
) -> ResourceCounts | None:
    """Return amounts without resources that have none anywhere; None if no amount is left."""
    columns = {name: tuple(column) for name, column in resources.items() if any(column)}
    if not (columns or any(exclusive) or any(milli)):
        return None
    return ResourceCounts(tuple(exclusive), tuple(milli), columns)


def _sum_exclusive_cpus(charges: Iterable[ResourceCounts]) -> int:
    return sum(sum(c.exclusive) for c in charges)


def _subtract_units(
    column: list[int], positions: Sequence[int], amount: int, unit: int = 1
) -> None:
    """Subtract units, the first positions first; an excess is charged to the first."""
    if len(positions) > 1:
        for position in positions:
            part = min(amount, max(0, column[position] // unit))
            column[position] -= part * unit
            amount -= part
    column[positions[0]] -= amount * unit


def _add_min_shares(
    column: list[int], amount: int, positions: Sequence[int], capacity: AmountByPosition
) -> None:
    """Add the part of an amount that each position has at least."""
    total = sum(capacity[position] for position in positions)
    for position in positions:
        column[position] += max(0, amount - (total - capacity[position]))


def _shift_charge_to_other_nodes(
    column: AmountByPosition, position: int, amount: int
) -> AmountByPosition:
    """Add an amount everywhere except at one position, which is reduced by it."""
    return tuple([n - amount if i == position else n + amount for i, n in enumerate(column)])


def _subtract_columns(column: AmountByPosition, amounts: AmountByPosition) -> AmountByPosition:
    return tuple([n - amount for n, amount in zip(column, amounts, strict=True)])
