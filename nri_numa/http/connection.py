"""One connection: h11 over asyncio streams, with deadlines for whole requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import h11

from nri_numa.http.api import EVENTS, APIError, Response

REQUEST_TIMEOUT = 10.0
"""Seconds for a whole request, from its first byte (the first: from the connection) to its last."""
IDLE_TIMEOUT = 60.0
WRITE_TIMEOUT = 30.0
MAX_HEADER_BYTES = 16 * 1024
MAX_BODY_BYTES = 4 * 1024
MAX_SKIPPED = 1 << 20
"""Bytes of a body that is not wanted, after which the client is not waited for any more."""


class Connection:
    """Requests in, answers out.

    Args:
        reader, writer: the stream.
        server_name: for the Server header.
        deadline: when its first request must be complete, in the loop's time.
        initial: what the client has sent already.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_name: str,
        *,
        deadline: float,
        initial: bytes = b"",
    ) -> None:
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._server_name = server_name
        self._deadline: float | None = deadline
        self._head: dict[bytes, bytes] = {}
        if initial:
            self._h11.receive_data(initial)

    @property
    def certified(self) -> bool:
        """The client has shown a certificate that we trust."""
        return bool(self._writer.get_extra_info("peercert"))

    async def request(self) -> h11.Request | None:
        """The next request without its body; None when the client has no more.

        Raises:
            APIError: no server must answer it as if it were clear.
            TimeoutError: the client does not get on with it.
        """
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            await self._receive()
        if not isinstance(event, h11.Request):
            return None  # ConnectionClosed, or PAUSED after a protocol switch that we never accept
        self._head = {bytes(name): bytes(value) for name, value in event.headers}
        size = len(event.target) + sum(len(n) + len(v) + 4 for n, v in event.headers)
        if size > MAX_HEADER_BYTES:  # it came in one piece, so h11 did not have to wait for it
            raise APIError(
                431, "BadRequest", f"expected headers of at most {MAX_HEADER_BYTES} bytes"
            )
        if b"content-length" in self._head and b"transfer-encoding" in self._head:
            # A proxy may believe the other one, and see two requests (RFC 9112, section 6.1).
            raise APIError(400, "BadRequest", "Content-Length and Transfer-Encoding, expected one")
        return event

    def announced(self, largest: int) -> int:
        """Bytes that the body of this request takes, if it may have so many."""
        if b"transfer-encoding" in self._head:
            return largest
        return min(int(self._head.get(b"content-length", b"0")), largest)

    async def body(self, largest: int) -> bytes:
        """The body of the request; where none is taken (0), a short one is thrown away.

        Raises:
            APIError: it is too long.
        """
        if not largest:
            if self._h11.they_are_waiting_for_100_continue:
                raise APIError(413, "BodyTooLarge", "this API takes no request body")
            await self._read(MAX_BODY_BYTES, [], "this API takes no request body")
            return b""
        problem = f"expected a body of at most {largest} bytes"
        if int(self._head.get(b"content-length", b"0")) > largest:
            raise APIError(413, "BodyTooLarge", problem)
        if self._h11.they_are_waiting_for_100_continue:
            self._put(h11.InformationalResponse(status_code=100, headers=[]))
        parts: list[bytes] = []
        await self._read(largest, parts, problem)
        return b"".join(parts)

    async def skip(self) -> None:
        """Read a body that is not wanted, unless it is too long or has not been sent."""
        if not self._h11.they_are_waiting_for_100_continue:
            with contextlib.suppress(APIError):
                await self._read(MAX_SKIPPED, None, "")

    async def _read(self, largest: int, parts: list[bytes] | None, problem: str) -> None:
        size = 0
        while not isinstance(event := self._h11.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                await self._receive()
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > largest:
                    raise APIError(413, "BodyTooLarge", problem)
                if parts is not None:
                    parts.append(bytes(event.data))
        self._deadline = None

    async def _receive(self) -> None:
        """Read some more; the deadline does not move with what trickles in."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None and self._h11.trailing_data[0]:
            self._deadline = now + REQUEST_TIMEOUT
        until = now + IDLE_TIMEOUT if self._deadline is None else self._deadline
        async with asyncio.timeout_at(until):
            data = await self._reader.read(MAX_HEADER_BYTES)
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + REQUEST_TIMEOUT
        self._h11.receive_data(data)

    async def send(self, response: Response, *, head: bool, last: bool = False) -> None:
        """Write an answer; a broken request makes it the last one, and so does ``last``."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = response.body
        headers = [
            ("Server", self._server_name),
            ("Content-Type", response.content_type),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if not any(name == "Cache-Control" for name, _ in headers):
            headers.append(("Cache-Control", "no-store"))
        if isinstance(body, bytes) and response.status != 204:
            headers.append(("Content-Length", str(len(body))))
        if last or self._h11.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        start = h11.Response(status_code=response.status, headers=raw)
        if isinstance(body, bytes):
            whole = () if head or not body else (h11.Data(data=body),)
            self._put(start, *whole, h11.EndOfMessage())
        else:
            self._put(start)
            try:
                if not head:
                    await self._send_pieces(body, flush=response.content_type == EVENTS)
            finally:
                await body.aclose()  # type: ignore[attr-defined]  # ours are generators
            self._put(h11.EndOfMessage())
        await self._drain()

    async def _send_pieces(self, body: AsyncIterator[bytes], *, flush: bool) -> None:
        async for piece in body:
            if piece:
                self._put(h11.Data(data=piece))
            if flush and self._reader.at_eof():
                raise EOFError
            await self._drain()
            # drain() returns at once while the buffer has room; give others their turn: the runtime
            # (`nri_numa.node.loop`), and then other clients. Once is not enough for these: what was
            # scheduled before the loop looked at its sockets runs before what it found there, so a
            # probe would wait for one more piece.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def next(self) -> bool:
        """Get ready for another request; False when the connection must be closed."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        return False

    def _put(self, *events: h11.Event) -> None:
        if data := b"".join(self._h11.send(event) or b"" for event in events):
            self._writer.write(data)

    async def _drain(self) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await self._writer.drain()
