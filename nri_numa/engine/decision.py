"""The values that go into a decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final, Self

import msgspec

from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import uses_kubelet_rules
from nri_numa.engine.request.demand import NO_POD_SHARE, Demand, PodShare
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import (
    Allocation,
    ContainerKind,
    NodeState,
    PodRecord,
    container_identity,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    NO_CHANGED_IDS,
    SMT,
    ChangedStateIds,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    MemoryPolicySetting,
    OnFailure,
    PodSandbox,
    Policy,
    container_subject,
)


class DecisionTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The way to a decision; rendered by `engine.explain.explanation`, never logged whole."""

    pod: PodSandbox
    container: Container
    requested: PlacementOptions | None = None
    demand: Demand | None = None
    alignment: Alignment | None = None
    decision_steps: tuple[str, ...] = ()
    free_cpu_milli: Mapping[int, int] = msgspec.field(default_factory=dict)
    free_memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    pool_before: CPUSet = NO_CPUS
    pool_after: CPUSet = NO_CPUS
    rule: str = ""
    ignored: tuple[str, ...] = ()


class ContainerMove(msgspec.Struct, frozen=True):
    """One container that changes its place."""

    before: Allocation
    after: Allocation


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The container gets this, once the agent swaps ``state`` in.

    Attributes:
        moves: running containers that make room for it, in the order in which they were placed.
        warnings: what was done as asked and is probably not meant.
        released: reservations of other pods that gave way to it, oldest first.
    """

    state: NodeState
    change: ChangedStateIds
    allocation: Allocation
    adjustment: ContainerAdjustment = NO_ADJUSTMENT
    updates: tuple[ContainerUpdate, ...] = ()
    warnings: tuple[str, ...] = ()
    moves: tuple[ContainerMove, ...] = ()
    released: tuple[Allocation, ...] = ()
    trace: DecisionTrace


class Rejected(msgspec.Struct, frozen=True):
    """The container cannot have what it asks for, and how that came about.

    Attributes:
        is_about_later_container: it fits, and another one of its pod that is to come does not.
        is_resize: it runs, and stays as it is.
        is_search_spent: whether room can be made for it, or what is in the way, is not known.
        room_text: what was found out about that; ends the message.
    """

    rejection: Rejection
    trace: DecisionTrace
    is_about_later_container: bool = False
    is_search_spent: bool = False
    is_resize: bool = False
    room_text: str = ""

    @property
    def reason(self) -> RejectionReason:
        """The refusal's."""
        return self.rejection.reason

    @property
    def message(self) -> str:
        """Who cannot have what, and what was found out about room."""
        subject = container_subject(self.trace.pod, self.trace.container)
        end = f"; {self.room_text}" if self.room_text else ""
        start = "resize refused: " if self.is_resize else ""
        return f"{start}{subject}: {self.rejection.detail}{end}"


class RejectionWithAlignment(Rejection, frozen=True, kw_only=True):
    """What a policy cannot place, with the alignment that was tried."""

    alignment: Alignment | None = None

    @classmethod
    def with_alignment(cls, rejection: Rejection, alignment: Alignment | None) -> Self:
        """The same rejection after an alignment that succeeded."""
        return cls(**msgspec.structs.asdict(rejection), alignment=alignment)

    @classmethod
    def alignment_of(cls, rejection: Rejection) -> Alignment | None:
        """The alignment that a rejection is about; None where none was tried."""
        return rejection.alignment if isinstance(rejection, cls) else None


Decision = Admitted | Rejected


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """A container, or a whole pod, gave back what it had."""

    state: NodeState
    change: ChangedStateIds = NO_CHANGED_IDS
    updates: tuple[ContainerUpdate, ...] = ()


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """A live container's resources change.

    Attributes:
        container_update: what to answer for the container itself; None lets the request through as
        it is.
    """

    state: NodeState
    change: ChangedStateIds = NO_CHANGED_IDS
    container_update: ContainerUpdate | None
    updates: tuple[ContainerUpdate, ...] = ()
    trace: DecisionTrace


class RunningAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """The state with a container whose creation was not reported.

    Attributes:
        decision: about it; a refused one stays unpinned.
    """

    decision: Decision
    state: NodeState
    change: ChangedStateIds
    updates: tuple[ContainerUpdate, ...] = ()


class Resynced(msgspec.Struct, frozen=True, kw_only=True):
    """The state after comparing notes with the runtime.

    Attributes:
        decisions: about strangers; one that changes nothing for others carries the state before
            all of them.
        unknown_cpusets: full names of containers with a cpuset that nothing explains.
        undecided: strangers for which no time was left, with their pods; they stay as they are
            until `nri_numa.engine.resync.admit_running`.
    """

    state: NodeState
    change: ChangedStateIds
    updates: tuple[ContainerUpdate, ...] = ()
    adopted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    missed_starts: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    unpinned: tuple[Allocation, ...] = ()
    resized: tuple[tuple[Allocation, DecisionTrace], ...] = ()
    rejected_annotations: tuple[str, ...] = ()
    unknown_cpusets: tuple[str, ...] = ()
    undecided: tuple[tuple[PodSandbox, Container], ...] = ()


class Placement(Allocation, frozen=True, kw_only=True):
    """An allocation on its way, with what is said of it and not kept.

    Attributes:
        affinity: NUMA nodes that the policy chose; None when any will do.
        pod_affinity: the same for the whole pod (scope ``pod``).
        warnings: of these, what is probably not meant.
        memory_policy: set before the program runs; None sets none.
    """

    affinity: NUMASet | None = None
    pod_affinity: NUMASet | None = None
    alignment: Alignment | None = None
    decision_steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    memory_policy: MemoryPolicySetting | None = None


NO_DEMAND: Final = Demand()
"""Of a container whose needs were not looked at, since it is not pinned or they make no sense."""


class PlacementRequest(msgspec.Struct, frozen=True, dict=True):
    """One container that is being placed, with everything that is looked at for it.

    Attributes:
        node: as it is without this container.
        demand: what it needs; for a pod that is placed as a whole, what the pod needs.
        share: what its pod has, and leaves it.
        policy: to align by. The degrade ladder tries a weaker one than was asked for.
        current_cpus: CPUs that a running container has already and must keep.
        is_running: it runs already; else it is being created.
    """

    node: NodeSnapshot
    pod: PodSandbox
    container: Container
    requested: PlacementOptions
    demand: Demand = NO_DEMAND
    policy: Policy = Policy.NONE
    current_cpus: CPUSet = NO_CPUS
    is_running: bool = False
    pod_share: PodShare = NO_POD_SHARE

    @property
    def initial_placement(self) -> Placement:
        """The container's allocation, before anything is chosen for it."""
        return Placement(
            **container_identity(self.pod, self.container), kind=ContainerKind.UNPINNED
        )

    @cached_property
    def message_subject(self) -> str:
        """The start of a message: pod and container."""
        return container_subject(self.pod, self.container)

    @cached_property
    def pod_record(self) -> PodRecord | None:
        """The record of the pod."""
        return self.node.state.pods.get(self.pod.uid)

    @property
    def had_instance(self) -> bool:
        """It runs, or one of its name and pod did: a list may have given way already."""
        record = self.pod_record
        return self.is_running or (record is not None and self.container.name in record.previous)

    def free_hugepages(self) -> dict[int, Mapping[int, int]]:
        """By page size that is needed and NUMA node, bytes of huge pages that can be allocated."""
        return {size: self.node.free_hugepages(size) for size in self.demand.hugepages}

    @cached_property
    def effective_smt(self) -> SMT:
        """The rule for siblings; with the kubelet's order none, unless asked for."""
        requested = self.requested
        if requested.smt is SMT.SPREAD and "smt" not in requested.explicit_keys:
            return SMT.ANY if self.node.machine.settings.kubelet.cpu_order else SMT.SPREAD
        return requested.smt

    @cached_property
    def uses_kubelet_rules(self) -> bool:
        """As `uses_kubelet_rules` says."""
        return uses_kubelet_rules(self.node.machine, self.requested)

    @property
    def on_failure(self) -> OnFailure:
        """The degrade ladder's step, also where none was named."""
        return self.requested.effective_on_failure
