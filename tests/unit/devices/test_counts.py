"""Devices as the kubelet counts them, for who reads again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from nri_numa.devices.counts import FRESH, NOT_YET, OLD, DeviceCounts
from nri_numa.kubelet.pb import podresources_pb2 as pb
from nri_numa.kubelet.pod_resources import DeviceCount
from tests.beds.fake_kubelet import pod_resources


class Kubelet:
    """Answers with these GPUs, and counts how often it was asked."""

    def __init__(self) -> None:
        self.gpus = 2
        self.asked = 0
        self.silent = False

    def every(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.silent:
            context.abort(grpc.StatusCode.UNKNOWN, "not today")
        return pb.ListPodResourcesResponse()

    def allocatable(self, request: Any, context: Any) -> Any:
        found = pb.AllocatableResourcesResponse()
        ids = [f"g{n}" for n in range(self.gpus)]
        for name in ("a/gpu", "own/cpu"):
            found.devices.add(resource_name=name, device_ids=ids).topology.nodes.add(ID=1)
        return found


def gpus(number: int) -> tuple[DeviceCount, ...]:
    return (DeviceCount(resource="a/gpu", numa_node=1, allocatable=number, available=number),)


def test_who_reads_never_waits_and_gets_it_the_next_time(directory: Path) -> None:
    kubelet, now = Kubelet(), [1000.0]
    counts = DeviceCounts(str(directory), "own/cpu", clock=lambda: now[0])
    with pod_resources(directory, kubelet.every, kubelet.every, kubelet.allocatable):
        assert counts.known() == NOT_YET
        counts.settle()
        # Our own CPUs are no devices.
        assert counts.known() == gpus(2)
        counts.settle()
        assert kubelet.asked == 1
        kubelet.gpus = 1
        now[0] += FRESH
        assert counts.known() == gpus(2)
        counts.settle()
        assert counts.known() == gpus(1)
        assert kubelet.asked == 2


def test_a_kubelet_that_refuses_is_not_one_without_devices(directory: Path) -> None:
    kubelet, now = Kubelet(), [1000.0]
    counts = DeviceCounts(str(directory), "own/cpu", clock=lambda: now[0])
    with pod_resources(directory, kubelet.every, kubelet.every, kubelet.allocatable):
        counts.known()
        counts.settle()
        kubelet.silent = True
        now[0] += FRESH
        counts.known()
        counts.settle()
        assert counts.known() == "the kubelet refused: UNKNOWN: not today"
        kubelet.silent = False
        now[0] += FRESH
        counts.known()
        counts.settle()
        assert counts.known() == gpus(2)


def test_an_answer_that_nobody_renewed_is_worth_nothing(directory: Path) -> None:
    kubelet, now = Kubelet(), [1000.0]
    counts = DeviceCounts(str(directory), "own/cpu", clock=lambda: now[0])
    with pod_resources(directory, kubelet.every, kubelet.every, kubelet.allocatable):
        counts.known()
        counts.settle()
        now[0] += OLD
        assert counts.known() == NOT_YET
        counts.settle()
        assert counts.known() == gpus(2)
