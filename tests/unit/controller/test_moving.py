"""What evicts, in a replica on real sockets: watches in, evictions and Events out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller, Steal, Stuck
from nri_numa.controller.service import Service
from tests.beds.fake_api_server import Asked, FakeAPIServer, Said, status
from tests.unit.controller import test_evictor as stolen
from tests.unit.controller import test_refused as stuck

PREFIX = "numa.kubernetes.io"


class Cluster:
    """What an API server keeps: two Nodes, what they publish, and pods."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.topologies: list[dict[str, Any]] = []
        self.pending: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.evicted: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.taints: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Said:
        with self._lock:
            return self._answer(asked)

    def _answer(self, asked: Asked) -> Said:
        path, _, query = asked.path.partition("?")
        if "/leases" in path:
            if asked.method == "GET" and self.lease is None:
                return status(404, "none")
            self.lease = asked.body or self.lease
            assert self.lease is not None
            self.lease["metadata"]["resourceVersion"] = "1"
            return Said(200, self.lease)
        if asked.method == "POST":
            if path.endswith("/eviction"):
                self.evicted.append(path.split("/")[-2])
                return Said(201, {"kind": "Status", "status": "Success"})
            self.events.append(asked.body)
            return Said(201, asked.body)
        if "watch=true" in query:
            return status(503, "later")  # an empty answer would be asked for again at once
        if path.endswith("/nodes"):
            return self._list([self._node("full"), self._node("free"), self._node("n")])
        if path.endswith("/noderesourcetopologies"):
            return self._list(self.topologies)
        if path == "/api/v1/events":
            return self._list(self.told)
        assert path.endswith("/pods"), asked.path
        if "metadata.name" in query:
            named = unquote(query).rpartition("metadata.name=")[2].partition("&")[0]
            return self._list([one for one in self.running if one["metadata"]["name"] == named])
        return self._list(self.pending if "Pending" in query else self.running)

    def _node(self, name: str) -> dict[str, Any]:
        annotations = stolen.TOLD if name == "n" else {}
        metadata = {"name": name, "resourceVersion": "1", "annotations": annotations}
        return {"metadata": metadata, "spec": {"taints": self.taints if name == "free" else []}}

    def _list(self, items: list[dict[str, Any]]) -> Said:
        return Said(200, {"metadata": {"resourceVersion": "1"}, "items": items})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Service]:
    def made(
        cluster: Cluster, done: Callable[[Service], object], stuck: Stuck, steal: Steal
    ) -> Service:
        fake = FakeAPIServer(tmp_path, cluster)
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        section = Controller(
            address="off", credentials=str(tmp_path), rate=100.0, stuck=stuck, steal=steal
        )

        async def work() -> Service:
            service = Service(AgentConfig(controller=section))
            task = asyncio.create_task(service.run())
            try:
                async with asyncio.timeout(180):
                    while not done(service):
                        assert not task.done(), task.exception()
                        await asyncio.sleep(0.02)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return service

        with fake:
            return asyncio.run(work())

    return made


def test_a_stuck_pod_and_one_whose_time_is_taken_go(run: Callable[..., Service]) -> None:
    cluster = Cluster()
    cluster.topologies = [
        stuck.zones("full", 2, 2),
        stuck.zones("free", 8, 8),
        stolen.topology("n", "0.6", None),
    ]
    cluster.pending, cluster.running = [stuck.pod("web")], [stolen.pod("slow", "0-1")]
    service = run(
        cluster,
        lambda service: len(cluster.events) == 2,
        Stuck(evict=True, after=0),
        Steal(evict=True, after=0, at_most=1.0),
    )
    assert sorted(cluster.evicted) == ["slow", "web"]
    assert {one["reason"] for one in cluster.events} == {"NUMAPodMoved", "NUMANodeStolen"}
    assert all(one["eventTime"] > "2020" for one in cluster.events)
    metrics = service.metrics().decode()
    assert "nri_numa_controller_stolen_numa_nodes 1.0" in metrics
    assert "nri_numa_controller_stuck_pods 0.0" in metrics


@pytest.mark.parametrize("on", [True, False])
def test_a_pod_of_which_a_container_runs_goes_where_that_is_wanted(
    run: Callable[..., Service], on: bool
) -> None:
    cluster = Cluster()
    cluster.topologies = [stuck.zones("full", 2, 2), stuck.zones("free", 8, 8)]
    cluster.running, cluster.pending = [stuck.partly("half")], [stuck.pod("web")]
    about = {"kind": "Pod", "namespace": "shop", "name": "half", "uid": "uid-half"}
    said = f"Error: failed to create: {stuck.SAID.format('half')}"
    cluster.told = [{"metadata": {"uid": "e"}, "involvedObject": about, "message": said}]
    wanted = ["half", "web"] if on else ["web"]
    run(
        cluster,
        lambda service: len(cluster.events) == len(wanted),
        Stuck(evict=True, after=0, per_minute=600.0, partly_running=on),
        Steal(),
    )
    assert sorted(cluster.evicted) == wanted


def test_a_tainted_node_is_no_way_out(run: Callable[..., Service]) -> None:
    """And one taint that the pod bears is: so it is known that taints were read."""
    cluster = Cluster()
    cluster.topologies = [stuck.zones("full", 2, 2), stuck.zones("free", 8, 8)]
    cluster.taints = [{"key": "a", "value": "b", "effect": "NoSchedule"}]
    borne = {"tolerations": [{"key": "a", "operator": "Exists"}]}
    cluster.pending = [stuck.pod("a-web"), stuck.pod("b-bears", **borne)]
    service = run(cluster, lambda service: cluster.events, Stuck(evict=True, after=0), Steal())
    assert cluster.evicted == ["b-bears"]
    assert "nri_numa_controller_stuck_pods 1.0" in service.metrics().decode()
