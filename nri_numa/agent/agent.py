"""The imperative shell: owner of the node state, with one plain method for each NRI event.

Every method runs to its end without an ``await``: decide → persist → swap → answer. Nothing else
writes the state, so nothing needs a lock, and a reader between two requests sees a whole decision
or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.containers import LiveContainers
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.drift_table import DriftTable
from nri_numa.agent.history import DecisionHistory
from nri_numa.agent.loop import DeferredTasks
from nri_numa.agent.reservations import PodReservations
from nri_numa.agent.room_searches import DeferredRoomSearches
from nri_numa.agent.starts import ContainerStarts
from nri_numa.engine import admit, pod_admission
from nri_numa.engine.decision import Admitted, Rejected, Resized
from nri_numa.engine.desired import updates_between
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.pod_reservation import with_pod_resized
from nri_numa.engine.rebalance import admit_by_moving
from nri_numa.engine.resize import resize_container
from nri_numa.engine.resync import (
    admit_running,
    rebuild_node_state,
    reclassify_repaired_as_missed_starts,
)
from nri_numa.engine.state import (
    STRICT_POLICIES,
    Allocation,
    ContainerKind,
    NodeState,
    PodRecord,
)
from nri_numa.machine.cgroups import CgroupReader, CgroupWrite, CgroupWriter, has_sandbox_cgroup
from nri_numa.model.cpuset import CPUSet, union_cpus
from nri_numa.model.workload import (
    NO_CHANGED_IDS,
    ChangedStateIds,
    Container,
    ContainerUpdate,
    KubeletGrants,
    PodSandbox,
    PodTable,
    Resources,
)
from nri_numa.observe.metrics import Metrics


class GrantSource:
    """Source of the grants of a kubelet with static managers; this one has none."""

    def refresh_kubelet_grants(self) -> KubeletGrants | None:
        """Read the kubelet's state files if changed; None if they agree with the node state."""
        return None

    def on_cpuset_rewritten(
        self, prior: Allocation, allocation: Allocation, requested: str, effective: str
    ) -> None:
        """Check a requested cpuset; ``effective`` is what applies instead, empty if nothing."""


