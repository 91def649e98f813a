"""What evicts, in a replica on real sockets: watches in, evictions and Events out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nri_numa.config.sections import CPUStealEviction, EvictionSection, StuckPodEviction
from tests.beds.objects import topology
from tests.unit.controller import test_evictor as stolen
from tests.unit.controller import test_stuck_pods as stuck
from tests.unit.controller.replica import Cluster, node, started, until


def stuck_pods(cluster: Cluster, *pods: dict[str, Any], **spec: Any) -> None:
    """These are refused by a Node that is full, and another one, with this spec, is free."""
    cluster.nodes = {"full": node("full"), "free": {**node("free"), "spec": spec}}
    cluster.topologies = [topology(n, n, of=8, name=name) for name, n in (("full", 2), ("free", 8))]
    cluster.pending = list(pods)


@pytest.mark.parametrize("dry", [False, True])
async def test_a_stuck_pod_and_one_whose_time_is_taken_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dry: bool
) -> None:
    def prepare(cluster: Cluster) -> None:
        stuck_pods(cluster, stuck.pod("web"))
        cluster.nodes["n"] = node("n", **stolen.TOLD)
        cluster.topologies.append(stolen.topology("n", "0.6", None))
        cluster.running = [stolen.pod("slow", "0-1")]

    evicting = EvictionSection(
        max_per_minute=600.0,
        dry_run=dry,
        stuck_pods=StuckPodEviction(evict=True, delay=0),
        cpu_steal=CPUStealEviction(evict=True, delay=0, max_affected_fraction=1.0),
    )
    async with started(tmp_path, monkeypatch, prepare, evictions=evicting) as world:
        await until(lambda: len(world.cluster.events) == 2)
        metrics = (await world.ask("GET", "/metrics"))[1]
    assert sorted(world.cluster.evicted) == ["slow", "web"]
    wanted = "would be evicted (dry run)" if dry else "evicted"
    said = [(r.message, vars(r)["fields"]["pod"]) for r in caplog.records if "evicted" in r.message]
    assert sorted(said) == [(wanted, "shop/slow"), (wanted, "shop/web")]
    assert {one["reason"] for one in world.cluster.events} == {"NUMAPodMoved", "NUMANodeStolen"}
    assert all(one["eventTime"] > "2020" for one in world.cluster.events)
    assert "nri_numa_controller_stolen_numa_nodes 1.0" in metrics
    assert "nri_numa_controller_stuck_pods 0.0" in metrics


@pytest.mark.parametrize("on", [True, False])
async def test_a_pod_of_which_a_container_runs_goes_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    def prepare(cluster: Cluster) -> None:
        stuck_pods(cluster, stuck.pod("web"))
        cluster.running = [stuck.partly("half")]
        about = {"kind": "Pod", "namespace": "shop", "name": "half", "uid": "uid-half"}
        said = f"Error: failed to create: {stuck.SAID.format('half')}"
        cluster.told = [{"metadata": {"uid": "e"}, "involvedObject": about, "message": said}]

    evicting = EvictionSection(
        max_per_minute=600.0,
        stuck_pods=StuckPodEviction(evict=True, delay=0, include_running=on),
    )
    wanted = ["half", "web"] if on else ["web"]
    async with started(tmp_path, monkeypatch, prepare, evictions=evicting) as world:
        await until(lambda: len(world.cluster.events) == len(wanted))
    assert sorted(world.cluster.evicted) == wanted


async def test_a_tainted_node_is_no_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one taint that the pod bears is: so it is known that taints were read."""

    def prepare(cluster: Cluster) -> None:
        bears = stuck.pod("b-bears", tolerations=[{"key": "a", "operator": "Exists"}])
        taint = {"key": "a", "value": "b", "effect": "NoSchedule"}
        stuck_pods(cluster, stuck.pod("a-web"), bears, taints=[taint])

    evicting = EvictionSection(stuck_pods=StuckPodEviction(evict=True, delay=0))
    async with started(tmp_path, monkeypatch, prepare, evictions=evicting) as world:
        await until(lambda: world.cluster.events)
        assert "nri_numa_controller_stuck_pods 1.0" in (await world.ask("GET", "/metrics"))[1]
    assert world.cluster.evicted == ["b-bears"]
