"""Demand of one container, computed from the runtime's data.

The CRI has neither requests nor the QoS class, but both can be derived: quota and period are the
CPU limit, shares are the CPU request, and the OOM score of a Burstable pod's container is its
memory request (kubelet: ``pkg/kubelet/qos/policy.go`` and ``cm/helpers_linux.go``).

*Slots* are exclusive CPUs that the scheduler counted, ids of the extended resource of
`nri_numa.device_plugin`. The kubelet chooses ids for each container, and the plugin's answer to
Allocate makes it put them on the container, as the CRI annotation ``<prefix>/slots``; it counts on
containers only. An id is ``slot-7``, or ``numa1-slot-7`` where the plugin announces NUMA nodes: the
kubelet has chosen the NUMA node then, so the CPUs are taken there and nowhere else. What a
ResourceClaim gives comes the same way, written by the agent (`nri_numa.agent.claims`):
``numa1-claim-UID-0x4`` is of the first result of that claim, four CPUs on NUMA node 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.request.annotations import permission_of, quote_value
from nri_numa.engine.request.options import (
    DEFAULT_SOURCE,
    STATIC_CPUS_SETTING_AS_SOURCE,
    HeldCPUSlots,
    OptionSource,
    PlacementOptions,
    SourceKind,
)
from nri_numa.engine.state import NO_CHARGE, Charge, NodeState
from nri_numa.model.machine import count_text, human_cpu_number, human_milli
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
    Scope,
)
from nri_numa.text import human_bytes

SHARES_PER_CPU: Final = 1024
MIN_CPU_SHARES: Final = 2
"""The least the kernel takes; the kubelet writes it where no CPU was requested."""
MAX_CPU_SHARES: Final = 262_144
"""The most the kernel takes, 256 CPUs; the kubelet writes it for every request above that."""
DEFAULT_CFS_PERIOD_US: Final = 100_000
"""Microseconds; the kernel's, used where a quota comes without a period."""

_MIN_UNLIMITED_BYTES: Final = 1 << 62
"""cgroup v1 says *no limit* with numbers near 2**63; no machine has half of that."""
_MAX_CFS_QUOTA_US: Final = (1 << 44) - 1
"""Microseconds; the kernel takes no larger quota (kernel/sched/core.c, ``MAX_BW``)."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of a container.

    Attributes:
        cpu_milli: thousandths of a CPU: the limit, else the request, else 0; in a Guaranteed pod
            at most what the pod's sum leaves it.
        cpu_is_lower_bound: it may be more: shares cannot tell more than 256 CPUs.
        memory_bytes: the limit, else the request as far as the OOM score tells, else 0; in a
            Guaranteed pod at most what the pod's sum leaves it.
        cpu_requested_milli: thousandths of a CPU that the request pays for: what may be owned, and
            what is allocated for a container that shares.
        pod_requested_milli: for a pod's list: what the pod's requests pay for beside what others of
            it have; None where the runtime does not tell.
        memory_requested: bytes that the request pays for, which is what is allocated; the pin must
            hold ``memory_bytes``.
        memory_source: ``limit``, ``request`` (to a thousandth of the machine) or ``none``.
        own_cpu_milli, own_memory_bytes: as ``cpu_milli`` and ``memory_bytes``, whatever its pod
            has: what a resize changes.
    """

    cpu_milli: int = 0
    cpu_is_lower_bound: bool = False
    exclusive_cpus: int = 0
    memory_bytes: int = 0
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)
    cpu_source: str = "none"
    memory_source: str = "none"
    cpu_notes: tuple[str, ...] = ()
    memory_notes: tuple[str, ...] = ()
    cpu_requested_milli: int = 0
    pod_requested_milli: int | None = None
    memory_requested: int = 0
    own_cpu_milli: int = 0
    own_memory_bytes: int = 0
    ignored: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about ignored parts of the request and their consequences."""
        return self.cpu_notes + self.memory_notes


class PodShare(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of a pod and charges of its containers, in thousandths of a CPU and bytes.

    Attributes:
        sum: the pod's requests as reported; 0 if not reported.
        own_charge: charges of other live containers with resources of their own.
        other_charge: amounts that a container must leave to the other live ones.
        uses_pod_resources: as in `Allocation`.
    """

    sum: Charge = NO_CHARGE
    own_charge: Charge = NO_CHARGE
    other_charge: Charge = NO_CHARGE
    uses_pod_resources: bool = False

    def total_milli(self, milli: int) -> int:
        """Return the pod's milli CPUs if a container requests ``milli``: at least all requests."""
        if self.uses_pod_resources:
            return self.sum.cpu_milli
        return max(self.sum.cpu_milli, self.own_charge.cpu_milli + milli)

    def limit_milli(self, milli: int) -> int:
        """Limit a container's request to what the others of its pod leave."""
        if not self.sum.cpu_milli:
            return milli
        return max(0, min(milli, self.total_milli(milli) - self.other_charge.cpu_milli))

    def limit_memory(self, need: int) -> int:
        """Limit a container's bytes to what the others of its pod leave."""
        if self.sum.memory <= 0:
            return need
        own_bytes = 0 if self.uses_pod_resources else self.own_charge.memory
        return max(0, min(need, max(self.sum.memory, own_bytes + need) - self.other_charge.memory))


