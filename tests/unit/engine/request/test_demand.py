"""Who gets CPUs of its own; amounts that make no sense are in tests/golden/requested."""

import pytest
from msgspec.structs import replace

from nri_numa.engine.request.demand import Demand, compute_demand
from nri_numa.engine.request.options import (
    DEFAULT_SOURCE,
    OptionSource,
    PlacementOptions,
    SourceKind,
)
from nri_numa.model.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
)

GiB = 1 << 30
CAPACITY = 512 * GiB

G, B, BE = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BEST_EFFORT


def good(
    resources: Resources,
    requested: PlacementOptions | None = None,
    *,
    qos: QoSClass = G,
    score: int | None = None,
    capacity: int = CAPACITY,
) -> Demand:
    pod = PodSandbox(id="p", uid="u", namespace="shop", name="web", qos=qos)
    container = Container(id="c", pod_id="p", name="main", resources=resources, oom_score_adj=score)
    found = compute_demand(pod, container, requested or PlacementOptions(), capacity)
    assert isinstance(found, Demand), found.detail
    return found


def kubelet_cpu(request: int, limit: int = 0) -> Resources:
    """Build what the kubelet sends for a request and a limit in thousandths of a CPU."""
    return Resources(
        cpu_shares=max(2, request * 1024 // 1000),
        cpu_quota=max(1000, limit * 100) if limit else None,
        cpu_period=100_000,
    )


ALIGNED = PlacementOptions(policy=Policy.RESTRICTED)
ASKED = PlacementOptions(
    cpus=CPUMode.EXCLUSIVE,
    explicit_keys=frozenset({"cpus"}),
    sources={"cpus": OptionSource(SourceKind.ANNOTATION, "numa.kubernetes.io/cpus.main", True)},
)
BY_DEFAULT = PlacementOptions(cpus=CPUMode.EXCLUSIVE, sources={"cpus": DEFAULT_SOURCE})
WHOLE = kubelet_cpu(2000, 2000)
FRACTION = kubelet_cpu(1500, 1500)


def test_negative_cpu_shares_are_disregarded_and_said() -> None:
    """Other absurd values are in tests/golden/requested."""
    found = good(Resources(cpu_shares=-1))
    assert (found.cpu_milli, len(found.notes)) == (0, 1)
    assert "-1 CPU shares are negative" in found.notes[0]


@pytest.mark.parametrize(
    ("qos", "resources", "requested", "exclusive"),
    [
        # nobody said: as under the kubelet's static policy, where a policy is wanted at all
        (G, WHOLE, ALIGNED, 2),
        (G, FRACTION, ALIGNED, 0),
        (G, kubelet_cpu(0), ALIGNED, 0),
        (G, WHOLE, PlacementOptions(), 0),
        (B, WHOLE, ALIGNED, 0),
        (BE, Resources(), ALIGNED, 0),
        # the kubelet runs without CFS quota: the shares tell
        (G, kubelet_cpu(2000), ALIGNED, 2),
        # asked for
        (G, WHOLE, ASKED, 2),
        (B, kubelet_cpu(4000, 4000), ASKED, 4),
        (B, kubelet_cpu(1000, 4000), replace(ASKED, unrequested_cpus=True), 4),
        (B, kubelet_cpu(3000), ASKED, 3),
        # refused by the pod
        (G, WHOLE, PlacementOptions(policy=Policy.RESTRICTED, cpus=CPUMode.SHARED), 0),
        (G, WHOLE, PlacementOptions(policy=Policy.RESTRICTED, bind=Bind.NONE), 0),
        # a configured default is no demand: what cannot own CPUs shares
        (G, WHOLE, BY_DEFAULT, 2),
        (G, FRACTION, BY_DEFAULT, 0),
        (BE, Resources(), BY_DEFAULT, 0),
        # an explicit list is taken as it is, whatever the number
        (
            B,
            FRACTION,
            PlacementOptions(
                numacpu="0-3", cpus=CPUMode.EXCLUSIVE, explicit_keys=ASKED.explicit_keys
            ),
            0,
        ),
        # promises about siblings need CPUs of one's own
        (G, WHOLE, PlacementOptions(smt=SMT.FULL_CORE, explicit_keys=frozenset({"smt"})), 2),
        (G, WHOLE, PlacementOptions(smt=SMT.FULL_CORE), 0),
    ],
)
def test_who_gets_cpus_of_its_own(
    qos: QoSClass, resources: Resources, requested: PlacementOptions, exclusive: int
) -> None:
    found = good(resources, requested, qos=qos)
    assert found.exclusive_cpus == exclusive
    assert found.notes == ()


@pytest.mark.parametrize("capacity", [0, -1])
def test_without_a_known_capacity_the_oom_score_tells_nothing(capacity: int) -> None:
    found = good(Resources(), qos=B, score=750, capacity=capacity)
    assert (found.memory_bytes, found.memory_source) == (0, "none")
