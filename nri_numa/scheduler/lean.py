"""What happens for each pod, asked of the API server without a client library in between.

lightkube builds requests for every kind and every way to sign in, and reads HTTP in Python:
milliseconds of CPU for a binding, and as much for the events of its watch. Both are a path and a
document, so they go through aiohttp, whose parser is compiled. Lists and single objects stay
lightkube's, with the same credentials and the same trust (docs/adr/0059-sums-first.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import httpx2
import msgspec
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.models.meta_v1 import Status

from nri_numa.kube_client import TIMEOUT, Connection

CONNECTIONS: Final = 32
"""Bindings at a time; more wait for their turn, because a handshake costs both sides more."""
KEPT: Final = 45.0
"""Seconds that an idle connection is kept; the API server keeps it for 90 (IdleTimeout)."""
_SLACK: Final = 60.0
"""Seconds after the end of a watch in which nothing came: nobody is there any more."""
GATHERED: Final = 0.02
"""Seconds between two looks at what a watch brings: what comes meanwhile is read at once."""
_FULL: Final = 1 << 10
"""Bytes of a watch that wait for us before nothing more is taken from its connection."""
_MUCH: Final = 1 << 16
"""Bytes after which there is no pause: a thousand nodes may write in a second."""
_CHECKED: Final = 1.0
"""Seconds between two looks at whether ca.crt is another file."""
_DENIED: Final = 401
_TURNS: Final = 100
"""Turns of the event loop that sockets have to close in after nothing comes from them any more;
they need three."""


class _List(msgspec.Struct):
    """A list such as a PodList, of which the objects are of interest."""

    items: list[dict[str, Any]]


class _Event(msgspec.Struct):
    """A line of a watch (k8s.io/apimachinery, ``metav1.WatchEvent``)."""

    type: str
    object: dict[str, Any]


class LeanConnection(Connection):
    """A connection that also posts and reads documents and follows watches, at little cost.

    Args:
        as of `Connection`.
    """

    _session: aiohttp.ClientSession | None = None
    _sockets: weakref.WeakSet[socket.socket]
    _server = ""
    _bearer = ""
    _looked = float("-inf")

    async def post(self, path: str, document: object) -> tuple[int, bytes]:
        """Create something.

        Args:
            path: below the address of the server, quoted where it needs to be.
            document: what is created; written as JSON.

        Returns:
            The status code and the body of the answer, whatever it is.

        Raises:
            httpx2.HTTPError: nothing came back.
            ConfigError: this is no pod, or its credentials cannot be used.
            OSError: these cannot be read.
        """
        body = msgspec.json.encode(document)
        url = f"{path}?fieldManager={quote(self._field_manager, safe='')}"
        async with self._asked("POST", url, body) as answer:
            with _told():
                return answer.status, await answer.read()

    async def objects(self, path: str) -> list[dict[str, Any]]:
        """Read a list.

        Args:
            path: with its parameters, quoted where it needs to be.

        Raises:
            httpx2.HTTPError: nothing came back, or the server says no.
            ConfigError, OSError: see `post`.
            ValueError: what came is no list.
        """
        async with self._asked("GET", path, None) as answer:
            with _told():
                code, body = answer.status, await answer.read()
        if code != 200:
            raise refused(code, body)
        return msgspec.json.decode(body, type=_List).items

    async def events(
        self, path: str, parameters: Mapping[str, str], seconds: int
    ) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Follow a watch until the server ends it: what happened, and the object.

        Args:
            path: of the list.
            parameters: of the request, without those of the watch itself.
            seconds: after which the server is to end it.

        Raises:
            ApiError: the server says no, be it in the middle.
            httpx2.HTTPError: the connection was lost.
            ConfigError, OSError: see `post`.
            ValueError: what comes is no watch.
        """
        asked = {**parameters, "watch": "true", "timeoutSeconds": str(seconds)}
        query = "&".join(f"{name}={quote(text, safe='')}" for name, text in asked.items())
        silence = aiohttp.ClientTimeout(
            total=None, sock_connect=TIMEOUT, sock_read=seconds + _SLACK
        )
        async with self._asked("GET", f"{path}?{query}", None, silence) as answer:
            if answer.status != 200:
                with _told():
                    raise refused(answer.status, await answer.read())
            rest = b""
            while True:
                with _told():
                    chunk = await answer.content.readany()
                lines = (rest + chunk).split(b"\n")
                # Without a chunk it is the end, and a last line may lack its own.
                rest = lines.pop() if chunk else b""
                for line in lines:
                    if line:
                        yield _event(line)
                if not chunk:
                    return
                await asyncio.sleep(GATHERED if len(chunk) < _MUCH else 0)

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        method: str,
        url: str,
        body: bytes | None,
        silence: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request, signed; once more with the token read anew where it was denied."""
        for last in (False, True):
            session = await self._opened()
            with _told():
                answer = await session.request(
                    method,
                    self._server + url,
                    data=body,
                    headers={"Authorization": self._bearer},
                    timeout=silence or session.timeout,
                    allow_redirects=False,
                    read_bufsize=_FULL if silence else None,
                )
            async with answer:
                if answer.status != _DENIED or last:
                    yield answer
                    return
                with _told():
                    await answer.read()
            self._bearer = self._read_token()

    async def renew(self) -> None:
        """Have a client, of the ca.crt of now or of a second ago.

        Raises:
            ConfigError, OSError: see `post`.
        """
        now = asyncio.get_running_loop().time()
        if self._client is None or now - self._looked > _CHECKED:
            await self.client()  # closes the session where it makes another client
            self._looked = now

    async def _opened(self) -> aiohttp.ClientSession:
        """The session; another one after ca.crt changed."""
        await self.renew()
        if self._session is None:
            client = await self.client()
            self._server = client.config.cluster.server.rstrip("/")
            self._bearer = self._read_token()
            assert self._context is not None  # noqa: S101  # there is a client
            self._sockets = weakref.WeakSet()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    ssl=self._context,
                    limit=CONNECTIONS,
                    keepalive_timeout=KEPT,
                    socket_factory=self._socket,
                ),
                headers={
                    "User-Agent": self._user_agent,
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                    "Content-Type": "application/json",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT),
            )
        return self._session

    def _read_token(self) -> str:
        try:
            return f"Bearer {(self._directory / 'token').read_text('utf-8').strip()}"
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename} is not there") from error

    async def close(self) -> None:
        """End the connections; the next request reads everything again."""
        session, self._session = self._session, None
        await super().close()
        if session is None:
            return
        await session.close()
        # A request that was cancelled leaves a connection that waits for the other side's farewell,
        # and no session knows it any more.
        left = [one for one in self._sockets if one.fileno() >= 0]
        for one in left:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for _ in range(_TURNS):
            if all(one.fileno() < 0 for one in left):
                return
            await asyncio.sleep(0)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """One of a connection, remembered as long as it lives."""
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made


def refused(code: int, body: bytes) -> ApiError:
    """What the server says instead of doing it, as lightkube raises it."""
    try:
        found = msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = Status(message=body[:200].decode("utf-8", "replace"))
    found.code = found.code or code
    return ApiError(status=found)


def _event(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(line, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"an event of a watch: {error}") from None
    if found.type == "ERROR":
        raise refused(0, msgspec.json.encode(found.object))
    return found.type, found.object


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Failures of the connection as lightkube's client tells them, so that there is one kind."""
    try:
        yield
    except TimeoutError as error:
        if not isinstance(error, aiohttp.ClientError):
            raise  # of somebody around us
        raise httpx2.ReadTimeout(str(error) or "no answer in time") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise httpx2.ConnectError(str(error)) from error.certificate_error
    except aiohttp.ClientError as error:
        raise httpx2.ConnectError(str(error) or type(error).__name__) from error
