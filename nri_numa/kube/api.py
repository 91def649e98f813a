"""The client of the API server: single requests, lists in pages, and watches.

A client library builds requests for every kind and every way to sign in, and reads HTTP in Python:
milliseconds of CPU for a binding, and as much for the events of its watch. Each of these is a path
and a document, so they go through aiohttp, whose parser is compiled. Token and ca.crt are files
that the kubelet renews (docs/adr/0059-sums-first.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from nri_numa import __version__
from nri_numa.kube.requests import (
    ACCEPT_METADATA,
    ACCEPT_METADATA_LIST,
    ACCEPT_WHOLE_OBJECT,
    REQUEST_STEP_TIMEOUT_S,
    WATCH_DURATION_S,
    WATCH_OPENED,
    ContentType,
    KubeClient,
    KubeError,
    list_of_mappings,
    section_of,
    text_in_section,
)
from nri_numa.observe.logs import get_logger

MAX_API_SERVER_CONNECTIONS: Final = 32
"""Bindings at a time; more are queued, because a handshake costs both sides more."""
IDLE_CONNECTION_KEPT_S: Final = 45.0
"""Seconds that an idle connection is kept; the API server keeps it for 90 (IdleTimeout)."""
WATCH_COALESCE_S: Final = 0.02
"""Seconds between two reads of a watch: the events in between are read at once."""
_WATCH_TIMEOUT_MARGIN_S: Final = 60.0
"""Seconds after the end of a watch without an answer: the connection is dead."""
PIECE_BYTES: Final = 1 << 15
"""Bytes of a watch that are read at once, ten to thirty events: other tasks run in between. A full
piece is followed by the next without a pause. aiohttp buffers at most 0.5 MiB.
"""
_CA_CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two checks of ca.crt for changes."""
_CLOSE_LOOP_TURNS: Final = 100
"""Turns of the event loop for sockets to close after the peer has; they need three."""
_MAX_BACKOFF_S: Final = 30.0


class _StatusCause(msgspec.Struct):
    reason: str = ""


class _StatusDetails(msgspec.Struct):
    causes: list[_StatusCause] | None = None


class _ErrorStatus(msgspec.Struct):
    message: str = ""
    code: int = 0
    details: _StatusDetails | None = None


class _WatchEvent(msgspec.Struct):
    """A line of a watch (k8s.io/apimachinery, ``metav1.WatchEvent``)."""

    type: str
    object: dict[str, Any]


