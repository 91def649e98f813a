"""No pod stays stuck with devices that cannot be aligned where an aligned choice exists.

``NRI_NUMA_DEVICE_RUNS`` sets how many random clusters live for a day (for the long run: 1000).
"""

import os
from random import Random

import pytest

from nri_numa.controller.stuck_pods import (
    DEVICE_REST_S,
    MAX_DEVICE_TRIES,
    MISALIGNED_EVENT_REASON,
    RELEASED_EVENT_REASON,
)
from tests.beds.device_cluster import GPU, NIC, DeviceCluster, NodeWithDevices, devices_of

RUNS = int(os.environ.get("NRI_NUMA_DEVICE_RUNS", "6"))
HOUR_S = 3600.0
KUBELETS: tuple[dict[str, bool], ...] = (
    {},  # policy none: at random
    {"aligns": True},  # best-effort
    {"aligns": True, "prefers": True},
)


def _random_cluster(random: Random, kubelet: dict[str, bool]) -> DeviceCluster:
    nodes = [
        NodeWithDevices(
            f"n{i}",
            devices_of({kind: (random.randint(1, 3), random.randint(1, 3)) for kind in (GPU, NIC)}),
            random,
            **kubelet,
        )
        for i in range(random.randint(1, 2))
    ]
    return DeviceCluster(*nodes, uses_extender=random.random() < 0.8)


@pytest.mark.parametrize("seed", range(RUNS))
def test_no_pod_is_stuck_where_an_aligned_choice_exists(seed: int) -> None:
    """Others come and go for two hours; then there is a day to find a place."""
    random = Random(seed)
    kubelet = random.choice(KUBELETS)
    cluster = _random_cluster(random, kubelet)
    for _ in range(random.randint(2, 8)):
        count = len(cluster.pods)
        others = [p for p in cluster.pods.values() if p.is_running]
        if others and random.random() < 0.3:
            cluster.remove(random.choice(others))
        elif random.random() < 0.4:
            cluster.add(f"other{count}", {random.choice((GPU, NIC)): 1}, strict=False)
        elif not kubelet and random.random() < 0.3:
            cluster.add(f"plain{count}", {}, cpus=random.randint(1, 3))
        else:
            wants = {GPU: random.choice((1, 1, 2)), NIC: 1}
            cluster.add(f"strict{count}", wants, cpus=1 if kubelet else random.randint(1, 3))
        cluster.run(cluster.now + random.uniform(0.0, HOUR_S / 4))
    for _ in range(24):
        if any(cluster.stuck_pods()):
            cluster.run(cluster.now + HOUR_S)
    assert [pod.name for pod in cluster.stuck_pods()] == []


def test_a_kubelet_that_chooses_at_random_chooses_well_in_the_end() -> None:
    """Without the evictor half of these pods would wait for ever."""
    evictions = 0
    for seed in range(12):
        devices = devices_of({GPU: (1, 1), NIC: (1, 1)})
        cluster = DeviceCluster(NodeWithDevices("n", devices, Random(seed)), uses_extender=False)
        cluster.add("strict", {GPU: 1, NIC: 1})
        cluster.run(3 * HOUR_S)
        assert all(pod.is_running for pod in cluster.pods.values())
        evictions += len(cluster.evicted)
    assert evictions >= 6


def test_a_plugin_that_always_prefers_the_same_devices_costs_three_tries_in_each_period() -> None:
    """Policy none: gpu-0 and nic-1 again and again; only the kubelet's policy helps."""
    devices = devices_of({GPU: (1, 1), NIC: (1, 1)})
    cluster = DeviceCluster(NodeWithDevices("n", devices, Random(0), prefers=True))
    nic = cluster.add("other", {NIC: 1}, strict=False)
    cluster.run(60.0)
    assert [d.id for d in nic.devices] == ["nic-0"]
    pod = cluster.add("strict", {GPU: 1, NIC: 1})
    cluster.run(60.0 + HOUR_S)
    assert pod.rejection.startswith("DeviceAffinityError: pod default/strict-2, container main: ")
    assert (
        "the kubelet gave gpu-0 (NUMA node 0) and nic-1 (NUMA node 1); gpu-1 and nic-1 would both "
        "be on NUMA node 1 (the kubelet aligns devices with topologyManagerPolicy: best-effort)"
    ) in pod.rejection
    times = [at for _, at in cluster.evicted]
    assert len(times) == MAX_DEVICE_TRIES * 2
    assert times[3] - times[2] >= DEVICE_REST_S
    rounds = [RELEASED_EVENT_REASON] * MAX_DEVICE_TRIES + [MISALIGNED_EVENT_REASON]
    assert cluster.events[:4] == rounds
    assert len(list(cluster.stuck_pods())) == 1
