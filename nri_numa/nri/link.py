"""Link to the container runtime over NRI: dial, register, answer, push updates, reconnect.

`NRILink` owns one connection at a time and one `PluginSession`. The `RuntimeHandler` answers the
requests; the link knows nothing of placement. Handlers are plain functions: they run inside
`buffer_updated`, one after the other, and the answer is written before the next request is parsed.
The runtime waits two seconds for an answer and then goes on without it, so a handler must be fast,
and an exception in a handler must still become an answer.

External mode dials a unix socket repeatedly, with growing delays: a container in its grace period
blocks every registration on the node (containerd#14083), so reconnecting in a tight loop would stop
pods from starting. Pre-installed mode uses a descriptor from the runtime and ends with it; the
runtime starts such plugins only once.

Updates that answer no request: up to NRI 0.12.0 an UpdateContainers call can deadlock the runtime's
whole NRI layer, because it takes two locks in the opposite order of every event (containerd#13733).
The answer to Synchronize takes them in the right order. So there a second, short-lived plugin
registers, answers Synchronize with the updates, and ends; the main connection is not affected. The
runtime has to send one complete description of the node, and while the registration waits for a
container in its grace period no other pod operation starts (containerd#14083), so it must be rare.
It is also not safe at every moment: containerd (2.1.9, 2.4.2) takes a read lock twice while it
removes a sandbox with containers in it, and a registration that waits for the write lock in between
deadlocks. So a registration waits until the runtime is idle, and none follows one that is not
answered yet.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from google.protobuf.message import Message
from msgspec.structs import replace

from nri_numa.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from nri_numa.model.machine import count_text
from nri_numa.model.workload import Container, ContainerUpdate, PodTable
from nri_numa.nri import conversion
from nri_numa.nri.transport import ConnectionEnding, SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PluginSession
from nri_numa.nri.wire.versions import AGENT_EVENTS, ALL_EVENTS, Event, identity_problem
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import begin_request
from nri_numa.runtime import (
    STABLE_LINK_S,
    LinkState,
    PermanentlyRejected,
    Planner,
    RequestRejected,
    RuntimeHandler,
    RuntimeLink,
    backoff_delays,
)
from nri_numa.runtime_profile import PushPath, profile_of

# The owner of the link logs state changes and failed pushes.
logger = get_logger("nri")

DEFAULT_REQUEST_TIMEOUT_S: Final = 2.0
"""Seconds that a runtime waits for an answer if it does not report them (NRI before 0.7)."""
MAX_RETRY_WHILE_LISTENING_S: Final = 2.0
"""Maximum delay while the runtime's socket accepts connections."""
REGISTRATION_STEP: Final = "registration"
"""Name of the registration in `CallTimer`."""
QUIET_AFTER_S: Final = 0.3
"""Seconds without a request after which the runtime counts as idle."""
SOCKET_POLL_INTERVAL_S: Final = 0.1
"""Seconds between two checks for a new socket of the runtime."""
QUIET_WAIT_TIMEOUT_S: Final = 10.0
"""Maximum wait for an idle runtime; on a busier node the updates travel with a reply."""
QUIET_CHECK_INTERVAL_S: Final = 0.1
"""Seconds between two checks for an idle runtime."""
MAX_SANDBOX_REMOVAL_S: Final = 5.0
"""Maximum time from the stop of a sandbox to its removal with containers still in it."""
PUSH_REGISTRATION_STEP: Final = "second registration"
"""Name of the second registration in `CallTimer`."""
ONE_SHOT_LINGER_S: Final = 0.05
"""Time that the one-shot stays connected after its answer, so that the runtime reads all of it."""


# --- plugins that the runtime launches ------------------------------------------------------------


class PreinstalledConnection(msgspec.Struct, frozen=True, kw_only=True):
    """Connected socket and identity of a plugin that the runtime launched."""

    descriptor: int
    name: str
    index: str


