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
    ContainerEventType,
    CRIClient,
    CRIContainer,
    CRIContainerState,
    CRIPodSandbox,
    CRIResources,
    RuntimeVersion,
    UpdateFailed,
)
from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
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
        assert await client.version() == RuntimeVersion(name="containerd", version="2.1.9")


@pytest.mark.asyncio
async def test_containers_come_by_creation_time_and_id(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        containers = await client.list_containers()
    assert [each.id for each in containers] == ["a1", "b2"]
    assert containers[1] == CRIContainer(
        id="b2",
        pod_sandbox_id="p1",
        name="web",
        state=CRIContainerState.RUNNING,
        created_at_ns=7,
    )


@pytest.mark.asyncio
async def test_pods_are_listed(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        assert await client.list_pod_sandboxes() == (
            CRIPodSandbox(
                id="p1", name="db", namespace="prod", uid="u1", ready=True, annotations={"k": "v"}
            ),
        )


@pytest.mark.asyncio
async def test_status_has_pid_and_resources(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        status = await client.container_status("b2")
        other = await client.container_status("a1")
    assert status is not None
    assert status.pid == 4711
    assert status.resources == CRIResources(cpus="0-3", hugepage_limits={"2MB": 4096})
    assert other is not None
    assert other.pid == 0  # info of another form is no reason to fail


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
        resources = CRIResources(cpus="2-3", mems="0", hugepage_limits={"2MB": 1})
        assert await client.update_resources("b2", resources) is None
    (request,) = runtime.requests
    assert request.container_id == "b2"
    assert (request.linux.cpuset_cpus, request.linux.cpuset_mems) == ("2-3", "0")
    assert request.linux.cpu_shares == 0
    assert request.linux.hugepage_limits[0].page_size == "2MB"


@pytest.mark.asyncio
async def test_a_refused_update_is_a_value(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        narrow = await client.update_resources("narrow", CRIResources(cpus="9"))
        gone = await client.update_resources("gone", CRIResources(cpus="9"))
    assert narrow == UpdateFailed(container_id="narrow", gone=False, message="permission denied")
    assert gone == UpdateFailed(container_id="gone", gone=True, message="no such container")


@pytest.mark.asyncio
async def test_events_of_a_later_cri_are_passed_over(directory: Path) -> None:
    async with serving(directory, Runtime()) as client:
        kinds = [event.type async for event in client.container_events()]
    assert kinds == [ContainerEventType.CREATED, ContainerEventType.DELETED]


@pytest.mark.asyncio
async def test_an_absent_socket_is_named(directory: Path) -> None:
    async with CRIClient(str(directory / "none.sock"), timeout_s=5) as client:
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.version()
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.update_resources("x", CRIResources(cpus="1"))


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


def test_generated_code_is_what_the_sources_say() -> None:
    assert stale() == []
