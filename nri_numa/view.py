"""Shows the agent to the outside: its state as API documents and as a metrics snapshot.

Everything is read from the frozen state of one moment, so a long answer that is made piece by
piece stays consistent while the agent goes on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from nri_numa.agent import Agent
from nri_numa.agent import Refusal as RefusedContainer
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.explain import Document, of_allocation, of_refusal
from nri_numa.engine.explain_text import sentences
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus
from nri_numa.http.documents import (
    Assignment,
    Checkpoint,
    Explanation,
    HugePages,
    Link,
    NodeUse,
    NUMAInfo,
    NUMAInfoData,
    NUMANodeUse,
    Readiness,
    Refusal,
    Status,
    TopologyDocument,
)
from nri_numa.http.view import Listing
from nri_numa.metrics import ContainerSample, NUMANodeSample, Snapshot
from nri_numa.topology.cpuset import CPUSet

_AFRESH: Final = 64
"""Differences up to which an old order is mended; a larger change is sorted afresh."""
_DOCUMENTS: Final = 32
"""Explanations kept ready: a page asks for the same ones again and again."""

Name = tuple[str, str, str, str]
"""Namespace, pod, container, id: the order an operator reads in, and total."""

_kind = attrgetter("kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """What the daemon knows about its link; see `nri_numa.runtime.handler.LinkState`.

    Attributes:
        active: registered and synchronized.
    """

    state: str
    detail: str
    active: bool
    runtime: str = ""
    runtime_version: str = ""


class LiveView:
    """`nri_numa.http.view.AgentView` over a running agent.

    Args:
        agent: whose state is shown.
        version: of nri-numa.
        started: Unix time of the start.
        now: Unix time in seconds.
        link: the link at this moment.
        reading: what the kernel had left when it was last asked.
        describe: makes the document of a topology.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        version: str,
        started: float,
        now: Callable[[], float],
        link: Callable[[], LinkFacts],
        reading: Callable[[], Reading | None],
        describe: Callable[[Machine], TopologyDocument],
    ) -> None:
        self._agent = agent
        self._version = version
        self._started = started
        self._now = now
        self._link = link
        self._reading = reading
        self._describe = describe
        self._names: list[Name] = []
        self._named = NodeState()
        self._counted: tuple[NodeState, dict[str, int]] | None = None
        self._documents: dict[object, Document] = {}

    def status(self) -> Status:
        """The agent itself."""
        agent, link = self._agent, self._link()
        return Status(
            version=self._version,
            started_at=self._started,
            observe=agent.observe,
            ready=self.readiness().ready,
            serial=agent.state.serial,
            containers=self._kinds(agent.state),
            link=Link(
                state=link.state,
                detail=link.detail,
                runtime=link.runtime,
                runtime_version=link.runtime_version,
            ),
            checkpoint=Checkpoint(written_at=agent.checkpointed_at, problem=agent.store_problem),
        )

    def readiness(self) -> Readiness:
        """Whether containers are being placed, and remembered."""
        link = self._link()
        if not (link.active and self._agent.synchronized):
            detail = f": {link.detail}" if link.detail else ""
            reason = f"the link to the runtime is {link.state}{detail}"
            return Readiness(ready=False, reason=reason)
        if self._agent.store_problem:
            reason = f"the state cannot be saved: {self._agent.store_problem}"
            return Readiness(ready=False, reason=reason)
        return Readiness(ready=True, reason="")

    def topology(self) -> TopologyDocument:
        """The machine."""
        return self._describe(self._agent.machine)

    def topology_key(self) -> object:
        """Another object when the machine is another one."""
        return self._agent.machine

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
        return Listing(
            head=NodeUse(
                serial=state.serial,
                shared_pool=str(pool),
                numa_nodes=tuple(_nodes(machine, state, pool, self._reading())),
            ),
            containers=(
                _assignment(state.allocations[name[3]], machine, pool)
                for name in tuple(self._ordered(state))
            ),
        )

    def explain(self, namespace: str, pod: str, container: str | None) -> list[Explanation]:
        """What is known about a pod's containers: those that run, and those refused lately."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
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
            found.append(self._explained(allocation, machine, pool, later))
        found += [
            self._refused(one) for name, one in sorted(refused.items()) if container in (None, name)
        ]
        return sorted(found, key=lambda one: one.container)

    def _explained(
        self,
        allocation: Allocation,
        machine: Machine,
        pool: CPUSet,
        later: RefusedContainer | None,
    ) -> Explanation:
        kept = self._agent.kept_trace(allocation.container_id)
        document = self._documents.get(kept) if kept is not None else None
        cpus = str(effective_cpus(allocation, pool, machine.topology))
        if document is None or document["result"]["cpus"] != cpus:
            trace = self._agent.trace_of(allocation.container_id)
            document = of_allocation(allocation, trace, cpus)
            if kept is not None:
                self._remember(kept, document)
        if later is not None:
            document = {**document, "later": [f"since then refused: {later.message}"]}
        return Explanation(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            outcome="admitted",
            summary=allocation.reason,
            steps=tuple(sentences(document)),
            assignment=_assignment(allocation, machine, pool),
            details=document,
        )

    def _refused(self, refused: RefusedContainer) -> Explanation:
        document = self._documents.get(refused.trace)
        if document is None:
            trace = self._agent.trace_of_refusal(refused)
            document = of_refusal(trace, refused.reason, refused.message)
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

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        return self._agent.subscribe(listener)

    def snapshot(self) -> Snapshot:
        """The node for a scrape; `nri_numa.metrics.Metrics.snapshot`."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
        written = self._agent.checkpointed_at
        return Snapshot(
            numa_nodes=tuple(_samples(machine, state, pool, self._reading())),
            container_kinds=self._kinds(state),
            containers=_container_samples(state),
            shared_pool_cpus=len(pool),
            offline_cpus=len(machine.topology.present - machine.topology.online),
            checkpoint_age=None if written is None else max(0.0, self._now() - written),
            checkpoint_failing=bool(self._agent.store_problem),
            ready=self.readiness().ready,
            observe=self._agent.observe,
        )

    def _kinds(self, state: NodeState) -> dict[str, int]:
        """Containers by kind; counted once for each state."""
        if self._counted is None or self._counted[0] is not state:
            counted = Counter(map(_kind, state.allocations.values()))
            self._counted = state, {kind.value: counted[kind] for kind in Kind}
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
            self._names = sorted(map(_name, new.values()))
        else:
            for container_id in changed:
                if container_id in new:
                    insort(self._names, _name(new[container_id]))
                else:
                    del self._names[bisect_left(self._names, _name(old[container_id]))]
        self._named = state
        return self._names


