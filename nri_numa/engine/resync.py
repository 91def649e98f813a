"""Synchronization of the node state with the runtime's containers.

The runtime is authoritative for actual values, the prior state (from memory or the checkpoint) for
desired ones. No running container moves: known containers keep their allocations, and an update is
sent only if the runtime's values differ from the desired ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import exclusive_candidate_cpus
from nri_numa.engine.admit import admit, unpinned_allocation
from nri_numa.engine.assigned import ASSIGNED_KEY, adopt_assignment, is_signed
from nri_numa.engine.captions import UNDECIDED_CAPTION, rejected_running_caption
from nri_numa.engine.decision import Decision, DecisionTrace, Rejected, Resynced, RunningAdmission
from nri_numa.engine.desired import (
    NodeSnapshot,
    drift_of_container,
    recorded_actual,
    updates_between,
)
from nri_numa.engine.foreign_pins import (
    is_shared_pool_cpuset,
    parse_foreign_cpuset,
    reclassify_cpuset,
)
from nri_numa.engine.pod_reservation import give_to_pod_pool, is_for_pod_pool
from nri_numa.engine.resize import (
    resize_to_current_resources,
    resources_if_resized,
    state_with_resized_container,
)
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
    NO_CHANGED_IDS,
    ChangedStateIds,
    Container,
    ContainerUpdate,
    PodSandbox,
    PodTable,
)


def rebuild_node_state(
    prior: NodeSnapshot,
    pods: PodTable,
    containers: Iterable[Container],
    in_time: Callable[[], bool] = lambda: True,
) -> Resynced:
    """Build a new state from the running containers.

    Known containers first, those with exclusive CPUs before others; then containers with the
    annotation ``assigned`` (the checkpoint was lost); then unknown containers, decided like new
    ones in order of namespace, pod, container and id. A rejected unknown container runs on
    unpinned, because a running container cannot be rejected. Pins of other programs are classified
    by the runtime's current cpuset. ``in_time`` is called before each unknown container; after
    False the rest stays undecided, for `admit_running`.
    """
    rebuild = _Rebuild(prior, pods, containers)
    candidates, strangers = rebuild.match_known()
    allocations = rebuild.resolve_conflicts(candidates, strangers)
    rebuild.restore_reservations(allocations)
    rebuild.resize_known(allocations)
    rebuild.admit_strangers(strangers, in_time)
    return rebuild.build_outcome(allocations)


class _Rebuild:
    """A state that is being rebuilt, and the facts to report about it."""

    def __init__(
        self, prior: NodeSnapshot, pods: PodTable, containers: Iterable[Container]
    ) -> None:
        self.machine, self.prior, self.pods = prior.machine, prior.state, pods
        self.live = {c.id: c for c in containers if c.pod_id in pods.uids}
        self.node = prior
        self.problems: list[str] = []
        self.rejected_annotations: list[str] = []
        self.resized: list[tuple[Allocation, DecisionTrace]] = []
        self.decisions: list[Decision] = []
        self.unpinned: list[Allocation] = []
        self.booked_count = 0  # of ``unpinned``
        self.missed_starts: list[str] = []
        self.unknown_cpusets: list[str] = []
        self.undecided: list[tuple[PodSandbox, Container]] = []

    def match_known(self) -> tuple[list[Allocation], list[Container]]:
        """Return allocations of live containers, the most trusted first, and unknown containers.

        Order: the prior state, signed annotations, unsigned annotations; in each those with
        exclusive CPUs first, then by id.
        """
        marker = f"{self.machine.settings.prefix}/{ASSIGNED_KEY}"
        candidates: list[tuple[int, bool, str, Allocation]] = []
        strangers: list[Container] = []
        for container_id, container in self.live.items():
            doubt, allocation = 0, self.prior.allocations.get(container_id)
            if allocation is not None and allocation.is_undecided:
                allocation = None
            if allocation is None and marker in container.annotations:
                doubt, allocation = self._read_annotation(marker, container)
            if allocation is None:
                strangers.append(container)
            else:
                candidates.append((doubt, not allocation.exclusive, container_id, allocation))
        candidates.sort()  # no two have one id, so allocations are not compared
        return [allocation for *_, allocation in candidates], strangers

    def _read_annotation(self, marker: str, container: Container) -> tuple[int, Allocation | None]:
        """Read a container's annotation, signed (1) or not (2); None if it is rejected."""
        text, pod = container.annotations[marker], self.pods[container.pod_id]
        # The agent writes three lists and a sentence; a longer text is not its own.
        assignment = (
            adopt_assignment(self.machine, text, pod, container)
            if len(text) <= 2 * self.machine.max_list_chars
            else f"has {len(text)} characters, more than an annotation of nri-numa can have"
        )
        if isinstance(assignment, str):
            subject = f"{pod.full_name}/{container.name}: its annotation {marker}"
            self.rejected_annotations.append(f"{subject} {assignment}: decided anew")
            return 0, None
        return 1 if is_signed(text, container.id, self.machine.key) else 2, assignment

    def resolve_conflicts(
        self, candidates: Iterable[Allocation], strangers: list[Container]
    ) -> list[Allocation]:
        """Keep allocations without conflicts; containers of the others become unknown."""
        exclusive_bits = listed_bits = 0
        usable = self.node.with_state(NodeState(kubelet=self.prior.kubelet)).pool.bits
        allocations: list[Allocation] = []
        lists: set[tuple[str, CPUSet] | None] = set()  # exclusive ones
        for allocation in candidates:
            claimed_bits = allocation.cpus.bits | allocation.idle_siblings.bits
            own_list = allocation.exclusive_owners_key
            # A shared container is in no other's way, and containers of a pod share a list.
            is_shared = allocation.yields_to_exclusive or not (claimed_bits or own_list)
            if is_shared or own_list in lists:
                allocations.append(allocation)
                continue
            claim = ""
            if clash := claimed_bits & (exclusive_bits | (listed_bits if own_list else 0)):
                claim = f"exclusive {cpus_text(CPUSet.from_bits(clash))} of another container"
            elif missing_cpus := allocation.cpus - self.machine.topology.possible:
                claim = f"{cpus_text(missing_cpus)}, which the machine does not have"
            elif own_list and not usable & ~(exclusive_bits | claimed_bits):
                claim = "the last CPUs of the shared pool"
            if claim:
                self.problems.append(f"{allocation.full_name} claims {claim}: decided anew")
                strangers.append(self.live[allocation.container_id])
                continue
            allocations.append(allocation)
            if own_list:
                exclusive_bits |= claimed_bits
                lists.add(own_list)
            else:
                listed_bits |= claimed_bits
        pool = CPUSet.from_bits(usable & ~exclusive_bits)
        return [
            a if a.kind is not ContainerKind.FOREIGN else self._refresh_foreign(a, pool)
            for a in allocations
        ]

    def _refresh_foreign(self, allocation: Allocation, pool: CPUSet) -> Allocation:
        """Reclassify a foreign container by its current cpuset; with a grant it stays foreign."""
        grants, text = self.prior.kubelet, self.live[allocation.container_id].resources.cpus
        if grants.cpus_of(allocation.pod_uid, allocation.container, allocation.container_id):
            pinned = parse_foreign_cpuset(text)
            return replace(allocation, foreign_cpus=pinned) if pinned else allocation
        return reclassify_cpuset(allocation, text, pool, grants.shared)

    def restore_reservations(self, allocations: Iterable[Allocation]) -> None:
        """Start the state from known allocations, and restore pod reservations."""
        prior, pod_ids = self.prior, {uid: pod_id for pod_id, uid in self.pods.uids.items()}
        records = [
            record
            if record.pod_id == pod_ids[uid]
            else replace(record, pod_id=pod_ids[uid], stopped_at=0.0)
            for uid, record in prior.pods.items()
            if uid in pod_ids
        ]
        state = build_node_state(allocations, records, prior.serial, prior.kubelet)
        for container_id, a in sorted(prior.allocations.items()):
            if container_id in self.live or a.pod_uid not in pod_ids or not a.is_reservable:
                continue
            if a.pod_id not in self.pods.uids:  # its pod has a new sandbox
                a = replace(a, pod_id=pod_ids[a.pod_uid])
            if (a.cpus | a.idle_siblings) & (state.unavailable_cpus | state.listed_cpus):
                continue
            new_state = state.with_allocation(a)
            if is_for_pod_pool(new_state, a):
                state = give_to_pod_pool(self.node.with_state(new_state), a)
            elif self.machine.settings.reservation_seconds:
                state = new_state
                if not a.reserved_at:
                    state = state.with_reservation(a.container_id, self.node.now)
        self.node = self.node.with_state(state)

    def resize_known(self, allocations: Iterable[Allocation]) -> None:
        """Apply sizes of known containers that were resized meanwhile."""
        for allocation in allocations:
            # An allocation from the annotation has the present size already.
            if allocation.container_id not in self.prior.allocations:
                continue
            container = self.live[allocation.container_id]
            size = resources_if_resized(allocation, container.resources)
            if size is None:
                continue
            pod, container = self.pods[container.pod_id], replace(container, resources=size)
            resized = resize_to_current_resources(self.node, pod, container)
            if isinstance(resized, Rejected):
                self.problems.append(
                    f"resized while we were away and keeps what it has: {resized.message}"
                )
            else:
                self.node = self.node.with_state(
                    state_with_resized_container(self.node, pod, resized[0])[0]
                )
                self.resized.append(resized)

    def admit_strangers(self, strangers: Iterable[Container], in_time: Callable[[], bool]) -> None:
        """Decide about unknown containers as about new ones, while there is time."""
        prior = self.node
        ordered = sorted(
            [(self.pods[container.pod_id], container) for container in strangers],
            key=lambda item: (item[0].full_name, item[1].name, item[1].id),
        )
        # A second container of the same name would replace the first one's allocation.
        names = Counter([(c.pod_id, c.name) for c in self.live.values()] if ordered else ())
        for number, (pod, container) in enumerate(ordered):
            if not in_time():
                self.undecided = ordered[number:]
                self.problems.append(
                    f"{len(self.undecided)} containers that started while we were away are decided "
                    "after the answer, since no time was left"
                )
                break
            is_single = names[container.pod_id, container.name] == 1
            self._admit_stranger(prior, pod, container, is_single=is_single)
        self._book(self._undecided_allocation(prior.pool, *item) for item in self.undecided)

    def _book(self, undecided: Iterable[Allocation] = ()) -> None:
        """Allocate the unpinned containers, which is deferred until their charges matter."""
        allocations = [*self.unpinned[self.booked_count :], *undecided]
        if allocations:
            self.node = self.node.with_state(self.node.state.with_allocation(*allocations))
            self.booked_count = len(self.unpinned)

    def _admit_stranger(
        self, prior: NodeSnapshot, pod: PodSandbox, stranger: Container, *, is_single: bool
    ) -> None:
        if pod.resources.memory_limit and self.unpinned and self.unpinned[-1].pod_uid == pod.uid:
            self._book()  # a container of its pod affects it
        container, current_cpus = _container_and_keepable_cpus(self.node, prior.pool, stranger)
        resolved = self.machine.options_resolver(pod, container)
        if is_single:
            unpinned = unpinned_allocation(self.node, pod, container, resolved)
            if unpinned is not None:
                self.unpinned.append(unpinned)
                return
        self._book()
        node = self.node
        decision = admit(node, pod, container, current_cpus, running=True, resolved=resolved)
        if isinstance(decision, Rejected):
            self.decisions.append(decision)
            self.problems.append(
                f"started while we were away and stays unpinned: {decision.message}"
            )
            rejected = _unpinned_allocation(pod, container, decision.reason, node.now)
            self.node = node.with_state(node.state.with_allocation(rejected))
            self.missed_starts.append(container.id)
            return
        self.node, allocation = node.with_state(decision.state), decision.allocation
        # A thousand states would take more memory than the rest of the agent.
        kept_state = decision.state if decision.updates else prior.state
        self.decisions.append(replace(decision, state=kept_state))
        if allocation.kind is ContainerKind.FOREIGN:
            self.unknown_cpusets.append(allocation.full_name)
        elif allocation.kind is not ContainerKind.UNPINNED:
            self.missed_starts.append(container.id)

    def _undecided_allocation(
        self, pool: CPUSet, pod: PodSandbox, container: Container
    ) -> Allocation:
        """Build the allocation of an undecided container: its current cpuset, no charges."""
        cpus = container.resources.cpus
        allocation = _unpinned_allocation(pod, container, None, self.node.now)
        if is_shared_pool_cpuset(cpus, pool, self.node.state.kubelet.shared):
            return allocation
        pinned = parse_foreign_cpuset(cpus)
        return replace(allocation, kind=ContainerKind.FOREIGN, foreign_cpus=pinned)

    def build_outcome(self, allocations: Iterable[Allocation]) -> Resynced:
        """Build the outcome, with the updates to the desired state of every container."""
        prior, state = self.prior, self.node.state
        adopted = sorted([a.container_id for a in allocations])
        # Known containers may have been narrowed for a container that is gone.
        desired = replace(self.node, narrowed_at=self.node.now)
        updates, repaired = _resync_updates(desired, self.live, frozenset(adopted))
        return Resynced(
            state=state,
            change=ChangedStateIds(
                tuple({**prior.allocations, **state.allocations}),
                tuple({**prior.pods, **state.pods}),
            ),
            updates=updates,
            adopted=tuple(adopted),
            repaired=repaired,
            missed_starts=tuple(sorted(self.missed_starts)),
            removed=tuple(sorted(i for i in prior.allocations if i not in self.live)),
            problems=tuple(self.problems),
            decisions=tuple(self.decisions),
            unpinned=tuple(self.unpinned),
            resized=tuple(self.resized),
            rejected_annotations=tuple(self.rejected_annotations),
            unknown_cpusets=tuple(self.unknown_cpusets),
            undecided=tuple(self.undecided),
        )


