"""A plain model of a kubelet with static managers, for differential tests.

Written from the rules of the Topology Manager, the CPU Manager (policy static) and the Memory
Manager (policy Static) with sets, dictionaries and every mask spelled out. It shares no decision
code with the engine. Pods have app containers only, and the machine has one list of NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import Topology
from tests.checks.cpu_oracle import KubeletOracle
from tests.checks.oracles import HintList, Mask, masks_of, walk


@dataclass(frozen=True)
class Wanted:
    """One container's requests, which are its limits in a Guaranteed pod."""

    name: str
    milli: int
    memory: Mapping[str, int]
    """Bytes by type: ``memory``, ``hugepages-1Gi``."""


@dataclass(frozen=True)
class Got:
    """What one container has; None for what the kubelet leaves alone."""

    cpus: frozenset[int] | None
    mems: Mask | None


class NotAdmitted(Exception):
    """The kubelet refuses the pod, with its reason."""


@dataclass
class Cell:
    """The Memory Manager's state of one NUMA node."""

    assignments: int
    group: Mask
    allocatable: dict[str, int]
    free: dict[str, int]


@dataclass
class Block:
    """What one container has of memory: its mask, and bytes by type and NUMA node."""

    mask: Mask
    taken: dict[str, dict[int, int]] = field(default_factory=dict)


