"""Bringing plugins in: registration, configuration, synchronisation, and their departure.

Part of the embedded runtime. `PluginRegistry` owns the connections and the list of active plugins;
the runtime owns the world and the order of operations, and shares its lock.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final

from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event, identity_problem
from tests.beds.embedded.plugin_link import (
    CallRecord,
    Faults,
    PluginLost,
    PluginPeer,
    PluginStatus,
    RuntimeProfile,
    parse_answer,
)
from tests.beds.embedded.world import World

MAX_SLICE_BYTES: Final = ttrpc.MAX_BODY - 4096
"""Of one Synchronize message; the envelope needs a little."""

LEAST_SLICE: Final = 4
"""Objects of one kind in a slice that was made small because of its size."""

KEPT_RECORDS: Final = 10_000
"""Records that are remembered, of calls and of departures."""

REGISTRATION_TIMEOUT_S: Final = 5.0

UPDATE_FAILED: Final = "NRI update of some containers failed"


class PluginRegistry:
    """The plugins of one embedded runtime."""

    def __init__(
        self,
        *,
        profile: RuntimeProfile,
        world: World,
        lock: asyncio.Lock,
        faults: Faults,
        request_timeout: float,
        slice_objects: int | None,
    ) -> None:
        """Make an empty registry; the parameters are those of the runtime."""
        self.calls: deque[CallRecord] = deque(maxlen=KEPT_RECORDS)
        self.closed: deque[str] = deque(maxlen=KEPT_RECORDS)
        self._request_timeout = request_timeout
        self._faults = faults
        self._profile = profile
        self._world = world
        self._lock = lock
        self._slice_objects = slice_objects
        self._plugins: list[PluginPeer] = []
        self._peers: set[PluginPeer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    def active(self) -> list[PluginPeer]:
        """Return the active plugins in the order they are asked, without those that left."""
        self._plugins = [peer for peer in self._plugins if peer.is_open()]
        return self._plugins

    def subscribed(self, event: Event) -> list[PluginPeer]:
        """Return the active plugins that want an event."""
        return [peer for peer in self.active() if peer.subscribes(event)]

    async def wait_for(self, count: int, limit: float) -> None:
        """Wait until `count` plugins are active; TimeoutError after `limit` seconds."""
        async with asyncio.timeout(limit), self._changed:
            await self._changed.wait_for(lambda: len(self.active()) >= count)

    def accept(self) -> asyncio.BaseProtocol:
        """Take a new connection of an external plugin."""
        peer = self._new_peer()
        self._spawn(self._serve(peer, ""))
        return peer.connection

    async def adopt(self, sock: socket.socket, name: str, index: str, config: str) -> None:
        """Take the connection of a plugin the runtime launched."""
        peer = self._new_peer()
        peer.name, peer.index, peer.launched = name, index, True
        await asyncio.get_running_loop().create_unix_connection(lambda: peer.connection, sock=sock)
        self._spawn(self._serve(peer, config))

    async def hang_up(self, detail: str) -> None:
        for peer in list(self._peers):
            await peer.connection.aclose(detail)

    async def stop(self) -> None:
        """Close every connection and end what is under way."""
        await self.hang_up("the runtime stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._plugins.clear()

    def _new_peer(self) -> PluginPeer:
        peer = PluginPeer(
            self._profile, self._faults, on_updates=self._on_updates, on_call=self.calls.append
        )
        self._peers.add(peer)
        peer.connection.ended.add_done_callback(lambda _: self._gone(peer))
        return peer

    def _gone(self, peer: PluginPeer) -> None:
        self._peers.discard(peer)
        self.closed.append(f"{peer.id}: {peer.connection.ended.result().detail}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: PluginPeer, config: str) -> None:
        """Bring one plugin from its connection into the list of active plugins."""
        waited: set[asyncio.Future[Any]] = {peer.registration, peer.connection.ended}
        await asyncio.wait(
            waited, timeout=REGISTRATION_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not peer.registration.done():
            peer.connection.close("no registration")
            return
        registration = peer.registration.result()
        if not peer.launched:
            peer.name, peer.index = registration.name, registration.index
            problem = identity_problem(peer.name, peer.index)
            if problem is not None:
                # As in the real one the socket stays open; it is for the plugin to go.
                peer.refuse(registration.stream, f"invalid plugin: {problem}")
                return
        try:
            await self._configure(peer, registration, config)
            async with self._lock:
                # NRI before 0.7, which tells no timeouts, never synchronises what it launched.
                if not peer.launched or self._profile.tells_timeouts:
                    await self._synchronize(peer)
                self._plugins.append(peer)
                # By index as text; equal indices by name, so that tests see one order.
                self._plugins.sort(key=lambda each: (each.index, each.name))
        except (PluginLost, PluginStatus) as error:
            peer.connection.close(str(error))
            return
        async with self._changed:
            self._changed.notify_all()

    async def _configure(
        self, peer: PluginPeer, registration: ev.RegisterRequested, config: str
    ) -> None:
        profile = self._profile
        request = pb.ConfigureRequest(
            config=config,
            runtime_name=profile.name,
            runtime_version=profile.version,
            NRI_version=profile.nri_version,
        )
        if profile.tells_timeouts:
            request.registration_timeout = int(REGISTRATION_TIMEOUT_S * 1000)
            request.request_timeout = int(self._request_timeout * 1000)
        call = asyncio.ensure_future(peer.call("Configure", request, limit=self._request_timeout))
        if self._faults.configure_first:
            await asyncio.sleep(0)  # the task writes its request, then waits
        peer.answer(registration.stream)
        response = parse_answer(pb.ConfigureResponse, await call)
        if response.events & ~profile.events:
            raise PluginLost(f"invalid plugin events: {response.events:#x}")
        peer.mask = response.events or profile.events

    async def _synchronize(self, peer: PluginPeer) -> None:
        pods = [pod.message for pod in self._world.pods.values()]
        containers = [container.snapshot() for container in self._world.live_containers()]
        deadline = asyncio.get_running_loop().time() + self._request_timeout
        for request in self._slices(pods, containers):
            left = deadline - asyncio.get_running_loop().time()
            payload = await peer.call("Synchronize", request, limit=max(left, 0.001))
            response = parse_answer(pb.SynchronizeResponse, payload)
            if request.more and (response.update or not response.more):
                raise PluginLost("plugin does not handle split sync requests")
            for update in response.update:
                self._world.apply(update)  # failures are only logged by containerd

    def _slices(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Iterator[pb.SynchronizeRequest]:
        for _ in range(self._faults.empty_slices):
            yield pb.SynchronizeRequest(more=True)
        size = self._slice_objects or max(len(pods), len(containers), 1)
        while True:
            requests = [
                pb.SynchronizeRequest(
                    pods=pods[start : start + size], containers=containers[start : start + size]
                )
                for start in range(0, max(len(pods), len(containers), 1), size)
            ]
            largest = max(request.ByteSize() for request in requests)
            if largest <= MAX_SLICE_BYTES or size <= LEAST_SLICE:
                break
            size = max(LEAST_SLICE, int(size * min(0.9, MAX_SLICE_BYTES / largest)))
        for request in requests[:-1]:
            request.more = True
        yield from requests

    def _on_updates(self, peer: PluginPeer, event: ev.UpdateContainersRequested) -> None:
        self._spawn(self._unsolicited(peer, event))

    async def _unsolicited(self, peer: PluginPeer, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            failed = [
                update
                for update in event.request.update
                if self._world.apply(update) is not None and not update.ignore_failure
            ]
        if not peer.is_open():
            return
        if failed and not self._profile.update_failures_as_list:
            peer.refuse(event.stream, UPDATE_FAILED)
        else:
            peer.answer(event.stream, pb.UpdateContainersResponse(failed=failed))
