"""Changes of a live container's resources: in-place resize, or another program's cpuset.

A resize never moves a container. A changed ``cpuset.mems`` makes the kernel copy the pages of a
running process (cgroup v2) or leave them behind (v1), and a pod's resize requests neither. So a
container keeps its memory nodes and, up to its new size, its exclusive CPUs, and additional CPUs
come from its NUMA nodes. If it cannot grow there, ``on-failure`` decides; its default for strict
policies rejects the resize. Reasons: docs/adr/0027-a-resize-stays-in-place.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    check_exclusive_limits,
    count_free_exclusive_by_node,
    cpus_above_floors,
    exclusive_candidate_cpus,
    split_cpu_milli,
    take_avoiding_contended,
)
from nri_numa.engine.admit import new_allocation
from nri_numa.engine.align.policies import byte_shortage_clause, shortage_clause
from nri_numa.engine.captions import SHORTFALL_TEXT, with_outcome
from nri_numa.engine.cpus.allocator import ChosenCPUs, NotEnoughCPUs, SMTMisaligned, TakeRequest
from nri_numa.engine.decision import DecisionTrace, Placement, PlacementRequest, Rejected, Resized
from nri_numa.engine.desired import NodeSnapshot, answer_to_update, updates_between
from nri_numa.engine.foreign_pins import (
    exclusive_holders_text,
    parse_foreign_cpuset,
    reclassify_cpuset,
    to_kubelet_allocation,
)
from nri_numa.engine.kubelet_grants import OverrideGrant, keep_or_override_grant
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.place.distribution import device_distribution, parts_for_devices
from nri_numa.engine.place.listed_cpus import (
    exclusive_list_sharers,
    is_yielding_list,
    may_be_exclusive,
    unpaid_cpus_rejection,
)
from nri_numa.engine.place.memory import (
    cpu_and_memory_charges,
    interleaved_charges,
)
from nri_numa.engine.place.needs import (
    cpu_shortage_text,
    exclusive_cpu_count_text,
    isolated_mode_text,
    lowered_capacity_factor_text,
    smt_misaligned_text,
)
from nri_numa.engine.pod_reservation import (
    by_core,
    find_pod_share,
    pod_pool_cpus,
    resize_pod_pool,
    sum_told_by,
    with_pod_pool,
    with_sum_told,
)
from nri_numa.engine.request.demand import (
    SLOTS_KEY,
    Demand,
    PodShare,
    compute_demand,
    cpu_size_milli,
    own_request_milli,
    unpinned_memory_request,
    with_slots,
)
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import Allocation, ContainerKind, NodeState
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, human_milli, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import (
    NO_CHANGED_IDS,
    ChangedStateIds,
    Container,
    ContainerUpdate,
    OnFailure,
    PodSandbox,
    Resources,
    container_subject,
)
from nri_numa.text import hugepages_resource_name

RESIZE_RULE_TEXT = "a resize stays in place"


def resize_in_place(
    case: PlacementRequest, allocation: Allocation, offered: CPUSet
) -> Placement | Rejection:
    """Place a running container with its new size on its current NUMA nodes.

    Its current charges count as free. If it cannot grow there, ``on-failure`` decides: ``reject``
    rejects the resize; ``best-effort`` adds exclusive CPUs of other NUMA nodes. Otherwise, and for
    memory and shared CPUs, it keeps its resources and the new size is charged there. CPUs that the
    pod pool ``offered`` are taken first.
    """
    node = case.node
    if node.reading is not None:
        node = replace(node, reading=node.reading.with_own_charges_added(allocation))
    change = _Resize(replace(case, node=node), allocation, offered)
    if allocation.kind in (ContainerKind.LISTED, ContainerKind.UNPINNED):
        return change.resize_listed()
    shortage = change.check_pod_sum()
    if shortage is not None:
        return shortage
    if case.demand.exclusive_cpus:
        return change.resize_exclusive()
    return change.resize_shared()


def shared_again_text(prior: Allocation, milli: int) -> str:
    """Clause about exclusive CPUs lost by a size that is no whole number; empty for none."""
    if prior.kind is not ContainerKind.EXCLUSIVE or not milli % 1000:
        return ""
    text = exclusive_cpu_count_text(len(prior.cpus))
    return f"no longer has its {text}, because {human_milli(milli)} is not a whole number"


class _Resize:
    """State of one resize that is being decided."""

    def __init__(self, case: PlacementRequest, allocation: Allocation, offered: CPUSet) -> None:
        self.case, self.prior, self.offered = case, allocation, offered
        self.steps: list[str] = []
        self.has_shortfall = False
        self.had_shortfall = allocation.has_shortfall
        self.is_misaligned = not allocation.aligned and (
            not self.had_shortfall or allocation.is_misaligned
        )
        # It may grow on its own NUMA nodes, and on those of its pod's affinity.
        record, self.home = case.pod_record, allocation.numa_nodes
        if record is not None and record.affinity is not None:
            self.home |= record.affinity
        self.smt = allocation.smt if allocation.exclusive else case.effective_smt
        self.distribution = device_distribution(case, self.home)

    def check_pod_sum(self) -> Rejection | None:
        """Reject a size beyond its part of the pod's sum, unless it may run with less."""
        case, share = self.case, self.case.pod_share
        milli = own_request_milli(case.pod.qos, case.container.resources)
        limit, change = share.limit_milli(milli), case.demand.own_cpu_milli - self.prior.cpu_milli
        is_due = change > 0 or (self.had_shortfall and not change)
        if share.uses_pod_resources or not is_due or limit >= milli:
            return None
        text = shortage_clause(
            "cpu",
            human_milli(milli),
            f"{human_milli(limit)} free in its pod, which has "
            f"{human_milli(share.total_milli(milli))}",
        )
        shortage = _shortage_rejection(RejectionReason.NOT_ENOUGH_CPUS, text)
        return None if self._accepts_shortage(shortage) else shortage

    def resize_listed(self) -> Placement | Rejection:
        """Keep the list of CPUs and change only the charges."""
        case, prior = self.case, self.prior
        if prior.exclusive:
            # The runtime may report the pod's sum of its creation instead of the current one.
            requested_milli = case.demand.cpu_requested_milli
            requested_milli += sum(a.cpu_milli for a in exclusive_list_sharers(case, prior.cpus))
            if case.demand.pod_requested_milli is not None:
                requested_milli = min(requested_milli, case.demand.pod_requested_milli)
            case = replace(case, demand=replace(case.demand, pod_requested_milli=requested_milli))
            if not may_be_exclusive(case.requested, prior.cpus, case.demand):
                return unpaid_cpus_rejection(case, prior.cpus)
            _, milli = self._exclusive_by_node(prior.cpus)
        else:
            counts = case.node.machine.topology.cpu_count_by_node(prior.cpus) or dict.fromkeys(
                prior.numa_nodes, 1
            )
            allocated_milli, count = self._milli_to_allocate(), sum(counts.values())
            milli = {i: allocated_milli * n // count for i, n in counts.items()}
        return self._build_placement(prior.kind, prior.reason, prior.numa_nodes, milli, prior.cpus)

    def resize_shared(self) -> Placement | Rejection:
        """Charge shared CPUs on its current NUMA nodes."""
        case, numa_nodes = self.case, self.prior.numa_nodes
        nodes_text, free_by_node = numa_text(numa_nodes), case.node.free_shared_milli
        self.steps.append(f"stays on {nodes_text}")
        if text := shared_again_text(self.prior, case.demand.cpu_milli):
            self.steps.append(text)
        wanted_milli, prior_milli = case.demand.cpu_milli, self.prior.cpu_milli
        free_milli = sum(free_by_node.get(i, 0) for i in numa_nodes)
        if self._has_shortage(wanted_milli, prior_milli, free_milli):
            free_text = f"{human_milli(free_milli)} free on {nodes_text}"
            free_text += lowered_capacity_factor_text(case.node.machine, numa_nodes)
            text = shortage_clause("cpu", human_milli(wanted_milli), free_text)
            text += exclusive_holders_text(case.node.state, numa_nodes, requests=True)
            shortage = _shortage_rejection(RejectionReason.NOT_ENOUGH_CPUS, text)
            if not self._accepts_shortage(shortage, grows=wanted_milli > prior_milli):
                return shortage
        milli = split_cpu_milli(self._milli_to_allocate(), numa_nodes, free_by_node)
        caption = f"shared CPUs on {nodes_text}"
        return self._build_placement(ContainerKind.SHARED, caption, numa_nodes, milli)

    def resize_exclusive(self) -> Placement | Rejection:
        """Resize exclusive CPUs: keep, shrink or extend the current set."""
        choice = self._resize_cpus()
        if isinstance(choice, Rejection):
            if not (self._may_keep_cpus() and self._accepts_shortage(choice)):
                return choice
            # Memory is still charged at the new size, which the container may use.
            self.steps.append(f"it keeps what it has, {SHORTFALL_TEXT}")
            if self.prior.kind is not ContainerKind.EXCLUSIVE:
                return self.resize_shared()
            choice = ChosenCPUs(cpus=self.prior.cpus, idle=self.prior.idle_siblings)
        numa_nodes, milli = self._exclusive_by_node(choice.cpus)
        self.steps += choice.notes
        distribution, topology = self.distribution, self.case.node.machine.topology
        if distribution is not None:
            self.steps += distribution.proportion_sentences(topology, choice.cpus)
            if distribution.cpu_shortfalls(topology, choice.cpus):
                self.is_misaligned = True
        if not numa_nodes <= self.home:
            self.is_misaligned = True
        elif numa_nodes < self.prior.numa_nodes and len(numa_nodes | self.prior.mems) == 1:
            self.is_misaligned = False  # no longer
        caption = f"{exclusive_cpu_count_text(len(choice.cpus))} on {numa_text(numa_nodes)}"
        return self._build_placement(
            ContainerKind.EXCLUSIVE, caption, numa_nodes, milli, choice.cpus, choice.idle
        )

    def _exclusive_by_node(self, cpus: CPUSet) -> tuple[NUMASet, Mapping[int, int]]:
        """Return NUMA nodes of exclusive CPUs and milli there; unchanged if one is offline."""
        topology, prior = self.case.node.machine.topology, self.prior
        if not cpus <= topology.online:
            return prior.numa_nodes, {i: charge.cpu_milli for i, charge in prior.charges.items()}
        counts = topology.cpu_count_by_node(cpus)
        return NUMASet(counts), {i: 1000 * count for i, count in counts.items()}

    def _has_shortage(self, amount: int, prior_amount: int, free_amount: int) -> bool:
        """True if it grows beyond the free amount, or still has an earlier shortfall."""
        is_due = amount > prior_amount or (self.had_shortfall and amount == prior_amount)
        return is_due and free_amount < amount

    def _accepts_shortage(self, shortage: Rejection, note: str = "", *, grows: bool = True) -> bool:
        """Record a shortfall, unless the container grows and ``on-failure`` rejects that."""
        if grows and self.case.on_failure is OnFailure.REJECT:
            return False
        self.steps.append(f"{self.case.message_subject}: {shortage.detail}{note}")
        self.has_shortfall = True
        return True

    def _may_keep_cpus(self) -> bool:
        """True if it may keep its CPUs if the new number does not fit: it requests them."""
        case, prior = self.case, self.prior
        if prior.kind is not ContainerKind.EXCLUSIVE or case.requested.unrequested_cpus:
            return True
        return 1000 * len(prior.cpus) <= case.demand.cpu_requested_milli

    def _resize_cpus(self) -> ChosenCPUs | Rejection:
        case, cpus = self.case, self.prior.cpus
        count = case.demand.exclusive_cpus
        if count == len(cpus):
            # Offline CPUs remain exclusive until they are online again.
            return ChosenCPUs(cpus=cpus, idle=self.prior.idle_siblings)
        if count < len(cpus):
            choice = self._take_cpus(NO_CPUS, {}, strict=True)
            return choice if isinstance(choice, ChosenCPUs) else self._smt_rejection(choice)
        return self._grow_cpus(count, cpus)

    def _grow_cpus(self, count: int, own_cpus: CPUSet) -> ChosenCPUs | Rejection:
        """Extend the current CPUs within pool floors and quotas."""
        case, node = self.case, self.case.node
        free_cpus = exclusive_candidate_cpus(node, count)
        avoided = own_cpus & node.machine.avoided_isolated_cpus(count)
        free_cpus = cpus_above_floors(node, free_cpus, own_cpus)
        if not avoided and len(self.offered) >= count - len(own_cpus):
            pool_choice = self._grow_from_pod_pool()
            if isinstance(pool_choice, ChosenCPUs):
                return pool_choice
        home, smt = self.home, self.smt
        limits = count_free_exclusive_by_node(node, free_cpus | own_cpus, smt, node.free_cpu_milli)
        room = sum(limits.get(i, 0) for i in home)
        choice: ChosenCPUs | NotEnoughCPUs | SMTMisaligned | None = None
        if room >= count and not avoided:
            choice = self._take_cpus(free_cpus, limits, strict=True)
            if isinstance(choice, SMTMisaligned):
                return self._smt_rejection(choice)
        # CPUs on other NUMA nodes would move a shared container.
        may_widen = case.on_failure is OnFailure.BEST_EFFORT and own_cpus and not avoided
        if not isinstance(choice, ChosenCPUs) and may_widen:
            choice = self._take_cpus(free_cpus, limits, strict=False)
        need = exclusive_cpu_count_text(count)
        if not isinstance(choice, ChosenCPUs):
            nodes_text = f"{numa_text(home)}{lowered_capacity_factor_text(node.machine, home)}"
            text = shortage_clause(
                "cpu", need, f"{room} free for exclusive use on {nodes_text} for it"
            )
            text += f" (smt: {smt.value})" + isolated_mode_text(case)
            if avoided:
                text += f"; {cpus_text(avoided, 'is', 'are')} isolated"
            text += exclusive_holders_text(node.state, home, requests=True)
            return _shortage_rejection(RejectionReason.NOT_ENOUGH_CPUS, text)
        return check_exclusive_limits(case, f"cpu: {need}", choice.cpus, choice.idle) or choice

    def _grow_from_pod_pool(self) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
        node, cpus = self.case.node, self.offered | self.prior.cpus
        limits = count_free_exclusive_by_node(node, cpus, self.smt, node.free_cpu_milli)
        return self._take_cpus(self.offered, limits, strict=True)

    def _milli_to_allocate(self) -> int:
        """Thousandths of a CPU to charge for shared CPUs: at most the request."""
        return min(self.case.demand.cpu_milli, self.case.demand.cpu_requested_milli)

    def _take_cpus(
        self, available: CPUSet, limits: Mapping[int, int], *, strict: bool
    ) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
        case, cpus = self.case, available | self.prior.cpus
        return take_avoiding_contended(
            case,
            TakeRequest(
                count=case.demand.exclusive_cpus,
                free_cpus=available,
                current_cpus=self.prior.cpus,
                affinity=self.home,
                parts=parts_for_devices(case, self.distribution, self.home, cpus, limits),
                strict=strict,
                smt=self.smt,
                load=case.requested.load if self.prior.load is None else self.prior.load,
                # The rest of its sockets are not the NUMA nodes it is on.
                settings=case.node.machine.settings.without_socket_alignment,
            ),
            limits,
        )

    def _smt_rejection(self, shortage: NotEnoughCPUs | SMTMisaligned) -> Rejection:
        text = (
            smt_misaligned_text(self.case, shortage, self.smt)
            if isinstance(shortage, SMTMisaligned)
            else cpu_shortage_text(self.case.node.machine, shortage, None)
        )
        return Rejection(
            reason=RejectionReason.SMT_ALIGNMENT,
            detail=text,
            rule="smt: full-core gives whole cores only",
        )

    def _build_placement(
        self,
        kind: ContainerKind,
        caption: str,
        numa_nodes: NUMASet,
        milli: Mapping[int, int],
        cpus: CPUSet = NO_CPUS,
        idle_siblings: CPUSet = NO_CPUS,
    ) -> Placement | Rejection:
        """Charge the new size on its memory nodes, and check that growth fits there."""
        case, prior = self.case, self.prior
        pages_left = case.free_hugepages() if prior.mems else {}
        shortage = self._check_memory(pages_left)
        if shortage is not None:
            return shortage
        is_listed = kind in (ContainerKind.LISTED, ContainerKind.UNPINNED)
        is_exclusive = kind is ContainerKind.EXCLUSIVE or (kind is prior.kind and prior.exclusive)
        is_misaligned = self.is_misaligned and not is_listed
        distribution = self.distribution if kind is ContainerKind.EXCLUSIVE else None
        charges = cpu_and_memory_charges(
            numa_nodes, milli, prior.mems,
            case.demand.memory_requested, case.node.free_memory, case.demand.hugepages, pages_left,
            kubelet_memory=case.node.machine.settings.kubelet.memory,
            weights=distribution.device_counts if distribution is not None else None,
        )  # fmt: skip
        return replace(
            case.initial_placement,
            kind=kind,
            cpus=cpus,
            idle_siblings=idle_siblings,
            exclusive=is_exclusive,
            yields_to_exclusive=kind is ContainerKind.LISTED
            and not is_exclusive
            and self._list_yields(cpus),
            numa_nodes=numa_nodes,
            mems=prior.mems,
            charges=interleaved_charges(case, prior.mempolicy, prior.mems, charges),
            policy=prior.policy,
            aligned=not (self.is_misaligned or self.has_shortfall),
            reason=with_outcome(
                caption, is_misaligned=is_misaligned, has_shortfall=self.has_shortfall
            ),
            has_shortfall=self.has_shortfall,
            is_misaligned=is_misaligned,
            decision_steps=tuple(self.steps),
        )

    def _check_memory(self, pages_left: Mapping[int, Mapping[int, int]]) -> Rejection | None:
        """Reject memory and huge pages that do not fit on its memory nodes, unless allowed."""
        case, prior, demand, mems = self.case, self.prior, self.case.demand, self.prior.mems
        if not mems:
            return None
        amounts = [("memory", demand.memory_bytes, prior.memory_bytes, case.node.free_memory)]
        for size, amount in sorted(demand.hugepages.items()):  # by page size
            name = hugepages_resource_name(size)
            amounts.append((name, amount, prior.hugepages.get(size, 0), dict(pages_left[size])))
        for name, amount_wanted, prior_amount, free_by_node in amounts:
            free_amount = sum(free_by_node.get(i, 0) for i in mems)
            if self._has_shortage(amount_wanted, prior_amount, free_amount):
                text = byte_shortage_clause(
                    name, amount_wanted, free_amount, f" on {numa_text(mems)}"
                )
                shortage = _shortage_rejection(RejectionReason.NOT_ENOUGH_MEMORY, text)
                note = "; memory nodes of a running container do not change"
                if not self._accepts_shortage(shortage, note, grows=amount_wanted > prior_amount):
                    return shortage
        return None

    def _list_yields(self, cpus: CPUSet) -> bool:
        """True if a shared list yields: not requested, or it has yielded CPUs already."""
        case = self.case
        return is_yielding_list(case.requested, cpus, case.demand) or (
            self.prior.yields_to_exclusive and bool(cpus & case.node.state.unavailable_cpus)
        )


def _shortage_rejection(reason: RejectionReason, text: str) -> Rejection:
    return Rejection(reason=reason, detail=text, rule=RESIZE_RULE_TEXT)


def resize_container(
    node: NodeSnapshot, pod: PodSandbox, container: Container, update: Resources
) -> Resized | Rejected:
    """Decide about an UpdateContainer request; None or empty fields are not part of it."""
    state = node.state
    allocation = state.allocations.get(container.id)
    trace = DecisionTrace(pod=pod, container=container)
    if allocation is None:
        return Resized(state=state, container_update=None, trace=trace)
    if update.cpus:
        reclassified = _reclassify_other_cpuset(node, pod, container, update)
        if reclassified is not None:
            return _reclassified_outcome(node, trace, *reclassified)
    new_state, change = state, NO_CHANGED_IDS
    sharers: tuple[str, ...] = ()
    has_amounts = update.cpu_quota or update.cpu_shares or update.memory_limit or update.hugepages
    if allocation.is_pinned and has_amounts:
        merged = _apply_update(container, allocation, update)
        resized = resize_to_current_resources(node, pod, merged)
        if isinstance(resized, Rejected):
            return resized
        allocation, trace = resized
        new_state, sharers = state_with_resized_container(node, pod, allocation)
        change = ChangedStateIds((container.id, *sharers), (pod.uid,))
    elif not allocation.is_pinned:
        new_state, change = _with_unpinned_memory(node, pod, container, update)
    node_after = node.with_state(new_state)
    if new_state is not state:
        trace = replace(trace, pool_before=node.pool, pool_after=node_after.pool)
    own_update = answer_to_update(node, node_after, container, update)
    updates = updates_between(node, node_after, skip=container.id, resized=sharers)
    return Resized(
        state=new_state, change=change, container_update=own_update, updates=updates, trace=trace
    )


def _with_unpinned_memory(
    node: NodeSnapshot, pod: PodSandbox, container: Container, update: Resources
) -> tuple[NodeState, ChangedStateIds]:
    """Return the state with the new memory request of an unpinned container."""
    state, prior = node.state, node.state.allocations[container.id]
    other_charge = state.requested_memory_of_pod(pod.uid, container.id)
    merged = _apply_update(container, prior, update)
    amount = unpinned_memory_request(pod, merged, node.machine.total_memory_bytes, other_charge)
    if not prior.unpinned_memory or amount == prior.unpinned_memory:
        return state, NO_CHANGED_IDS
    new_state = state.without_allocation(container.id)
    new_state = new_state.with_allocation(replace(prior, unpinned_memory=amount))
    return new_state, ChangedStateIds((container.id,), (pod.uid,))


def state_with_resized_container(
    node: NodeSnapshot, pod: PodSandbox, allocation: Allocation
) -> tuple[NodeState, tuple[str, ...]]:
    """Return the state with a resized container, and ids of pod pool members whose CPUs changed."""
    state, prior = node.state, node.state.allocations[allocation.container_id]
    total = sum_told_by(state, pod, prior, allocation.cpu_milli, allocation.memory_bytes)
    pool = tuple(a for a in state.pod_pool(pod.uid) if a is not prior)
    ids = tuple(a.container_id for a in pool)
    is_member = allocation.is_in_pod_pool and allocation.kind is ContainerKind.EXCLUSIVE
    result = state.without_allocation(prior.container_id, *ids).with_allocation(allocation)
    if pool and is_member:
        result = with_pod_pool(result, pool, allocation, node.machine.topology)
    elif pool and not allocation.uses_pod_resources:
        result = resize_pod_pool(node.with_state(result), pool, total, prior)
    else:
        result = result.with_allocation(*pool)
    prior_by_id, by_id = state.allocations, result.allocations
    changed = tuple(i for i in ids if by_id[i] != prior_by_id[i])
    return with_sum_told(result, pod, allocation, total), changed


def resources_if_resized(allocation: Allocation, resources: Resources) -> Resources | None:
    """Read a container's new size from the runtime's resources; None if it has not changed."""
    if not allocation.is_pinned:
        return None
    if (resources.cpu_quota or 0) <= 0 and allocation.lifted_quota:
        # The quota was lifted, so the original one still counts.
        resources = replace(resources, cpu_quota=allocation.lifted_quota)
    milli = cpu_size_milli(resources)
    if (resources.cpu_quota or 0) <= 0 and allocation.lifted_quota == 0:
        # Lifted before the checkpoint was lost: its size is known only from its CPUs.
        milli = allocation.cpu_milli
    memory = resources.memory_limit or 0
    if milli == allocation.cpu_milli and (
        memory <= 0 or not allocation.mems or memory == allocation.memory_bytes
    ):
        return None
    return resources


def _apply_update(container: Container, allocation: Allocation, update: Resources) -> Container:
    """Apply an update to the container's resources; a lifted quota counts as its original value."""
    current = container.resources
    merged = replace(
        current,
        cpu_shares=update.cpu_shares or current.cpu_shares,
        cpu_quota=update.cpu_quota or allocation.lifted_quota or current.cpu_quota,
        cpu_period=update.cpu_period or current.cpu_period,
        memory_limit=update.memory_limit or current.memory_limit,
        hugepages={**current.hugepages, **update.hugepages},
    )
    return replace(container, resources=merged)


_Reclassified = tuple[Allocation, ContainerUpdate | None, tuple[str, ...]]
"""Allocation after another program's cpuset, update of the container, and decision steps."""


def _reclassify_other_cpuset(
    node: NodeSnapshot, pod: PodSandbox, container: Container, update: Resources
) -> _Reclassified | None:
    """Accept another program's cpuset; None if the container's allocation takes precedence.

    The kubelet may grant CPUs to a container of the agent if its policy became static later. Both
    would overwrite each other repeatedly, so the configuration decides.
    """
    allocation, cpus = node.state.allocations[container.id], parse_foreign_cpuset(update.cpus)
    is_foreign = allocation.kind is ContainerKind.FOREIGN
    grant = node.state.kubelet.cpus_of(pod.uid, container.name, container.id)
    is_granted = grant and cpus and (cpus <= grant or is_foreign)
    if is_granted and not _overrides_grant(node, pod, container):
        if is_foreign and allocation.foreign_cpus == cpus:
            return allocation, None, ()
        result, own_update = to_kubelet_allocation(allocation, cpus), None
        if allocation.mems and not update.mems:  # no other program removes the agent's pin
            own_update = ContainerUpdate(container.id, mems=str(node.machine.topology.memory_nodes))
        return result, own_update, (result.reason,)
    if allocation.is_pinned:
        return None
    if not cpus:  # the runtime refuses an invalid list
        return allocation, None, ()
    return _reclassify_unpinned(node, allocation, cpus, update)


def _overrides_grant(node: NodeSnapshot, pod: PodSandbox, container: Container) -> bool:
    machine, allocation = node.machine, node.state.allocations[container.id]
    requested = _options_with_held_slots(
        machine, pod, container, allocation, machine.options_resolver(pod, container)
    )
    if isinstance(requested, Rejection):
        return False
    case = PlacementRequest(node, pod, container, requested)
    return isinstance(keep_or_override_grant(case), OverrideGrant)


def _options_with_held_slots(
    machine: NodeModel,
    pod: PodSandbox,
    container: Container,
    allocation: Allocation,
    requested: PlacementOptions | Rejection,
) -> PlacementOptions | Rejection:
    """Apply the slots of its creation: extended resources and claims are not resized."""
    if not allocation.slots:
        return requested
    key = f"{machine.settings.prefix}/{SLOTS_KEY}"
    holding = replace(container, annotations={key: allocation.slots})
    return with_slots(machine.settings, pod, holding, requested)


def _reclassify_unpinned(
    node: NodeSnapshot, allocation: Allocation, cpus: CPUSet, update: Resources
) -> _Reclassified:
    """Apply another program's cpuset to a container without a pin of the agent.

    The container becomes foreign, or unpinned again if the cpuset holds the whole shared pool. An
    unpinned container never gets onto exclusive CPUs of others.
    """
    pool, blocked_cpus = node.pool, cpus & node.state.unavailable_cpus
    result = allocation
    if allocation.kind is ContainerKind.FOREIGN or not blocked_cpus:
        result = reclassify_cpuset(allocation, update.cpus, pool, node.state.kubelet.shared)
    own_update, step_text = None, result.reason
    if result.kind is ContainerKind.UNPINNED and cpus != pool:
        own_update = ContainerUpdate(allocation.container_id, cpus=str(pool))
        step_text = f"the shared pool, {cpus_text(pool)}, instead of {update.cpus}"
        if blocked_cpus:
            step_text += f": {cpus_text(blocked_cpus, 'is', 'are')} exclusive to others"
    return result, own_update, (step_text,)


def _reclassified_outcome(
    node: NodeSnapshot,
    trace: DecisionTrace,
    allocation: Allocation,
    own_update: ContainerUpdate | None,
    decision_steps: tuple[str, ...],
) -> Resized:
    container_id, state, change = allocation.container_id, node.state, NO_CHANGED_IDS
    if allocation is not state.allocations[container_id]:
        state = state.without_allocation(container_id).with_allocation(allocation)
        change = ChangedStateIds((container_id,), (allocation.pod_uid,))
    return Resized(
        state=state,
        change=change,
        container_update=own_update,
        updates=updates_between(node, node.with_state(state), skip=container_id),
        trace=replace(trace, decision_steps=decision_steps),
    )


def resize_to_current_resources(
    node: NodeSnapshot, pod: PodSandbox, container: Container
) -> tuple[Allocation, DecisionTrace] | Rejected:
    """Decide about the allocation of a container with the size of its resources.

    Only its size counts: a rule that has changed moves no running container.
    """
    machine, prior = node.machine, node.state.allocations[container.id]
    pool = node.state.pod_pool(pod.uid) if prior.is_in_pod_pool else ()
    state = node.state.without_allocation(*{container.id, *(a.container_id for a in pool)})
    allocation = prior.with_migration_finished
    base = node.with_state(state)
    trace = DecisionTrace(
        pod=pod,
        container=container,
        free_cpu_milli=base.free_cpu_milli,
        free_memory=base.free_memory,
    )
    requested = machine.options_resolver(pod, container)
    if isinstance(requested, Rejection):
        # Valid at creation, but a rule has changed since. The allocation stays valid.
        text = f"{container_subject(pod, container)}: {requested.detail}"
        return prior, replace(trace, decision_steps=(text,))
    requested = _options_with_held_slots(machine, pod, container, allocation, requested)
    if isinstance(requested, Rejection):
        return _resize_rejection(requested, trace)
    trace = replace(trace, requested=requested)
    case = PlacementRequest(node, pod, container, requested, policy=allocation.policy)
    pod_share = find_pod_share(case, prior)
    demand = compute_demand(
        pod,
        container,
        requested,
        machine.total_memory_bytes,
        pod_share,
        is_exclusive=allocation.exclusive,
    )
    if isinstance(demand, Rejection):
        return Rejected(demand, replace(trace, rule=demand.rule))
    demand = _demand_staying_exclusive(allocation, demand, pod_share)
    trace = replace(trace, demand=demand)
    if pool and demand.exclusive_cpus and not allocation.exclusive:
        allocation = _among_sharers(allocation, pool[0])
    case = replace(case, node=base, demand=demand, pod_share=pod_share)
    opened, offered_cpus = _open_pod_pool(case)
    placed = resize_in_place(opened, allocation, offered_cpus)
    if isinstance(placed, Rejection):
        return _resize_rejection(placed, trace)
    result = _resized_allocation(case, allocation, placed).with_migration_started(prior)
    return result, replace(trace, decision_steps=placed.decision_steps)


def _among_sharers(allocation: Allocation, sharer: Allocation) -> Allocation:
    """Join a pod pool: for a shared member whose size is now a whole number of CPUs."""
    return replace(
        allocation, kind=sharer.kind, exclusive=True, cpus=sharer.cpus,
        idle_siblings=sharer.idle_siblings, numa_nodes=sharer.numa_nodes, smt=sharer.smt,
    )  # fmt: skip


def _open_pod_pool(case: PlacementRequest) -> tuple[PlacementRequest, CPUSet]:
    """Shrink the pod pool for an exclusive container; also return the CPUs that it offers."""
    state, pool = case.node.state, case.node.state.pod_pool(case.pod.uid)
    if not pool:
        return case, NO_CPUS
    milli = own_request_milli(case.pod.qos, case.container.resources)
    total_milli = case.pod_share.total_milli(milli) - case.pod_share.limit_milli(milli)
    state = state.without_allocation(*(a.container_id for a in pool))
    cpus, topology = pool[0].cpus, case.node.machine.topology
    count = pod_pool_cpus(state, case.pod.uid, total_milli)
    remaining = CPUSet(by_core(topology, cpus)[:count])
    state = with_pod_pool(state, pool, replace(pool[0], cpus=remaining), topology)
    return replace(case, node=case.node.with_state(state)), cpus - remaining


def _resized_allocation(
    case: PlacementRequest, allocation: Allocation, placed: Placement
) -> Allocation:
    """Build the allocation after a resize; settings of its processes are kept."""
    result = new_allocation(case, placed)
    return replace(
        result,
        assigned_at=allocation.assigned_at,
        mempolicy=allocation.mempolicy,
        smt=allocation.smt if allocation.exclusive and placed.exclusive else result.smt,
        movable=allocation.movable,
    )


def _resize_rejection(rejection: Rejection, trace: DecisionTrace) -> Rejected:
    return Rejected(rejection, replace(trace, rule=rejection.rule), is_resize=True)


def _demand_staying_exclusive(allocation: Allocation, demand: Demand, share: PodShare) -> Demand:
    """Keep whole CPUs exclusive, even if a rule has changed since.

    A pod pool keeps at least one CPU, whatever exclusive containers have.
    """
    if allocation.kind is not ContainerKind.EXCLUSIVE or demand.exclusive_cpus:
        return demand
    count, fraction = divmod(demand.cpu_milli, 1000)
    own_count, own_fraction = divmod(demand.own_cpu_milli, 1000)
    if share.uses_pod_resources and own_count and not own_fraction:
        count, fraction = max(1, count), 0
    elif demand.cpu_milli < demand.own_cpu_milli and not own_fraction:
        count, fraction = min(own_count, len(allocation.cpus)), 0  # it cannot grow in its pod
    if fraction or not count:
        return demand
    return replace(demand, exclusive_cpus=count, cpu_notes=())  # which say that it shares