def preinstalled_from_environment(
    environ: MutableMapping[str, str],
) -> PreinstalledConnection | None:
    """Take over the descriptor of a plugin that the runtime launched.

    The three variables are removed and the descriptor becomes close-on-exec, so that no child
    process inherits them. Returns None if no runtime launched this process.

    Raises:
        ConfigError: NRI_PLUGIN_SOCKET is set and is not an open descriptor, or name or index is
            missing or malformed.
    """
    text = environ.get("NRI_PLUGIN_SOCKET")
    if text is None:
        return None
    del environ["NRI_PLUGIN_SOCKET"]
    name = environ.pop("NRI_PLUGIN_NAME", "")
    index = environ.pop("NRI_PLUGIN_IDX", "")
    problems = []
    if (problem := identity_problem(name, index)) is not None:
        problems.append(f"NRI_PLUGIN_NAME, NRI_PLUGIN_IDX: {problem}")
    descriptor = -1
    try:
        if not (text.isascii() and text.isdigit()):
            raise ValueError("not a decimal number")
        descriptor = int(text)
        os.set_inheritable(descriptor, False)
    except (ValueError, OverflowError, OSError) as error:
        problems.append(
            f"NRI_PLUGIN_SOCKET: {text!r} is no open file descriptor ({error}); expected what the"
            " runtime sets when it launches a plugin"
        )
    if problems:
        raise ConfigError("environment", problems)
    return PreinstalledConnection(descriptor=descriptor, name=name, index=index)


# --- a second registration ------------------------------------------------------------------------


async def push_one_shot(
    plan: Planner, *, socket_path: str, name: str, index: str, mentions: bool = False
) -> str:
    """Push the updates that ``plan`` returns through a second registration.

    ``plan`` gets the devices of containers only with ``mentions``; see
    `conversion.answer_synchronize`. Returns the reason of a failure; empty if the runtime accepted
    the answer.
    """
    loop = asyncio.get_running_loop()
    session = PluginSession()
    answered: asyncio.Future[str] = loop.create_future()

    def on_event(event: ev.PluginSessionEvent) -> None:
        match event:
            case ev.RegistrationAnswered(status):
                if status is not None:
                    answered.set_result(f"the second registration was refused: {status}")
            case ev.ConfigureRequested(stream):
                # One harmless bit: zero would mean all events, the validator's included.
                mask = Event.REMOVE_POD_SANDBOX.mask_bit
                session.reply(stream, pb.ConfigureResponse(events=mask))
            case ev.SynchronizeRequested(stream):
                answer = conversion.answer_synchronize(plan, event, mentions=mentions)
                session.reply(stream, answer)
                if not answered.done():
                    answered.set_result("")
            case _:
                session.reply(event.stream)

    connection = SessionTransport(session, on_event)
    try:
        await loop.create_unix_connection(lambda: connection, socket_path)
        session.register_plugin(name, index)
        connection.flush_session()
        futures: set[asyncio.Future[Any]] = {answered, connection.ended}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            return f"the second connection ended: {connection.ended.result().detail}"
        if not (detail := answered.result()):
            await asyncio.sleep(ONE_SHOT_LINGER_S)
        return detail
    except OSError as error:
        return f"{socket_path}: {error.strerror or error}"
    finally:
        await connection.close_and_wait("pushed")


