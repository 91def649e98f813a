"""Desired cpusets of all containers in one state of the node.

The state has the allocations, the machine the CPUs. A `NodeSnapshot` computes the desired cpuset
from both, for answers to the runtime, Synchronize, repairs of cgroups, systemd, `status`, the page,
metrics and the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

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
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import NO_CFS_QUOTA, ActualCgroup
from nri_numa.model.workload import Container, ContainerUpdate, Resources


class NodeSnapshot(msgspec.Struct, frozen=True, dict=True):
    """State of a machine at one moment, with derived values that are computed once.

    Attributes:
        reading: free amounts of kernel and kubelet; None if they were not read.
        now: Unix time in seconds.
        narrowed_at: last known Unix time in seconds at which the shared pool was narrower than the
            machine; None if it never was.
    """

    machine: NodeModel
    state: NodeState
    reading: MeasuredFree | None = None
    now: float = 0.0
    narrowed_at: float | None = None

    def with_state(self, state: NodeState) -> NodeSnapshot:
        """Return the same moment with another state; itself if the state is the same."""
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
        """Bits of the CPUs that may become exclusive: those of the pool, and isolated ones."""
        machine = self.machine
        isolated_bits = withheld_isolated_bits(machine.topology, machine.settings)
        return self.pool.bits | isolated_bits & ~self.state.unavailable_bits

    @cached_property
    def free_cpu_milli(self) -> dict[int, int]:
        """Thousandths of a CPU that can still be allocated, by NUMA node; never negative."""
        machine, charges = self.machine, self.state.charges
        free_milli = {
            i: max(0, n - charges[i].cpu_milli) if i in charges else n
            for i, n in machine.cpu_capacity_milli.items()
        }
        withdrawn = self.state.unavailable_bits
        if withdrawn:
            for i, cpus in machine.allowed_cpus_by_node.items():
                if cpus.bits & withdrawn:
                    free_milli[i] = self._free_shared_on(i, free_milli, self.exclusive_pool_bits)
        return free_milli

    @property
    def free_shared_milli(self) -> dict[int, int]:
        """Part of `free_cpu_milli` for shared containers, without isolated CPUs."""
        milli, machine = self.free_cpu_milli, self.machine
        if not machine.withheld_isolated_cpus.bits:
            return milli
        return {
            i: self._free_shared_on(i, milli, self.pool.bits) for i in machine.allowed_cpus_by_node
        }

    @cached_property
    def free_memory(self) -> dict[int, int]:
        """Free bytes by NUMA node: unallocated, and at most what the kernel has free.

        The kubelet's rules ignore the kernel's free memory and unpinned containers.
        """
        machine, state, reading = self.machine, self.state, self.reading
        kubelet_memory = machine.settings.kubelet.memory
        kernel_free = {} if reading is None or kubelet_memory else reading.memory
        charges = {i: charge.memory for i, charge in state.charges.items()}
        if state.unpinned_memory and not kubelet_memory:
            for i, amount in self._unpinned_memory_by_node().items():
                charges[i] = charges.get(i, 0) + amount
        return _free_amounts(machine.memory_capacity, charges, state.kubelet.memory, kernel_free)

    def _unpinned_memory_by_node(self) -> dict[int, int]:
        """Estimate by NUMA node the bytes of containers whose memory is not pinned.

        They are split in proportion to capacity: over the NUMA nodes of the container's CPUs if
        those are pinned and have memory, else over all.
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
        """Return free bytes of huge pages of one size by NUMA node, as `free_memory` does."""
        machine, state, reading = self.machine, self.state, self.reading
        kernel_free: dict[int, int] = {}
        if reading is not None and not machine.settings.kubelet.memory:
            kernel_free = {i: n[size] for i, n in reading.hugepages.items() if size in n}
        charges = {i: charge.hugepages.get(size, 0) for i, charge in state.charges.items()}
        granted = {i: pages.get(size, 0) for i, pages in state.kubelet.hugepages.items()}
        return _free_amounts(machine.hugepages_capacity(size), charges, granted, kernel_free)

    def _free_shared_on(self, i: int, free_milli: dict[int, int], cpu_bits: int) -> int:
        """Return free milli CPUs of a NUMA node, at most what its CPUs in ``cpu_bits`` serve."""
        cpus = self.machine.allowed_cpus_by_node[i]
        serves = self.machine.shared_milli_of((cpus.bits & cpu_bits).bit_count())
        return max(0, min(free_milli[i], serves - self.state.shared_milli(i, cpus)))

    def cpuset_of(self, a: Allocation) -> CPUSet:
        """Return the cpuset to write for a container; empty means that none is written.

        None is written for foreign containers, and for unpinned ones while the pool is the whole
        machine. Offline CPUs are left out until they are online again. A yielding list gets CPUs
        back that are no longer exclusive to others.
        """
        if a.kind is ContainerKind.FOREIGN:
            return NO_CPUS
        key = shared_group_key(a)
        if key is None:
            own_bits = a.cpus.bits & self.machine.topology.online.bits
            return (
                self.pool
                if not own_bits and self.has_all_cpus_offline(a)
                else CPUSet.from_bits(own_bits)
            )
        if key == UNPINNED_GROUP_KEY and self.is_pool_whole:
            return NO_CPUS
        return self.group_cpuset(key)

    def cpuset_with_pool_restored(self, a: Allocation, *, has_cpuset: bool) -> CPUSet:
        """`cpuset_of`, or the pool for an unpinned container whose cpuset may have been narrowed.

        Only a container with a cpuset (``has_cpuset``) can have been narrowed, while the pool was
        narrower than the machine. With pinned memory it gets the pool whoever wrote its CPUs.
        """
        cpus = self.cpuset_of(a)
        if cpus.bits or a.kind is not ContainerKind.UNPINNED or not has_cpuset:
            return cpus
        was_narrowed = self.narrowed_at is not None and a.assigned_at <= self.narrowed_at
        return self.pool if a.mems or was_narrowed else NO_CPUS

    def usable_cpus_of(self, a: Allocation) -> CPUSet:
        """CPUs that a container may use, for people and sums, also if no cpuset is written."""
        return self.cpuset_of(a) or a.foreign_cpus or self.pool

    @property
    def is_pool_whole(self) -> bool:
        """True if the shared pool is the whole machine, so unpinned containers need no cpuset."""
        return self.pool.bits == self.machine.topology.allowed.bits

    def group_cpuset(self, key: int) -> CPUSet:
        """CPUs of a group of containers that follow the pool."""
        return shared_group_cpus(key, self.pool, self.machine.topology, self.state.unavailable_bits)

    def has_all_cpus_offline(self, a: Allocation) -> bool:
        """True if a container runs on the shared pool because all of its own CPUs are offline."""
        if shared_group_key(a) is not None or not a.cpus or a.reserved_at:
            return False
        return not a.cpus & self.machine.topology.online