NO_POD_SHARE: Final = PodShare()


def share_of_first_container(
    pod: PodSandbox, resources: Resources, total: Charge | None = None, *, has_size: bool = False
) -> PodShare:
    """Return the share of a container alone in its pod, with ``total`` or the reported sum.

    With ``has_size`` it is known to have resources of its own.
    """
    total = told_sum(pod) if total is None else total
    is_user = not has_size and has_pods_size(pod, resources, total.cpu_milli)
    if is_user and pod.qos is QoSClass.GUARANTEED:
        total = replace(total, cpu_milli=cpu_size_milli(resources))
    return PodShare(sum=total, uses_pod_resources=is_user)


def told_sum(pod: PodSandbox) -> Charge:
    """Sum that the runtime reports for a pod; 0 if it does not."""
    return Charge(pod_cpu_request_milli(pod) or 0, max(0, pod.resources.memory_limit or 0))


def has_pods_size(pod: PodSandbox, resources: Resources, total_milli: int) -> bool:
    """True if a container has its pod's limits, as one without resources of its own (KEP-2837).

    ``total_milli`` is the pod's sum, 0 if it is not known.
    """
    if not total_milli:
        return False
    if pod.qos is QoSClass.GUARANTEED:
        return cpu_size_milli(resources) >= total_milli
    return cpu_request_milli(resources, []) > total_milli


def _demand_rejection(reason: RejectionReason, subject: str, remedy: str) -> Rejection:
    """Reject a demand that no machine can meet; ``subject`` has the resource and its value."""
    return Rejection(reason=reason, detail=f"{subject}, expected {remedy}", rule=remedy)


def compute_demand(
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions,
    capacity_bytes: int,
    pod_share: PodShare | None = None,
    *,
    is_exclusive: bool = False,
) -> Demand | Rejection:
    """Compute the demand of a container.

    A container gets exclusive CPUs if it requests them (``cpus: exclusive``). As under the
    kubelet's static policy, so does a container of a Guaranteed pod with a whole number of CPUs, if
    a policy or ``smt: full-core | isolate`` is set. ``exclusive`` of a pod, a rule or the defaults
    applies to containers that request whole CPUs, and the others share. A container that sets it
    itself is rejected instead, as is one whose pod requests less than a CPU, and one that had
    exclusive CPUs (``is_exclusive``) before a resize.

    The kubelet gives a container without resources the limits of its pod, if that has some
    (KEP-2837). So the demand is limited to what other containers leave of the pod's sum,
    ``pod_share``. ``capacity_bytes`` is the machine's memory as the kubelet counts it (MemTotal).
    """
    resources = container.resources
    pod_share = pod_share or share_of_first_container(pod, resources)
    notes: list[str] = []
    memory_notes: list[str] = []
    demand = _cpu_demand(pod, resources, pod_share, notes)
    exclusive_cpus, ignored = 0, ""
    # Lists are applied unchanged, and bind: none changes nothing, so no number is needed.
    if requested.numacpu is None and requested.bind is not Bind.NONE:
        decided = _count_exclusive_cpus(
            pod, requested, demand, pod_share, notes, is_exclusive=is_exclusive
        )
        if isinstance(decided, Rejection):
            return decided
        exclusive_cpus, ignored = decided
        if not exclusive_cpus and requested.requires_whole_cores:
            notes.append(f"smt: {requested.smt.value} has no effect on shared CPUs")
    own_bytes, memory_source = _memory_demand(pod, container, capacity_bytes, memory_notes)
    allocated = requested_memory(pod, container, capacity_bytes, own_bytes, pod_share)
    cpu_milli, memory_bytes = demand.cpu_milli, own_bytes
    requested_milli = demand.cpu_requested_milli
    if pod.qos is QoSClass.GUARANTEED and pod_cpu_request_milli(pod) is not None:
        cpu_milli, memory_bytes = min(cpu_milli, requested_milli), allocated
    if allocated < own_bytes:
        memory_notes.append(
            f"{human_bytes(allocated)} of {human_bytes(own_bytes)} of memory are allocated, "
            "because no more is requested"
        )
    return replace(
        demand,
        cpu_milli=cpu_milli,
        exclusive_cpus=exclusive_cpus,
        memory_bytes=memory_bytes,
        hugepages=hugepage_demand(resources, memory_notes) if resources.hugepages else {},
        memory_source=memory_source,
        cpu_notes=tuple(notes),
        memory_notes=tuple(memory_notes),
        pod_requested_milli=_pod_requested_milli(pod, requested_milli, pod_share)
        if requested.list_is_pods
        else None,
        memory_requested=allocated,
        own_memory_bytes=own_bytes,
        ignored=ignored,
    )


