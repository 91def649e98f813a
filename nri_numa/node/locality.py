"""Where the memory of containers is: read again and again, beside the decisions.

Off unless ``memoryLocality.enabled``; `nri_numa.node.rounds` goes round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from nri_numa.config.sections import MemoryLocality
from nri_numa.config.values import parse_duration
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.http.responses import ContainerMemory
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.locality import MemoryPlaces, local_bytes, memory_places
from nri_numa.node.agent import Agent
from nri_numa.node.rounds import MAX_SERIES, Rounds
from nri_numa.observe.metrics import LocalMemory

Memories: TypeAlias = Mapping[str, ContainerMemory]
"""By container id."""

NOBODY_LOOKS: Final[Memories] = MappingProxyType({})
"""It is not switched on."""
NOT_READ: Final = ContainerMemory(
    local_percent=None, by_numa_node={}, source="", at=0.0, problem="not read yet"
)


def container_memory(allocation: Allocation, found: MemoryPlaces, at: float) -> ContainerMemory:
    """The document of what was found.

    Args:
        allocation: of the container; its own NUMA nodes are its memory nodes, or those of its CPUs.
        found: where its memory is.
        at: Unix time of the reading.
    """
    home = allocation.mems or allocation.numa_nodes
    total = sum(found.by_numa_node.values())
    problem = found.because
    if not problem and not total:
        problem = "it has no memory yet"
    elif not problem and not home:
        problem = "it has no NUMA nodes of its own"
    return ContainerMemory(
        local_percent=None
        if problem
        else round(100 * local_bytes(found.by_numa_node, home) / total, 1),
        by_numa_node={str(i): n for i, n in sorted(found.by_numa_node.items())},
        source=found.source,
        at=at,
        problem=problem,
    )


class MemoryWatch(Rounds[ContainerMemory]):
    """Keeps where the memory of every container is.

    Args:
        agent: whose containers.
        config: the ``memoryLocality`` section.
        cgroup_root: where the cgroup file systems are mounted.
        now: Unix time in seconds.
        proc: the proc file system.
        cost: CPU time of the thread that reads.
    """

    def __init__(
        self,
        agent: Agent,
        config: MemoryLocality,
        cgroup_root: str,
        *,
        now: Callable[[], float],
        proc: str = "/proc",
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__(
            agent,
            cgroup_root,
            what="where memory is",
            interval=parse_duration(config.interval),
            proc=proc,
            cost=cost,
        )
        self._config = config
        self._now = now
        self._page_size = os.sysconf("SC_PAGE_SIZE")

    def look(self, reader: CgroupReader, allocation: Allocation) -> ContainerMemory:
        """Read where the memory of one container is."""
        place = self._agent.places.get(allocation.container_id)
        places = (
            MemoryPlaces(because="the agent does not know its cgroup")
            if place is None
            else memory_places(
                reader,
                place,
                self._cgroup_root,
                proc=self._proc,
                page_size=self._page_size,
            )
        )
        return container_memory(allocation, places, self._now())

    def samples(self, state: NodeState) -> LocalMemory | None:
        """What a scrape tells of the containers of ``state``; None where no metric is wanted."""
        if not self._config.metric:
            return None
        known = self.known
        ratios: list[tuple[float, tuple[str, str, str]]] = []
        # By ratio, then by name: those whose memory is elsewhere come first.
        for a in tuple(state.allocations.values()):
            one = known.get(a.container_id, NOT_READ)
            if one.local_percent is not None:
                ratios.append((one.local_percent / 100, (a.namespace, a.pod, a.container)))
        ratios.sort()
        shown = ratios[:MAX_SERIES]
        worst = {names: ratio for ratio, names in reversed(shown)}
        return LocalMemory(
            # While a container is replaced there are two of its name for a moment: one series.
            ratios=[(*names, ratio) for names, ratio in worst.items()],
            states={
                "known": len(ratios),
                "unknown": len(state.allocations) - len(ratios),
                "left out": len(ratios) - len(shown),
            },
        )
