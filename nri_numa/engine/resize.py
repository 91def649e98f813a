"""A live container's resources change: in-place resize, or another program's cpuset.

A resize never moves anything. A changed ``cpuset.mems`` makes the kernel copy the pages of a
running process (cgroup v2) or leaves them behind (v1), and a resize of a pod does not ask for
either. So a container keeps its memory nodes for life, CPUs of its own stay its own as long as it
has that many, and what it gets in addition comes from the NUMA nodes it is on. What cannot grow
there is the business of ``on-failure``, whose default for strict policies refuses the resize;
docs/adr/0027-a-resize-stays-in-place.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    check_exclusive_limits,
    count_free_exclusive,
    exclusive_candidate_cpus,
    group_floor_cpus,
    pool_floor_cpus,
    split_cpu_milli,
    take_avoiding_contended,
)
from nri_numa.engine.admit import new_allocation
from nri_numa.engine.align.policies import byte_shortage_clause, shortage_clause
from nri_numa.engine.captions import SHORTFALL_TEXT, with_outcome
from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
)
from nri_numa.engine.decision import (
    DecisionTrace,
    MeasuredFree,
    NodeModel,
    Placement,
    PlacementRequest,
    Rejected,
    Resized,
    UnalignedRejection,
)
from nri_numa.engine.desired import DesiredState, answer_to_update, updates_between
from nri_numa.engine.foreign_pins import (
    exclusive_holders_text,
    parse_foreign_cpuset,
    reclassify_cpuset,
    to_kubelet_allocation,
)
from nri_numa.engine.kubelet_grants import OverrideGrant, keep_or_override_grant
from nri_numa.engine.place.explicit import (
    exclusive_list_sharers,
    is_yielding_list,
    may_be_exclusive,
    unrequested_rejection,
)
from nri_numa.engine.place.memory import charge_nodes, hugepages_resource_name, interleaved_charges
from nri_numa.engine.place.needs import (
    cpu_shortage_text,
    exclusive_cpu_count_text,
    isolated_mode_text,
    lowered_capacity_factor_text,
    smt_misaligned_text,
)
from nri_numa.engine.request.demand import (
    SLOTS_KEY,
    Demand,
    compute_demand,
    cpu_size_milli,
    unpinned_memory_request,
    with_slots,
)
from nri_numa.engine.state import Allocation, ContainerKind, NodeState
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, human_milli, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import (
    NO_CHANGE,
    SMT,
    Container,
    ContainerUpdate,
    OnFailure,
    PlacementOptions,
    PodSandbox,
    Resources,
    StateChange,
    container_subject,
)

RESIZE_RULE_TEXT = "a resize stays in place"


def resize_in_place(case: PlacementRequest, allocation: Allocation) -> Placement | Rejection:
    """Give a running container its new size where it is.

    What it uses is not in the reading. What cannot grow where it is, is the business of its
    ``on-failure``: ``reject`` fails; ``widen`` adds CPUs of other NUMA nodes to those it owns;
    otherwise, and for memory and shared CPUs, it stays with what it has and the new size is
    allocated there.
    """
    reading = None if case.reading is None else case.reading.with_own_charges_added(allocation)
    change = _Resize(replace(case, reading=reading), allocation)
    if allocation.kind in (ContainerKind.LISTED, ContainerKind.UNPINNED):
        return change.resize_listed()
    if case.demand.exclusive_cpus:
        return change.resize_exclusive()
    return change.resize_shared()


class _Resize:
    """One change of size on its way."""

    def __init__(self, case: PlacementRequest, allocation: Allocation) -> None:
        self.case, self.prior = case, allocation
        self.steps: list[str] = []
        self.has_shortfall = False
        self.had_shortfall = allocation.has_shortfall
        self.is_misaligned = not allocation.aligned and (
            not self.had_shortfall or allocation.is_misaligned
        )

    def resize_listed(self) -> Placement | Rejection:
        """CPUs of a list stay that list; only the amounts change."""
        case, had = self.case, self.prior
        if had.exclusive:
            # The runtime may tell the pod's sum of its creation, not that of now.
            paid = case.demand.cpu_requested_milli
            paid += sum(a.cpu_milli for a in exclusive_list_sharers(case, had.cpus))
            if case.demand.pod_requested_milli is not None:
                paid = min(paid, case.demand.pod_requested_milli)
            case = replace(case, demand=replace(case.demand, pod_requested_milli=paid))
            if not may_be_exclusive(case.requested, had.cpus, case.demand):
                return unrequested_rejection(case, had.cpus)
        if had.exclusive:
            _, milli = self._exclusive_by_node(had.cpus)
        else:
            counts = case.machine.topology.cpu_count_by_node(had.cpus) or dict.fromkeys(
                had.numa_nodes, 1
            )
            want, count = self._allocated_milli(), sum(counts.values())
            milli = {i: want * n // count for i, n in counts.items()}
        return self._build_placement(had.kind, had.cpus, NO_CPUS, had.numa_nodes, milli, had.reason)

    def resize_shared(self) -> Placement | Rejection:
        """The shared CPUs of the NUMA nodes it is on."""
        case, had, wanted = self.case, self.prior, self.case.demand
        numa_nodes = had.numa_nodes
        self.steps.append(f"stays on {numa_text(numa_nodes)}")
        left = case.desired.free_shared_milli
        grows = wanted.cpu_milli > had.cpu_milli
        if grows or (self.had_shortfall and wanted.cpu_milli == had.cpu_milli):
            have = sum(left.get(i, 0) for i in numa_nodes)
            if have < wanted.cpu_milli:
                free = f"{human_milli(have)} free on {numa_text(numa_nodes)}"
                free += lowered_capacity_factor_text(case.machine, numa_nodes)
                text = shortage_clause("cpu", human_milli(wanted.cpu_milli), free)
                text += exclusive_holders_text(case.state, numa_nodes, requests=True)
                if grows and case.on_failure is OnFailure.REJECT:
                    return Rejection(
                        reason=RejectionReason.NOT_ENOUGH_CPUS, detail=text, rule=RESIZE_RULE_TEXT
                    )
                self.steps.append(f"{case.message_subject}: {text}")
                self.has_shortfall = True
        milli = split_cpu_milli(self._allocated_milli(), numa_nodes, left)
        return self._build_placement(
            ContainerKind.SHARED,
            NO_CPUS,
            NO_CPUS,
            numa_nodes,
            milli,
            f"shared CPUs on {numa_text(numa_nodes)}",
        )

    def resize_exclusive(self) -> Placement | Rejection:
        """CPUs of its own: those it has, fewer of them, or these and more beside them."""
        taken = self._resize_cpus()
        if isinstance(taken, Rejection):
            if not self._may_keep_cpus(taken):
                return taken
            # Memory is booked at the new size all the same: that is what the container may use.
            self.steps += (
                f"{self.case.message_subject}: {taken.detail}",
                f"it keeps what it has, which is {SHORTFALL_TEXT}",
            )
            self.has_shortfall = True
            if self.prior.kind is not ContainerKind.EXCLUSIVE:
                return self.resize_shared()
            taken = ChosenCPUs(cpus=self.prior.cpus, idle=self.prior.idle_siblings)
        numa_nodes, milli = self._exclusive_by_node(taken.cpus)
        self.steps += taken.notes
        if not numa_nodes <= self._own_nodes():
            self.is_misaligned = True
        elif numa_nodes < self.prior.numa_nodes and len(numa_nodes | self.prior.mems) == 1:
            self.is_misaligned = False  # by now
        reason = f"{exclusive_cpu_count_text(len(taken.cpus))} on {numa_text(numa_nodes)}"
        return self._build_placement(
            ContainerKind.EXCLUSIVE, taken.cpus, taken.idle, numa_nodes, milli, reason
        )

    def _exclusive_by_node(self, cpus: CPUSet) -> tuple[NUMASet, Mapping[int, int]]:
        """Where CPUs of its own are and count; those that are offline come back as they were."""
        topology, had = self.case.machine.topology, self.prior
        if not cpus <= topology.online:
            return had.numa_nodes, {i: charge.cpu_milli for i, charge in had.charges.items()}
        counts = topology.cpu_count_by_node(cpus)
        return NUMASet(counts), {i: 1000 * count for i, count in counts.items()}

    def _may_keep_cpus(self, why: Rejection) -> bool:
        """Whether it keeps its CPUs where it cannot have the new number of them.

        What is not paid for is no matter of room: it is refused, whatever ``on-failure`` says.
        """
        case, had = self.case, self.prior
        if case.on_failure is OnFailure.REJECT or why.reason is RejectionReason.UNPAID_CPUS:
            return False
        paid = 1000 * len(had.cpus) <= case.demand.cpu_requested_milli
        return had.kind is not ContainerKind.EXCLUSIVE or paid or case.requested.unrequested_cpus

    def _own_nodes(self) -> NUMASet:
        """The NUMA nodes that growing may use: its own, and those chosen for its whole pod."""
        record = self.case.state.pods.get(self.prior.pod_uid)
        if record is None or record.affinity is None:
            return self.prior.numa_nodes
        return self.prior.numa_nodes | record.affinity

    def _resize_cpus(self) -> ChosenCPUs | Rejection:
        case, held = self.case, self.prior.cpus
        count = case.demand.exclusive_cpus
        if count == len(held):
            # CPUs of it that are offline come back, and stay its own.
            return ChosenCPUs(cpus=held, idle=self.prior.idle_siblings)
        if count < len(held):
            fewer = self._take_cpus(NO_CPUS, {}, strict=True)
            return fewer if isinstance(fewer, ChosenCPUs) else self._smt_rejection(fewer)
        machine, rest = case.machine, case.state
        pool, free = case.desired.pool, exclusive_candidate_cpus(case.desired, count)
        avoided = held & machine.avoided_isolated_cpus(count)
        free = free - pool_floor_cpus(machine, rest, pool - held, free - held)
        free = free - group_floor_cpus(machine, rest, pool, free, held)
        home = self._own_nodes()
        limits = count_free_exclusive(
            case.desired, free | held, self._effective_smt(), case.desired.free_cpu_milli
        )
        room = sum(limits.get(i, 0) for i in home)
        found: ChosenCPUs | NotEnoughCPUs | SMTMisaligned | None = None
        if room >= count and not avoided:
            found = self._take_cpus(free, limits, strict=True)
            if isinstance(found, SMTMisaligned):
                return self._smt_rejection(found)
        # A container that shares is on its NUMA nodes, and CPUs elsewhere would move it.
        may_widen = case.on_failure is OnFailure.BEST_EFFORT and held and not avoided
        if not isinstance(found, ChosenCPUs) and may_widen:
            found = self._take_cpus(free, limits, strict=False)
        if not isinstance(found, ChosenCPUs):
            where = f"{numa_text(home)}{lowered_capacity_factor_text(machine, home)}"
            return Rejection(
                reason=RejectionReason.NOT_ENOUGH_CPUS,
                detail=shortage_clause(
                    "cpu",
                    exclusive_cpu_count_text(count),
                    f"{room} free for exclusive use on {where} for it",
                )
                + f" (smt: {self._effective_smt().value})"
                + isolated_mode_text(case)
                + (f"; {cpus_text(avoided, 'is', 'are')} isolated" if avoided else "")
                + exclusive_holders_text(rest, home, requests=True),
                rule=RESIZE_RULE_TEXT,
            )
        who = f"cpu: {exclusive_cpu_count_text(count)}"
        refused = check_exclusive_limits(case, who, found.cpus, found.idle)
        return found if refused is None else refused

    def _allocated_milli(self) -> int:
        """Thousandths of a CPU that are allocated for shared CPUs: what its request pays for."""
        return min(self.case.demand.cpu_milli, self.case.demand.cpu_requested_milli)

    def _effective_smt(self) -> SMT:
        return self.prior.smt if self.prior.exclusive else self.case.effective_smt

    def _take_cpus(
        self, available: CPUSet, limits: Mapping[int, int], *, strict: bool
    ) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
        case = self.case
        return take_avoiding_contended(
            case,
            TakeRequest(
                count=case.demand.exclusive_cpus,
                free_cpus=available,
                current_cpus=self.prior.cpus,
                affinity=self._own_nodes(),
                strict=strict,
                smt=self._effective_smt(),
                load=case.requested.load if self.prior.load is None else self.prior.load,
                # The rest of its sockets are not the NUMA nodes it is on.
                settings=replace(case.machine.settings, align_by_socket=False),
            ),
            limits,
        )

    def _smt_rejection(self, refused: NotEnoughCPUs | SMTMisaligned) -> Rejection:
        why = (
            smt_misaligned_text(self.case, refused, self._effective_smt())
            if isinstance(refused, SMTMisaligned)
            else cpu_shortage_text(self.case.machine, refused, None)
        )
        return Rejection(
            reason=RejectionReason.SMT_ALIGNMENT,
            detail=why,
            rule="smt: full-core gives whole cores only",
        )

    def _build_placement(
        self,
        kind: ContainerKind,
        cpus: CPUSet,
        idle: CPUSet,
        numa_nodes: NUMASet,
        milli: Mapping[int, int],
        reason: str,
    ) -> Placement | Rejection:
        """Book the new size on the memory nodes it has; see that growing fits there."""
        case, had, wanted = self.case, self.prior, self.case.demand
        mems = had.mems
        memory = wanted.memory_bytes if mems else 0
        hugepages = wanted.hugepages if mems else {}
        memory_left = case.free_memory
        pages_left = case.free_hugepages() if hugepages else {}
        has = sum(memory_left.get(i, 0) for i in mems)
        needs = [("memory", memory, had.memory_bytes, has)]
        for size, amount in sorted(hugepages.items()):  # by page size
            has = sum(pages_left[size].get(i, 0) for i in mems)
            before = had.hugepages.get(size, 0)
            needs.append((hugepages_resource_name(size), amount, before, has))
        for what, amount, before, have in needs:
            grows = amount > before
            if have >= amount or not (grows or (self.had_shortfall and amount == before)):
                continue
            text = byte_shortage_clause(what, amount, have, f" on {numa_text(mems)}")
            if grows and case.on_failure is OnFailure.REJECT:
                return Rejection(
                    reason=RejectionReason.NOT_ENOUGH_MEMORY, detail=text, rule=RESIZE_RULE_TEXT
                )
            self.steps.append(
                f"{case.message_subject}: {text}; memory nodes of a running container do not change"
            )
            self.has_shortfall = True
        listed = kind in (ContainerKind.LISTED, ContainerKind.UNPINNED)
        owned = kind is ContainerKind.EXCLUSIVE or (kind is had.kind and had.exclusive)
        # A list that is paid for by now keeps its CPUs, unless others own some already.
        soft = (
            kind is ContainerKind.LISTED
            and not owned
            and (
                is_yielding_list(case.requested, cpus, wanted)
                or (had.yields_to_exclusive and bool(cpus & case.state.unavailable_cpus))
            )
        )
        is_misaligned = self.is_misaligned and not listed
        charges = charge_nodes(
            numa_nodes, milli, mems,
            wanted.memory_requested, memory_left, hugepages, pages_left,
            kubelet_memory=case.machine.settings.kubelet_memory,
        )  # fmt: skip
        return replace(
            case.initial_placement,
            kind=kind,
            cpus=cpus,
            idle_siblings=idle,
            exclusive=owned,
            yields_to_exclusive=soft,
            numa_nodes=numa_nodes,
            mems=mems,
            charges=interleaved_charges(case, had.mempolicy, mems, charges),
            policy=had.policy,
            aligned=not (self.is_misaligned or self.has_shortfall),
            reason=with_outcome(
                reason, is_misaligned=is_misaligned, has_shortfall=self.has_shortfall
            ),
            has_shortfall=self.has_shortfall,
            is_misaligned=is_misaligned,
            decision_steps=tuple(self.steps),
        )


def resize_container(
    machine: NodeModel,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    update: Resources,
    reading: MeasuredFree | None = None,
    now: float = 0.0,
    narrowed_at: float | None = None,
) -> Resized | Rejected:
    """Decide about an UpdateContainer request.

    None or empty fields are not part of the request. ``narrowed_at`` is that of `DesiredState`.
    """
    allocation = state.allocations.get(container.id)
    trace = DecisionTrace(pod=pod, container=container)
    if allocation is None:
        return Resized(state=state, container_update=None, trace=trace)
    granted = state.kubelet.cpus_of(pod.uid, container.name, container.id)
    wanted = parse_foreign_cpuset(update.cpus) if granted and update.cpus else NO_CPUS
    if wanted and (wanted <= granted or allocation.kind is ContainerKind.FOREIGN):
        given_up = _yield_to_kubelet(machine, state, pod, container, update, trace)
        if given_up is not None:
            return given_up
    if allocation.kind in (ContainerKind.UNPINNED, ContainerKind.FOREIGN) and not allocation.mems:
        if update.cpus:
            return _apply_foreign_cpuset(machine, state, allocation, update, trace)
        desired = DesiredState(machine, state, narrowed_at)
        own = answer_to_update(desired, desired, container, update)
        after, change = _with_unpinned_memory(machine, state, pod, container, update)
        return Resized(state=after, change=change, container_update=own, trace=trace)
    merged = _apply_update(container, allocation, update)
    after, change = state, NO_CHANGE
    resized: tuple[str, ...] = ()
    if update.cpu_quota or update.cpu_shares or update.memory_limit or update.hugepages:
        found = resize_to_current_resources(machine, state, pod, merged, reading, now)
        if isinstance(found, Rejected):
            return found
        allocation, trace = found
        after, resized = with_size(machine, state, allocation)
        change = StateChange((container.id, *resized), (pod.uid,))
    old, new = (DesiredState(machine, s, narrowed_at) for s in (state, after))
    if after is not state:
        trace = replace(trace, pool_before=old.pool, pool_after=new.pool)
    own = answer_to_update(old, new, container, update)
    updates = updates_between(old, new, skip=container.id, resized=resized)
    return Resized(state=after, change=change, container_update=own, updates=updates, trace=trace)


def _with_unpinned_memory(
    machine: NodeModel, state: NodeState, pod: PodSandbox, container: Container, update: Resources
) -> tuple[NodeState, StateChange]:
    """The state once a container that nothing pins requests another amount of memory."""
    had = state.allocations[container.id]
    others = state.requested_memory_of_pod(pod.uid, container.id)
    merged = _apply_update(container, had, update)
    amount = unpinned_memory_request(pod, merged, machine.memory_total, others)
    if not had.unpinned_memory or amount == had.unpinned_memory:
        return state, NO_CHANGE
    after = state.without_allocation(container.id)
    after = after.with_allocation(replace(had, unpinned_memory=amount))
    return after, StateChange((container.id,), (pod.uid,))


def with_size(
    machine: NodeModel, state: NodeState, allocation: Allocation
) -> tuple[NodeState, tuple[str, ...]]:
    """The state once a container has its new size, and who else has other CPUs of its pod then."""
    had = state.allocations[allocation.container_id]
    mates = (
        state.cpu_sharers(had)
        if had.kind is ContainerKind.EXCLUSIVE and allocation.exclusive
        else ()
    )
    after = state.without_allocation(had.container_id)
    if not mates or allocation.cpus == had.cpus:
        return after.with_allocation(allocation), ()
    for one in mates:
        after = after.without_allocation(one.container_id)
    after = after.with_allocation(allocation)
    after = after.with_pod_pool(mates, allocation, machine.topology)
    return after, tuple(a.container_id for a in mates)


def changed_resources(allocation: Allocation, resources: Resources) -> Resources | None:
    """What a container is resized to, by what the runtime has; None when that is as remembered."""
    if allocation.kind is ContainerKind.FOREIGN or (
        allocation.kind is ContainerKind.UNPINNED and not allocation.mems
    ):
        return None
    if (resources.cpu_quota or 0) <= 0 and allocation.lifted_quota:
        # The quota was lifted, so the one it was created with still counts.
        resources = replace(resources, cpu_quota=allocation.lifted_quota)
    milli = cpu_size_milli(resources)
    if (resources.cpu_quota or 0) <= 0 and allocation.lifted_quota == 0:
        # Lifted before the checkpoint was lost: nothing tells its size but the CPUs it has.
        milli = allocation.cpu_milli
    memory = resources.memory_limit or 0
    if milli == allocation.cpu_milli and (
        memory <= 0 or not allocation.mems or memory == allocation.memory_bytes
    ):
        return None
    return resources


def _apply_update(container: Container, allocation: Allocation, update: Resources) -> Container:
    """The container as the request wants it; a lifted quota counts as what was asked for once."""
    now = container.resources
    quota = allocation.lifted_quota if allocation.lifted_quota else now.cpu_quota
    return replace(
        container,
        resources=Resources(
            cpu_shares=update.cpu_shares or now.cpu_shares,
            cpu_quota=update.cpu_quota or quota,
            cpu_period=update.cpu_period or now.cpu_period,
            memory_limit=update.memory_limit or now.memory_limit,
            hugepages={**now.hugepages, **update.hugepages},
            cpus=now.cpus,
            mems=now.mems,
        ),
    )


def _yield_to_kubelet(
    machine: NodeModel,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    update: Resources,
    trace: DecisionTrace,
) -> Resized | None:
    """Leave a container to the kubelet, which granted it CPUs and writes them now.

    The kubelet may do so with a container that we placed: its policy became static afterwards.
    Both would write for ever, so the configured side wins; None when that is ours.
    """
    allocation = state.allocations[container.id]
    requested = _with_current_slots(
        machine, pod, container, allocation, machine.options_resolver(pod, container)
    )
    if not isinstance(requested, Rejection):
        side = keep_or_override_grant(
            machine.topology, machine.settings, state.kubelet, pod, container, requested
        )
        if isinstance(side, OverrideGrant):
            return None
    pinned = parse_foreign_cpuset(update.cpus)
    if allocation.kind is ContainerKind.FOREIGN and allocation.foreign_cpus == pinned:
        return Resized(state=state, container_update=None, trace=trace)
    theirs = to_kubelet_allocation(allocation, pinned)
    after = state.without_allocation(container.id).with_allocation(theirs)
    mems = ""
    if allocation.mems and not update.mems:
        mems = str(machine.topology.memory_nodes)  # no other program takes our pin back
    return Resized(
        state=after,
        change=StateChange((container.id,), (pod.uid,)),
        container_update=ContainerUpdate(container_id=container.id, mems=mems) if mems else None,
        updates=updates_between(
            DesiredState(machine, state), DesiredState(machine, after), skip=container.id
        ),
        trace=replace(trace, decision_steps=(theirs.reason,)),
    )


def _with_current_slots(
    machine: NodeModel,
    pod: PodSandbox,
    container: Container,
    allocation: Allocation,
    requested: PlacementOptions | Rejection,
) -> PlacementOptions | Rejection:
    """As many slots as at its creation: an extended resource is not resized, nor is a claim."""
    if not allocation.slots:
        return requested
    key = f"{machine.settings.prefix}/{SLOTS_KEY}"
    holding = replace(container, annotations={key: allocation.slots})
    return with_slots(machine.settings, pod, holding, requested)


def _apply_foreign_cpuset(
    machine: NodeModel,
    state: NodeState,
    allocation: Allocation,
    update: Resources,
    trace: DecisionTrace,
) -> Resized:
    """Another program's cpuset on a container that nothing of ours binds.

    It makes the container foreign, or unbound again when it holds the whole shared pool. It never
    takes an unbound container onto owned CPUs.
    """
    wanted = parse_foreign_cpuset(update.cpus)
    if not wanted:  # what is no list, the runtime refuses
        return Resized(state=state, container_update=None, trace=trace)
    pool = DesiredState(machine, state).pool
    taken = wanted & state.unavailable_cpus
    after = allocation
    if allocation.kind is ContainerKind.FOREIGN or not taken:
        after = reclassify_cpuset(allocation, update.cpus, pool, state.kubelet.shared)
    own, step, change = None, after.reason, NO_CHANGE
    if after.kind is ContainerKind.UNPINNED and wanted != pool:
        own = ContainerUpdate(container_id=allocation.container_id, cpus=str(pool))
        step = f"{cpus_text(pool)}, which everybody shares, instead of {update.cpus}"
        if taken:
            step += f": {cpus_text(taken, 'is', 'are')} exclusive to others"
    if after is not allocation:
        state = state.without_allocation(allocation.container_id).with_allocation(after)
        change = StateChange((allocation.container_id,), (allocation.pod_uid,))
    return Resized(
        state=state,
        change=change,
        container_update=own,
        trace=replace(trace, decision_steps=(step,)),
    )


def resize_to_current_resources(
    machine: NodeModel,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: MeasuredFree | None,
    now: float,
) -> tuple[Allocation, DecisionTrace] | Rejected:
    """What a container has once it has the size that its resources say.

    Only these count: a rule that reads differently by now moves no running container.
    """
    had, rest = state.allocations[container.id], state.without_allocation(container.id)
    allocation = had.with_migration_finished
    if allocation.kind is ContainerKind.EXCLUSIVE:
        for one in state.cpu_sharers(allocation):
            rest = rest.without_allocation(one.container_id)
    trace = DecisionTrace(
        pod=pod,
        container=container,
        free_cpu_milli=DesiredState(machine, rest).free_cpu_milli,
        free_memory=machine.free_memory(rest, reading),
    )
    requested = machine.options_resolver(pod, container)
    if isinstance(requested, Rejection):
        # It was readable at creation; a rule changed under it. What it has stays valid.
        step = f"{container_subject(pod, container)}: {requested.detail}"
        return had, replace(trace, decision_steps=(step,))
    requested = _with_current_slots(machine, pod, container, allocation, requested)
    if isinstance(requested, Rejection):
        return _resize_rejection(requested, trace)
    pods_list = requested.listed_cpus if requested.list_is_pods else NO_CPUS
    others = rest.charge_of_pod(pod.uid, container.id, pods_list)
    wanted = compute_demand(
        pod, container, requested, machine.memory_total, others, is_exclusive=allocation.exclusive
    )
    trace = replace(trace, requested=requested)
    if isinstance(wanted, Rejection):
        return Rejected(wanted, replace(trace, rule=wanted.rule))
    wanted = _demand_staying_exclusive(allocation, wanted)
    trace = replace(trace, demand=wanted)
    case = PlacementRequest(
        machine, rest, pod, container, requested, wanted, reading, allocation.policy
    )
    placed = resize_in_place(case, allocation)
    if isinstance(placed, Rejection):
        return _resize_rejection(placed, trace)
    after = new_allocation(case, placed, now)
    return (
        replace(
            after,
            assigned_at=allocation.assigned_at,
            mempolicy=allocation.mempolicy,  # that of its processes, which does not change
            smt=allocation.smt if allocation.exclusive and placed.exclusive else after.smt,
            movable=allocation.movable,
        ).with_migration_started(had),
        replace(trace, alignment=placed.alignment, decision_steps=placed.decision_steps),
    )


def _resize_rejection(why: Rejection, trace: DecisionTrace) -> Rejected:
    return Rejected(
        why,
        replace(trace, alignment=UnalignedRejection.alignment_of(why), rule=why.rule),
        is_resize=True,
    )


def _demand_staying_exclusive(allocation: Allocation, wanted: Demand) -> Demand:
    """Whole CPUs of an owner stay its own, whatever a rule that was changed says by now."""
    whole, fraction = divmod(wanted.cpu_milli, 1000)
    if (
        allocation.kind is not ContainerKind.EXCLUSIVE
        or wanted.exclusive_cpus
        or fraction
        or not whole
    ):
        return wanted
    return replace(wanted, exclusive_cpus=whole, cpu_notes=())  # which say that it shares
