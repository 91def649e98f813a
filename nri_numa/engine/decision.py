"""Input and output values of decisions."""

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
    """Record of one decision; rendered by `engine.explain.explanation`, never logged whole."""

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
    """Move of one container to other CPUs or NUMA nodes."""

    before: Allocation
    after: Allocation


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """Admission of a container; it takes effect when the agent swaps ``state`` in.

    Attributes:
        moves: moves of running containers that free its resources, in order of placement.
        warnings: settings that were applied and are probably not intended.
        released: reservations of other pods that were released for it, oldest first.
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
    """Rejection of a container, with the trace of the decision.

    Attributes:
        is_about_later_container: it fits, but a later container of its pod does not.
        is_resize: it runs, and remains unchanged.
        is_search_spent: the search for moves ended at its budget without a result.
        room_text: result of that search; ends the message.
    """

    rejection: Rejection
    trace: DecisionTrace
    is_about_later_container: bool = False
    is_search_spent: bool = False
    is_resize: bool = False
    room_text: str = ""

    @property
    def reason(self) -> RejectionReason:
        """Reason of the rejection."""
        return self.rejection.reason

    @property
    def message(self) -> str:
        """Message with subject, rejection and result of the search for moves."""
        subject = container_subject(self.trace.pod, self.trace.container)
        suffix = f"; {self.room_text}" if self.room_text else ""
        start = "resize rejected: " if self.is_resize else ""
        return f"{start}{subject}: {self.rejection.detail}{suffix}"


class RejectionWithAlignment(Rejection, frozen=True, kw_only=True):
    """Rejection by a policy, with the alignment that was tried."""

    alignment: Alignment | None = None

    @classmethod
    def with_alignment(cls, rejection: Rejection, alignment: Alignment | None) -> Self:
        """Add an alignment that succeeded to a later rejection."""
        return cls(**msgspec.structs.asdict(rejection), alignment=alignment)

    @classmethod
    def alignment_of(cls, rejection: Rejection) -> Alignment | None:
        """Alignment of a rejection; None if none was tried."""
        return rejection.alignment if isinstance(rejection, cls) else None


Decision = Admitted | Rejected


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """Release of a container, a reservation or a whole pod."""

    state: NodeState
    change: ChangedStateIds = NO_CHANGED_IDS
    updates: tuple[ContainerUpdate, ...] = ()


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """Resize of a live container.

    Attributes:
        container_update: update of the container itself; None leaves the request unchanged.
    """

    state: NodeState
    change: ChangedStateIds = NO_CHANGED_IDS
    container_update: ContainerUpdate | None
    updates: tuple[ContainerUpdate, ...] = ()
    trace: DecisionTrace


class RunningAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """Admission of a running container whose creation was not reported.

    Attributes:
        decision: its decision; a rejected container stays unpinned.
    """

    decision: Decision
    state: NodeState
    change: ChangedStateIds
    updates: tuple[ContainerUpdate, ...] = ()


class Resynced(msgspec.Struct, frozen=True, kw_only=True):
    """Result of synchronizing the state with the runtime's containers.

    Attributes:
        decisions: about unknown containers; one without updates has the state before all of them.
        unknown_cpusets: full names of containers with a cpuset of unknown origin.
        undecided: unknown containers with their pods for which no time was left; unchanged until
            `nri_numa.engine.resync.admit_running`.
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
    """Outcome of placing one container: its allocation, and facts that are not kept.

    Attributes:
        affinity: NUMA nodes that the policy chose; None if any suit.
        pod_affinity: affinity of the whole pod (scope ``pod``).
        warnings: steps about settings that are probably not intended.
        memory_policy: policy that the runtime sets before the program runs; None for none.
    """

    affinity: NUMASet | None = None
    pod_affinity: NUMASet | None = None
    alignment: Alignment | None = None
    decision_steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    memory_policy: MemoryPolicySetting | None = None


NO_DEMAND: Final = Demand()
"""Demand of a container that is not pinned, or whose demand was rejected."""


class PlacementRequest(msgspec.Struct, frozen=True, dict=True):
    """One container that is being placed, with all input of the decision.

    Attributes:
        node: the node without this container.
        demand: demand of the container, or of the pod if that is placed as a whole.
        pod_share: resources of its pod and the part left for it.
        policy: policy to align by; a fallback may be weaker than the requested one.
        current_cpus: CPUs of a running container, which it must keep.
        is_running: True if it runs already, False if it is being created.
        prior_pool: the shared pool before the decision; empty if it does not matter.
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
    prior_pool: CPUSet = NO_CPUS

    @property
    def initial_placement(self) -> Placement:
        """Placement before anything is chosen: identity and kind only."""
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
        """True if a container of this pod and name ran before, so its list may have yielded."""
        record = self.pod_record
        return self.is_running or (record is not None and self.container.name in record.previous)

    def free_hugepages(self) -> dict[int, Mapping[int, int]]:
        """Return free bytes of huge pages by requested page size and NUMA node."""
        return {size: self.node.free_hugepages(size) for size in self.demand.hugepages}

    @cached_property
    def effective_smt(self) -> SMT:
        """SMT mode; none with the kubelet's order, unless requested."""
        requested = self.requested
        if requested.smt is SMT.SPREAD and "smt" not in requested.explicit_keys:
            return SMT.ANY if self.node.machine.settings.kubelet.cpu_order else SMT.SPREAD
        return requested.smt

    @cached_property
    def uses_kubelet_rules(self) -> bool:
        """True if the kubelet's rules apply; see `node_model.uses_kubelet_rules`."""
        return uses_kubelet_rules(self.node.machine, self.requested)

    @property
    def on_failure(self) -> OnFailure:
        """Effective ``on-failure``, also if it is not set."""
        return self.requested.effective_on_failure
