"""Decisions made before anybody asks, for containers like one that was there.

A decision is made about a *stand-in*: a container like the one to come, in a pod that nobody has
heard of. Whose it is makes no difference to a decision beyond the names in it, as long as its pod
has no containers yet and the kubelet granted nothing; so when the container comes, only the names
have to be put in. docs/adr/0052-decide-before-being-asked.md tells what must not have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from nri_numa.engine.admit import admit
from nri_numa.engine.adopt.assigned import ASSIGNED, assigned, signature, signed
from nri_numa.engine.decision import Admitted, Machine, Reading
from nri_numa.engine.state import Allocation, Kind, NodeState, PodRecord, group_of
from nri_numa.engine.values.answers import ContainerUpdate, StateChange
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import Container, PodSandbox
from nri_numa.machine.cpuset import CPUSet

STAND_IN: Final = "\0stand-in"
"""Id and name of the stand-in: no name of Kubernetes and no id of a runtime holds a zero byte."""


_OWN: Final = frozenset(("container_id", "container", "pod_id", "pod_uid", "pod", "since"))
_COMMON: Final = tuple(f for f in fields(Allocation) if f.name not in _OWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything a decision depends on that is not the container's own."""

    machine: Machine
    state: NodeState
    reading: Reading | None

    def lasts(self, machine: Machine, state: NodeState, reading: Reading | None) -> bool:
        """Whether a decision would find the same now.

        Parts of a state are never changed but replaced, so being the same object is enough. Pods
        are left out: a decision looks at its own pod only, and that one must be new.
        """
        mine = self.state
        return (
            state.allocations is mine.allocations
            and state.kubelet is mine.kubelet
            and machine is self.machine
            and reading is self.reading
            and state.owned is mine.owned
            and state.idle is mine.idle
            and state.listed is mine.listed
            and state.listed_cpus is mine.listed_cpus
            and state.foreign is mine.foreign
            and state.charges is mine.charges
            and state.groups is mine.groups
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Whose a decision is: all that containers of one shape differ in."""

    container_id: str
    pod_id: str
    pod_uid: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a container starts with.

    Attributes:
        cpus, mems: kernel lists; empty for all.
        updates: for other containers.
    """

    cpus: str
    mems: str
    updates: tuple[ContainerUpdate, ...] = ()


@dataclass(slots=True, kw_only=True)
class Room:
    """The parts of the next state that grow with the node, copied while nobody waits.

    One container takes them with it, so they serve once.

    Attributes:
        allocations, listed: as in the state, for one more.
        groups: the same; ``members`` is the group that the container joins, None for none.
        pods: the same, of ``pods_before``, which may have changed until it is taken.
        spent: a container has taken it.
    """

    allocations: dict[str, Allocation]
    listed: dict[str, CPUSet]
    groups: Mapping[int, Mapping[str, None]]
    members: dict[str, None] | None
    pods: dict[str, PodRecord]
    pods_before: Mapping[str, PodRecord]
    spent: bool = field(default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A decision about a stand-in.

    Attributes:
        moment: what it depends on.
        decision: as `admit` made it.
        common: its allocation but for the names and the time; asking a dataclass for that each time
            takes as long as writing the journal.
        record: what its state remembers of the stand-in's pod.
        mark: what is written on the container, without the signature and what follows; empty where
            nothing is signed.
        started: the same for whoever comes.
        room: for the one that comes.
    """

    moment: Moment
    decision: Admitted
    common: Mapping[str, Any]
    record: PodRecord
    mark: str
    started: Started
    room: Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A prepared decision with the names put in."""

    state: NodeState
    change: StateChange
    allocation: Allocation


def names_read(settings: Settings) -> bool:
    """Whether a rule looks at the names of containers."""
    return any(rule.containers for rule in settings.rules)


def labels_read(settings: Settings) -> tuple[str, ...]:
    """The labels of pods that rules and permissions look at, in order of their names."""
    keys = {key for rule in settings.rules for key in rule.labels}
    keys |= {key for permission in settings.permissions for key in permission.labels}
    return tuple(sorted(keys))


def prepare(
    moment: Moment, pod: PodSandbox, container: Container, *, named: bool = True
) -> Prepared | None:
    """Decide about a container like this one, of a pod like this one.

    Args:
        moment: what it depends on.
        pod: one like the pod to come.
        container: one like the container to come.
        named: it has the name of the one to come; otherwise any name, which nothing looks at.

    Returns:
        None where every container has to be decided about by itself: it would be refused, warned
        about, left to somebody else, or holds something that no other can hold.
    """
    machine, state = moment.machine, moment.state
    if not state.kubelet.nothing or container.annotations:
        return None
    decision = admit(
        machine,
        state,
        replace(pod, id=STAND_IN, uid=STAND_IN, name=STAND_IN),
        replace(
            container, id=STAND_IN, pod_id=STAND_IN, name=container.name if named else STAND_IN
        ),
        moment.reading,
    )
    if not isinstance(decision, Admitted) or decision.warnings or decision.trace.ignored:
        return None
    allocation = decision.allocation
    if allocation.kind is Kind.FOREIGN or allocation.slots:
        return None
    if any(STAND_IN in text for text in (allocation.reason, *decision.trace.steps)):
        return None  # a sentence that names the pod has to be made for each
    mark = assigned(allocation, decision.adjustment.cpus, b"")[:-1] if machine.key else ""
    return Prepared(
        moment=moment,
        decision=decision,
        common={f.name: getattr(allocation, f.name) for f in _COMMON},
        record=decision.state.pods[STAND_IN],
        mark=mark,
        started=Started(
            cpus=decision.adjustment.cpus,
            mems=decision.adjustment.mems or container.resources.mems,
            updates=decision.updates,
        ),
        room=_room(state, allocation),
    )


def _room(state: NodeState, allocation: Allocation) -> Room:
    groups, members, key = state.groups, None, group_of(allocation)
    if key is not None:
        members = dict(groups.get(key, {}))
        groups = {**groups, key: members}
    return Room(
        allocations=dict(state.allocations),
        listed=dict(state.listed),
        groups=groups,
        members=members,
        pods=dict(state.pods),
        pods_before=state.pods,
    )


def take(prepared: Prepared, state: NodeState, names: Names, now: float) -> Taken | None:
    """Put the names in, at a cost that does not grow with the node.

    Args:
        prepared: `Moment.lasts` for ``state``.
        state: as it is.
        names: of the container that came.
        now: Unix time in seconds, recorded with the allocation.

    Returns:
        None when the container or its pod is not new, or the decision was taken before.
    """
    room, container_id, uid = prepared.room, names.container_id, names.pod_uid
    if room.spent or uid in state.pods or container_id in state.allocations:
        return None
    room.spent = True
    decided = prepared.decision.state
    allocation = Allocation(
        container_id=container_id,
        container=names.container,
        pod_id=names.pod_id,
        pod_uid=uid,
        pod=names.pod,
        since=now,
        **prepared.common,
    )
    room.allocations[container_id] = allocation
    if room.members is not None:
        room.members[container_id] = None
    elif STAND_IN in decided.listed:
        room.listed[container_id] = allocation.cpus
    record = prepared.record
    pods = room.pods if state.pods is room.pods_before else dict(state.pods)
    pods[uid] = PodRecord(
        uid=uid,
        pod_id=names.pod_id,
        containers=frozenset((container_id,)),
        affinity=record.affinity,
        affinity_preferred=record.affinity_preferred,
    )
    # What is not told apart by names is as it was decided.
    after = NodeState(
        serial=state.serial + decided.serial - prepared.moment.state.serial,
        allocations=room.allocations,
        pods=pods,
        owned=decided.owned,
        idle=decided.idle,
        listed=room.listed,
        listed_cpus=decided.listed_cpus,
        foreign=decided.foreign,
        charges=decided.charges,
        groups=room.groups,
        kubelet=state.kubelet,
    )
    return Taken(state=after, change=StateChange((container_id,), (uid,)), allocation=allocation)


def signed_for(prepared: Prepared, container_id: str) -> str:
    """The signature of what is written on this container; empty where nothing is signed.

    It is the only part of the answer to the runtime that depends on whose it is.
    """
    if not prepared.mark:
        return ""
    return signature(prepared.moment.machine.key, container_id, prepared.mark)


def decided(prepared: Prepared, taken: Taken, pod: PodSandbox, container: Container) -> Admitted:
    """The whole decision, as `admit` would have made it."""
    machine, decision = prepared.moment.machine, prepared.decision
    annotations = decision.adjustment.annotations
    if prepared.mark:
        name = f"{machine.settings.prefix}/{ASSIGNED}"
        annotations = {name: signed(prepared.mark, container.id, machine.key)}
    return replace(
        decision,
        state=taken.state,
        change=taken.change,
        allocation=taken.allocation,
        adjustment=replace(decision.adjustment, annotations=annotations),
        trace=replace(decision.trace, pod=pod, container=container),
    )
