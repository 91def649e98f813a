"""What a request costs, counted in calls: the same on a full node as on an empty one.

Times vary with the machine; the number of function calls does not. `sys.setprofile` sees every call
of Python and C functions, so a loop over all containers that calls anything at all shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from nri_numa.agent import Agent, Answer
from nri_numa.engine.decision import Machine
from nri_numa.engine.settings import Settings
from nri_numa.engine.workload import Container, PodSandbox, QoSClass, Resources
from nri_numa.metrics import Metrics
from nri_numa.protocol.pb import nri_pb2 as pb
from nri_numa.runtime import convert
from nri_numa.runtime.adapter import Adapter
from nri_numa.topology.synthetic import synthetic

PREFIX = "numa.kubernetes.io"


class Store:
    """Counts the documents it is given."""

    def __init__(self) -> None:
        self.documents = 0

    def record(self, changes: Any) -> None:
        self.documents += len(changes)


class Node:
    """An agent and the requests that a runtime would send it; what may wait is never done."""

    def __init__(self, residents: int, *, policy: str, kind: str = "policy") -> None:
        topology = synthetic(sockets=2, numa_per_socket=4, cores_per_numa=16, memory_gib=256)
        self.store = Store()
        self.agent = Agent(
            Machine(topology=topology, settings=Settings()),
            metrics=Metrics("test"),
            store=self.store,
            now=lambda: 1.0,
            later=lambda function: None,
        )
        for n in range(residents):
            made = self.create(f"r{n}", policy, kind=kind)
            assert isinstance(made, Answer)
        # Everything that is read once and remembered is read by now.
        for name in ("warm-1", "warm-2"):
            self.create(name, policy, kind=kind)
            self.stop(name)

    def request(
        self, name: str, policy: str, *, cpus: int = 0, kind: str = "policy"
    ) -> tuple[PodSandbox, Container]:
        pod = PodSandbox(
            id=f"s-{name}",
            uid=f"u-{name}",
            namespace="shop",
            name=name,
            annotations={f"{PREFIX}/{kind}": policy} if policy else {},
            qos=QoSClass.GUARANTEED if cpus else QoSClass.BURSTABLE,
        )
        milli = cpus * 1000 or 10
        resources = Resources(
            cpu_shares=max(2, milli * 1024 // 1000),
            cpu_quota=milli * 100,
            cpu_period=100_000,
            memory_limit=1 << 20,
        )
        return pod, Container(id=f"c-{name}", pod_id=pod.id, name="main", resources=resources)

    def create(self, name: str, policy: str, *, cpus: int = 0, kind: str = "policy") -> object:
        return self.agent.create_container(*self.request(name, policy, cpus=cpus, kind=kind))

    def stop(self, name: str) -> object:
        return self.agent.stop_container(f"c-{name}")


def calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions made by ``function``."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node", ""])
def test_a_shared_container_costs_the_same_however_many_there_are(policy: str) -> None:
    few, many = Node(10, policy=policy), Node(1000, policy=policy)
    request = few.request("new", policy)
    created = [calls(partial(node.agent.create_container, *request)) for node in (few, many)]
    assert created[0] == created[1]
    stopped = [calls(partial(node.stop, "new")) for node in (few, many)]
    assert stopped[0] == stopped[1]


def test_an_exclusive_container_costs_the_same_while_nobody_must_be_told() -> None:
    """Residents with lists of their own do not follow the shared pool."""
    few = Node(10, policy="0-1", kind="numacpu")
    many = Node(1000, policy="0-1", kind="numacpu")
    for node in (few, many):
        node.create("first", "single-numa-node", cpus=4)
        node.stop("first")
    request = few.request("new", "single-numa-node", cpus=4)
    created = [calls(partial(node.agent.create_container, *request)) for node in (few, many)]
    assert created[0] == created[1]
    stopped = [calls(partial(node.stop, "new")) for node in (few, many)]
    assert stopped[0] == stopped[1]


def test_telling_others_costs_a_few_calls_for_each_of_them() -> None:
    """A narrower pool must be said to everybody who runs in it; once, and briefly."""
    counts = []
    for residents in (100, 1100):
        node = Node(residents, policy="")
        request = node.request("new", "single-numa-node", cpus=4)
        answer: list[object] = []

        def create(
            node: Node = node,
            request: tuple[PodSandbox, Container] = request,
            answer: list[object] = answer,
        ) -> None:
            made = node.agent.create_container(*request)
            assert isinstance(made, Answer)
            answer.append(convert.create_response(made.adjustment, made.updates))

        counts.append(calls(create))
        response = answer[0]
        assert isinstance(response, pb.CreateContainerResponse)
        assert len(response.update) == residents
    assert (counts[1] - counts[0]) / 1000 <= 8


def test_one_request_writes_one_document() -> None:
    node = Node(200, policy="best-effort")
    before = node.store.documents
    node.create("new", "best-effort")
    assert node.store.documents == before + 1
    node.stop("new")
    assert node.store.documents == before + 2


def test_a_request_stays_within_its_number_of_calls() -> None:
    """The bounds are a tenth above what it takes; whoever must raise them says why."""
    node = Node(100, policy="best-effort")
    adapter = Adapter(node.agent, Metrics("test"))
    create = pb.CreateContainerRequest()
    create.pod.id, create.pod.uid, create.pod.name = "s-x", "u-x", "x"
    create.pod.annotations[f"{PREFIX}/policy"] = "best-effort"
    create.pod.linux.cgroup_parent = "/kubepods/burstable/podx"
    create.container.id, create.container.pod_sandbox_id, create.container.name = "c", "s-x", "a"
    cpu = create.container.linux.resources.cpu
    cpu.shares.value, cpu.quota.value, cpu.period.value = 102, 10_000, 100_000
    create.container.linux.resources.memory.limit.value = 1 << 20
    stop = pb.StopContainerRequest(pod=create.pod, container=create.container)
    assert calls(lambda: adapter.create_container(create)) <= CREATE_CALLS
    assert calls(lambda: adapter.stop_container(stop)) <= STOP_CALLS


CREATE_CALLS = 536
STOP_CALLS = 106


def test_a_synchronized_container_costs_a_fixed_number_of_calls() -> None:
    """Strangers that ask for nothing, and everybody who is known: in proportion, and briefly."""
    strangers, known = [], []
    for count in (100, 1100):
        pods = [pb.PodSandbox(id=f"s-{n}", uid=f"u-{n}", name=f"p-{n}") for n in range(count)]
        live = [
            pb.Container(id=f"c-{n}", pod_sandbox_id=f"s-{n}", name="main") for n in range(count)
        ]
        node = Node(0, policy="")
        adapter = Adapter(node.agent, Metrics("test"))
        strangers.append(calls(partial(adapter.synchronize, pods, live)))
        known.append(calls(partial(adapter.synchronize, pods, live)))
        assert len(node.agent.state.allocations) == count
    assert (strangers[1] - strangers[0]) / 1000 <= STRANGER_CALLS
    assert (known[1] - known[0]) / 1000 <= KNOWN_CALLS


STRANGER_CALLS = 75
KNOWN_CALLS = 56
