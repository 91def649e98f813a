"""Facts of live containers beside their allocations; changed on the loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Container

_MAX_ENDED_IDS: Final = 256
"""Stored ids of ended containers; the report of their start can only be moments late."""
_UNKNOWN_CGROUP_PLACE: Final = CgroupPlace()


class StartingCpuset(msgspec.Struct, frozen=True):
    """Cpuset of a container between its creation and the end of its start.

    A runtime records an update of such a container and applies it to no cgroup: containerd writes
    its own record, and the OCI runtime continues with the earlier one (container_start.go and
    container_update_resources.go, the same in 1.7 and 2.1). Two moments are left to correct the
    cgroup before the first instruction: at StartContainer it exists and the program does not run
    yet; from then to PostStartContainer every change is written at once.

    Attributes:
        cpus: CPU list that its cgroup was made with, or was written since; empty for all.
        mems: the same of its memory nodes.
    """

    cpus: str
    mems: str


class LiveContainers:
    """Live containers: progress of their starts, and places of their cgroups.

    Attributes:
        cgroup_places: places of the cgroups of live containers, by container id.
        write_counts: number of writes requested for live containers, by container id.
        starting: containers between their creation and the end of their start.
        started_cgroups: starting containers whose cgroup exists.
        ended: ids of the latest that ended.
        unconfirmed_ids: containers whose cpuset the runtime may be writing, with other resources.
        widening: containers whose cgroups may get more CPUs.
        migrating: by container id, source and target of its migration, and bytes moved so far.
        moves_memory: True if pages of containers can be moved from here.
    """

    def __init__(self, *, moves_memory: bool = False) -> None:
        self.cgroup_places: dict[str, CgroupPlace] = {}
        self.write_counts = Counter[str]()
        self.starting: dict[str, StartingCpuset] = {}
        self.started_cgroups: dict[str, None] = {}
        self.ended: dict[str, None] = {}
        self.unconfirmed_ids: set[str] = set()
        self.widening: dict[str, None] = {}
        self.migrating: dict[str, tuple[NUMASet, int, int]] = {}
        self.moves_memory = moves_memory

    def cgroup_of(self, container_id: str) -> CgroupPlace:
        """Return the place of its cgroup; without a path if unknown."""
        return self.cgroup_places.get(container_id, _UNKNOWN_CGROUP_PLACE)

    def is_settled(self, container_id: str) -> bool:
        """True if a container is known, and its cgroup should agree with the state."""
        is_pending = container_id in self.starting or container_id in self.widening
        return container_id in self.cgroup_places and not is_pending

    def settled_places(self, container_ids: Iterable[str]) -> list[tuple[str, CgroupPlace]]:
        """Return the cgroup places of the settled containers among these."""
        return [(i, self.cgroup_places[i]) for i in container_ids if self.is_settled(i)]

    def record_place(self, container: Container) -> None:
        """Record the place of its cgroup."""
        self.cgroup_places[container.id] = CgroupPlace(container.cgroups_path, container.pid)

    def on_created(self, container: Container, cpus: str, mems: str) -> None:
        """Record the lists that its cgroup will be made with."""
        self.record_place(container)
        self.ended.pop(container.id, None)
        self.starting[container.id] = StartingCpuset(cpus, mems)

    def on_unreported_start(self, container: Container) -> None:
        """Record a container created without the agent, which may be anywhere in its start."""
        resources = container.resources
        self.starting[container.id] = StartingCpuset(resources.cpus, resources.mems)
        self.started_cgroups[container.id] = None

    def on_running(self, container_id: str) -> None:
        """Record the end of its start."""
        self.starting.pop(container_id, None)
        self.started_cgroups.pop(container_id, None)

    def replace_all(self, containers: Iterable[Container]) -> frozenset[str]:
        """Replace all containers by those that run, whose cgroups are all compared now.

        Returns:
            Containers whose creation was decided and whose start was not seen: the answer may not
            have arrived.
        """
        unseen_starts = frozenset(self.starting)
        self.cgroup_places = {c.id: CgroupPlace(c.cgroups_path, c.pid) for c in containers}
        self.starting, self.started_cgroups = {}, {}
        self.unconfirmed_ids, self.widening = set(), {}
        return unseen_starts

    def drop_container(self, container_id: str) -> None:
        """Forget an ended container, except for its id."""
        self.cgroup_places.pop(container_id, None)
        self.unconfirmed_ids.discard(container_id)
        for by_id in (self.starting, self.started_cgroups, self.widening, self.write_counts):
            if container_id in by_id:
                del by_id[container_id]
        self.ended[container_id] = None
        if len(self.ended) > _MAX_ENDED_IDS:
            del self.ended[next(iter(self.ended))]
