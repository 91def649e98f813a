"""Devices as the kubelet counts them, for who reads again and again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nri_numa.devices.counts import (
    COUNTS_EXPIRE_AFTER_S,
    COUNTS_REFRESH_AFTER_S,
    NO_KUBELET_ANSWER_TEXT,
    DeviceCounts,
)
from nri_numa.kubelet.pb import podresources_pb2 as pb
from nri_numa.kubelet.pod_resources import DeviceCount
from tests.beds.fake_kubelet import pod_resources


class Kubelet:
    """Answers with these GPUs, and counts how often it was asked."""

    def __init__(self, directory: Path) -> None:
        self.gpus, self.asked, self.silent, self.now = 2, 0, False, 1000.0
        self.counts = DeviceCounts(str(directory), "own/cpu", clock=lambda: self.now)

    def told(self, later: float = 0.0) -> object:
        """What is known once it has been asked."""
        self.now += later
        self.counts.known_counts()
        self.counts.wait_for_query()
        return self.counts.known_counts()

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


@pytest.fixture
def kubelet(directory: Path) -> Iterator[Kubelet]:
    made = Kubelet(directory)
    with pod_resources(directory, made.every, made.every, made.allocatable):
        yield made


def test_who_reads_never_waits_and_gets_it_the_next_time(kubelet: Kubelet) -> None:
    assert kubelet.counts.known_counts() == NO_KUBELET_ANSWER_TEXT
    # Our own CPUs are no devices.
    assert kubelet.told() == kubelet.told() == gpus(2)
    assert kubelet.asked == 1
    kubelet.gpus = 1
    kubelet.now += COUNTS_REFRESH_AFTER_S
    assert kubelet.counts.known_counts() == gpus(2)
    assert kubelet.told() == gpus(1)
    assert kubelet.asked == 2


def test_an_answer_that_nobody_renewed_and_a_refusal_are_not_no_devices(kubelet: Kubelet) -> None:
    assert kubelet.told() == gpus(2)
    kubelet.silent = True
    assert kubelet.told(later=COUNTS_REFRESH_AFTER_S) == "the kubelet refused: UNKNOWN: not today"
    kubelet.silent = False
    assert kubelet.told(later=COUNTS_REFRESH_AFTER_S) == gpus(2)
    kubelet.now += COUNTS_EXPIRE_AFTER_S
    assert kubelet.counts.known_counts() == NO_KUBELET_ANSWER_TEXT
    assert kubelet.told() == gpus(2)