def reclassify_repaired_as_missed_starts(outcome: Resynced, ids: Collection[str]) -> Resynced:
    """Report repaired containers as missed starts if the agent's answer never reached them.

    ``ids`` are containers that were decided, but not seen to start before the link was lost.
    """
    missed = [i for i in outcome.repaired if i in ids]
    if not missed:
        return outcome
    return replace(
        outcome,
        repaired=tuple(i for i in outcome.repaired if i not in ids),
        missed_starts=tuple(sorted((*outcome.missed_starts, *missed))),
    )


def admit_running(node: NodeSnapshot, pod: PodSandbox, container: Container) -> RunningAdmission:
    """Decide about a running container without a decision.

    Runtimes with NRI before 0.7 can lose the creation of a container during a registration
    (nri#63), and only report its start. For others `rebuild_node_state` had no time. A running
    container cannot be rejected.
    """
    state = node.state
    stranger, current_cpus = _container_and_keepable_cpus(node, node.pool, container)
    decision = admit(node, pod, stranger, current_cpus, running=True)
    if not isinstance(decision, Rejected):
        new_state, change = decision.state, decision.change
    elif container.id in state.allocations:
        return RunningAdmission(decision=decision, state=state, change=NO_CHANGED_IDS)
    else:
        rejected = _unpinned_allocation(pod, container, decision.reason, node.now)
        new_state = state.with_allocation(rejected)
        change = ChangedStateIds((container.id,), (pod.uid,))
    desired = node.with_state(new_state)
    allocation, resources = new_state.allocations[container.id], container.resources
    actual = recorded_actual(resources.cpus, resources.mems, resources.cpu_quota)
    drift = drift_of_container(desired, allocation, actual, online_only=False)
    other_updates = updates_between(node, desired, skip=container.id)
    updates = other_updates if drift is None else (drift.to_update, *other_updates)
    return RunningAdmission(decision=decision, state=new_state, change=change, updates=updates)


