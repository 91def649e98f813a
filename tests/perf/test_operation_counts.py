"""What a request costs, counted in calls: no more because others exist, and bounded for a tenant.

Times vary with the machine; the number of function calls does not. `sys.setprofile` sees every call
of Python and C functions, so a loop over all containers that calls anything at all shows.

The numbers in capitals are limits of what a tenant can ask for: what was counted last and a tenth
more, but never more than the limit before. A change that makes fewer lowers them.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from bench.room import create, full_node, large_requests, shapes
from nri_numa.agent.handler import AgentHandler
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.pod_admission import admit_pod
from nri_numa.engine.rebalance import admit_by_moving
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass
from nri_numa.nri import conversion
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds.nri_requests import NRIRequests
from tests.beds.world import PREFIX, StillClock, agent_of, container, pod, resources
from tests.machines import named as machines


class Still(StillClock):
    """Costs a call, as Python's own clocks do."""

    def time(self) -> float:
        return 1.0

    def monotonic(self) -> float:
        return 0.0


class Store(CheckpointStore):
    """Counts the documents it is given."""

    def __init__(self) -> None:
        super().__init__("/state", identity={}, clock=Still().time)
        self.documents = 0

    def append_documents(self, changes: Any) -> None:
        self.documents += len(changes)


class CountingNode:
    """An agent and the requests that a runtime would send; what may wait is never done."""

    def __init__(self, residents: int, *, policy: str, kind: str = "policy") -> None:
        topology = build_synthetic_topology(
            sockets=2, numa_per_socket=4, cores_per_numa=16, memory_gib=256
        )
        self.store = Store()
        self.agent = agent_of(
            NodeModel(topology=topology, settings=Settings(), key=b"signs annotations"),
            store=self.store,
            clock=Still(later=lambda function: None),
        )
        for n in range(residents):
            made = self.create(f"r{n}", policy, kind=kind)
            assert isinstance(made, Admitted)
        # Everything that is read once and remembered is read by now.
        for name in ("warm-1", "warm-2"):
            self.create(name, policy, kind=kind)
            self.stop(name)

    def request(
        self, name: str, policy: str, *, cpus: int = 0, kind: str = "policy"
    ) -> tuple[PodSandbox, Container]:
        qos = QoSClass.GUARANTEED if cpus else QoSClass.BURSTABLE
        of = pod(name, {kind: policy} if policy else {}, qos=qos)
        return of, container(of, wants=resources(cpus or 0.01, 1 / 1024))

    def create(self, name: str, policy: str, *, cpus: int = 0, kind: str = "policy") -> object:
        return self.agent.create_container(*self.request(name, policy, cpus=cpus, kind=kind))

    def stop(self, name: str) -> object:
        return self.agent.stop_container(f"{name}-app")


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


@pytest.mark.parametrize(
    ("residents", "policy", "cpus"),
    [
        ("policy=best-effort", "best-effort", 0),
        ("policy=restricted", "restricted", 0),
        ("policy=single-numa-node", "single-numa-node", 0),
        ("", "", 0),
        ("numacpu=0-1", "single-numa-node", 4),  # with lists they do not follow the shared pool
    ],
)
def test_a_container_costs_the_same_among_many(residents: str, policy: str, cpus: int) -> None:
    """As long as nobody must be told."""
    kind, _, value = residents.partition("=")
    counts = []
    for node in (CountingNode(count, policy=value, kind=kind) for count in (10, 1000)):
        node.create("first", policy, cpus=cpus)
        node.stop("first")
        request = node.request("new", policy, cpus=cpus)
        created = calls(partial(node.agent.create_container, *request))
        counts.append((created, calls(partial(node.stop, "new"))))
    assert counts[0] == counts[1]


def test_telling_others_costs_a_few_calls_for_each_of_them() -> None:
    """A narrower pool must be said to everybody who runs in it; once, and briefly."""

    def create(node: CountingNode, of: PodSandbox, wanted: Container) -> None:
        made = node.agent.create_container(of, wanted)
        assert isinstance(made, Admitted)
        response.update.extend(conversion.update_messages(made.updates))

    counts = []
    for residents in (100, 1100):
        node, response = CountingNode(residents, policy=""), pb.CreateContainerResponse()
        request = node.request("new", "single-numa-node", cpus=4)
        counts.append(calls(partial(create, node, *request)))
        assert len(response.update) == residents
    assert (counts[1] - counts[0]) / 1000 <= 8


def test_one_request_writes_one_document() -> None:
    node = CountingNode(200, policy="best-effort")
    before = node.store.documents
    node.create("new", "best-effort")
    assert node.store.documents == before + 1
    node.stop("new")
    assert node.store.documents == before + 2


def _pod(name: str) -> pb.PodSandbox:
    pod = pb.PodSandbox(id=f"s-{name}", uid=f"u-{name}", name=name, namespace="shop")
    pod.annotations[f"{PREFIX}policy"] = "best-effort"
    pod.linux.cgroup_parent = f"/kubepods/burstable/pod{name}"
    return pod


def _container(name: str) -> pb.Container:
    container = pb.Container(id=f"c-{name}", pod_sandbox_id=f"s-{name}", name="a")
    cpu = container.linux.resources.cpu
    cpu.shares.value, cpu.quota.value, cpu.period.value = 102, 10_000, 100_000
    container.linux.resources.memory.limit.value = 1 << 20
    return container