class KubeAPI(KubeClient):
    """Client of the API server for one service.

    Args:
        credentials: directory with ``token`` and ``ca.crt``, as in a pod.
        service: name in the audit log, and field manager of written objects.
    """

    def __init__(self, credentials: str, service: str) -> None:
        self._directory, self._service = Path(credentials), service
        self._session: aiohttp.ClientSession | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._server = self._bearer = ""
        self._written, self._authority = (0, 0), b""
        self._checked = float("-inf")
        self._ahead = 0.0

    def server_time(self) -> float:
        """Return the server's time in seconds since the epoch, at most a second off."""
        return time.time() - self._ahead

    async def request_json(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        form: str = ContentType.FULL_OBJECT,
        accept: str = ACCEPT_WHOLE_OBJECT,
        seconds: float = REQUEST_STEP_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send one authenticated request over HTTPS, and decode its answer."""
        body = None
        if document is not None:
            body = msgspec.json.encode(document)
            path += f"{'&' if '?' in path else '?'}fieldManager={self._service}"
        headers = {"Content-Type": form, "Accept": accept}
        async with self._send_request(method, path, body, headers, seconds) as answer:
            data = await answer.read()
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubeError(f"cannot read the answer: {error}", answer.status) from None

    async def refresh_credentials(self) -> None:
        """Read token and ca.crt if the last check is a second old."""
        with self._translate_errors():
            await self._open_session()

    async def watch_events(
        self,
        path: str,
        parameters: Mapping[str, str],
        seconds: int = WATCH_DURATION_S,
        *,
        accept: str = ACCEPT_WHOLE_OBJECT,
    ) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Yield the events of a watch, a piece of its answer at a time."""
        query = {**parameters, "watch": "true", "timeoutSeconds": str(seconds)}
        url, silence = f"{path}?{urlencode(query)}", seconds + _WATCH_TIMEOUT_MARGIN_S
        async with self._send_request("GET", url, None, {"Accept": accept}, silence) as answer:
            yield WATCH_OPENED, {}
            remainder = b""
            while True:
                chunk = await answer.content.read(PIECE_BYTES)
                lines = (remainder + chunk).split(b"\n")
                # An empty chunk is the end, and the last line may lack a line feed.
                remainder = lines.pop() if chunk else b""
                for line in lines:
                    if line:
                        yield _decode_watch_event(line)
                if not chunk:
                    return
                await asyncio.sleep(WATCH_COALESCE_S if len(chunk) < PIECE_BYTES else 0)

    @contextlib.asynccontextmanager
    async def _send_request(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        silence: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one authenticated request; retry once with a new token if it is unauthorized."""
        with self._translate_errors():
            for is_retry in (False, True):
                session = await self._open_session()
                answer = await session.request(
                    method,
                    self._server + url,
                    data=body,
                    headers={"Authorization": self._bearer, **headers},
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=REQUEST_STEP_TIMEOUT_S, sock_read=silence
                    ),
                    allow_redirects=False,
                )
                async with answer:
                    self._compare_clocks(answer)
                    if 200 <= answer.status < 300:
                        yield answer
                        return
                    data = await answer.read()
                    if answer.status != HTTPStatus.UNAUTHORIZED or is_retry:
                        retry_after = answer.headers.get("Retry-After", "")
                        raise error_from_response(answer.status, data, retry_after)
                self._bearer = self._read_token()

    async def _open_session(self) -> aiohttp.ClientSession:
        """Return the session, a new one after a change of ca.crt.

        The kubelet rewrites all files with each token; requests in progress continue.
        """
        now_s = asyncio.get_running_loop().time()
        if self._session is not None and now_s - self._checked <= _CA_CHECK_INTERVAL_S:
            return self._session
        file = self._directory / "ca.crt"
        status = os.stat(file)
        written = status.st_mtime_ns, status.st_ino
        self._checked = now_s
        if self._session is not None and written == self._written:
            return self._session
        authority, self._bearer = file.read_bytes(), self._read_token()
        self._written = written
        if self._session is not None and authority == self._authority:
            return self._session
        await self.close()
        if self._session is not None:
            return self._session  # opened by a concurrent request
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise FileNotFoundError("KUBERNETES_SERVICE_HOST is not set; in a pod it is")
        host = f"[{host}]" if ":" in host else host
        self._server = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        self._authority = authority
        try:
            context = ssl.create_default_context(cafile=str(file))
        except ssl.SSLError as error:
            raise KubeError(f"{file} holds no certificate: {error.reason or error}") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context,
                limit=MAX_API_SERVER_CONNECTIONS,
                keepalive_timeout=IDLE_CONNECTION_KEPT_S,
                socket_factory=self._create_tracked_socket,
            ),
            headers={
                "User-Agent": f"{self._service}/{__version__}",
                "Accept": ACCEPT_WHOLE_OBJECT,
                "Accept-Encoding": "identity",
            },
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    def _compare_clocks(self, answer: aiohttp.ClientResponse) -> None:
        with contextlib.suppress(ValueError):
            server = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
            self._ahead = time.time() - server

    def _read_token(self) -> str:
        return f"Bearer {(self._directory / 'token').read_text('utf-8').strip()}"

    async def close(self) -> None:
        """Close the connections; the next request reads the credentials again."""
        session, self._session = self._session, None
        sockets, self._sockets = self._sockets, weakref.WeakSet()
        if session is None:
            return
        await session.close()
        # A cancelled request leaves a connection that waits for the peer to close, and that no
        # session knows.
        open_sockets = [s for s in sockets if s.fileno() >= 0]
        for s in open_sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for _ in range(_CLOSE_LOOP_TURNS):
            if all(s.fileno() < 0 for s in open_sockets):
                return
            await asyncio.sleep(0)

    def _create_tracked_socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Create a connection's socket, tracked by a weak reference."""
        family, kind, protocol, *_ = address
        created_socket = socket.socket(family, kind, protocol)
        self._sockets.add(created_socket)
        return created_socket

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors into one sentence that names what to check."""
        try:
            yield
        except KubeError:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            self._checked = float("-inf")  # the next request checks ca.crt at once
            cause = error.certificate_error
            reason = getattr(cause, "verify_message", "") or cause
            file = self._directory / "ca.crt"
            raise KubeError(
                f"the API server's certificate is not accepted: {reason}; {file} is of another "
                "cluster, or the clocks differ"
            ) from error
        except FileNotFoundError as error:
            raise KubeError(
                f"no credentials: {error}; expected token and ca.crt in {self._directory}"
            ) from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            text = str(error) or type(error).__name__
            raise KubeError(f"no answer from the API server: {text}") from error


def read_pod_namespace(credentials: str) -> str:
    """Read the namespace of a pod's credentials; ``default`` without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(credentials, "namespace").read_text("ascii").strip() or "default"
    return "default"


def error_from_response(code: int, body: bytes, retry_after: str = "") -> KubeError:
    """Build the error from an answer of the server."""
    try:
        status = msgspec.json.decode(body, type=_ErrorStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        status = _ErrorStatus(body[:200].decode("utf-8", "replace"))
    causes = frozenset(c.reason for c in (status.details and status.details.causes) or ())
    # API servers send seconds, never a date; the digits are limited for `int`.
    sound = retry_after.isascii() and retry_after.isdigit()
    seconds = float(min(int(retry_after[:12]), 3600)) if sound else 0.0
    return KubeError(status.message or f"status {code}", status.code or code, causes, seconds)


def _decode_watch_event(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        event = msgspec.json.decode(line, type=_WatchEvent)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubeError(f"cannot read an event of a watch: {error}") from None
    if event.type == "ERROR":
        raise error_from_response(0, msgspec.json.encode(event.object))
    return event.type, event.object


class WatchHandler:
    """Objects of one kind, kept up to date by a `Watch`."""

    def on_update(self, document: Mapping[str, Any]) -> None:
        """Handle a new or changed object."""

    def on_every_deleted_key(self, key: str) -> None:
        """Handle the key of a deleted object."""

    def on_delete(self, document: Mapping[str, Any]) -> None:
        """Handle a deleted object whose last state is known."""

    def on_list(self, keys: frozenset[str]) -> None:
        """Handle the keys of a complete list."""


class Watch:
    """Lists a kind and follows its changes: in pages, resumed, and listed again after 410 Gone.

    Objects are identified by `key`, their name by default. A list resumes at the page that failed.
    With `metadata` nothing else is read: a Node has fifty images. `aged` is called at each change
    with the seconds since its write.

    Attributes:
        synced: set after a complete list.
        problem: sentence saying why nothing can be read now; empty without a problem.
        seen: time of the server's last event; it sends one each minute without changes.
        failing: time since which changes may be missed; None if none are.
    """

    def __init__(
        self,
        api: KubeClient,
        path: str,
        watched: WatchHandler,
        *,
        fields: str = "",
        metadata: bool = False,
        key: Callable[[Mapping[str, Any]], str] | None = None,
        aged: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._path, self._watched, self._jitter = api, path, watched, jitter
        self._aged, self._clock = aged, clock
        self._key = key or name_of
        self._what = path.rpartition("/")[2]
        self._parameters = {"fieldSelector": fields} if fields else {}
        self._accept = ACCEPT_METADATA if metadata else ACCEPT_WHOLE_OBJECT
        self._accept_list = ACCEPT_METADATA_LIST if metadata else ACCEPT_WHOLE_OBJECT
        self._log = get_logger("kube")
        self._keys: set[str] = set()
        self._token, self._found = "", set[str]()
        self.synced = asyncio.Event()
        self.problem = ""
        self.seen = clock()
        self.failing: float | None = None

    async def run(self) -> None:
        """Watch until cancelled, starting with a new list."""
        version, failures, gone_count = "", 0, 0
        self._token, self._found = "", set()
        while True:
            min_pause_s = 0.0
            try:
                if not version:
                    version = await self._list_objects()
                query = {
                    **self._parameters, "resourceVersion": version, "allowWatchBookmarks": "true",
                }  # fmt: skip
                followed = self._api.watch_events(self._path, query, accept=self._accept)
                async with aclosing(followed) as events:
                    async for event, document in events:
                        self._mark_healthy()
                        if event == WATCH_OPENED:
                            continue
                        failures = gone_count = 0
                        version = document["metadata"].get("resourceVersion", version)
                        if event != "BOOKMARK":
                            self._apply_event(event, document)
            except KubeError as error:
                min_pause_s = error.retry_after
                gone_count = gone_count + 1 if error.code == HTTPStatus.GONE else 0
                is_listed_again = error.code in (HTTPStatus.GONE, HTTPStatus.NOT_FOUND)
                if is_listed_again:
                    version = ""
                if 0 < error.code < HTTPStatus.TOO_MANY_REQUESTS:
                    self._token, self._found = "", set()
                if error.code == HTTPStatus.NOT_FOUND:
                    self._delete_unlisted_keys(set())  # no object of this kind can exist
                if 0 < gone_count < 3:  # normal after a watch has ended
                    self._log.info("list repeated", object_kind=self._what)
                else:
                    code = f"{self._what}: {error.code}: " if error.code else ""
                    self._mark_failed(f"{code}{str(error)[:300]}", missed=not is_listed_again)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                version, self._token, self._found = "", "", set()
                self._mark_failed(f"{self._what}: cannot read the answer: {str(error)[:300]}")
            failures += 1
            pause = min(_MAX_BACKOFF_S, 0.25 * 2 ** min(failures, 8)) * (0.5 + self._jitter())
            await asyncio.sleep(max(min_pause_s * (1 + 0.1 * self._jitter()), pause))

    async def _list_objects(self) -> str:
        version = ""
        query = {**self._parameters, **({"continue": self._token} if self._token else {})}
        pages = self._api.list_pages(self._path, query, accept=self._accept_list)
        async for metadata, items in pages:
            version = str(metadata.get("resourceVersion") or version)
            for number, document in enumerate(items):
                key = self._key(document)
                self._found.add(key)
                self._keys.add(key)  # in case this list is not read to its end
                self._watched.on_update(document)
                if not number % 100:
                    await asyncio.sleep(0)  # other tasks may run
            self._token = str(metadata.get("continue") or "")
        keys, self._found = self._found, set()
        self._delete_unlisted_keys(keys)
        return version

    def _apply_event(self, event: str, document: dict[str, Any]) -> None:
        key = self._key(document)
        if event == "DELETED":
            self._keys.discard(key)
            self._watched.on_delete(document)
            self._watched.on_every_deleted_key(key)
        else:
            self._keys.add(key)
            self._watched.on_update(document)
            # A deleted object has the time of its last change, not of its deletion.
            if self._aged is not None and (written := written_at(document)) is not None:
                self._aged(max(0.0, self._api.server_time() - written))

    def _delete_unlisted_keys(self, keys: set[str]) -> None:
        for key in sorted(self._keys - keys):
            self._watched.on_every_deleted_key(key)
        self._keys, self.seen = keys, self._clock()
        self._watched.on_list(frozenset(keys))
        self.synced.set()

    def _mark_healthy(self) -> None:
        if self.problem:
            self._log.info("watch restored", object_kind=self._what)
        self.problem, self.seen, self.failing = "", self._clock(), None

    def _mark_failed(self, problem: str, *, missed: bool = True) -> None:
        if missed and self.failing is None:
            self.failing = self._clock()
        if problem != self.problem:
            self._log.warning("watch failed", object_kind=self._what, problem=problem)
        self.problem = problem


def name_of(document: Mapping[str, Any]) -> str:
    """Return the object's name."""
    return text_in_section(document, "metadata", "name")


def uid_of(document: Mapping[str, Any]) -> str:
    """Return the object's uid."""
    return text_in_section(document, "metadata", "uid")


def written_at(document: Mapping[str, Any]) -> float | None:
    """Return the time of an object's last change in seconds since the epoch; None if unknown.

    The time is that of its field managers, by the API server's clock; of a binding that of a
    condition.
    """
    managers = list_of_mappings(section_of(document, "metadata").get("managedFields"))
    conditions = list_of_mappings(section_of(document, "status").get("conditions"))
    times = [m.get("time") for m in managers] + [c.get("lastTransitionTime") for c in conditions]
    try:
        return datetime.fromisoformat(max(t for t in times if isinstance(t, str))).timestamp()
    except ValueError:
        return None
