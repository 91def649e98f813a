"""The watches of our services over a real TLS socket: events in a second, and how late they are.

The server is a process of its own; each event has its own chunk and TLS record, as those of the API
server have. It sends as fast as they are taken, then so many in a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.stats import ms, summary, table, us
from nri_numa.kube.api import KubeAPI, WatchHandler
from tests.beds.fake_api_server import Asked, FakeAPIServer, Said
from tests.beds.watch_clients import NAMES, event_line, watch_of

_LONGEST = 10.0
"""Seconds after which a client that is too slow is left."""


class _Arrivals(WatchHandler):
    """Passes events on, and notes how late each was."""

    def __init__(self, watched: WatchHandler, count: int) -> None:
        self._watched, self._count = watched, count
        self.ages: list[float] = []
        self.over = asyncio.Event()

    def on_update(self, document: Mapping[str, Any]) -> None:
        self._watched.on_update(document)
        sent = float(document["metadata"]["annotations"]["sent"])
        self.ages.append(time.monotonic() - sent)
        if len(self.ages) == self._count:
            self.over.set()

    def on_list(self, keys: frozenset[str]) -> None:
        self._watched.on_list(keys)


def _events(name: str, count: int, rate: float) -> Iterator[bytes]:
    """So many in a second; 0: all at once."""
    begun = time.monotonic()
    for number in range(count):
        due = begun + number / rate if rate else begun
        if (wait := due - time.monotonic()) > 0:
            time.sleep(wait)
        yield event_line(name, number, sent=str(time.monotonic()))
    time.sleep(600)  # a watch stays open; who measures ends this process


def _serve(directory: str, name: str, count: int, rate: float, ready: Connection) -> None:
    def answer(asked: Asked) -> Said:
        if "watch=true" not in asked.path:
            return Said(200, {"metadata": {"resourceVersion": "1"}, "items": []})
        # Made before, as fast as they are taken; the time of a paced one is that of its sending.
        return Said(200, stream=_events(name, count, rate) if rate else [*_burst(name, count)])

    with FakeAPIServer(Path(directory), answer) as server:
        ready.send(server.environment())
        time.sleep(600)


def _burst(name: str, count: int) -> Iterator[bytes]:
    return (event_line(name, number, sent="0") for number in range(count))


async def _follow(name: str, credentials: str, count: int) -> tuple[float, float, list[float]]:
    """Seconds from the first event to the last, the CPU in them, and the age of each event."""
    watch = watch_of(name, KubeAPI(credentials, "bench"))
    arrivals = watch._watched = _Arrivals(watch._watched, count)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(30):
            while not arrivals.ages:
                await asyncio.sleep(0.001)
        first, begun, cpu = len(arrivals.ages), time.perf_counter(), time.process_time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(arrivals.over.wait(), _LONGEST)
        seconds, spent = time.perf_counter() - begun, time.process_time() - cpu
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watch._api.close()
    taken = max(1, len(arrivals.ages) - first)
    return taken / seconds, spent / taken, arrivals.ages


def one(name: str, count: int, rate: float = 0) -> tuple[float, float, list[float]]:
    """Events a second, seconds of CPU an event, and their ages."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        server = context.Process(target=_serve, args=(directory, name, count, rate, its))
        server.start()
        its.close()
        try:
            os.environ.update(mine.recv())
            return asyncio.run(_follow(name, directory, count))
        finally:
            server.kill()
            server.join()


def measure(*, quick: bool = False) -> str:
    """All of it as a table."""
    rows = []
    for name in NAMES:
        events, cpu, _ = one(name, 2000 if quick else 20_000)
        row = [name, f"{events:,.0f}", us(cpu)]
        if name.startswith("extender"):
            events, cpu, ages = one(name, 5000 if quick else 20_000, 1000)
            s = summary(ages)
            row += [f"{ms(s.p50)} / {ms(s.p99)} / {ms(max(ages))} ms", f"{events * cpu:.0%}"]
        else:
            row += ["", ""]
        rows.append(row)
    return table(
        ("watch", "events/s", "CPU an event (µs)", "age at 1,000/s (p50 / p99 / most)", "CPU"), rows
    )
