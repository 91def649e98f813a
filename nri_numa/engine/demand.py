"""What one container needs, worked out from what the runtime tells.

The CRI carries neither requests nor the QoS class, but both can be recovered: quota and period are
the CPU limit, shares are the CPU request, the OOM score of a Burstable pod's container is its
memory request (kubelet: ``pkg/kubelet/qos/policy.go`` and ``cm/helpers_linux.go``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
    Wishes,
)
from nri_numa.topology.cpuset import CPUSet

SHARES_PER_CPU: Final = 1024
MIN_SHARES: Final = 2
"""The least the kernel takes; the kubelet writes it where no CPU was requested."""
MAX_SHARES: Final = 262_144
DEFAULT_PERIOD: Final = 100_000
"""Microseconds; the kernel's, used where a quota comes without a period."""

_BYTES_LIMIT: Final = 1 << 62
"""cgroup v1 says *no limit* with numbers near 2**63; no machine has half of that."""
_MILLI_LIMIT: Final = 1000 * CPUSet.LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a container needs.

    Attributes:
        cpu_milli: thousandths of a CPU: the limit, else the request, else 0.
        cpu_request_milli: thousandths of a CPU that are requested, as far as the shares tell.
        exclusive_cpus: whole CPUs to own; 0 for a container that shares.
        memory_bytes: the limit, else the request as far as the OOM score tells, else 0.
        hugepages: bytes by page size in bytes, whole pages, no zero entries.
        cpu_source: ``limit``, ``request`` or ``none``.
        memory_source: ``limit``, ``request`` (to a thousandth of the machine) or ``none``.
        notes: values that were disregarded, and why, one clause each.
    """

    cpu_milli: int = 0
    cpu_request_milli: int = 0
    exclusive_cpus: int = 0
    memory_bytes: int = 0
    hugepages: Mapping[int, int] = field(default_factory=dict)
    cpu_source: str = "none"
    memory_source: str = "none"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadDemand:
    """A need that cannot be met on any machine.

    Attributes:
        reason: CamelCase: ``FractionalCPUs`` or ``NoCPUs``.
        pod: ``namespace/name``.
        container: name.
        resource: what the value is of, ``cpu``.
        value: as a Kubernetes quantity, ``1500m``.
        expected: as the end of a sentence that starts *expected*.
    """

    reason: str
    pod: str
    container: str
    resource: str
    value: str
    expected: str

    @property
    def message(self) -> str:
        """One sentence for the user."""
        return (
            f"pod {self.pod}, container {self.container}: {self.resource} is {self.value}, "
            f"expected {self.expected}"
        )


def demand(
    pod: PodSandbox, container: Container, wishes: Wishes, capacity_bytes: int
) -> Demand | BadDemand:
    """Work out what a container needs.

    Whole CPUs of its own get a container that asks for them (``cpus: exclusive``) and, as under
    the kubelet's static policy, one of a Guaranteed pod with a whole number of CPUs, provided that
    anything asks for alignment at all: a policy, or ``smt: full-core | isolate``, which could not
    be kept on shared CPUs. Where only the configured *default* says ``exclusive``, containers
    without a whole number share; a pod or a rule that says it is refused instead.

    Args:
        pod: for its QoS class.
        container: for its resources and OOM score.
        wishes: as `nri_numa.engine.wishes.resolve` gave them.
        capacity_bytes: memory of the machine as the kubelet counts it (MemTotal).
    """
    resources = container.resources
    notes: list[str] = []
    request = request_milli(resources, notes)
    limit = limit_milli(resources, notes)
    milli = limit or request
    exclusive = 0
    # An explicit list is taken as it is, and bind: none touches nothing: no number is needed.
    if wishes.numacpu is None and wishes.bind is not Bind.NONE:
        owning = wishes.smt in (SMT.FULL_CORE, SMT.ISOLATE) and "smt" in wishes.given
        whole = milli > 0 and milli % 1000 == 0
        if wishes.cpus is CPUMode.EXCLUSIVE:
            if whole:
                exclusive = milli // 1000
            elif "cpus" in wishes.given:
                return _not_whole(pod, container, wishes, milli)
        elif wishes.cpus is None and whole and pod.qos is QoSClass.GUARANTEED:
            exclusive = milli // 1000 if owning or wishes.policy is not Policy.NONE else 0
        if owning and not exclusive:
            notes.append(f"smt: {wishes.smt.value} has no effect on shared CPUs")
    memory, memory_source = _memory(pod, container, capacity_bytes, notes)
    return Demand(
        cpu_milli=milli,
        cpu_request_milli=request,
        exclusive_cpus=exclusive,
        memory_bytes=memory,
        hugepages=_hugepages(resources, notes) if resources.hugepages else {},
        cpu_source="limit" if limit else "request" if request else "none",
        memory_source=memory_source,
        notes=tuple(notes),
    )


def _not_whole(pod: PodSandbox, container: Container, wishes: Wishes, milli: int) -> BadDemand:
    asked = f"because cpus: exclusive is asked for ({wishes.sources.get('cpus', 'unknown source')})"
    if milli:
        reason, value = "FractionalCPUs", f"{milli}m"
        expected = f"a whole number of CPUs such as {1000 * (milli // 1000 + 1)}m, {asked}"
    else:
        reason, value = "NoCPUs", "not set"
        expected = f"a CPU limit or request that is a whole number, {asked}"
    return BadDemand(
        reason=reason,
        pod=pod.full_name,
        container=container.name,
        resource="cpu",
        value=value,
        expected=expected,
    )


def limit_milli(resources: Resources, notes: list[str]) -> int:
    """Thousandths of a CPU from quota and period; 0 without a limit.

    What had to be disregarded is added to ``notes``.
    """
    quota = resources.cpu_quota
    if quota is None or quota in (0, -1):
        return 0
    if quota < 0:
        notes.append(f"CPU quota {quota} is negative and counts as no limit")
        return 0
    period = resources.cpu_period
    if period is None or period == 0:
        period = DEFAULT_PERIOD
    elif period < 0:
        notes.append(f"CPU period {period} is negative and counts as {DEFAULT_PERIOD}")
        period = DEFAULT_PERIOD
    # To the nearest: the kubelet cuts quotas to whole microseconds, which shows with odd periods.
    milli = (quota * 1000 + period // 2) // period
    if milli > _MILLI_LIMIT:
        notes.append(f"CPU quota {quota} of {period} is above any machine and counts as no limit")
        return 0
    return milli


def request_milli(resources: Resources, notes: list[str]) -> int:
    """Thousandths of a CPU from shares; 0 without a request.

    What had to be disregarded is added to ``notes``.

    The kubelet rounds ``milli * 1024 / 1000`` down, so rounding up gives the exact request back.
    """
    shares = resources.cpu_shares
    if shares is None or 0 <= shares <= MIN_SHARES:
        return 0
    if shares < 0:
        notes.append(f"{shares} CPU shares are negative and count as no request")
        return 0
    if shares > MAX_SHARES:
        notes.append(f"{shares} CPU shares are above the kernel's {MAX_SHARES} and count as these")
        shares = MAX_SHARES
    return -(-shares * 1000 // SHARES_PER_CPU)


def merged(current: Resources, change: Resources) -> Resources:
    """Put an update on top of what a container has; what the update does not give stays."""
    return Resources(
        cpu_shares=current.cpu_shares if change.cpu_shares is None else change.cpu_shares,
        cpu_quota=current.cpu_quota if change.cpu_quota is None else change.cpu_quota,
        cpu_period=current.cpu_period if change.cpu_period is None else change.cpu_period,
        memory_limit=current.memory_limit if change.memory_limit is None else change.memory_limit,
        hugepages={**current.hugepages, **change.hugepages},
        cpus=change.cpus or current.cpus,
        mems=change.mems or current.mems,
    )


def _memory(
    pod: PodSandbox, container: Container, capacity_bytes: int, notes: list[str]
) -> tuple[int, str]:
    limit = container.resources.memory_limit
    if limit is not None and limit > 0:
        if limit < _BYTES_LIMIT:
            return limit, "limit"
        notes.append(f"memory limit {limit} is above any machine and counts as no limit")
    elif limit is not None and limit < -1:
        notes.append(f"memory limit {limit} is negative and counts as no limit")
    score = container.oom_score_adj
    # kubelet: 1000 - 1000 * request / capacity, never below 2 and never 1000; 999 is what a
    # container without a request gets, and node-critical pods get -997 whatever they request.
    if pod.qos is QoSClass.BURSTABLE and score is not None and 2 <= score < 999:
        request = max(0, capacity_bytes) * (1000 - score) // 1000
        if request:
            return request, "request"
    return 0, "none"


def _hugepages(resources: Resources, notes: list[str]) -> dict[int, int]:
    """Bytes by page size, without the zeros that the kubelet sends for sizes nobody asked for."""
    wanted: dict[int, int] = {}
    for size, limit in sorted(resources.hugepages.items()):  # by page size
        if limit == 0:
            continue
        if size <= 0 or limit < 0 or limit >= _BYTES_LIMIT:
            notes.append(f"huge page limit {limit} for pages of {size} bytes counts as none")
            continue
        wanted[size] = -(-limit // size) * size
    return wanted
