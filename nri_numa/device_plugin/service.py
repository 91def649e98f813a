"""The gRPC service that the kubelet calls, on one socket.

Nothing waits in a handler: Allocate and GetPreferredAllocation have no deadline in the kubelet, and
while one of them hangs no pod of the node is admitted.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio

from nri_numa.device_plugin.pb import deviceplugin_pb2 as pb
from nri_numa.device_plugin.slots import Slot, SlotList
from nri_numa.errors import RuntimeUnavailable, UnknownSlots
from nri_numa.observe.logs import get_logger

log = get_logger("device-plugin")

VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"
_SERVICE: Final = "v1beta1.DevicePlugin"
_REGISTER: Final = "/v1beta1.Registration/Register"
_REGISTER_TIMEOUT: Final = 15.0
"""Seconds. The kubelet dials us inside the call, for up to ten."""
_OPTIONS: Final = (
    # Go servers check the :authority header, which for a unix socket would be its path.
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)


def devices(slots: tuple[Slot, ...]) -> pb.ListAndWatchResponse:
    """The whole list as the kubelet takes it."""
    answer = pb.ListAndWatchResponse()
    for slot in slots:
        device = answer.devices.add(ID=slot.id, health=HEALTHY if slot.healthy else UNHEALTHY)
        if slot.numa_node is not None:
            # Not even an empty one where nothing is known: PodResources would lose the device.
            device.topology.nodes.add(ID=slot.numa_node)
    return answer


class Service:
    """Serves `SlotList` on a unix socket, from `start` to `stop`; usable once.

    Args:
        path: the socket; one that is left there by a process that was killed is taken away.
        slots: what is offered.
        now: seconds of a clock that only grows.

    Attributes:
        streams: how many lists the kubelet is watching at present.
    """

    def __init__(
        self, path: str, slots: SlotList, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._slots = slots
        self._now = now
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self.streams = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            RuntimeUnavailable: the socket cannot be had.
        """
        server = grpc.aio.server()
        handlers = {
            "GetDevicePluginOptions": _unary(self._options, pb.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": _unary(self._prefer, pb.PreferredAllocationRequest),
            "Allocate": _unary(self._allocate, pb.AllocateRequest),
            "PreStartContainer": _unary(self._pre_start, pb.PreStartContainerRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            unlink_socket(self.path)
            server.add_insecure_port(f"unix:{self.path}")
        except (OSError, RuntimeError) as error:
            raise RuntimeUnavailable(
                f"device plugin socket {self.path} cannot be made: {error}"
            ) from error
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End every call and close; returns when the kubelet can see it."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def changed(self) -> None:
        """The list is another one: tell whoever watches."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- calls ----------------------------------------------------------------------------------

    async def _options(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def _list_and_watch(
        self, request: pb.Empty, context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        self.streams += 1
        try:
            while True:
                changed = self._changed
                yield devices(self._slots.slots)
                await changed.wait()
        finally:
            self.streams -= 1

    async def _prefer(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        answer = pb.PreferredAllocationResponse()
        for one in request.container_requests:
            must, size = list(one.must_include_deviceIDs), one.allocation_size
            chosen = self._slots.prefer(one.available_deviceIDs, must, size)
            answer.container_responses.add(deviceIDs=chosen)
        return answer

    async def _allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        answer = pb.AllocateResponse()
        for one in request.container_requests:
            try:
                text = self._slots.allocate(list(one.devices_ids), self._now())
            except UnknownSlots as error:
                log.warning("allocation refused", problem=str(error))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise  # abort has raised already
            answer.container_responses.add(annotations={self._slots.annotation: text})
            log.info("allocated", slots=text)
        return answer

    async def _pre_start(
        self, request: pb.PreStartContainerRequest, context: Any
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()  # never asked for; harmless


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def unlink_socket(path: str) -> None:
    """Take a socket away that an earlier process left.

    Raises:
        OSError: it cannot be taken away, or is no socket.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is there and is no socket")
    os.unlink(path)


async def register(kubelet_socket: str, endpoint: str, resource: str) -> None:
    """Tell the kubelet of a plugin that serves already: it dials back before it answers.

    Args:
        kubelet_socket: where the kubelet takes registrations.
        endpoint: file name of the plugin's socket, in the same directory.
        resource: name of the extended resource.

    Raises:
        RuntimeUnavailable: it does not answer in time, or refuses; the message has its words.
    """
    request = pb.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource)
    async with grpc.aio.insecure_channel(f"unix:{kubelet_socket}", options=_OPTIONS) as channel:
        call = channel.unary_unary(
            _REGISTER,
            request_serializer=pb.RegisterRequest.SerializeToString,
            response_deserializer=pb.Empty.FromString,
        )
        try:
            await call(request, timeout=_REGISTER_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            raise RuntimeUnavailable(
                f"the kubelet did not register {resource}: {error.code().name}: "
                f"{error.details() or 'no details'}"
            ) from error