class Agent:
    """Owns the state of the node, and the parts that write, correct and record.

    The keyword arguments are those of its parts.

    Attributes:
        current: the node state, which nothing else replaces.
        metrics: metrics of the process.
        containers: facts of live containers beside their allocations.
        cgroups: writes their cgroups.
        history: traces, rejections and notices of decisions.
        starts: corrects cgroups of starting containers.
        drift: actual cpusets that differ from the desired ones.
        reservations: releases pod reservations.
    """

    def __init__(
        self,
        current: CurrentState,
        writer: CgroupWriter,
        metrics: Metrics,
        *,
        kubelet: GrantSource = GrantSource(),  # noqa: B008 - without any state
        moves_memory: bool = False,
        sees_starts: bool = True,
        max_decided_requests: int = 0,
    ) -> None:
        tasks = DeferredTasks(current.clock)
        self.current, self.metrics, self._kubelet, self._tasks = current, metrics, kubelet, tasks
        self.containers = LiveContainers(moves_memory=moves_memory)
        self.cgroups = cgroups = CgroupUpdates(current, self.containers, writer, tasks, metrics)
        self.history = history = DecisionHistory(
            current, tasks, metrics, max_decided_requests=max_decided_requests
        )
        self.starts = ContainerStarts(
            current, cgroups, history, tasks, metrics, sees_starts=sees_starts
        )
        self.drift = DriftTable(current, metrics)
        self._room_searches = DeferredRoomSearches(
            current, cgroups, history, tasks, self.move_for_newcomer
        )
        self.reservations = PodReservations(
            current, cgroups, history, self._replace_state, self._forget_container
        )
        self._undecided: deque[tuple[PodSandbox, Container]] = deque()

    # --- events of the runtime --------------------------------------------------------------------

    def create_container(self, pod: PodSandbox, container: Container) -> Admitted | Rejected | None:
        """Decide about a container before it exists; None leaves it as it is."""
        allocations_before = self.current.state.allocations
        self.apply_grants(self._kubelet.refresh_kubelet_grants())
        decision = pod_admission.admit_pod(self.current.snapshot(), pod, container)
        if isinstance(decision, Rejected):
            decision = self._admit_by_releasing(decision)
            if isinstance(decision, Rejected):
                self.history.record_rejected(decision)
                if self.current.observe:
                    return None
                if decision.is_search_spent:
                    self._room_searches.add_rejected(decision)
                return decision
        else:
            allocation = decision.allocation
            may_be_reserved = allocation.exclusive or allocation.policy in STRICT_POLICIES
            self._replace_state(decision.state, decision.change, pod if may_be_reserved else None)
        for container_id in decision.change.containers:
            if container_id not in self.current.state.allocations:
                self.starts.report_if_never_started(allocations_before.get(container_id))
                self._forget_container(container_id)
        self.reservations.allow_late_starts(a for a in decision.released if not a.reserved_at)
        mems = decision.adjustment.mems or container.resources.mems
        self.containers.on_created(container, decision.adjustment.cpus, mems)
        self.history.record_admitted(decision)
        if self.current.observe:
            return None
        updates = decision.updates
        if decision.moves or not updates:
            return decision  # written before
        return replace(decision, updates=self.cgroups.write_updates(updates))

    def _admit_by_releasing(self, rejected: Rejected) -> Admitted | Rejected:
        """Admit by releasing soft reservations and failed creations, or else by moving."""
        decision = pod_admission.admit_by_releasing(
            self.current.snapshot(), rejected, self.reservations.failed_creations()
        )
        if isinstance(decision, Rejected):
            return self._admit_by_moving(rejected)
        self._replace_state(decision.state, decision.change, rejected.trace.pod)
        return decision

    def _admit_by_moving(self, rejected: Rejected) -> Admitted | Rejected:
        """Move containers that can be moved now; the same rejection if that is not enough."""
        node = self.current.snapshot()
        problems, ids = self.cgroups.movable_write_problems(), self.cgroups.immovable_by_state()
        decide = partial(admit_by_moving, node, rejected)
        decision = decide(ids | problems.keys())
        outcome: tuple[ContainerUpdate, ...] | str
        if isinstance(decision, Rejected):
            if not problems or isinstance(decide(ids), Rejected):
                return decision
            outcome = next(iter(problems.values()))
        else:
            self._replace_state(decision.state, decision.change, rejected.trace.pod)
            outcome = self._apply_moves(node.state, decision)
        if isinstance(outcome, str):
            return replace(rejected, room_text=f"no container could be moved: {outcome}")
        return replace(decision, updates=outcome)

    def move_for_newcomer(self, decision: Admitted) -> str:
        """Move containers for an expected one; returns the problem, or an empty text."""
        state_before = self.current.state
        self._replace_state(decision.state, decision.change)
        outcome = self._apply_moves(state_before, decision)
        if isinstance(outcome, str):
            return outcome
        self.cgroups.request_check_of_unsent(outcome)
        return ""

    def _apply_moves(
        self, state_before: NodeState, decision: Admitted
    ) -> tuple[ContainerUpdate, ...] | str:
        """Write the moves of a decision, or undo all of it if one cannot be written.

        Containers never overlap: others first lose the CPUs that are needed, then the moves are
        written, and only then the vacated CPUs return to the containers that share them.

        Returns the updates for the runtime, or the problem.
        """
        move_by_id = {m.after.container_id: m for m in reversed(decision.moves)}
        vacated_cpus = union_cpus(m.before.cpus for m in decision.moves if m.before.exclusive)
        updates = {u.container_id: u for u in decision.updates}
        other_updates = [u for i, u in updates.items() if i not in move_by_id]
        reduced_cpusets = [(u, CPUSet.parse(u.cpus) - vacated_cpus) for u in other_updates]
        unsent = self.cgroups.write_updates(
            [u._replace(cpus=str(cpus) or u.cpus) for u, cpus in reduced_cpusets]
        )
        outcomes = self.cgroups.write_cgroups(
            {
                i: CgroupWrite(self.containers.cgroup_places[i], updates[i].cpus, updates[i].mems)
                for i in move_by_id
            }
        )
        if problems := [outcome.problem for outcome in outcomes.values() if outcome.problem]:
            self._replace_state(
                replace(state_before, serial=self.current.state.serial + 1), decision.change
            )
            self.cgroups.repair_cgroups([i for i in updates if self.containers.is_settled(i)])
            self.cgroups.request_check(updates)
            return problems[0]
        gains = [u for u in other_updates if CPUSet.parse(u.cpus) & vacated_cpus]
        self._tasks.add(*(partial(self.cgroups.write_mark, i) for i in move_by_id))
        self.history.record_moves(decision.moves)
        merged = {u.container_id: u for u in (*unsent, *self.cgroups.schedule_cpu_return(gains))}
        return tuple(merged.values())

    def finish_migration(self, container_id: str) -> CgroupWrite:
        """Finish a migration; returns the write for the container's cgroup.

        Call `post_update_container` after the write. The kernel may take seconds for it, and the
        container's CPUs may change meanwhile.
        """
        self.containers.unconfirmed_ids.add(container_id)
        self.containers.write_counts[container_id] += 1
        allocation = self.current.state.allocations[container_id].with_migration_finished
        state = self.current.state.without_allocation(container_id).with_allocation(allocation)
        self._replace_state(state, ChangedStateIds((container_id,), (allocation.pod_uid,)))
        return CgroupWrite(self.containers.cgroup_places[container_id], "", str(allocation.mems))

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """Correct the cgroup of a starting container before its program runs."""
        if container.id in self.containers.ended:
            return
        self.containers.record_place(container)
        if container.id not in self.current.state.allocations:
            self._admit_unreported(pod, container)
        self.starts.on_cgroup_made(container.id)

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """Record that a container runs; from now on its cgroup is compared."""
        if container.id in self.containers.ended:
            return  # a program may end before the runtime reports that it runs
        self.containers.record_place(container)
        if container.id not in self.current.state.allocations:
            self._admit_unreported(pod, container)
        self.starts.on_running(container.id)
        if (a := self.current.state.allocations.get(container.id)) is not None and a.movable:
            self.current.notify()  # it may be moved from now on

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Resized | Rejected:
        """Decide about new resources of a live container."""
        self.apply_grants(self._kubelet.refresh_kubelet_grants())
        prior = self.current.state.allocations.get(container.id)
        outcome = resize_container(self.current.snapshot(), pod, container, requested)
        if isinstance(outcome, Rejected):
            self.history.record_rejected(outcome)
            return (
                Resized(state=self.current.state, container_update=None, trace=outcome.trace)
                if self.current.observe
                else outcome
            )
        if outcome.state is not self.current.state:
            self._replace_state(outcome.state, outcome.change, pod)
            allocation = self.current.state.allocations[container.id]
            self.history.record_resized(allocation, outcome.trace, prior)
            self.history.check_overlaps_of(prior)
            self.history.check_overlaps_of(allocation)
        effective = outcome.container_update.cpus if outcome.container_update is not None else ""
        if requested.cpus and prior is not None:
            allocation_after = self.current.state.allocations[container.id]
            rewritten = self._kubelet.on_cpuset_rewritten
            self._tasks.add(partial(rewritten, prior, allocation_after, requested.cpus, effective))
        if requested.cpus and effective:
            report = self.history.reporter.log_requested_cpuset_overridden
            self._tasks.add(partial(report, pod, container, requested.cpus, effective))
        if self.current.observe:
            return Resized(state=outcome.state, container_update=None, trace=outcome.trace)
        self.containers.unconfirmed_ids.add(container.id)
        return replace(outcome, updates=self.cgroups.write_updates(outcome.updates))

    def post_update_container(self, container_id: str) -> None:
        """Repair a cgroup after an update of the runtime, which may have written older values."""
        self.containers.unconfirmed_ids.discard(container_id)
        self._tasks.add(partial(self.cgroups.write_mark, container_id))
        if not self.current.observe:
            self.cgroups.repair_cgroups([container_id])
            self.cgroups.queue_systemd_sync([container_id])

    def stop_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        """Release a container's allocation; unknown ids are ordinary."""
        return self.cgroups.schedule_cpu_return(self._release_container(container_id))

    def remove_container(self, container_id: str) -> None:
        """Release a removed container; usually it was released when it stopped."""
        self.cgroups.request_check_of_unsent(
            self.cgroups.schedule_cpu_return(self._release_container(container_id))
        )

    def run_pod(self, pod: PodSandbox) -> None:
        """Reserve the exclusive CPUs of a pod that is placed as a whole."""
        plan = pod_admission.reserve_for_sandbox(self.current.snapshot(), pod)
        if plan.state is not self.current.state or self.current.state.may_reserve_for_pod(pod.uid):
            self._replace_state(
                plan.state, ChangedStateIds(plan.change.containers, (pod.uid,)), pod
            )
            self.cgroups.request_check_of_unsent(self.cgroups.write_updates(plan.updates))

    def update_pod(self, pod: PodSandbox, total: Resources) -> None:
        """Record a pod's new resources; the updates of its containers follow."""
        state_after = with_pod_resized(self.current.state, pod, total)
        if state_after is not self.current.state:
            self._replace_state(state_after, ChangedStateIds((), (pod.uid,)), pod)

    def stop_pod(self, uid: str, sandbox: str) -> None:
        """Release what a stopped sandbox no longer needs; the pod may get another sandbox."""
        allocations = self.current.state.allocations_of_pod(uid)
        unstarted = [a for a in allocations if a.container_id in self.containers.starting]
        self.reservations.release_reservations([a for a in unstarted if a.pod_id == sandbox])
        self.reservations.stop_sandbox(uid, sandbox)

    def remove_pod(self, uid: str, sandbox: str) -> None:
        """Release a removed sandbox, and its containers that were never reported stopped."""
        self.history.retain_rejections(lambda one: one.pod_id != sandbox)
        prior, released = self.current.state, admit.forget_pod(self.current.desired, uid, sandbox)
        if released.state is self.current.state:
            return
        self._replace_state(released.state, released.change)
        for container_id in released.change.containers:
            self._forget_container(container_id)
            self.history.check_overlaps_of(prior.allocations.get(container_id))
        self.cgroups.request_check_of_unsent(self.cgroups.schedule_cpu_return(released.updates))

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Synchronize the node state with the runtime; see `nri_numa.engine.resync`."""
        deadline = self.current.clock.monotonic() + self.current.synchronize_budget_s
        self.history.retain_rejections(lambda one: one.pod_id in pods.uids)
        if {c.id for c in containers} - self.current.state.allocations.keys():
            self.reservations.release_of_stopped()
        mark_key = self.cgroups.mark_key
        unmarked = [c.id for c in containers if mark_key not in c.annotations]
        containers = [self.cgroups.with_mark(c) for c in containers]
        node = self.current.snapshot()
        outcome = rebuild_node_state(
            node, pods, containers, in_time=lambda: self.current.clock.monotonic() < deadline
        )
        state_before = self.current.state
        known_pods = state_before.pods if self.current.synchronized else {}
        reader = self.cgroups.writer.reader
        state_after = with_sandbox_cgroups(outcome.state, pods, known_pods, reader)
        self._replace_state(state_after, outcome.change)
        unseen_starts = self.containers.replace_all(containers)
        self.starts.on_synchronized(containers)
        if outcome.adopted:  # their pool may have been narrowed for a holder that is gone
            self.current.record_narrower_pool()
        updates, outcome = self.cgroups.write_synchronized(
            reclassify_repaired_as_missed_starts(outcome, unseen_starts)
        )
        self._tasks.add(partial(self.history.check_invariants, outcome.state, self.current.machine))
        self.history.record_synchronized(outcome, state_before.allocations)
        for container_id in outcome.removed:
            self._forget_container(container_id)
        if not self.current.synchronized:
            # An earlier process may have been killed before it told systemd.
            self.cgroups.queue_systemd_sync(self.containers.cgroup_places)
        self.current.set_synchronized()
        self._undecided = deque(outcome.undecided)
        if self._undecided:
            self._tasks.add(self._admit_next_undecided)
        ids = {container.id for _, container in outcome.undecided}
        self._tasks.add(*(partial(self.cgroups.write_mark, i) for i in unmarked if i not in ids))
        self.cgroups.request_check(())
        return updates

    def _admit_next_undecided(self) -> None:
        """Admit one unknown container that Synchronize had no time for, and schedule the next."""
        if not self._undecided:
            return  # a later Synchronize had time for all of them
        pod, container = self._undecided.popleft()
        self._tasks.add(self._admit_next_undecided)
        allocation = self.current.state.allocations.get(container.id)
        if allocation is None or not allocation.is_undecided:
            return  # it ended, or was decided about since
        admission = admit_running(self.current.snapshot(), pod, container)
        decision = admission.decision
        if isinstance(decision, Rejected):
            self.history.record_rejected(decision, running=True)
            return
        self._replace_state(decision.state, decision.change, pod)
        kind = decision.allocation.kind
        is_missed_start = kind not in (ContainerKind.UNPINNED, ContainerKind.FOREIGN)
        if is_missed_start:
            self.metrics.missed_starts.inc()
        self.history.record_admitted(decision, missed_start=is_missed_start)
        self.cgroups.request_check_of_unsent(self.cgroups.write_updates(admission.updates))
        self.cgroups.write_mark(container.id)

    # --- changes by the agent --------------------------------------------------------------------

    def apply_grants(self, grants: KubeletGrants | None) -> None:
        """Apply changed grants of the kubelet to the shared pool; None if nothing changed."""
        if grants is None:
            return
        self.reservations.release_of_stopped()
        desired_before = self.current.desired
        self._replace_state(self.current.state.with_kubelet(grants), NO_CHANGED_IDS)
        self.cgroups.request_check_of_unsent(
            self.cgroups.write_updates(updates_between(desired_before, self.current.desired))
        )

    def record_enforced_quota(self, container_id: str, quota: int) -> None:
        """Record the CFS quota of a rejected resize; one that differs from the lifted one stays."""
        allocation = self.current.state.allocations.get(container_id)
        if allocation is None or allocation.lifted_quota in (None, quota):
            return
        state_after = self.current.state.without_allocation(container_id)
        state_after = state_after.with_allocation(replace(allocation, lifted_quota=None))
        self._replace_state(state_after, ChangedStateIds((container_id,), (allocation.pod_uid,)))

    def apply_node_model(self, machine: NodeModel) -> tuple[ContainerUpdate, ...]:
        """Apply changed CPUs or settings; returns the updates of containers with other CPUs."""
        desired_before = self.current.desired
        self.current.replace_machine(machine)
        desired_after = self.current.desired
        updates = sorted(updates_between(desired_before, desired_after))
        if desired_before.pool != desired_after.pool:
            # cgroup v1 takes CPUs that go offline out of every cpuset, and never puts them back.
            self.current.record_narrower_pool()
        self.current.notify()
        if self.current.observe:
            return ()
        self.starts.correct_all()
        self.cgroups.request_check_of_unsent(self.cgroups.write_updates(updates))
        return tuple(updates)

    # --- inside -----------------------------------------------------------------------------------

    def _release_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        allocation = self.current.state.allocations.get(container_id)
        if allocation is None or allocation.reserved_at:
            # Its successor in the pod has replaced it already, or its pod reserves its CPUs.
            self._forget_container(container_id)
            return ()
        self.starts.report_if_never_started(allocation)
        released = admit.release_container(
            self.current.desired, container_id, self.current.clock.time()
        )
        self._replace_state(released.state, released.change)
        self._forget_container(container_id)
        self.history.record_released(allocation, released.state)
        return released.updates

    def _replace_state(
        self, state: NodeState, change: ChangedStateIds, pod: PodSandbox | None = None
    ) -> None:
        """Write a decision to disk and apply it; ``pod`` is the pod that it is about."""
        current = self.current
        if pod is not None and state.may_reserve_for_pod(pod.uid):
            state = with_sandbox_cgroup(state, pod, self.cgroups.writer.reader)
        violations, is_pool_changed = current.replace_state(state, change)
        if violations:
            self.history.reporter.log_invariant_violations(violations)
        if is_pool_changed:
            self.history.schedule_overlap_check()
        if self.containers.started_cgroups:
            self.starts.correct_all()
        current.notify()

    def _admit_unreported(self, pod: PodSandbox, container: Container) -> None:
        """Decide about a container whose creation was not reported, or was rejected in vain."""
        self.reservations.release_of_stopped()
        admission = admit_running(self.current.snapshot(), pod, container)
        self._replace_state(admission.state, admission.change, pod)
        if not self.current.observe:  # else it was not really rejected, and is no missed start
            self.containers.on_unreported_start(container)
            self.metrics.missed_starts.inc()
        self.cgroups.request_check_of_unsent(self.cgroups.write_updates(admission.updates))
        record = self.history.rejections[-1] if self.history.rejections else None
        if isinstance(admission.decision, Admitted):
            self.history.record_admitted(admission.decision, missed_start=True)
        elif record is None or (record.pod_id, record.container) != (pod.id, container.name):
            self.history.record_rejected(admission.decision, running=True)
        else:
            trace = replace(admission.decision.trace, decision_steps=(record.message,))
            self.history.hold_trace(self.current.state.allocations[container.id], trace)
        self._tasks.add(partial(self.cgroups.write_mark, container.id))

    def _forget_container(self, container_id: str) -> None:
        self.history.drop_trace(container_id)
        self.drift.remove_repaired(container_id)
        self.containers.drop_container(container_id)


def with_sandbox_cgroup(state: NodeState, pod: PodSandbox, reader: CgroupReader) -> NodeState:
    """Record the cgroup of a pod's sandbox, if it exists.

    Not every runtime makes one for each sandbox: only one that existed can prove by its absence
    that the sandbox is gone.
    """
    record, path = state.pods[pod.uid], pod.cgroups_path
    if record.sandbox_cgroup == path or not has_sandbox_cgroup(reader, path):
        return state
    return state.with_pod(replace(record, sandbox_cgroup=path))


def with_sandbox_cgroups(
    state: NodeState, pods: PodTable, known_pods: Mapping[str, PodRecord], reader: CgroupReader
) -> NodeState:
    """Apply `with_sandbox_cgroup` to sandboxes without an earlier record, by UID."""
    reserving_uids = {
        a.pod_uid for a in state.allocations.values() if a.exclusive or a.policy in STRICT_POLICIES
    }
    for pod_id, uid in pods.uids.items():
        if uid in reserving_uids and (uid not in known_pods or known_pods[uid].pod_id != pod_id):
            state = with_sandbox_cgroup(state, pods[pod_id], reader)
    return state
