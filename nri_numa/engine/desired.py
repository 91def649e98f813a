"""What every container should have in one state of the node: worked out here and nowhere else.

The state says who owns what; the machine says which CPUs are there. What follows from both for
the cpuset of a container is asked of a `NodeSnapshot`: by answers to the runtime, Synchronize,
repairs of cgroups, systemd, `status`, the page, metrics and the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import (
    UNPINNED_GROUP_KEY,
    Allocation,
    ContainerKind,
    NodeState,
    shared_group_cpus,
    shared_group_key,
    withheld_isolated_bits,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import NO_CFS_QUOTA, ActualCgroup
from nri_numa.model.workload import Container, ContainerUpdate, Resources

_IdSetT = TypeVar("_IdSetT", CPUSet, NUMASet)


class NodeSnapshot(msgspec.Struct, frozen=True, dict=True):
    """One state of one machine at one moment, and what follows from it, each worked out once.

    Attributes:
        reading: what the kernel and the kubelet have free; None where nobody asked them.
        now: Unix time in seconds.
        narrowed_at: Unix time in seconds until which the shared pool was last narrower than the
            machine, as far as we know; None where it never was.
    """

    machine: NodeModel
    state: NodeState
    reading: MeasuredFree | None = None
    now: float = 0.0
    narrowed_at: float | None = None

    def with_state(self, state: NodeState) -> NodeSnapshot:
        """The same moment in another state; itself where that is its own."""
        if state is self.state:
            return self
        return NodeSnapshot(self.machine, state, self.reading, self.now, self.narrowed_at)

    @cached_property
    def pool(self) -> CPUSet:
        """The shared pool."""
        machine = self.machine
        return CPUSet.from_bits(self.state.pool_bits(machine.topology, machine.settings))

    @property
    def exclusive_pool_bits(self) -> int:
        """The bits of CPUs of which a container may own some: the pool's, and isolated ones."""
        machine = self.machine
        apart = withheld_isolated_bits(machine.topology, machine.settings)
        return self.pool.bits | apart & ~self.state.unavailable_bits

    @cached_property
    def free_cpu_milli(self) -> dict[int, int]:
        """By NUMA node, thousandths of a CPU that can still be promised; never negative."""
        machine, charges = self.machine, self.state.charges
        left = {
            i: max(0, n - charges[i].cpu_milli) if i in charges else n
            for i, n in machine.cpu_capacity_milli.items()
        }
        withdrawn = self.state.unavailable_bits
        if withdrawn:
            for i, cpus in machine.allowed_cpus_by_node.items():
                if cpus.bits & withdrawn:
                    left[i] = self._free_shared_on(i, left, self.exclusive_pool_bits)
        return left

    @property
    def free_shared_milli(self) -> dict[int, int]:
        """Of `free_cpu_milli`, which counts isolated CPUs that only owners get, what is shared."""
        left, machine = self.free_cpu_milli, self.machine
        if not machine.withheld_isolated_cpus.bits:
            return left
        return {
            i: self._free_shared_on(i, left, self.pool.bits) for i in machine.allowed_cpus_by_node
        }

    @cached_property
    def free_memory(self) -> dict[int, int]:
        """By NUMA node, bytes left: bookable, and never more than the kernel has.

        The kubelet's rules look neither at what the kernel has nor at what is not pinned.
        """
        machine, state, reading = self.machine, self.state, self.reading
        kubelet_memory = machine.settings.kubelet.memory
        free = {} if reading is None or kubelet_memory else reading.memory
        charges = {i: charge.memory for i, charge in state.charges.items()}
        if state.unpinned_memory and not kubelet_memory:
            for i, amount in self._unpinned_memory_by_node().items():
                charges[i] = charges.get(i, 0) + amount
        return _free_amounts(machine.memory_capacity, charges, state.kubelet.memory, free)

    def _unpinned_memory_by_node(self) -> dict[int, int]:
        """By NUMA node, bytes to expect there of requests that nothing pins to a NUMA node.

        On the NUMA nodes of their containers' CPUs, where those are bound and have memory, else on
        all; in proportion to what these have.
        """
        capacity = {i: n for i, n in self.machine.memory_capacity.items() if n}
        amounts = dict.fromkeys(capacity, 0)
        for bits, amount in self.state.unpinned_memory.items():
            nodes = [i for i in capacity if bits >> i & 1] or capacity
            total = sum(capacity[i] for i in nodes)
            for i in nodes:
                amounts[i] += amount * capacity[i] // total
        return amounts

    def free_hugepages(self, size: int) -> dict[int, int]:
        """By NUMA node, bytes of huge pages of one size left; as with `free_memory`."""
        machine, state, reading = self.machine, self.state, self.reading
        free: dict[int, int] = {}
        if reading is not None and not machine.settings.kubelet.memory:
            free = {i: n[size] for i, n in reading.hugepages.items() if size in n}
        charges = {i: charge.hugepages.get(size, 0) for i, charge in state.charges.items()}
        granted = {i: pages.get(size, 0) for i, pages in state.kubelet.hugepages.items()}
        return _free_amounts(machine.hugepages_capacity(size), charges, granted, free)

    def _free_shared_on(self, i: int, left: dict[int, int], among: int) -> int:
        """No more than is left, and than the CPUs of a NUMA node among some serve besides."""
        cpus = self.machine.allowed_cpus_by_node[i]
        serves = self.machine.shared_milli_of((cpus.bits & among).bit_count())
        return max(0, min(left[i], serves - self.state.shared_milli(i, cpus)))

    def cpuset_of(self, a: Allocation) -> CPUSet:
        """CPUs that we write for a container; empty means leave it alone.

        An unbound container is left alone while the pool is the whole machine, and a foreign one
        always. CPUs that went offline are left out, and come back when they do; those of a list
        that yields to owners come back when these are gone.
        """
        if a.kind is ContainerKind.FOREIGN:
            return NO_CPUS
        key = shared_group_key(a)
        if key is None:
            own = a.cpus.bits & self.machine.topology.online.bits
            return self.pool if not own and self.has_all_cpus_offline(a) else CPUSet.from_bits(own)
        if key == UNPINNED_GROUP_KEY and self.is_pool_whole:
            return NO_CPUS
        return self.group_cpuset(key)

    def cpuset_with_pool_restored(self, a: Allocation, *, has_cpuset: bool) -> CPUSet:
        """`cpuset_of`, and the pool for an unbound container whose cpuset we may have narrowed.

        Only one that has a cpuset (``has_cpuset``) can have been narrowed, while the pool was
        narrower than the machine. One whose memory we bind is ours, whoever wrote its CPUs.
        """
        cpus = self.cpuset_of(a)
        if cpus.bits or a.kind is not ContainerKind.UNPINNED or not has_cpuset:
            return cpus
        was_narrowed = self.narrowed_at is not None and a.assigned_at <= self.narrowed_at
        return self.pool if a.mems or was_narrowed else NO_CPUS

    def usable_cpus_of(self, a: Allocation) -> CPUSet:
        """CPUs that a container may use, for people and sums: where we leave it alone, too."""
        return self.cpuset_of(a) or a.foreign_cpus or self.pool

    @property
    def is_pool_whole(self) -> bool:
        """Whether the shared pool is the whole machine, so that unbound containers are left."""
        return self.pool.bits == self.machine.topology.allowed.bits

    def group_cpuset(self, key: int) -> CPUSet:
        """CPUs of a group of containers that follow the pool."""
        return shared_group_cpus(key, self.pool, self.machine.topology, self.state.unavailable_bits)

    def has_all_cpus_offline(self, a: Allocation) -> bool:
        """Whether a container is on the shared pool because all CPUs of its own are offline."""
        if shared_group_key(a) is not None or not a.cpus or a.reserved_at:
            return False
        return not a.cpus & self.machine.topology.online


