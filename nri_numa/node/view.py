"""Shows the agent to the outside: its state as API documents and as a metrics snapshot.

Everything is read from the frozen state of one moment, so a long answer that is made piece by
piece stays consistent while the agent goes on. The agent lives in another thread: what is taken
from it is either replaced as a whole (the state, the machine), or copied in one step that the
interpreter does not interrupt (the refusals).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from heapq import merge
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from nri_numa.engine.accounting import largest, offer, together
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.explain.explanation import Document, of_allocation, of_refusal
from nri_numa.engine.explain.sentences import actual_text, displaced_text, late_text, sentences
from nri_numa.engine.others import KUBELETS, granted_names, shown_kind
from nri_numa.engine.state import Allocation, Charge, Kind, NodeState, displaced, effective_cpus
from nri_numa.engine.values.workload import CPUMode, MemoryPolicy, Policy, QoSClass, Scope
from nri_numa.http.api import Listing
from nri_numa.http.responses import (
    Actual,
    Assignment,
    Checkpoint,
    ContainerUse,
    Distance,
    Explanation,
    HugePages,
    Kubelet,
    KubeletContest,
    KubeletGrant,
    Link,
    NodeUse,
    Notice,
    Notices,
    NUMAInfo,
    NUMAInfoData,
    NUMANodeSlots,
    NUMANodeUse,
    Readiness,
    Refusal,
    Slots,
    Status,
    TopologyDocument,
    Use,
    Zone,
    ZoneContainer,
    ZoneDevices,
    ZoneHugePages,
    ZonePod,
    Zones,
)
from nri_numa.machine.cpuset import NO_CPUS, CPUSet
from nri_numa.machine.model import CoreKind, NUMANode, cpus_text, topology_document
from nri_numa.node.agent import Agent, RefusedContainer
from nri_numa.node.beside_kubelet import BesideKubelet, KubeletSettings
from nri_numa.node.differences import Difference, Known
from nri_numa.node.serving import Sources
from nri_numa.node.usage import (
    MEMORY_NOT_READ,
    NO_MEMORIES,
    NO_WAITINGS,
    WAITING_NOT_READ,
    Memories,
    MemoryWatch,
    UsageWatch,
    Waitings,
    WaitingWatch,
)
from nri_numa.observe.metrics import ContainerSample, NUMANodeSample, Snapshot

if TYPE_CHECKING:
    from nri_numa.devices.counts import Counted


NO_ROOTS: Final[Mapping[int, tuple[str, ...]]] = {}
_AFRESH: Final = 64
"""Differences up to which an old order is mended; a larger change is sorted afresh."""
_STEP: Final = 250
"""Names sorted in one call: a fifth of a millisecond."""
_DOCUMENTS: Final = 32
"""Explanations kept ready: a page asks for the same ones again and again."""

Name = tuple[str, str, str, str]
"""Namespace, pod, container, id: the order an operator reads in, and total."""


class LiveView:
    """`nri_numa.http.api.AgentView` over a running agent.

    The watches are None where what they measure is not to be shown.
    """

    def __init__(
        self,
        agent: Agent,
        sources: Sources,
        *,
        usage: UsageWatch | None = None,
        memory: MemoryWatch | None = None,
        waiting: WaitingWatch | None = None,
    ) -> None:
        self._agent, self._sources = agent, sources
        self._usage, self._memory, self._waiting = usage, memory, waiting
        self._names: list[Name] = []
        self._named = NodeState()
        self._counted: tuple[NodeState, Counts] | None = None
        self._documents: dict[object, Document] = {}

    def status(self) -> Status:
        """The agent itself."""
        agent, link = self._agent, self._sources.link()
        known = agent.differences.known
        counts = self._counts(agent.state)
        return Status(
            version=self._sources.version,
            node_name=self._sources.node_name,
            started_at=self._sources.started,
            observe=agent.observe,
            ready=self.readiness().ready,
            serial=agent.state.serial,
            containers=counts.kinds,
            wider=counts.wider,
            differing=len(known),
            intruders=sum(one.intruder for one in known.values()),
            kubelet_cpus=str(agent.state.kubelet.taken),
            contested=0 if self._sources.beside is None else len(self._sources.beside.contests),
            link=Link(
                state=link.state,
                detail=link.detail,
                runtime=link.runtime,
                runtime_version=link.runtime_version,
                unanswered=link.unanswered,
                over="cri" if link.over_cri else UNSET,
            ),
            checkpoint=Checkpoint(
                written_at=agent.checkpoint.written_at, problem=agent.checkpoint.problem
            ),
        )

    def readiness(self) -> Readiness:
        """Whether containers are being placed, and remembered."""
        link = self._sources.link()
        if link.unanswered:
            return Readiness(ready=False, reason=link.unanswered)
        if not (link.active and self._agent.synchronized):
            detail = f": {link.detail}" if link.detail else ""
            reason = f"the link to the runtime is {link.state}{detail}"
            return Readiness(ready=False, reason=reason)
        if self._agent.checkpoint.problem:
            reason = f"the state cannot be saved: {self._agent.checkpoint.problem}"
            return Readiness(ready=False, reason=reason)
        return Readiness(ready=True, reason="")

    def topology(self) -> TopologyDocument:
        """The machine."""
        machine = self._agent.machine
        return topology_document(
            machine.topology,
            reserved=machine.settings.reserved_cpus,
            devices=self._sources.devices,
        )

    def numa_info(self) -> NUMAInfo:
        """The machine in short; CPUs one by one, so that a reader needs no range syntax."""
        nodes = [n for _, n in sorted(self._agent.machine.topology.numa_nodes.items())]
        return NUMAInfo(
            code=200,
            message="OK",
            data=NUMAInfoData(
                nodenums=len(nodes),
                cpulist=tuple(",".join(map(str, n.cpus)) for n in nodes),
                memsize=tuple(str(n.memory_bytes) for n in nodes),
            ),
        )

    def listing(self) -> Listing:
        """Every container and what it has, in the order of their names."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
        real = Reality(state, self._agent.differences.known)
        memory, waiting = self._looked()
        late = self._sources.late()
        return Listing(
            head=NodeUse(
                serial=state.serial,
                shared_pool=str(pool),
                numa_nodes=numa_node_uses(machine, state, pool, self._sources.reading()),
            ),
            containers=(
                _assignment(
                    state.allocations[name[3]], machine, state, pool, real, memory, waiting, late
                )
                for name in tuple(self._ordered(state))
            ),
        )

    def explain(self, namespace: str, pod: str, container: str | None) -> list[Explanation]:
        """What is known about a pod's containers: those that run, and those refused lately."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
        real = Reality(state, self._agent.differences.known)
        refused: dict[str, RefusedContainer] = {}
        for one in self._agent.refusals:  # the last one of each counts
            if (one.namespace, one.pod) == (namespace, pod):
                refused[one.container] = one
        names = self._ordered(state)
        found: list[Explanation] = []
        for n in range(bisect_left(names, (namespace, pod, container or "", "")), len(names)):
            if names[n][:2] != (namespace, pod) or container not in (None, names[n][2]):
                break
            allocation = state.allocations[names[n][3]]
            later = refused.pop(allocation.container, None)
            if later is not None and later.at <= allocation.since:
                later = None  # it was refused before it was placed
            found.append(self._explained(allocation, machine, state, pool, real, later))
        found += [
            self._refused(one) for name, one in sorted(refused.items()) if container in (None, name)
        ]
        return sorted(found, key=lambda one: one.container)

    def _explained(
        self,
        allocation: Allocation,
        machine: Machine,
        state: NodeState,
        pool: CPUSet,
        real: Reality,
        later: RefusedContainer | None,
    ) -> Explanation:
        kept = self._agent.kept_trace(allocation.container_id)
        document = self._documents.get(kept) if kept is not None else None
        effective = effective_cpus(allocation, pool, machine.topology, state.withheld_bits)
        cpus = str(effective)
        if document is None or document["result"]["cpus"] != cpus:
            known = self._agent.grounds_of(allocation.container_id)
            document = of_allocation(allocation, known, cpus)
            if kept is not None:
                self._remember(kept, document)
        since = [f"since then refused: {later.message}"] if later is not None else []
        if gave_way := real.gave_way(allocation, effective):
            since.append(f"listed {allocation.cpus}, {gave_way}")
        since += self._sources.unheard(allocation.pod_uid)
        if since:
            document = {**document, "later": since}
        assignment = _assignment(
            allocation, machine, state, pool, real, *self._looked(), self._sources.late()
        )
        if isinstance(assignment.late, float):
            said = late_text(assignment.late)
            document = {**document, "later": [said, *document.get("later", ())]}
        if assignment.displaced:
            said = displaced_text(assignment.displaced)
            document = {**document, "later": [said, *document.get("later", ())]}
        if assignment.actual is not None:
            document = {**document, "actual": actual_sentence(assignment.actual)}
        return Explanation(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            outcome="admitted",
            summary=assignment.reason,
            steps=tuple(sentences(document)),
            assignment=assignment,
            details=document,
        )

    def _refused(self, refused: RefusedContainer) -> Explanation:
        document = self._documents.get(refused.trace)
        if document is None:
            known = self._agent.grounds_of_refusal(refused)
            document = of_refusal(known, refused.reason, refused.message)
            self._remember(refused.trace, document)
        return Explanation(
            namespace=refused.namespace,
            pod=refused.pod,
            container=refused.container,
            outcome="refused",
            summary=refused.message,
            # The message is the summary already.
            steps=tuple(sentences(document)[1:]),
            refusal=_refusal(refused),
            details=document,
        )

    def _remember(self, key: object, document: Document) -> None:
        if len(self._documents) >= _DOCUMENTS:
            del self._documents[next(iter(self._documents))]
        self._documents[key] = document

    def refusals(self) -> list[Refusal]:
        """The latest refusals, newest first."""
        return [_refusal(refused) for refused in reversed(self._agent.refusals)]

    def slots(self) -> Slots:
        """Exclusive CPUs that the scheduler may count."""
        return slots_document(self._agent.machine, self._agent.state, self._not_pinning())

    def zones(self) -> Zones:
        """Every NUMA node as who schedules counts it."""
        agent = self._agent
        # Before the state: who is decided about in between is in it.
        coming = self._sources.coming()
        return zones_document(
            agent.machine,
            agent.state,
            self._sources.reading(),
            reason=self._not_pinning(),
            measured=self._sources.measured(),
            devices=self._sources.counted(),
            roots_of_pcie=self._sources.roots_of_pcie,
            coming=coming,
        )

    def _not_pinning(self) -> str:
        """Why nothing is to be counted on now; empty when nothing speaks against it."""
        readiness = self.readiness()
        if not readiness.ready:
            return readiness.reason
        return "observe is on, so nothing is pinned" if self._agent.observe else ""

    def kubelet(self) -> Kubelet:
        """The kubelet beside us."""
        beside, kubelet = self._sources.beside, self._sources.kubelet
        if beside is None or kubelet is None:
            return Kubelet()
        return kubelet_document(self._agent, beside, kubelet)

    def notices(self, after: int) -> Notices:
        """What happened to containers after a number of the sequence."""
        kept = self._agent.notices
        number, evicted = kept.number, kept.evicted  # before the notices: one too many is no harm
        found = tuple(Notice(**asdict(one)) for one in kept.after(after))
        return Notices(instance=kept.instance, number=number, evicted=evicted, notices=found)

    def notice_number(self) -> int:
        """The last number of that sequence."""
        return self._agent.notices.number

    def use(self) -> Use:
        """What is really used on the machine."""
        if self._usage is None:
            return Use(at=None, interval=0.0, problem="not measured", cpus={}, numa_nodes=())
        return self._usage.document()

    async def container_use(self, namespace: str, pod: str, container: str) -> list[ContainerUse]:
        """What a container really uses, measured now."""
        if self._usage is None:
            return []
        state = self._agent.state
        names = self._ordered(state)
        found: list[ContainerUse] = []
        for n in range(bisect_left(names, (namespace, pod, container, "")), len(names)):
            if names[n][:3] != (namespace, pod, container):
                break
            found.append(await self._usage.container(state.allocations[names[n][3]]))
        return found

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        return self._agent.subscribe(listener)

    def snapshot(self) -> Snapshot:
        """The node for a scrape; `nri_numa.observe.metrics.Metrics.snapshot`."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
        written = self._agent.checkpoint.written_at
        return Snapshot(
            numa_nodes=numa_node_samples(machine, state, pool, self._sources.reading()),
            node_name=self._sources.node_name,
            container_counts=self._counts(state).by_kind,
            containers=container_samples(state),
            shared_pool_cpus=len(pool),
            offline_cpus=len(machine.topology.present - machine.topology.online),
            checkpoint_written=written,
            checkpoint_age=None if written is None else max(0.0, self._sources.now() - written),
            checkpoint_failing=bool(self._agent.checkpoint.problem),
            ready=self.readiness().ready,
            observe=self._agent.observe,
            local_memory=None if self._memory is None else self._memory.samples(state),
            waiting=None if self._waiting is None else self._waiting.samples(state),
        )

    def _looked(self) -> tuple[Memories, Waitings]:
        """What the last rounds over all containers found."""
        return (
            self._memory.known if self._memory is not None else NO_MEMORIES,
            self._waiting.known if self._waiting is not None else NO_WAITINGS,
        )

    def _counts(self, state: NodeState) -> Counts:
        """Containers by kind; counted once for each state."""
        if self._counted is None or self._counted[0] is not state:
            self._counted = state, Counts.of(state)
        return self._counted[1]

    def _ordered(self, state: NodeState) -> list[Name]:
        """Names of all containers, sorted: the order of last time, mended.

        Sorting a thousand names takes a millisecond in which no container can start; comparing the
        ids takes a hundredth of that, and names do not change.
        """
        if state is self._named:
            return self._names
        old, new = self._named.allocations, state.allocations
        changed = old.keys() ^ new.keys()
        if len(changed) > _AFRESH:
            self._names = _sorted([_name(a) for a in new.values()])
        else:
            for container_id in changed:
                if container_id in new:
                    insort(self._names, _name(new[container_id]))
                else:
                    del self._names[bisect_left(self._names, _name(old[container_id]))]
        self._named = state
        return self._names


