"""Between a socket and a session, when things go wrong on our side."""

import asyncio
import socket
from collections.abc import Callable

from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.session import RuntimeSession
from tests.beds.wire import golden


async def connected(
    handle: Callable[[ev.RuntimeSessionEvent], None] = lambda _event: None,
    session: RuntimeSession | None = None,
) -> tuple[SessionTransport[ev.RuntimeSessionEvent], socket.socket]:
    """A connection, and the peer's end of it."""
    ours, theirs = socket.socketpair()
    connection = SessionTransport[ev.RuntimeSessionEvent](session or RuntimeSession(), handle)
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
    return connection, theirs


async def test_a_bug_while_handling_an_event_ends_this_connection_and_not_the_loop() -> None:
    def bug(_event: ev.RuntimeSessionEvent) -> None:
        raise ZeroDivisionError("a bug")

    connection, theirs = await connected(bug)
    with theirs:
        theirs.sendall(golden("register-plugin"))
        ending = await asyncio.wait_for(connection.wait_closed(), 180)
    assert ending.detail == "internal error: ZeroDivisionError('a bug')"
    assert isinstance(ending.error, ZeroDivisionError)


async def test_the_first_reason_for_closing_is_kept_and_later_data_ignored() -> None:
    seen: list[ev.RuntimeSessionEvent] = []
    connection, theirs = await connected(seen.append)
    with theirs:
        connection.close_or_abort("because")
        connection.close_or_abort("something else")
        late = golden("register-plugin")
        connection.get_buffer(-1)[: len(late)] = late
        connection.buffer_updated(len(late))
        connection.flush_session()
        connection.pause_writing()
        connection.resume_writing()
        ending = await asyncio.wait_for(connection.wait_closed(), 180)
    assert (ending.detail, ending.error, seen) == ("because", None, [])


async def test_a_connection_that_never_was_is_closed_at_once() -> None:
    connection = SessionTransport(RuntimeSession(), lambda _event: None)
    await asyncio.wait_for(connection.close_and_wait("stopped"), 180)
    assert connection.is_closing()


async def test_a_peer_that_closes_one_half_has_closed() -> None:
    connection, theirs = await connected()
    with theirs:
        theirs.shutdown(socket.SHUT_WR)
        ending = await asyncio.wait_for(connection.wait_closed(), 180)
    assert ending.detail == "the peer closed the connection"


async def test_what_a_peer_never_read_is_given_up_on_closing() -> None:
    """Otherwise a stuck runtime would keep the plugin from ever reconnecting."""
    session = RuntimeSession()
    connection, theirs = await connected(session=session)
    with theirs:
        session._trunk.queue_message(2, b"x" * (3 << 20))
        connection.flush_session()
        await asyncio.wait_for(connection.close_and_wait("enough"), 180)
        ending = await asyncio.wait_for(connection.wait_closed(), 180)
    assert ending.detail == "enough"
