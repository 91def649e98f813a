"""``nri-numa withdraw`` on an API server: what it takes off Nodes, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.cli import invoke
from tests.beds.fake_api_server import Asked, Said, fake, status

OURS, THEIRS = "numa.example.com/exclusive-cpu", "example.com/gpu"
IDS = "numa.kubernetes.io/numa-ids"


def node(name: str, **capacity: str) -> dict[str, object]:
    status = {"capacity": {"cpu": "8", **capacity}, "allocatable": {"cpu": "8", **capacity}}
    annotations = {IDS: "0-1", "else": "x"} if capacity else {}
    return {"metadata": {"name": name, "annotations": annotations}, "status": status}


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
def test_what_stays_on_nodes_is_taken_off_them(
    what: list[str], paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(asked: Asked) -> Said:
        if asked.method == "GET":
            nodes = [
                node("a", **{OURS: "4", THEIRS: "1"}),
                node("b"),
                node("gone", **{THEIRS: "2"}),
            ]
            return Said(body={"metadata": {}, "items": nodes})
        return status(404, "no such node") if "gone" in asked.path else Said()

    monkeypatch.setenv("NRI_NUMA_PUBLISH_CREDENTIALS", str(tmp_path))
    with fake(tmp_path, monkeypatch, answer) as server:
        assert invoke("withdraw", *what).exit_code == 0
    patches = {one.path.partition("?")[0]: one.body for one in server.asked if one.body}
    assert list(patches) == paths
    none = {OURS: None}
    for path, body in patches.items():
        if path.endswith("/status"):
            assert body == {"status": {"capacity": none, "allocatable": none}}
        else:
            assert body == {"metadata": {"annotations": {IDS: None}}}


def test_a_right_that_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRI_NUMA_PUBLISH_CREDENTIALS", str(tmp_path))
    with fake(tmp_path, monkeypatch, lambda asked: status(403, "nodes is forbidden")):
        done = invoke("withdraw", "capacity")
    assert (done.exit_code, "resources [nodes], verbs [list]" in done.output) == (1, True)
