"""Fuzz the protocol sessions: events or RemoteProtocolError, in bounded memory.

    python tests/fuzz/fuzz_protocol.py [SECONDS [SEED]]
    python tests/fuzz/fuzz_protocol.py --atheris [ARGUMENTS]

The first plays seeded random streams, by default for ten seconds from seed 0; the second is guided
by coverage and needs atheris. A finding prints its seed and the exception; the exit status is 1.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nri_numa.errors import RemoteProtocolError  # noqa: E402
from nri_numa.nri.wire import events as ev  # noqa: E402
from nri_numa.nri.wire.pb import nri_pb2 as pb  # noqa: E402
from nri_numa.nri.wire.session import (  # noqa: E402
    PluginSession,
    RuntimeSession,
    SessionLimits,
)
from tests.beds import peer_bytes  # noqa: E402

MEMORY_LIMIT = 64 << 20
"""Far above what a session may hold: two messages of 4 MiB and the collected slices."""

LIMITS = SessionLimits(synchronize_objects=10_000, synchronize_bytes=8 << 20)


def play(session: Any, packets: list[bytes]) -> str:
    """Feed packets, answer every event; returns ``ok`` or ``remote``, all else is a finding."""
    try:
        for packet in packets:
            session.receive_data(packet)
            while (event := session.next_event()) is not None:
                if isinstance(event, ev.ConfigureRequested):
                    session.reply(event.stream, pb.ConfigureResponse(events=1))
                elif not isinstance(
                    event,
                    ev.Registered
                    | ev.RegistrationRefused
                    | ev.UpdateContainersAnswered
                    | ev.Answered,
                ):
                    session.reply(event.stream)
            session.data_to_send()
    except RemoteProtocolError:
        return "remote"
    return "ok"


def sessions() -> list[Any]:
    """Return a fresh session of each role."""
    plugin = PluginSession(limits=LIMITS)
    plugin.register("fuzz", "10")
    return [plugin, RuntimeSession()]


def one(seed: int) -> str:
    """Play one random stream against both roles."""
    rng = random.Random(seed)
    data = peer_bytes.conversation(rng, rng.randrange(40))
    return "/".join(play(session, peer_bytes.cuts(rng, data)) for session in sessions())


def random_campaign(seconds: float, seed: int) -> int:
    """Play until the time is over; returns the exit status."""
    tracemalloc.start()
    end = time.monotonic() + seconds
    outcomes: dict[str, int] = {}
    rounds = 0
    while time.monotonic() < end:
        try:
            outcome = one(seed + rounds)
        except Exception as error:
            print(f"seed {seed + rounds}: {error!r}")
            raise
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        rounds += 1
        if tracemalloc.get_traced_memory()[0] > MEMORY_LIMIT:
            print(f"seed {seed + rounds}: more than {MEMORY_LIMIT} bytes are held")
            return 1
    peak = tracemalloc.get_traced_memory()[1]
    print(f"{rounds} streams, peak {peak >> 10} KiB, plugin/runtime: {outcomes}")
    return 0


def atheris_campaign(arguments: list[str]) -> int:
    """Run under atheris, which mutates the bytes by the coverage they reach."""
    import importlib

    atheris = importlib.import_module("atheris")

    def target(data: bytes) -> None:
        for session in sessions():
            play(session, [data])

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--atheris"]:
        raise SystemExit(atheris_campaign(sys.argv[2:]))
    raise SystemExit(
        random_campaign(
            float(sys.argv[1]) if len(sys.argv) > 1 else 10.0,
            int(sys.argv[2]) if len(sys.argv) > 2 else 0,
        )
    )