def _free_amounts(
    total: Mapping[int, int],
    charges: Mapping[int, int],
    granted: Mapping[int, int],
    limits: Mapping[int, int],
) -> dict[int, int]:
    """Subtract charges and grants from totals by NUMA node, at most the ``limits``."""
    return {
        i: min(max(0, n - charges.get(i, 0) - granted.get(i, 0)), limits.get(i, n))
        for i, n in total.items()
    }


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Drift of one container: its actual cpuset, memory nodes or quota differ from the desired.

    Attributes:
        pod: ``namespace/name``.
        cpus, mems: lists to write; empty if none is to be, or can be, written.
        quota: `NO_CFS_QUOTA` if another program restored a lifted quota; None leaves it.
        desired_cpus, desired_mems: lists that it should be able to use; empty if they are right.
        actual: its cgroup's values.
        blocked_cpus, blocked_mems: reasons why the kernel would refuse these lists.
        rank: 0 if it runs on exclusive CPUs of another container, 1 if it has exclusive CPUs
            itself, 2 otherwise.
    """

    container_id: str
    pod: str
    container: str
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
        """True if nothing can be written, and the drift is only reported."""
        return not (self.cpus or self.mems or self.quota)

    @property
    def sort_key(self) -> tuple[int, str]:
        """Sort key: intruders first, then containers with exclusive CPUs, then by id."""
        return self.rank, self.container_id

    @property
    def obstacle(self) -> str:
        """Cgroup above or below that blocks the desired lists; empty for none."""
        return "; ".join(self._blocked_texts) or self.actual.above

    @property
    def _blocked_texts(self) -> dict[str, None]:
        return dict.fromkeys(filter(None, (self.blocked_cpus, self.blocked_mems)))

    @property
    def finding(self) -> str:
        """Text of the drift, for people."""
        actual, texts = self.actual, list[str]()
        if desired := self.desired_cpus:
            if self.cpus or self.blocked_cpus:
                texts.append(f"cpuset.cpus is {actual.cpus or 'empty'}, desired {desired}")
            else:
                above = f" ({actual.above})" if actual.above else ""
                texts.append(_limited_text("cpus", actual.cpus, actual.effective_cpus) + above)
        if mems := self.desired_mems:
            if self.mems or self.blocked_mems:
                texts.append(f"cpuset.mems is {actual.mems or 'empty'}, desired {mems}")
            else:
                texts.append(_limited_text("mems", actual.mems, actual.effective_mems))
        if self.quota:
            texts.append(f"the CFS quota is {actual.quota} µs, desired none")
        return "; ".join((*texts, *self._blocked_texts))

    def without_blocked_lists(self, cpus: str, mems: str) -> Drift:
        """Remove the lists that the kernel would refuse, for the reasons given."""
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
        """Update for the runtime."""
        return ContainerUpdate(
            container_id=self.container_id,
            cpus=str(self.cpus),
            mems=str(self.mems),
            cpu_quota=self.quota,
            cpu_period=None if self.quota is None else self.actual.cfs_period,
        )


def _limited_text(name: str, written: CPUSet | NUMASet, effective: CPUSet | NUMASet) -> str:
    clause = f"but a parent cgroup leaves {effective or 'none'} of it"
    return f"cpuset.{name} is {written} as desired, {clause}"


def drift_of_container(
    desired: NodeSnapshot, a: Allocation, actual: ActualCgroup, *, online_only: bool = True
) -> Drift | None:
    """Compare a container's cgroup with the desired state; None without drift and for foreign ones.

    The effective lists count. If they are smaller than a correctly written list, a cgroup above
    limits them, and nothing is to be written. A cgroup keeps CPUs and memory nodes that went
    offline; ``online_only`` ignores them.
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
    intrudes = actual.effective_cpus.bits and _uses_cpus_of_others(
        desired.state, a, actual.effective_cpus
    )
    return Drift(
        container_id=a.container_id,
        pod=f"{a.namespace}/{a.pod}",
        container=a.container,
        cpus=NO_CPUS if written_cpus.bits == cpus.bits else cpus,
        mems=NO_NUMA_NODES if written_mems.bits == mems.bits else mems,
        quota=NO_CFS_QUOTA if is_throttled else None,
        desired_cpus=cpus,
        desired_mems=mems,
        actual=actual,
        rank=0 if intrudes else 1 if a.exclusive else 2,
    )