def _name(a: Allocation) -> Name:
    return a.namespace, a.pod, a.container, a.container_id


def _assignment(a: Allocation, machine: Machine, pool: CPUSet) -> Assignment:
    return Assignment(
        id=a.container_id,
        pod_uid=a.pod_uid,
        namespace=a.namespace,
        pod=a.pod,
        container=a.container,
        kind=a.kind.value,
        policy=a.policy.value,
        qos=a.qos.value,
        smt=a.smt.value,
        cpus=str(effective_cpus(a, pool, machine.topology)),
        mems=str(a.mems),
        numa_nodes=str(a.numa_nodes),
        idle=str(a.idle),
        preferred=a.preferred,
        reason=a.reason,
        cpu_milli=a.cpu_milli,
        memory_bytes=a.memory_bytes,
        since=a.since,
    )


def _refusal(refused: RefusedContainer) -> Refusal:
    return Refusal(
        namespace=refused.namespace,
        pod=refused.pod,
        container=refused.container,
        reason=refused.reason,
        message=refused.message,
        at=refused.at,
    )


def _nodes(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> Iterator[NUMANodeUse]:
    topology, settings = machine.topology, machine.settings
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    for i, node in sorted(topology.numa_nodes.items()):
        charge = state.charge(i)
        yield NUMANodeUse(
            id=i,
            cpus=str(node.cpus),
            exclusive=str(node.cpus & state.owned),
            idle=str(node.cpus & state.idle),
            shared=str(node.cpus & pool),
            reserved=str(node.cpus & settings.reserved_cpus),
            cpu_capacity_milli=machine.cpu_total.get(i, 0),
            cpu_allocated_milli=charge.cpu_milli,
            cpu_available_milli=cpu_left.get(i, 0),
            memory_bytes=node.memory_bytes,
            memory_allocated_bytes=charge.memory,
            memory_available_bytes=memory_left.get(i, 0),
            huge_pages=tuple(
                HugePages(
                    size_bytes=size,
                    total_bytes=total,
                    allocated_bytes=charge.hugepages.get(size, 0),
                )
                for size, total in sorted(node.hugepages.items())
            ),
            capacity_factor=settings.capacity_factor.get(i, 1.0),
        )


def _samples(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> Iterator[NUMANodeSample]:
    topology, settings = machine.topology, machine.settings
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    for i, node in sorted(topology.numa_nodes.items()):
        charge = state.charge(i)
        shared = (node.cpus & pool) - settings.reserved_cpus
        yield NUMANodeSample(
            numa_node=i,
            exclusive_cpus=len(node.cpus & state.owned),
            idle_cpus=len(node.cpus & state.idle),
            shared_cpus=len(shared),
            # What is left: reserved CPUs, and those that our own cpuset keeps from containers.
            reserved_cpus=len(node.cpus - state.owned - state.idle - shared),
            allocatable_cpus=cpu_left.get(i, 0) / 1000,
            memory=node.memory_bytes,
            memory_allocated=charge.memory,
            memory_available=memory_left.get(i, 0),
            capacity_factor=settings.capacity_factor.get(i, 1.0),
            hugepages={
                size: (total, charge.hugepages.get(size, 0))
                for size, total in node.hugepages.items()
            },
        )


def _container_samples(state: NodeState) -> Iterator[ContainerSample]:
    return (
        ContainerSample(
            namespace=a.namespace,
            pod=a.pod,
            container=a.container,
            kind=a.kind.value,
            policy=a.policy.value,
            numa_nodes=str(a.numa_nodes),
        )
        for a in state.allocations.values()
    )
