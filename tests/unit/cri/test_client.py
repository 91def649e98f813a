"""The CRI client against a small gRPC server on a unix socket."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from nri_numa.cri.client import (
    CRIClient,
    UpdateFailed,
    container_from,
    pod_from,
)
from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.workload import Container, ContainerUpdate, QoSClass
from nri_numa.runtime import RuntimeInfo
from proto.generate_cri import stale

Handler = Callable[[Any, Any], Awaitable[Any]]

CONTAINERS = [
    cri_pb2.Container(
        id="b2",
        pod_sandbox_id="p1",
        metadata=cri_pb2.ContainerMetadata(name="web"),
        state=cri_pb2.CONTAINER_RUNNING,
        created_at=7,
        labels={"io.kubernetes.container.name": "web"},
    ),
    cri_pb2.Container(
        id="a1",
        pod_sandbox_id="p1",
        metadata=cri_pb2.ContainerMetadata(name="init"),
        state=cri_pb2.CONTAINER_CREATED,
        created_at=7,
    ),
]


class Runtime:
    """A runtime with two containers that keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.authority = ""

    async def version(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return cri_pb2.VersionResponse(
            runtime_name="containerd", runtime_version="2.1.9", runtime_api_version="v1"
        )

    async def list_containers(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        wanted = request.filter.state.state if request.filter.HasField("state") else None
        found = [each for each in CONTAINERS if wanted in (None, each.state)]
        return cri_pb2.ListContainersResponse(containers=found)

    async def list_pods(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        metadata = cri_pb2.PodSandboxMetadata(name="db", namespace="prod", uid="u1")
        pod = cri_pb2.PodSandbox(
            id="p1", metadata=metadata, state=cri_pb2.SANDBOX_READY, annotations={"k": "v"}
        )
        return cri_pb2.ListPodSandboxResponse(items=[pod])

    async def status(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if request.container_id == "gone":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such container")
        if request.container_id == "broken":
            await context.abort(grpc.StatusCode.INTERNAL, "disk on fire")
        status = cri_pb2.ContainerStatus(
            id=request.container_id,
            metadata=cri_pb2.ContainerMetadata(name="web"),
            state=cri_pb2.CONTAINER_RUNNING,
            resources=cri_pb2.ContainerResources(
                linux=cri_pb2.LinuxContainerResources(
                    cpuset_cpus="0-3",
                    hugepage_limits=[cri_pb2.HugepageLimit(page_size="2MB", limit=4096)],
                )
            ),
        )
        info = {"info": json.dumps({"pid": 4711}) if request.container_id == "b2" else "no json"}
        return cri_pb2.ContainerStatusResponse(status=status, info=info)

    async def update(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if request.container_id == "gone":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such container")
        if request.container_id == "narrow":
            await context.abort(grpc.StatusCode.UNKNOWN, "permission denied")
        return cri_pb2.UpdateContainerResourcesResponse()

    async def events(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for kind in (cri_pb2.CONTAINER_CREATED_EVENT, 99, cri_pb2.CONTAINER_DELETED_EVENT):
            event = cri_pb2.ContainerEventResponse(container_id="b2", created_at=5)
            event.container_event_type = kind  # type: ignore[assignment]  # also a later CRI's
            yield event


@pytest.fixture
def directory() -> Iterator[Path]:
    # Socket paths end at 107 bytes, which pytest's own directories may pass.
    with tempfile.TemporaryDirectory(prefix="cri-") as name:
        yield Path(name)


@asynccontextmanager
async def serving(directory: Path, runtime: Runtime) -> AsyncIterator[CRIClient]:
    def unary(handler: Handler, request: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            handler, request.FromString, lambda message: message.SerializeToString()
        )

    server = grpc.aio.server()
    handlers = {
        "Version": unary(runtime.version, cri_pb2.VersionRequest),
        "ListContainers": unary(runtime.list_containers, cri_pb2.ListContainersRequest),
        "ListPodSandbox": unary(runtime.list_pods, cri_pb2.ListPodSandboxRequest),
        "ContainerStatus": unary(runtime.status, cri_pb2.ContainerStatusRequest),
        "UpdateContainerResources": unary(runtime.update, cri_pb2.UpdateContainerResourcesRequest),
        "GetContainerEvents": grpc.unary_stream_rpc_method_handler(
            runtime.events,
            cri_pb2.GetEventsRequest.FromString,
            lambda message: message.SerializeToString(),
        ),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers),)
    )
    socket = directory / "cri.sock"
    server.add_insecure_port(f"unix://{socket}")
    await server.start()
    try:
        async with CRIClient(f"unix://{socket}", timeout_s=5) as client:
            yield client
    finally:
        await server.stop(None)


@pytest.mark.asyncio
async def test_version_names_the_runtime(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        assert await client.version() == RuntimeInfo(name="containerd", version="2.1.9")


@pytest.mark.asyncio
async def test_containers_come_by_creation_time_and_id(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        containers = await client.list_containers()
    assert [each.id for each in containers] == ["a1", "b2"]
    assert containers[1] == CONTAINERS[0]


@pytest.mark.asyncio
async def test_pods_are_listed(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        assert await client.pod_sandbox_ids() == ["p1"]


@pytest.mark.asyncio
async def test_status_has_pid_and_resources(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        status = await client.container_status("b2")
        other = await client.container_status("a1")
    assert status is not None
    container = container_from(status)
    assert container.pid == 4711
    assert container.resources.cpus == "0-3"
    assert container.resources.hugepages == {2 << 20: 4096}
    assert other is not None
    assert container_from(other).pid == 0  # info of another form is no reason to fail


@pytest.mark.asyncio
async def test_a_container_that_is_gone_has_no_status(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        assert await client.container_status("gone") is None


@pytest.mark.asyncio
async def test_an_answer_without_meaning_is_an_unavailable_runtime(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        with pytest.raises(RuntimeUnavailable, match=r"ContainerStatus: INTERNAL: disk on fire"):
            await client.container_status("broken")


@pytest.mark.asyncio
async def test_an_update_sends_what_is_set(directory: Path) -> None:
    runtime = Runtime()
    async with serving(directory, runtime) as client:
        assert await client.update(ContainerUpdate("b2", "2-3", "0", cpu_quota=-1)) is None
    (request,) = runtime.requests
    assert request.container_id == "b2"
    assert (request.linux.cpuset_cpus, request.linux.cpuset_mems) == ("2-3", "0")
    assert (request.linux.cpu_shares, request.linux.cpu_quota) == (0, -1)


@pytest.mark.asyncio
async def test_a_refused_update_is_a_value(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        narrow = await client.update(ContainerUpdate("narrow", cpus="9"))
        gone = await client.update(ContainerUpdate("gone", cpus="9"))
    assert narrow == UpdateFailed(container_id="narrow", unknown=False, message="permission denied")
    assert gone == UpdateFailed(container_id="gone", unknown=True, message="no such container")


@pytest.mark.asyncio
async def test_events_come_until_the_stream_ends(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        kinds = [event.container_event_type async for event in client.container_events()]
    assert kinds == [cri_pb2.CONTAINER_CREATED_EVENT, 99, cri_pb2.CONTAINER_DELETED_EVENT]


@pytest.mark.asyncio
async def test_an_absent_socket_is_named(directory: Path) -> None:
    async with CRIClient(str(directory / "none.sock"), timeout_s=5) as client:
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.version()
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.update(ContainerUpdate("x", cpus="1"))


@pytest.mark.asyncio
async def test_a_runtime_that_comes_back_is_reached_again(directory: Path) -> None:
    """One client survives a restart of the runtime; nobody has to make a new one."""
    async with CRIClient(str(directory / "cri.sock"), timeout_s=5) as client:
        with pytest.raises(RuntimeUnavailable):
            await client.version()
        async with serving(directory, Runtime()):
            async with asyncio.timeout(180):
                while True:
                    try:
                        assert (await client.version()).name == "containerd"
                        break
                    except RuntimeUnavailable:
                        await asyncio.sleep(0.05)


# --- what CRI reports, in the engine's types ------------------------------------------------------


SPEC = {
    "annotations": {"a": "oci"},
    "process": {"env": ["PCIDEVICE_X=0000:3b:00.0"], "oomScoreAdj": -997},
    "linux": {
        "cgroupsPath": "/kubepods/pod1/c1",
        "devices": [{"path": "/dev/x", "type": "c", "major": 10, "minor": 3}],
        "resources": {
            "cpu": {"shares": 2048, "quota": 200_000, "period": 100_000, "cpus": "1", "mems": "0"},
            "memory": {"limit": 4096},
            "hugepageLimits": [{"pageSize": "2MB", "limit": 8192}],
            "devices": [{"allow": False, "access": "rwm"}, {"allow": True, "major": 10}],
        },
    },
}


def converted(
    spec: Any = None, resources: cri_pb2.LinuxContainerResources | None = None
) -> Container:
    status = cri_pb2.ContainerStatus(
        id="c1",
        metadata=cri_pb2.ContainerMetadata(name="main"),
        state=cri_pb2.CONTAINER_CREATED,
        annotations={"a": "cri", "b": "cri"},
    )
    if resources is not None:
        status.resources.linux.CopyFrom(resources)
    info = {"info": json.dumps({"pid": 12, "sandboxID": "p1", "runtimeSpec": spec})}
    return container_from(cri_pb2.ContainerStatusResponse(status=status, info=info))


def test_a_spec_has_everything_that_nri_reports() -> None:
    container = converted(SPEC)
    assert (container.id, container.pod_id, container.name) == ("c1", "p1", "main")
    assert container.annotations == {"a": "oci", "b": "cri"}
    assert (container.pid, container.starting) == (12, True)
    assert (container.cgroups_path, container.oom_score_adj) == ("/kubepods/pod1/c1", -997)
    resources = container.resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpu_period) == (
        2048,
        200_000,
        100_000,
    )
    assert (resources.memory_limit, resources.hugepages) == (4096, {2 << 20: 8192})
    assert (resources.cpus, resources.mems) == ("1", "0")
    assert [(d.major, d.minor) for d in container.mentions.nodes] == [(10, 3)]
    assert container.mentions.variables == {"PCIDEVICE_X": "0000:3b:00.0"}


def test_a_privileged_container_has_no_devices_of_its_own() -> None:
    linux = {**SPEC["linux"], "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    assert converted({"linux": linux}).mentions.nodes == ()


def test_without_a_spec_the_resources_of_cri_must_do() -> None:
    container = converted(
        resources=cri_pb2.LinuxContainerResources(
            cpu_quota=100_000,
            memory_limit_in_bytes=5,
            oom_score_adj=2,
            cpuset_cpus="3",
            hugepage_limits=[cri_pb2.HugepageLimit(page_size="1GB", limit=1 << 30)],
        )
    )
    assert container.resources.cpu_quota == 100_000
    assert container.resources.hugepages == {1 << 30: 1 << 30}
    assert (container.resources.cpus, container.oom_score_adj) == ("3", 2)
    assert converted().resources.cpu_shares is None


@pytest.mark.parametrize(
    "spec",
    [
        {"linux": [], "process": "x", "annotations": 3},
        {"linux": {"resources": {"cpu": {"quota": 2**70}}}},
        {"linux": {"devices": "x", "resources": {"hugepageLimits": [{"pageSize": 1}, 5]}}},
        {"process": {"env": {}, "oomScoreAdj": True}},
        {"linux": {"resources": {"devices": [{"major": "x"}], "cpu": {"period": 5}}}},
    ],
)
def test_a_spec_of_another_form_counts_as_none(spec: Any) -> None:
    resources = converted(spec).resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpus) == (None, None, "")
    assert resources.hugepages == {}


def test_a_pod_has_its_size_its_class_and_its_network() -> None:
    status = cri_pb2.PodSandboxStatus(
        id="p1",
        metadata=cri_pb2.PodSandboxMetadata(name="db", namespace="shop", uid="u"),
        annotations={"k": "v"},
    )
    resources = {"cpu_shares": 512, "memory_limit_in_bytes": 7}
    network = {"type": "network", "path": "/run/netns/x"}
    info = {
        "config": {"linux": {"cgroup_parent": "/kubepods/burstable/podu", "resources": resources}},
        "runtimeSpec": {"linux": {"namespaces": [network]}},
    }
    pod = pod_from(cri_pb2.PodSandboxStatusResponse(status=status, info={"info": json.dumps(info)}))
    assert (pod.id, pod.uid, pod.full_name, pod.annotations) == ("p1", "u", "shop/db", {"k": "v"})
    assert (pod.qos, pod.resources.cpu_shares, pod.resources.memory_limit) == (
        QoSClass.BURSTABLE,
        512,
        7,
    )
    assert pod.network_namespace == "/run/netns/x"


def test_generated_code_is_what_the_sources_say() -> None:
    assert stale() == []
