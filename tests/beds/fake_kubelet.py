"""A kubelet's device manager, as small as can be, and its PodResources server.

It does what the real one does and what device plugins stumble over (kubernetes
``pkg/kubelet/cm/devicemanager``): at its start it removes every socket of the directory, it dials
the plugin before it answers a registration, and it watches the list from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nri_numa.device_plugin.pb import deviceplugin_pb2 as pb
from nri_numa.kubelet.pb import podresources_pb2
from tests.beds.small_cri import unary

_OPTIONS = (("grpc.default_authority", "localhost"), ("grpc.enable_http_proxy", 0))


class FakeKubelet:
    """One life of a kubelet.

    Args:
        refuses: the words with which registrations are refused; empty to take them.
    """

    def __init__(self, directory: Path, *, refuses: str = "", watches: bool = True) -> None:
        self._directory = directory
        self._refuses = refuses
        self._watches = watches
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Condition()
        self.refused = 0
        self.resources: list[str] = []
        self.lists: list[dict[str, tuple[str, int | None]]] = []
        self.options: pb.DevicePluginOptions | None = None

    async def __aenter__(self) -> FakeKubelet:
        for entry in self._directory.iterdir():
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        server = grpc.aio.server()
        register = {"Register": unary(self._register, pb.RegisterRequest)}
        handlers = grpc.method_handlers_generic_handler("v1beta1.Registration", register)
        server.add_generic_rpc_handlers((handlers,))
        server.add_insecure_port(f"unix:{self._directory / 'kubelet.sock'}")
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)
        if self._server is not None:
            await self._server.stop(None)

    async def _register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        if self._refuses:
            self.refused += 1
            await context.abort(grpc.StatusCode.UNKNOWN, self._refuses)
        assert request.version == "v1beta1"
        assert "/" not in request.endpoint
        if self._channel is not None:
            await self._channel.close(None)
        path = self._directory / request.endpoint
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)
        self.options = await self._call(
            "GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions
        )
        if self._watches:
            self._tasks.add(asyncio.create_task(self._watch(self._channel)))
        self.resources.append(request.resource_name)
        return pb.Empty()

    async def _call(self, method: str, request: Any, response: Any) -> Any:
        assert self._channel is not None
        call = self._channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return await call(request, timeout=10)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        call = channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for answer in call(pb.Empty()):
                found = {
                    device.ID: (
                        device.health,
                        device.topology.nodes[0].ID if device.topology.nodes else None,
                    )
                    for device in answer.devices
                }
                async with self._news:
                    self.lists.append(found)
                    self._news.notify_all()

    async def listed(
        self, wanted: Callable[[dict[str, tuple[str, int | None]]], bool], timeout_s: float = 180.0
    ) -> dict[str, tuple[str, int | None]]:
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(lambda: bool(self.lists) and wanted(self.lists[-1]))
            return self.lists[-1]

    async def allocate(self, *ids: str) -> dict[str, str]:
        """Give ids to a container; the annotations that the plugin wants on it."""
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=ids)
        answer = await self._call("Allocate", request, pb.AllocateResponse)
        (one,) = answer.container_responses
        return dict(one.annotations)

    async def preferred(self, available: list[str], must: list[str], size: int) -> list[str]:
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        answer = await self._call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        (one,) = answer.container_responses
        return list(one.deviceIDs)


@contextlib.contextmanager
def pod_resources(
    root: Path,
    get: Callable[[Any, Any], Any],
    every: Callable[[Any, Any], Any],
    allocatable: Callable[[Any, Any], Any] | None = None,
) -> Iterator[None]:
    """Serve PodResources below a kubelet's root, from threads, for callers that wait.

    `allocatable`: answers GetAllocatableResources; None where the gate is off.
    """
    directory = root / "pod-resources"
    directory.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(4))

    handlers = {
        "Get": unary(get, podresources_pb2.GetPodResourcesRequest),
        "List": unary(every, podresources_pb2.ListPodResourcesRequest),
    }
    if allocatable is not None:
        asked = podresources_pb2.AllocatableResourcesRequest
        handlers["GetAllocatableResources"] = unary(allocatable, asked)
    service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix:{directory / 'kubelet.sock'}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
