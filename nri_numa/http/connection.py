"""One connection: h11 over asyncio streams, with deadlines for whole requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import h11

from nri_numa.http.api import EVENTS, APIError, Response

REQUEST_TIMEOUT = 10.0
"""Seconds for a whole request, from its first byte (the first: from the connection) to its last."""
IDLE_TIMEOUT = 60.0
WRITE_TIMEOUT = 30.0
MAX_HEADER_BYTES = 16 * 1024
MAX_BODY_BYTES = 4 * 1024


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
        if initial:
            self._h11.receive_data(initial)

    async def request(self) -> h11.Request | None:
        """The next request, its body read and thrown away; None when the client has no more.

        Raises:
            TimeoutError: the client does not get on with it.
        """
        request: h11.Request | None = None
        size = 0
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    raise APIError(413, "BodyTooLarge", "this API takes no request body")
                await self._receive()
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > MAX_BODY_BYTES:
                    raise APIError(413, "BodyTooLarge", "this API takes no request body")
            elif isinstance(event, h11.EndOfMessage):
                self._deadline = None
                return request
            else:  # ConnectionClosed, or PAUSED after a protocol switch that we never accept
                return None

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
        if isinstance(body, bytes):
            headers.append(("Content-Length", str(len(body))))
        if last or self._h11.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        self._put(h11.Response(status_code=response.status, headers=raw))
        try:
            if isinstance(body, bytes):
                if not head and body:
                    self._put(h11.Data(data=body))
            elif not head:
                await self._send_pieces(body, flush=response.content_type == EVENTS)
        finally:
            if not isinstance(body, bytes):
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

    def _put(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if data:
            self._writer.write(data)

    async def _drain(self) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await self._writer.drain()
