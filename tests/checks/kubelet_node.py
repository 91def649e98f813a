"""A plain model of a kubelet with static managers, for differential tests.

Written from the rules of the Topology Manager, the CPU Manager (policy static) and the Memory
Manager (policy Static) with sets, dictionaries and every mask spelled out. It shares no decision
code with the engine. Pods have ordinary init containers and app containers, and the machine has one
list of NUMA nodes.

nri-numa decides container by container and does not know which are init containers. What it does
otherwise for that reason are `WAYS`, each of which the model can be made to go.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from nri_numa.engine.pod_reservation import by_core
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.workload import Policy
from tests.checks.cpu_oracle import KubeletOracle
from tests.checks.oracles import HintList, Mask, masks_of, walk

TAKEN_FIRST = "CPUs that an init container had are taken first"
ANYWHERE = "CPUs that an init container had need not lie in the affinity"
GIVEN_BACK = "memory of an init container is free when it has ended"
CHOSEN = "CPUs of a whole pod are chosen with its first container"
LIMITED = "of CPUs that an init container had no more are kept than the pod's sum leaves"
WAYS = (TAKEN_FIRST, ANYWHERE, GIVEN_BACK, CHOSEN, LIMITED)


@dataclass(frozen=True)
class Wanted:
    """One container's requests, which are its limits in a Guaranteed pod."""

    name: str
    milli: int
    memory: Mapping[str, int]
    """Bytes by type: ``memory``, ``hugepages-1Gi``."""
    init: bool = False
    """An init container, which ends before the next container starts."""


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
        ways: Collection[str] = (),
    ) -> None:
        self.by_socket, self.ways = by_socket, frozenset(ways)
        self.policy, self.scope, self.reserved, self.distance = policy, scope, reserved, distance
        self.topology, self.oracle = topology, KubeletOracle(topology)
        self.default: frozenset[int] = frozenset(topology.cpus)
        self.nodes = sorted(topology.numa_nodes)
        self.cells = {
            i: Cell(0, frozenset([i]), dict(allocatable[i]), dict(allocatable[i]))
            for i in self.nodes
        }
        self.cpus: dict[tuple[str, str], frozenset[int]] = {}
        self.blocks: dict[tuple[str, str], Block] = {}
        self.reusable: frozenset[int] = frozenset()
        """CPUs that init containers of the pod had, and no app container has."""
        self.chosen: frozenset[int] = frozenset()
        """CPUs that were chosen for containers of the pod that are still to come."""
        self.reusable_memory: dict[Mask, dict[str, int]] = {}
        """Bytes of its init containers by mask and type."""

    # -- pods --------------------------------------------------------------------------------------

    def add(self, pod: str, wanted: Sequence[Wanted], *, guaranteed: bool) -> dict[str, Got]:
        """Admit a pod.

        Raises:
            NotAdmitted: with nothing left behind.
        """
        got: dict[str, Got] = {}
        self.reusable, self.reusable_memory, self.chosen = frozenset(), {}, frozenset()
        try:
            together: tuple[Mask | None, bool] | None = None
            if self.scope == "pod":
                whole = peak(wanted, exclusive)
                types = sorted({t for w in wanted for t in w.memory})
                sums = {t: peak(wanted, lambda w, t=t: w.memory.get(t, 0)) for t in types}
                together = self.admitted(whole, sums, guaranteed=guaranteed)
            for number, one in enumerate(wanted):
                hint = together or self.admitted(exclusive(one), one.memory, guaranteed=guaranteed)
                cpus = mems = None
                if guaranteed and exclusive(one):
                    cpus = self.take_cpus((pod, one.name), exclusive(one), hint[0])
                    elsewhere = len(cpus - self.chosen - self.reusable)
                    self.chosen = frozenset(sorted(self.chosen - cpus)[elsewhere:])
                    self.reusable = self.reusable | cpus if one.init else self.reusable - cpus
                if LIMITED in self.ways and guaranteed:
                    self.limit(pod, wanted, number)
                if guaranteed and CHOSEN in self.ways and together is not None and not number:
                    whole = peak(wanted, lambda w: w.milli) // 1000
                    self.choose(whole - one.milli // 1000, hint[0])
                if guaranteed:
                    mems = self.take_memory((pod, one.name), one.memory, hint)
                    if one.init and GIVEN_BACK in self.ways:
                        self.give_back((pod, one.name))
                    elif mems is not None:
                        self.reuse(one, mems)
                got[one.name] = Got(cpus, mems)
        except NotAdmitted:
            self.remove(pod)
            raise
        return got

    def limit(self, pod: str, wanted: Sequence[Wanted], number: int) -> None:
        """Give back CPUs of ended init containers that the pod can need no more."""
        one, before = wanted[number], wanted[:number]
        total = peak(wanted, lambda w: w.milli)
        live = one.milli + sum(w.milli for w in before if not w.init)
        kept = max(0, total - live) // 1000
        if len([*before, one]) - sum(w.init for w in before) == 1 and all(
            w.milli < total for w in (*before, one)
        ):  # it may be an init container
            kept = max(0, total // 1000 - live // 1000)
        inits = [w.name for w in before if w.init and (pod, w.name) in self.cpus]
        for key in [(pod, name) for name in sorted(inits)]:
            # The latest that had a CPU has it.
            self.cpus[key] -= self.cpus.get((pod, one.name), frozenset())
            left = by_core(self.topology, CPUSet(self.cpus[key] & self.reusable))
            back = frozenset(left[: max(0, len(left) - kept)])
            kept -= len(left) - len(back)
            self.cpus[key] -= back
            self.reusable -= back
            self.default |= back

    def remove(self, pod: str) -> None:
        for key in [k for k in self.cpus if k[0] == pod]:
            self.default |= self.cpus.pop(key)
        for key in [k for k in self.blocks if k[0] == pod]:
            self.give_back(key)

    def give_back(self, key: tuple[str, str]) -> None:
        """Take one container's memory back."""
        block = self.blocks.pop(key, None)
        if block is None:
            return
        for resource, by_node in block.taken.items():
            for i, amount in by_node.items():
                self.cells[i].free[resource] += amount
        for i in block.mask:
            self.cells[i].assignments -= 1
            if not self.cells[i].assignments:
                self.cells[i].group = frozenset([i])

    def reuse(self, one: Wanted, mask: Mask) -> None:
        """What later containers of the pod may use again of this one's memory, or no more."""
        reusable = self.reusable_memory.setdefault(mask, {})
        for resource, amount in one.memory.items():
            had = reusable.get(resource, 0)
            reusable[resource] = max(had, amount) if one.init else max(0, had - amount)

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
            if ANYWHERE in self.ways:
                count = len((available | self.reusable) & inside)
            else:
                count = len(available & inside) + len(self.reusable)
                if not self.reusable <= inside:
                    continue
            if count >= request:
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
        return frozenset().union(*(self.oracle.numa.get(i, frozenset()) for i in mask))

    def take_cpus(self, key: tuple[str, str], count: int, mask: Mask | None) -> frozenset[int]:
        allocatable = (self.default - self.reserved) | self.reusable
        if len(allocatable) < count:
            raise NotAdmitted("UnexpectedAdmissionError")
        first = self.reusable if TAKEN_FIRST in self.ways else frozenset()
        first |= self.chosen
        parts = [allocatable & first, allocatable]
        if mask is not None:
            inside = self.aligned_with(mask)
            parts = [first & inside, allocatable & inside, allocatable]
        taken: frozenset[int] = frozenset()
        for part in parts:
            left = part - taken
            taken |= self.oracle.packed(left, min(count - len(taken), len(left)))
        self.cpus[key] = taken
        self.default -= taken
        return taken

    def choose(self, count: int, mask: Mask | None) -> None:
        free = self.default - self.reserved
        inside = free
        if mask is not None:
            inside = free & self.aligned_with(mask)
        parts = (inside,) if self.policy is not Policy.BEST_EFFORT else (inside, free)
        chosen: frozenset[int] = frozenset()
        for part in parts:
            left = part - chosen
            chosen |= self.oracle.packed(left, min(count - len(chosen), len(left)))
        self.chosen = chosen if len(chosen) == count else frozenset()

    def aligned_with(self, mask: Mask) -> frozenset[int]:
        """CPUs of a mask, with align-by-socket of its sockets."""
        if self.by_socket:
            return frozenset().union(*self.sockets_of(mask))
        return self.cpus_in(mask)

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
            reusable = self.reusable_memory.get(mask, {})
            if any(
                sum(c.free.get(t, 0) for c in cells) + reusable.get(t, 0) < n
                for t, n in request.items()
            ):
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
            left = max(0, need - self.reusable_memory.get(mask, {}).get(resource, 0))
            by_node = block.taken.setdefault(resource, {})
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


def peak(wanted: Sequence[Wanted], amount: Callable[[Wanted], int]) -> int:
    """What a whole pod needs: its app containers together, or an init container by itself."""
    together = sum(amount(w) for w in wanted if not w.init)
    return max([together, *(amount(w) for w in wanted if w.init)])


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
