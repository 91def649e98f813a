"""What really runs against what is meant: after a lost link, and while it runs.

The runtime is the truth for *what is*, the prior state (from memory or from the checkpoint) for
*what was meant*. No running container moves: what is known keeps what it has, and an update is only
sent where the runtime has something else than was meant. What the cgroups have is compared by
`plan_corrections`: every correction moves one container to exactly what the state means for it and
touches no other. So a plan may be cut off after any correction, the state may change meanwhile, and
a new plan
goes on from there: nothing that was put right is undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.engine.accounting import ownable
from nri_numa.engine.admit import admit, left_alone, pool_updates
from nri_numa.engine.adopt import ASSIGNED, adopt, is_signed
from nri_numa.engine.decision import (
    Decision,
    Machine,
    Met,
    Reading,
    Refused,
    Resynced,
    Trace,
)
from nri_numa.engine.others import covers, judged, pinned_to, same_set
from nri_numa.engine.resize import other_size, with_size
from nri_numa.engine.resize import resized as resized_to
from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    build,
    effective_cpus,
    group_of,
    identity,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import NO_QUOTA, Observed, cpus_text
from nri_numa.model.workload import (
    NO_CHANGE,
    Container,
    ContainerUpdate,
    Pods,
    PodSandbox,
    StateChange,
)


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """One container whose cgroup is not as meant.

    Attributes:
        quota: `NO_QUOTA` where another program gave back a quota that was lifted; None leaves it.
        meant_cpus, meant_mems: what it should be able to use; empty where it is so.
        obstacle: which cgroup above or below keeps it from what is meant; empty when none does.
        rank: 0 when it runs on CPUs that belong to another container, 1 when it owns CPUs itself,
            2 otherwise.
    """

    container_id: str
    name: str
    cpus: CPUSet = NO_CPUS
    mems: NUMASet = NO_NUMA_NODES
    quota: int | None = None
    meant_cpus: CPUSet = NO_CPUS
    meant_mems: NUMASet = NO_NUMA_NODES
    has_cpus: CPUSet = NO_CPUS
    has_mems: NUMASet = NO_NUMA_NODES
    found: str
    obstacle: str = ""
    rank: int = 2

    @property
    def blocked(self) -> bool:
        """Whether there is nothing that could be written, only something to report."""
        return not (self.cpus or self.mems or self.quota)

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: what disturbs an owner first, then owners, then by id."""
        return self.rank, self.container_id

    def kept_from(self, cpus: str, mems: str) -> Correction:
        """Without the lists that the kernel would refuse, for the reasons given."""
        if not (cpus or mems):
            return self
        obstacle = "; ".join(dict.fromkeys(why for why in (cpus, mems) if why))
        return replace(
            self,
            cpus=NO_CPUS if cpus else self.cpus,
            mems=NO_NUMA_NODES if mems else self.mems,
            found=f"{self.found}; {obstacle}",
            obstacle=obstacle,
        )

    @property
    def update(self) -> ContainerUpdate:
        """What to send to the runtime."""
        return ContainerUpdate(
            container_id=self.container_id,
            cpus=str(self.cpus),
            mems=str(self.mems),
            cpu_quota=self.quota,
            ignore_failure=True,
        )


