"""The door into the engine: admit, release.

Everything is a pure function of machine, state and request; a decision is an offer until the
agent swaps its state in. `nri_numa.engine.resize` and `nri_numa.engine.resync` are the other two
doors, built from the same parts.
"""

from __future__ import annotations

from dataclasses import replace
from json.encoder import encode_basestring

from nri_numa.engine.answers import NO_QUOTA, ContainerAdjustment, ContainerUpdate
from nri_numa.engine.computed import place_computed
from nri_numa.engine.decision import (
    Admitted,
    Decision,
    Machine,
    Reading,
    Refused,
    Released,
    Trace,
)
from nri_numa.engine.demand import BadDemand, Demand, demand
from nri_numa.engine.explicit import place_explicit
from nri_numa.engine.placement import Failed, Placed
from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    effective_cpus,
    group_cpus,
)
from nri_numa.engine.wishes import BadWish
from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    OnFailure,
    PodSandbox,
    Policy,
    Wishes,
)
from nri_numa.topology.cpuset import NO_CPUS, CPUSet

ASSIGNED = "assigned"
"""Annotation key, below the prefix, that carries the decision on the container."""


def admit(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: Reading | None = None,
    now: float = 0.0,
    held: CPUSet = NO_CPUS,
) -> Decision:
    """Decide about one container that is being created.

    A container of the same pod and name that still has something (a failed start, a repeated
    request) gives it back first; its CPUs are preferred for this one.

    Args:
        machine: topology and settings.
        state: as it is.
        pod: the pod.
        container: the container.
        reading: what the kernel has left, when known.
        now: Unix time in seconds, recorded with the allocation.
        held: CPUs that a running stranger has; it keeps those of them it can own.

    Returns:
        `Admitted` with the new state, or `Refused` with the reason. Raises only for bugs.
    """
    before = state
    pool_before = before.pool(machine.topology, machine.settings)
    state = _drop_leftovers(state, pod, container)
    wishes = machine.resolve(pod, container)
    if isinstance(wishes, BadWish):
        return Refused(
            reason="InvalidAnnotation",
            message=wishes.message,
            trace=Trace(
                pod=pod,
                container=container,
                pool_before=pool_before,
                rule="annotations must be readable and must not contradict each other",
            ),
        )
    wanted: Demand | None = None
    if _leaves_alone(wishes):
        placed: Placed | Failed = _unbound(container, wishes)
    else:
        asked = demand(pod, container, wishes, machine.memory_total)
        if isinstance(asked, BadDemand):
            placed = Failed(reason=asked.reason, message=asked.message, rule=asked.expected)
        else:
            wanted = asked
            if len(held) > asked.exclusive_cpus:
                held = NO_CPUS
            placed = place(machine, state, pod, container, wishes, asked, reading, held)
        if isinstance(placed, Failed) and ladder(wishes) is OnFailure.UNPINNED:
            placed = replace(
                _unbound(container, wishes),
                reason=f"not pinned: {placed.reason}",
                preferred=False,
                alignment=placed.alignment,
                steps=(
                    *placed.steps,
                    placed.message,
                    "on-failure: unpinned, so it starts untouched",
                ),
            )
    if isinstance(placed, Failed):
        return Refused(
            reason=placed.reason,
            message=placed.message,
            trace=_trace(
                machine,
                state,
                pod,
                container,
                wishes,
                wanted,
                placed,
                reading,
                pool_before,
                pool_before,
                placed.rule,
            ),
        )
    allocation = new_allocation(pod, container, wishes, wanted, placed, machine, now)
    after = state.with_allocation(allocation)
    if placed.pod_affinity is not None:
        record = after.pods[pod.uid]
        if record.affinity is None:
            after = after.with_pod(
                replace(record, affinity=placed.pod_affinity, affinity_preferred=placed.preferred)
            )
    pool = after.pool(machine.topology, machine.settings)
    return Admitted(
        state=after,
        allocation=allocation,
        adjustment=adjustment(machine, allocation, pool),
        updates=pool_updates(machine, before, after, skip=container.id),
        trace=_trace(
            machine, state, pod, container, wishes, wanted, placed, reading, pool_before, pool, ""
        ),
    )


