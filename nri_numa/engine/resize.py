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
    exclusive_left,
    grant_refused,
    kept_for_groups,
    kept_for_pool,
    ownable,
    share_out,
    take_beside_others,
)
from nri_numa.engine.admit import new_allocation, pod_pool_updates, pool_updates
from nri_numa.engine.align.policies import short, short_of_bytes
from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTAlignmentRefused,
    TakeRequest,
)
from nri_numa.engine.decision import Case, Machine, Placed, Reading, Refused, Resized, Trace
from nri_numa.engine.others import (
    Ours,
    holders_text,
    judged,
    pinned_to,
    reclaimed,
    same_set,
    whose,
)
from nri_numa.engine.place.explicit import gives_way, may_own, owned_by_pod, unpaid
from nri_numa.engine.place.memory import in_turn, pages_name, spread_charges
from nri_numa.engine.place.needs import (
    exclusive_text,
    lowered_text,
    misaligned,
    too_few,
)
from nri_numa.engine.request.demand import (
    SLOTS,
    Demand,
    demand,
    size_milli,
    with_slots,
)
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import NO_QUOTA, cpus_text, human_milli, numa_text
from nri_numa.model.workload import (
    NO_CHANGE,
    SMT,
    Container,
    ContainerUpdate,
    OnFailure,
    PodSandbox,
    Refusal,
    Requested,
    Resources,
    StateChange,
)

RULE = "a resize stays in place"
LESS = "less than asked for"
"""The end of its reason where a running container could not grow."""
WIDER = "wider than ideal"


def place_in_place(case: Case, allocation: Allocation) -> Placed | Refusal:
    """Give a running container its new size where it is.

    What it uses is not in the reading. What cannot grow where it is, is the business of its
    ``on-failure``: ``reject`` fails; ``widen`` adds CPUs of other NUMA nodes to those it owns;
    otherwise, and for memory and shared CPUs, it stays with what it has and the new size is
    allocated there.
    """
    reading = None if case.reading is None else case.reading.with_own(allocation)
    change = _Change(replace(case, reading=reading), allocation)
    if allocation.kind in (Kind.EXPLICIT, Kind.UNBOUND):
        return change.listed()
    if case.demand.exclusive_cpus:
        return change.exclusive()
    return change.shared()