def _sorted(names: list[Name]) -> list[Name]:
    """Sorted in steps that others can get in between: one call would hold up everybody."""
    parts = [sorted(names[n : n + _STEP]) for n in range(0, len(names), _STEP)]
    return list(merge(*parts))


def _name(a: Allocation) -> Name:
    return a.namespace, a.pod, a.container, a.container_id


def _assignment(
    a: Allocation,
    machine: Machine,
    state: NodeState,
    pool: CPUSet,
    real: Reality,
    memory: Memories,
    waiting: Waitings,
    late: Mapping[str, float] | None = None,
) -> Assignment:
    cpus = effective_cpus(a, pool, machine.topology, state.withheld_bits)
    gave_way = real.gave_way(a, cpus)
    return Assignment(
        id=a.container_id,
        pod_uid=a.pod_uid,
        namespace=a.namespace,
        pod=a.pod,
        container=a.container,
        kind=shown_kind(state, a),
        policy=a.policy.value,
        qos=a.qos.value,
        smt=a.smt.value,
        cpus=str(cpus),
        pinned=str(a.pinned),
        mems=str(a.mems),
        mempolicy=UNSET if a.mempolicy is MemoryPolicy.DEFAULT else a.mempolicy.value,
        numa_nodes=str(a.numa_nodes),
        idle=str(a.idle),
        displaced=str(a.cpus) if displaced(a, machine.topology) else "",
        preferred=a.preferred,
        reason=f"{a.reason}, {gave_way}" if gave_way else a.reason,
        cpu_milli=a.cpu_milli,
        memory_bytes=a.memory_bytes,
        since=a.since,
        actual=real.of(a.container_id),
        slots=a.slots,
        memory=memory.get(a.container_id, MEMORY_NOT_READ) if memory is not NO_MEMORIES else UNSET,
        late=UNSET if late is None else late.get(a.container_id, UNSET),
        waiting=waiting.get(a.container_id, WAITING_NOT_READ)
        if waiting is not NO_WAITINGS
        else UNSET,
    )


