"""What evicts, in a replica: watches in, evictions and Events out."""

from pathlib import Path
from typing import Any

import pytest

from nri_numa.config.sections import CPUStealEviction, EvictionSection, StuckPodEviction
from nri_numa.kube.requests import Resource
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.controller_bed import ControllerBed, node
from tests.beds.evicted_pods import (
    NODE_ANNOTATIONS,
    assigned_pod,
    measured_topology,
    partly_stuck_pod,
    rejection_event,
    stuck_pod,
)
from tests.beds.objects import topology
from tests.beds.stepped_loop import until


def stuck_pods(cluster: ClusterObjects, *pods: dict[str, Any], **spec: Any) -> None:
    """These are refused by a Node that is full, and another one, with this spec, is free."""
    cluster.put(Resource.NODES, node("full"), {**node("free"), "spec": spec})
    for name, n in (("full", 2), ("free", 8)):
        cluster.put(Resource.TOPOLOGIES, topology(n, n, of=8, name=name))
    cluster.put(Resource.PODS, *pods)


@pytest.mark.parametrize("dry", [False, True])
async def test_a_stuck_pod_and_one_whose_time_is_taken_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dry: bool
) -> None:
    evicting = EvictionSection(
        max_per_minute=600.0,
        dry_run=dry,
        stuck_pods=StuckPodEviction(evict=True, delay=0),
        cpu_steal=CPUStealEviction(evict=True, delay=0, max_affected_fraction=1.0),
    )
    bed = ControllerBed(tmp_path, evictions=evicting)
    stuck_pods(bed.cluster, stuck_pod("web"))
    bed.cluster.put(Resource.NODES, node("n", **NODE_ANNOTATIONS))
    bed.cluster.put(Resource.TOPOLOGIES, measured_topology("n", "0.6", None))
    bed.cluster.put(Resource.PODS, assigned_pod("slow", "0-1"))
    async with bed.running():
        await until(lambda: len(bed.cluster.all(Resource.EVENTS)) == 2)
        metrics = (await bed.get("/metrics"))[1]
    assert bed.evicted() == ["slow", "web"]
    said = [vars(r)["fields"] for r in caplog.records if r.message == "pod evicted"]
    assert {of["pod"]: of["dry_run"] for of in said} == {"shop/slow": dry, "shop/web": dry}
    assert {one["reason"] for one in bed.cluster.all(Resource.EVENTS)} == {
        "NUMAPodMoved",
        "NUMANodeStolen",
    }
    assert all(one["eventTime"] > "2020" for one in bed.cluster.all(Resource.EVENTS))
    assert "nri_numa_controller_degraded_numa_nodes 1.0" in metrics
    assert "nri_numa_controller_stuck_pods 0.0" in metrics


@pytest.mark.parametrize("on", [True, False])
async def test_a_pod_with_a_running_container_goes_if_wanted(tmp_path: Path, on: bool) -> None:
    evicting = EvictionSection(
        max_per_minute=600.0, stuck_pods=StuckPodEviction(evict=True, delay=0, include_running=on)
    )
    wanted = ["half", "web"] if on else ["web"]
    bed = ControllerBed(tmp_path, evictions=evicting)
    stuck_pods(bed.cluster, stuck_pod("web"), partly_stuck_pod("half"))
    event = {"metadata": {"name": "e", "uid": "e"}, **rejection_event("half")}
    bed.cluster.put("/api/v1/events", event)
    async with bed.running():
        await until(lambda: len(bed.cluster.all(Resource.EVENTS)) == len(wanted))
    assert bed.evicted() == wanted


async def test_a_tainted_node_is_no_way_out(tmp_path: Path) -> None:
    """And one taint that the pod bears is: so it is known that taints were read."""
    evicting = EvictionSection(stuck_pods=StuckPodEviction(evict=True, delay=0))
    bed = ControllerBed(tmp_path, evictions=evicting)
    bears = stuck_pod("b-bears", tolerations=[{"key": "a", "operator": "Exists"}])
    taint = {"key": "a", "value": "b", "effect": "NoSchedule"}
    stuck_pods(bed.cluster, stuck_pod("a-web"), bears, taints=[taint])
    async with bed.running():
        await until(lambda: bed.cluster.all(Resource.EVENTS))
        assert "nri_numa_controller_stuck_pods 1.0" in (await bed.get("/metrics"))[1]
    assert bed.evicted() == ["b-bears"]


async def test_a_pod_with_misaligned_devices_goes_and_all_of_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an Event, in the log and in the metrics; after three of a workload, why it stays."""
    evicting = EvictionSection(
        max_per_minute=600.0,
        max_per_workload_per_hour=9,
        stuck_pods=StuckPodEviction(evict=True, delay=0),
    )
    bed = ControllerBed(tmp_path, evictions=evicting)
    bed.cluster.put(Resource.NODES, node("full"))
    devices = {"example.com/gpu": ((0, 1), (1, 1))}
    bed.cluster.put(Resource.TOPOLOGIES, topology(8, 8, of=8, name="full", devices=devices))
    said = "DeviceAffinityError: pod shop/train-{0}, container main: the kubelet gave gpu-0"
    pods = [stuck_pod(f"train-{n}", said=said.format(n), workload="train") for n in range(4)]
    for pod in pods:
        for amounts in pod["spec"]["containers"][0]["resources"].values():
            amounts["example.com/gpu"] = "1"
    bed.cluster.put(Resource.PODS, *pods)
    async with bed.running():
        await until(lambda: len(bed.cluster.all(Resource.EVENTS)) == 4)
        metrics = (await bed.get("/metrics"))[1]
    assert bed.evicted() == ["train-0", "train-1", "train-2"]
    told = [vars(r)["fields"] for r in caplog.records if r.message == "eviction explained"]
    reasons = ["NUMADevicesReleased"] * 3 + ["NUMADevicesMisaligned"]
    assert [fields["reason"] for fields in told] == reasons
    assert told[3]["pod"] == "shop/train-3"
    assert "topologyManagerPolicy: best-effort" in told[3]["detail"]
    assert "nri_numa_controller_device_evictions_total 3.0" in metrics
    assert "nri_numa_controller_pods_with_misaligned_devices 1.0" in metrics