class KubeletNode:
    """One node: its free CPUs, its memory, its pods."""

    def __init__(
        self,
        topology: Topology,
        policy: Policy,
        scope: str,
        reserved: frozenset[int],
        allocatable: Mapping[int, Mapping[str, int]],
        distance: Callable[[int, int], int] | None = None,
        *,
        by_socket: bool = False,
    ) -> None:
        self.by_socket = by_socket
        self.policy, self.scope, self.reserved, self.distance = policy, scope, reserved, distance
        self.oracle = KubeletOracle(topology)
        self.default: frozenset[int] = frozenset(topology.cpus)
        self.nodes = sorted(topology.numa_nodes)
        self.cells = {
            i: Cell(0, frozenset([i]), dict(allocatable[i]), dict(allocatable[i]))
            for i in self.nodes
        }
        self.cpus: dict[tuple[str, str], frozenset[int]] = {}
        self.blocks: dict[tuple[str, str], Block] = {}

    # -- pods --------------------------------------------------------------------------------------

    def add(self, pod: str, wanted: Sequence[Wanted], *, guaranteed: bool) -> dict[str, Got]:
        """Admit a pod.

        Raises:
            NotAdmitted: with nothing left behind.
        """
        got: dict[str, Got] = {}
        try:
            together: tuple[Mask | None, bool] | None = None
            if self.scope == "pod":
                whole = sum(exclusive(w) for w in wanted)
                types = sorted({t for w in wanted for t in w.memory})
                sums = {t: sum(w.memory.get(t, 0) for w in wanted) for t in types}
                together = self.admitted(whole, sums, guaranteed=guaranteed)
            for one in wanted:
                hint = together or self.admitted(exclusive(one), one.memory, guaranteed=guaranteed)
                cpus = mems = None
                if guaranteed and exclusive(one):
                    cpus = self.take_cpus((pod, one.name), exclusive(one), hint[0])
                if guaranteed:
                    mems = self.take_memory((pod, one.name), one.memory, hint)
                got[one.name] = Got(cpus, mems)
        except NotAdmitted:
            self.remove(pod)
            raise
        return got

    def remove(self, pod: str) -> None:
        """Take everything of a pod back."""
        for key in [k for k in self.cpus if k[0] == pod]:
            self.default |= self.cpus.pop(key)
        for key in [k for k in self.blocks if k[0] == pod]:
            block = self.blocks.pop(key)
            for resource, by_node in block.taken.items():
                for i, amount in by_node.items():
                    self.cells[i].free[resource] += amount
            for i in block.mask:
                self.cells[i].assignments -= 1
                if not self.cells[i].assignments:
                    self.cells[i].group = frozenset([i])

    # -- topology manager --------------------------------------------------------------------------

    def admitted(
        self, whole: int, memory: Mapping[str, int], *, guaranteed: bool
    ) -> tuple[Mask | None, bool]:
        """Merge the hints; the affinity and whether it is preferred."""
        lists: list[HintList] = []
        cpu = self.cpu_hints(whole) if guaranteed and whole else None
        lists.append(_read(cpu))
        found = self.memory_hints(memory) if guaranteed and memory else None
        # An empty answer is an empty map: no opinion.
        lists += [_read(found or None) for _ in memory] or [_read(None)]
        verdict = walk(lists, NUMASet(self.nodes), self.policy, self.distance)
        if not verdict.admitted:
            raise NotAdmitted("TopologyAffinityError")
        return verdict.affinity, verdict.preferred

    # -- CPU manager -------------------------------------------------------------------------------

    def cpu_hints(self, request: int) -> HintList:
        available = self.default - self.reserved
        least, found = len(self.nodes), []
        for mask in masks_of(self.nodes):
            inside = self.cpus_in(mask)
            if len(inside) >= request:
                least = min(least, len(mask))
            if len(available & inside) >= request:
                found.append(mask)
        per_socket = len(self.nodes) // len(self.oracle.sockets)
        sockets = -(-least // per_socket) if self.by_socket and per_socket else 0
        return [
            (mask, len(mask) == least or len(self.sockets_of(mask)) == sockets) for mask in found
        ]

    def sockets_of(self, mask: Mask) -> list[frozenset[int]]:
        """CPUs of the sockets that a mask touches."""
        inside = self.cpus_in(mask)
        return [cpus for cpus in self.oracle.sockets.values() if cpus & inside]

    def cpus_in(self, mask: Mask) -> frozenset[int]:
        """CPUs of a mask's NUMA nodes."""
        return frozenset().union(*(self.oracle.numa.get(i, frozenset()) for i in mask))

    def take_cpus(self, key: tuple[str, str], count: int, mask: Mask | None) -> frozenset[int]:
        allocatable = self.default - self.reserved
        if len(allocatable) < count:
            raise NotAdmitted("UnexpectedAdmissionError")
        taken: frozenset[int] = frozenset()
        if mask is not None:
            inside = self.cpus_in(mask)
            if self.by_socket:
                inside = frozenset().union(*self.sockets_of(mask))
            aligned = allocatable & inside
            taken = self.oracle.packed(aligned, min(count, len(aligned)))
        if len(taken) < count:
            taken |= self.oracle.packed(allocatable - taken, count - len(taken))
        self.cpus[key] = taken
        self.default -= taken
        return taken

    # -- memory manager ----------------------------------------------------------------------------

    def memory_hints(self, request: Mapping[str, int]) -> HintList:
        least, found = len(self.nodes), []
        for mask in masks_of(self.nodes):
            cells = [self.cells[i] for i in mask]
            if any(sum(c.allocatable.get(t, 0) for c in cells) < n for t, n in request.items()):
                continue
            least = min(least, len(mask))
            if self.violates(mask):
                continue
            if any(sum(c.free.get(t, 0) for c in cells) < n for t, n in request.items()):
                continue
            found.append(mask)
        return [(mask, len(mask) == least) for mask in found]

    def violates(self, mask: Mask) -> bool:
        """A NUMA node serves containers on it alone, or one fixed group."""
        if len(mask) == 1:
            return any(len(self.cells[i].group) > 1 for i in mask)
        return any(self.cells[i].assignments and self.cells[i].group != mask for i in mask)

    def take_memory(
        self, key: tuple[str, str], request: Mapping[str, int], hint: tuple[Mask | None, bool]
    ) -> Mask | None:
        if not request:
            return None
        mask, preferred = hint
        hints = self.memory_hints(request)
        if mask is None:
            best = _best(hints)
            if best is None or (preferred and not best[1]):
                raise NotAdmitted("UnexpectedAdmissionError")
            mask = best[0]
        assert mask is not None
        if any(sum(self.cells[i].free.get(t, 0) for i in mask) < n for t, n in request.items()):
            best = _best([h for h in hints if h[0] is not None and mask <= h[0]])
            if best is None or best[0] is None:
                raise NotAdmitted("UnexpectedAdmissionError")
            mask = best[0]
        if self.violates(mask):
            raise NotAdmitted("UnexpectedAdmissionError")
        block = Block(mask)
        for resource, need in request.items():
            left, by_node = need, block.taken.setdefault(resource, {})
            for i in sorted(mask):
                part = min(left, self.cells[i].free.get(resource, 0))
                self.cells[i].free[resource] = self.cells[i].free.get(resource, 0) - part
                by_node[i] = part
                left -= part
        for i in mask:
            self.cells[i].assignments += 1
            self.cells[i].group = mask
        self.blocks[key] = block
        return mask


def exclusive(wanted: Wanted) -> int:
    """Whole CPUs that a Guaranteed pod's container owns."""
    return wanted.milli // 1000 if wanted.milli % 1000 == 0 else 0


def _read(hints: HintList | None) -> HintList:
    if hints is None:
        return [(None, True)]
    return hints or [(None, False)]


def _best(hints: HintList) -> tuple[Mask | None, bool] | None:
    """Preferred before not, then narrower, then the smaller integer value."""
    return min(
        hints,
        key=lambda h: (not h[1], len(h[0] or ()), sum(1 << i for i in h[0] or ())),
        default=None,
    )