def _refusal(refused: RefusedContainer) -> Refusal:
    return Refusal(
        namespace=refused.namespace,
        pod=refused.pod,
        container=refused.container,
        reason=refused.reason,
        message=refused.message,
        at=refused.at,
        observed=refused.observed,
        count=refused.count,
    )


# --- What containers really have ---


class Reality:
    """Differences of one moment.

    Args:
        state: what was decided.
        known: who differs from it.
    """

    def __init__(self, state: NodeState, known: Known) -> None:
        self._state = state
        self._known = known
        self._owners: dict[int, str] | None = None

    def of(self, container_id: str) -> Actual | None:
        """What this one has; None while it is as meant, and on no exclusive CPUs of others."""
        one = self._known.get(container_id) or self._foreign(container_id)
        if one is None:
            return None
        return Actual(
            cpus=one.cpus,
            mems=one.mems,
            meant_cpus=one.meant_cpus,
            meant_mems=one.meant_mems,
            since=one.since,
            text=one.text,
            found=one.found,
            intruder=one.intruder,
            owners=self._disturbed(container_id, one) if one.intruder else (),
            given_up=one.given_up,
        )

    def _foreign(self, container_id: str) -> Difference | None:
        """One that somebody else pinned to CPUs that are exclusive to others."""
        allocation = self._state.allocations.get(container_id)
        if allocation is None or not allocation.pinned & (self._state.owned | self._state.idle):
            return None
        return Difference(
            cpus=str(allocation.pinned),
            mems=str(allocation.mems),
            since=allocation.since,
            intruder=True,
            found=allocation.reason,
        )

    def gave_way(self, allocation: Allocation, cpus: CPUSet) -> str:
        """Where a container stands whose soft list gave way, and to whom; empty when it did not.

        Args:
            allocation: of the container.
            cpus: what it should have now.
        """
        lost = allocation.cpus & self._state.withheld if allocation.soft else NO_CPUS
        if not lost:
            return ""
        names = list(self._owning(lost, allocation.container_id))
        names += [f"{name} (by the kubelet)" for name in granted_names(self._state, lost)]
        where = str(cpus) if cpus <= allocation.cpus else f"the shared pool {cpus}"
        return f"stands on {where}: {cpus_text(lost, 'is', 'are')} exclusive to {', '.join(names)}"

    def _disturbed(self, container_id: str, one: Difference) -> tuple[str, ...]:
        return self._owning(CPUSet.parse(one.cpus), container_id)

    def _owning(self, cpus: CPUSet, but: str) -> tuple[str, ...]:
        """The names of those who own some of these CPUs."""
        allocations = self._state.allocations
        if self._owners is None:
            # Once for all of them: there may be as many intruders as owners.
            self._owners = {
                cpu: a.container_id
                for a in allocations.values()
                if a.owned
                for cpu in a.cpus | a.idle
            }
        found = {self._owners.get(cpu) for cpu in cpus} - {None, but}
        return tuple(sorted(allocations[i].full_name for i in found if i))