def _uses_cpus_of_others(state: NodeState, a: Allocation, cpus: CPUSet) -> bool:
    """True if some of these CPUs are exclusive to another container."""
    own_cpus = a.cpus | a.idle_siblings if a.exclusive else NO_CPUS
    own_cpus = own_cpus | state.kubelet.cpus_of(a.pod_uid, a.container, a.container_id)
    return bool(cpus & (state.unavailable_cpus - own_cpus))


def plan_corrections(
    desired: NodeSnapshot, observed: Mapping[str, ActualCgroup]
) -> tuple[Drift, ...]:
    """Compare actual cgroups with the desired state, and list corrections in the order to apply.

    Each correction gives one container its desired state and affects no other. So a plan may stop
    after any correction, the state may change, and a new plan continues without undoing anything.
    Containers without a cgroup and ids without an allocation are skipped, because both come and go.
    """
    by_id = desired.state.allocations
    drifts = (
        drift_of_container(desired, by_id[i], real) for i, real in observed.items() if i in by_id
    )
    return tuple(sorted((d for d in drifts if d is not None), key=lambda d: d.sort_key))


def recorded_actual(
    cpus: str, mems: str, quota: int | None, period: int | None = None
) -> ActualCgroup:
    """Build actual values from a runtime's record or request; an invalid list counts as empty."""
    cpu_set = CPUSet.parse_or_none(cpus) or NO_CPUS
    mem_set = NUMASet.parse_or_none(mems) or NO_NUMA_NODES
    return ActualCgroup(
        cpus=cpu_set,
        mems=mem_set,
        effective_cpus=cpu_set,
        effective_mems=mem_set,
        quota=quota,
        cfs_period=period or None,
    )