def _cpu_demand(pod: PodSandbox, resources: Resources, share: PodShare, notes: list[str]) -> Demand:
    request = cpu_request_milli(resources, notes)
    limit = cpu_limit_milli(resources, notes)
    cpu_shares = resources.cpu_shares or 0
    is_lower_bound = not limit and cpu_shares >= MAX_CPU_SHARES
    if is_lower_bound and cpu_shares == MAX_CPU_SHARES:  # above, there is a note already
        notes.append(_shares_limit_text(pod))
    return Demand(
        cpu_milli=limit or request,
        own_cpu_milli=limit or request,
        cpu_is_lower_bound=is_lower_bound,
        cpu_source="limit" if limit else "request" if request else "none",
        cpu_requested_milli=share.limit_milli(own_request_milli(pod.qos, resources)),
    )


def _count_exclusive_cpus(
    pod: PodSandbox,
    requested: PlacementOptions,
    size: Demand,
    pod_share: PodShare,
    notes: list[str],
    *,
    is_exclusive: bool,
) -> tuple[int, str] | Rejection:
    """Count exclusive CPUs; also return the option that is ignored for want of a request."""
    count = _wished_exclusive_cpus(pod, requested, size.cpu_milli)
    accepts_shared = not is_exclusive and _may_share_instead(pod, requested)
    if count is None:
        if not accepts_shared:
            return _fractional_rejection(requested, size.cpu_milli)
        text = f"its cpu is {_size_text(size.cpu_milli)}"
        ignored = _shares_instead_text(requested, text)
        notes.append(ignored)
        return 0, ignored
    if not count:
        return 0, ""
    whole_cpus = size.cpu_requested_milli // 1000
    if whole_cpus and is_in_pod_pool(pod, requested, pod_share):
        count = min(count, whole_cpus)  # limited to what others of its pod leave
    if requested.cpus is None and count > whole_cpus:
        notes.append(f"it shares CPUs, because {_requested_text(size, count)}")
        return 0, ""
    is_explicit = "cpus" in requested.explicit_keys
    if size.cpu_is_lower_bound and requested.slots is None:
        if requested.cpus is CPUMode.EXCLUSIVE and not is_explicit:
            return 0, ""
        return _unknown_cpus_rejection(pod)
    # A request above 256 CPUs is not known exactly; the scheduler has counted its slots.
    if count <= whole_cpus or requested.unrequested_cpus or size.cpu_is_lower_bound:
        return count, ""
    ignored_or_rejection = _ignore_unpaid(requested, size, count, accepts_shared=accepts_shared)
    if isinstance(ignored_or_rejection, Rejection):
        return ignored_or_rejection
    notes.append(ignored_or_rejection)
    return 0, ignored_or_rejection


