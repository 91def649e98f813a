"""The link to the container runtime over NRI: dial, register, answer, reconnect.

`NRILink` owns one connection at a time and one `PluginSession`. It speaks protobuf messages with
the handler it was given and knows nothing of placement. Handlers are plain functions: they run
inside `buffer_updated`, one after the other, and the answer is written before the next request is
parsed. The runtime waits two seconds for an answer and then carries on without it, so a handler
must be quick and an exception in one must still become an answer.

External mode dials a unix socket for ever, with growing pauses: a container in its grace period
holds up every registration on the node (containerd#14083), so reconnecting in a tight loop would
stop pods from starting. Pre-installed mode talks over a descriptor the runtime passed on and ends
with it; the runtime starts such plugins once and never again.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from google.protobuf.message import Message

from nri_numa.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from nri_numa.nri.answer_watch import AnswerWatch
from nri_numa.nri.handler import (
    LinkState,
    PluginHandler,
    RefusedForGood,
    RequestRefused,
)
from nri_numa.nri.preinstalled import Preinstalled, preinstalled_from_environment
from nri_numa.nri.pusher import Pusher
from nri_numa.nri.registration import PushResult
from nri_numa.nri.transport import Ending, SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import Answer, PluginSession, SessionLimits
from nri_numa.nri.wire.versions import (
    EVENTS_OF_0_2,
    PLUGIN_EVENTS,
    Event,
    PushPath,
    RuntimeInfo,
    event_mask,
    identity_problem,
    push_path,
    synchronizes_launched_plugins,
)
from nri_numa.observe.logs import get_logger

__all__ = [
    "DEFAULT_SOCKET",
    "LinkState",
    "NRILink",
    "PluginHandler",
    "Preinstalled",
    "PushResult",
    "RefusedForGood",
    "RequestRefused",
    "backoff_delays",
    "preinstalled_from_environment",
]

# Changes of the link and failed pushes are told to whoever runs the link, who logs them.
logger = get_logger("nri")

DEFAULT_SOCKET: Final = "/var/run/nri/nri.sock"
DEFAULT_REQUEST_TIMEOUT: Final = 2.0
"""Seconds a runtime waits for an answer when it does not tell (NRI before 0.7)."""

ACCEPTED_SECONDS: Final = 2.0
"""The longest pause while the runtime's socket accepts connections."""

REGISTRATION: Final = "registration"
"""The call that `AnswerWatch` knows as this."""

QUIET_SECONDS: Final = 0.3
"""Without a request for this long, nothing else is under way in the runtime."""

STABLE_SECONDS: Final = 10.0
"""A connection that was active this long starts the pauses from the beginning."""

MASK_REFUSED_SECONDS: Final = 1.0
"""A runtime that closes this soon after our event mask did so because of it."""

SOCKET_POLL_SECONDS: Final = 0.1
"""How often a pause looks whether the runtime made a new socket."""


def backoff_delays(
    rng: random.Random, *, first: float = 1.0, ceiling: float = 30.0, jitter: float = 0.1
) -> Iterator[float]:
    """Yield the pauses between attempts: 1, 2, 4, 8, 16, 30, 30 … seconds and a bit.

    Args:
        rng: source of the jitter, which keeps plugins of many nodes from moving in step.
        first: the first pause in seconds.
        ceiling: the longest pause before jitter.
        jitter: up to this share of a pause is added to it.
    """
    delay = first
    while True:
        yield delay * (1 + jitter * rng.random())
        delay = min(delay * 2, ceiling)


