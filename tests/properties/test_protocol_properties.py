"""Whatever a peer sends, a session makes events or says RemoteProtocolError, and stays small."""

import random
import tracemalloc
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nri_numa.nri.wire.session import Phase, PluginSession, RuntimeSession
from tests.beds import peer_bytes
from tests.beds.wire import feed


def plugin() -> PluginSession:
    session = PluginSession()
    session.register_plugin("numapin", "10")
    return session


@given(seed=st.integers(0, 2**32), length=st.integers(0, 30), runtime=st.booleans())
@example(seed=0, length=30, runtime=False)
def test_cuts_of_a_stream_change_nothing(seed: int, length: int, runtime: bool) -> None:
    """The same events, the same answers and the same end, packet by packet or all at once."""
    make = RuntimeSession if runtime else plugin
    rng = random.Random(seed)
    data = peer_bytes.conversation(rng, length)
    whole = feed(make(), [data])
    assert feed(make(), peer_bytes.cuts(rng, data)) == whole
    assert feed(make(), [data[start : start + 1] for start in range(len(data))][:3000]) == (
        whole if len(data) <= 3000 else feed(make(), [data[:3000]])
    )


@given(data=st.binary(max_size=400), runtime=st.booleans())
def test_noise_makes_events_or_the_remote_error_only(data: bytes, runtime: bool) -> None:
    session: Any = RuntimeSession() if runtime else plugin()
    _, ended, _ = feed(session, [data])
    assert (session.phase is Phase.DEAD) == bool(ended)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 8))
def test_damaged_bits_in_a_real_conversation_do_no_more_harm(seed: int, flips: int) -> None:
    rng = random.Random(seed)
    data = bytearray(peer_bytes.conversation(rng, 12))
    for _ in range(flips):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    session = plugin()
    _, ended, _ = feed(session, peer_bytes.cuts(rng, bytes(data)))
    assert (session.phase is Phase.DEAD) == bool(ended)


def test_a_dead_session_keeps_no_more_than_one_message_of_each_connection() -> None:
    """A frame that announces four megabytes and never comes holds only what came."""
    session = plugin()
    body = b"\0\0\0\1\0\x40\0\x0a" + b"\0\x40\0\0\0\0\0\1\1\0"  # 4 MiB each
    tracemalloc.start()
    try:
        session.receive_data(body)
        for _ in range(32):
            session.receive_data(b"x" * 100_000)
            assert session.next_event() is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 << 20
