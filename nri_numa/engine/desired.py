"""What every container should have in one state of the node: worked out here and nowhere else.

The state says who owns what; the machine says which CPUs are there. What follows from both for
the cpuset of a container is asked of a `DesiredState`: by answers to the runtime, Synchronize,
repairs of cgroups, systemd, `status`, the page, metrics and the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Final

import msgspec

from nri_numa.engine.state import (
    UNPINNED_GROUP_KEY,
    Allocation,
    ContainerKind,
    NodeState,
    shared_group_cpus,
    shared_group_key,
    withheld_isolated_bits,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.workload import ContainerUpdate

if TYPE_CHECKING:
    from nri_numa.engine.decision import NodeModel


class DesiredState(msgspec.Struct, frozen=True, dict=True):
    """What follows from one state of one machine; each value is worked out once.

    Attributes:
        narrowed_at: Unix time in seconds until which the shared pool was last narrower than the
            machine, as far as we know; None where it never was.
    """

    machine: NodeModel
    state: NodeState
    narrowed_at: float | None = None

    @cached_property
    def pool(self) -> CPUSet:
        """The shared pool."""
        machine = self.machine
        return CPUSet.from_bits(self.state.pool_bits(machine.topology, machine.settings))

    @cached_property
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
            for i, cpus in machine.usable_cpus_by_node.items():
                if cpus.bits & withdrawn:
                    left[i] = self._free_shared_on(i, left, self.exclusive_pool_bits)
        return left

    @cached_property
    def free_shared_milli(self) -> dict[int, int]:
        """Of `free_cpu_milli`, which counts isolated CPUs that only owners get, what is shared."""
        left, machine = self.free_cpu_milli, self.machine
        if not machine.withheld_isolated_cpus:
            return left
        return {
            i: self._free_shared_on(i, left, self.pool.bits) for i in machine.usable_cpus_by_node
        }

    def _free_shared_on(self, i: int, left: dict[int, int], among: int) -> int:
        """No more than is left, and than the CPUs of a NUMA node among some serve besides."""
        cpus = self.machine.usable_cpus_by_node[i]
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
            return self.pool if self.is_displaced(a) else a.cpus & self.machine.topology.online
        if key == UNPINNED_GROUP_KEY and self.is_pool_whole:
            return NO_CPUS
        return self.group_cpuset(key)

    @property
    def is_pool_whole(self) -> bool:
        """Whether the shared pool is the whole machine, so that unbound containers are left."""
        return self.pool == self.machine.topology.allowed

    def group_cpuset(self, key: int) -> CPUSet:
        """CPUs of a group of containers that follow the pool."""
        return shared_group_cpus(key, self.pool, self.machine.topology, self.state.unavailable_bits)

    def is_displaced(self, a: Allocation) -> bool:
        """Whether a container is on the shared pool because all CPUs of its own are offline."""
        if shared_group_key(a) is not None or not a.cpus or a.reserved_at:
            return False
        return not a.cpus & self.machine.topology.online


def updates_between(
    before: DesiredState, after: DesiredState, *, skip: str = "", resized: Iterable[str] = ()
) -> tuple[ContainerUpdate, ...]:
    """Updates of containers that should have other CPUs now.

    First those whose own CPUs were ``resized``, then groups whose CPUs differ, an update for each
    member, in id order; then, where CPUs of owners are or were offline, containers with CPUs of
    their own. The cost is in the groups and in the containers that really change, not in all
    containers. Unbound containers are left alone while the pool stays the whole machine; once it
    was narrower they have it, since we narrowed them.
    """
    old, new, same_machine = before.state, after.state, before.machine is after.machine
    if (
        same_machine
        and old.exclusive is new.exclusive
        and old.idle_siblings is new.idle_siblings
        and old.kubelet is new.kubelet
    ):
        return ()  # nothing that the pool is made of
    found = [
        ContainerUpdate(i, str(after.cpuset_of(new.allocations[i])), ignore_failure=True)
        for i in resized
    ]
    if same_machine and before.pool == after.pool and old.unavailable_bits == new.unavailable_bits:
        return tuple(found)
    is_left_alone = before.is_pool_whole and after.is_pool_whole
    for key, members in sorted(new.shared_groups.items()):
        cpus = after.group_cpuset(key)
        if cpus == before.group_cpuset(key) or (is_left_alone and key == UNPINNED_GROUP_KEY):
            continue
        ids = sorted(members)
        if skip in members:
            ids.remove(skip)
        # A container that exits meanwhile must not fail another one's creation.
        # All fields but the id are the same: made in one go, in half the time.
        same = ContainerUpdate("", str(cpus), ignore_failure=True)[1:]
        found += map(_new_update, zip(ids, *map(repeat, same), strict=False))
    if not same_machine or not new.exclusive | new.listed_cpus <= after.machine.topology.online:
        found += [
            ContainerUpdate(i, str(cpus), ignore_failure=True)
            for i, a in sorted(new.allocations.items())
            if i != skip and shared_group_key(a) is None and not a.reserved_at
            and (cpus := after.cpuset_of(a)) and cpus != before.cpuset_of(a)
        ]  # fmt: skip
    return tuple(found)


_new_update: Final = partial(tuple.__new__, ContainerUpdate)
"""Makes a `ContainerUpdate` of a tuple with all its fields."""