class _Change:
    """One change of size on its way."""

    def __init__(self, case: Case, allocation: Allocation) -> None:
        self.case, self.had = case, allocation
        self.steps: list[str] = []
        self.less = False
        self.lacked = LESS in allocation.reason
        self.wider = not allocation.preferred and (not self.lacked or WIDER in allocation.reason)

    def listed(self) -> Placed | Refusal:
        """CPUs of a list stay that list; only the amounts change."""
        case, had = self.case, self.had
        if had.owned:
            # The runtime may tell the pod's sum of its creation, not that of now.
            paid = case.demand.cpu_paid_milli
            paid += sum(a.cpu_milli for a in owned_by_pod(case, had.cpus))
            if case.demand.pod_paid_milli is not None:
                paid = min(paid, case.demand.pod_paid_milli)
            case = replace(case, demand=replace(case.demand, pod_paid_milli=paid))
            if not may_own(case.requested, had.cpus, case.demand):
                return unpaid(case, had.cpus)
        if had.owned:
            _, milli = self._owned(had.cpus)
        else:
            counts = case.machine.topology.counts(had.cpus) or dict.fromkeys(had.numa_nodes, 1)
            want, count = self._allocated_milli(), sum(counts.values())
            milli = {i: want * n // count for i, n in counts.items()}
        return self._allocated(had.kind, had.cpus, NO_CPUS, had.numa_nodes, milli, had.reason)

    def shared(self) -> Placed | Refusal:
        """The shared CPUs of the NUMA nodes it is on."""
        case, had, wanted = self.case, self.had, self.case.demand
        numa_nodes = had.numa_nodes
        self.steps.append(f"stays on {numa_text(numa_nodes)}")
        left = case.shared_left
        grows = wanted.cpu_milli > had.cpu_milli
        if grows or (self.lacked and wanted.cpu_milli == had.cpu_milli):
            have = sum(left.get(i, 0) for i in numa_nodes)
            if have < wanted.cpu_milli:
                free = f"{human_milli(have)} free on {numa_text(numa_nodes)}"
                free += lowered_text(case.machine, numa_nodes)
                text = f"{case.who}: {short('cpu', human_milli(wanted.cpu_milli), free)}"
                text += holders_text(case.state, numa_nodes, requests=True)
                if grows and case.on_failure is OnFailure.REJECT:
                    return Refusal(reason="NotEnoughCPUs", message=text, rule=RULE)
                self.steps.append(text)
                self.less = True
        milli = share_out(self._allocated_milli(), numa_nodes, left)
        return self._allocated(
            Kind.SHARED,
            NO_CPUS,
            NO_CPUS,
            numa_nodes,
            milli,
            f"shared CPUs on {numa_text(numa_nodes)}",
        )

    def exclusive(self) -> Placed | Refusal:
        """CPUs of its own: those it has, fewer of them, or these and more beside them."""
        taken = self._take()
        if isinstance(taken, Refusal):
            if not self._may_stay(taken):
                return taken
            # Memory is booked at the new size all the same: that is what the container may use.
            self.steps += (taken.message, f"it keeps what it has, which is {LESS}")
            self.less = True
            if self.had.kind is not Kind.EXCLUSIVE:
                return self.shared()
            taken = ChosenCPUs(cpus=self.had.cpus, idle=self.had.idle)
        numa_nodes, milli = self._owned(taken.cpus)
        self.steps += taken.notes
        if not numa_nodes <= self._home():
            self.wider = True
        elif numa_nodes < self.had.numa_nodes and len(numa_nodes | self.had.mems) == 1:
            self.wider = False  # by now
        reason = f"{exclusive_text(len(taken.cpus))} on {numa_text(numa_nodes)}"
        return self._allocated(Kind.EXCLUSIVE, taken.cpus, taken.idle, numa_nodes, milli, reason)

    def _owned(self, cpus: CPUSet) -> tuple[NUMASet, Mapping[int, int]]:
        """Where CPUs of its own are and count; those that are offline come back as they were."""
        topology, had = self.case.machine.topology, self.had
        if not cpus <= topology.online:
            return had.numa_nodes, {i: charge.cpu_milli for i, charge in had.charges.items()}
        counts = topology.counts(cpus)
        return NUMASet(counts), {i: 1000 * count for i, count in counts.items()}

    def _may_stay(self, why: Refusal) -> bool:
        """Whether it keeps its CPUs where it cannot have the new number of them.

        What is not paid for is no matter of room: it is refused, whatever ``on-failure`` says.
        """
        case, had = self.case, self.had
        if case.on_failure is OnFailure.REJECT or why.reason == "UnpaidCPUs":
            return False
        paid = 1000 * len(had.cpus) <= case.demand.cpu_paid_milli
        return had.kind is not Kind.EXCLUSIVE or paid or case.requested.unpaid_cpus

    def _home(self) -> NUMASet:
        """The NUMA nodes that growing may use: its own, and those chosen for its whole pod."""
        record = self.case.state.pods.get(self.had.pod_uid)
        if record is None or record.affinity is None:
            return self.had.numa_nodes
        return self.had.numa_nodes | record.affinity

    def _take(self) -> ChosenCPUs | Refusal:
        case, held = self.case, self.had.cpus
        count = case.demand.exclusive_cpus
        if count == len(held):
            # CPUs of it that are offline come back, and stay its own.
            return ChosenCPUs(cpus=held, idle=self.had.idle)
        if count < len(held):
            fewer = self._ask(NO_CPUS, {}, strict=True)
            return fewer if isinstance(fewer, ChosenCPUs) else self._misaligned(fewer)
        machine, rest = case.machine, case.state
        pool = rest.pool(machine.topology, machine.settings)
        free = ownable(machine, rest)
        free = free - kept_for_pool(machine, rest, pool - held, free - held)
        free = free - kept_for_groups(machine, rest, pool, free, held)
        home = self._home()
        limits = exclusive_left(machine, rest, free | held, self._smt(), case.cpu_left)
        room = sum(limits.get(i, 0) for i in home)
        found: ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused | None = None
        if room >= count:
            found = self._ask(free, limits, strict=True)
            if isinstance(found, SMTAlignmentRefused):
                return self._misaligned(found)
        # A container that shares is on its NUMA nodes, and CPUs elsewhere would move it.
        if not isinstance(found, ChosenCPUs) and case.on_failure is OnFailure.WIDEN and held:
            found = self._ask(free, limits, strict=False)
        if not isinstance(found, ChosenCPUs):
            where = f"{numa_text(home)}{lowered_text(machine, home)}"
            return Refusal(
                reason="NotEnoughCPUs",
                message=f"{case.who}: "
                + short(
                    "cpu", exclusive_text(count), f"{room} free for exclusive use on {where} for it"
                )
                + f" (smt: {self._smt().value})"
                + holders_text(rest, home, requests=True),
                rule=RULE,
            )
        who = f"{case.who}: cpu: {exclusive_text(count)}"
        refused = grant_refused(case, who, found.cpus, found.idle)
        return found if refused is None else refused

    def _allocated_milli(self) -> int:
        """Thousandths of a CPU that are allocated for shared CPUs: what its request pays for."""
        return min(self.case.demand.cpu_milli, self.case.demand.cpu_paid_milli)

    def _smt(self) -> SMT:
        return self.had.smt if self.had.owned else self.case.smt

    def _ask(
        self, available: CPUSet, limits: Mapping[int, int], *, strict: bool
    ) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
        case = self.case
        return take_beside_others(
            case,
            TakeRequest(
                count=case.demand.exclusive_cpus,
                available=available,
                held=self.had.cpus,
                affinity=self._home(),
                strict=strict,
                smt=self._smt(),
                load=case.requested.load if self.had.load is None else self.had.load,
                # The rest of its sockets are not the NUMA nodes it is on.
                settings=replace(case.machine.settings, align_by_socket=False),
            ),
            limits,
        )

    def _misaligned(self, refused: NotEnoughCPUs | SMTAlignmentRefused) -> Refusal:
        why = (
            misaligned(self.case, refused, self._smt())
            if isinstance(refused, SMTAlignmentRefused)
            else too_few(self.case.machine, refused, None)
        )
        return Refusal(
            reason="SMTAlignmentError",
            message=f"{self.case.who}: {why}",
            rule="smt: full-core gives whole cores only",
        )

    def _allocated(
        self,
        kind: Kind,
        cpus: CPUSet,
        idle: CPUSet,
        numa_nodes: NUMASet,
        milli: Mapping[int, int],
        reason: str,
    ) -> Placed | Refusal:
        """Book the new size on the memory nodes it has; see that growing fits there."""
        case, had, wanted = self.case, self.had, self.case.demand
        mems = had.mems
        memory = wanted.memory_bytes if mems else 0
        hugepages = wanted.hugepages if mems else {}
        memory_left = case.memory_left
        pages_left = case.hugepages_left() if hugepages else {}
        has = sum(memory_left.get(i, 0) for i in mems)
        needs = [("memory", memory, had.memory_bytes, has)]
        for size, amount in sorted(hugepages.items()):  # by page size
            has = sum(pages_left[size].get(i, 0) for i in mems)
            before = had.hugepages.get(size, 0)
            needs.append((pages_name(size), amount, before, has))
        for what, amount, before, have in needs:
            grows = amount > before
            if have >= amount or not (grows or (self.lacked and amount == before)):
                continue
            text = f"{case.who}: {short_of_bytes(what, amount, have, f' on {numa_text(mems)}')}"
            if grows and case.on_failure is OnFailure.REJECT:
                return Refusal(reason="NotEnoughMemory", message=text, rule=RULE)
            self.steps.append(text + "; memory nodes of a running container do not change")
            self.less = True
        listed = kind in (Kind.EXPLICIT, Kind.UNBOUND)
        owned = kind is Kind.EXCLUSIVE or (kind is had.kind and had.owned)
        # A list that is paid for by now keeps its CPUs, unless others own some already.
        soft = (
            kind is Kind.EXPLICIT
            and not owned
            and (
                gives_way(case.requested, cpus, wanted)
                or (had.soft and bool(cpus & case.state.withheld))
            )
        )
        reason = reason.removesuffix(f", {LESS}")
        reason += f", {WIDER}" if self.wider and not listed else ""
        reason += f", {LESS}" if self.less else ""
        charges = spread_charges(
            numa_nodes, milli, mems,
            wanted.memory_paid, memory_left, hugepages, pages_left,
        )  # fmt: skip
        return replace(
            case.unplaced,
            kind=kind,
            cpus=cpus,
            idle=idle,
            owned=owned,
            soft=soft,
            numa_nodes=numa_nodes,
            mems=mems,
            charges=in_turn(case, had.mempolicy, mems, charges),
            policy=had.policy,
            preferred=not (self.wider or self.less),
            reason=reason,
            steps=tuple(self.steps),
        )


def resize(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    update: Resources,
    reading: Reading | None = None,
    now: float = 0.0,
) -> Resized | Refused:
    """Decide about an UpdateContainer request.

    None or empty fields are not part of the request.
    """
    allocation = state.allocations.get(container.id)
    trace = Trace(pod=pod, container=container)
    if allocation is None:
        return Resized(state=state, own=None, trace=trace)
    granted = state.kubelet.cpus_of(pod.uid, container.name, container.id)
    wanted = pinned_to(update.cpus) if granted and update.cpus else NO_CPUS
    if wanted and (wanted <= granted or allocation.kind is Kind.FOREIGN):
        given_up = _given_up(machine, state, pod, container, update, trace)
        if given_up is not None:
            return given_up
    if allocation.kind in (Kind.UNBOUND, Kind.FOREIGN) and not allocation.mems:
        return _set_by_others(machine, state, allocation, update, trace)
    merged = _merged(container, allocation, update)
    after, change = state, NO_CHANGE
    mates: tuple[ContainerUpdate, ...] = ()
    if update.cpu_quota or update.cpu_shares or update.memory_limit or update.hugepages:
        found = resized(machine, state, pod, merged, reading, now)
        if isinstance(found, Refused):
            return found
        allocation, trace = found
        after, mates = with_size(machine, state, allocation)
        had, has = (s.pool(machine.topology, machine.settings) for s in (state, after))
        trace = replace(trace, pool_before=had, pool_after=has)
        change = StateChange((container.id, *(one.container_id for one in mates)), (pod.uid,))
    own = _own_update(machine, after, allocation, state.allocations[container.id], update)
    updates = (*mates, *pool_updates(machine, state, after, skip=container.id))
    return Resized(state=after, change=change, own=own, updates=updates, trace=trace)


def with_size(
    machine: Machine, state: NodeState, allocation: Allocation
) -> tuple[NodeState, tuple[ContainerUpdate, ...]]:
    """The state once a container has its new size, and updates of others that share its CPUs."""
    had = state.allocations[allocation.container_id]
    mates = state.mates(had) if had.kind is Kind.EXCLUSIVE and allocation.owned else ()
    after = state.without(had.container_id)
    if not mates or allocation.cpus == had.cpus:
        return after.with_allocation(allocation), ()
    for one in mates:
        after = after.without(one.container_id)
    after = after.with_allocation(allocation)
    after = after.with_pod_pool(mates, allocation, machine.topology)
    return after, pod_pool_updates(mates, allocation.cpus)


def other_size(allocation: Allocation, resources: Resources) -> Resources | None:
    """What a container is resized to, by what the runtime has; None when that is as remembered."""
    if allocation.kind is Kind.FOREIGN or (allocation.kind is Kind.UNBOUND and not allocation.mems):
        return None
    if (resources.cpu_quota or 0) <= 0 and allocation.quota:
        # The quota was lifted, so the one it was created with still counts.
        resources = replace(resources, cpu_quota=allocation.quota)
    milli = size_milli(resources)
    if (resources.cpu_quota or 0) <= 0 and allocation.quota == 0:
        # Lifted before the checkpoint was lost: nothing tells its size but the CPUs it has.
        milli = allocation.cpu_milli
    memory = resources.memory_limit or 0
    if milli == allocation.cpu_milli and (
        memory <= 0 or not allocation.mems or memory == allocation.memory_bytes
    ):
        return None
    return resources


def _merged(container: Container, allocation: Allocation, update: Resources) -> Container:
    """The container as the request wants it; a lifted quota counts as what was asked for once."""
    now = container.resources
    quota = allocation.quota if allocation.quota else now.cpu_quota
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


def _given_up(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    update: Resources,
    trace: Trace,
) -> Resized | None:
    """Leave a container to the kubelet, which granted it CPUs and writes them now.

    The kubelet may do so with a container that we placed: its policy became static afterwards.
    Both would write for ever, so the configured side wins; None when that is ours.
    """
    allocation = state.allocations[container.id]
    requested = _with_what_it_holds(
        machine, pod, container, allocation, machine.resolve(pod, container)
    )
    if not isinstance(requested, Refusal):
        side = whose(machine.topology, machine.settings, state.kubelet, pod, container, requested)
        if isinstance(side, Ours):
            return None
    pinned = pinned_to(update.cpus)
    if allocation.kind is Kind.FOREIGN and allocation.pinned == pinned:
        return Resized(state=state, own=None, trace=trace)
    theirs = reclaimed(allocation, pinned)
    after = state.without(container.id).with_allocation(theirs)
    mems = ""
    if allocation.mems and not update.mems:
        mems = str(machine.topology.memory_nodes)  # no other program takes our pin back
    return Resized(
        state=after,
        change=StateChange((container.id,), (pod.uid,)),
        own=ContainerUpdate(container_id=container.id, mems=mems) if mems else None,
        updates=pool_updates(machine, state, after, skip=container.id),
        trace=replace(trace, steps=(theirs.reason,)),
    )


def _with_what_it_holds(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    allocation: Allocation,
    requested: Requested | Refusal,
) -> Requested | Refusal:
    """As many slots as at its creation: an extended resource is not resized, nor is a claim."""
    if not allocation.slots:
        return requested
    key = f"{machine.settings.prefix}/{SLOTS}"
    holding = replace(container, annotations={key: allocation.slots})
    return with_slots(machine.settings, pod, holding, requested)


def _set_by_others(
    machine: Machine, state: NodeState, allocation: Allocation, update: Resources, trace: Trace
) -> Resized:
    """Another program's cpuset on a container that nothing of ours binds.

    It makes the container foreign, or unbound again when it holds the whole shared pool. It never
    takes an unbound container onto owned CPUs.
    """
    if not update.cpus or not pinned_to(update.cpus):
        return Resized(state=state, own=None, trace=trace)  # what is no list, the runtime refuses
    wanted = pinned_to(update.cpus)
    pool = state.pool(machine.topology, machine.settings)
    taken = wanted & state.withheld
    after = allocation
    if allocation.kind is Kind.FOREIGN or not taken:
        after = judged(allocation, update.cpus, pool, state.kubelet.shared)
    own, step, change = None, after.reason, NO_CHANGE
    if after.kind is Kind.UNBOUND and wanted != pool:
        own = ContainerUpdate(container_id=allocation.container_id, cpus=str(pool))
        step = f"{cpus_text(pool)}, which everybody shares, instead of {update.cpus}"
        if taken:
            step += f": {cpus_text(taken, 'is', 'are')} exclusive to others"
    if after is not allocation:
        state = state.without(allocation.container_id).with_allocation(after)
        change = StateChange((allocation.container_id,), (allocation.pod_uid,))
    return Resized(state=state, change=change, own=own, trace=replace(trace, steps=(step,)))


def resized(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: Reading | None,
    now: float,
) -> tuple[Allocation, Trace] | Refused:
    """What a container has once it has the size that its resources say.

    Only these count: a rule that reads differently by now moves no running container.
    """
    had, rest = state.allocations[container.id], state.without(container.id)
    allocation = had.arrived
    if allocation.kind is Kind.EXCLUSIVE:
        for one in state.mates(allocation):
            rest = rest.without(one.container_id)
    trace = Trace(
        pod=pod,
        container=container,
        cpu_left=machine.cpu_left(rest),
        memory_left=machine.memory_left(rest, reading),
    )
    requested = machine.resolve(pod, container)
    if isinstance(requested, Refusal):
        # It was readable at creation; a rule changed under it. What it has stays valid.
        return had, replace(trace, steps=(requested.message,))
    requested = _with_what_it_holds(machine, pod, container, allocation, requested)
    if isinstance(requested, Refusal):
        return _resize_refused(requested, trace)
    pods_list = requested.listed_cpus if requested.pods_list else NO_CPUS
    others = rest.charge_of_pod(pod.uid, container.id, pods_list)
    wanted = demand(pod, container, requested, machine.memory_total, others)
    trace = replace(trace, requested=requested)
    if isinstance(wanted, Refusal):
        return Refused(wanted, replace(trace, rule=wanted.rule))
    wanted = _still_owned(allocation, wanted)
    trace = replace(trace, demand=wanted)
    case = Case(machine, rest, pod, container, requested, wanted, reading, allocation.policy)
    placed = place_in_place(case, allocation)
    if isinstance(placed, Refusal):
        return _resize_refused(placed, trace)
    after = new_allocation(case, placed, now)
    return (
        replace(
            after,
            since=allocation.since,
            mempolicy=allocation.mempolicy,  # that of its processes, which does not change
            smt=allocation.smt if allocation.owned and placed.owned else after.smt,
            movable=allocation.movable,
        ).after(had),
        replace(trace, alignment=placed.alignment, steps=placed.steps),
    )


def _resize_refused(why: Refusal, trace: Trace) -> Refused:
    return Refused(
        replace(why, message=f"resize refused: {why.message}"),
        replace(trace, alignment=why.alignment, rule=why.rule),
    )


def _still_owned(allocation: Allocation, wanted: Demand) -> Demand:
    """Whole CPUs of an owner stay its own, whatever a rule that was changed says by now."""
    whole, fraction = divmod(wanted.cpu_milli, 1000)
    if allocation.kind is not Kind.EXCLUSIVE or wanted.exclusive_cpus or fraction or not whole:
        return wanted
    notes = tuple(note for note in wanted.notes if "CPU" not in note)  # which say that it shares
    return replace(wanted, exclusive_cpus=whole, notes=notes)


def _own_update(
    machine: Machine,
    after: NodeState,
    allocation: Allocation,
    before: Allocation,
    update: Resources,
) -> ContainerUpdate | None:
    """Override the request only where it would change what was decided.

    Any override makes containerd lose the request's swap limit, so none is sent without need.
    """
    pool = after.pool(machine.topology, machine.settings)
    wanted = effective_cpus(allocation, pool, machine.topology, after.withheld_bits)
    if not wanted and allocation.kind is Kind.UNBOUND and update.cpus:
        wanted = pool  # its memory is bound by us, so no other pin makes it foreign
    changed = allocation.cpus != before.cpus or allocation.kind is not before.kind
    cpus = ""
    if wanted and (changed or (update.cpus and not same_set(update.cpus, wanted))):
        cpus = str(wanted)
    mems = ""
    if allocation.mems and (
        allocation.mems != before.mems
        or (update.mems and not same_set(update.mems, allocation.mems))
    ):
        mems = str(allocation.mems)
    quota: int | None = None
    if allocation.quota is not None and (before.quota is None or (update.cpu_quota or 0) > 0):
        quota = NO_QUOTA
    elif before.quota is not None and allocation.quota is None and not update.cpu_quota:
        quota = before.quota or None
    if not (cpus or mems or quota is not None):
        return None
    return ContainerUpdate(
        container_id=allocation.container_id, cpus=cpus, mems=mems, cpu_quota=quota
    )


def over_remembered(
    machine: Machine,
    state: NodeState,
    container: Container,
    requested: Resources,
    own: ContainerUpdate | None,
) -> ContainerUpdate | None:
    """The container's update, and what is meant where the runtime would write an older cpuset.

    Runtimes send the cpuset that they remember with any update, and what is meant may be newer.
    Where one remembers none it sends none; but systemd then writes what *it* has for the scope.
    """
    allocation = state.allocations.get(container.id)
    if allocation is None or allocation.kind is Kind.FOREIGN:
        return own
    has, by_systemd = container.resources, ":" in container.cgroups_path
    pool = state.pool(machine.topology, machine.settings)
    wanted = effective_cpus(allocation, pool, machine.topology, state.withheld_bits)
    if not wanted and has.cpus and allocation.kind is Kind.UNBOUND:
        wanted = pool
    cpus = mems = ""
    if wanted and not requested.cpus and (has.cpus or by_systemd):
        cpus = "" if same_set(has.cpus, wanted) else str(wanted)
    if allocation.mems and not requested.mems and (has.mems or by_systemd):
        mems = "" if same_set(has.mems, allocation.mems) else str(allocation.mems)
    if not (cpus or mems):
        return own
    older = ContainerUpdate(container.id, cpus=cpus, mems=mems)
    return older if own is None else own.over(older)
