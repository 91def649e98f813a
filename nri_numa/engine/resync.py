"""What really runs against what is meant: after a lost link, and while it runs.

The runtime is the truth for *what is*, the prior state (from memory or from the checkpoint) for
*what was meant*. No running container moves: what is known keeps what it has, and an update is only
sent where the runtime has something else than was meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import exclusive_candidate_cpus
from nri_numa.engine.admit import admit, unpinned_allocation
from nri_numa.engine.assigned import ASSIGNED_KEY, adopt_assignment, is_signed
from nri_numa.engine.captions import UNDECIDED_CAPTION, rejected_running_caption
from nri_numa.engine.decision import (
    Decision,
    DecisionTrace,
    MeasuredFree,
    NodeModel,
    Rejected,
    Resynced,
    RunningAdmission,
)
from nri_numa.engine.desired import (
    DesiredState,
    find_drift,
    recorded_actual,
    updates_between,
)
from nri_numa.engine.foreign_pins import (
    is_shared_pool_cpuset,
    parse_foreign_cpuset,
    reclassify_cpuset,
)
from nri_numa.engine.resize import changed_resources, with_size
from nri_numa.engine.resize import resize_to_current_resources as resized_to
from nri_numa.engine.state import (
    Allocation,
    ContainerKind,
    NodeState,
    build_node_state,
    container_identity,
    shared_group_key,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import cpus_text
from nri_numa.model.reasons import RejectionReason
from nri_numa.model.workload import (
    NO_CHANGE,
    Container,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    StateChange,
)


def rebuild_node_state(  # noqa: C901 - not cut yet
    machine: NodeModel,
    prior: NodeState,
    pods: PodTable | Iterable[PodSandbox],
    containers: Iterable[Container],
    reading: MeasuredFree | None = None,
    now: float = 0.0,
    in_time: Callable[[], bool] = lambda: True,
) -> Resynced:
    """Build a fresh state from what really runs.

    Known containers first, owners of CPUs before others, then those that carry our ``assigned``
    annotation (the checkpoint was lost), then strangers, which are decided like new ones, in order
    of namespace, pod, container and id. A stranger that is refused keeps running unpinned: a
    running container cannot be refused any more. Other programs' pins are judged by the cpuset that
    the runtime has now. A stranger for which no time is left stays as it is, for `admit_running`.
    ``in_time`` is called before each stranger; once it says no, the others are left undecided.
    """
    by_pod = pods if isinstance(pods, PodTable) else PodTable.from_pods(pods)
    uids_of = by_pod.uids
    live = {c.id: c for c in containers if c.pod_id in uids_of}
    problems: list[str] = []
    disbelieved: list[str] = []
    kept, strangers = _match_known_containers(machine, prior, by_pod, live, problems, disbelieved)
    uids = {uid: pod_id for pod_id, uid in uids_of.items()}
    records = [
        record if record.pod_id == uids[uid] else replace(record, pod_id=uids[uid])
        for uid, record in prior.pods.items()
        if uid in uids
    ]
    state = build_node_state(kept, records, prior.serial, prior.kubelet)
    for ended in (
        _ended_reservations(prior, uids, live) if machine.settings.reservation_seconds else ()
    ):
        if not (ended.cpus | ended.idle_siblings) & (state.unavailable_cpus | state.listed_cpus):
            state = state.with_allocation(ended)
            if not ended.reserved_at:
                state = state.with_reservation(ended.container_id, now)
    adopted = [a.container_id for a in kept]
    resized: list[tuple[Allocation, DecisionTrace]] = []
    for allocation in kept:
        # One that carries the annotation alone was read from its present size.
        container = live[allocation.container_id]
        if container.id not in prior.allocations:
            continue
        size = changed_resources(allocation, container.resources)
        if size is None:
            continue
        pod, container = by_pod[container.pod_id], replace(container, resources=size)
        found = resized_to(machine, state, pod, container, reading, now)
        if isinstance(found, Rejected):
            problems.append(f"resized while we were away and keeps what it has: {found.message}")
        else:
            state, _ = with_size(machine, state, found[0])
            resized.append(found)
    pool = DesiredState(machine, state).pool
    gap: list[str] = []
    unexplained: list[str] = []
    decisions: list[Decision] = []
    # A second container of that name in the pod would take the first one's place.
    names = Counter([(c.pod_id, c.name) for c in live.values()] if strangers else ())
    calm: list[Allocation] = []
    base = state
    ordered = _sort_unknown(by_pod, strangers)
    undecided: list[tuple[PodSandbox, Container]] = []
    for number, (pod, stranger) in enumerate(ordered):
        if not in_time():
            undecided = ordered[number:]
            problems.append(
                f"{len(undecided)} containers that started while we were away are decided after "
                "the answer, since no time was left"
            )
            break
        container, held = _running_request(machine, state, pool, stranger)
        resolved = machine.options_resolver(pod, container)
        if names[container.pod_id, container.name] == 1:
            alone = unpinned_allocation(machine, state.kubelet, pod, container, now, resolved)
            if alone is not None:
                calm.append(alone)
                continue
        decision = admit(
            machine, state, pod, container, reading, now, held,
            running=True, resolved=resolved,
        )  # fmt: skip
        if isinstance(decision, Rejected):
            decisions.append(decision)
            problems.append(f"started while we were away and stays unpinned: {decision.message}")
            state = state.with_allocation(
                _unpinned_allocation(pod, container, decision.reason, now)
            )
            gap.append(container.id)
            continue
        state = decision.state
        if decision.updates:
            decisions.append(decision)
        else:
            # A thousand states at once would take more memory than the rest of the agent.
            decisions.append(replace(decision, state=base))
        if decision.allocation.kind is ContainerKind.FOREIGN:
            unexplained.append(decision.allocation.full_name)
        elif decision.allocation.kind is not ContainerKind.UNPINNED:
            gap.append(container.id)
    state = state.with_allocation(*calm) if calm else state
    if undecided:
        waiting = [
            _undecided_allocation(pool, state.kubelet.shared, now, *one) for one in undecided
        ]
        every = [*state.allocations.values(), *waiting]
        state = build_node_state(every, state.pods.values(), state.serial, state.kubelet)
    # What we have known until now we may have narrowed, for an owner that is gone.
    desired = DesiredState(machine, state, narrowed_at=now)
    updates, repaired = _resync_updates(desired, live, frozenset(adopted))
    return Resynced(
        state=state,
        change=StateChange(
            tuple({**prior.allocations, **state.allocations}), tuple({**prior.pods, **state.pods})
        ),
        updates=updates,
        adopted=tuple(sorted(adopted)),
        repaired=repaired,
        missed_starts=tuple(sorted(gap)),
        removed=tuple(sorted(i for i in prior.allocations if i not in live)),
        problems=tuple(problems),
        decisions=tuple(decisions),
        unpinned=tuple(calm),
        resized=tuple(resized),
        rejected_annotations=tuple(disbelieved),
        unknown_cpusets=tuple(unexplained),
        undecided=tuple(undecided),
    )


def _ended_reservations(
    prior: NodeState, uids: Collection[str], live: Mapping[str, Container]
) -> list[Allocation]:
    """What pods keep of containers that ended, some of them while we were away."""
    return [
        allocation
        for container_id, allocation in sorted(prior.allocations.items())
        if allocation.is_reservable and container_id not in live and allocation.pod_uid in uids
    ]


def reclassify_unanswered_containers(outcome: Resynced, unsure: Collection[str]) -> Resynced:
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
        missed_starts=tuple(sorted((*outcome.missed_starts, *missed))),
    )


def admit_running(
    machine: NodeModel,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: MeasuredFree | None,
    now: float,
) -> RunningAdmission:
    """Decide about a container that runs and was never decided about.

    Runtimes whose NRI is older than 0.7 can lose the creation of a container that falls into a
    registration (nri#63); its start tells of it. For others `rebuild_node_state` had no time. As at
    a synchronisation, it cannot be refused any more.
    """
    before = DesiredState(machine, state)
    seen, held = _running_request(machine, state, before.pool, container)
    decision = admit(machine, state, pod, seen, reading, now, held, running=True)
    if not isinstance(decision, Rejected):
        after, change = decision.state, decision.change
    elif container.id in state.allocations:
        return RunningAdmission(decision=decision, state=state, change=NO_CHANGE)
    else:
        after = state.with_allocation(_unpinned_allocation(pod, container, decision.reason, now))
        change = StateChange((container.id,), (pod.uid,))
    desired = DesiredState(machine, after)
    allocation, has = after.allocations[container.id], container.resources
    actual = recorded_actual(has.cpus, has.mems, has.cpu_quota)
    drift = find_drift(desired, allocation, actual, online_only=False)
    others = updates_between(before, desired, skip=container.id)
    updates = others if drift is None else (drift.to_update, *others)
    return RunningAdmission(decision=decision, state=after, change=change, updates=updates)


def _sort_unknown(
    pods: PodTable, strangers: Iterable[Container]
) -> list[tuple[PodSandbox, Container]]:
    """Strangers with their pods, by namespace, pod, container and id."""
    found = [(pods[container.pod_id], container) for container in strangers]
    return sorted(found, key=lambda one: (one[0].full_name, one[1].name, one[1].id))


def _running_request(
    machine: NodeModel, state: NodeState, pool: CPUSet, container: Container
) -> tuple[Container, CPUSet]:
    """A running stranger as `admit` wants to see it, and the CPUs it may keep."""
    if not container.resources.cpus:
        return container, NO_CPUS
    held = parse_foreign_cpuset(container.resources.cpus)
    if not held <= exclusive_candidate_cpus(DesiredState(machine, state)):
        held = NO_CPUS
    if is_shared_pool_cpuset(container.resources.cpus, pool, state.kubelet.shared):
        # No other program's pin: we narrowed it before the checkpoint was lost, and it holds what
        # everybody shares.
        container = replace(container, resources=replace(container.resources, cpus=""))
    return container, held


def _undecided_allocation(
    pool: CPUSet,
    shared: Collection[CPUSet],
    now: float,
    pod: PodSandbox,
    container: Container,
) -> Allocation:
    """What a stranger has until it is decided about: what it had, and nothing is allocated."""
    cpus = container.resources.cpus
    if not cpus or is_shared_pool_cpuset(cpus, pool, shared):
        return _unpinned_allocation(pod, container, None, now)
    waiting = _unpinned_allocation(pod, container, None, now, ContainerKind.FOREIGN)
    return replace(waiting, foreign_cpus=parse_foreign_cpuset(cpus))


def _match_known_containers(
    machine: NodeModel,
    prior: NodeState,
    by_pod: PodTable,
    live: Mapping[str, Container],
    problems: list[str],
    disbelieved: list[str],
) -> tuple[list[Allocation], list[Container]]:
    """Sort the live containers into what is known and strangers."""
    marker = f"{machine.settings.prefix}/{ASSIGNED_KEY}"
    candidates: list[tuple[int, bool, str, Allocation]] = []
    strangers: list[Container] = []
    for container_id, container in live.items():
        allocation = prior.allocations.get(container_id)
        if allocation is not None and allocation.is_undecided:
            allocation = None
        doubt = 0
        if allocation is None and marker in container.annotations:
            text, pod = container.annotations[marker], by_pod[container.pod_id]
            # Three lists and a sentence: what is longer is not of our writing.
            found = (
                adopt_assignment(machine, text, pod, container)
                if len(text) <= 2 * machine.max_list_chars
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
        candidates.append((doubt, not allocation.exclusive, container_id, allocation))
    # What the prior state knows, then what we signed, then what anybody may have written; owners
    # first, then by id.
    candidates.sort()  # no two have one id, so allocations are not compared
    taken = listed = 0
    usable = DesiredState(machine, NodeState(kubelet=prior.kubelet)).pool.bits
    kept: list[Allocation] = []
    lists: set[tuple[str, CPUSet]] = set()
    for _, _, container_id, allocation in candidates:
        wants = allocation.cpus.bits | allocation.idle_siblings.bits
        if allocation.yields_to_exclusive or not (wants or allocation.exclusive):
            kept.append(allocation)  # a shared container is in no other's way
            continue
        own = allocation.exclusive_list
        if own in lists:
            kept.append(allocation)  # a container of its pod has that list too
            continue
        clash = wants & taken
        if allocation.exclusive:
            clash |= wants & listed
        gone = allocation.cpus - machine.topology.possible
        last = allocation.exclusive and not usable & ~(taken | wants)
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
            listed |= wants if allocation.kind is ContainerKind.LISTED else 0
        kept.append(allocation)
    pool = CPUSet.from_bits(usable & ~taken)
    return [
        _refresh_foreign_allocation(prior, a, live[a.container_id], pool)
        if a.kind is ContainerKind.FOREIGN
        else a
        for a in kept
    ], strangers


def _refresh_foreign_allocation(
    prior: NodeState, allocation: Allocation, container: Container, pool: CPUSet
) -> Allocation:
    """Another program's pin by the cpuset of now; a container with a grant stays the kubelet's."""
    grants = prior.kubelet
    if grants.cpus_of(allocation.pod_uid, allocation.container, allocation.container_id):
        pinned = parse_foreign_cpuset(container.resources.cpus)
        return replace(allocation, foreign_cpus=pinned) if pinned else allocation
    return reclassify_cpuset(allocation, container.resources.cpus, pool, grants.shared)


def _unpinned_allocation(
    pod: PodSandbox,
    container: Container,
    rejected_for: RejectionReason | None,
    now: float,
    kind: ContainerKind = ContainerKind.UNPINNED,
) -> Allocation:
    """What a running container has that was rejected, or that no decision was made about yet."""
    return Allocation(
        **container_identity(pod, container),
        kind=kind,
        aligned=False,
        reason=UNDECIDED_CAPTION
        if rejected_for is None
        else rejected_running_caption(rejected_for),
        is_undecided=rejected_for is None,
        unpinned_for=rejected_for,
        assigned_at=now,
    )


def _resync_updates(
    desired: DesiredState, live: Mapping[str, Container], adopted: frozenset[str]
) -> tuple[tuple[ContainerUpdate, ...], tuple[str, ...]]:
    """What to send so that every container has what it should, and which known ones differed."""
    updates: list[ContainerUpdate] = []
    repaired: list[str] = []
    texts: dict[int, str] = {}
    for container_id, allocation in sorted(desired.state.allocations.items()):
        if allocation.reserved_at:
            continue
        record, key = live[container_id].resources, shared_group_key(allocation)
        if key is not None:
            # Hundreds follow the pool in few groups, and most have what they should.
            if key not in texts:
                texts[key] = str(desired.cpuset_of(allocation))
            if (
                record.cpus == texts[key]
                and record.mems == str(allocation.mems)
                and not allocation.lifted_quota
            ):
                continue
        actual = recorded_actual(record.cpus, record.mems, record.cpu_quota)
        drift = find_drift(desired, allocation, actual, online_only=False)
        if drift is not None:
            updates.append(drift.to_update)
            if container_id in adopted:
                repaired.append(container_id)
    return tuple(updates), tuple(repaired)
