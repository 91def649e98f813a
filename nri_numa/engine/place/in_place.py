"""What a running container gets when its size changes: more or less of what it has, where it is.

A resize never moves anything. A changed ``cpuset.mems`` makes the kernel copy the pages of a
running process (cgroup v2) or leaves them behind (v1), and nobody who resizes a pod asked for
either. So a container keeps its memory nodes for life, CPUs of its own stay its own as long as it
has that many, and what it gets in addition comes from the NUMA nodes it is on. What cannot grow
there is the business of ``on-failure``; docs/adr/0027-a-resize-stays-in-place.md tells why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nri_numa.engine.accounting import exclusive_left, share_out, take_within
from nri_numa.engine.align.shortage import short
from nri_numa.engine.case import Case
from nri_numa.engine.cpus.allocator import (
    NotEnoughCPUs,
    SMTAlignmentRefused,
    Taken,
    TakeRequest,
)
from nri_numa.engine.decision import Reading
from nri_numa.engine.memory.memory_manager import pages_name
from nri_numa.engine.others.elsewhere import given_last, listed_softly
from nri_numa.engine.others.holders import holders_text
from nri_numa.engine.place.explicit import gives_way, may_own, owned_by_pod, unpaid
from nri_numa.engine.place.memory_policy import in_turn
from nri_numa.engine.place.needs import kept_for_groups, loads_of
from nri_numa.engine.place.placement import (
    Placed,
    exclusive_text,
    human_bytes,
    spread_charges,
)
from nri_numa.engine.place.quotas import grant_refused, kept_for_pool, ownable
from nri_numa.engine.place.refusals import misaligned, too_few
from nri_numa.engine.state import Allocation, Kind
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import SMT, OnFailure
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.machine.model import human_milli, numa_text

RULE = "a resize stays in place"
LESS = "less than asked for"
"""The end of its reason where a running container could not grow."""
WIDER = "wider than ideal"


def place_in_place(case: Case, allocation: Allocation) -> Placed | Refusal:
    """Give a running container its new size where it is.

    Args:
        case: the container with its new size. What it uses is not in the reading, and what cannot
            grow where it is, is the business of its ``on-failure``: ``reject`` fails; ``widen``
            adds CPUs of other NUMA nodes to those it owns; otherwise, and for memory and shared
            CPUs, it stays with what it has and the new size is allocated there.
        allocation: what it has.

    Returns:
        What it has from now on, whose memory nodes are those of before, or why it cannot grow.
    """
    change = _Change(replace(case, reading=_with_own(case.reading, allocation)), allocation)
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
        self.wider = not allocation.preferred and (
            LESS not in allocation.reason or WIDER in allocation.reason
        )

    def listed(self) -> Placed | Refusal:
        """CPUs of a list stay that list; only the amounts change."""
        case, had, topology = self.case, self.had, self.case.machine.topology
        milli: dict[int, int] = {}
        if had.owned:
            # The runtime may tell the pod's sum of its creation, not that of now.
            paid = case.demand.cpu_paid_milli
            paid += sum(a.cpu_milli for a in owned_by_pod(case, had.cpus))
            if case.demand.pod_paid_milli is not None:
                paid = min(paid, case.demand.pod_paid_milli)
            case = replace(case, demand=replace(case.demand, pod_paid_milli=paid))
            if not may_own(case.requested, had.cpus, case.demand):
                return unpaid(case, had.cpus)
        if had.cpus:
            want = 1000 * len(had.cpus) if had.owned else self._allocated_milli()
            milli = {
                i: want * len(topology.numa_nodes[i].cpus & had.cpus) // len(had.cpus)
                for i in had.numa_nodes
            }
        return self._allocated(had.kind, had.cpus, NO_CPUS, had.numa_nodes, milli, had.reason)

    def shared(self) -> Placed | Refusal:
        """The shared CPUs of the NUMA nodes it is on."""
        case, had, wanted = self.case, self.had, self.case.demand
        numa_nodes = had.numa_nodes
        self.steps.append(f"stays on {numa_text(numa_nodes)}")
        left = case.shared_left
        if wanted.cpu_milli > had.cpu_milli:
            have = sum(left.get(i, 0) for i in numa_nodes)
            if have < wanted.cpu_milli:
                free = f"{human_milli(have)} free on {numa_text(numa_nodes)}"
                text = f"{case.who}: {short('cpu', human_milli(wanted.cpu_milli), free)}"
                text += holders_text(case.state, numa_nodes, requests=True)
                if case.on_failure is OnFailure.REJECT:
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
            taken = Taken(cpus=self.had.cpus, idle=self.had.idle)
        topology = self.case.machine.topology
        numa_nodes = topology.numa_of(taken.cpus)
        self.steps += taken.notes
        if not numa_nodes <= self._home():
            self.wider = True
        milli = {i: 1000 * len(topology.numa_nodes[i].cpus & taken.cpus) for i in numa_nodes}
        reason = f"{exclusive_text(len(taken.cpus))} on {numa_text(numa_nodes)}"
        return self._allocated(Kind.EXCLUSIVE, taken.cpus, taken.idle, numa_nodes, milli, reason)

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

    def _take(self) -> Taken | Refusal:
        case, held = self.case, self.had.cpus
        count = case.demand.exclusive_cpus
        if count == len(held):
            # CPUs of it that are offline come back, and stay its own.
            return Taken(cpus=held, idle=self.had.idle)
        if count < len(held):
            fewer = self._ask(NO_CPUS, {}, strict=True)
            return fewer if isinstance(fewer, Taken) else self._misaligned(fewer)
        machine, rest = case.machine, case.state
        pool = rest.pool(machine.topology, machine.settings)
        free = ownable(machine, rest)
        if machine.isolated:
            free = free - kept_for_pool(machine, rest, pool - held, free - held)
        free = free - kept_for_groups(machine, rest, pool, free, held)
        home = self._home()
        limits = exclusive_left(machine, rest, free | held, self._smt(), case.cpu_left)
        room = sum(limits.get(i, 0) for i in home)
        taken: Taken | NotEnoughCPUs | SMTAlignmentRefused | None = None
        if room >= count:
            taken = self._ask(free, limits, strict=True)
            if isinstance(taken, SMTAlignmentRefused):
                return self._misaligned(taken)
        # A container that shares is on its NUMA nodes, and CPUs elsewhere would move it.
        if not isinstance(taken, Taken) and case.on_failure is OnFailure.WIDEN and held:
            taken = self._ask(free, limits, strict=False)
        if not isinstance(taken, Taken):
            return Refusal(
                reason="NotEnoughCPUs",
                message=f"{case.who}: "
                + short("cpu", exclusive_text(count), f"{room} free on {numa_text(home)} for it")
                + f" (smt: {self._smt().value})"
                + holders_text(rest, home, requests=True),
                rule=RULE,
            )
        who = f"{case.who}: cpu: {exclusive_text(count)}"
        refused = grant_refused(case, who, taken.cpus, taken.idle)
        return taken if refused is None else refused

    def _allocated_milli(self) -> int:
        """Thousandths of a CPU that are allocated for shared CPUs: what its request pays for."""
        return min(self.case.demand.cpu_milli, self.case.demand.cpu_paid_milli)

    def _smt(self) -> SMT:
        return self.had.smt if self.had.owned else self.case.smt

    def _ask(
        self, available: CPUSet, limits: Mapping[int, int], *, strict: bool
    ) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
        case, state = self.case, self.case.state
        return take_within(
            case.machine,
            TakeRequest(
                count=case.demand.exclusive_cpus,
                available=available,
                held=self.had.cpus,
                affinity=self._home(),
                strict=strict,
                smt=self._smt(),
                load=case.requested.load if self.had.load is None else self.had.load,
                loads=loads_of(state) if self._smt() is SMT.PAIR else {},
                busy=state.withheld,
                last=given_last(state, case.machine.topology, case.machine.settings),
                listed=listed_softly(state, case.machine.topology),
                # The rest of its sockets are not the NUMA nodes it is on.
                settings=replace(case.machine.settings, align_by_socket=False),
            ),
            limits,
        )

    def _misaligned(self, refused: NotEnoughCPUs | SMTAlignmentRefused) -> Refusal:
        told = (
            misaligned(self.case, refused, self._smt())
            if isinstance(refused, SMTAlignmentRefused)
            else too_few(self.case.machine, refused, None)
        )
        return Refusal(
            reason="SMTAlignmentError",
            message=f"{self.case.who}: {told}",
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
            if amount <= before or have >= amount:
                continue
            free = f"{human_bytes(have)} free on {numa_text(mems)}"
            text = f"{case.who}: {short(what, human_bytes(amount), free)}"
            if case.on_failure is OnFailure.REJECT:
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
        return Placed(
            kind=kind,
            cpus=cpus,
            idle=idle,
            owned=owned,
            soft=soft,
            numa_nodes=numa_nodes,
            mems=mems,
            charges=in_turn(
                case,
                had.mempolicy,
                mems,
                spread_charges(
                    numa_nodes,
                    milli,
                    mems,
                    wanted.memory_paid if mems else 0,
                    memory_left,
                    hugepages,
                    pages_left,
                ),
            ),
            policy=had.policy,
            preferred=not (self.wider or self.less),
            reason=reason,
            steps=tuple(self.steps),
        )


def _with_own(reading: Reading | None, allocation: Allocation) -> Reading | None:
    """What the kernel has left for the container that runs: what it was promised counts as its own.

    It uses some of that already, so only what it gets in addition has to be free.
    """
    if reading is None:
        return None
    charges = allocation.charges
    return Reading(
        memory={
            i: free + (charges[i].memory if i in charges else 0)
            for i, free in reading.memory.items()
        },
        hugepages={
            i: {
                size: free + (charges[i].hugepages.get(size, 0) if i in charges else 0)
                for size, free in sizes.items()
            }
            for i, sizes in reading.hugepages.items()
        },
    )
