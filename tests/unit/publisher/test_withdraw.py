"""``nri-numa withdraw`` on an API server: what it takes off Nodes, and what it leaves."""

import pytest

from nri_numa.kube.requests import Resource
from tests.beds.cli import invoke
from tests.beds.cluster_objects import ClusterObjects

OURS, THEIRS = "numa.example.com/exclusive-cpu", "example.com/gpu"
IDS = "numa.kubernetes.io/numa-ids"


def node(name: str, **capacity: str) -> dict[str, object]:
    status = {"capacity": {"cpu": "8", **capacity}, "allocatable": {"cpu": "8", **capacity}}
    annotations = {IDS: "0-1", "else": "x"} if capacity else {}
    return {"metadata": {"name": name, "annotations": annotations}, "status": status}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ClusterObjects:
    """What the command finds by these credentials."""
    cluster = ClusterObjects()
    clients = {("/credentials", "nri-numa-withdraw"): cluster}
    monkeypatch.setenv("NRI_NUMA_PUBLISH_CREDENTIALS_DIR", "/credentials")
    monkeypatch.setattr("nri_numa.kube.api.KubeAPI", lambda *arguments: clients[arguments])
    return cluster


@pytest.mark.parametrize(
    ("what", "paths"),
    [
        (["capacity"], ["/api/v1/nodes/a/status"]),
        (["numa-ids"], ["/api/v1/nodes/a", "/api/v1/nodes/gone"]),
        (
            ["capacity", "numa-ids"],
            ["/api/v1/nodes/a/status", "/api/v1/nodes/a", "/api/v1/nodes/gone"],
        ),
    ],
)
def test_nodes_are_left_clean(what: list[str], paths: list[str], cluster: ClusterObjects) -> None:
    nodes = node("a", **{OURS: "4", THEIRS: "1"}), node("b"), node("gone", **{THEIRS: "2"})
    cluster.put(Resource.NODES, *nodes)
    cluster.fail(404, "no such node", on="nodes/gone")
    assert invoke("withdraw", *what).exit_code == 0
    patches = {one.path: one.body for one in cluster.requests if one.body}
    assert list(patches) == paths
    none = {OURS: None}
    for path, body in patches.items():
        if path.endswith("/status"):
            assert body == {"status": {"capacity": none, "allocatable": none}}
        else:
            assert body == {"metadata": {"annotations": {IDS: None}}}


def test_a_right_that_is_missing_is_said(cluster: ClusterObjects) -> None:
    cluster.fail(403, "nodes is forbidden")
    done = invoke("withdraw", "capacity")
    assert (done.exit_code, "resources [nodes], verbs [list]" in done.output) == (1, True)
