"""What pods ask for, before any node has seen them."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.engine.values.settings import Rule, Settings
from nri_numa.engine.values.workload import Policy
from nri_numa.scheduler.pods import Reader
from tests.unit.scheduler.objects import GIB, container, pod, single

READER = Reader(Settings())


def test_the_extended_resource_makes_cpus_exclusive() -> None:
    """As the device plugin does on the node."""
    reader = Reader(Settings(), "example.com/cpu")
    one = container(cpu="4", memory="1Gi")
    one["resources"]["limits"] = {**one["resources"]["limits"], "example.com/cpu": "4"}
    (need,) = reader.wish(pod(one, policy="single-numa-node")).needs
    assert (need.exclusive, need.policy) == (4, Policy.SINGLE_NUMA_NODE)
    one["resources"]["limits"]["example.com/cpu"] = "3"
    assert "holds 3 slots" in reader.wish(pod(one, name="other")).wrong


def test_a_request_is_known_exactly_here() -> None:
    """The node reads it from a score, to a thousandth of the machine."""
    one = {"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "700Mi"}}}
    (need,) = READER.wish(pod(one, policy="restricted")).needs
    assert need.amounts == need.paid == (("memory", 700 << 20),)
    assert (need.milli, need.paid_milli) == (500, 500)


def test_a_pod_as_a_whole_needs_its_peak() -> None:
    wish = READER.wish(
        pod(
            container("a", "2", "1Gi"), container("b", "3", "2Gi"),
            init=[container("first", "8", "1Gi")], policy="single-numa-node", scope="pod",
        )
    )  # fmt: skip
    assert wish.together is not None
    assert wish.together.exclusive == 8
    assert wish.together.amounts == (("memory", 3 * GIB),)
    assert [need.ends for need in wish.needs] == [True, False, False]


def test_what_is_wrong_is_said_without_the_pods_name() -> None:
    """So that replicas have one text."""
    wish = READER.wish(pod(container(cpu="2"), name="web-1", policy="nearby"))
    assert "policy is 'nearby'" in wish.wrong
    assert "web-1" not in wish.wrong
    assert "expected a whole number" in READER.wish(
        pod(container(cpu="1500m", memory="1Gi"), cpus="exclusive")
    ).wrong.replace("a whole number of CPUs", "a whole number")


def test_a_memory_policy_without_memory_nodes_is_refused_everywhere() -> None:
    one = container(cpu="500m", memory="1Gi")
    wrong = READER.wish(pod(one, mempolicy="bind")).wrong
    assert wrong.startswith("mempolicy is 'bind' (annotation numa.kubernetes.io/mempolicy), but")
    for more in ({"numamem": "0"}, {"policy": "restricted"}, {"on-failure": "unpinned"}):
        assert not READER.wish(pod(one, mempolicy="bind", **more)).wrong
    assert not READER.wish(pod(one, mempolicy="local")).wrong
    ruled = Reader(Settings(rules=(Rule(values={"mempolicy": "bind"}),)))
    assert not ruled.wish(pod(one)).wrong


def test_a_pod_that_cannot_be_read_is_wrong_only_if_it_asks() -> None:
    broken = pod({"name": "main", "resources": {"limits": {"cpu": "many"}}}, policy="restricted")
    assert "cannot be read" in READER.wish(broken).wrong
    broken["metadata"]["annotations"] = {}
    broken["metadata"]["uid"] = "another"
    assert READER.wish(broken).nothing
    for garbage in ({}, {"metadata": 3}, {"spec": []}, {"metadata": {"annotations": [1]}}):
        assert Reader(Settings()).wish(garbage).nothing


def test_pod_level_resources_are_those_of_its_containers_once() -> None:
    """As on the node: the first of those without limits has the pod's, the next what is left."""
    document = pod(container("a"), container("b"), policy="single-numa-node")
    amounts = {"cpu": "4", "memory": "1Gi"}
    document["spec"]["resources"] = {"requests": amounts, "limits": amounts}
    wish = Reader(Settings()).wish(document)
    assert [(need.exclusive, need.paid_milli) for need in wish.needs] == [(4, 0), (0, 0)]
    assert [dict(need.paid).get("memory", 0) for need in wish.needs] == [1 << 30, 0]
    assert [need.exclusive for need in wish.kubelets] == [4]


def test_what_is_no_pod_is_remembered_as_no_kind() -> None:
    reader = Reader(Settings())
    good = single(6)
    odd: list[dict[str, Any]] = [
        {**good, "spec": 3},
        {**good, "spec": {"containers": [3]}},
        {**good, "spec": {"containers": 3}},
        {**good, "metadata": {**good["metadata"], "annotations": {"numa.kubernetes.io/policy": 3}}},
        {**good, "metadata": {**good["metadata"], "annotations": 3}},
        {**good, "spec": {**good["spec"], "x": "x" * 20_000}},
        {**good, "spec": {**good["spec"], "x": {1, 2}, "y": 1 << 99}},
    ]
    for number, document in enumerate(odd):
        document = {**document, "metadata": {**document["metadata"], "uid": f"odd-{number}"}}
        assert reader.wish(document) == Reader(Settings()).wish(document)
    assert reader._kinds == {}
    assert reader.wish(good).needs


def test_a_full_memory_of_kinds_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.scheduler.pods._TEMPLATES", 2)
    reader = Reader(Settings())
    for count in range(1, 8):
        (need,) = reader.wish(single(count, name=f"p{count}")).needs
        assert need.exclusive == count
        assert len(reader._kinds) <= 2
