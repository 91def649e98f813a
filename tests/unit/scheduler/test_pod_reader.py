"""What pods ask for, before any node has seen them."""

from __future__ import annotations

import pytest

from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import Policy
from nri_numa.scheduler.pod_reader import PodReader
from tests.unit.scheduler.objects import GIB, container, pod, single

READER = PodReader(Settings())


def test_the_extended_resource_makes_cpus_exclusive() -> None:
    """As the device plugin does on the node."""
    reader = PodReader(Settings(), "example.com/cpu")
    one = container(cpu="4", memory="1Gi")
    one["resources"]["limits"] = {**one["resources"]["limits"], "example.com/cpu": "4"}
    (need,) = reader.request(pod(one, policy="single-numa-node")).containers
    assert (need.exclusive, need.policy) == (4, Policy.SINGLE_NUMA_NODE)
    one["resources"]["limits"]["example.com/cpu"] = "3"
    assert "holds 3 slots" in reader.request(pod(one, name="other")).wrong


def test_a_request_is_known_exactly_here() -> None:
    """The node reads it from a score, to a thousandth of the machine."""
    one = {"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "700Mi"}}}
    (need,) = READER.request(pod(one, policy="restricted")).containers
    assert need.amounts == need.paid == (("memory", 700 << 20),)
    assert (need.milli, need.paid_milli) == (500, 500)


def test_a_pod_as_a_whole_needs_its_peak() -> None:
    wish = READER.request(
        pod(
            container("a", "2", "1Gi"), container("b", "3", "2Gi"),
            init=[container("first", "8", "1Gi")], policy="single-numa-node", scope="pod",
        )
    )  # fmt: skip
    assert wish.together is not None
    assert wish.together.exclusive == 8
    assert wish.together.amounts == (("memory", 3 * GIB),)
    assert [need.ends for need in wish.containers] == [True, False, False]


def test_what_is_wrong_is_said_without_the_pods_name() -> None:
    """So that replicas have one text."""
    wish = READER.request(pod(container(cpu="2"), name="web-1", policy="nearby"))
    assert "policy is 'nearby'" in wish.wrong
    assert "web-1" not in wish.wrong
    assert "expected a whole number" in READER.request(
        pod(container(cpu="1500m", memory="1Gi"), cpus="exclusive")
    ).wrong.replace("a whole number of CPUs", "a whole number")


def test_a_memory_policy_without_memory_nodes_is_refused_everywhere() -> None:
    one = container(cpu="500m", memory="1Gi")
    wrong = READER.request(pod(one, mempolicy="bind")).wrong
    assert wrong.startswith("mempolicy is 'bind' (annotation numa.kubernetes.io/mempolicy), but")
    for more in ({"numamem": "0"}, {"policy": "restricted"}, {"on-failure": "unpinned"}):
        assert not READER.request(pod(one, mempolicy="bind", **more)).wrong
    assert not READER.request(pod(one, mempolicy="local")).wrong
    ruled = PodReader(Settings(rules=(Rule(values={"mempolicy": "bind"}),)))
    assert not ruled.request(pod(one)).wrong


def test_a_pod_that_cannot_be_read_is_wrong_only_if_it_asks() -> None:
    broken = pod({"name": "main", "resources": {"limits": {"cpu": "many"}}}, policy="restricted")
    assert "cannot be read" in READER.request(broken).wrong
    broken["metadata"]["annotations"] = {}
    broken["metadata"]["uid"] = "another"
    assert READER.request(broken).nothing
    for garbage in ({}, {"metadata": 3}, {"spec": []}, {"metadata": {"annotations": [1]}}):
        assert PodReader(Settings()).request(garbage).nothing


def test_pod_level_resources_are_those_of_its_containers_once() -> None:
    """As on the node: the first of those without limits has the pod's, the next what is left."""
    document = pod(container("a"), container("b"), policy="single-numa-node")
    amounts = {"cpu": "4", "memory": "1Gi"}
    document["spec"]["resources"] = {"requests": amounts, "limits": amounts}
    wish = PodReader(Settings()).request(document)
    assert [(need.exclusive, need.paid_milli) for need in wish.containers] == [(4, 0), (0, 0)]
    assert [dict(need.paid).get("memory", 0) for need in wish.containers] == [1 << 30, 0]
    assert [need.exclusive for need in wish.kubelets] == [4]


def test_a_pod_is_read_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.scheduler.pod_reader._REMEMBERED", 2)
    reader = PodReader(Settings())
    for count in range(1, 8):
        document = single(count, name=f"p{count % 4}")
        document["metadata"]["resourceVersion"] = str(count)
        for _ in range(2):
            (one,) = reader.request(document).containers
            assert one.exclusive == count
        assert reader.remembered(f"uid-p{count % 4}") == reader.request(document)
    reader.forget("uid-p3")
    assert reader.remembered("uid-p3") is None
