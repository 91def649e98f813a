"""View of the agent: its state as API documents and as a metrics snapshot.

Everything is read from the frozen state of one moment, so a long answer made in chunks is
consistent. The agent runs in another thread: its values are either replaced as a whole (state,
machine), or copied in one step that the interpreter does not interrupt (rejections).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import UNSET, Struct, convert
from msgspec.structs import replace

from nri_numa.agent.agent import Agent
from nri_numa.agent.kubelet_sync import KubeletSync
from nri_numa.agent.usage import MEMORY_NOT_READ, WAITING_NOT_READ, UsageWatches
from nri_numa.engine.accounting import max_exclusive_by_node, slot_capacity, total_free_exclusive
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain.explanation import explain_allocation, explain_rejection
from nri_numa.engine.explain.sentences import (
    displaced_text,
    drift_text,
    explanation_sentences,
    start_delay_text,
)
from nri_numa.engine.foreign_pins import KUBELET_KIND, shown_kind
from nri_numa.engine.kubelet_grants import grant_holders
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.rebalance import movable_exclusive_by_node
from nri_numa.engine.state import Allocation, ContainerKind, NodeState
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import (
    CoreKind,
    cpus_text,
    listed_words_text,
    numa_text,
    topology_document,
)
from nri_numa.model.workload import CPUMode, MemoryPolicy, Policy, QoSClass, Scope
from nri_numa.observe.metrics import MetricsSnapshot, NUMANodeSample
from nri_numa.observe.notices import Rejection
from nri_numa.runtime import LinkState
from nri_numa.text import human_bytes, utc_text
from nri_numa.web import responses as shown

if TYPE_CHECKING:
    from nri_numa.agent.capacity import StealWatch
    from nri_numa.agent.late_starts import LateStarts
    from nri_numa.agent.links import LinkStatus, NodeDevices
    from nri_numa.agent.pod_observers import PendingPods
    from nri_numa.devices.counts import CountsOrReason
    from nri_numa.kubelet.configuration import KubeletFacts


NO_PCIE_ROOTS: Final[Mapping[int, tuple[str, ...]]] = {}


class ProcessInfo(NamedTuple):
    """Facts of the process that never change; ``start_time`` is a Unix time."""

    version: str
    node_name: str
    start_time: float


class ShownParts(Struct, frozen=True, kw_only=True):
    """Parts whose values are shown beside the agent's; None if switched off.

    Attributes:
        kubelet: the kubelet's grants, and conflicts with it.
        devices: the machine's devices.
        measured: measured capacity factors.
        late_starts: start delays over CRI.
        pods: Guaranteed pods that have no container yet.
    """

    kubelet: KubeletSync
    devices: NodeDevices
    measured: StealWatch
    late_starts: LateStarts | None = None
    pods: PendingPods | None = None


class AssignmentListing(NamedTuple):
    """Assignments of one moment, made one by one; valid while the state changes."""

    head: shown.WholeNodeAllocation
    containers: Iterator[shown.Assignment]


class LiveView:
    """View of a running agent for the API and a scrape; read-only, from memory."""

    def __init__(
        self,
        agent: Agent,
        about: ProcessInfo,
        runtime: LinkStatus,
        parts: ShownParts,
        watches: UsageWatches,
    ) -> None:
        self._agent, self._about, self._runtime = agent, about, runtime
        self._parts, self._watches = parts, watches

    def status_document(self) -> shown.Status:
        """Return the agent's status."""
        agent = self._agent
        drift_by_id = agent.drift.known
        counts = count_by_kind(agent.current.state)
        return shown.Status(
            version=self._about.version,
            node_name=self._about.node_name,
            started_at=self._about.start_time,
            observe=agent.current.observe,
            ready=self.readiness().ready,
            serial=agent.current.state.serial,
            containers={k: n + counts[k, True] for (k, p), n in counts.items() if not p},
            misaligned=sum(n for (_, aligned), n in counts.items() if not aligned),
            drifted=len(drift_by_id),
            on_exclusive_cpus=sum(status.on_exclusive_cpus for status in drift_by_id.values()),
            kubelet_cpus=str(agent.current.state.kubelet.granted_cpus),
            kubelet_conflicts=len(self._parts.kubelet.conflicts),
            link=self._runtime.link_document(),
            checkpoint=shown.Checkpoint(
                written_at=agent.current.store.written_at, problem=agent.current.store.write_problem
            ),
        )

    def readiness(self) -> shown.Readiness:
        """Return if containers are placed and recorded, and else the reason."""
        link, problem = self._runtime.link_document(), self._agent.current.store.write_problem
        reason = link.pending_registration
        if not reason and not (link.state == LinkState.ACTIVE and self._agent.current.synchronized):
            detail = f": {link.detail}" if link.detail else ""
            reason = f"the link to the runtime is {link.state}{detail}"
        elif not reason and problem:
            reason = f"the state cannot be saved: {problem}"
        return shown.Readiness(ready=not reason, reason=reason)

    def machine_topology_document(self) -> shown.TopologyDocument:
        """Return the machine's topology."""
        machine, devices = self._agent.current.machine, self._parts.devices.pci
        reserved = machine.settings.reserved_cpus
        return topology_document(machine.topology, reserved=reserved, devices=devices)

    def numa_info(self) -> shown.MachineNUMAInfo:
        """Return the machine in short, with CPUs listed one by one, without ranges."""
        nodes = [n for _, n in sorted(self._agent.current.machine.topology.numa_nodes.items())]
        return shown.MachineNUMAInfo(
            code=200,
            message="OK",
            data=shown.NUMAInfoData(
                nodenums=len(nodes),
                cpulist=tuple(",".join(map(str, n.cpus)) for n in nodes),
                memsize=tuple(str(n.memory_bytes) for n in nodes),
            ),
        )

    def list_assignments(self) -> AssignmentListing:
        """Return every container's assignment, in the order of their names."""
        moment = self._state_snapshot()
        state, pool = moment.state, moment.desired.pool
        uses = numa_node_uses(replace(moment.desired, reading=self._agent.current.memory))
        head = shown.WholeNodeAllocation(
            serial=state.serial, shared_pool=str(pool), numa_nodes=tuple(uses)
        )
        return AssignmentListing(
            head, (moment.assignment_document(a) for a in _sorted_allocations(state))
        )

    def explain_pod(
        self, namespace: str, pod: str, container: str | None
    ) -> list[shown.Explanation]:
        """Explain a pod's containers: those that run, and those rejected lately."""
        moment = self._state_snapshot()
        state = moment.state
        rejection_by_name: dict[str, Rejection] = {}
        for record in self._agent.history.rejections:  # the last rejection of each counts
            if (record.namespace, record.pod) == (namespace, pod):
                rejection_by_name[record.container] = record
        explanations: list[shown.Explanation] = []
        for allocation in _sorted_allocations(state, namespace, pod, container):
            rejection = rejection_by_name.pop(allocation.container, None)
            if rejection is not None and rejection.last_time <= allocation.assigned_at:
                rejection = None  # it was rejected before it was placed
            explanations.append(self._allocation_explanation(allocation, moment, rejection))
        explanations += [
            self._rejection_explanation(record)
            for name, record in sorted(rejection_by_name.items())
            if container in (None, name)
        ]
        return sorted(explanations, key=lambda one: one.container)

    def _allocation_explanation(
        self, allocation: Allocation, moment: StateSnapshot, rejection: Rejection | None
    ) -> shown.Explanation:
        effective = moment.desired.cpuset_of(allocation)
        explanation = self._agent.history.explanation_of(allocation.container_id)
        document = explain_allocation(allocation, explanation, str(effective))
        notes = [f"since then rejected: {rejection.message}"] if rejection is not None else []
        if yielded_text := moment.yielded_text(allocation, effective):
            notes.append(f"listed {allocation.cpus}, {yielded_text}")
        ignored = self._agent.history.notices.ignored_annotations_of(allocation.pod_uid)
        notes += [notice.message for notice in ignored]
        assignment = moment.assignment_document(allocation)
        facts = []
        if assignment.displaced:
            facts.append(displaced_text(assignment.displaced))
        if reserved := assignment.reserved:
            facts.append(
                f"{cpus_text(reserved)} became reserved later, exclusive to it until it is "
                f"recreated"
            )
        if isinstance(assignment.start_delay, float):
            facts.append(start_delay_text(assignment.start_delay))
        if facts or notes:
            document["later"] = [*facts, *notes]
        if (actual := assignment.actual) is not None:
            document["actual"] = drift_text(
                actual.text,
                utc_text(actual.observed_at),
                actual.holders,
                is_abandoned=actual.repairs_abandoned,
            )
        return shown.Explanation(
            namespace=allocation.namespace,
            pod=allocation.pod,
            container=allocation.container,
            outcome="admitted",
            summary=assignment.reason,
            decision_steps=tuple(explanation_sentences(document)),
            assignment=assignment,
            details=document,
        )

    def _rejection_explanation(self, rejection: Rejection) -> shown.Explanation:
        explanation = self._agent.history.explanation_of_rejection(rejection)
        document = explain_rejection(explanation, rejection.reason, rejection.message)
        return shown.Explanation(
            namespace=rejection.namespace,
            pod=rejection.pod,
            container=rejection.container,
            outcome="rejected",
            summary=rejection.message,
            # The message is the summary already.
            decision_steps=tuple(explanation_sentences(document)[1:]),
            rejection=convert(rejection, shown.RejectionRecord, from_attributes=True),
            details=document,
        )

    def list_rejections(self) -> list[shown.RejectionRecord]:
        """Return the latest rejections, newest first."""
        return [
            convert(rejection, shown.RejectionRecord, from_attributes=True)
            for rejection in reversed(self._agent.history.rejections)
        ]

    def slots_document(self) -> shown.ExclusiveCPUSlotsDocument:
        """Return the slots that the scheduler may count: allocated and free ones."""
        desired, reason = self._agent.current.schedulable, self._unready_reason()
        machine, state, offered = desired.machine, desired.state, slot_capacity(desired)
        return shown.ExclusiveCPUSlotsDocument(
            serial=state.serial,
            ready=not reason,
            reason=reason,
            annotation=machine.slots_annotation_key,
            total=offered.total_slots,
            exclusive=len(state.exclusive),
            numa_nodes=tuple(
                shown.NUMANodeExclusiveCPUSlots(id=i, allocated=offered.allocated[i], free=count)
                for i, count in sorted(offered.free.items())
            ),
            ids=tuple(id for a in offered.holders for id in a.slots.split(",")),
        )

    def scheduler_zones_document(self) -> shown.Zones:
        """Return every NUMA node as schedulers count it."""
        parts = self._parts
        # Before the state, which then includes pods that are decided about in between.
        pending_pods = () if parts.pods is None else parts.pods.pod_names()
        agent, desired = self._agent, self._agent.current.schedulable
        return zones_document(
            replace(desired, reading=agent.current.memory),
            immovable_ids=agent.cgroups.immovable_ids(),
            reason=self._unready_reason(),
            measured=parts.measured.enforced_factors(),
            devices=parts.devices.device_counts(),
            roots_of_pcie=parts.devices.roots,
            pending_pods=pending_pods,
            kubelet=parts.kubelet.configuration.discovered.facts,
        )

    def _unready_reason(self) -> str:
        """Return the reason why schedulers must not rely on this node; empty if they may."""
        readiness = self.readiness()
        if not readiness.ready:
            return readiness.reason
        return "observe is on, so nothing is pinned" if self._agent.current.observe else ""

    def kubelet_status_document(self) -> shown.KubeletDocument:
        """Return the kubelet's grants and conflicts."""
        return kubelet_document(self._agent, self._parts.kubelet)

    def notices_document(self, last_number: int) -> shown.Notices:
        """Return the notices after a number of the sequence."""
        log = self._agent.history.notices
        number, evicted = log.number, log.evicted  # before the notices: one too many is no harm
        notices = tuple(log.notices_after(last_number))
        return shown.Notices(instance=log.instance, number=number, evicted=evicted, notices=notices)

    def decided_requests_document(self, last_number: int) -> shown.DecidedRequests:
        """Return the decided requests after a number of the sequence."""
        decided, instance = self._agent.history.decided, f"{int(self._about.start_time * 1000):x}"
        number = decided.number  # before the requests: one too many is no harm
        return shown.DecidedRequests(
            instance=instance, number=number, requests=decided.requests_after(last_number)
        )

    def notice_number(self) -> int:
        """Return the last number of the sequence of notices."""
        return self._agent.history.notices.number

    def node_usage(self) -> shown.NodeUsage:
        """Return the measured usage of the machine."""
        return self._watches.usage.usage_document()

    async def container_use(
        self, namespace: str, pod: str, container: str
    ) -> list[shown.MeasuredContainer]:
        """Measure the usage of a container now."""
        allocations = _sorted_allocations(self._agent.current.state, namespace, pod, container)
        return [await self._watches.usage.measure_container(a) for a in allocations]

    def subscribe_to_changes(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns a function that ends this."""
        return self._agent.current.subscribe(listener)

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return the node for a scrape; `nri_numa.observe.metrics.Metrics.snapshot`."""
        node = self._agent.current.snapshot()
        state, topology = node.state, node.machine.topology
        memory, cpu_waiting = self._watches.memory, self._watches.cpu_waiting
        return MetricsSnapshot(
            numa_nodes=numa_node_samples(node),
            node_name=self._about.node_name,
            container_counts=count_by_kind(state),
            state=state,
            shared_pool_cpus=len(node.pool),
            offline_cpus=len(topology.present - topology.online),
            checkpoint_written=self._agent.current.store.written_at,
            checkpoint_failing=bool(self._agent.current.store.write_problem),
            ready=self.readiness().ready,
            observe=self._agent.current.observe,
            local_memory=None if memory is None else memory.container_series(state),
            cpu_waiting=None if cpu_waiting is None else cpu_waiting.container_series(state),
        )

    def _state_snapshot(self) -> StateSnapshot:
        return StateSnapshot(self._agent, self._watches, self._parts.late_starts)


def _sorted_allocations(
    state: NodeState, namespace: str = "", pod: str = "", container: str | None = None
) -> list[Allocation]:
    """Return all allocations, those of a pod, or of one container name, by names and id."""
    allocations = [
        a
        for a in state.allocations.values()
        if (not pod or (a.namespace, a.pod) == (namespace, pod))
        and container in (None, a.container)
    ]
    return sorted(allocations, key=lambda a: (a.namespace, a.pod, a.container, a.container_id))


class StateSnapshot:
    """Decisions of one moment, and the actual cpusets of containers."""

    def __init__(self, agent: Agent, watches: UsageWatches, late_starts: LateStarts | None) -> None:
        self.known = agent.drift.known
        self.machine, self.state = agent.current.machine, agent.current.state
        self.desired = NodeSnapshot(self.machine, self.state)
        self.late = None if late_starts is None else late_starts.start_delays
        self.moving, self.soft_ids = agent.containers.migrating, agent.current.soft_ids
        self.memory = None if watches.memory is None else watches.memory.known
        self.waiting = None if watches.cpu_waiting is None else watches.cpu_waiting.known
        self._owners: dict[int, str] | None = None

    def assignment_document(self, a: Allocation) -> shown.Assignment:
        """Return the assignment of one container."""
        i, cpus, memory, pressures = (
            a.container_id,
            self.desired.cpuset_of(a),
            self.memory,
            self.waiting,
        )
        yielded_text = self.yielded_text(a, cpus)
        return shown.Assignment(
            id=i,
            pod_uid=a.pod_uid,
            namespace=a.namespace,
            pod=a.pod,
            container=a.container,
            kind=shown_kind(self.state, a),
            reservation=UNSET if not a.reserved_at else "soft" if i in self.soft_ids else "hard",
            policy=a.policy.value,
            qos=a.qos.value,
            smt=a.smt.value,
            cpus=str(cpus),
            foreign_cpus=str(a.foreign_cpus),
            mems=str(a.mems),
            migration=self.migration_text(a) or UNSET,
            mempolicy=UNSET if a.mempolicy is MemoryPolicy.DEFAULT else a.mempolicy.value,
            numa_nodes=str(a.numa_nodes),
            idle_siblings=str(a.idle_siblings),
            displaced=str(a.cpus) if self.desired.has_all_cpus_offline(a) else "",
            reserved=str(a.cpus & self.machine.settings.reserved_cpus) if a.exclusive else "",
            aligned=a.aligned,
            reason=f"{a.reason}, {yielded_text}" if yielded_text else a.reason,
            cpu_milli=a.cpu_milli,
            memory_bytes=a.memory_bytes,
            assigned_at=a.assigned_at,
            actual=self.drift_of(i),
            slots=a.slots,
            memory=UNSET if memory is None else memory.get(i, MEMORY_NOT_READ),
            start_delay=UNSET if self.late is None else self.late.get(i, UNSET),
            cpu_pressure=UNSET if pressures is None else pressures.get(i, WAITING_NOT_READ),
        )

    def migration_text(self, a: Allocation) -> str:
        """Describe a container's migration and its progress; empty without one."""
        if (migration := self.moving.get(a.container_id)) is not None:
            sources, target, moved_bytes = migration
            return f"from {numa_text(sources)} to {target}, {human_bytes(moved_bytes)} so far"
        if a.migrating_from:
            return f"from {numa_text(a.migrating_from)} to {a.mems - a.migrating_from}"
        return ""

    def drift_of(self, container_id: str) -> shown.ActualCpuset | None:
        """Return the actual cpuset if it differs, or overlaps exclusive CPUs of others."""
        status = self.known.get(container_id)
        if status is None:
            return self._foreign_overlap(container_id)
        drift, cpus = status.drift, status.drift.actual.effective_cpus
        intrudes = status.on_exclusive_cpus
        return shown.ActualCpuset(
            cpus=str(cpus),
            mems=str(drift.actual.effective_mems),
            desired_cpus=str(drift.desired_cpus),
            desired_mems=str(drift.desired_mems),
            observed_at=status.observed_at,
            text=status.difference_text,
            finding=drift.finding,
            on_exclusive_cpus=intrudes,
            holders=self._holder_names(cpus, container_id) if intrudes else (),
            repairs_abandoned=status.repairs_abandoned,
        )

    def _foreign_overlap(self, container_id: str) -> shown.ActualCpuset | None:
        """Return the cpuset of a foreign container on exclusive CPUs of others."""
        allocation, state = self.state.allocations.get(container_id), self.state
        if not (allocation and allocation.foreign_cpus & (state.exclusive | state.idle_siblings)):
            return None
        return shown.ActualCpuset(
            cpus=str(allocation.foreign_cpus),
            mems=str(allocation.mems),
            desired_cpus="",
            desired_mems="",
            observed_at=allocation.assigned_at,
            text=allocation.reason,
            finding=allocation.reason,
            on_exclusive_cpus=True,
            holders=self._holder_names(allocation.foreign_cpus, container_id),
            repairs_abandoned=False,
        )

    def yielded_text(self, allocation: Allocation, cpus: CPUSet) -> str:
        """Describe the CPUs that a yielding list gave up, and their holders; empty if none.

        ``cpus`` are the container's desired CPUs.
        """
        ceded = allocation.cpus & self.state.unavailable_cpus
        if not (ceded and allocation.yields_to_exclusive):
            return ""
        names = list(self._holder_names(ceded, allocation.container_id))
        names += [f"{name} (by the kubelet)" for name in grant_holders(self.state, ceded)]
        text = str(cpus) if cpus <= allocation.cpus else f"the shared pool {cpus}"
        gone_text = cpus_text(ceded, "is", "are")
        return f"runs on {text}, because {gone_text} exclusive to {listed_words_text(names)}"

    def _holder_names(self, cpus: CPUSet, excluded_id: str) -> tuple[str, ...]:
        """Return the names of the holders of these CPUs."""
        allocations = self.state.allocations
        if self._owners is None:
            # Once for all, since there may be as many intruders as holders.
            self._owners = {
                cpu: a.container_id
                for a in allocations.values()
                if a.exclusive
                for cpu in a.cpus | a.idle_siblings
            }
        holder_ids = {self._owners.get(cpu) for cpu in cpus} - {None, excluded_id}
        return tuple(sorted(allocations[i].full_name for i in holder_ids if i))


# --- Numbers of containers ---


def count_by_kind(state: NodeState) -> dict[tuple[str, bool], int]:
    """Count containers by kind, and by aligned (True) or misaligned."""
    live = (a for a in state.allocations.values() if not a.reserved_at)
    counts = Counter((shown_kind(state, a), a.aligned) for a in live)
    kinds = *(kind.value for kind in ContainerKind), KUBELET_KIND
    return {(kind, aligned): counts[kind, aligned] for kind in kinds for aligned in (False, True)}


# --- NUMA nodes ---


def numa_node_uses(desired: NodeSnapshot) -> Iterator[shown.NUMANodeAllocation]:
    """Return every NUMA node for the API, by id: use of its CPUs, and free amounts."""
    machine, state, pool = desired.machine, desired.state, desired.pool
    cpu_left, memory_left = desired.free_cpu_milli, desired.free_memory
    free_exclusive = max_exclusive_by_node(desired)
    for i, node in sorted(machine.topology.numa_nodes.items()):
        charge = state.allocated_on(i)
        yield shown.NUMANodeAllocation(
            id=i,
            cpus=str(node.cpus),
            exclusive=str(node.cpus & state.exclusive),
            idle_siblings=str(node.cpus & state.idle_siblings),
            kubelet=str(
                (node.cpus & state.kubelet.granted_cpus) - state.exclusive - state.idle_siblings
            ),
            shared=str(node.cpus & pool),
            reserved=str(node.cpus & machine.settings.reserved_cpus),
            cpu_capacity_milli=machine.cpu_capacity_milli.get(i, 0),
            cpu_allocated_milli=charge.cpu_milli,
            cpu_free_milli=cpu_left.get(i, 0),
            memory_bytes=node.memory_bytes,
            memory_allocated_bytes=charge.memory,
            memory_free_bytes=memory_left.get(i, 0),
            huge_pages=tuple(
                shown.HugePages(
                    size_bytes=size,
                    total_bytes=total,
                    allocated_bytes=charge.hugepages.get(size, 0),
                )
                for size, total in sorted(node.hugepages.items())
            ),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
            free_exclusive_cpus=free_exclusive.get(i, 0),
        )


def numa_node_samples(desired: NodeSnapshot) -> Iterator[NUMANodeSample]:
    """Return the same for a scrape, as numbers of CPUs; each CPU has one state."""
    machine, state = desired.machine, desired.state
    cpu_left, memory_left = desired.free_cpu_milli, desired.free_memory
    pool = desired.pool - machine.settings.reserved_cpus
    free_exclusive = max_exclusive_by_node(desired)
    for i, node in sorted(machine.topology.numa_nodes.items()):
        charge = state.allocated_on(i)
        kubelet = (node.cpus & state.kubelet.granted_cpus) - state.exclusive - state.idle_siblings
        counts = {
            "exclusive": len(node.cpus & state.exclusive),
            "idle": len(node.cpus & state.idle_siblings),
            "kubelet": len(kubelet),
            "shared": len((node.cpus & pool) - kubelet),
        }
        # The others: reserved CPUs, and those outside of the agent's own cpuset.
        counts["reserved"] = len(node.cpus) - sum(counts.values())
        yield NUMANodeSample(
            numa_node=i,
            cpus=counts,
            capacity_cpus=machine.cpu_capacity_milli.get(i, 0) / 1000,
            allocated_cpus=charge.cpu_milli / 1000,
            free_cpus=cpu_left.get(i, 0) / 1000,
            memory_bytes=node.memory_bytes,
            memory_allocated_bytes=charge.memory,
            memory_free_bytes=memory_left.get(i, 0),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
            free_exclusive_cpus=free_exclusive.get(i, 0),
            hugepages={
                size: (total, charge.hugepages.get(size, 0))
                for size, total in node.hugepages.items()
            },
        )


# --- NUMA nodes as schedulers count them ---

MIXED_CORE_KIND: Final = "mixed"
"""Kind of a NUMA node's cores if it has several kinds."""


def zones_document(
    desired: NodeSnapshot,
    *,
    immovable_ids: Collection[str] = (),
    reason: str = "",
    measured: Mapping[int, float] | None = None,
    devices: CountsOrReason | None = None,
    roots_of_pcie: Mapping[int, tuple[str, ...]] = NO_PCIE_ROOTS,
    pending_pods: Iterable[tuple[str, str]] = (),
    kubelet: KubeletFacts | None = None,
) -> shown.Zones:
    """Return all NUMA nodes of one state; pods without any charge yet are named, too.

    Containers in ``immovable_ids`` cannot be moved. ``reason`` is why schedulers must not rely on
    the node; ``measured`` are enforced capacity factors, 1 for other NUMA nodes; ``devices`` are
    free ones of the kubelet, or why they are unknown; ``pending_pods`` are namespace and name of
    Guaranteed pods without a container. If the ``kubelet`` pins, its policy rejects pods.
    """
    pins = kubelet if kubelet is not None and kubelet.pins_containers else None
    machine, state = desired.machine, desired.state
    topology, settings = machine.topology, machine.settings
    defaults = settings.defaults
    counted_names = {
        (a.pod_uid, a.container)
        for a in state.allocations.values()
        if _is_counted_for_schedulers(a)
    }
    pods = dict.fromkeys(pending_pods, QoSClass.GUARANTEED.value)
    pods |= {(a.namespace, a.pod): a.qos.value for a in state.allocations.values()}
    empty = desired.with_state(NodeState())
    cpu_left, memory_left = desired.free_cpu_milli, desired.free_memory
    free_cpus, totals = max_exclusive_by_node(desired), max_exclusive_by_node(empty)
    movable = movable_exclusive_by_node(desired, immovable_ids)
    limit = total_free_exclusive(desired)
    sizes = sorted({size for node in topology.numa_nodes.values() for size in node.hugepages})
    capacity = {size: machine.hugepages_capacity(size) for size in sizes}
    free_hugepages = {size: desired.free_hugepages(size) for size in sizes}
    devices_of = _devices_by_numa_node(devices)
    return shown.Zones(
        serial=state.serial,
        ready=not reason,
        reason=reason,
        policy=pins.topology_policy if pins else defaults.get("policy", Policy.NONE.value),
        scope=pins.topology_scope if pins else defaults.get("scope", Scope.CONTAINER.value),
        cpu_manager_policy=pins.cpu_policy if pins else None,
        memory_manager_policy=pins.memory_policy if pins else None,
        defaults_to_shared=defaults.get("cpus") == CPUMode.SHARED.value,
        threads_per_core=topology.threads_per_core,
        free_exclusive_cpus=limit,
        zones=tuple(
            shown.Zone(
                id=i,
                socket=_socket_of_node(machine, i),
                distances=tuple(
                    shown.Distance(id=other_node, value=topology.distance(i, other_node))
                    for other_node in topology.numa_ids
                ),
                cpus=len(node.cpus),
                cpu_allocatable_milli=machine.cpu_capacity_milli.get(i, 0),
                cpu_available_milli=cpu_left.get(i, 0),
                exclusive_cpus=totals.get(i, 0),
                free_exclusive_cpus=free_cpus.get(i, 0),
                exclusive_cpus_after_moves=(
                    min(free_cpus[i] + movable[i], totals[i], limit) if movable.get(i) else None
                ),
                shared_cpus=len(node.cpus & desired.pool),
                memory_bytes=node.memory_bytes,
                memory_allocatable_bytes=machine.memory_capacity[i],
                memory_available_bytes=memory_left[i],
                huge_pages=tuple(
                    shown.ZoneHugePages(
                        size_bytes=size,
                        capacity_bytes=node.hugepages.get(size, 0),
                        allocatable_bytes=capacity[size][i],
                        available_bytes=free_hugepages[size][i],
                    )
                    for size in sizes
                ),
                capacity_factor=settings.capacity_factor.get(i, 1.0),
                measured_capacity_factor=(measured or {}).get(i, 1.0),
                devices=devices_of.get(i, ()),
                core_kind=_core_kind(machine, i),
                pcie_roots=roots_of_pcie.get(i, ()),
            )
            for i, node in sorted(topology.numa_nodes.items())
        ),
        devices_problem=devices if devices is None or isinstance(devices, str) else "",
        pods=tuple(
            shown.NodePod(namespace=namespace, name=name, qos=qos)
            for (namespace, name), qos in sorted(pods.items())
        ),
        counted_containers=tuple(
            shown.CountedContainer(pod_uid=uid, name=name) for uid, name in sorted(counted_names)
        ),
    )


def _is_counted_for_schedulers(allocation: Allocation) -> bool:
    """True if a container is named as counted: one with a charge or with options.

    A scheduler waits until the node counts it, so one that needs nothing, or started unpinned, is
    named, too. Ordinary containers are not: nobody needs their names.
    """
    if allocation.charges:
        return True
    unpinned = allocation.kind is ContainerKind.UNPINNED and allocation.policy is Policy.NONE
    return not (unpinned and allocation.aligned) and not allocation.is_undecided


def _devices_by_numa_node(
    counts: CountsOrReason | None,
) -> dict[int, tuple[shown.ZoneDevices, ...]]:
    """Return devices by NUMA node, in the order of their resources; none if unknown."""
    devices_by_node: dict[int, tuple[shown.ZoneDevices, ...]] = {}
    for count in () if counts is None or isinstance(counts, str) else counts:
        devices = convert(count, shown.ZoneDevices, from_attributes=True)
        devices_by_node[count.numa_node] = (*devices_by_node.get(count.numa_node, ()), devices)
    return devices_by_node


def _socket_of_node(machine: NodeModel, numa_node: int) -> int | None:
    sockets = [s.id for s in machine.topology.sockets.values() if numa_node in s.numa_nodes]
    return sockets[0] if len(sockets) == 1 else None


def _core_kind(machine: NodeModel, numa_node: int) -> str:
    """Return the kind of a NUMA node's cores on a hybrid machine; empty on others."""
    cores = machine.topology.cores.values()
    core_kinds = {core.kind for core in cores if core.numa_node == numa_node}
    if not core_kinds or CoreKind.STANDARD in core_kinds:
        return ""
    return MIXED_CORE_KIND if len(core_kinds) > 1 else core_kinds.pop().value


# --- The kubelet ---


def kubelet_document(agent: Agent, kubelet: KubeletSync) -> shown.KubeletDocument:
    """Return the kubelet's grants, and conflicts with it.

    Any thread may call this, since all inputs are replaced as a whole.
    """
    grants, configuration = agent.current.state.kubelet, kubelet.configuration
    adopted = configuration.adopted
    return shown.KubeletDocument(
        cpu_policy=grants.cpu_policy,
        memory_policy=grants.memory_policy,
        override=agent.current.machine.settings.kubelet_override.value,
        shared_cpus=str(grants.shared[0]) if grants.shared else "",
        granted_cpus=str(grants.granted_cpus),
        grants=tuple(_list_kubelet_grants(agent)),
        conflicts=tuple(conflict for _, conflict in sorted(kubelet.conflicts.items())),
        problems=(*kubelet.files.problems, *configuration.discovered.problems),
        configuration=configuration.discovered.path,
        inherited=adopted.adopted,
        differences=adopted.differences,
    )


def _list_kubelet_grants(agent: Agent) -> list[shown.KubeletGrant]:
    """List grants of containers, then of whole pods, each by UID and name."""
    state, grants = agent.current.state, agent.current.state.kubelet
    # Keys: pod UID and name of a container, or its id alone; UID alone of a pod.
    cpus = {**grants.cpus, **{(uid, ""): grant for uid, grant in grants.pods.items()}}
    mems = {**grants.mems, **{(uid, ""): grant for uid, grant in grants.pod_mems.items()}}
    allocation_by_holder = {
        holder: a
        for a in state.allocations.values()
        for holder in ((a.pod_uid, a.container), ("", a.container_id), (a.pod_uid, ""))
    }
    kubelet_grants: list[shown.KubeletGrant] = []
    for holder in sorted(cpus.keys() | mems.keys(), key=lambda one: (not one[1], one)):
        a, (uid, name) = allocation_by_holder.get(holder), holder
        kubelet_grants.append(
            shown.KubeletGrant(
                pod_uid=a.pod_uid if a else uid,
                container=a.container if a and name else name,
                namespace=a.namespace if a else "",
                pod=a.pod if a else "",
                cpus=str(cpus.get(holder, "")),
                mems=str(mems.get(holder, "")),
                overridden=a is not None
                and name != ""
                and holder in cpus
                and shown_kind(state, a) != KUBELET_KIND,
            )
        )
    return kubelet_grants
