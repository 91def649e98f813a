"""Shows the agent to the outside: its state as API documents and as a metrics snapshot.

Everything is read from the frozen state of one moment, so a long answer that is made piece by
piece stays consistent while the agent goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nri_numa.agent import Agent
from nri_numa.agent import Refusal as RefusedContainer
from nri_numa.engine.decision import Machine, Reading, Trace
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

    def status(self) -> Status:
        """The agent itself."""
        agent, link = self._agent, self._link()
        return Status(
            version=self._version,
            started_at=self._started,
            observe=agent.observe,
            ready=self.readiness().ready,
            serial=agent.state.serial,
            containers=_kinds(agent.state),
            link=Link(
                state=link.state,
                detail=link.detail,
                runtime=link.runtime,
                runtime_version=link.runtime_version,
            ),
            checkpoint=Checkpoint(written_at=agent.checkpointed_at, problem=agent.store_problem),
        )

    def readiness(self) -> Readiness:
        """Whether containers are being placed."""
        link = self._link()
        if link.active and self._agent.synchronized:
            return Readiness(ready=True, reason="")
        detail = f": {link.detail}" if link.detail else ""
        return Readiness(ready=False, reason=f"the link to the runtime is {link.state}{detail}")

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
            containers=_assignments(machine, state, pool),
        )

    def explain(self, namespace: str, pod: str, container: str | None) -> list[Explanation]:
        """What is known about a pod's containers: those that run, and those refused lately."""
        machine, state = self._agent.machine, self._agent.state
        pool = state.pool(machine.topology, machine.settings)
        found = [
            self._explained(a, machine, pool)
            for _, a in sorted(state.allocations.items())
            if a.namespace == namespace and a.pod == pod and container in (None, a.container)
        ]
        seen = {one.container for one in found}
        for refused in reversed(self._agent.refusals):
            named = refused.namespace == namespace and refused.pod == pod
            if named and container in (None, refused.container) and refused.container not in seen:
                seen.add(refused.container)
                found.append(_refused(refused))
        return sorted(found, key=lambda one: one.container)

    def _explained(self, allocation: Allocation, machine: Machine, pool: CPUSet) -> Explanation:
        trace = self._agent.trace_of(allocation.container_id)
        return Explanation(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            outcome="admitted",
            summary=allocation.reason,
            steps=_steps(trace),
            assignment=_assignment(allocation, machine, pool),
        )

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
            container_kinds=_kinds(state),
            containers=_container_samples(state),
            shared_pool_cpus=len(pool),
            offline_cpus=len(machine.topology.present - machine.topology.online),
            checkpoint_age=None if written is None else max(0.0, self._now() - written),
        )


def _kinds(state: NodeState) -> dict[str, int]:
    counted = Counter(a.kind.value for a in state.allocations.values())
    return {kind.value: counted[kind.value] for kind in Kind}


def _steps(trace: Trace | None) -> tuple[str, ...]:
    return () if trace is None else trace.steps


def _assignments(machine: Machine, state: NodeState, pool: CPUSet) -> Iterator[Assignment]:
    # The order an operator reads in; the id makes it total (a pod may restart a container).
    ordered = sorted(
        state.allocations.values(),
        key=lambda a: (a.namespace, a.pod, a.container, a.container_id),
    )
    return (_assignment(a, machine, pool) for a in ordered)


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


def _refused(refused: RefusedContainer) -> Explanation:
    return Explanation(
        namespace=refused.namespace,
        pod=refused.pod,
        container=refused.container,
        outcome="refused",
        summary=refused.message,
        steps=_steps(refused.trace),
        refusal=_refusal(refused),
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
        yield NUMANodeSample(
            numa_node=i,
            exclusive_cpus=len(node.cpus & state.owned),
            idle_cpus=len(node.cpus & state.idle),
            shared_cpus=len((node.cpus & pool) - settings.reserved_cpus),
            reserved_cpus=len((node.cpus & settings.reserved_cpus) - state.owned - state.idle),
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