@pytest.mark.parametrize("asks", [False, True])
def test_a_synchronized_container_costs_the_same_however_many_there_are(asks: bool) -> None:
    """A stranger with a policy is a decision; one that is known is compared, its pod not read."""
    strangers, known = [], []
    for count in (100, 200, 600):
        live = [_container(f"{n}") for n in range(count)]
        pods = [_pod(f"{n}") for n in range(count)]
        if not asks:
            for of, made in zip(pods, live, strict=True):
                of.annotations.clear()
                made.ClearField("linux")
        node = CountingNode(0, policy="")
        requests = NRIRequests(AgentHandler(node.agent))
        strangers.append(calls(partial(requests.synchronize, pods, live)))
        for made in live if asks else ():  # the runtime does as it was told
            has = node.agent.current.state.allocations[made.id]
            cpu = made.linux.resources.cpu
            cpu.cpus, cpu.mems = node.agent.current.cpus_of(has), str(has.mems)
        known.append(calls(partial(requests.synchronize, pods, live)))
        assert len(node.agent.current.state.allocations) == count
    for first, second, third in (strangers, known):
        assert (third - second) / 400 <= 1.1 * (second - first) / 100
    assert (known[2] - known[1]) * 2 <= strangers[2] - strangers[1]


def _created_with(annotations: dict[str, str]) -> int:
    node = CountingNode(0, policy="")
    of, wanted = node.request("new", "")
    of = replace(of, annotations=annotations)
    return calls(partial(node.agent.create_container, of, wanted))


def test_the_length_of_a_list_costs_nothing_once_it_is_too_long() -> None:
    """A quarter of a megabyte was parsed several times: 241 ms of every request."""
    key = f"{PREFIX}numacpu"
    texts = ["0," * count + "0" for count in (3000, 3000, 120_000)]
    _, short, long = (_created_with({key: text}) for text in texts)  # the first imports something
    assert short == long


def test_a_list_is_read_a_fixed_number_of_times() -> None:
    key = f"{PREFIX}numacpu"
    short, long = (_created_with({key: ",".join(["0"] * n)}) for n in (10, 200))
    assert (long - short) / 190 <= 15  # five calls for each item, at most three times


def test_near_misses_are_compared_a_bounded_number_of_times() -> None:
    """Six thousand of them took 150 ms; beyond a number of names none is compared at all."""
    few, many, too_many = (
        _created_with({f"numacp{n}.{PREFIX}y": "0" for n in range(count)})
        for count in (64, 500, 6000)
    )
    assert (many - few) / 436 <= 15
    assert too_many <= few


SIZES, CORES, NAMES = "sizes that differ by a page", "broken cores", "64 names"


@pytest.mark.parametrize(
    ("shape", "residents", "asks", "cpus"),
    [
        (SIZES, 100, {"cpus": "exclusive"}, 17),
        (CORES, 40, {"cpus": "exclusive", "smt": "spread"}, 14),
        (NAMES, 100, {"cpus": "exclusive"}, 1),
    ],
)
def test_a_rejection_that_looks_for_room_makes_a_bounded_number_of_calls(
    shape: str, residents: int, asks: dict[str, str], cpus: int
) -> None:
    """It took seconds: out of 300,000 plans that were made 16 were tried, each with a whole pod."""
    topology = machines.dual_smt(cores_per_numa=32, memory_gib=256)
    settings = Settings(rebalance_moves=3, reservation_seconds=600.0)
    agent = agent_of(NodeModel(topology=topology, settings=settings))
    asks = {"policy": "single-numa-node", "movable": "true"} | asks
    for n in range(residents):
        of = pod(f"r{n}", asks)
        wants = resources(1, 1 + n / (1 << 18))
        assert isinstance(agent.create_container(of, container(of, wants=wants)), Admitted)
    if shape == CORES:
        asks["smt"] = "isolate"
    if shape == NAMES:
        # Those after the 25th or so are beyond the budget of work, and are not looked at.
        names = {"app": 1} | dict.fromkeys((f"c{n}" for n in range(20)), 0.05) | {"z": 1}
        names |= dict.fromkeys((f"d{n}" for n in range(42)), 0.05)
        named = {name: {"cpu": f"{int(1000 * n)}m", "memory": "1Mi"} for name, n in names.items()}
        asks = {"policy": "single-numa-node", "cpus": "shared", "cpus.z": "exclusive"}
        asks |= {"smt.z": "full-core", "container-resources": json.dumps(named)}
    of, rejected = pod("new", asks, total=resources(6 if shape == NAMES else cpus, 1)), []
    made = container(of, wants=resources(cpus, 1 / 1024))
    count = calls(lambda: rejected.append(agent.create_container(of, made)))
    assert isinstance(rejected[0], Rejected)
    assert count <= SEARCH_CALLS


SEARCH_CALLS = 127_000


def test_a_partial_plan_counts_as_much_work_as_it_is() -> None:
    """On four NUMA nodes the search is nothing but partial plans, which took twice the 25 ms."""
    *_, shape = shapes(8, hostile=True, most_cpus=512)
    machine, state = shape.machine, shape.state
    rejected, found = admit_pod(NodeSnapshot(machine, state), shape.pod, shape.container), []
    assert isinstance(rejected, Rejected)
    count = calls(lambda: found.append(admit_by_moving(NodeSnapshot(machine, state), rejected)))
    assert found[0].is_search_spent
    assert count <= PARTIAL_PLAN_CALLS


PARTIAL_PLAN_CALLS = 64_000


def test_the_largest_creations_on_a_full_node_make_a_bounded_number_of_calls() -> None:
    """All of 64 named containers were placed with the first, each as much work as its creation."""
    node = full_node()
    for text, request in large_requests(node).items():
        count = calls(partial(create, node, request))
        assert count <= LARGE_CREATION_CALLS, text


LARGE_CREATION_CALLS = 30_000
