"""Who plays the nodes tells waiting for room from waiting beside room."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bench.cluster import fleet as fleets
from bench.cluster.fleet import Agent, Fleet
from bench.cluster.stream import ANNOTATIONS, longest, topology_settings
from tests.beds.kube.client import Client


class Server:
    """As much of an API server as nodes see."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}

    def ask(self, method: str, path: str, body: Any = None, **_: object) -> dict[str, Any]:
        if method == "GET":
            return {"items": list(self.pods.values())}
        if method == "POST":
            metadata = {**body["metadata"], "uid": body["metadata"]["name"]}
            self.pods[metadata["name"]] = {**body, "metadata": metadata, "status": {}}
        return {}


class Bed:
    """One node of twice 16 CPUs, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(fleets.time, "monotonic", lambda: self.now)
        self.server = Server()
        self.fleet = Fleet(cast(Client, self.server), {"n1": Agent(topology_settings())})

    def create(self, name: str, cpus: int, on: str = "") -> None:
        amounts = {"cpu": str(cpus), "memory": f"{cpus}Gi"}
        resources = {"requests": amounts, "limits": amounts}
        metadata = {"name": name, "annotations": {**ANNOTATIONS, fleets.SECONDS: "1000"}}
        containers = [{"name": "main", "image": "none", "resources": resources}]
        spec = {"containers": containers, **({"nodeName": on} if on else {})}
        self.fleet.create({"metadata": metadata, "spec": spec})

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.fleet.step()


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def test_who_waits_where_no_numa_node_has_room_waits_rightly(bed: Bed) -> None:
    bed.create("a", 10, on="n1")
    bed.create("b", 10, on="n1")
    bed.create("wide", 12)
    bed.pass_by(5)
    assert bed.fleet.lives["wide"].roomy == 0
    assert bed.fleet.lives["a"].placed == 101


def test_who_waits_beside_room_is_found(bed: Bed) -> None:
    bed.create("a", 10, on="n1")
    bed.create("forgotten", 12)
    bed.pass_by(5)
    # Not at the first look: then the other one was still on its way there.
    assert bed.fleet.lives["forgotten"].roomy == 3
    bed.server.pods["forgotten"]["spec"]["nodeName"] = "n1"
    bed.pass_by(2)
    told = list(longest(tuple(bed.fleet.lives.values())))
    assert "waited 6.0 s: 12 CPUs on n1, of it 6.0 s for a node, 3.0 s while some" in told[0]
    assert told[-1].endswith("3.0, 0.0 s")