def left_alone(
    machine: Machine, pod: PodSandbox, container: Container, now: float
) -> Allocation | None:
    """What `admit` gives a container that nothing asks to pin; None for any other container.

    Such a container owns nothing and books nothing, so it makes no difference to others, and a
    node full of them can be taken in without deciding about one after the other.
    """
    if container.resources.cpus:
        return None
    wishes = machine.resolve(pod, container)
    if isinstance(wishes, BadWish) or not _leaves_alone(wishes):
        return None
    placed = _unbound(container, wishes)
    return new_allocation(pod, container, wishes, None, placed, machine, now)


def _trace(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    wanted: Demand | None,
    placed: Placed | Failed,
    reading: Reading | None,
    pool_before: CPUSet,
    pool_after: CPUSet,
    rule: str,
) -> Trace:
    return Trace(
        pod=pod,
        container=container,
        wishes=wishes,
        demand=wanted,
        alignment=placed.alignment,
        steps=placed.steps,
        cpu_left=machine.cpu_left(state) if wanted is not None else {},
        memory_left=machine.memory_left(state, reading) if wanted is not None else {},
        pool_before=pool_before,
        pool_after=pool_after,
        rule=rule,
    )


def release(machine: Machine, state: NodeState, container_id: str) -> Released:
    """Take back what a container has; unknown ids change nothing (stop may come twice)."""
    if container_id not in state.allocations:
        return Released(state=state)
    after = state.without(container_id)
    return Released(state=after, updates=pool_updates(machine, state, after, skip=container_id))


def forget_pod(state: NodeState, uid: str) -> NodeState:
    """Forget a pod; containers of it that were never reported stopped are dropped too."""
    record = state.pods.get(uid)
    if record is None:
        return state
    for container_id in sorted(record.containers):
        state = state.without(container_id)
    return state.without_pod(uid)


def pool_updates(
    machine: Machine, before: NodeState, after: NodeState, *, skip: str
) -> tuple[ContainerUpdate, ...]:
    """Updates for the groups whose CPUs differ, one for each member, in id order.

    The cost is in the groups and in the containers that really change, not in all containers.
    """
    topology, settings = machine.topology, machine.settings
    old, new = before.pool(topology, settings), after.pool(topology, settings)
    if old == new:
        return ()
    found: list[ContainerUpdate] = []
    for key, members in sorted(after.groups.items()):
        cpus = group_cpus(key, new, topology)
        if cpus == group_cpus(key, old, topology):
            continue
        text = str(cpus)
        found += [
            # A container that exits meanwhile must not fail somebody else's creation.
            # By position, which takes half the time.
            ContainerUpdate(i, text, "", None, None, None, None, True)
            for i in sorted(members)
            if i != skip
        ]
    return tuple(found)


def adjustment(machine: Machine, allocation: Allocation, pool: CPUSet) -> ContainerAdjustment:
    """What to tell the runtime about a container that is being created."""
    settings = machine.settings
    cpus = effective_cpus(allocation, pool, machine.topology)
    cpus_text, mems_text = str(cpus), str(allocation.mems)
    pinned = allocation.kind not in (Kind.UNBOUND, Kind.FOREIGN) or bool(allocation.mems)
    return ContainerAdjustment(
        cpus=cpus_text,
        mems=mems_text,
        quota=NO_QUOTA if allocation.quota is not None else None,
        annotations={f"{settings.prefix}/{ASSIGNED}": assigned(allocation, cpus_text)}
        if pinned
        else {},
        env={"NUMA_CPUS": cpus_text, "NUMA_MEMS": mems_text}
        if pinned and settings.tell_environment
        else {},
    )


def assigned(allocation: Allocation, cpus: str) -> str:
    """The ``assigned`` annotation: a short JSON object, enough to adopt the container again."""
    # Put together by hand, because it is done for every container: only the reason can hold
    # characters that JSON escapes.
    text = (
        f'{{"cpus":"{cpus}","mems":"{allocation.mems}","policy":"{allocation.policy}",'
        f'"kind":"{allocation.kind}","numa":"{allocation.numa_nodes}",'
        f'"preferred":{"true" if allocation.preferred else "false"},'
        f'"reason":{encode_basestring(allocation.reason)}'
    )
    if allocation.idle:
        text += f',"idle":"{allocation.idle}"'
    if allocation.owned and allocation.kind is Kind.EXPLICIT:
        text += ',"owned":true'
    return text + "}"


