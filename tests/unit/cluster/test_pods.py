"""What a kubelet makes of a pod, number by number."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.cluster.pods import (
    ContainerManifest,
    ContainerRole,
    PodManifest,
    ResourceQuantities,
    cgroup_parent,
    container_of,
    controller_uid,
    is_replaced_after_eviction,
    oom_score,
    pod_sandbox,
    qos_of,
    resources_of,
    sum_pod_quantities,
)
from nri_numa.demo.stage import container_message, pod_message
from nri_numa.engine.request.demand import cpu_limit_milli, cpu_request_milli
from nri_numa.model.workload import QoSClass
from nri_numa.nri.conversion import container_from, pod_from

GIB = 1 << 30


def amounts(cpu: int | None = None, memory: int | None = None) -> ResourceQuantities:
    return ResourceQuantities(cpu_milli=cpu, memory=memory)


def made(
    name: str = "app",
    role: ContainerRole = ContainerRole.APP,
    *,
    requests: ResourceQuantities | None = None,
    limits: ResourceQuantities | None = None,
) -> ContainerManifest:
    limits = limits or ResourceQuantities()
    return ContainerManifest(name=name, role=role, requests=requests or limits, limits=limits)


def pod(*containers: ContainerManifest, **more: object) -> PodManifest:
    given = {"labels": {"app": "x"}, "annotations": {"a/b": "c"}, **more}
    return PodManifest(
        source="f",
        namespace="ns",
        name="p",
        uid="11111111-2222-3333-4444-555555555555",
        qos=qos_of(containers),
        containers=containers,
        **given,  # type: ignore[arg-type]  # by name
    )


FULL = amounts(1000, GIB)


@pytest.mark.parametrize(
    ("containers", "qos"),
    [
        ([made()], QoSClass.BEST_EFFORT),
        ([made(limits=amounts(0, 0))], QoSClass.BEST_EFFORT),
        ([made(limits=FULL)], QoSClass.GUARANTEED),
        ([made(limits=FULL, requests=amounts(500, GIB))], QoSClass.BURSTABLE),
        ([made(limits=FULL, requests=amounts(1000, 1))], QoSClass.BURSTABLE),
        ([made(limits=amounts(1000))], QoSClass.BURSTABLE),
        ([made(limits=amounts(None, GIB))], QoSClass.BURSTABLE),
        ([made(requests=amounts(100))], QoSClass.BURSTABLE),
        ([made(limits=FULL), made("b", limits=FULL)], QoSClass.GUARANTEED),
        ([made(limits=FULL), made("b")], QoSClass.BURSTABLE),
        ([made(limits=FULL), made("i", ContainerRole.INIT)], QoSClass.BURSTABLE),
        ([made(limits=FULL), made("s", ContainerRole.SIDECAR, limits=FULL)], QoSClass.GUARANTEED),
    ],
)
def test_the_qos_class_is_the_kubelets(containers: list[ContainerManifest], qos: QoSClass) -> None:
    assert qos_of(containers) is qos


def test_pod_level_resources_decide_the_qos_class_alone() -> None:
    assert qos_of([made()], FULL, FULL) is QoSClass.GUARANTEED
    assert qos_of([made(limits=FULL)], amounts(500, GIB), FULL) is QoSClass.BURSTABLE
    assert qos_of([made(limits=FULL)], ResourceQuantities(), None) is QoSClass.BEST_EFFORT


@given(st.integers(11, 200_000))
def test_the_engine_gets_request_and_limit_back(milli: int) -> None:
    resources = resources_of(amounts(milli), amounts(milli))
    assert cpu_request_milli(resources, []) == milli
    assert cpu_limit_milli(resources, []) == milli


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        *(
            (amounts(milli), ResourceQuantities(), {"cpu_shares": shares, "cpu_quota": None})
            for milli, shares in (
                *((None, 2), (0, 2), (1, 2), (2, 2), (100, 102), (250, 256)),
                *((1000, 1024), (300_000, 262_144)),
            )
        ),
        *(
            (amounts(1), amounts(milli), {"cpu_quota": quota})
            for milli, quota in ((0, None), (1, 1000), (10, 1000), (500, 50_000), (4000, 400_000))
        ),
        # Without a request the limit makes the shares.
        (ResourceQuantities(), amounts(2000), {"cpu_shares": 2048, "cpu_period": 100_000}),
        (amounts(500, GIB), ResourceQuantities(), {"memory_limit": None, "cpu_period": 100_000}),
        # Huge pages of size zero are left out.
        (
            ResourceQuantities(),
            ResourceQuantities(hugepages={2 << 20: 0, GIB: GIB}),
            {"hugepages": {GIB: GIB}},
        ),
    ],
)
def test_linux_resources_are_those_that_the_kubelet_makes(
    requests: ResourceQuantities, limits: ResourceQuantities, expected: dict[str, object]
) -> None:
    made = resources_of(requests, limits)
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("containers", "cpu"),
    [
        ([("a", ContainerRole.APP, 100), ("b", ContainerRole.APP, 200)], 300),
        ([("a", ContainerRole.APP, 100), ("b", ContainerRole.APP, None)], 100),
        # An init container that needs more than what runs later.
        ([("i", ContainerRole.INIT, 900), ("a", ContainerRole.APP, 100)], 900),
        ([("i", ContainerRole.INIT, 50), ("a", ContainerRole.APP, 100)], 100),
        # Sidecars run beside the init containers after them and beside the others.
        (
            [
                ("s", ContainerRole.SIDECAR, 100),
                ("i", ContainerRole.INIT, 900),
                ("a", ContainerRole.APP, 100),
            ],
            1000,
        ),
        (
            [
                ("i", ContainerRole.INIT, 900),
                ("s", ContainerRole.SIDECAR, 100),
                ("a", ContainerRole.APP, 100),
            ],
            900,
        ),
        (
            [
                ("s", ContainerRole.SIDECAR, 100),
                ("t", ContainerRole.SIDECAR, 200),
                ("a", ContainerRole.APP, 300),
            ],
            600,
        ),
    ],
)
def test_a_pod_needs_its_peak(
    containers: list[tuple[str, ContainerRole, int | None]], cpu: int
) -> None:
    found = sum_pod_quantities(
        [made(n, role, limits=amounts(milli)) for n, role, milli in containers], lambda c: c.limits
    )
    assert found.cpu_milli == cpu
    assert found.memory is None


@pytest.mark.parametrize(
    ("request_", "score"),
    [
        (None, 999),  # 1000 is what BestEffort pods get
        (0, 999),
        (1, 999),
        (GIB, 985),  # 1000/64 is cut to 15
        (32 * GIB, 500),
        (64 * GIB, 3),
        (100 * GIB, 3),
    ],
)
def test_the_oom_score_tells_a_burstable_request(request_: int | None, score: int) -> None:
    container = made(requests=amounts(100, request_))
    assert oom_score(pod(container), container, 64 * GIB) == score


def test_guaranteed_best_effort_and_critical_pods_have_fixed_scores() -> None:
    assert oom_score(pod(made(limits=FULL)), made(limits=FULL), GIB) == -997
    assert oom_score(pod(made()), made(), GIB) == 1000
    burst = made(requests=amounts(1))
    assert oom_score(pod(burst, critical=True), burst, GIB) == -997


def test_a_sidecar_is_not_killed_before_the_least_it_serves() -> None:
    sidecar = made("s", ContainerRole.SIDECAR, requests=amounts(100, GIB))
    large, small = (made(n, requests=amounts(100, m * GIB)) for n, m in (("a", 32), ("b", 16)))
    whole = pod(sidecar, large, small)
    assert oom_score(whole, sidecar, 64 * GIB) == oom_score(whole, small, 64 * GIB) == 750


@pytest.mark.parametrize("qos", list(QoSClass))
def test_the_cgroup_tells_the_qos_class(qos: QoSClass) -> None:
    assert QoSClass.of_cgroup(cgroup_parent("a-b", qos)) is qos


def test_the_sandbox_carries_the_kubelets_labels_and_sums() -> None:
    sandbox = pod_sandbox(pod(made(limits=FULL), made("b", limits=FULL), runtime_handler="kata"))
    assert sandbox.labels == {
        "app": "x",
        "io.kubernetes.pod.name": "p",
        "io.kubernetes.pod.namespace": "ns",
        "io.kubernetes.pod.uid": "11111111-2222-3333-4444-555555555555",
    }
    assert sandbox.annotations == {"a/b": "c"}
    assert (sandbox.runtime_handler, sandbox.qos) == ("kata", QoSClass.GUARANTEED)
    assert sandbox.resources.cpu_quota == 200_000
    assert sandbox.resources.memory_limit == 2 * GIB
    parent = "/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice"
    assert sandbox.cgroup_parent == parent


def test_pod_level_resources_are_the_sandboxes() -> None:
    sandbox = pod_sandbox(
        pod(made(limits=FULL), pod_requests=amounts(3000), pod_limits=amounts(4000, 8 * GIB))
    )
    assert sandbox.resources.cpu_shares == 3072
    assert sandbox.resources.cpu_quota == 400_000
    assert sandbox.resources.memory_limit == 8 * GIB


def test_containers_have_their_own_ids_and_labels() -> None:
    whole = pod(made(limits=FULL), made("b", limits=FULL))
    a, b = (container_of(whole, c, GIB) for c in whole.containers)
    assert len({a.id, b.id, a.pod_id}) == 3
    assert a.pod_id == b.pod_id == pod_sandbox(whole).id
    assert a.labels["io.kubernetes.container.name"] == "app"
    assert "app" not in a.labels  # the pod's own labels are not the container's
    assert a.annotations == {}


milli = st.none() | st.integers(0, 128_000)
memory = st.none() | st.integers(0, 1 << 40)


@st.composite
def pods(draw: st.DrawFn) -> PodManifest:
    containers = []
    for number in range(draw(st.integers(1, 3))):
        limits = ResourceQuantities(
            cpu_milli=draw(milli),
            memory=draw(memory),
            hugepages=draw(st.dictionaries(st.sampled_from([2 << 20, GIB]), st.just(GIB))),
        )
        containers.append(made(f"c{number}", draw(st.sampled_from(ContainerRole)), limits=limits))
    return pod(*containers)


@given(pods())
def test_what_the_runtime_sends_is_read_back_the_same(whole: PodManifest) -> None:
    """Through protobuf and the conversion of the real link, nothing that counts is lost."""
    sandbox = pod_sandbox(whole)
    assert pod_from(pod_message(sandbox)) == sandbox
    for manifest in whole.containers:
        container = container_of(whole, manifest, 64 * GIB)
        # Its labels tell its name, and nothing else of them is read.
        read = container_from(container_message(container))
        assert read == replace(container, labels={})


OWNER = {"kind": "ReplicaSet", "uid": "rs", "controller": True}


def document(phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "shop", "ownerReferences": [OWNER], **metadata},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "rs"}]},
        {"ownerReferences": [{"kind": "DaemonSet", "name": "ds", "controller": True}]},
        {"ownerReferences": [{"kind": "Node", "name": "n", "controller": True}]},
        {"deletionTimestamp": "2026-11-22T15:00:00Z"},
        {"annotations": {"kubernetes.io/config.mirror": "x"}},
        {"namespace": "kube-system"},
        {"phase": "Succeeded"},
        {"phase": "Failed"},
    ],
)
def test_who_does_not_come_back_elsewhere(change: dict[str, Any]) -> None:
    assert is_replaced_after_eviction(document())
    assert not is_replaced_after_eviction(document(**change))


def test_who_makes_a_pod_again() -> None:
    assert controller_uid(document(ownerReferences=[{"kind": "Thing", "uid": "a"}, OWNER])) == "rs"
    assert controller_uid({"metadata": {}}) == ""