def _ignore_unpaid(
    requested: PlacementOptions, size: Demand, count: int, *, accepts_shared: bool
) -> str | Rejection:
    """Reject exclusive CPUs that are not requested, or return the ignored option as text."""
    paid_text = _requested_text(size, count)
    if accepts_shared:
        return _shares_instead_text(requested, paid_text)
    is_ignored = requested.ignores_denied and requested.is_from_annotation("cpus")
    if "cpus" not in requested.explicit_keys or is_ignored:
        return f"cpus: exclusive is ignored, because {paid_text}"
    subject = f"cpu request is {_size_text(size.cpu_requested_milli)}"
    remedy = (
        f"{count_text(count, 'CPU')}, or a permission with allowUnrequestedCPUs "
        f"({requested.permission} does not have it), because {requested.source_text('cpus')} sets "
        "cpus: exclusive"
    )
    return _demand_rejection(RejectionReason.CPUS_NOT_REQUESTED, subject, remedy)


def _wished_exclusive_cpus(pod: PodSandbox, requested: PlacementOptions, milli: int) -> int | None:
    """Count the exclusive CPUs of a container by its options and size; 0 for a shared one.

    None if it sets ``cpus: exclusive`` itself and its size is not a whole number.
    """
    is_integer = milli > 0 and milli % 1000 == 0
    if requested.cpus is CPUMode.EXCLUSIVE:
        if requested.slots is not None:
            return requested.slots.count
        if is_integer:
            return milli // 1000
        return None if "cpus" in requested.explicit_keys else 0
    if requested.cpus is CPUMode.SHARED or not is_integer or pod.qos is not QoSClass.GUARANTEED:
        return 0
    is_aligned = requested.requires_whole_cores or requested.policy is not Policy.NONE
    return milli // 1000 if is_aligned else 0


def _may_share_instead(pod: PodSandbox, requested: PlacementOptions) -> bool:
    """True if ``cpus: exclusive`` applies only to containers that request whole CPUs.

    It is strict for one named container, and for a pod that requests less than one CPU.
    """
    source = requested.sources.get("cpus", DEFAULT_SOURCE)
    is_pods = source.kind is SourceKind.ANNOTATION and not source.is_for_container
    has_whole_cpu = is_pods and (pod_cpu_request_milli(pod) or 0) >= 1000
    return requested.slots is None and (has_whole_cpu or source.kind is SourceKind.RULE)


def _shares_instead_text(requested: PlacementOptions, cause: str) -> str:
    source = requested.source_text("cpus")
    return f"it shares CPUs despite cpus: exclusive ({source}), because {cause}"


def is_in_pod_pool(pod: PodSandbox, requested: PlacementOptions, pod_share: PodShare) -> bool:
    """True if a container shares the CPUs that exclusive containers leave of its pod's.

    These are containers without own resources in a pod with ``scope: pod``, as under the kubelet
    (``AllocatePod`` in cm/cpumanager/policy_static.go).
    """
    return (
        pod_share.uses_pod_resources
        and pod.qos is QoSClass.GUARANTEED
        and requested.scope is Scope.POD
        and requested.numacpu is None
        and requested.slots is None
        and requested.cpus is not CPUMode.SHARED
    )


def requested_cpus_text(subject: str, requested_milli: int, count: int) -> str:
    """``the container requests 1 of 4 CPUs``."""
    return f"{subject} requests {human_cpu_number(requested_milli)} of {count_text(count, 'CPU')}"


def _requested_text(size: Demand, count: int) -> str:
    return requested_cpus_text("the container", size.cpu_requested_milli, count)


def _size_text(milli: int) -> str:
    return human_milli(milli) if milli else "not set"


def _fractional_rejection(requested: PlacementOptions, milli: int) -> Rejection:
    cause = f"because {requested.source_text('cpus')} sets cpus: exclusive"
    example, reason = "", RejectionReason.NO_CPU_REQUEST
    if milli:
        example, reason = f" such as {milli // 1000 + 1}", RejectionReason.FRACTIONAL_CPUS
    remedy = f"a whole number of CPUs{example}, {cause}"
    return _demand_rejection(reason, f"cpu is {_size_text(milli)}", remedy)