# --- the link -------------------------------------------------------------------------------------


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a plugin's connection.

    Attributes:
        name, index: of the plugin; runtimes call plugins in ascending order of the two-digit index.
        socket_path: the runtime's socket, also for second registrations.
        descriptor: of a connected socket, for a plugin that the runtime launched; None to dial.
        events: mask of the subscribed events.
        delays: creates the sequence of delays between attempts.
        registration_wait: maximum seconds for a registration. Runtimes accept connections one at a
            time and give every silent one five seconds.
        push_interval: minimum seconds between two pushes.
        push_timeout: maximum seconds for one push.
        quiet_seconds: minimum seconds between the last request and a second registration.
    """

    name: str
    index: str
    socket_path: str
    descriptor: int | None = None
    events: int = ALL_EVENTS
    delays: Callable[[], Iterator[float]] = partial(backoff_delays, random.random)
    registration_wait: float = 60.0
    push_interval: float = 1.0
    push_timeout: float = 10.0
    quiet_seconds: float = QUIET_AFTER_S


class NRILink(RuntimeLink):
    """Connection of a plugin to its runtime, reopened if lost; see `nri_numa.runtime.RuntimeLink`.

    Raises:
        ConfigError: the name or the index is malformed.
    """

    def __init__(self, handler: RuntimeHandler, settings: LinkSettings) -> None:
        if (problem := identity_problem(settings.name, settings.index)) is not None:
            raise ConfigError("plugin identity", [problem])
        super().__init__(handler, time.monotonic)
        self._settings = settings
        self._session: PluginSession | None = None
        self._connection: SessionTransport[ev.PluginSessionEvent] | None = None
        self._registration_timer: asyncio.TimerHandle | None = None
        self._rejection: PermanentlyRejected | None = None
        self._active_since: float | None = None
        self._is_runtime_listening = False
        self._last_request_at = float("-inf")
        # Stop times of sandboxes that are not removed yet, oldest first.
        self._stop_times: dict[str, float] = {}
        self._updates: dict[int, asyncio.Future[ev.UpdateContainersAnswered]] = {}
        self._push_lock = asyncio.Lock()
        self._last_push_at = -settings.push_interval
        self._unanswered_push: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Keep the link connected until cancelled, or in pre-installed mode until it is closed."""
        try:
            if self._settings.descriptor is not None:
                await self._serve_descriptor(self._settings.descriptor)
            else:
                await self._dial_repeatedly()
        finally:
            if self._unanswered_push is not None:
                self._unanswered_push.cancel()
            self._set_link_state(LinkState.STOPPED, "")

    # ------------------------------------------------------------------ connecting

    async def _serve_descriptor(self, descriptor: int) -> None:
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError as error:
            raise ConfigError(
                "environment",
                [f"NRI_PLUGIN_SOCKET: descriptor {descriptor} is not a socket ({error.strerror})"],
            ) from error
        await self._serve_connection(sock)

    async def _dial_repeatedly(self) -> None:
        loop = asyncio.get_running_loop()
        delays = self._settings.delays()
        while True:
            old_socket = _socket_identity(self._settings.socket_path)
            ending = await self._serve_connection(None)
            active_since, self._active_since = self._active_since, None
            self._set_link_state(LinkState.DISCONNECTED, ending.detail)
            if active_since is not None and loop.time() - active_since >= STABLE_LINK_S:
                # At once: the runtime listens, and starts containers without the plugin.
                delays = self._settings.delays()
                continue
            delay = next(delays)
            if self._is_runtime_listening:
                # The runtime is up, and containers that start before the link is back are unpinned.
                delay = min(delay, MAX_RETRY_WHILE_LISTENING_S)
            await self._wait_for_new_socket(delay, old_socket)

    async def _wait_for_new_socket(self, delay: float, old_socket: tuple[int, int] | None) -> None:
        """Wait until the delay is over or the runtime has created a new socket."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + delay
        while (remaining_s := deadline - loop.time()) > 0:
            await asyncio.sleep(min(remaining_s, SOCKET_POLL_INTERVAL_S))
            new_socket = _socket_identity(self._settings.socket_path)
            if new_socket is not None and new_socket != old_socket:
                return

    async def _serve_connection(self, sock: socket.socket | None) -> ConnectionEnding:
        """Serve one connection until it ends."""
        loop = asyncio.get_running_loop()
        session = PluginSession()
        connection = SessionTransport(session, self._on_event)
        path = self._settings.socket_path if sock is None else None
        try:
            await loop.create_unix_connection(lambda: connection, path, sock=sock)
        except OSError as error:
            self._is_runtime_listening = False
            self.watch.end_call(REGISTRATION_STEP)
            problem = f"{self._settings.socket_path}: {error.strerror or error}"
            return ConnectionEnding(detail=problem, error=error)
        self._is_runtime_listening = True
        self._session, self._connection = session, connection
        self._set_link_state(LinkState.REGISTERING, path or "inherited")
        self._registration_timer = loop.call_later(
            self._settings.registration_wait,
            connection.close_or_abort,
            f"no answer to the registration within {self._settings.registration_wait:g} s",
        )
        try:
            session.register_plugin(self._settings.name, self._settings.index)
            self.watch.start_call(REGISTRATION_STEP)
            connection.flush_session()
            ending = await connection.wait_closed()
            if ending.by_peer:
                self.watch.end_call(REGISTRATION_STEP)
        finally:
            self._cancel_registration_timer()
            self._session = self._connection = None
            for future in self._updates.values():
                future.cancel()
            self._updates.clear()
            await connection.close_and_wait("stopped")
        if isinstance(ending.error, RemoteProtocolError):
            self._handler.on_protocol_broken()
        if isinstance(ending.error, BrokenPipeError):
            detail = (
                "the runtime closed the connection before the answer, as it does if a plugin "
                "takes longer than plugin_request_timeout, "
                f"{self._runtime_answer_timeout_s:g} s ({ending.error.strerror})"
            )
            ending = replace(ending, detail=detail)
        if self._rejection is not None:
            raise self._rejection
        return ending

    @property
    def _runtime_answer_timeout_s(self) -> float:
        """Seconds that the runtime waits for an answer of the plugin."""
        reported_s = self.runtime.request_timeout if self.runtime is not None else 0.0
        return reported_s or DEFAULT_REQUEST_TIMEOUT_S

    def _cancel_registration_timer(self) -> None:
        if self._registration_timer is not None:
            self._registration_timer.cancel()
            self._registration_timer = None

    # ------------------------------------------------------------------ answering

    def _on_event(self, event: ev.PluginSessionEvent) -> None:
        """Answer one event of the session; called by the transport."""
        match event:
            case ev.SynchronizeRequested():
                self._answer_synchronize(event)
            case ev.ConfigureRequested():
                self._answer_configure(event)
            case ev.ShutdownRequested(stream):  # followed by the end of the socket
                self._answer_request(stream, "Shutdown", lambda: None)
            case ev.UpdateContainersAnswered():
                future = self._updates.pop(event.stream, None)
                if future is not None and not future.done():
                    future.set_result(event)
            case ev.RegistrationAnswered(status):
                # An invalid index or name is permanent; any other error may go away.
                if status is not None and "invalid" in status.message:  # read: containerd's text
                    identity = f"{self._settings.index}-{self._settings.name}"
                    self._rejection = PermanentlyRejected(
                        f"the runtime refuses plugin {identity}: {status}"
                    )
                if status is not None:
                    self._close_connection(f"registration refused: {status}")
            case ev.EventRequested(stream, kind, message):
                if kind is Event.STOP_POD_SANDBOX:
                    self._stop_times[message.pod.id] = time.monotonic()
                elif kind is Event.REMOVE_POD_SANDBOX:
                    self._stop_times.pop(message.pod.id, None)
                about = getattr(message, "container", None)
                begin_request(
                    kind.method_name, about.id if about else "", event.traceparent, time.time()
                )
                self._answer_request(
                    stream, event.method, lambda: conversion.answer_request(self._handler, event)
                )

    def _answer_request(
        self,
        stream: int,
        name: str,
        handle: Callable[[], Message | None],
        default: Message | None = None,
    ) -> RequestRejected | None:
        """Run a handler and write its answer, even after an exception; returns its rejection.

        The answer is ``default`` if the handler returns none, or after an error.
        """
        session = self._session
        if session is None or self._connection is None:
            return None  # the link closed the connection before this event of the same packet
        start_time = self._last_request_at = time.perf_counter()
        rejection: RequestRejected | None = None
        response = default
        try:
            response = handle() or default
        except RequestRejected as refused:
            rejection = refused
        except Exception as error:
            rejection = self._internal_error_answer(name, error)
        if rejection is not None:
            session.reply_error(stream, rejection.message)
        else:
            try:
                session.reply(stream, response)
            except LocalProtocolError as error:  # over 4 MiB
                logger.error("answer dropped", event=name, problem=str(error))
                session.reply(stream)
        self._connection.flush_session()
        try:
            self._handler.on_request_answered(name, time.perf_counter() - start_time)
        except Exception:
            logger.exception("answer callback failed", event=name)
        return rejection

    def _internal_error_answer(self, name: str, error: Exception) -> RequestRejected | None:
        """Let the handler decide how to answer after an exception; None if that fails too."""
        try:
            self._handler.on_internal_error(name, error)
        except RequestRejected as refused:
            return refused
        except Exception:
            logger.exception("error callback failed", event=name)
        return None

    def _answer_configure(self, event: ev.ConfigureRequested) -> None:
        self._cancel_registration_timer()
        self.runtime = info = event.info
        # The mask must be right even if the handler fails: zero would mean all events.
        supported_events = ALL_EVENTS if profile_of(info).has_pod_update_event else AGENT_EVENTS
        rejection = self._answer_request(
            event.stream,
            "Configure",
            lambda: self._handler.on_runtime_configured(info),
            pb.ConfigureResponse(events=self._settings.events & supported_events),
        )
        if rejection is not None:
            self._rejection = PermanentlyRejected(f"configuration refused: {rejection.message}")
            self._close_connection(f"configuration refused: {rejection.message}")
            return
        runtime_text = f"{info.name} {info.version} (NRI {info.nri_version or 'before 0.12'})"
        if self._settings.descriptor is not None and not profile_of(info).synchronizes_launched:
            self.watch.end_call(REGISTRATION_STEP)  # no Synchronize will come
            self._set_link_state(
                LinkState.ACTIVE,
                f"{runtime_text}, which does not report running containers to launched plugins",
            )
        else:
            self._set_link_state(LinkState.CONFIGURED, runtime_text)

    def _answer_synchronize(self, event: ev.SynchronizeRequested) -> None:
        self.watch.end_call(REGISTRATION_STEP)
        self._stop_times.clear()
        start_time = time.perf_counter()
        begin_request(event.method, "", event.traceparent, time.time())
        rejection = self._answer_request(
            event.stream, event.method, lambda: conversion.answer_request(self._handler, event)
        )
        if rejection is not None:
            # Runtimes before NRI 0.7 would keep this connection open without using it.
            self._close_connection(f"synchronisation refused: {rejection.message}")
            return
        seconds = time.perf_counter() - start_time
        if seconds > self._runtime_answer_timeout_s:
            # The runtime has given up; before NRI 0.7 it does not close the connection.
            self._close_connection(
                f"synchronisation took {seconds:.1f} s, the runtime waits "
                f"{self._runtime_answer_timeout_s:g} s"
            )
            return
        self._active_since = asyncio.get_running_loop().time()
        pods, containers = len(event.pods), len(event.containers)
        counts = f"{count_text(pods, 'pod')} and {count_text(containers, 'container')}"
        self._set_link_state(LinkState.ACTIVE, f"{counts} at the registration")

    def _close_connection(self, detail: str) -> None:
        if self._connection is not None:
            self._connection.close_or_abort(detail)

    # ------------------------------------------------------------------ pushing

    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> str:
        """Send updates that answer no request, by the safe path, one push at a time."""
        if not updates:
            return ""
        loop = asyncio.get_running_loop()
        async with self._push_lock:
            await asyncio.sleep(self._last_push_at + self._settings.push_interval - loop.time())
            # Checked after every wait: the link may be lost, or the runtime another one.
            detail = self._push_obstacle()
            if not detail and self._push_path is PushPath.ONE_SHOT:
                detail = await self._wait_for_idle_runtime() or self._push_obstacle()
            if detail:
                return detail
            try:
                if self._push_path is PushPath.UPDATE_CONTAINERS:
                    detail = await self._push_by_update_call(updates)
                else:
                    detail = await self._register_again("push", lambda pods, containers: updates)
            finally:
                self._last_push_at = loop.time()
        return detail

    @property
    def _push_path(self) -> PushPath:
        return profile_of(self.runtime).push if self.runtime is not None else PushPath.NONE

    def _push_obstacle(self) -> str:
        """Return the reason why nothing can be pushed now; empty if updates can be pushed."""
        if self.state is not LinkState.ACTIVE:
            return f"the link is {self.state.value}"
        if self._push_path is PushPath.NONE:
            return "no way to push is safe on this runtime (NRI before 0.6.1)"
        return ""

    async def ensure_containers_reported(self) -> str:
        """Synchronize through a second registration, for launched plugins before NRI 0.7.

        Such a runtime does not report running containers to the plugins that it launched, and sends
        no stop for containers older than itself. Returns the reason of a failure; empty if the
        handler was called.
        """
        async with self._push_lock:
            detail = await self._wait_for_idle_runtime()
            return detail or await self._register_again("look", self._handler.synchronize)

    async def _wait_for_idle_runtime(self) -> str:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + QUIET_WAIT_TIMEOUT_S
        while not self._is_runtime_idle():
            if loop.time() >= deadline:
                return f"pods are started or removed all the time ({QUIET_WAIT_TIMEOUT_S:g} s)"
            await asyncio.sleep(QUIET_CHECK_INTERVAL_S)
        return ""

    def _is_runtime_idle(self) -> bool:
        """True if the runtime is idle, as far as its requests show.

        A sandbox that is removed by force is removed right after its stop.
        """
        if time.perf_counter() - self._last_request_at < self._settings.quiet_seconds:
            return False
        oldest = time.monotonic() - MAX_SANDBOX_REMOVAL_S
        self._stop_times = {pod: stop for pod, stop in self._stop_times.items() if stop > oldest}
        return not self._stop_times

    async def _register_again(self, purpose: str, plan: Planner) -> str:
        """Register once more; return the reason of a failure, empty if the answer was accepted."""
        if self._unanswered_push is not None:
            if not self._unanswered_push.done():
                return "an earlier registration has no answer yet"
            self._unanswered_push = None
        overdue = False

        def plan_in_time(
            pods: PodTable, containers: Sequence[Container]
        ) -> Sequence[ContainerUpdate]:
            # Updates of a minute ago must not be written now.
            return () if overdue else plan(pods, containers)

        settings = self._settings
        task = asyncio.create_task(
            push_one_shot(
                plan_in_time,
                socket_path=settings.socket_path,
                name=f"{settings.name}-{purpose}",
                index=settings.index,
                mentions=self._handler.reads_mentions,
            )
        )
        self.watch.start_call(PUSH_REGISTRATION_STEP)
        task.add_done_callback(lambda _: self.watch.end_call(PUSH_REGISTRATION_STEP))
        try:
            done_tasks, _ = await asyncio.wait({task}, timeout=settings.push_timeout)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done_tasks:
            return task.result()
        # The task goes on: an answer, however late, distinguishes a slow runtime from one that
        # hangs.
        overdue, self._unanswered_push = True, task
        limit = f"{settings.push_timeout:g} s"
        return f"the runtime did not synchronise the second registration within {limit}"

    async def _push_by_update_call(self, updates: Sequence[ContainerUpdate]) -> str:
        """Call UpdateContainers; return the reason of a failure."""
        session, connection = self._session, self._connection
        if session is None or connection is None:
            return "the link broke"
        request = pb.UpdateContainersRequest(update=conversion.update_messages(updates))
        stream = session.update_containers(request, timeout=self._settings.push_timeout)
        answer = asyncio.get_running_loop().create_future()
        self._updates[stream] = answer
        connection.flush_session()
        try:
            done_futures, _ = await asyncio.wait({answer}, timeout=self._settings.push_timeout)
        finally:
            self._updates.pop(stream, None)
            session.abandon_call(stream)
        if not done_futures:
            return f"no answer within {self._settings.push_timeout:g} s"
        if answer.cancelled():
            return "the link broke before the answer came"
        event: ev.UpdateContainersAnswered = answer.result()
        return "" if event.status is None else str(event.status)


def _socket_identity(path: str) -> tuple[int, int] | None:
    """Return inode and time of a socket file, which no successor shares; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