def _leaves_alone(wishes: Wishes) -> bool:
    """Nothing asks for CPUs or memory: the container is not bound."""
    if wishes.numacpu is not None or wishes.numamem is not None:
        return False
    if wishes.bind is Bind.NONE:
        return True
    return (
        wishes.policy is Policy.NONE
        and wishes.cpus is not CPUMode.EXCLUSIVE
        and "bind" not in wishes.given
        and not ("smt" in wishes.given and wishes.smt in (SMT.FULL_CORE, SMT.ISOLATE))
    )


def ladder(wishes: Wishes) -> OnFailure:
    """The degrade ladder's step for this container when nobody named one."""
    if wishes.on_failure is not None:
        return wishes.on_failure
    if wishes.numacpu is None and wishes.numamem is None and wishes.policy is Policy.BEST_EFFORT:
        return OnFailure.WIDEN
    return OnFailure.REJECT


def _unbound(container: Container, wishes: Wishes) -> Placed:
    if container.resources.cpus:
        # The kubelet's static policy, or another plugin before us, owns this one.
        return Placed(
            kind=Kind.FOREIGN,
            reason=f"pinned by somebody else to CPUs {container.resources.cpus}",
            steps=("somebody else set a cpuset and the pod asks us for nothing: left alone",),
        )
    why = "bind: none" if wishes.bind is Bind.NONE else "no annotation and no rule asks for a pin"
    return Placed(kind=Kind.UNBOUND, reason=f"not bound: {why}", steps=(why,))


def place(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    wanted: Demand,
    reading: Reading | None,
    held: CPUSet = NO_CPUS,
) -> Placed | Failed:
    """Place one container by its lists or by its policy, going down the ladder to *widen*."""
    if wishes.numacpu is not None or wishes.numamem is not None:
        return place_explicit(machine, state, pod, container, wishes, wanted, reading)
    policy = wishes.policy
    if policy is Policy.NONE and wishes.cpus is not CPUMode.EXCLUSIVE:
        # ``bind`` alone asks for a computed pin and names no policy: the mildest one.
        policy = Policy.BEST_EFFORT
    placed = place_computed(
        machine, state, pod, container, wishes, wanted, reading, policy, held=held
    )
    if isinstance(placed, Placed) or ladder(wishes) is not OnFailure.WIDEN:
        return placed
    if not placed.widenable:
        return placed
    wider = place_computed(
        machine, state, pod, container, wishes, wanted, reading, Policy.BEST_EFFORT, held=held
    )
    if isinstance(wider, Failed):
        return placed
    return replace(
        wider,
        policy=policy,
        preferred=False,
        steps=(placed.message, "on-failure: widen, so the narrowest set that works", *wider.steps),
    )


def _drop_leftovers(state: NodeState, pod: PodSandbox, container: Container) -> NodeState:
    if container.id in state.allocations:
        state = state.without(container.id)
    record = state.pods.get(pod.uid)
    if record is not None:
        for other in sorted(record.containers):
            if state.allocations[other].container == container.name:
                state = state.without(other)
    return state


def new_allocation(
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    wanted: Demand | None,
    placed: Placed,
    machine: Machine,
    now: float,
) -> Allocation:
    """Turn a placement into what the state keeps."""
    quota = container.resources.cpu_quota
    lifted = placed.owned and machine.settings.lift_quota and quota is not None and quota > 0
    return Allocation(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        kind=placed.kind,
        qos=pod.qos,
        cpus=placed.cpus,
        idle=placed.idle,
        owned=placed.owned,
        numa_nodes=placed.numa_nodes,
        mems=placed.mems,
        charges=placed.charges,
        cpu_milli=wanted.cpu_milli if wanted is not None else 0,
        memory_bytes=wanted.memory_bytes if wanted is not None else 0,
        hugepages=wanted.hugepages if wanted is not None else {},
        policy=placed.policy,
        smt=wishes.smt if placed.owned else SMT.ANY,
        load=wishes.load,
        preferred=placed.preferred,
        reason=placed.reason,
        quota=quota if lifted else None,
        since=now,
    )
