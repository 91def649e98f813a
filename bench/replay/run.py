"""One trace on one machine under one placement: what was refused, stranded, and spread.

Every answer is checked as it comes: no CPU to two pods, none that is reserved, as many as were
asked for, no more memory than there is, and under a policy for one NUMA node no refusal of a pod
that would have fitted on one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay.placements import Got, Placement
from bench.replay.trace import GIB, Pod
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology

PROBE_CPUS, PROBE_MEMORY = 4, 7 * GIB
"""A pod of this size is what stranded CPUs are stranded for."""


class Wrong(AssertionError):
    """An answer that no placement may give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trace.

    Attributes:
        pods: that asked.
        refused: of them.
        scattered: of those refused, the machine had CPUs and memory enough in sum.
        crossing: pods placed with CPUs or memory of more than one NUMA node.
        given: CPUs that were exclusive to pods, on average over the time; a part of all that
            can be.
        stranded: CPUs that were free and of which no pod of `PROBE_CPUS` and `PROBE_MEMORY` could
            be made on one NUMA node, on average; a part of all too.
        moves: running pods that were moved to make room.
        migrated: bytes of memory of those that came to another NUMA node.
    """

    pods: int
    rejected: int
    scattered: int
    crossing: int
    given: float
    stranded: float
    moves: int
    migrated: int

    @property
    def rejected_part(self) -> float:
        """Refused pods, as a part of all."""
        return self.rejected / self.pods if self.pods else 0.0


class Ledger:
    """Who has what, kept apart from whoever decides it.

    Args:
        topology: of the machine.
        reserved: CPUs that no pod may have.
    """

    def __init__(self, topology: Topology, reserved: CPUSet) -> None:
        self._of = {cpu: i for i, n in topology.numa_nodes.items() for cpu in n.cpus}
        self._given = {
            i: set(n.cpus) - set(reserved) for i, n in sorted(topology.numa_nodes.items())
        }
        self._memory = {i: n.memory_bytes for i, n in topology.numa_nodes.items()}
        self.all_cpus = sum(map(len, self._given.values()))
        self._memory_free = sum(self._memory.values())
        self._alone = dict(self._memory)
        self._pods: dict[int, tuple[Pod, Got]] = {}
        self._tied: Counter[frozenset[int]] = Counter()  # bytes by the NUMA nodes they must be on

    @property
    def free(self) -> int:
        """CPUs that no pod has."""
        return sum(map(len, self._given.values()))

    def enough(self, pod: Pod) -> bool:
        """Whether CPUs and memory would do in sum."""
        return self.free >= pod.cpus and self._memory_free >= pod.memory

    def fits_one(self, pod: Pod) -> bool:
        """Whether some NUMA node has both; only where every pod is on one."""
        return any(
            len(cpus) >= pod.cpus and self._alone[i] >= pod.memory
            for i, cpus in self._given.items()
        )

    def stranded(self) -> int:
        """Free CPUs of which no more pods of the probe's size could be made on one NUMA node.

        Memory of pods on several NUMA nodes is counted as spread evenly over them: where it is
        within them, nobody decided.
        """
        made = sum(
            min(len(cpus) // PROBE_CPUS, max(0, self._alone[i]) // PROBE_MEMORY)
            for i, cpus in self._given.items()
        )
        return self.free - made * PROBE_CPUS

    def take(self, pod: Pod, got: Got) -> bool:
        """Write down what a pod got; whether it is on more than one NUMA node.

        Raises:
            Wrong: it may not have it.
        """
        if len(got.cpus) != pod.cpus:
            raise Wrong(f"pod {pod.number} asked for {pod.cpus} CPUs and got {sorted(got.cpus)}")
        for cpu in got.cpus:
            if cpu not in self._given[self._of[cpu]]:
                raise Wrong(f"pod {pod.number} got CPU {cpu}, which is reserved or another's")
        for cpu in got.cpus:
            self._given[self._of[cpu]].remove(cpu)
        self._memory_free -= pod.memory
        if self._memory_free < 0:
            raise Wrong(f"pod {pod.number} got memory that is not there")
        self._share(pod, got, -1)
        self._tied[got.numa_nodes] += pod.memory
        if short := self._short(got.numa_nodes):
            raise Wrong(f"pod {pod.number} got memory that NUMA nodes {sorted(short)} do not have")
        self._pods[pod.number] = pod, got
        return len({self._of[cpu] for cpu in got.cpus} | got.numa_nodes) > 1

    def _short(self, grown: frozenset[int]) -> frozenset[int]:
        """NUMA nodes, those that grew among them, on which more must be than they have.

        Hall's condition: every pod finds its memory on its NUMA nodes when no set of NUMA nodes is
        short for the pods that must be within it.
        """
        masks = [mask for mask, amount in self._tied.items() if amount]
        unions = {grown}
        for mask in masks:
            unions |= {union | mask for union in unions}
        for union in unions:
            tied = sum(self._tied[mask] for mask in masks if mask <= union)
            if tied > sum(self._memory[i] for i in union):
                return union
        return frozenset()

    def has(self, number: int) -> Got:
        """What a pod has."""
        return self._pods[number][1]

    def give_back(self, pod: Pod) -> None:
        """A pod that has something ended."""
        _, got = self._pods.pop(pod.number)
        for cpu in got.cpus:
            self._given[self._of[cpu]].add(cpu)
        self._memory_free += pod.memory
        self._tied[got.numa_nodes] -= pod.memory
        self._share(pod, got, 1)

    def _share(self, pod: Pod, got: Got, sign: int) -> None:
        for i in got.numa_nodes:
            self._alone[i] += sign * (pod.memory // len(got.numa_nodes))


def replay(
    topology: Topology,
    reserved: CPUSet,
    placement: Placement,
    pods: Sequence[Pod],
    hours: float,
) -> Outcome:
    """Let the pods come and go; who is refused does not come again.

    A pod for which the machine has not enough in sum never gets there: the stock scheduler, which
    knows sums, sends it elsewhere. It counts as refused.

    Args:
        topology: of the machine.
        reserved: CPUs for everybody else.
        placement: who decides.
        pods: in order of their arrival.
        hours: of arrivals; what is averaged over.

    Raises:
        Wrong: when an answer is one that no placement may give.
    """
    node, ledger = placement.make(topology, reserved), Ledger(topology, reserved)
    ending: list[tuple[float, int, Pod]] = []
    rejected = scattered = crossing = moves = migrated = 0
    given = stranded = now = 0.0

    def until(moment: float) -> None:
        nonlocal now, given, stranded
        passed, now = moment - now, moment
        given += passed * (ledger.all_cpus - ledger.free)
        stranded += passed * ledger.stranded()

    def end_before(moment: float) -> None:
        while ending and ending[0][0] <= moment:
            at, _, gone = heapq.heappop(ending)
            until(at)
            node.end(gone)
            ledger.give_back(gone)

    for pod in pods:
        end_before(pod.begins)
        until(pod.begins)
        if not ledger.enough(pod):
            rejected += 1
            continue
        got = node.start(pod)
        if got is None:
            if placement.one_node and ledger.fits_one(pod):
                raise Wrong(f"pod {pod.number} was refused, and would have fitted on a NUMA node")
            rejected += 1
            scattered += 1
            continue
        moved = {number: (pods[number], has) for number, has in node.moved.items()}
        moves += len(moved)
        for number, (mover, has) in moved.items():
            migrated += mover.memory if has.numa_nodes != ledger.has(number).numa_nodes else 0
            ledger.give_back(mover)
        crossing += ledger.take(pod, got)
        crossing += sum(ledger.take(mover, has) for mover, has in moved.values())
        heapq.heappush(ending, (pod.ends, pod.number, pod))
    end_before(hours)
    until(hours)
    whole = hours * ledger.all_cpus
    return Outcome(
        pods=len(pods),
        rejected=rejected,
        scattered=scattered,
        crossing=crossing,
        given=given / whole,
        stranded=stranded / whole,
        moves=moves,
        migrated=migrated,
    )