def actual_sentence(actual: Actual) -> str:
    """Both sides in one actual_sentence; the time in it does not grow old."""
    since = datetime.fromtimestamp(actual.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return actual_text(actual.text, since, actual.owners, given_up=actual.given_up)


# --- How many containers there are ---

_FOREIGN = frozenset((Kind.FOREIGN, preferred) for preferred in (False, True))


class Counts(msgspec.Struct, frozen=True):
    """How many containers there are.

    Attributes:
        by_kind: by kind, and by whether they have what is ideal (True) or a wider set.
    """

    by_kind: dict[tuple[str, bool], int]

    @classmethod
    def of(cls, state: NodeState) -> Counts:
        """Count them."""
        live = [a for a in state.allocations.values() if not a.ended]
        counted = Counter((a.kind, a.preferred) for a in live)
        by_kind = {(k.value, p): counted[k, p] for k in Kind for p in (False, True)}
        by_kind |= {(KUBELETS, p): 0 for p in (False, True)}
        for a in live if counted.keys() & _FOREIGN else ():
            if shown_kind(state, a) == KUBELETS:
                by_kind[a.kind.value, a.preferred] -= 1
                by_kind[KUBELETS, a.preferred] += 1
        return cls(by_kind)

    @property
    def kinds(self) -> dict[str, int]:
        """By kind alone."""
        return {k: count + self.by_kind[k, True] for (k, p), count in self.by_kind.items() if not p}

    @property
    def wider(self) -> int:
        """Those that have a wider set than ideal."""
        return sum(count for (_, preferred), count in self.by_kind.items() if not preferred)


def container_samples(state: NodeState) -> Iterator[ContainerSample]:
    """Every container, made one by one while the answer is written."""
    return (
        ContainerSample(
            namespace=a.namespace,
            pod=a.pod,
            container=a.container,
            kind=shown_kind(state, a),
            policy=a.policy.value,
            numa_nodes=str(a.numa_nodes),
            preferred=a.preferred,
        )
        for a in state.allocations.values()
        if not a.ended
    )


# --- NUMA nodes ---


def numa_node_uses(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> tuple[NUMANodeUse, ...]:
    """For the API: every NUMA node by id, who has its CPUs and what the accounting has left.

    Args:
        machine: topology and settings.
        state: what is decided.
        pool: the shared pool of that state.
        reading: what the kernel had left when it was last asked.
    """
    reserved = machine.settings.reserved_cpus
    return tuple(_use(facts, reserved) for facts in _facts(machine, state, pool, reading))


def numa_node_samples(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> tuple[NUMANodeSample, ...]:
    """For a scrape: the same in counts of CPUs; arguments as in `numa_node_uses`."""
    reserved = machine.settings.reserved_cpus
    return tuple(_sample(facts, reserved) for facts in _facts(machine, state, pool, reading))


class _Facts(NamedTuple):
    """One NUMA node; CPU amounts are thousandths of a CPU, memory is bytes."""

    node: NUMANode
    charge: Charge
    exclusive: CPUSet
    idle: CPUSet
    kubelet: CPUSet
    shared: CPUSet
    cpu_total: int
    cpu_left: int
    memory_left: int
    capacity_factor: float


def _facts(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> Iterator[_Facts]:
    """Every NUMA node, by id."""
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    for i, node in sorted(machine.topology.numa_nodes.items()):
        yield _Facts(
            node=node,
            charge=state.charge(i),
            exclusive=node.cpus & state.owned,
            idle=node.cpus & state.idle,
            kubelet=(node.cpus & state.kubelet.taken) - state.owned - state.idle,
            shared=node.cpus & pool,
            cpu_total=machine.cpu_total.get(i, 0),
            cpu_left=cpu_left.get(i, 0),
            memory_left=memory_left.get(i, 0),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
        )


def _use(facts: _Facts, reserved: CPUSet) -> NUMANodeUse:
    node, charge = facts.node, facts.charge
    return NUMANodeUse(
        id=node.id,
        cpus=str(node.cpus),
        exclusive=str(facts.exclusive),
        idle=str(facts.idle),
        kubelet=str(facts.kubelet),
        shared=str(facts.shared),
        reserved=str(node.cpus & reserved),
        cpu_capacity_milli=facts.cpu_total,
        cpu_allocated_milli=charge.cpu_milli,
        cpu_available_milli=facts.cpu_left,
        memory_bytes=node.memory_bytes,
        memory_allocated_bytes=charge.memory,
        memory_available_bytes=facts.memory_left,
        huge_pages=tuple(
            HugePages(
                size_bytes=size,
                total_bytes=total,
                allocated_bytes=charge.hugepages.get(size, 0),
            )
            for size, total in sorted(node.hugepages.items())
        ),
        capacity_factor=facts.capacity_factor,
    )


def _sample(facts: _Facts, reserved: CPUSet) -> NUMANodeSample:
    node, charge = facts.node, facts.charge
    shared = facts.shared - reserved - facts.kubelet
    return NUMANodeSample(
        numa_node=node.id,
        exclusive_cpus=len(facts.exclusive),
        idle_cpus=len(facts.idle),
        kubelet_cpus=len(facts.kubelet),
        shared_cpus=len(shared),
        # What is left: reserved CPUs, and those that our own cpuset keeps from containers.
        reserved_cpus=len(node.cpus - facts.exclusive - facts.idle - facts.kubelet - shared),
        capacity_cpus=facts.cpu_total / 1000,
        allocated_cpus=charge.cpu_milli / 1000,
        available_cpus=facts.cpu_left / 1000,
        memory_bytes=node.memory_bytes,
        memory_allocated_bytes=charge.memory,
        memory_available_bytes=facts.memory_left,
        capacity_factor=facts.capacity_factor,
        hugepages={
            size: (total, charge.hugepages.get(size, 0)) for size, total in node.hugepages.items()
        },
    )


# --- Exclusive CPUs that a scheduler may count ---


def slots_document(machine: Machine, state: NodeState, reason: str) -> Slots:
    """Count what is held with slots and what is free.

    Args:
        machine: topology and settings.
        state: what is decided.
        reason: why nothing is to be counted on now; empty when nothing speaks against it.
    """
    offered = offer(machine, state)
    return Slots(
        serial=state.serial,
        ready=not reason,
        reason=reason,
        annotation=machine.slots_key,
        total=offered.total,
        exclusive=len(state.owned),
        numa_nodes=tuple(
            NUMANodeSlots(id=i, held=offered.held[i], free=free)
            for i, free in sorted(offered.free.items())
        ),
        ids=tuple(id for a in offered.holders for id in a.slots.split(",")),
    )


# --- NUMA nodes as schedulers count them ---

EMPTY = NodeState()
MIXED: Final = "mixed"
"""Kind of a NUMA node's cores where it has several."""


def zones_document(
    machine: Machine,
    state: NodeState,
    reading: Reading | None,
    *,
    reason: str = "",
    measured: Mapping[int, float] | None = None,
    devices: Counted | None = None,
    roots_of_pcie: Mapping[int, tuple[str, ...]] = NO_ROOTS,
    coming: Iterable[tuple[str, str]] = (),
) -> Zones:
    """Count everything in one state; a pod of which nothing is charged yet is named all the same.

    Args:
        machine: topology and settings.
        state: what is decided.
        reading: what the kernel had left when it was last asked.
        reason: why nothing is to be counted on now; empty when nothing speaks against it.
        measured: by NUMA node, capacity factors that were measured and are acted upon; 1 for the
            others.
        devices: how many the kubelet can give, or why that is not known; None where nobody asks.
        roots_of_pcie: by NUMA node; empty where nobody asks for them.
        coming: namespace and name of Guaranteed pods that have no container yet.
    """
    defaults = machine.settings.defaults
    charged = {(a.pod_uid, a.container) for a in state.allocations.values() if a.charges}
    pods = dict.fromkeys(coming, QoSClass.GUARANTEED.value)
    pods |= {(a.namespace, a.pod): a.qos.value for a in state.allocations.values()}
    return Zones(
        serial=state.serial,
        ready=not reason,
        reason=reason,
        policy=defaults.get("policy", Policy.NONE.value),
        scope=defaults.get("scope", Scope.CONTAINER.value),
        shares=defaults.get("cpus") == CPUMode.SHARED.value,
        threads_per_core=machine.topology.threads_per_core,
        free_exclusive_cpus=together(machine, state),
        zones=_zones(
            machine, state, reading, measured or {}, _by_numa_node(devices), roots_of_pcie
        ),
        devices_problem=devices if devices is None or isinstance(devices, str) else "",
        pods=tuple(
            ZonePod(namespace=namespace, name=name, qos=qos)
            for (namespace, name), qos in sorted(pods.items())
        ),
        charged=tuple(ZoneContainer(pod_uid=uid, name=name) for uid, name in sorted(charged)),
    )


def _zones(
    machine: Machine,
    state: NodeState,
    reading: Reading | None,
    measured: Mapping[int, float],
    devices: Mapping[int, tuple[ZoneDevices, ...]],
    roots_of_pcie: Mapping[int, tuple[str, ...]],
) -> tuple[Zone, ...]:
    topology = machine.topology
    pool = state.pool(topology, machine.settings)
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    free, whole = largest(machine, state), largest(machine, EMPTY)
    sizes = sorted({size for node in topology.numa_nodes.values() for size in node.hugepages})
    capacity = {size: machine.hugepages_capacity(size) for size in sizes}
    left = {size: machine.hugepages_left(size, state, reading) for size in sizes}
    return tuple(
        Zone(
            id=i,
            socket=_socket(machine, i),
            distances=tuple(
                Distance(id=other, value=topology.distance(i, other)) for other in topology.numa_ids
            ),
            cpus=len(node.cpus),
            cpu_allocatable_milli=machine.cpu_total.get(i, 0),
            cpu_available_milli=cpu_left.get(i, 0),
            exclusive_cpus=whole.get(i, 0),
            free_exclusive_cpus=free.get(i, 0),
            shared_cpus=len(node.cpus & pool),
            memory_bytes=node.memory_bytes,
            memory_allocatable_bytes=machine.memory_capacity[i],
            memory_available_bytes=memory_left[i],
            huge_pages=tuple(
                ZoneHugePages(
                    size_bytes=size,
                    capacity_bytes=node.hugepages.get(size, 0),
                    allocatable_bytes=capacity[size][i],
                    available_bytes=left[size][i],
                )
                for size in sizes
            ),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
            measured_factor=measured.get(i, 1.0),
            devices=devices.get(i, ()),
            core_kind=_core_kind(machine, i),
            pcie_roots=roots_of_pcie.get(i, ()),
        )
        for i, node in sorted(topology.numa_nodes.items())
    )


def _by_numa_node(counts: Counted | None) -> dict[int, tuple[ZoneDevices, ...]]:
    """Devices by NUMA node, in the order of their resources; none where they are not known."""
    found: dict[int, tuple[ZoneDevices, ...]] = {}
    for one in () if counts is None or isinstance(counts, str) else counts:
        devices = ZoneDevices(
            resource=one.resource, allocatable=one.allocatable, available=one.available
        )
        found[one.numa_node] = (*found.get(one.numa_node, ()), devices)
    return found


def _socket(machine: Machine, numa_node: int) -> int | None:
    sockets = [s.id for s in machine.topology.sockets.values() if numa_node in s.numa_nodes]
    return sockets[0] if len(sockets) == 1 else None


def _core_kind(machine: Machine, numa_node: int) -> str:
    """The kind of a NUMA node's cores on a hybrid machine; empty on all others."""
    cores = machine.topology.cores.values()
    kinds = {core.kind for core in cores if core.numa_node == numa_node}
    if not kinds or CoreKind.STANDARD in kinds:
        return ""
    return MIXED if len(kinds) > 1 else kinds.pop().value


# --- The kubelet beside us ---


def kubelet_document(
    agent: Agent, beside: BesideKubelet, configuration: KubeletSettings
) -> Kubelet:
    """What the kubelet's managers granted, and where it and we disagree.

    Reads what is replaced as a whole, so any thread may call it.
    """
    state, settings = agent.state, agent.machine.settings
    grants, adopted = state.kubelet, configuration.adopted
    shown = grants.shared[0] if grants.shared else ""
    return Kubelet(
        cpu_policy=grants.cpu_policy,
        memory_policy=grants.memory_policy,
        override=settings.kubelet_override.value,
        shared_cpus=str(shown),
        granted_cpus=str(grants.taken),
        grants=tuple(_grants(agent)),
        contests=tuple(
            KubeletContest(
                container_id=one.container_id,
                namespace=one.namespace,
                pod=one.pod,
                pod_uid=one.pod_uid,
                container=one.container,
                asked=one.asked,
                kept=one.kept,
                yields_to=one.yields_to,
                seen_in=one.seen_in,
                since=one.since,
                times=one.times,
            )
            for _, one in sorted(beside.contests.items())
        ),
        problems=(*beside.problems, *configuration.found.problems),
        configuration=configuration.found.path,
        adopted=adopted.adopted if adopted else (),
        differences=adopted.differences if adopted else (),
    )


def _grants(agent: Agent) -> list[KubeletGrant]:
    """Of containers, then of whole pods; each by UID and name."""
    state = agent.state
    grants = state.kubelet
    live = {(a.pod_uid, a.container): a for a in state.allocations.values()}
    by_id = {("", a.container_id): a for a in state.allocations.values()}
    pods = {a.pod_uid: a for a in state.allocations.values()}
    found: list[KubeletGrant] = []
    for holder in sorted(grants.cpus.keys() | grants.mems.keys()):
        a = live.get(holder) or by_id.get(holder)
        cpus = grants.cpus.get(holder, "")
        found.append(
            KubeletGrant(
                pod_uid=a.pod_uid if a else holder[0],
                container=a.container if a else holder[1],
                namespace=a.namespace if a else "",
                pod=a.pod if a else "",
                cpus=str(cpus),
                mems=str(grants.mems.get(holder, "")),
                overridden=bool(cpus) and a is not None and shown_kind(state, a) != KUBELETS,
            )
        )
    for uid in sorted(grants.pods.keys() | grants.pod_mems.keys()):
        a = pods.get(uid)
        found.append(
            KubeletGrant(
                pod_uid=uid,
                container="",
                namespace=a.namespace if a else "",
                pod=a.pod if a else "",
                cpus=str(grants.pods.get(uid, "")),
                mems=str(grants.pod_mems.get(uid, "")),
                overridden=False,
            )
        )
    return found