def answer_to_update(
    base: NodeSnapshot, desired: NodeSnapshot, container: Container, update: Resources
) -> ContainerUpdate | None:
    """Override a request only if the runtime would write other lists than the desired ones.

    Runtimes send the recorded cpuset with any update, and the desired one may be newer. Without a
    record a runtime sends none, but systemd then writes the scope's own. Any override makes
    containerd lose the request's swap limit, so none is sent without need.
    """
    prior, a = (s.state.allocations[container.id] for s in (base, desired))
    if a.kind is ContainerKind.FOREIGN:
        return None
    record, by_systemd = container.resources, ":" in container.cgroups_path
    cpus, mems = update.cpus or record.cpus, update.mems or record.mems
    drift = drift_of_container(
        desired, a, recorded_actual(cpus, mems, update.cpu_quota), online_only=False
    )
    cpus_meant = mems_meant = ""  # memory nodes stay for life
    if a.cpus != prior.cpus or a.kind is not prior.kind:
        cpus_meant = str(desired.cpuset_with_pool_restored(a, has_cpuset=bool(cpus)))
    elif drift is not None and (cpus or by_systemd):
        cpus_meant = str(drift.cpus)
    if drift is not None and (mems or by_systemd):
        mems_meant = str(drift.mems)
    quota = _answered_quota(a, prior, update)
    if not (cpus_meant or mems_meant or quota is not None):
        return None
    period = None if quota is None else update.cpu_period or record.cpu_period
    return ContainerUpdate(container.id, cpus_meant, mems_meant, quota, period)


def _answered_quota(a: Allocation, prior: Allocation, update: Resources) -> int | None:
    """Quota to lift with the request or to restore; None leaves the request's quota."""
    if a.lifted_quota is not None:
        return NO_CFS_QUOTA if prior.lifted_quota is None or (update.cpu_quota or 0) > 0 else None
    return None if update.cpu_quota else prior.lifted_quota or None


def updates_between(
    base: NodeSnapshot, node: NodeSnapshot, *, skip: str = "", resized: Iterable[str] = ()
) -> tuple[ContainerUpdate, ...]:
    """Return updates of containers whose desired CPUs changed between two snapshots.

    First those whose own CPUs were ``resized``, then members of groups whose CPUs differ, in id
    order; then, if exclusive or listed CPUs are offline or the machine changed, containers with own
    CPUs. The cost depends on groups and changed containers, not on all containers. While the pool
    remains the whole machine, unpinned containers get an update only if they may have been narrowed
    and CPUs were added.
    """
    prior, state, same_machine = base.state, node.state, base.machine is node.machine
    if (
        same_machine
        and prior.exclusive is state.exclusive
        and prior.idle_siblings is state.idle_siblings
        and prior.kubelet is state.kubelet
    ):
        return ()  # nothing that the pool is made of
    updates = [ContainerUpdate(i, str(node.cpuset_of(state.allocations[i]))) for i in resized]
    if (
        not same_machine
        or base.pool.bits != node.pool.bits
        or prior.unavailable_bits != state.unavailable_bits
    ):
        updates += _group_updates(base, node, skip)
        own_bits = state.exclusive.bits | state.listed_cpus.bits
        if own_bits & ~node.machine.topology.online.bits or not same_machine:
            updates += _own_cpuset_updates(base, node, skip)
    return tuple(updates)


def _group_updates(base: NodeSnapshot, node: NodeSnapshot, skip: str) -> Iterator[ContainerUpdate]:
    """Yield updates of containers in shared groups whose CPUs changed."""
    allocations = node.state.allocations
    is_full = base.machine is not node.machine and base.is_pool_whole and node.is_pool_whole
    is_pool_larger = node.pool.bits & ~base.pool.bits != 0
    for key, members in sorted(node.state.shared_groups.items()):
        cpus = node.group_cpuset(key)
        if cpus.bits == base.group_cpuset(key).bits:
            continue
        ids = sorted(members)
        if key == UNPINNED_GROUP_KEY and is_full:
            ids = [
                i
                for i in ids
                if node.cpuset_with_pool_restored(allocations[i], has_cpuset=is_pool_larger)
            ]
        if skip in members:
            ids.remove(skip)
        text = str(cpus)
        yield from (ContainerUpdate(i, text) for i in ids)


def _own_cpuset_updates(
    base: NodeSnapshot, node: NodeSnapshot, skip: str
) -> Iterator[ContainerUpdate]:
    """Yield updates of containers whose own CPUs went offline or came back."""
    for i, a in sorted(node.state.allocations.items()):
        if i != skip and shared_group_key(a) is None and not a.reserved_at:
            cpus = node.cpuset_of(a)
            if cpus and cpus != base.cpuset_of(a):
                yield ContainerUpdate(i, str(cpus))