def plan_corrections(
    machine: Machine,
    state: NodeState,
    observed: Mapping[str, Observed],
    narrowed_at: float | None = None,
) -> tuple[Correction, ...]:
    """Compare real cgroups with what was meant.

    Foreign containers are left alone here. An unbound container is left alone while the
    shared pool is the whole machine, unless we may have narrowed it ourselves before: the update
    that widens it again can get lost like any other. Containers without a cgroup are not observed,
    and ids that the state does not know are passed over: both come and go meanwhile.
    ``narrowed_at`` is the time until which the shared pool was last narrower than the machine. In
    the order in which to apply them.
    """
    pool = state.pool(machine.topology, machine.settings)
    found: list[Correction] = []
    for container_id, real in observed.items():
        allocation = state.allocations.get(container_id)
        if allocation is None or allocation.kind is Kind.FOREIGN:
            continue
        topology = machine.topology
        wanted = effective_cpus(allocation, pool, topology, state.withheld_bits)
        if not wanted and allocation.kind is Kind.UNBOUND and real.cpus:
            ours = narrowed_at is not None and allocation.since <= narrowed_at
            wanted = pool if ours else NO_CPUS
        above = f" ({real.above})" if real.above else ""
        # A list may name offline CPUs, and the kernel keeps them.
        kept, has = real.cpus & topology.online == wanted, real.effective_cpus
        meant_cpus, cpus, cpus_found = _differing("cpus", wanted, has, real.cpus, kept, above)
        mems_wanted = allocation.mems & topology.memory_nodes
        kept = real.mems & topology.memory_nodes == mems_wanted
        meant_mems, mems, mems_found = _differing(
            "mems", mems_wanted, real.effective_mems, real.mems, kept
        )
        quota, quota_found = _quota(allocation, real)
        if not (cpus_found or mems_found or quota_found):
            continue
        own = allocation.cpus | allocation.idle if allocation.owned else NO_CPUS
        own = own | state.kubelet.cpus_of(allocation.pod_uid, allocation.container, container_id)
        intrudes = bool(real.effective_cpus & (state.withheld - own))
        rank = 0 if intrudes else 1 if allocation.owned else 2
        found.append(
            Correction(
                container_id=container_id,
                name=allocation.full_name,
                cpus=cpus,
                mems=mems,
                quota=quota,
                meant_cpus=meant_cpus,
                meant_mems=meant_mems,
                has_cpus=real.effective_cpus,
                has_mems=real.effective_mems,
                found="; ".join(text for text in (cpus_found, mems_found, quota_found) if text),
                obstacle=real.above,
                rank=rank,
            )
        )
    return tuple(sorted(found, key=lambda correction: correction.order))


_Ids = TypeVar("_Ids", CPUSet, NUMASet)


def _differing(
    name: str, wanted: _Ids, has: _Ids, written: _Ids, kept: bool, above: str = ""
) -> tuple[_Ids, _Ids, str]:
    """What is meant, what of it to write, and what was found; all empty where it is as meant.

    The effective set is what counts. With nothing to write, since what was written is ``kept``, a
    cgroup above is in the way.
    """
    nothing = wanted - wanted
    if not wanted or has == wanted:
        return nothing, nothing, ""
    if kept:
        leaves = f"but a cgroup above leaves {has or 'none'} of it{above}"
        return wanted, nothing, f"cpuset.{name} is {written} as meant, {leaves}"
    return wanted, wanted, f"cpuset.{name} is {written or 'empty'}, meant {wanted}"


def _quota(allocation: Allocation, real: Observed) -> tuple[int | None, str]:
    """A quota to lift again: an owner of CPUs is not throttled on them."""
    if allocation.quota is None or real.quota is None or real.quota <= 0:
        return None, ""
    return NO_QUOTA, f"the CFS quota is {real.quota} µs, meant none"


_NO_TIME = "no time was left yet"


