"""Counts CPUs that two pods have, or were promised, at the same time: from outside, by sums.

It knows nothing of the scheduler, of the engine or of their records: it reads what stands in pods
of the API server (node, annotation ``scheduled-numa-nodes``, CPUs in the spec) and which CPUs each
agent gave.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nri_numa.model.machine import Topology

SCHEDULED_NUMA_NODES: Final = "numa.kubernetes.io/scheduled-numa-nodes"


@dataclass(slots=True)
class Checker:
    """Looks at the cluster again and again.

    Args:
        zone_cpus: CPUs of each NUMA node, all nodes being alike.
        numa_of: the NUMA node of a CPU.
        real: nodes that are another machine, by name.

    Attributes:
        looks: how often it looked.
        bound: pods that were seen with a node.
        unplaced: of these, bound without the annotation.
        elsewhere: of these, placed on other NUMA nodes than promised.
        promised_twice: pods and NUMA nodes whose promises were more than there is.
        granted_twice: CPUs that two pods had.
    """

    zone_cpus: Mapping[int, int]
    numa_of: Callable[[int], int]
    real: Mapping[str, Topology] = field(default_factory=dict)
    looks: int = 0
    bound: set[str] = field(default_factory=set)
    unplaced: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    promised_twice: set[tuple[str, int, str]] = field(default_factory=set)
    granted_twice: set[tuple[str, int]] = field(default_factory=set)

    def look(
        self,
        pods: Iterable[Mapping[str, Any]],
        granted: Mapping[str, Mapping[str, Sequence[int]]],
    ) -> None:
        """Look once.

        Args:
            pods: that have a node and did not end.
            granted: by node, the CPUs of each pod that runs there, by UID.
        """
        self.looks += 1
        sums: Counter[tuple[str, int]] = Counter()
        who: dict[tuple[str, int], list[str]] = {}
        for pod in pods:
            node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
            self.bound.add(uid)
            has = granted.get(node, {}).get(uid, ())
            text = pod["metadata"]["annotations"].get(SCHEDULED_NUMA_NODES)
            if text is None:
                self.unplaced.add(uid)
            promised = {int(n) for n in json.loads(text).values()} if text else set()
            given = {self._numa_node(node, cpu) for cpu in has}
            if given and promised and given != promised:
                self.elsewhere.add(uid)
            places = given or promised
            asked = sum(int(c["resources"]["requests"]["cpu"]) for c in pod["spec"]["containers"])
            for place in places:
                # Each pod here asks for one NUMA node.
                sums[node, place] += asked
                who.setdefault((node, place), []).append(pod["metadata"]["name"])
        for (node, place), total in sums.items():
            if total > self._there(node, place):
                self.promised_twice.add((node, place, ", ".join(sorted(who[node, place]))))
        for node, by_pod in granted.items():
            often = Counter(cpu for cpus in by_pod.values() for cpu in cpus)
            self.granted_twice |= {(node, cpu) for cpu, times in often.items() if times > 1}

    def _numa_node(self, node: str, cpu: int) -> int:
        topology = self.real.get(node)
        return self.numa_of(cpu) if topology is None else topology.cpus[cpu].numa_node

    def _there(self, node: str, place: int) -> int:
        topology = self.real.get(node)
        return self.zone_cpus[place] if topology is None else len(topology.numa_nodes[place].cpus)

    @property
    def good(self) -> bool:
        """Whether nothing was promised or given twice."""
        return not (self.promised_twice or self.granted_twice)

    def text(self) -> str:
        """What was found, in one line."""
        return (
            f"checked {self.looks} times, {len(self.bound)} bindings: "
            f"{len(self.promised_twice)} × more promised than a NUMA node has, "
            f"{len(self.granted_twice)} CPUs had by two pods, "
            f"{len(self.elsewhere)} pods on other NUMA nodes than promised, "
            f"{len(self.unplaced)} bound without a promise"
        )