def _free_amounts(
    total: Mapping[int, int],
    charges: Mapping[int, int],
    granted: Mapping[int, int] = MappingProxyType({}),
    free: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """By NUMA node, what is neither booked nor granted, and never more than what is free."""
    amounts = {i: max(0, n - charges.get(i, 0) - granted.get(i, 0)) for i, n in total.items()}
    return {i: min(n, free.get(i, n)) for i, n in amounts.items()} if free else amounts


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One container that has something else than it should.

    Attributes:
        cpus, mems: what to write; empty where nothing is to be, or could be.
        quota: `NO_CFS_QUOTA` where another program gave back a quota that was lifted; None leaves
        it.
        desired_cpus, desired_mems: what it should be able to use; empty where it is so.
        actual: what it has.
        blocked_cpus, blocked_mems: why the kernel would refuse these lists.
        rank: 0 when it runs on CPUs that belong to another container, 1 when it owns CPUs itself,
            2 otherwise.
    """

    container_id: str
    name: str
    cpus: CPUSet = NO_CPUS
    mems: NUMASet = NO_NUMA_NODES
    quota: int | None = None
    desired_cpus: CPUSet = NO_CPUS
    desired_mems: NUMASet = NO_NUMA_NODES
    actual: ActualCgroup
    blocked_cpus: str = ""
    blocked_mems: str = ""
    rank: int = 2

    @property
    def is_report_only(self) -> bool:
        """Whether there is nothing that could be written, only something to report."""
        return not (self.cpus or self.mems or self.quota)

    @property
    def sort_key(self) -> tuple[int, str]:
        """Sort key: what disturbs an owner first, then owners, then by id."""
        return self.rank, self.container_id

    @property
    def obstacle(self) -> str:
        """Which cgroup above or below keeps it from what it should have; empty when none does."""
        return "; ".join(self._blocked_texts) or self.actual.above

    @property
    def _blocked_texts(self) -> dict[str, None]:
        return dict.fromkeys(filter(None, (self.blocked_cpus, self.blocked_mems)))

    @property
    def finding(self) -> str:
        """What was found, for people."""
        actual, texts = self.actual, list[str]()
        if desired := self.desired_cpus:
            if self.cpus or self.blocked_cpus:
                texts.append(f"cpuset.cpus is {actual.cpus or 'empty'}, meant {desired}")
            else:
                above = f" ({actual.above})" if actual.above else ""
                texts.append(
                    _limited_by_parent_cgroup_text("cpus", actual.cpus, actual.effective_cpus)
                    + above
                )
        if mems := self.desired_mems:
            if self.mems or self.blocked_mems:
                texts.append(f"cpuset.mems is {actual.mems or 'empty'}, meant {mems}")
            else:
                texts.append(
                    _limited_by_parent_cgroup_text("mems", actual.mems, actual.effective_mems)
                )
        if self.quota:
            texts.append(f"the CFS quota is {actual.quota} µs, meant none")
        return "; ".join((*texts, *self._blocked_texts))

    def without_blocked_lists(self, cpus: str, mems: str) -> Drift:
        """Without the lists that the kernel would refuse, for the reasons given."""
        if not (cpus or mems):
            return self
        return replace(
            self,
            cpus=NO_CPUS if cpus else self.cpus,
            mems=NO_NUMA_NODES if mems else self.mems,
            blocked_cpus=cpus,
            blocked_mems=mems,
        )

    @property
    def to_update(self) -> ContainerUpdate:
        """What to send to the runtime."""
        return ContainerUpdate(
            container_id=self.container_id,
            cpus=str(self.cpus),
            mems=str(self.mems),
            cpu_quota=self.quota,
        )


def _limited_by_parent_cgroup_text(
    name: str, written: CPUSet | NUMASet, effective: CPUSet | NUMASet
) -> str:
    left = f"but a cgroup above leaves {effective or 'none'} of it"
    return f"cpuset.{name} is {written} as meant, {left}"


def drift_of_container(
    desired: NodeSnapshot, a: Allocation, actual: ActualCgroup, *, online_only: bool = True
) -> Drift | None:
    """What of a container is not as it should be; None where all is, and for foreign ones.

    What it can really use is what counts. Where that is less than what was written, which is as
    meant, a cgroup above is in the way and nothing is to be written. A cgroup keeps CPUs and memory
    nodes that went offline; ``online_only`` passes over them.
    """
    if a.kind is ContainerKind.FOREIGN:
        return None
    topology, mems = desired.machine.topology, a.mems
    cpus = desired.cpuset_with_pool_restored(a, has_cpuset=actual.cpus.bits != 0)
    written_cpus, written_mems = actual.cpus, actual.mems
    if online_only:
        mems, written_mems = mems & topology.memory_nodes, written_mems & topology.memory_nodes
        written_cpus = written_cpus & topology.online
    if cpus.bits == actual.effective_cpus.bits:
        cpus = NO_CPUS
    if mems.bits == actual.effective_mems.bits:
        mems = NO_NUMA_NODES
    is_throttled = a.lifted_quota is not None and (actual.quota or 0) > 0
    if not (cpus.bits or mems.bits or is_throttled):
        return None
    intrudes = actual.effective_cpus.bits and _intrudes(desired.state, a, actual.effective_cpus)
    return Drift(
        container_id=a.container_id,
        name=a.full_name,
        cpus=NO_CPUS if written_cpus.bits == cpus.bits else cpus,
        mems=NO_NUMA_NODES if written_mems.bits == mems.bits else mems,
        quota=NO_CFS_QUOTA if is_throttled else None,
        desired_cpus=cpus,
        desired_mems=mems,
        actual=actual,
        rank=0 if intrudes else 1 if a.exclusive else 2,
    )


def _intrudes(state: NodeState, a: Allocation, cpus: CPUSet) -> bool:
    """Whether some of these CPUs belong to another container."""
    own = a.cpus | a.idle_siblings if a.exclusive else NO_CPUS
    own = own | state.kubelet.cpus_of(a.pod_uid, a.container, a.container_id)
    return bool(cpus & (state.unavailable_cpus - own))


def plan_corrections(
    desired: NodeSnapshot, observed: Mapping[str, ActualCgroup]
) -> tuple[Drift, ...]:
    """Compare real cgroups with what was meant, in the order in which to put them right.

    Every correction moves one container to exactly what the state means for it and touches no
    other. So a plan may be cut off after any of them, the state may change meanwhile, and a new
    plan goes on from there: nothing that was put right is undone. Containers without a cgroup are
    not observed, and ids that the state does not know are passed over: both come and go meanwhile.
    """
    known = desired.state.allocations
    found = (
        drift_of_container(desired, known[i], real) for i, real in observed.items() if i in known
    )
    return tuple(sorted((d for d in found if d is not None), key=lambda d: d.sort_key))


def recorded_actual(cpus: str, mems: str, quota: int | None) -> ActualCgroup:
    """What a runtime remembers of a container, or was asked to write; what is no list is none."""
    has_cpus = _parse_list(CPUSet, cpus) if cpus else NO_CPUS
    has_mems = _parse_list(NUMASet, mems) if mems else NO_NUMA_NODES
    return ActualCgroup(
        cpus=has_cpus,
        mems=has_mems,
        effective_cpus=has_cpus,
        effective_mems=has_mems,
        quota=quota,
    )


def _parse_list(kind: type[_IdSetT], text: str) -> _IdSetT:
    try:
        return kind.parse(text)
    except ListFormatError:
        return kind()


def answer_to_update(
    before: NodeSnapshot, after: NodeSnapshot, container: Container, update: Resources
) -> ContainerUpdate | None:
    """Override the request only where the runtime would write something else than is meant.

    Runtimes send the cpuset that they remember with any update, and what is meant may be newer.
    Where one remembers none it sends none; but systemd then writes what *it* has for the scope. Any
    override makes containerd lose the request's swap limit, so none is sent without need.
    """
    had, a = (s.state.allocations[container.id] for s in (before, after))
    if a.kind is ContainerKind.FOREIGN:
        return None
    record, by_systemd = container.resources, ":" in container.cgroups_path
    cpus, mems = update.cpus or record.cpus, update.mems or record.mems
    drift = drift_of_container(
        after, a, recorded_actual(cpus, mems, update.cpu_quota), online_only=False
    )
    cpus_meant = mems_meant = ""  # memory nodes stay for life
    if a.cpus != had.cpus or a.kind is not had.kind:
        cpus_meant = str(after.cpuset_with_pool_restored(a, has_cpuset=bool(cpus)))
    elif drift is not None and (cpus or by_systemd):
        cpus_meant = str(drift.cpus)
    if drift is not None and (mems or by_systemd):
        mems_meant = str(drift.mems)
    quota = _answered_quota(a, had, update)
    if not (cpus_meant or mems_meant or quota is not None):
        return None
    return ContainerUpdate(container.id, cpus=cpus_meant, mems=mems_meant, cpu_quota=quota)


def _answered_quota(a: Allocation, had: Allocation, update: Resources) -> int | None:
    """A quota to lift with the request, or to give back; None leaves the request's."""
    if a.lifted_quota is not None:
        return NO_CFS_QUOTA if had.lifted_quota is None or (update.cpu_quota or 0) > 0 else None
    return None if update.cpu_quota else had.lifted_quota or None


def updates_between(
    before: NodeSnapshot, after: NodeSnapshot, *, skip: str = "", resized: Iterable[str] = ()
) -> tuple[ContainerUpdate, ...]:
    """Updates of containers that should have other CPUs now.

    First those whose own CPUs were ``resized``, then groups whose CPUs differ, an update for each
    member, in id order; then, where CPUs of owners are or were offline, containers with CPUs of
    their own. The cost is in the groups and in the containers that really change, not in all
    containers. While the pool stays the whole machine, only those unbound containers have other
    CPUs that we narrowed before, and only where CPUs came.
    """
    old, new, same_machine = before.state, after.state, before.machine is after.machine
    if (
        same_machine
        and old.exclusive is new.exclusive
        and old.idle_siblings is new.idle_siblings
        and old.kubelet is new.kubelet
    ):
        return ()  # nothing that the pool is made of
    updates = [ContainerUpdate(i, str(after.cpuset_of(new.allocations[i]))) for i in resized]
    if (
        not same_machine
        or before.pool.bits != after.pool.bits
        or old.unavailable_bits != new.unavailable_bits
    ):
        updates += _group_updates(before, after, skip)
        offline = (new.exclusive.bits | new.listed_cpus.bits) & ~after.machine.topology.online.bits
        if offline or not same_machine:
            updates += _own_cpuset_updates(before, after, skip)
    return tuple(updates)


def _group_updates(
    before: NodeSnapshot, after: NodeSnapshot, skip: str
) -> Iterator[ContainerUpdate]:
    """Updates of containers that follow the pool, in groups that should have other CPUs."""
    allocations = after.state.allocations
    is_whole = before.machine is not after.machine and before.is_pool_whole and after.is_pool_whole
    is_larger = after.pool.bits & ~before.pool.bits != 0
    for key, members in sorted(after.state.shared_groups.items()):
        cpus = after.group_cpuset(key)
        if cpus.bits == before.group_cpuset(key).bits:
            continue
        ids = sorted(members)
        if key == UNPINNED_GROUP_KEY and is_whole:
            ids = [
                i
                for i in ids
                if after.cpuset_with_pool_restored(allocations[i], has_cpuset=is_larger)
            ]
        if skip in members:
            ids.remove(skip)
        text = str(cpus)
        yield from (ContainerUpdate(i, text) for i in ids)


def _own_cpuset_updates(
    before: NodeSnapshot, after: NodeSnapshot, skip: str
) -> Iterator[ContainerUpdate]:
    """Updates of containers with CPUs of their own, some of which went offline or came back."""
    for i, a in sorted(after.state.allocations.items()):
        if i != skip and shared_group_key(a) is None and not a.reserved_at:
            cpus = after.cpuset_of(a)
            if cpus and cpus != before.cpuset_of(a):
                yield ContainerUpdate(i, str(cpus))
