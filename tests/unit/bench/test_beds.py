"""Pods of the bench are told as a kubelet's are, so that it measures what users get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import day, gaps
from bench.beds import EXCLUSIVE, LISTED, MACHINES, PLAIN, SHARED, Shape, container_of, pod_of
from nri_numa.engine.decision import Machine
from nri_numa.engine.values.settings import Settings
from nri_numa.nri.shapes import Reads, foreseen, shape_of
from nri_numa.nri.wire.pb import nri_pb2 as pb

SHAPES = (
    *(EXCLUSIVE, SHARED, PLAIN, LISTED, Shape(cgroup="/kubepods/besteffort")),
    *(shape(number) for _, shape, _, _ in gaps.CASES for number in (1, 3000)),
    *{event.shape for event in day.day(400) if event.shape is not None},
)


@pytest.mark.parametrize("name", MACHINES)
def test_the_container_of_every_pod_is_the_one_that_its_sandbox_foretells(name: str) -> None:
    """On each of the machines: scores, sums, zeros and all."""
    machine = Machine(topology=MACHINES[name](), settings=Settings())
    reads = Reads(
        marker=machine.settings.prefix + "/",
        slots_key=machine.slots_key,
        memory=machine.memory_total,
    )
    for shape in SHAPES:
        pod, container = pod_of(shape, "p"), container_of(shape)
        found = foreseen(pod, reads)
        assert found is not None
        request = pb.CreateContainerRequest(pod=pod, container=container)
        assert shape_of(request, reads) == found.shape, shape


def test_the_score_tells_the_class_and_the_memory_request() -> None:
    scores = [
        container_of(shape).linux.oom_score_adj.value
        for shape in (
            EXCLUSIVE,
            SHARED,
            replace(SHARED, memory=256 << 30),
            Shape(cgroup="/kubepods/besteffort"),
        )
    ]
    assert scores == [-997, 999, 500, 1000]