def _container_and_keepable_cpus(
    node: NodeSnapshot, pool: CPUSet, container: Container
) -> tuple[Container, CPUSet]:
    """Prepare an unknown container for `admit`; also return the CPUs it may keep."""
    if not container.resources.cpus:
        return container, NO_CPUS
    current_cpus = parse_foreign_cpuset(container.resources.cpus)
    if not current_cpus <= exclusive_candidate_cpus(node):
        current_cpus = NO_CPUS
    if is_shared_pool_cpuset(container.resources.cpus, pool, node.state.kubelet.shared):
        # Not a pin of another program: the agent narrowed it to the shared pool before the
        # checkpoint was lost.
        container = replace(container, resources=replace(container.resources, cpus=""))
    return container, current_cpus


def _unpinned_allocation(
    pod: PodSandbox, container: Container, rejected_for: RejectionReason | None, now: float
) -> Allocation:
    """Build the allocation of a running container that was rejected, or is not decided about."""
    return Allocation(
        **container_identity(pod, container),
        kind=ContainerKind.UNPINNED,
        aligned=False,
        reason=rejected_running_caption(rejected_for) if rejected_for else UNDECIDED_CAPTION,
        is_undecided=rejected_for is None,
        unpinned_for=rejected_for,
        assigned_at=now,
    )


def _resync_updates(
    desired: NodeSnapshot, live: Mapping[str, Container], adopted: frozenset[str]
) -> tuple[tuple[ContainerUpdate, ...], tuple[str, ...]]:
    """List updates to the desired state, and ids of known containers that differed."""
    updates: list[ContainerUpdate] = []
    repaired: list[str] = []
    texts: dict[int, str] = {}
    for container_id, allocation in sorted(desired.state.allocations.items()):
        if allocation.reserved_at:
            continue
        record, key = live[container_id].resources, shared_group_key(allocation)
        if key is not None:
            # Hundreds of containers follow the pool in few groups, and most need no update.
            if key not in texts:
                texts[key] = str(desired.cpuset_of(allocation))
            if (
                record.cpus == texts[key]
                and record.mems == str(allocation.mems)
                and not allocation.lifted_quota
            ):
                continue
        actual = recorded_actual(record.cpus, record.mems, record.cpu_quota, record.cpu_period)
        drift = drift_of_container(desired, allocation, actual, online_only=False)
        if drift is not None:
            updates.append(drift.to_update)
            if container_id in adopted:
                repaired.append(container_id)
    return tuple(updates), tuple(repaired)
