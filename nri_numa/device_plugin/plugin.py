"""The device plugin: it counts, serves and registers, and repeats this when the kubelet restarts.

When the kubelet starts, it removes every socket of the directory, the plugin's too, and creates its
own again. Both are polled every second. inotify would be faster, but all programs of root share a
small number of instances (``fs.inotify.max_user_instances``, 128), and a node's status is computed
only every ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self

import grpc
import grpc.aio
import msgspec

from nri_numa.device_plugin.pb import deviceplugin_pb2 as pb
from nri_numa.device_plugin.slots import Slot, SlotList
from nri_numa.errors import AgentError, DevicePluginBusy, RuntimeUnavailable, UnknownSlots
from nri_numa.observe.logs import get_logger
from nri_numa.web.responses import ExclusiveCPUSlotsDocument

# --- The gRPC service that the kubelet calls, on one socket ---------------------------------------
# No handler waits: Allocate and GetPreferredAllocation have no deadline in the kubelet, and no pod
# of the node is admitted while one of them hangs.


log = get_logger("device-plugin")

DEVICE_PLUGIN_API_VERSION: Final = "v1beta1"
_PLUGIN_SERVICE: Final = "v1beta1.DevicePlugin"
_REGISTER_METHOD: Final = "/v1beta1.Registration/Register"
_REGISTER_TIMEOUT_S: Final = 15.0
"""Seconds. The kubelet dials the plugin inside the call, for up to ten."""
_CHANNEL_OPTIONS: Final = (
    # Go servers check the :authority header, which would be the path of a unix socket.
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)


def encode_devices(slots: tuple[Slot, ...]) -> pb.ListAndWatchResponse:
    """Encode the whole list for the kubelet."""
    answer = pb.ListAndWatchResponse()
    for slot in slots:
        device = answer.devices.add(ID=slot.id, health="Healthy" if slot.healthy else "Unhealthy")
        if slot.numa_node is not None:
            # Left unset if unknown: with an empty topology PodResources would lose the device.
            device.topology.nodes.add(ID=slot.numa_node)
    return answer


class SlotService:
    """gRPC service of a `SlotList` on a unix socket, within its context; usable once.

    The socket of a killed process is removed; `RuntimeUnavailable` if it cannot be created. At the
    end every call has ended, and the kubelet can detect it. ``streams`` is the number of lists that
    the kubelet is watching now.
    """

    def __init__(self, path: str, slots: SlotList) -> None:
        self.path = path
        self._slots = slots
        self._server: grpc.aio.Server
        self._changed = asyncio.Event()
        self.streams = 0

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        handlers = {
            "GetDevicePluginOptions": _unary_rpc_handler(self._get_plugin_options, pb.Empty),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": _unary_rpc_handler(
                self._get_preferred_allocation, pb.PreferredAllocationRequest
            ),
            "Allocate": _unary_rpc_handler(self._allocate_slots, pb.AllocateRequest),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_PLUGIN_SERVICE, handlers),)
        )
        try:
            unlink_socket(self.path)
            self._server.add_insecure_port(f"unix:{self.path}")
        except (OSError, RuntimeError) as error:
            raise RuntimeUnavailable(
                f"device plugin socket {self.path} cannot be made: {error}"
            ) from error
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(None)

    def notify_slots_changed(self) -> None:
        """Send the changed list to the kubelet."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- calls ----------------------------------------------------------------------------------

    async def _get_plugin_options(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def _list_and_watch(
        self, request: pb.Empty, context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        self.streams += 1
        try:
            while True:
                changed = self._changed
                yield encode_devices(self._slots.slots)
                await changed.wait()
        finally:
            self.streams -= 1

    async def _get_preferred_allocation(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        answer = pb.PreferredAllocationResponse()
        for container in request.container_requests:
            required, size = list(container.must_include_deviceIDs), container.allocation_size
            ids = self._slots.preferred_ids(container.available_deviceIDs, required, size)
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def _allocate_slots(
        self, request: pb.AllocateRequest, context: Any
    ) -> pb.AllocateResponse:
        answer = pb.AllocateResponse()
        for container in request.container_requests:
            try:
                text = self._slots.allocate_slots(list(container.devices_ids), time.monotonic())
            except UnknownSlots as error:
                log.warning("allocation rejected", problem=str(error))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise  # abort has raised already
            answer.container_responses.add(annotations={self._slots.annotation_key: text})
            log.info("slots allocated", slots=text)
        return answer


def _unary_rpc_handler(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def unlink_socket(path: str) -> None:
    """Remove the socket of an earlier process; `OSError` if that fails, or it is no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    os.unlink(path)


async def register_with_kubelet(kubelet_socket: str, endpoint: str, resource: str) -> None:
    """Register a plugin that already serves: the kubelet dials back before it answers.

    ``endpoint`` is the file name of the plugin's socket, in the directory of the kubelet's.

    Raises:
        RuntimeUnavailable: it does not answer in time or refuses; its message is included.
    """
    request = pb.RegisterRequest(
        version=DEVICE_PLUGIN_API_VERSION, endpoint=endpoint, resource_name=resource
    )
    async with grpc.aio.insecure_channel(
        f"unix:{kubelet_socket}", options=_CHANNEL_OPTIONS
    ) as channel:
        call = channel.unary_unary(
            _REGISTER_METHOD,
            request_serializer=pb.RegisterRequest.SerializeToString,
            response_deserializer=pb.Empty.FromString,
        )
        try:
            await call(request, timeout=_REGISTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RuntimeUnavailable(
                f"the kubelet did not register {resource}: {error.code().name}: "
                f"{error.details() or 'no details'}"
            ) from error


KUBELET_SOCKET_NAME: Final = "kubelet.sock"
PLUGIN_SOCKET_NAME: Final = "nri-numa.sock"
LOCK_FILE: Final = "nri-numa.lock"


class PluginTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds.

    Attributes:
        agent_interval_s: between two queries of the agent.
        poll: between two checks of the directory.
        agent_timeout_s: until an unreachable agent stops new offers. A restart takes less, and
            containers keep their slots.
        settle: between the end of one registration and the next. Kubelets up to 1.36.3 take the
            end of an old stream for the end of the new one (kubernetes #121994, #127803).
        watched: until the kubelet must watch the list after a registration, or watch it again.
        retry_delays_s: before the next registration, after one that failed or ended early.
    """

    agent_interval_s: float = 2.0
    poll: float = 1.0
    agent_timeout_s: float = 10.0
    settle: float = 1.0
    watched: float = 10.0
    retry_delays_s: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)


class DevicePlugin:
    """Device plugin that advertises the agent's count to the kubelet of this node.

    ``fetch`` returns the agent's ``/v1/slots``, or raises an `AgentError`; ``allocated`` returns
    the ids that the kubelet has allocated already, and is called once at the start. Both may block.

    Attributes:
        registered: number of successful registrations.
    """

    def __init__(
        self,
        directory: str,
        resource: str,
        fetch: Callable[[], Mapping[str, Any]],
        slots: SlotList,
        *,
        allocated: Callable[[], Iterable[str]],
        times: PluginTiming | None = None,
    ) -> None:
        self._directory = directory
        self._kubelet_socket = os.path.join(directory, KUBELET_SOCKET_NAME)
        self._own_socket = os.path.join(directory, PLUGIN_SOCKET_NAME)
        self._resource = resource
        self._fetch = fetch
        self._slots = slots
        self._allocated = allocated
        self._times = times or PluginTiming()
        self._service: SlotService | None = None
        self._has_count = asyncio.Event()
        self._counted_at = time.monotonic()
        self._reported = ""
        self.registered = 0

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            DevicePluginBusy: another plugin serves this directory.
            RuntimeUnavailable: the directory is missing or not writable.
        """
        with _exclusive_lock(os.path.join(self._directory, LOCK_FILE)):
            ids = await asyncio.to_thread(self._allocated)
            self._slots.record_allocated(ids, time.monotonic())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._poll_agent(), name="count")
                tasks.create_task(self._serve_and_register(), name="serve")

    # --- counting -------------------------------------------------------------------------------

    async def _poll_agent(self) -> None:
        while True:
            self._apply_counts(await self._query_slot_counts())
            await asyncio.sleep(self._times.agent_interval_s)

    async def _query_slot_counts(self) -> ExclusiveCPUSlotsDocument | str:
        """Return the agent's counts, or the reason why there are none."""
        try:
            counts = msgspec.convert(
                await asyncio.to_thread(self._fetch), ExclusiveCPUSlotsDocument
            )
        except AgentError as error:
            return str(error)
        except msgspec.ValidationError as error:
            return f"/v1/slots cannot be read: {error}"
        return counts if counts.ready else counts.reason

    def _apply_counts(self, counts: ExclusiveCPUSlotsDocument | str) -> None:
        queried_at, reason = time.monotonic(), ""
        expires_at = self._counted_at + self._times.agent_timeout_s
        if not isinstance(counts, str):
            self._counted_at = queried_at
            changed = self._slots.apply_counts(counts, queried_at)
        elif not self._has_count.is_set() or queried_at < expires_at:
            self._report_problem(counts, "")
            return
        else:
            reason, changed = counts, self._slots.stop_offering(queried_at)
        self._has_count.set()
        self._report_problem(reason, "; free slots are unhealthy until then")
        if changed:
            healthy = sum(slot.healthy for slot in self._slots.slots)
            log.info(
                "slots counted",
                resource=self._resource,
                slot_count=len(self._slots.slots),
                healthy_slot_count=healthy,
            )
            if self._service is not None:
                self._service.notify_slots_changed()

    def _report_problem(self, reason: str, consequence: str) -> None:
        text = reason + consequence if reason else ""
        if text and text != self._reported:
            log.warning("slots not counted", problem=text)
        elif self._reported and not text:
            log.info("slots counted again")
        self._reported = text

    # --- serving --------------------------------------------------------------------------------

    async def _serve_and_register(self) -> None:
        await self._has_count.wait()
        failures = 0
        while True:
            kubelet = await self._wait_for_kubelet()
            try:
                async with SlotService(self._own_socket, self._slots) as service:
                    self._service = service
                    await register_with_kubelet(
                        self._kubelet_socket, PLUGIN_SOCKET_NAME, self._resource
                    )
                    self.registered += 1
                    log.info(
                        "resource registered",
                        resource=self._resource,
                        registration_count=self.registered,
                    )
                    registered_at = time.monotonic()
                    reason = await self._watch_sockets(service, kubelet)
                lasted = time.monotonic() - registered_at > max(self._times.retry_delays_s)
                failures = 0 if lasted or not reason.is_retry else failures + 1
                log.warning("registration repeated", problem=reason.text)
            except RuntimeUnavailable as error:
                failures += 1
                if failures <= len(self._times.retry_delays_s):
                    log.warning("resource not registered", problem=str(error))
            await asyncio.sleep(self._times.settle)
            if failures:
                delays_s = self._times.retry_delays_s
                await self._wait_same_kubelet(delays_s[min(failures, len(delays_s)) - 1], kubelet)

    async def _wait_same_kubelet(self, seconds: float, kubelet: object) -> None:
        """Wait, unless the kubelet restarts: a new one has not seen the failure."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            if _socket_identity(self._kubelet_socket) not in (None, kubelet):
                return
            await asyncio.sleep(min(remaining_s, self._times.poll))

    async def _wait_for_kubelet(self) -> object:
        """Wait for the kubelet's socket and return its identity."""
        reported = False
        while (kubelet := _socket_identity(self._kubelet_socket)) is None:
            if not reported:
                log.warning("kubelet awaited", problem=f"{self._kubelet_socket} does not exist")
            reported = True
            await asyncio.sleep(self._times.poll)
        return kubelet

    async def _watch_sockets(self, service: SlotService, kubelet: object) -> _ReregisterReason:
        """Poll the directory until there is a reason to register again."""
        plugin_socket, watched_at = _socket_identity(self._own_socket), time.monotonic()
        while True:
            await asyncio.sleep(self._times.poll)
            checked_at = time.monotonic()
            kubelet_socket = _socket_identity(self._kubelet_socket)
            if kubelet_socket not in (None, kubelet):
                return _ReregisterReason("the kubelet restarted", is_retry=False)
            if _socket_identity(self._own_socket) != plugin_socket:
                # Both are missing while a kubelet starts.
                return _ReregisterReason(
                    f"{self._own_socket} was taken away", is_retry=kubelet_socket is not None
                )
            if service.streams or kubelet_socket is None:
                # Without its socket no kubelet can be registered with: the list is still served.
                watched_at = checked_at
            elif checked_at - watched_at > self._times.watched:
                return _ReregisterReason(
                    "the kubelet no longer watches the list; another plugin may register "
                    f"{self._resource} too",
                    is_retry=True,
                )


class _ReregisterReason(msgspec.Struct, frozen=True):
    text: str
    is_retry: bool


def _socket_identity(path: str) -> object:
    """Return an identity of the socket at a path, which differs for a new one; None without one.

    The inode number alone is not enough: a file system reuses it for the next file.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


@contextlib.contextmanager
def _exclusive_lock(path: str) -> Iterator[None]:
    """Hold the lock of this directory; the kernel releases it at the end of the process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RuntimeUnavailable(
            f"{os.path.dirname(path)} cannot be used: {error.strerror}; expected the kubelet's "
            "directory for device plugins, and permission to write there"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise DevicePluginBusy(
                f"{path} is locked: another nri-numa device-plugin serves this node; the kubelet "
                "would mix up two of them"
            ) from error
        yield
    finally:
        os.close(descriptor)
