"""What the kubelet says it gave, and that its silence costs no more than a sentence."""

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from nri_numa.cli import explain
from nri_numa.kubelet.pb import podresources_pb2 as pb
from nri_numa.kubelet.pod_resources import (
    AllocatedDevices,
    AllocatedMemory,
    ContainerResources,
    DeviceCount,
    count_devices,
    query_allocated_device_ids,
    query_node_devices,
    query_pod,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from tests.beds.fake_kubelet import pod_resources


def pod() -> Any:
    found = pb.PodResources(name="web", namespace="shop")
    main = found.containers.add(name="main", cpu_ids=[5, 4, -1, 999_999])
    main.memory.add(memory_type="memory", size=1 << 30).topology.nodes.add()
    for node in (0, 1):  # one device on two NUMA nodes
        main.devices.add(resource_name="a/gpu", device_ids=["g1"]).topology.nodes.add(ID=node)
    main.devices.add(resource_name="a/slot", device_ids=["slot-1", "slot-0"])
    for name in ("b", "a", "a"):
        claim = main.dynamic_resources.add(claim_name="c")
        claim.claim_resources.add(driver_name="d", pool_name="n", device_name=name)
    found.containers.add(name="helper")
    return found


def answered(request: Any, context: Any) -> Any:
    return pb.GetPodResourcesResponse(pod_resources=pod())


def everything(request: Any, context: Any) -> Any:
    return pb.ListPodResourcesResponse(pod_resources=[pod()])


def failing(code: grpc.StatusCode, words: str) -> Any:
    def fail(request: Any, context: Any) -> Any:
        context.abort(code, words)

    return fail


GATED = failing(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
WEB = (
    ContainerResources(
        container="main",
        cpus=CPUSet([4, 5]),
        memory=(AllocatedMemory(kind="memory", size=1 << 30, numa_nodes=NUMASet([0])),),
        devices=(
            AllocatedDevices(resource="a/gpu", by_id={"g1": NUMASet([0, 1])}),
            AllocatedDevices(resource="a/slot", by_id={"slot-0": NUMASet(), "slot-1": NUMASet()}),
        ),
        claims=("d/n/a", "d/n/b"),
    ),
    ContainerResources(container="helper"),
)


def test_what_a_pod_was_given(directory: Path) -> None:
    with pod_resources(directory, answered, failing(grpc.StatusCode.INTERNAL, "not to be called")):
        assert query_pod(str(directory), "shop", "web") == WEB


def test_an_older_kubelet_is_asked_for_all_pods(directory: Path) -> None:
    with pod_resources(directory, GATED, everything):
        assert query_pod(str(directory), "shop", "web") == WEB
        assert query_pod(str(directory), "shop", "other") == "the kubelet knows no such pod"
        assert query_allocated_device_ids(str(directory), "a/slot") == {"slot-0", "slot-1"}
        assert query_allocated_device_ids(str(directory), "a/other") == set()


def test_no_socket_and_nobody_at_the_socket(directory: Path) -> None:
    assert "does not exist" in str(query_pod(str(directory), "shop", "web"))
    assert query_allocated_device_ids(str(directory), "a/slot") == set()
    (directory / "pod-resources").mkdir()
    (directory / "pod-resources/kubelet.sock").touch()
    assert "no answer at" in str(query_pod(str(directory), "shop", "web"))


@pytest.mark.parametrize(
    ("code", "words", "said"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit", "too often"),
        (grpc.StatusCode.UNKNOWN, "pod web in namespace shop not found", "knows no such pod"),
        (grpc.StatusCode.INTERNAL, "on fire", "the kubelet refused: INTERNAL: on fire"),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown service", "does not serve this"),
    ],
)
def test_errors_are_sentences(
    directory: Path, code: grpc.StatusCode, words: str, said: str
) -> None:
    fail = failing(code, words)
    with pod_resources(directory, fail, fail):
        assert said in str(query_pod(str(directory), "shop", "web"))
        assert query_allocated_device_ids(str(directory), "a/slot") == set()


def test_a_kubelet_that_hangs(directory: Path) -> None:
    over = threading.Event()

    def hang(request: Any, context: Any) -> Any:
        over.wait(30)
        return pb.GetPodResourcesResponse()

    with pod_resources(directory, hang, hang):
        assert "did not answer within 0.05 s" in str(
            query_pod(str(directory), "shop", "web", timeout_s=0.05)
        )
        over.set()


def explained(name: str, **assignment: str) -> dict[str, Any]:
    return {"container": name, "assignment": {"cpus": "", "slots": "", **assignment}}


def test_both_sides_in_words_and_where_they_differ(directory: Path) -> None:
    with pod_resources(directory, answered, everything):
        word = explain.query_kubelet_grants(str(directory), "shop", "web")

    def told(*ours: dict[str, Any]) -> list[str]:
        return list(explain.kubelet_grant_sentences(word, [*ours]))

    main = explained("main", cpus="4-5", slots="slot-0")
    assert told(main, explained("helper"), explained("init")) == [
        "The kubelet granted container main exclusive CPUs 4-5; 1 GiB of memory of NUMA "
        "node 0; a/gpu g1 of NUMA nodes 0-1; a/slot slot-0, slot-1; claimed device d/n/a; claimed "
        "device d/n/b.",
        "The kubelet granted container helper no exclusive CPUs, memory or devices.",
        "The kubelet does not report container init.",
    ]
    assert told(explained("main", cpus="2-3", slots="slot-7"))[1:] == [
        "These differ: the agent has CPUs 2-3, the kubelet CPUs 4-5.",
        "These differ: the agent has slot-7, the kubelet has no such device for it.",
    ]
    assert len(told(explained("main", cpus="odd"), {"container": "helper"})) == 2


def test_no_word_is_one_sentence(directory: Path) -> None:
    word = explain.query_kubelet_grants(str(directory), "shop", "web")
    (sentence,) = explain.kubelet_grant_sentences(word, [explained("main")])
    assert sentence.startswith("Could not ask the kubelet: ")


def test_many_ids_are_cut_short_and_hostile_names_are_harmless() -> None:
    devices = [{"resource": "a/x\x1b[31m", "ids": [f"i{n}" for n in range(20)], "numaNodes": ""}]
    one = {"container": "m", "cpus": "", "memory": [], "devices": devices, "claims": []}
    (sentence,) = explain.kubelet_grant_sentences(
        {"problem": "", "containers": [one]}, [explained("m")]
    )
    assert "i7 and 12 more" in sentence
    assert sentence.isprintable()


def machine(request: Any, context: Any) -> Any:
    """Two GPUs on NUMA node 0, one of both, and devices that say no NUMA node."""
    found = pb.AllocatableResourcesResponse(cpu_ids=[0, 1])
    found.devices.add(resource_name="a/gpu", device_ids=["g2", "g3"]).topology.nodes.add(ID=0)
    for node in (0, 1):
        found.devices.add(resource_name="a/gpu", device_ids=["g1"]).topology.nodes.add(ID=node)
    found.devices.add(resource_name="a/slot", device_ids=["slot-0", "slot-1", "slot-2"])
    found.devices.add(resource_name="memory", device_ids=["m"]).topology.nodes.add(ID=0)
    return found


def test_devices_are_counted_where_they_are(directory: Path) -> None:
    """One of two NUMA nodes counts on both; one without a place, or called memory, nowhere."""
    with pod_resources(directory, answered, everything, machine):
        devices = query_node_devices(str(directory))
        assert not isinstance(devices, str)
        assert [(d.id, set(d.numa_nodes), d.is_allocated) for d in devices] == [
            ("g1", {0, 1}, True),
            ("g2", {0}, False),
            ("g3", {0}, False),
            *((f"slot-{n}", set(), n < 2) for n in range(3)),
        ]
        assert count_devices(devices) == (
            DeviceCount(resource="a/gpu", numa_node=0, allocatable=3, available=2),
            DeviceCount(resource="a/gpu", numa_node=1, allocatable=1, available=0),
        )


def test_why_devices_are_not_counted(directory: Path) -> None:
    assert "does not exist" in query_node_devices(str(directory))
    refuses = failing(grpc.StatusCode.UNKNOWN, "not today")
    with pod_resources(directory, answered, refuses, machine):
        assert query_node_devices(str(directory)) == "the kubelet refused: UNKNOWN: not today"
    with pod_resources(directory, answered, everything):
        assert "does not serve this" in query_node_devices(str(directory))