def resync(
    machine: Machine,
    prior: NodeState,
    pods: Pods | Iterable[PodSandbox],
    containers: Iterable[Container],
    reading: Reading | None = None,
    now: float = 0.0,
    in_time: Callable[[], bool] = lambda: True,
) -> Resynced:
    """Build a fresh state from what really runs.

    Known containers first, owners of CPUs before others, then those that carry our ``assigned``
    annotation (the checkpoint was lost), then strangers, which are decided like new ones, in order
    of namespace, pod, container and id. A stranger that is refused keeps running unpinned: a
    running container cannot be refused any more. Other programs' pins are judged by the cpuset that
    the runtime has now. A stranger for which no time is left stays as it is, for `take_in`.
    ``in_time`` is called before each stranger; once it says no, the others are left undecided.
    """
    by_pod = pods if isinstance(pods, Pods) else Pods.of(pods)
    uids_of = by_pod.uids
    live = {c.id: c for c in containers if c.pod_id in uids_of}
    problems: list[str] = []
    disbelieved: list[str] = []
    kept, strangers = _keep(machine, prior, by_pod, live, problems, disbelieved)
    uids = {uid: pod_id for pod_id, uid in uids_of.items()}
    records = [
        record if record.pod_id == uids[uid] else replace(record, pod_id=uids[uid])
        for uid, record in prior.pods.items()
        if uid in uids
    ]
    state = build(kept, records, prior.serial, prior.kubelet)
    for ended in _ended(prior, uids, live) if machine.settings.kept_seconds else ():
        if not (ended.cpus | ended.idle) & (state.withheld | state.listed_cpus):
            state = state.with_allocation(ended)
            if not ended.ended:
                state = state.with_kept(ended.container_id, now)
    adopted = [a.container_id for a in kept]
    resized: list[tuple[Allocation, Trace]] = []
    for allocation in kept:
        # One that carries the annotation alone was read from its present size.
        container = live[allocation.container_id]
        if container.id not in prior.allocations:
            continue
        size = other_size(allocation, container.resources)
        if size is None:
            continue
        pod, container = by_pod[container.pod_id], replace(container, resources=size)
        found = resized_to(machine, state, pod, container, reading, now)
        if isinstance(found, Refused):
            problems.append(f"resized while we were away and keeps what it has: {found.message}")
        else:
            state, _ = with_size(machine, state, found[0])
            resized.append(found)
    pool = state.pool(machine.topology, machine.settings)
    gap: list[str] = []
    unexplained: list[str] = []
    decisions: list[Decision] = []
    # A second container of that name in the pod would take the first one's place.
    names = Counter([(c.pod_id, c.name) for c in live.values()] if strangers else ())
    calm: list[Allocation] = []
    base = state
    ordered = _ordered(by_pod, strangers)
    undecided: list[tuple[PodSandbox, Container]] = []
    for number, (pod, stranger) in enumerate(ordered):
        if not in_time():
            undecided = ordered[number:]
            problems.append(
                f"{len(undecided)} containers that started while we were away are decided after "
                "the answer, since no time was left"
            )
            break
        container, held = _as_it_runs(machine, state, pool, stranger)
        resolved = machine.resolve(pod, container)
        if names[container.pod_id, container.name] == 1:
            alone = left_alone(machine, state.kubelet, pod, container, now, resolved)
            if alone is not None:
                calm.append(alone)
                continue
        decision = admit(
            machine, state, pod, container, reading, now, held,
            running=True, resolved=resolved,
        )  # fmt: skip
        if isinstance(decision, Refused):
            decisions.append(decision)
            problems.append(f"started while we were away and stays unpinned: {decision.message}")
            state = state.with_allocation(_unpinned(pod, container, decision.reason, now))
            gap.append(container.id)
            continue
        state = decision.state
        if decision.updates:
            decisions.append(decision)
        else:
            # A thousand states at once would take more memory than the rest of the agent.
            decisions.append(replace(decision, state=base))
        if decision.allocation.kind is Kind.FOREIGN:
            unexplained.append(decision.allocation.full_name)
        elif decision.allocation.kind is not Kind.UNBOUND:
            gap.append(container.id)
    state = state.with_allocation(*calm) if calm else state
    if undecided:
        waiting = [_undecided(pool, state.kubelet.shared, now, *one) for one in undecided]
        every = [*state.allocations.values(), *waiting]
        state = build(every, state.pods.values(), state.serial, state.kubelet)
    updates, repaired = _updates(machine, state, live, frozenset(adopted))
    return Resynced(
        state=state,
        change=StateChange(
            tuple({**prior.allocations, **state.allocations}), tuple({**prior.pods, **state.pods})
        ),
        updates=updates,
        adopted=tuple(sorted(adopted)),
        repaired=repaired,
        gap=tuple(sorted(gap)),
        removed=tuple(sorted(i for i in prior.allocations if i not in live)),
        problems=tuple(problems),
        decisions=tuple(decisions),
        left_alone=tuple(calm),
        resized=tuple(resized),
        disbelieved=tuple(disbelieved),
        unexplained=tuple(unexplained),
        undecided=tuple(undecided),
    )


def _ended(
    prior: NodeState, uids: Collection[str], live: Mapping[str, Container]
) -> list[Allocation]:
    """What pods keep of containers that ended, some of them while we were away."""
    return [
        allocation
        for container_id, allocation in sorted(prior.allocations.items())
        if allocation.kept and container_id not in live and allocation.pod_uid in uids
    ]


def without_answer(outcome: Resynced, unsure: Collection[str]) -> Resynced:
    """Tell containers that our answer never reached from those that another program changed.

    ``unsure`` were decided and not seen to start before the link was lost; those of them that the
    runtime had elsewhere are gap containers.
    """
    missed = [i for i in outcome.repaired if i in unsure]
    if not missed:
        return outcome
    return replace(
        outcome,
        repaired=tuple(i for i in outcome.repaired if i not in unsure),
        gap=tuple(sorted((*outcome.gap, *missed))),
    )


