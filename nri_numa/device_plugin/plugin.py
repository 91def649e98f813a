"""The life of the device plugin: count, serve, register, and again whenever the kubelet restarts.

The kubelet removes every socket of the directory when it starts, ours too, and makes its own anew.
Both are looked at every second. inotify would tell sooner, but the kernel gives all programs of
root together few instances of it (``fs.inotify.max_user_instances``, 128), and a node's status is
computed every ten seconds anyway.
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
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.device_plugin.service import Service, register
from nri_numa.device_plugin.slots import Counted, SlotList, counted
from nri_numa.errors import AgentError, DevicePluginBusy, RuntimeUnavailable
from nri_numa.observe.logs import get_logger

log = get_logger("device-plugin")

KUBELET_SOCKET: Final = "kubelet.sock"
OWN_SOCKET: Final = "nri-numa.sock"
LOCK: Final = "nri-numa.lock"

WAITS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the next registration, after one that failed or did not last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times in seconds.

    Attributes:
        ask: between two questions to the agent.
        look: between two looks at the directory.
        silent: how long the agent may be silent before nothing new is offered. It restarts in
            less, and its containers keep what they have.
        settle: between the end of one registration and the next. Kubelets up to 1.36.3 take the
            end of an old stream for the end of the new one (kubernetes #121994, #127803).
        watched: how long the kubelet may take to watch the list once it has registered us, and how
            long it may be without doing so.
    """

    ask: float = 2.0
    look: float = 1.0
    silent: float = 10.0
    settle: float = 1.0
    watched: float = 10.0


class DevicePlugin:
    """Offers the agent's count to the kubelet of this node.

    Args:
        directory: the kubelet's, for device plugins.
        resource: name of the extended resource.
        ask: fetches the agent's ``/v1/slots``; may block, and raise any of our exceptions.
        slots: what is offered.
        taken: ids that the kubelet has given away already, asked once at the start; may block.
        pace: times.
        waits: see `WAITS`.

    Attributes:
        registered: how often the kubelet took a registration.
    """

    def __init__(
        self,
        directory: str,
        resource: str,
        ask: Callable[[], Mapping[str, Any]],
        slots: SlotList,
        *,
        taken: Callable[[], Iterable[str]] = tuple,
        pace: Pace | None = None,
        waits: tuple[float, ...] = WAITS,
    ) -> None:
        self._directory = directory
        self._kubelet_socket = os.path.join(directory, KUBELET_SOCKET)
        self._own_socket = os.path.join(directory, OWN_SOCKET)
        self._resource = resource
        self._ask = ask
        self._slots = slots
        self._taken = taken
        self._pace = pace or Pace()
        self._waits = waits
        self._service: Service | None = None
        self._has_count = asyncio.Event()
        self._heard_at = time.monotonic()
        self._told = ""
        self.registered = 0

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            DevicePluginBusy: another one serves this directory.
            RuntimeUnavailable: there is no such directory, or it may not be written to.
        """
        with _alone(os.path.join(self._directory, LOCK)):
            ids = await asyncio.to_thread(self._taken)
            self._slots.taken(ids, time.monotonic())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._count(), name="count")
                tasks.create_task(self._serve(), name="serve")

    # --- counting -------------------------------------------------------------------------------

    async def _count(self) -> None:
        while True:
            self._take(await self._asked())
            await asyncio.sleep(self._pace.ask)

    async def _asked(self) -> Counted:
        try:
            return counted(await asyncio.to_thread(self._ask))
        except AgentError as error:
            return Counted(ready=False, reason=str(error))
        except (ValueError, KeyError, TypeError) as error:
            return Counted(ready=False, reason=f"/v1/slots cannot be read: {error!r}")

    def _take(self, told: Counted) -> None:
        now = time.monotonic()
        if told.ready:
            self._heard_at = now
        elif not self._has_count.is_set() or now - self._heard_at < self._pace.silent:
            self._say(told.reason, "")
            return
        changed = self._slots.count(told, now)
        self._has_count.set()
        self._say(told.reason, "; what is free is unhealthy until it is")
        if changed:
            healthy = sum(slot.healthy for slot in self._slots.slots)
            log.info(
                "slots", resource=self._resource, offered=len(self._slots.slots), healthy=healthy
            )
            if self._service is not None:
                self._service.changed()

    def _say(self, reason: str, then: str) -> None:
        text = reason + then if reason else ""
        if text and text != self._told:
            log.warning("the agent does not count", problem=text)
        elif self._told and not text:
            log.info("the agent counts again")
        self._told = text

    # --- serving --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        await self._has_count.wait()
        failures = 0
        while True:
            kubelet = await self._kubelet()
            try:
                async with self._serving() as service:
                    await register(self._kubelet_socket, OWN_SOCKET, self._resource)
                    self.registered += 1
                    log.info("registered", resource=self._resource, number=self.registered)
                    begin = time.monotonic()
                    why = await self._until(service, kubelet)
                lasted = time.monotonic() - begin > max(self._waits)
                failures = 0 if lasted or not why.again else failures + 1
                log.warning("registering again", reason=why.text)
            except RuntimeUnavailable as error:
                failures += 1
                if failures <= len(self._waits):
                    log.warning("not registered", problem=str(error))
            await asyncio.sleep(self._pace.settle)
            if failures:
                await self._rest(self._waits[min(failures, len(self._waits)) - 1], kubelet)

    async def _rest(self, seconds: float, kubelet: object) -> None:
        """Wait, but not while another kubelet is there: it knows nothing of what failed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if _socket(self._kubelet_socket) not in (None, kubelet):
                return
            await asyncio.sleep(min(left, self._pace.look))

    async def _kubelet(self) -> object:
        """Which kubelet is there; waits for one."""
        told = False
        while (kubelet := _socket(self._kubelet_socket)) is None:
            if not told:
                log.warning("no kubelet", problem=f"{self._kubelet_socket} is not there")
            told = True
            await asyncio.sleep(self._pace.look)
        return kubelet

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[Service]:
        service = Service(self._own_socket, self._slots)
        await service.start()
        self._service = service
        try:
            yield service
        finally:
            self._service = None
            await service.stop()

    async def _until(self, service: Service, kubelet: object) -> _Why:
        """Look at the directory until there is a reason to register again."""
        own, watched = _socket(self._own_socket), time.monotonic()
        while True:
            await asyncio.sleep(self._pace.look)
            now = time.monotonic()
            there = _socket(self._kubelet_socket)
            if there not in (None, kubelet):
                return _Why("the kubelet restarted", again=False)
            if _socket(self._own_socket) != own:
                # Both are gone while a kubelet starts.
                return _Why(f"{self._own_socket} was taken away", again=there is not None)
            if service.streams or there is None:
                # Without its socket nobody could be registered with; the list is served as before.
                watched = now
            elif now - watched > self._pace.watched:
                return _Why(
                    "the kubelet does not watch the list any more; perhaps another plugin "
                    f"registers {self._resource} too",
                    again=True,
                )


@dataclass(frozen=True, slots=True)
class _Why:
    text: str
    again: bool


def _socket(path: str) -> object:
    """Which socket is there: another object for another one; None for none.

    The number alone is not enough: a file system gives it to the next file.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Be the only one of this directory; the kernel lets go when the process ends, however."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RuntimeUnavailable(
            f"{os.path.dirname(path)} cannot be used: {error.strerror}; expected the kubelet's "
            "directory for device plugins, and the right to write there"
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
