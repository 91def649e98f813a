"""Shows the agent to the outside: its state as API documents and as a metrics snapshot.

Everything is read from the frozen state of one moment, so a long answer that is made piece by
piece stays consistent while the agent goes on. The agent lives in another thread: what is taken
from it is either replaced as a whole (the state, the machine), or copied in one step that the
interpreter does not interrupt (the refusals).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from heapq import merge
from typing import Final

from msgspec import UNSET
from msgspec.structs import asdict

from nri_numa.engine.decision import Machine
from nri_numa.engine.explain.actual import displaced_text, late_text
from nri_numa.engine.explain.explanation import Document, of_allocation, of_refusal
from nri_numa.engine.explain.sentences import sentences
from nri_numa.engine.others.kubelets import shown_kind
from nri_numa.engine.state import Allocation, NodeState, displaced, effective_cpus
from nri_numa.engine.values.memory_policy import MemoryPolicy
from nri_numa.http.api import Listing
from nri_numa.http.responses import (
    Assignment,
    Checkpoint,
    ContainerUse,
    Explanation,
    Kubelet,
    Link,
    NodeUse,
    Notice,
    Notices,
    NUMAInfo,
    NUMAInfoData,
    Readiness,
    Refusal,
    Slots,
    Status,
    TopologyDocument,
    Use,
    Zones,
)
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.report import topology_document
from nri_numa.node import numa_nodes, slots, zones
from nri_numa.node import waiting as cpu_waiting
from nri_numa.node.agent import Agent, RefusedContainer
from nri_numa.node.counts import Counts, container_samples
from nri_numa.node.kubelet_view import kubelet_document
from nri_numa.node.locality import NOBODY_LOOKS, NOT_READ, Memories, MemoryWatch
from nri_numa.node.reality import Reality, sentence
from nri_numa.node.serving import Sources
from nri_numa.node.usage import UsageWatch
from nri_numa.observe.metrics import Snapshot

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
        waiting: cpu_waiting.WaitingWatch | None = None,
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
                written_at=agent.durable.written_at, problem=agent.durable.problem
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
        if self._agent.durable.problem:
            reason = f"the state cannot be saved: {self._agent.durable.problem}"
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
                numa_nodes=numa_nodes.uses(machine, state, pool, self._sources.reading()),
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
        for one in tuple(self._agent.refusals):  # the last one of each counts
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
            document = {**document, "actual": sentence(assignment.actual)}
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
        return [_refusal(refused) for refused in reversed(tuple(self._agent.refusals))]

    def slots(self) -> Slots:
        """Exclusive CPUs that the scheduler may count."""
        return slots.document(self._agent.machine, self._agent.state, self._not_pinning())

    def zones(self) -> Zones:
        """Every NUMA node as who schedules counts it."""
        agent = self._agent
        # Before the state: who is decided about in between is in it.
        coming = self._sources.coming()
        return zones.document(
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
        written = self._agent.durable.written_at
        return Snapshot(
            numa_nodes=numa_nodes.samples(machine, state, pool, self._sources.reading()),
            node_name=self._sources.node_name,
            container_counts=self._counts(state).by_kind,
            containers=container_samples(state),
            shared_pool_cpus=len(pool),
            offline_cpus=len(machine.topology.present - machine.topology.online),
            checkpoint_written=written,
            checkpoint_age=None if written is None else max(0.0, self._sources.now() - written),
            checkpoint_failing=bool(self._agent.durable.problem),
            ready=self.readiness().ready,
            observe=self._agent.observe,
            local_memory=None if self._memory is None else self._memory.samples(state),
            waiting=None if self._waiting is None else self._waiting.samples(state),
        )

    def _looked(self) -> tuple[Memories, cpu_waiting.Waitings]:
        """What the last rounds over all containers found."""
        return (
            self._memory.known if self._memory is not None else NOBODY_LOOKS,
            self._waiting.known if self._waiting is not None else cpu_waiting.NOBODY_LOOKS,
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
    waiting: cpu_waiting.Waitings,
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
        memory=memory.get(a.container_id, NOT_READ) if memory is not NOBODY_LOOKS else UNSET,
        late=UNSET if late is None else late.get(a.container_id, UNSET),
        waiting=waiting.get(a.container_id, cpu_waiting.NOT_READ)
        if waiting is not cpu_waiting.NOBODY_LOOKS
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
    )
