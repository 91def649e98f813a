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
    mapping_or_empty,
    text_in_section,
)
from nri_numa.observe.logs import get_logger

MAX_API_SERVER_CONNECTIONS: Final = 32
"""Bindings at a time; more wait for their turn, because a handshake costs both sides more."""
IDLE_CONNECTION_KEPT_S: Final = 45.0
"""Seconds that an idle connection is kept; the API server keeps it for 90 (IdleTimeout)."""
WATCH_COALESCE_S: Final = 0.02
"""Seconds between two reads of a watch: what comes meanwhile is read at once."""
_WATCH_TIMEOUT_MARGIN_S: Final = 60.0
"""Seconds after the end of a watch without an answer: the connection is dead."""
PIECE_BYTES: Final = 1 << 15
"""Bytes of a watch that are read at once, ten to thirty events: questions are answered in between.
Where so many waited there is no pause. Half a MiB waits in aiohttp, and no more.
"""
_CA_CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two checks whether ca.crt is another file."""
_CLOSE_LOOP_TURNS: Final = 100
"""Turns of the event loop that sockets have to close in after the other side's last word; they
need three."""
_MAX_BACKOFF_S: Final = 30.0
_UNAUTHORIZED_STATUS, _NOT_FOUND_STATUS, _GONE_STATUS, _TOO_MANY_REQUESTS_STATUS = (
    401,
    404,
    410,
    429,
)
_BOOKMARK_EVENT: Final = "BOOKMARK"


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
    """Asks the API server as one of our services.

    Args:
        credentials: directory with ``token`` and ``ca.crt``, as a pod has it.
        service: names us in its audit log, and in the objects that we write.
    """

    def __init__(
        self,
        credentials: str,
        service: str,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._service, self._wall = Path(credentials), service, wall
        self._session: aiohttp.ClientSession | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._server = self._bearer = ""
        self._written, self._authority = (0, 0), b""
        self._checked = float("-inf")
        self._ahead = 0.0

    def server_time(self) -> float:
        """Seconds since the epoch by the server's clock, a second off at most."""
        return self._wall() - self._ahead

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
        """Do one request, signed, over HTTPS."""
        body = None
        if document is not None:
            body = msgspec.json.encode(document)
            path += f"{'&' if '?' in path else '?'}fieldManager={self._service}"
        headers = {"Content-Type": form, "Accept": accept}
        async with self._send_request(method, path, body, headers, seconds) as answer:
            data = await answer.read()
            try:
                found = msgspec.json.decode(data, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise KubeError(f"cannot read the answer: {error}", answer.status) from None
        return found

    async def refresh_credentials(self) -> None:
        """Read token and ca.crt where the last look at them is a second old."""
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
        """Follow a watch, a piece of its answer at a time."""
        asked = {**parameters, "watch": "true", "timeoutSeconds": str(seconds)}
        url, silence = f"{path}?{urlencode(asked)}", seconds + _WATCH_TIMEOUT_MARGIN_S
        headers = {"Accept": accept}
        async with self._send_request("GET", url, None, headers, silence) as answer:
            yield WATCH_OPENED, {}
            rest = b""
            while True:
                chunk = await answer.content.read(PIECE_BYTES)
                lines = (rest + chunk).split(b"\n")
                # Without a chunk it is the end, and a last line may lack its own.
                rest = lines.pop() if chunk else b""
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
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        silence: float = REQUEST_STEP_TIMEOUT_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, signed; once more with the token read anew where it was denied."""
        with self._translate_errors():
            for last in (False, True):
                session = await self._open_session()
                answer = await session.request(
                    method,
                    self._server + url,
                    data=body,
                    headers={"Authorization": self._bearer, **(headers or {})},
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
                    found = await answer.read()
                    if answer.status != _UNAUTHORIZED_STATUS or last:
                        raise error_from_response(
                            answer.status, found, answer.headers.get("Retry-After", "")
                        )
                self._bearer = self._read_token()

    async def _open_session(self) -> aiohttp.ClientSession:
        """The session; another one after ca.crt changed.

        The kubelet writes all files anew with each token, and what is under way goes on.
        """
        now = asyncio.get_running_loop().time()
        if self._session is not None and now - self._checked <= _CA_CHECK_INTERVAL_S:
            return self._session
        file = self._directory / "ca.crt"
        status = os.stat(file)
        written = status.st_mtime_ns, status.st_ino
        self._checked = now
        if self._session is not None and written == self._written:
            return self._session
        authority, self._bearer = file.read_bytes(), self._read_token()
        self._written = written
        if self._session is not None and authority == self._authority:
            return self._session
        await self.close()
        if self._session is not None:
            return self._session  # another request was quicker
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
            self._ahead = self._wall() - server

    def _read_token(self) -> str:
        return f"Bearer {(self._directory / 'token').read_text('utf-8').strip()}"

    async def close(self) -> None:
        """End the connections; the next request reads everything again."""
        session, self._session = self._session, None
        sockets, self._sockets = self._sockets, weakref.WeakSet()
        if session is None:
            return
        await session.close()
        # A request that was cancelled leaves a connection that waits for the other side's farewell,
        # and no session knows it any more.
        open_ones = [one for one in sockets if one.fileno() >= 0]
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for _ in range(_CLOSE_LOOP_TURNS):
            if all(one.fileno() < 0 for one in open_ones):
                return
            await asyncio.sleep(0)

    def _create_tracked_socket(self, address: tuple[Any, ...]) -> socket.socket:
        """One of a connection, remembered as long as it lives."""
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Whatever keeps an answer away, as one sentence that names what to look at."""
        try:
            yield
        except KubeError:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            self._checked = float("-inf")  # the next one looks at once for another ca.crt
            cause = error.certificate_error
            why = getattr(cause, "verify_message", "") or cause
            file = self._directory / "ca.crt"
            raise KubeError(
                f"the API server's certificate is not accepted: {why}; {file} is of another "
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
    """The namespace of a pod's credentials; ``default`` where they do not say."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(credentials, "namespace").read_text("ascii").strip() or "default"
    return "default"


def error_from_response(code: int, body: bytes, retry_after: str = "") -> KubeError:
    """What the server says instead of doing it."""
    try:
        found = msgspec.json.decode(body, type=_ErrorStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = _ErrorStatus(body[:200].decode("utf-8", "replace"))
    causes = frozenset(one.reason for one in (found.details and found.details.causes) or ())
    # Servers of Kubernetes send seconds, never a date; no more digits than `int` reads.
    sound = retry_after.isascii() and retry_after.isdigit()
    seconds = float(min(int(retry_after[:12]), 3600)) if sound else 0.0
    return KubeError(found.message or f"status {code}", found.code or code, causes, seconds)


def _decode_watch_event(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(line, type=_WatchEvent)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubeError(f"cannot read an event of a watch: {error}") from None
    if found.type == "ERROR":
        raise error_from_response(0, msgspec.json.encode(found.object))
    return found.type, found.object


# --- all objects of a kind, followed --------------------------------------------------------------


class WatchHandler:
    """Objects of one kind, kept up to date by a `Watch`."""

    def on_update(self, document: Mapping[str, Any]) -> None:
        """An object exists, new or changed."""

    def on_every_deleted_key(self, key: str) -> None:
        """An object does not exist any more."""

    def on_delete(self, document: Mapping[str, Any]) -> None:
        """The same, where its last state is known."""

    def on_list(self, keys: frozenset[str]) -> None:
        """These are all."""


class Watch:
    """Lists a kind and follows its changes: in pages, resumed, and listed again after 410 Gone.

    Lists name objects by `key`, their name by default. A list goes on at the page that failed.
    Where `metadata` is all that is needed nothing else comes: a Node has fifty images. `aged` is
    called at each change with the seconds since it was written.

    Attributes:
        synced: everything was read once.
        problem: why nothing can be read now, as a sentence; empty when it can.
        seen: when the server last said what there is; it does so each minute where nothing changes.
        failing: since when changes may be missed; None where none are.
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
        self._accept = (
            (ACCEPT_METADATA, ACCEPT_METADATA_LIST)
            if metadata
            else (ACCEPT_WHOLE_OBJECT, ACCEPT_WHOLE_OBJECT)
        )
        self._log = get_logger("kube")
        self._keys: set[str] = set()
        self._token, self._found = "", set[str]()
        self.synced = asyncio.Event()
        self.problem = ""
        self.seen = clock()
        self.failing: float | None = None

    async def run(self) -> None:
        """Follow until cancelled, from a list that begins now."""
        version, failures, gone = "", 0, 0
        self._token, self._found = "", set()
        while True:
            least = 0.0
            try:
                if not version:
                    version = await self._list_objects()
                asked = {
                    **self._parameters, "resourceVersion": version, "allowWatchBookmarks": "true",
                }  # fmt: skip
                followed = self._api.watch_events(self._path, asked, accept=self._accept[0])
                async with aclosing(followed) as events:
                    async for event, found in events:
                        self._mark_healthy()
                        if event == WATCH_OPENED:
                            continue
                        failures = gone = 0
                        version = found["metadata"].get("resourceVersion", version)
                        if event != _BOOKMARK_EVENT:
                            self._apply_event(event, found)
            except KubeError as error:
                least, gone = error.retry_after, gone + 1 if error.code == _GONE_STATUS else 0
                if error.code in (_GONE_STATUS, _NOT_FOUND_STATUS):
                    version = ""
                if 0 < error.code < _TOO_MANY_REQUESTS_STATUS:
                    self._token, self._found = "", set()
                if error.code == _NOT_FOUND_STATUS:
                    self._delete_unlisted_keys(set())  # nothing of this kind can exist
                if 0 < gone < 3:  # as it happens after a watch that ended
                    self._log.info("listing again", kind=self._what)
                else:
                    code = f"{self._what}: {error.code}: " if error.code else ""
                    missed = error.code not in (
                        _GONE_STATUS,
                        _NOT_FOUND_STATUS,
                    )  # for it is listed again
                    self._mark_failed(f"{code}{str(error)[:300]}", missed=missed)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                version, self._token, self._found = "", "", set()
                self._mark_failed(f"{self._what}: cannot read the answer: {str(error)[:300]}")
            failures += 1
            pause = min(_MAX_BACKOFF_S, 0.25 * 2 ** min(failures, 8)) * (0.5 + self._jitter())
            await asyncio.sleep(max(least * (1 + 0.1 * self._jitter()), pause))

    async def _list_objects(self) -> str:
        version = ""
        asked = {**self._parameters, **({"continue": self._token} if self._token else {})}
        pages = self._api.list_pages(self._path, asked, accept=self._accept[1])
        async for metadata, items in pages:
            version = str(metadata.get("resourceVersion") or version)
            for number, document in enumerate(items):
                key = self._key(document)
                self._found.add(key)
                self._keys.add(key)  # where this list is not read to its end
                self._watched.on_update(document)
                if not number % 100:
                    await asyncio.sleep(0)  # questions are answered meanwhile
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
            # What is gone shows when it was last changed, and not when it went.
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
            self._log.info("the API server answers again", kind=self._what)
        self.problem, self.seen, self.failing = "", self._clock(), None

    def _mark_failed(self, problem: str, *, missed: bool = True) -> None:
        if missed and self.failing is None:
            self.failing = self._clock()
        if problem != self.problem:
            self._log.warning("cannot follow", kind=self._what, problem=problem)
        self.problem = problem


def name_of(document: Mapping[str, Any]) -> str:
    """The object's name."""
    return text_in_section(document, "metadata", "name")


def uid_of(document: Mapping[str, Any]) -> str:
    """The object's uid."""
    return text_in_section(document, "metadata", "uid")


def written_at(document: Mapping[str, Any]) -> float | None:
    """When an object was last changed, in seconds since the epoch; None where it does not say.

    Its managers say so, by the API server's clock, but for a binding, which only a condition shows.
    """
    metadata, status = (
        mapping_or_empty(document.get("metadata")),
        mapping_or_empty(document.get("status")),
    )
    times = [
        time
        for section, key in (
            (metadata.get("managedFields"), "time"),
            (status.get("conditions"), "lastTransitionTime"),
        )
        for one in (section if isinstance(section, list) else ())
        if isinstance(time := mapping_or_empty(one).get(key), str)
    ]
    try:
        return datetime.fromisoformat(max(times)).timestamp()
    except ValueError:
        return None