def take_in(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: Reading | None,
    now: float,
) -> Met:
    """Decide about a container that runs and was never decided about.

    Runtimes whose NRI is older than 0.7 can lose the creation of a container that falls into a
    registration (nri#63); its start tells of it. For others `resync` had no time. As at a
    synchronisation, it cannot be refused any more.
    """
    pool = state.pool(machine.topology, machine.settings)
    seen, held = _as_it_runs(machine, state, pool, container)
    decision = admit(machine, state, pod, seen, reading, now, held, running=True)
    if not isinstance(decision, Refused):
        after, change = decision.state, decision.change
    elif container.id in state.allocations:
        return Met(decision=decision, state=state, change=NO_CHANGE)
    else:
        after = state.with_allocation(_unpinned(pod, container, decision.reason, now))
        change = StateChange((container.id,), (pod.uid,))
    pool = after.pool(machine.topology, machine.settings)
    own = difference(machine, after, after.allocations[container.id], pool, container)
    others = pool_updates(machine, state, after, skip=container.id)
    updates = others if own is None else (own, *others)
    return Met(decision=decision, state=after, change=change, updates=updates)


def _ordered(pods: Pods, strangers: Iterable[Container]) -> list[tuple[PodSandbox, Container]]:
    """Strangers with their pods, by namespace, pod, container and id."""
    found = [(pods[container.pod_id], container) for container in strangers]
    return sorted(found, key=lambda one: (one[0].full_name, one[1].name, one[1].id))


def _as_it_runs(
    machine: Machine, state: NodeState, pool: CPUSet, container: Container
) -> tuple[Container, CPUSet]:
    """A running stranger as `admit` wants to see it, and the CPUs it may keep."""
    if not container.resources.cpus:
        return container, NO_CPUS
    held = pinned_to(container.resources.cpus)
    if not held <= ownable(machine, state):
        held = NO_CPUS
    if covers(container.resources.cpus, pool, state.kubelet.shared):
        # No other program's pin: we narrowed it before the checkpoint was lost, and it holds what
        # everybody shares.
        container = replace(container, resources=replace(container.resources, cpus=""))
    return container, held


def is_undecided(allocation: Allocation) -> bool:
    """Whether no decision was made yet about a container that runs."""
    return _NO_TIME in allocation.reason


def _undecided(
    pool: CPUSet,
    shared: Collection[CPUSet],
    now: float,
    pod: PodSandbox,
    container: Container,
) -> Allocation:
    """What a stranger has until it is decided about: what it had, and nothing is allocated."""
    cpus = container.resources.cpus
    if not cpus or covers(cpus, pool, shared):
        return _unpinned(pod, container, _NO_TIME, now)
    waiting = _unpinned(pod, container, _NO_TIME, now, Kind.FOREIGN)
    return replace(waiting, pinned=pinned_to(cpus))


def _keep(
    machine: Machine,
    prior: NodeState,
    by_pod: Pods,
    live: Mapping[str, Container],
    problems: list[str],
    disbelieved: list[str],
) -> tuple[list[Allocation], list[Container]]:
    """Sort the live containers into what is known and strangers."""
    marker = f"{machine.settings.prefix}/{ASSIGNED}"
    candidates: list[tuple[int, bool, str, Allocation]] = []
    strangers: list[Container] = []
    for container_id, container in live.items():
        allocation = prior.allocations.get(container_id)
        if allocation is not None and not allocation.preferred and is_undecided(allocation):
            allocation = None
        doubt = 0
        if allocation is None and marker in container.annotations:
            text, pod = container.annotations[marker], by_pod[container.pod_id]
            # Three lists and a sentence: what is longer is not of our writing.
            found = (
                adopt(machine, text, pod, container)
                if len(text) <= 2 * machine.list_limit
                else f"has {len(text)} characters, more than ours can have"
            )
            if isinstance(found, str):
                name = f"{pod.full_name}/{container.name}"
                disbelieved.append(f"{name}: its annotation {marker} {found}: decided anew")
            else:
                allocation = found
                doubt = 1 if is_signed(text, container_id, machine.key) else 2
        if allocation is None:
            strangers.append(container)
            continue
        candidates.append((doubt, not allocation.owned, container_id, allocation))
    # What the prior state knows, then what we signed, then what anybody may have written; owners
    # first, then by id.
    candidates.sort()  # no two have one id, so allocations are not compared
    taken = listed = 0
    usable = NodeState(kubelet=prior.kubelet).pool_bits(machine.topology, machine.settings)
    kept: list[Allocation] = []
    lists: set[tuple[str, CPUSet]] = set()
    for _, _, container_id, allocation in candidates:
        wants = allocation.cpus.bits | allocation.idle.bits
        if allocation.soft or not (wants or allocation.owned):
            kept.append(allocation)  # a shared container is in no other's way
            continue
        own = allocation.exclusive_list
        if own in lists:
            kept.append(allocation)  # a container of its pod has that list too
            continue
        clash = wants & taken
        if allocation.owned:
            clash |= wants & listed
        gone = allocation.cpus - machine.topology.possible
        last = allocation.owned and not usable & ~(taken | wants)
        if clash or gone or last:
            what = (
                f"exclusive {cpus_text(CPUSet.from_bits(clash))} of another container"
                if clash
                else f"{cpus_text(gone)}, which the machine does not have"
                if gone
                else "the last CPUs of the shared pool"
            )
            problems.append(f"{allocation.full_name} claims {what}: decided anew")
            strangers.append(live[container_id])
            continue
        if own is not None:
            taken |= wants
            lists.add(own)
        else:
            listed |= wants if allocation.kind is Kind.EXPLICIT else 0
        kept.append(allocation)
    pool = CPUSet.from_bits(usable & ~taken)
    return [
        _judged(prior, a, live[a.container_id], pool) if a.kind is Kind.FOREIGN else a for a in kept
    ], strangers


