"""Random nodes with pods to evict, and the cheapest eviction by trying every set of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.eviction_search import CandidateNode, EvictablePod
from nri_numa.scheduler.fit import Fit, evaluate_fit
from tests.beds.objects import GIB, container, pod, single, table

CPUS, GIBS = 8, 32
"""Of each NUMA node; memory as `tests.beds.objects.table` has it."""
EVICTABLE = Strategy.PACK
_READER = PodReader(AgentConfig())


@dataclass(frozen=True)
class PlacedPod:
    """A pod on one NUMA node; of an unknown one nobody knows where it is."""

    uid: str
    numa_node: int
    cpus: int
    gib: int
    priority: int
    budgets: tuple[int, ...]
    known: bool
    repels: bool

    def sums(self) -> dict[str, int]:
        return {"cpu": 1000 * self.cpus, "memory": self.gib * GIB, "pods": 1}

    def evictable(self, numa_nodes: int) -> EvictablePod:
        def column(amount: int) -> tuple[int, ...]:
            return tuple(amount if i == self.numa_node else 0 for i in range(numa_nodes))

        released = ResourceCounts(
            column(self.cpus), column(1000 * self.cpus), {"memory": column(self.gib * GIB)}
        )
        return EvictablePod(
            uid=self.uid,
            full_name=self.uid,
            is_movable=False,
            priority=self.priority,
            released=released if self.known else None,
            sums=Counter(self.sums()),
            budgets=self.budgets,
            repels_others=self.repels,
        )


class RandomNode:
    """A node with pods, a pod of higher priority, and what kube-scheduler would propose."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)  # a case by its number
        self.numa_nodes = random.choice((1, 2, 2, 3))
        self.pods = list(self._make_pods(random))
        self.allowed = tuple(random.choice((0, 1, 1, 9)) for _ in range(2))
        cpus, gib = random.randint(1, 10), random.randint(1, 12)
        policy = random.choice(("single-numa-node", "single-numa-node", "restricted",
                                "best-effort"))  # fmt: skip
        wanted = (
            pod(container("a", str(cpus), f"{gib}Gi"), container("b", "2", "1Gi"),
                policy=policy, cpus="exclusive")
            if random.random() < 0.2
            else single(cpus, memory=f"{gib}Gi", policy=policy)
        )  # fmt: skip
        self.request = _READER.read_pod_request({**wanted, "metadata": {
            **wanted["metadata"], "uid": f"wanted-{seed}"}})  # fmt: skip
        total = sum(c.exclusive_cpus for c in self.request.containers)
        self._sums = {"cpu": 1000 * total, "memory": (gib + total - cpus) * GIB, "pods": 1}
        # Reserved CPUs and a limit of pods make the sums scarcer than the NUMA nodes.
        self._allocatable = {
            "cpu": 1000 * (CPUS * self.numa_nodes - random.choice((0, 0, 2))),
            "memory": GIBS * self.numa_nodes * GIB,
            "pods": random.choice((110, len(self.pods))),
        }
        free = CPUS * self.numa_nodes - sum(p.cpus for p in self.pods)
        self.limit = random.choice((None, None, min(4, free)))  # a floor is never undercut
        self.proposed = self._propose()
        if self.proposed and random.random() < 0.2:
            # One that another filter needs, such as that of host ports.
            self.proposed = [*{*self.proposed, random.choice(self.pods)}]
        self.may_change = random.random() < 0.9

    def _make_pods(self, random: Random) -> Iterator[PlacedPod]:
        """Pods until a NUMA node is full; few sizes, so that several sets cost the same."""
        free = [CPUS] * self.numa_nodes
        for number in range(random.randint(1, 8)):
            numa_node, cpus = random.randrange(self.numa_nodes), random.choice((1, 2, 2, 3, 4))
            if free[numa_node] >= cpus:
                free[numa_node] -= cpus
                yield PlacedPod(
                    f"uid-{number}", numa_node, cpus, random.choice((1, 1, 3)),
                    random.choice((-5, 0, 0, 100)), random.choice(((), (), (0,), (1,), (0, 1))),
                    random.random() < 0.9, random.random() < 0.1,
                )  # fmt: skip

    def room_without(self, evicted: Sequence[PlacedPod]) -> NodeResources:
        """What the node publishes if these leave: an unknown pod is not seen to leave."""
        left = [p for p in self.pods if p not in evicted or not p.known]
        cpus = [CPUS - sum(p.cpus for p in left if p.numa_node == i)
                for i in range(self.numa_nodes)]  # fmt: skip
        memory = [GIBS - sum(p.gib for p in left if p.numa_node == i)
                  for i in range(self.numa_nodes)]  # fmt: skip
        attributes = {}
        if self.limit is not None:
            total = sum(cpus) - self.limit
            attributes["numa.kubernetes.io/free-exclusive-cpus"] = str(total)
        return table(*cpus, of=CPUS, memory=memory, attributes=attributes)

    def lacking(self, evicted: Sequence[PlacedPod]) -> dict[str, int]:
        """Amounts that the sums of the Node still lack."""
        left = [p for p in self.pods if p not in evicted]
        return {
            name: lack for name, amount in self._sums.items()
            if (lack := amount + sum(p.sums()[name] for p in left) - self._allocatable[name]) > 0
        }  # fmt: skip

    def _propose(self) -> list[PlacedPod]:
        """As kube-scheduler does: all of them, without those that it can do without."""
        victims = list(self.pods)
        for one in sorted(self.pods, key=lambda p: (-p.priority, p.uid)):
            rest = [p for p in victims if p is not one]
            if not self.lacking(rest):
                victims = rest
        return victims if not self.lacking(victims) else []

    def candidate(self) -> CandidateNode:
        evictable = {p.uid: p.evictable(self.numa_nodes) for p in self.pods}
        return CandidateNode(
            room=self.room_without(()),
            request=self.request,
            pods=tuple(evictable.values()),
            missing=self.lacking(()),
            allowed=self.allowed,
            proposed=tuple(evictable[p.uid] for p in self.proposed),
            may_change=self.may_change,
        )

    def fits_without(self, evicted: Sequence[PlacedPod]) -> bool:
        verdict = evaluate_fit(self.room_without(evicted), self.request, EVICTABLE)
        return isinstance(verdict, Fit) and not self.lacking(evicted)

    def cost(self, evicted: Sequence[PlacedPod]) -> tuple[int, ...]:
        violations = sum(
            max(0, sum(number in p.budgets for p in evicted) - allowed)
            for number, allowed in enumerate(self.allowed)
        )
        return (
            violations, max((p.priority for p in evicted), default=-(2**31)),
            sum(p.priority + 2**31 for p in evicted), len(evicted), sum(p.gib for p in evicted),
        )  # fmt: skip

    def required(self) -> set[str]:
        """Proposed pods that the sums could do without: who proposed them needs them."""
        return {
            one.uid for one in self.proposed
            if one.repels or not self.lacking([p for p in self.proposed if p is not one])
        }  # fmt: skip

    def cheapest(self) -> tuple[int, ...] | None:
        """The cost of the cheapest eviction; None where none helps."""
        sets: Iterator[Sequence[PlacedPod]] = (
            s for n in range(len(self.pods) + 1) for s in combinations(self.pods, n)
            if self.required() <= {p.uid for p in s}
        )  # fmt: skip
        if not self.may_change:
            sets = iter([self.proposed])
        return min((self.cost(s) for s in sets if self.fits_without(s)), default=None)