class NRILink:
    """A plugin's connection to its runtime, kept up for ever.

    Attributes:
        runtime: what the runtime said of itself at the last Configure; None before.
        watch: own calls that the runtime has not answered.
    """

    def __init__(
        self,
        handler: PluginHandler,
        *,
        name: str,
        index: str,
        socket_path: str = DEFAULT_SOCKET,
        descriptor: int | None = None,
        events: int = PLUGIN_EVENTS,
        rng: random.Random | None = None,
        delays: Callable[[], Iterator[float]] | None = None,
        registration_wait: float = 60.0,
        push_interval: float = 1.0,
        push_timeout: float = 10.0,
        limits: SessionLimits | None = None,
        protocol_broken: Callable[[], object] = lambda: None,
        quiet: Callable[[], bool] = lambda: True,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """Make a link; nothing happens before `run`.

        Args:
            handler: answers the requests.
            name: plugin name without index.
            index: two digits; plugins are asked in ascending order.
            socket_path: where the runtime listens; also used for one-shot pushes.
            descriptor: of a connected socket, for a plugin the runtime launched; None to dial.
            events: mask of wanted events, reduced to what the runtime knows.
            rng: for the jitter of the pauses.
            delays: makes the sequence of pauses; `backoff_delays` over `rng` if None.
            registration_wait: seconds for a registration. Long, because runtimes take connections
                one at a time and give every silent one five seconds.
            push_interval: least seconds between two pushes.
            push_timeout: seconds one push may take.
            limits: of a collected Synchronize.
            protocol_broken: called when a link was closed because the runtime broke the protocol.
            quiet: whether a second registration may be made now, as far as the handler knows.
            quiet_seconds: least seconds between the last request and a second registration.

        Raises:
            ConfigError: the name or the index is malformed.
        """
        if (problem := identity_problem(name, index)) is not None:
            raise ConfigError("plugin identity", [problem])
        self._handler = handler
        self._name = name
        self._index = index
        self._socket_path = socket_path
        self._descriptor = descriptor
        self._wanted = events
        jitter = rng if rng is not None else random.Random()  # noqa: S311 - no secret
        self._delays = delays if delays is not None else lambda: backoff_delays(jitter)
        self._registration_wait = registration_wait
        self._push_timeout = push_timeout
        self._limits = limits
        self._protocol_broken = protocol_broken

        self.runtime: RuntimeInfo | None = None
        self.watch = AnswerWatch(time.monotonic)
        self._quiet = quiet
        self._quiet_seconds = quiet_seconds
        self._last_request = float("-inf")
        self._state = LinkState.DISCONNECTED
        self._told: tuple[LinkState, str] | None = None
        self._session: PluginSession | None = None
        self._connection: SessionTransport[ev.PluginEvent] | None = None
        self._registration_timer: asyncio.TimerHandle | None = None
        self._fatal: RefusedForGood | None = None
        self._active_since: float | None = None
        self._accepted = False
        self._handling = False
        # The mask of this connection and when it was sent; 0 before and once it was accepted.
        self._mask = 0
        self._mask_sent = 0.0
        # A runtime that hung up right after our mask: it knows fewer events than its version
        # suggests, so it is asked only for the oldest from then on.
        self._distrusted: RuntimeInfo | None = None
        self._updates: dict[int, asyncio.Future[ev.UpdateContainersAnswered]] = {}
        self._pusher = Pusher(
            name=name,
            index=index,
            socket_path=socket_path,
            interval=push_interval,
            timeout=push_timeout,
            limits=limits,
            path=self._push_path,
            update_containers=self._update_containers,
            quiet=self._is_quiet,
            watch=self.watch,
        )

    @property
    def state(self) -> LinkState:
        """Where the link stands."""
        return self._state

    async def run(self) -> None:
        """Keep the link up until cancelled; in pre-installed mode until the runtime closes it.

        Raises:
            RefusedForGood: the runtime will never accept this plugin.
        """
        try:
            if self._descriptor is not None:
                await self._serve_descriptor(self._descriptor)
            else:
                await self._dial_for_ever()
        finally:
            self._pusher.close()
            self._change(LinkState.STOPPED, "")

    def push(self, updates: Sequence[pb.ContainerUpdate]) -> Coroutine[Any, Any, PushResult]:
        """Send updates that no request asked for; await the result. See `Pusher`.

        Args:
            updates: at most one for each container, applied in order, best effort.

        Raises:
            LocalProtocolError: called from inside a handler. The runtime holds, until the handler's
                answer, the very lock this needs.
        """
        if self._handling:
            raise LocalProtocolError("push() from inside a handler would block the runtime")
        return self._pusher.push(tuple(updates))

    def look(self) -> Coroutine[Any, Any, str]:
        """Synchronise through a second registration: for launched plugins before NRI 0.7.

        Such a runtime tells a plugin that it launched nothing of what runs already, and sends no
        stop for containers older than itself.

        Returns:
            Why it failed; empty when the handler was told.
        """
        return self._pusher.look(self._handler.synchronize)

    # ------------------------------------------------------------------ connecting

    async def _serve_descriptor(self, descriptor: int) -> None:
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError as error:
            raise ConfigError(
                "environment",
                [f"NRI_PLUGIN_SOCKET: descriptor {descriptor} is no socket ({error.strerror})"],
            ) from error
        await self._serve(sock)

    async def _dial_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        delays = self._delays()
        while True:
            before = _socket_identity(self._socket_path)
            ending = await self._serve(None)
            since, self._active_since = self._active_since, None
            self._change(LinkState.DISCONNECTED, ending.detail)
            if since is not None and loop.time() - since >= STABLE_SECONDS:
                # At once: a runtime that dropped us listens, and starts containers without us.
                delays = self._delays()
                continue
            delay = next(delays)
            if self._accepted:
                # It is there, and whatever starts before we are back starts unpinned.
                delay = min(delay, ACCEPTED_SECONDS)
            await self._pause(delay, before)

    async def _pause(self, delay: float, before: tuple[int, int] | None) -> None:
        """Wait, but not longer than until the runtime has made a new socket."""
        loop = asyncio.get_running_loop()
        end = loop.time() + delay
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, SOCKET_POLL_SECONDS))
            now = _socket_identity(self._socket_path)
            if now is not None and now != before:
                return

    async def _serve(self, sock: socket.socket | None) -> Ending:
        """Serve one connection until it ends."""
        loop = asyncio.get_running_loop()
        session = PluginSession(limits=self._limits)
        connection: SessionTransport[ev.PluginEvent] = SessionTransport(session, self._on_event)
        try:
            if sock is None:
                await loop.create_unix_connection(lambda: connection, self._socket_path)
            else:
                await loop.create_unix_connection(lambda: connection, sock=sock)
        except OSError as error:
            self._accepted = False
            self.watch.answered(REGISTRATION)
            return Ending(detail=f"{self._socket_path}: {error.strerror or error}", error=error)
        self._accepted = True
        self._session, self._connection = session, connection
        self._change(LinkState.REGISTERING, self._socket_path if sock is None else "inherited")
        self._registration_timer = loop.call_later(
            self._registration_wait,
            connection.close,
            f"no answer to the registration within {self._registration_wait:g} s",
        )
        try:
            session.register(self._name, self._index)
            self.watch.called(REGISTRATION)
            connection.flush()
            ending = await connection.wait_closed()
            if ending.by_peer:
                self.watch.answered(REGISTRATION)
        finally:
            self._cancel_registration_timer()
            self._session = self._connection = None
            for future in self._updates.values():
                future.cancel()
            self._updates.clear()
            await connection.aclose("stopped")
        if isinstance(ending.error, RemoteProtocolError):
            self._protocol_broken()
        if self._hung_up_on_mask(ending):
            self._distrusted = self.runtime
        if isinstance(ending.error, BrokenPipeError):
            ending = replace(ending, detail=self._too_late(ending.error))
        if self._fatal is not None:
            raise self._fatal
        return ending

    def _too_late(self, error: OSError) -> str:
        return (
            "the runtime had closed the connection before our answer, as it does with a plugin "
            f"that takes longer than plugin_request_timeout, {self._limit:g} s ({error.strerror})"
        )

    @property
    def _limit(self) -> float:
        """Seconds that the runtime waits for an answer."""
        told = self.runtime.request_timeout if self.runtime is not None else 0.0
        return told or DEFAULT_REQUEST_TIMEOUT

    def _cancel_registration_timer(self) -> None:
        if self._registration_timer is not None:
            self._registration_timer.cancel()
            self._registration_timer = None

    def _hung_up_on_mask(self, ending: Ending) -> bool:
        """Tell whether the runtime closed because it did not know an event we asked for."""
        return (
            self._mask & ~EVENTS_OF_0_2 != 0
            and (ending.error is None or isinstance(ending.error, OSError))  # closed or reset
            and asyncio.get_running_loop().time() - self._mask_sent < MASK_REFUSED_SECONDS
        )

    # ------------------------------------------------------------------ answering

    def _on_event(self, event: ev.PluginEvent) -> None:
        """Answer one event of the session; called by the transport."""
        handler = self._handler
        match event:
            case ev.CreateContainerRequested(stream, create):
                self._answer(stream, "CreateContainer", lambda: handler.create_container(create))
            case ev.UpdateContainerRequested(stream, update):
                self._answer(stream, "UpdateContainer", lambda: handler.update_container(update))
            case ev.StopContainerRequested(stream, stop):
                self._answer(stream, "StopContainer", lambda: handler.stop_container(stop))
            case ev.ContainerEvent(stream, kind, pod, container):
                self._answer(
                    stream, kind.method, lambda: self._container_event(kind, pod, container)
                )
            case ev.PodEvent(stream, kind, pod):
                self._answer(stream, kind.method, lambda: self._pod_event(kind, pod))
            case ev.SynchronizeRequested():
                self._synchronize(event)
            case ev.ConfigureRequested():
                self._configure(event)
            case ev.UpdatePodSandboxRequested(stream):  # never subscribed to: an empty answer
                self._answer(stream, Event.UPDATE_POD_SANDBOX.method, _nothing)
            case ev.ValidateRequested(stream):  # likewise; empty accepts
                self._answer(stream, Event.VALIDATE_CONTAINER_ADJUSTMENT.method, _nothing)
            case ev.ShutdownRequested(stream):  # followed by the end of the socket
                self._answer(stream, "Shutdown", _nothing)
            case ev.UpdateContainersAnswered():
                future = self._updates.pop(event.stream, None)
                if future is not None and not future.done():
                    future.set_result(event)
            case ev.RegistrationRefused(status):
                # Seen for a bad index or name, which repeats for ever; anything else may pass.
                if "invalid" in status.message:
                    self._fatal = RefusedForGood(
                        f"the runtime refuses plugin {self._index}-{self._name}: {status}"
                    )
                self._close(f"registration refused: {status}")
            case ev.Registered():
                pass

    def _answer(
        self, stream: int, name: str, handle: Callable[[], Answer | None]
    ) -> RequestRefused | None:
        """Run a handler and write its answer, whatever happens in it.

        Returns:
            The refusal, if the handler refused.
        """
        session = self._session
        if session is None or self._connection is None:
            return None  # closed by ourselves while events of the same packet were waiting
        started = self._last_request = time.perf_counter()
        refusal: RequestRefused | None = None
        response: Answer | None = None
        self._handling = True
        try:
            response = handle()
        except RequestRefused as refused:
            refusal = refused
        except Exception as error:
            response, refusal = self._after_error(name, error)
        finally:
            self._handling = False
        if refusal is not None:
            session.refuse(stream, refusal.message)
        else:
            try:
                session.reply(stream, response)
            except LocalProtocolError as error:  # over 4 MiB
                logger.error("answer dropped", event_name=name, error=str(error))
                session.reply(stream)
        self._connection.flush()
        try:
            self._handler.replied(name, time.perf_counter() - started)
        except Exception:
            logger.exception("replied hook failed", event_name=name)
        return refusal

    def _after_error(
        self, name: str, error: Exception
    ) -> tuple[Message | None, RequestRefused | None]:
        """Ask the handler what an unexpected exception means; an empty answer when that fails."""
        try:
            return self._handler.internal_error(name, error), None
        except RequestRefused as refused:
            return None, refused
        except Exception:
            logger.exception("internal_error hook failed", event_name=name)
            return None, None

    def _container_event(
        self, event: Event, pod: pb.PodSandbox, container: pb.Container
    ) -> Message | None:
        if event is Event.REMOVE_CONTAINER:
            self._handler.remove_container(pod, container)
        elif event is Event.START_CONTAINER:
            self._handler.start_container(pod, container)
        elif event is Event.POST_START_CONTAINER:
            self._handler.post_start_container(pod, container)
        return None

    def _pod_event(self, event: Event, pod: pb.PodSandbox) -> Message | None:
        if event is Event.RUN_POD_SANDBOX:
            self._handler.run_pod(pod)
        elif event is Event.STOP_POD_SANDBOX:
            self._handler.stop_pod(pod)
        elif event is Event.REMOVE_POD_SANDBOX:
            self._handler.remove_pod(pod)
        return None

    def _configure(self, event: ev.ConfigureRequested) -> None:
        self._cancel_registration_timer()
        info = event.info
        wanted = self._wanted & EVENTS_OF_0_2 if info == self._distrusted else self._wanted

        def configure() -> pb.ConfigureResponse:
            try:
                mask = event_mask(info, wanted)
            except ValueError as error:
                raise RequestRefused(str(error)) from error
            try:
                self._handler.configured(info)
            except RequestRefused:
                raise
            except Exception as error:
                # Whatever the hook says, the mask must be right: zero would mean everything.
                _, refusal = self._after_error("Configure", error)
                if refusal is not None:
                    raise refusal from error
            self._mask = mask
            return pb.ConfigureResponse(events=mask)

        self.runtime = info
        refusal = self._answer(event.stream, "Configure", configure)
        if refusal is not None:
            self._fatal = RefusedForGood(f"configuration refused: {refusal.message}")
            self._close(f"configuration refused: {refusal.message}")
            return
        self._mask_sent = asyncio.get_running_loop().time()
        described = f"{info.name} {info.version} (NRI {info.nri_version or 'before 0.12'})"
        if self._descriptor is not None and not synchronizes_launched_plugins(info):
            self._change(
                LinkState.ACTIVE,
                f"{described}, which does not tell launched plugins what runs already",
            )
        else:
            self._change(LinkState.CONFIGURED, described)

    def _synchronize(self, event: ev.SynchronizeRequested) -> None:
        self._mask = 0  # accepted
        self.watch.answered(REGISTRATION)
        started = time.perf_counter()

        def synchronize() -> pb.SynchronizeResponse:
            updates = self._handler.synchronize(event.pods, event.containers)
            response = pb.SynchronizeResponse(update=updates)
            for update in response.update:
                update.ignore_failure = True
            return response

        refusal = self._answer(event.stream, "Synchronize", synchronize)
        if refusal is not None:
            # Runtimes before NRI 0.7 would keep this connection open and never use it.
            self._close(f"synchronisation refused: {refusal.message}")
            return
        seconds = time.perf_counter() - started
        if seconds > self._limit:
            # The runtime has given up; before NRI 0.7 it does so without hanging up.
            self._close(
                f"synchronisation took {seconds:.1f} s, the runtime waits {self._limit:g} s"
            )
            return
        self._active_since = asyncio.get_running_loop().time()
        self._change(
            LinkState.ACTIVE, f"{len(event.pods)} pods, {len(event.containers)} containers"
        )

    def _close(self, detail: str) -> None:
        if self._connection is not None:
            self._connection.close(detail)

    def _change(self, state: LinkState, detail: str) -> None:
        if (state, detail) == self._told:
            return  # the same failure again: said once
        self._told = (state, detail)
        self._state = state
        try:
            self._handler.link_changed(state, detail)
        except Exception:
            logger.exception("link_changed hook failed")

    # ------------------------------------------------------------------ pushing

    def _push_path(self) -> tuple[PushPath, str]:
        """Return how to push now, and why not when that is impossible."""
        path = push_path(self.runtime) if self.runtime is not None else PushPath.NONE
        if self._state is not LinkState.ACTIVE:
            return path, f"the link is {self._state.value}"
        if path is PushPath.NONE:
            return path, "no way to push is safe on this runtime (NRI before 0.6.1)"
        return path, ""

    def _is_quiet(self) -> bool:
        """Whether nothing else is under way in the runtime, as far as requests tell."""
        return time.perf_counter() - self._last_request >= self._quiet_seconds and self._quiet()

    async def _update_containers(
        self, updates: Sequence[pb.ContainerUpdate]
    ) -> tuple[str, tuple[pb.ContainerUpdate, ...]]:
        session, connection = self._session, self._connection
        if session is None or connection is None:
            return "the link broke", ()
        stream = session.update_containers(updates, timeout=self._push_timeout)
        answer = asyncio.get_running_loop().create_future()
        self._updates[stream] = answer
        connection.flush()
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._push_timeout)
        finally:
            self._updates.pop(stream, None)
            session.forget(stream)
        if not done:
            return f"no answer within {self._push_timeout:g} s", ()
        if answer.cancelled():
            return "the link broke before the answer came", ()
        event: ev.UpdateContainersAnswered = answer.result()
        return ("" if event.status is None else str(event.status)), tuple(event.failed)


def _nothing() -> None:
    return None


def _socket_identity(path: str) -> tuple[int, int] | None:
    """Return what tells one socket file from its successor; None while there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