def _judged(
    prior: NodeState, allocation: Allocation, container: Container, pool: CPUSet
) -> Allocation:
    """Another program's pin by the cpuset of now; a container with a grant stays the kubelet's."""
    grants = prior.kubelet
    if grants.cpus_of(allocation.pod_uid, allocation.container, allocation.container_id):
        pinned = pinned_to(container.resources.cpus)
        return replace(allocation, pinned=pinned) if pinned else allocation
    return judged(allocation, container.resources.cpus, pool, grants.shared)


def _unpinned(
    pod: PodSandbox, container: Container, why: str, now: float, kind: Kind = Kind.UNBOUND
) -> Allocation:
    return Allocation(
        **identity(pod, container),
        kind=kind,
        preferred=False,
        reason=f"not pinned: {why}, and it was running already",
        since=now,
    )


def _updates(
    machine: Machine,
    state: NodeState,
    live: Mapping[str, Container],
    adopted: frozenset[str],
) -> tuple[tuple[ContainerUpdate, ...], tuple[str, ...]]:
    """What to send so that every container has what it should, and which known ones differed."""
    topology = machine.topology
    pool, withheld = state.pool(topology, machine.settings), state.withheld_bits
    updates: list[ContainerUpdate] = []
    repaired: list[str] = []
    texts: dict[int, str] = {}
    for container_id, allocation in sorted(state.allocations.items()):
        key = group_of(allocation)
        if allocation.ended:
            continue
        if key is not None:
            # Hundreds follow the pool in few groups, and most have what they should.
            if key not in texts:
                texts[key] = str(effective_cpus(allocation, pool, topology, withheld))
            has = live[container_id].resources
            if has.cpus == texts[key] and has.mems == str(allocation.mems) and not allocation.quota:
                continue
        update = difference(machine, state, allocation, pool, live[container_id])
        if update is not None:
            updates.append(update)
            if container_id in adopted:
                repaired.append(container_id)
    return tuple(updates), tuple(repaired)


def difference(
    machine: Machine, state: NodeState, allocation: Allocation, pool: CPUSet, container: Container
) -> ContainerUpdate | None:
    """What to send for one container so that it has what it should; None when it has it."""
    if allocation.kind is Kind.FOREIGN:
        return None
    resources = container.resources
    wanted = effective_cpus(allocation, pool, machine.topology, state.withheld_bits)
    if not wanted and allocation.kind is Kind.UNBOUND and resources.cpus:
        # It was narrowed while others owned CPUs; none does any more.
        wanted = pool
    cpus = str(wanted) if wanted and not same_set(resources.cpus, wanted) else ""
    mems = (
        str(allocation.mems)
        if allocation.mems and not same_set(resources.mems, allocation.mems)
        else ""
    )
    lift = allocation.quota is not None and (resources.cpu_quota or 0) > 0
    if not (cpus or mems or lift):
        return None
    return ContainerUpdate(
        container_id=allocation.container_id,
        cpus=cpus,
        mems=mems,
        cpu_quota=NO_QUOTA if lift else None,
        # CRI-O fails the whole synchronisation for one container that has just gone.
        ignore_failure=True,
    )
