"""What a container needs, recovered from what the runtime tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nri_numa.engine.request.demand import Demand, demand, request_milli
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Policy,
    QoSClass,
    Requested,
    Resources,
)

GiB = 1 << 30
MiB = 1 << 20
CAPACITY = 512 * GiB

G, B, BE = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BEST_EFFORT


def needs(
    resources: Resources,
    requested: Requested | None = None,
    *,
    qos: QoSClass = G,
    score: int | None = None,
    capacity: int = CAPACITY,
) -> Demand | Refusal:
    pod = PodSandbox(id="p", uid="u", namespace="shop", name="web", qos=qos)
    container = Container(id="c", pod_id="p", name="main", resources=resources, oom_score_adj=score)
    return demand(pod, container, requested or Requested(), capacity)


def good(
    resources: Resources,
    requested: Requested | None = None,
    *,
    qos: QoSClass = G,
    score: int | None = None,
    capacity: int = CAPACITY,
) -> Demand:
    found = needs(resources, requested, qos=qos, score=score, capacity=capacity)
    assert isinstance(found, Demand), found.message
    return found


def kubelet_cpu(request: int, limit: int = 0) -> Resources:
    """Build what the kubelet sends for a request and a limit in thousandths of a CPU."""
    return Resources(
        cpu_shares=max(2, request * 1024 // 1000),
        cpu_quota=max(1000, limit * 100) if limit else None,
        cpu_period=100_000,
    )


@pytest.mark.parametrize("milli", [1000, 2000, 1500, 100, 250, 333, 64_000, 3, 4999, 255_999])
def test_requests_and_limits_come_back_exactly(milli: int) -> None:
    assert request_milli(kubelet_cpu(milli), []) == milli
    if milli >= 10:  # below, the kubelet's least quota of 1 ms hides the limit
        found = good(kubelet_cpu(milli, milli))
        assert (found.cpu_milli, found.cpu_request_milli) == (milli, milli)
        assert (found.cpu_source, found.notes) == ("limit", ())


@pytest.mark.parametrize(
    ("resources", "milli", "source"),
    [
        (Resources(), 0, "none"),
        (Resources(cpu_shares=0), 0, "none"),
        (Resources(cpu_shares=2), 0, "none"),
        (Resources(cpu_shares=3), 3, "request"),
        (Resources(cpu_shares=1536), 1500, "request"),
        (Resources(cpu_shares=1536, cpu_quota=-1, cpu_period=100_000), 1500, "request"),
        (Resources(cpu_shares=1536, cpu_quota=0, cpu_period=100_000), 1500, "request"),
        (Resources(cpu_shares=512, cpu_quota=400_000, cpu_period=100_000), 4000, "limit"),
        (Resources(cpu_quota=400_000), 4000, "limit"),
        (Resources(cpu_quota=400_000, cpu_period=0), 4000, "limit"),
        (Resources(cpu_quota=66_666, cpu_period=33_333), 2000, "limit"),
        (Resources(cpu_quota=49_999, cpu_period=33_333), 1500, "limit"),
        (Resources(cpu_quota=10_000, cpu_period=5_000), 2000, "limit"),
        (Resources(cpu_quota=1), 0, "none"),
    ],
)
def test_the_cpu_need_is_the_limit_else_the_request(
    resources: Resources, milli: int, source: str
) -> None:
    found = good(resources)
    assert (found.cpu_milli, found.cpu_source, found.notes) == (milli, source, ())


@pytest.mark.parametrize(
    ("resources", "milli", "said"),
    [
        (Resources(cpu_quota=-7, cpu_shares=1024), 1000, "CPU quota -7 is negative"),
        (Resources(cpu_quota=100_000, cpu_period=-5), 1000, "CPU period -5 is negative"),
        (Resources(cpu_quota=1 << 62, cpu_period=1), 0, "above the kernel's"),
        (Resources(cpu_shares=-1), 0, "-1 CPU shares are negative"),
        (Resources(cpu_shares=1 << 63), 256_000, "above the kernel's 262144"),
    ],
)
def test_absurd_cpu_values_are_disregarded_and_said(
    resources: Resources, milli: int, said: str
) -> None:
    found = good(resources)
    assert found.cpu_milli == milli
    assert len(found.notes) == 1
    assert said in found.notes[0]


ALIGNED = Requested(policy=Policy.RESTRICTED)
ASKED = Requested(
    cpus=CPUMode.EXCLUSIVE,
    given=frozenset({"cpus"}),
    sources={"cpus": "annotation numa.kubernetes.io/cpus"},
)
BY_DEFAULT = Requested(cpus=CPUMode.EXCLUSIVE, sources={"cpus": "default"})
WHOLE = kubelet_cpu(2000, 2000)
FRACTION = kubelet_cpu(1500, 1500)


@pytest.mark.parametrize(
    ("qos", "resources", "requested", "exclusive"),
    [
        # nobody said: as under the kubelet's static policy, where a policy is wanted at all
        (G, WHOLE, ALIGNED, 2),
        (G, FRACTION, ALIGNED, 0),
        (G, kubelet_cpu(0), ALIGNED, 0),
        (G, WHOLE, Requested(), 0),
        (B, WHOLE, ALIGNED, 0),
        (BE, Resources(), ALIGNED, 0),
        # the kubelet runs without CFS quota: the shares tell
        (G, kubelet_cpu(2000), ALIGNED, 2),
        # asked for
        (G, WHOLE, ASKED, 2),
        (B, kubelet_cpu(4000, 4000), ASKED, 4),
        (B, kubelet_cpu(1000, 4000), replace(ASKED, unpaid_cpus=True), 4),
        (B, kubelet_cpu(3000), ASKED, 3),
        # refused by the pod
        (G, WHOLE, Requested(policy=Policy.RESTRICTED, cpus=CPUMode.SHARED), 0),
        (G, WHOLE, Requested(policy=Policy.RESTRICTED, bind=Bind.NONE), 0),
        # a configured default is no demand: what cannot own CPUs shares
        (G, WHOLE, BY_DEFAULT, 2),
        (G, FRACTION, BY_DEFAULT, 0),
        (BE, Resources(), BY_DEFAULT, 0),
        # an explicit list is taken as it is, whatever the number
        (B, FRACTION, Requested(numacpu="0-3", cpus=CPUMode.EXCLUSIVE, given=ASKED.given), 0),
        # promises about siblings need CPUs of one's own
        (G, WHOLE, Requested(smt=SMT.FULL_CORE, given=frozenset({"smt"})), 2),
        (G, WHOLE, Requested(smt=SMT.FULL_CORE), 0),
    ],
)
def test_who_gets_cpus_of_its_own(
    qos: QoSClass, resources: Resources, requested: Requested, exclusive: int
) -> None:
    found = good(resources, requested, qos=qos)
    assert found.exclusive_cpus == exclusive
    assert found.notes == ()


def test_a_promise_that_shared_cpus_cannot_keep_is_said() -> None:
    requested = Requested(smt=SMT.ISOLATE, given=frozenset({"smt"}))
    found = good(FRACTION, requested)
    assert found.exclusive_cpus == 0
    assert found.notes == ("smt: isolate has no effect on shared CPUs",)


def test_a_fraction_is_refused_with_that_reason() -> None:
    bad = needs(FRACTION, ASKED)
    assert isinstance(bad, Refusal)
    assert bad.reason == "FractionalCPUs"
    assert bad.message == (
        "pod shop/web, container main: cpu is 1500m, expected a whole number of CPUs such as "
        "2000m, because cpus: exclusive is asked for (annotation numa.kubernetes.io/cpus)"
    )


@pytest.mark.parametrize("resources", [Resources(), kubelet_cpu(0), Resources(cpu_quota=-1)])
def test_exclusive_cpus_without_any_number_are_refused(resources: Resources) -> None:
    bad = needs(resources, ASKED, qos=BE)
    assert isinstance(bad, Refusal)
    assert bad.reason == "NoCPUs"
    assert "cpu is not set, expected a CPU limit or request that is a whole number" in bad.message


@pytest.mark.parametrize(
    ("qos", "limit", "score", "expected"),
    [
        (G, 4 * GiB, -997, (4 * GiB, "limit")),
        (B, 4 * GiB, 900, (4 * GiB, "limit")),
        # 1000 - 1000 * request / capacity
        (B, None, 750, (128 * GiB, "request")),
        (B, 0, 998, (512 * GiB * 2 // 1000, "request")),
        (B, -1, 2, (512 * GiB * 998 // 1000, "request")),
        # 999 is what the kubelet writes where nothing was requested
        (B, None, 999, (0, "none")),
        (B, None, 1000, (0, "none")),
        (B, None, 1001, (0, "none")),
        # node-critical pods and what is not of Kubernetes
        (B, None, -997, (0, "none")),
        (B, None, 0, (0, "none")),
        (B, None, None, (0, "none")),
        (G, None, 750, (0, "none")),
        (BE, None, 1000, (0, "none")),
    ],
)
def test_the_memory_need_is_the_limit_else_what_the_oom_score_tells(
    qos: QoSClass, limit: int | None, score: int | None, expected: tuple[int, str]
) -> None:
    found = good(Resources(memory_limit=limit), qos=qos, score=score)
    assert (found.memory_bytes, found.memory_source) == expected
    assert found.notes == ()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (0x7FFF_FFFF_FFFF_F000, "above any machine"),  # cgroup v1 without a limit
        (-4096, "memory limit -4096 is negative"),
    ],
)
def test_absurd_memory_limits_are_disregarded_and_said(limit: int, said: str) -> None:
    found = good(Resources(memory_limit=limit), qos=B, score=750)
    assert found.memory_bytes == 128 * GiB
    assert said in found.notes[0]


@pytest.mark.parametrize("capacity", [0, -1])
def test_without_a_known_capacity_the_oom_score_tells_nothing(capacity: int) -> None:
    found = good(Resources(), qos=B, score=750, capacity=capacity)
    assert (found.memory_bytes, found.memory_source) == (0, "none")


def test_huge_pages_are_whole_pages_without_zeros() -> None:
    sizes = {GiB: 0, 2 * MiB: 3 * MiB, 64 * 1024: 64 * 1024}
    found = good(Resources(hugepages=sizes))
    assert found.hugepages == {64 * 1024: 64 * 1024, 2 * MiB: 4 * MiB}
    assert found.notes == ()


@pytest.mark.parametrize("hugepages", [{0: 5}, {2 * MiB: -1}, {2 * MiB: 1 << 63}, {-1: 5}])
def test_absurd_huge_pages_are_disregarded_and_said(hugepages: dict[int, int]) -> None:
    found = good(Resources(hugepages=hugepages))
    assert found.hugepages == {}
    assert "counts as none" in found.notes[0]


@pytest.mark.parametrize(
    ("qos", "resources", "paid"),
    [(B, kubelet_cpu(0, 28_000), "not set"), (B, kubelet_cpu(27_999, 28_000), "27999m")],
)
def test_exclusive_cpus_must_be_paid_for(qos: QoSClass, resources: Resources, paid: str) -> None:
    found = needs(resources, ASKED, qos=qos)
    assert isinstance(found, Refusal)
    assert found.reason == "UnpaidCPUs"
    assert f"cpu request is {paid}, expected 28000m" in found.message


def test_what_a_request_does_not_pay_for_is_not_booked() -> None:
    made = Resources(memory_limit=32 << 40)
    for qos, score, allocated in (
        (G, -997, 32 << 40),
        (B, 900, (1 << 40) * 100 // 1000),
        (B, 999, 0),
        (B, None, 0),
        (B, -997, 0),
        (B, 1, 0),
        (BE, 1000, 0),
    ):
        found = needs(made, qos=qos, score=score, capacity=1 << 40)
        assert isinstance(found, Demand)
        assert (found.memory_bytes, found.memory_paid) == (32 << 40, allocated)
        assert bool(found.notes) == (qos is not G)
    small = Resources(memory_limit=1 << 30)
    found = needs(small, qos=B, score=2, capacity=1 << 40)
    assert isinstance(found, Demand)
    assert found.memory_paid == 1 << 30


def test_shares_that_mean_any_number_say_which_number_that_begins_at() -> None:
    """docs/troubleshooting.md shows the sentence."""
    found = good(Resources(cpu_shares=262_144))
    assert found.cpu_at_least
    assert found.notes == ("262144 CPU shares stand for 256 CPUs or any number above",)
    assert not good(Resources(cpu_shares=262_143)).cpu_at_least


@pytest.mark.parametrize("period", [-1, -2, -100_000])
def test_a_negative_period_counts_as_the_usual_one(period: int) -> None:
    found = good(Resources(cpu_quota=200_000, cpu_period=period))
    assert found.cpu_milli == 2000
    assert found.notes == (f"CPU period {period} is negative and counts as 100000",)
