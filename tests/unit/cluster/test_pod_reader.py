"""What pods ask for, before any node has seen them."""

import pytest

from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig, DevicePluginSection
from nri_numa.config.sections import RuleDocument
from nri_numa.model.workload import Policy
from tests.beds.objects import GIB, container, pod, single

READER = PodReader(AgentConfig())


def test_the_extended_resource_makes_cpus_exclusive() -> None:
    """As the device plugin does on the node."""
    reader = PodReader(
        AgentConfig(device_plugin=DevicePluginSection(resource_name="example.com/cpu"))
    )
    one = container(cpu="4", memory="1Gi")
    one["resources"]["limits"] = {**one["resources"]["limits"], "example.com/cpu": "4"}
    (need,) = reader.read_pod_request(pod(one, policy="single-numa-node")).containers
    assert (need.exclusive_cpus, need.policy) == (4, Policy.SINGLE_NUMA_NODE)
    one["resources"]["limits"]["example.com/cpu"] = "3"
    assert "holds 3 slots" in reader.read_pod_request(pod(one, name="other")).invalid_reason


def test_a_request_is_known_exactly_here() -> None:
    """The node reads it from a score, to a thousandth of the machine."""
    one = {"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "700Mi"}}}
    (need,) = READER.read_pod_request(pod(one, policy="restricted")).containers
    assert need.amounts == need.charged_amounts == (("memory", 700 << 20),)
    assert (need.shared_milli, need.charged_milli) == (500, 500)


def test_a_pod_as_a_whole_needs_its_peak() -> None:
    wish = READER.read_pod_request(
        pod(
            container("a", "2", "1Gi"), container("b", "3", "2Gi"),
            init=[container("first", "8", "1Gi")], policy="single-numa-node", scope="pod",
        )
    )  # fmt: skip
    assert wish.pod_scope_request is not None
    assert wish.pod_scope_request.exclusive_cpus == 8
    assert wish.pod_scope_request.amounts == (("memory", 3 * GIB),)
    assert [need.is_init for need in wish.containers] == [True, False, False]


def test_what_is_wrong_is_said_without_the_pods_name() -> None:
    """So that replicas have one text."""
    wish = READER.read_pod_request(pod(container(cpu="2"), name="web-1", policy="nearby"))
    assert "policy is 'nearby'" in wish.invalid_reason
    assert "web-1" not in wish.invalid_reason
    assert "expected a whole number" in READER.read_pod_request(
        pod(container(cpu="1500m", memory="1Gi"), **{"cpus.main": "exclusive"})
    ).invalid_reason.replace("a whole number of CPUs", "a whole number")


def test_a_memory_policy_without_memory_nodes_is_rejected_everywhere() -> None:
    one = container(cpu="500m", memory="1Gi")
    wrong = READER.read_pod_request(pod(one, mempolicy="bind")).invalid_reason
    assert wrong.startswith("mempolicy is 'bind' (annotation numa.kubernetes.io/mempolicy), but")
    for more in ({"numamem": "0"}, {"policy": "restricted"}, {"on-failure": "unpinned"}):
        assert not READER.read_pod_request(pod(one, mempolicy="bind", **more)).invalid_reason
    assert not READER.read_pod_request(pod(one, mempolicy="local")).invalid_reason
    ruled = PodReader(AgentConfig(rules=(RuleDocument(keys={"mempolicy": "bind"}),)))
    assert not ruled.read_pod_request(pod(one)).invalid_reason


def test_a_pod_that_cannot_be_read_is_wrong_only_if_it_asks() -> None:
    broken = pod({"name": "main", "resources": {"limits": {"cpu": "many"}}}, policy="restricted")
    assert "cannot be read" in READER.read_pod_request(broken).invalid_reason
    broken["metadata"]["annotations"] = {}
    broken["metadata"]["uid"] = "another"
    assert READER.read_pod_request(broken).is_unconstrained
    for garbage in ({}, {"metadata": 3}, {"spec": []}, {"metadata": {"annotations": [1]}}):
        assert PodReader(AgentConfig()).read_pod_request(garbage).is_unconstrained


def test_pod_level_resources_are_those_of_its_containers_once() -> None:
    """As on the node: the first of those without limits has the pod's, the next what is left."""
    document = pod(container("a"), container("b"), policy="single-numa-node")
    amounts = {"cpu": "4", "memory": "1Gi"}
    document["spec"]["resources"] = {"requests": amounts, "limits": amounts}
    wish = PodReader(AgentConfig()).read_pod_request(document)
    assert [(need.exclusive_cpus, need.charged_milli) for need in wish.containers] == [
        (4, 0),
        (0, 0),
    ]
    assert [dict(need.charged_amounts).get("memory", 0) for need in wish.containers] == [1 << 30, 0]
    assert [need.exclusive_cpus for need in wish.kubelet_aligned] == [4]


def test_a_pod_is_read_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.cluster.pod_reader._MAX_CACHED_PODS", 2)
    reader = PodReader(AgentConfig())
    for count in range(1, 8):
        document = single(count, name=f"p{count % 4}")
        document["metadata"]["resourceVersion"] = str(count)
        for _ in range(2):
            (one,) = reader.read_pod_request(document).containers
            assert one.exclusive_cpus == count
        assert reader.cached_request(f"uid-p{count % 4}") == reader.read_pod_request(document)
    reader.drop_pod("uid-p3")
    assert reader.cached_request("uid-p3") is None
