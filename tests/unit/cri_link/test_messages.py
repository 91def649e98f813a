"""What CRI tells becomes what NRI would have told, and nonsense in a spec is left out."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.cri.client import (
    CRIContainerState,
    CRIContainerStatus,
    CRIPodSandbox,
    CRIPodSandboxStatus,
    CRIResources,
)
from nri_numa.cri_link.messages import container_message, cri_resources, pod_message
from nri_numa.engine.values.workload import QoSClass
from nri_numa.nri import conversion
from nri_numa.nri.mentions import mentions_of, network_namespace
from nri_numa.nri.wire.pb import nri_pb2 as pb


def status(spec: Any = None, resources: CRIResources | None = None) -> CRIContainerStatus:
    return CRIContainerStatus(
        id="c1",
        name="main",
        state=CRIContainerState.CREATED,
        pid=12,
        resources=resources,
        annotations={"a": "cri", "b": "cri"},
        spec=spec or {},
    )


SPEC = {
    "annotations": {"a": "oci", "n": 1},
    "process": {"env": ["PCIDEVICE_X=0000:3b:00.0", 7], "oomScoreAdj": -997},
    "linux": {
        "cgroupsPath": "/kubepods/pod1/c1",
        "devices": [{"path": "/dev/x", "type": "c", "major": 10, "minor": 3}],
        "resources": {
            "cpu": {"shares": 2048, "quota": 200_000, "period": 100_000, "cpus": "1", "mems": "0"},
            "memory": {"limit": 4096},
            "hugepageLimits": [{"pageSize": "2MB", "limit": 8192}],
            "devices": [{"allow": False, "access": "rwm"}, {"allow": True, "major": 10}],
        },
    },
}


def test_a_spec_tells_everything_that_nri_does() -> None:
    message = container_message(status(SPEC), "p1")
    container = conversion.container_from(message)
    assert (container.id, container.pod_id, container.name) == ("c1", "p1", "main")
    assert container.annotations == {"a": "oci", "b": "cri"}
    assert (container.pid, container.starting) == (12, True)
    assert (container.cgroups_path, container.oom_score_adj) == ("/kubepods/pod1/c1", -997)
    resources = container.resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpu_period) == (
        2048,
        200_000,
        100_000,
    )
    assert (resources.memory_limit, resources.hugepages) == (4096, {2 << 20: 8192})
    assert (resources.cpus, resources.mems) == ("1", "0")
    mentions = mentions_of(message)
    assert [(d.major, d.minor) for d in mentions.nodes] == [(10, 3)]
    assert mentions.variables == {"PCIDEVICE_X": "0000:3b:00.0"}


def test_without_a_spec_what_cri_itself_has_must_do() -> None:
    told = CRIResources(
        cpu_shares=1024,
        cpu_quota=100_000,
        cpu_period=100_000,
        memory_limit_bytes=5,
        oom_score_adj=2,
        cpus="3",
        hugepage_limits={"1GB": 1 << 30},
    )
    container = conversion.container_from(container_message(status(resources=told), "p1"))
    assert container.resources.cpu_quota == 100_000
    assert container.resources.hugepages == {1 << 30: 1 << 30}
    assert (container.resources.cpus, container.oom_score_adj) == ("3", 2)
    assert conversion.container_from(container_message(status(), "p")).resources.cpu_shares is None


@pytest.mark.parametrize(
    "spec",
    [
        {"linux": [], "process": "x", "annotations": 3},
        {"linux": {"resources": {"cpu": {"shares": -1, "quota": 2**70, "cpus": 3}}}},
        {"linux": {"devices": "x", "resources": {"hugepageLimits": [{"pageSize": 1}, 5]}}},
        {"process": {"env": {}, "oomScoreAdj": True}},
        {"linux": {"resources": {"devices": [{"major": "x"}], "cpu": {"period": -5}}}},
        {"linux": {"resources": {"hugepageLimits": [{"pageSize": "2MB", "limit": -1}]}}},
    ],
)
def test_nonsense_in_a_spec_is_left_out(spec: Any) -> None:
    resources = conversion.container_from(container_message(status(spec), "p")).resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpus) == (None, None, "")
    assert resources.hugepages == {}


def test_a_pod_has_its_size_its_class_and_its_network() -> None:
    told = CRIPodSandboxStatus(
        pod=CRIPodSandbox(
            id="p1", name="db", namespace="shop", uid="u", ready=True, annotations={"k": "v"}
        ),
        config={
            "linux": {
                "cgroup_parent": "/kubepods/burstable/podu",
                "resources": {"cpu_shares": 512, "memory_limit_in_bytes": 7},
            }
        },
        spec={"linux": {"namespaces": [{"type": "network", "path": "/run/netns/x"}]}},
    )
    message = pod_message(told)
    pod = conversion.pod_from(message)
    assert (pod.id, pod.uid, pod.full_name, pod.annotations) == ("p1", "u", "shop/db", {"k": "v"})
    assert (pod.qos, pod.resources.cpu_shares, pod.resources.memory_limit) == (
        QoSClass.BURSTABLE,
        512,
        7,
    )
    assert network_namespace(message) == "/run/netns/x"


def test_an_answer_becomes_an_update_of_what_it_changes() -> None:
    update = pb.ContainerUpdate(container_id="c1")
    update.linux.resources.cpu.cpus = "1"
    update.linux.resources.cpu.quota.value = -1
    assert cri_resources(update) == CRIResources(cpus="1", cpu_quota=-1)