def _shares_limit_text(pod: PodSandbox) -> str:
    """Clause about a request that CPU shares cannot express."""
    text = f"{MAX_CPU_SHARES} CPU shares stand for {MAX_CPU_SHARES // SHARES_PER_CPU} CPUs or more"
    total = cpu_limit_milli(pod.resources, [])
    return f"{text}; the limit of its pod is {human_milli(total)}" if total else text


def _unknown_cpus_rejection(pod: PodSandbox) -> Rejection:
    return _demand_rejection(
        RejectionReason.CPU_REQUEST_UNKNOWN,
        f"cpu is a request of {MAX_CPU_SHARES // SHARES_PER_CPU} CPUs or more",
        "a CPU limit as well, because the number of exclusive CPUs is not known: "
        + _shares_limit_text(pod),
    )


def cpu_limit_milli(resources: Resources, notes: list[str]) -> int:
    """Thousandths of a CPU from quota and period, 0 without; disregarded values get ``notes``."""
    quota = resources.cpu_quota
    if quota is None or quota in (0, -1):
        return 0
    if quota < 0:
        notes.append(f"CPU quota {quota} is negative and counts as no limit")
        return 0
    period = resources.cpu_period or DEFAULT_CFS_PERIOD_US
    if period < 0:
        notes.append(f"CPU period {period} is negative and counts as {DEFAULT_CFS_PERIOD_US}")
        period = DEFAULT_CFS_PERIOD_US
    # To the nearest: the kubelet cuts quotas to whole microseconds, which shows with odd periods.
    milli = (quota * 1000 + period // 2) // period
    if quota > _MAX_CFS_QUOTA_US:
        notes.append(f"CPU quota {quota} of {period} is above the kernel's and counts as no limit")
        return 0
    return milli


def cpu_request_milli(resources: Resources, notes: list[str]) -> int:
    """Thousandths of a CPU from shares, 0 without; disregarded values get ``notes``.

    The kubelet rounds ``milli * 1024 / 1000`` down, so rounding up gives the exact request back.
    """
    cpu_shares = resources.cpu_shares
    if cpu_shares is None or 0 <= cpu_shares <= MIN_CPU_SHARES:
        return 0
    if cpu_shares < 0:
        notes.append(f"{cpu_shares} CPU shares are negative and count as no request")
        return 0
    if cpu_shares > MAX_CPU_SHARES:
        notes.append(
            f"{cpu_shares} CPU shares are above the kernel's {MAX_CPU_SHARES} and count as these"
        )
        cpu_shares = MAX_CPU_SHARES
    return -(-cpu_shares * 1000 // SHARES_PER_CPU)


def cpu_size_milli(resources: Resources) -> int:
    """Thousandths of a CPU: the limit, else the request, else 0."""
    return cpu_limit_milli(resources, []) or cpu_request_milli(resources, [])


def _pod_requested_milli(pod: PodSandbox, requested_milli: int, share: PodShare) -> int | None:
    if pod_cpu_request_milli(pod) is None:
        return None
    return max(requested_milli, share.total_milli(requested_milli) - share.other_charge.cpu_milli)


def pod_cpu_request_milli(pod: PodSandbox) -> int | None:
    """Thousandths of a CPU that a whole pod requests; None if the runtime does not report it."""
    shares = pod.resources.cpu_shares
    if not pod.resources.cpu_quota and (shares is None or shares >= MAX_CPU_SHARES):
        return None
    return own_request_milli(pod.qos, pod.resources)


def own_request_milli(qos: QoSClass, resources: Resources) -> int:
    """Thousandths of a CPU that are requested; a Guaranteed pod's limits are its requests.

    The kubelet updates a container without requests of its own, beside a quota, with the least
    shares there are: its pod has the request.
    """
    request = cpu_request_milli(resources, [])
    tells_request = MIN_CPU_SHARES < (resources.cpu_shares or 0) < MAX_CPU_SHARES
    if qos is QoSClass.GUARANTEED and not tells_request:
        return max(request, cpu_limit_milli(resources, []))
    return request


def requested_memory(
    pod: PodSandbox, container: Container, capacity_bytes: int, need: int, pod_share: PodShare
) -> int:
    """Bytes of a container's need that it requests.

    A Guaranteed pod requests its limits. For the others the OOM score tells the request to a
    thousandth of the machine, rounded down; without a score, or with one that says nothing
    (node-critical pods), nothing shows that anything was requested. What containers use beyond that
    is still seen, in what the kernel says is free.
    """
    if pod.qos is QoSClass.GUARANTEED:
        return pod_share.limit_memory(need)
    return min(need, _bytes_requested_by_oom_score(pod, container, capacity_bytes))


def _bytes_requested_by_oom_score(
    pod: PodSandbox, container: Container, capacity_bytes: int
) -> int:
    """Memory request of a Burstable pod's container, by its OOM score; 0 without one."""
    score = container.oom_score_adj
    # kubelet: 1000 - 1000 * request / capacity, never below 2 and never 1000; 999 is what a
    # container without a request gets, and node-critical pods get -997 whatever they request.
    if pod.qos is QoSClass.BURSTABLE and score is not None and 2 <= score < 999:
        return max(0, capacity_bytes) * (1000 - score) // 1000
    return 0


def unpinned_memory_request(
    pod: PodSandbox, container: Container, capacity_bytes: int, other_charge: Charge
) -> int:
    """Bytes that an unpinned container requests."""
    if pod.qos is not QoSClass.GUARANTEED:
        return _bytes_requested_by_oom_score(pod, container, capacity_bytes)
    limit = container.resources.memory_limit or 0
    if not 0 < limit < _MIN_UNLIMITED_BYTES:
        return 0
    pod_share = PodShare(sum=told_sum(pod), other_charge=other_charge, uses_pod_resources=True)
    return requested_memory(pod, container, capacity_bytes, limit, pod_share)


def _memory_demand(
    pod: PodSandbox, container: Container, capacity_bytes: int, notes: list[str]
) -> tuple[int, str]:
    limit = container.resources.memory_limit or 0
    if 0 < limit < _MIN_UNLIMITED_BYTES:
        return limit, "limit"
    if limit > 0:
        notes.append(f"memory limit {limit} is above any machine and counts as no limit")
    elif limit < -1:
        notes.append(f"memory limit {limit} is negative and counts as no limit")
    request = _bytes_requested_by_oom_score(pod, container, capacity_bytes)
    return (request, "request") if request else (0, "none")


def hugepage_demand(resources: Resources, notes: list[str]) -> dict[int, int]:
    """Bytes by page size, without the zeros that the kubelet sends for other sizes."""
    bytes_by_size: dict[int, int] = {}
    for size, limit in sorted(resources.hugepages.items()):  # by page size
        if limit == 0:
            continue
        if size <= 0 or limit < 0 or limit >= _MIN_UNLIMITED_BYTES:
            notes.append(f"huge page limit {limit} for pages of {size} bytes counts as none")
            continue
        bytes_by_size[size] = -(-limit // size) * size
    return bytes_by_size


CLAIM_SLOT_MARK: Final = "-claim-"

MAX_CLAIM_RESULTS: Final = 32
"""Results of one claim (kubernetes ``resource/v1``, AllocationResultsMaxSize)."""

UID_PATTERN: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_CLAIM_SLOT_PATTERN: Final = re.compile(
    rf"numa([0-9]{{1,4}})-claim-({UID_PATTERN}-[0-9]{{1,2}})x([0-9]{{1,4}})"
)


def claim_result_text(numa_node: int, uid: str, number: int, cpus: int) -> str:
    """Format one result of a claim for `parse_claims`."""
    return f"numa{numa_node}{CLAIM_SLOT_MARK}{uid}-{number}x{cpus}"


def parse_claims(text: str) -> HeldCPUSlots | None:
    """Parse the results of a container's claims; None if the text is not valid."""
    parts = text.split(",", MAX_CLAIM_RESULTS)
    results = _claim_results(parts)
    if len(parts) > MAX_CLAIM_RESULTS or len({match[2] for match in results}) < len(parts):
        return None
    counts: Counter[int] = Counter()
    for match in results:
        counts[int(match[1])] += int(match[3])
    return HeldCPUSlots(ids=text, count=counts.total(), by_node=dict(sorted(counts.items())))


def _claim_results(parts: list[str]) -> list[re.Match[str]]:
    return [match for part in parts if (match := _CLAIM_SLOT_PATTERN.fullmatch(part)) is not None]


def check_claim_in_use(state: NodeState, slots: HeldCPUSlots) -> Rejection | None:
    """Reject a claim in use: its CPUs are for one container at a time."""
    if CLAIM_SLOT_MARK not in slots.ids:
        return None
    names = {match[2] for match in _claim_results(slots.ids.split(","))}
    for _, a in sorted(state.allocations.items()):
        claimed = _claim_results(a.slots.split(",")) if CLAIM_SLOT_MARK in a.slots else ()
        if any(match[2] in names for match in claimed):
            return Rejection(
                reason=RejectionReason.CLAIM_IN_USE,
                detail=f"pod {a.namespace}/{a.pod}, container {a.container}, has the CPUs of its "
                "ResourceClaim; expected one container for each request of a claim",
                rule="only one container at a time has the CPUs of a claim",
            )
    return None


def check_added_cpus(
    container: Container, requested: PlacementOptions, demand: Demand
) -> Rejection | None:
    """Reject CPUs of its own for a container whose cpuset the runtime extends."""
    source = container.added_cpus_source
    if not source or not (demand.exclusive_cpus or requested.numacpu is not None):
        return None
    own = "exclusive CPUs" if demand.exclusive_cpus else f"numacpu {requested.numacpu}"
    return Rejection(
        reason=RejectionReason.RUNTIME_ADDS_CPUS,
        detail=f"{source} is set, so the runtime would add its shared CPUs to {own}; expected a "
        "container without it, or one with cpus: shared and no numacpu",
        rule="what the runtime adds to a cpuset would be repaired as drift",
    )


SLOTS_KEY: Final = "slots"
"""Annotation key, below the prefix, with the ids that a container holds, separated by commas."""
MAX_SLOTS: Final = 4096
"""Ids of one container; the kernel is built for no more than 8192 CPUs (NR_CPUS)."""
_MAX_CLAIM_CHARS: Final = 28 * MAX_SLOTS
_SLOT_ID_PATTERN: Final = re.compile(r"(?:numa([0-9]{1,4})-)?slot-[0-9]{1,6}", re.ASCII)


def parse_slots(text: str) -> HeldCPUSlots | str:
    """Parse a container's slot ids; a text says what was expected instead."""
    if CLAIM_SLOT_MARK in text and (claimed := parse_claims(text)) is not None:
        return claimed
    ids = text.split(",") if len(text) <= _MAX_CLAIM_CHARS else []
    nodes = [_SLOT_ID_PATTERN.fullmatch(slot_id) for slot_id in ids]
    if not ids or not all(nodes) or len(set(ids)) < len(ids) or len(ids) > MAX_SLOTS:
        example = "such as slot-0 or numa0-slot-0"
        return f"up to {MAX_SLOTS} different ids {example}, separated by commas"
    node_ids = [match[1] for match in nodes if match is not None]
    # Ids of both sorts come from a change of the plugin's configuration in between: none binds.
    by_node = Counter(int(i) for i in node_ids) if all(i is not None for i in node_ids) else {}
    return HeldCPUSlots(ids=text, count=len(ids), by_node=dict(sorted(by_node.items())))


def allocated_slots(settings: Settings, container: Container) -> str:
    """Slot ids that the kubelet allocated to a container; empty for none."""
    return container.annotations.get(f"{settings.prefix}/{SLOTS_KEY}", "")


def with_slots(
    settings: Settings,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions | Rejection,
) -> PlacementOptions | Rejection:
    """Add a container's slots to its options.

    They override the defaults. Options of a pod or a rule must not contradict them, and
    the container's CPU limit, else its request, must be as many CPUs as it holds slots: the
    scheduler counts both. A permission with ``allowUnrequestedCPUs`` lets it be less.
    """
    if isinstance(requested, Rejection):
        return requested
    if container.claim_problem:
        return Rejection(
            reason=RejectionReason.CLAIM_NOT_PREPARED,
            detail=container.claim_problem,
            rule="a container gets the CPUs of a claim that was prepared for its pod",
        )
    text = allocated_slots(settings, container)
    if not text:
        return requested
    slots = parse_slots(text)
    if isinstance(slots, str):
        return Rejection(
            reason=RejectionReason.INVALID_SLOTS,
            detail=f"{SLOTS_KEY} is {quote_value(text)} (annotation {settings.prefix}/{SLOTS_KEY} "
            f"of the container), expected {slots}",
            rule="the device plugin of nri-numa says which slots a container holds",
        )
    claimed = CLAIM_SLOT_MARK in text
    kind, slots_text = SourceKind.SLOTS, f"{count_text(slots.count, 'slot')} of the device plugin"
    if claimed:
        kind, slots_text = SourceKind.CLAIM, f"{count_text(slots.count, 'CPU')} of a ResourceClaim"
    if clash := _option_contradicting_slots(requested, slots):
        key, value, cause = clash
        return Rejection(
            reason=RejectionReason.SLOTS_CONFLICT,
            detail=f"{key} is {value!r} ({requested.source_text(key)}) and it holds {slots_text}, "
            f"expected one of them, because {cause}",
            rule="slots and annotations must not contradict each other",
        )
    # Where nothing else is asked for, it was not looked up.
    permission = permission_of(settings.permissions, pod)
    resources = container.resources
    limit, request = cpu_limit_milli(resources, []), cpu_request_milli(resources, [])
    milli, total = limit or request, 1000 * slots.count
    is_lower_bound = not limit and (resources.cpu_shares or 0) >= MAX_CPU_SHARES
    if milli != total and not (
        milli < total and (is_lower_bound or permission.allow_unrequested_cpus)
    ):
        expected = "as in the claim" if claimed else "1 CPU for each slot"
        return Rejection(
            reason=RejectionReason.SLOTS_MISMATCH,
            detail=f"cpu is {_size_text(milli)} and it holds {slots_text}, expected "
            f"{human_milli(total)}, {expected}",
            rule="a container has as many exclusive CPUs as it holds slots",
        )
    return replace(
        requested,
        cpus=CPUMode.EXCLUSIVE,
        bind=Bind.CPU_MEM if requested.bind is Bind.NONE else requested.bind,
        slots=slots,
        unrequested_cpus=permission.allow_unrequested_cpus,
        permission=permission.name,
        explicit_keys=requested.explicit_keys | {"cpus"},
        sources={**requested.sources, "cpus": OptionSource(kind, slots_text)},
    )


def _option_contradicting_slots(
    requested: PlacementOptions, slots: HeldCPUSlots
) -> tuple[str, str, str] | None:
    """Find the option that contradicts the slots: key, value and cause."""
    if requested.numacpu is not None:
        return "numacpu", requested.numacpu, "the CPUs of numacpu are used as listed"
    if requested.cpus is CPUMode.SHARED and "cpus" in requested.explicit_keys:
        return "cpus", requested.cpus.value, "slots are exclusive CPUs"
    if requested.bind is Bind.NONE and "bind" in requested.explicit_keys:
        return "bind", requested.bind.value, "bind: none changes nothing"
    if requested.scope is Scope.POD and slots.by_node:
        return "scope", "pod", "the kubelet has chosen a NUMA node for each container"
    return None


def complete_options(
    settings: Settings,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions | Rejection,
) -> PlacementOptions | Rejection:
    """Add slots and the setting ``staticCPUs`` to a container's options.

    With the setting each container of a Guaranteed pod with a whole number of CPUs owns them,
    wherever they are: the kubelet's static CPU Manager with the Topology Manager's policy none.
    A policy, ``cpus``, ``numacpu`` and ``bind: none`` speak for themselves, and a container that
    somebody else pinned stays theirs. Memory is left alone, unless ``bind`` is given or the
    kubelet's Memory Manager is followed as well.
    """
    if container.annotations:
        requested = with_slots(settings, pod, container, requested)
    if (
        not settings.kubelet.static_cpus
        or isinstance(requested, Rejection)
        or pod.qos is not QoSClass.GUARANTEED
        or requested.policy is not Policy.NONE
        or requested.cpus is not None
        or requested.numacpu is not None
        or requested.bind is Bind.NONE
        or container.resources.cpus
    ):
        return requested
    milli = cpu_size_milli(container.resources)
    if not milli or milli % 1000:
        return requested
    is_unpinned = (
        requested.numamem is None
        and "bind" not in requested.sources
        and not settings.kubelet.memory
    )
    return replace(
        requested,
        cpus=CPUMode.EXCLUSIVE,
        bind=Bind.CPU if is_unpinned else requested.bind,
        sources={**requested.sources, "cpus": STATIC_CPUS_SETTING_AS_SOURCE},
    )
