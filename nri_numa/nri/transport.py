"""Transport of bytes between a socket and a protocol session, synchronous in `buffer_updated`.

The plugin's link and the embedded runtime use it. It knows neither NRI nor placement: one callable
gets every event, and the session's output is written after each event, so an answer leaves before
the next request is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from nri_numa.errors import RemoteProtocolError
from nri_numa.nri.wire.session import SessionBase
from nri_numa.observe.logs import get_logger

logger = get_logger("nri")

READ_BUFFER_BYTES: Final = 1 << 18
"""Bytes of one read from the socket."""
WRITE_HIGH_WATER_BYTES: Final = 1 << 20
"""Bytes that the peer has not read, above which no more requests are read; bounds memory."""

EventT = TypeVar("EventT")


class ConnectionEnding(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for the end of a connection; `error` is None if either side closed it in order.

    Attributes:
        by_peer: the peer closed it, or is gone.
    """

    detail: str
    error: Exception | None = None
    by_peer: bool = False


class SessionTransport(asyncio.BufferedProtocol, Generic[EventT]):
    """One connection: feeds a session and passes its events on.

    ``ended`` resolves once, with the `ConnectionEnding`, when the socket is closed. It needs a
    running event loop, and ``on_event`` should answer an event before it returns.
    """

    def __init__(self, session: SessionBase[EventT], on_event: Callable[[EventT], None]) -> None:
        self._session = session
        self._on_event = on_event
        self._transport: asyncio.Transport | None = None
        # One buffer for all reads. Otherwise every read, however short, allocates a quarter of a
        # megabyte and frees it again, with page faults.
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._ending: ConnectionEnding | None = None
        self.ended: asyncio.Future[ConnectionEnding] = asyncio.get_running_loop().create_future()

    def is_closing(self) -> bool:
        """True if the connection is closed or about to be."""
        return self._ending is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and limit its buffer."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream socket's
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Feed the session, handle its events, and write its output."""
        data = bytes(self._view[:nbytes])
        if self.is_closing():
            return
        try:
            self._session.receive_data(data)
            while not self.is_closing() and (event := self._session.next_event()) is not None:
                self._on_event(event)
                self.flush_session()
        except RemoteProtocolError as error:
            self.flush_session()
            self.close_or_abort(f"the peer broke the protocol: {error}", error)
        except Exception as error:  # an internal error must not end the event loop
            logger.exception("connection handling failed")
            self.close_or_abort(f"internal error: {error!r}", error)
        else:
            self.flush_session()

    def eof_received(self) -> bool:
        """Close a half-closed socket."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Resolve `ended`."""
        self._session.receive_eof()
        if not self.ended.done():
            if self._ending is None:
                detail = "the peer closed the connection" if exc is None else str(exc)
                self._ending = ConnectionEnding(detail=detail, error=exc, by_peer=True)
            self.ended.set_result(self._ending)

    def pause_writing(self) -> None:
        """Stop reading requests from a peer that does not read its answers."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read requests again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def flush_session(self) -> None:
        """Write the queued output of the session."""
        data = self._session.data_to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close_or_abort(self, detail: str, error: Exception | None = None) -> None:
        """Close the connection from this side; the first reason counts."""
        if self._ending is None:
            self._ending = ConnectionEnding(detail=detail, error=error)
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # the peer does not read, so it will not read the rest
        else:
            self._transport.close()

    async def close_and_wait(self, detail: str) -> None:
        """Close the connection and wait until its socket is closed, if it was ever open."""
        self.close_or_abort(detail)
        if self._transport is not None:
            await self.wait_closed()

    async def wait_closed(self) -> ConnectionEnding:
        """Wait for the end; cancelling one waiter does not affect others."""
        return await asyncio.shield(self.ended)
