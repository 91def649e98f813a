"""Sums of a Node as kube-scheduler counts them, and whom a PodDisruptionBudget covers."""

from typing import Any

import pytest

from nri_numa.cluster.node_sums import (
    allocatable_sums,
    has_neighbour_constraints,
    missing_sums,
    pod_sums,
    read_disruption_budget,
)


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}, **more}


@pytest.mark.parametrize(
    ("spec", "milli"),
    [
        ({"containers": [container("1"), container("250m")]}, 1250),
        ({"containers": [container("1")], "initContainers": [container("3")]}, 3000),
        (
            {
                "containers": [container("1")],
                "initContainers": [container("2", restartPolicy="Always"), container("1500m")],
            },
            3500,
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "100m"}}, 1100),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "4"}}}, 4000),
        ({"containers": [container("many")]}, 0),
        ({"containers": "none"}, 0),
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], milli: int) -> None:
    sums = pod_sums({"spec": spec})
    assert (sums.get("cpu", 0), sums["pods"]) == (milli, 1)


def test_what_a_node_lacks() -> None:
    node = {"status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "2"}}}
    pod = {"spec": {"containers": [container("3")]}}
    sums = pod_sums(pod)
    assert missing_sums(sums, allocatable_sums(node), [sums]) == {"cpu": 2000}
    assert missing_sums(sums, allocatable_sums(node), [sums, sums])["pods"] == 1
    assert missing_sums(sums, allocatable_sums({}), []) == dict(sums)


def pod(labels: dict[str, str], name: str = "p") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default", "labels": labels}}


@pytest.mark.parametrize(
    ("selector", "covered"),
    [
        ({"matchLabels": {"app": "db"}}, True),
        ({"matchLabels": {"app": "web"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["db", "x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_whom_a_budget_covers(selector: Any, covered: bool) -> None:
    metadata = {"name": "b", "namespace": "default"}
    status = {"disruptionsAllowed": 2, "disruptedPods": {"gone": "2026-11-30T00:00:00Z"}}
    document = {"metadata": metadata, "spec": {"selector": selector}, "status": status}
    found = read_disruption_budget(document)
    assert found.allowed == 2
    assert found.covers(pod({"app": "db"})) is covered
    assert not found.covers(pod({"app": "db"}, "gone"))
    assert not found.covers(pod({}))
    assert read_disruption_budget({}).allowed == 0


@pytest.mark.parametrize(
    ("spec", "constrained"),
    [
        ({"containers": [{"ports": [{"containerPort": 80}]}]}, False),
        ({"containers": [{"ports": [{"hostPort": 80}]}]}, True),
        ({"volumes": [{"name": "a", "emptyDir": {}}, {"name": "t", "projected": {}}]}, False),
        ({"volumes": [{"name": "a", "persistentVolumeClaim": {}}]}, True),
        ({"affinity": {"nodeAffinity": {"x": 1}}}, False),
        ({"affinity": {"podAffinity": {"x": 1}}}, True),
        ({"topologySpreadConstraints": [{}]}, True),
    ],
)
def test_pods_kept_from_a_node_by_more_than_sums(spec: dict[str, Any], constrained: bool) -> None:
    assert has_neighbour_constraints({"spec": spec}) is constrained
