"""CreateContainer while somebody else keeps the plugin busy, and the longest gap of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.beds import MACHINES, SHARED, Bed, bed, fill, scratch
from bench.latency import cycle
from bench.stats import ms, summary, table, us


async def get(port: int, path: str) -> bytes:
    """One HTTP request over a connection of its own; the body, however long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    try:
        return await reader.read(-1)
    finally:
        writer.close()


async def _again(port: int, path: str, pause: float) -> None:
    while True:
        await get(port, path)
        await asyncio.sleep(pause)


async def _page(port: int) -> None:
    """An open page: the event stream, read as it comes, and the listing after each event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def _reload(pid: int) -> None:
    while True:
        os.kill(pid, signal.SIGHUP)
        await asyncio.sleep(0.2)


async def measure(*, rounds: int = 200, residents: int = 1000) -> str:
    rows = []
    quiet_p99 = 0.0
    with scratch() as directory:
        root = Path(directory)
        async with bed(root, MACHINES["256 CPUs, 8 NUMA nodes"](), http=True) as one:
            await fill(one, residents, SHARED)
            while b"nri_numa" not in await _try(one.port):
                await asyncio.sleep(0.2)
            cases: list[tuple[str, Callable[[], Awaitable[None]] | None]] = [
                ("quiet", None),
                ("/metrics scraped 5 times a second", lambda: _again(one.port, "/metrics", 0.2)),
                ("a page open on /v1/events", lambda: _page(one.port)),
                (
                    f"/v1/assignments of {residents:,} again and again",
                    lambda: _again(one.port, "/v1/assignments", 0.05),
                ),
                ("/v1/explain of one pod again and again", lambda: _again(
                    one.port, "/v1/explain/shop/resident-7", 0.05)),
                ("SIGHUP five times a second", lambda: _reload(one.pid)),
                ("quiet again", None),
            ]  # fmt: skip
            for name, disturb in cases:
                samples = await _timed(one, rounds, disturb)
                s = summary(samples)
                quiet_p99 = quiet_p99 or s.p99
                rows.append((name, us(s.p50), us(s.p99), f"{s.p99 / quiet_p99:.2f}"))
            text = (await get(one.port, "/metrics")).decode()
    lag = _metric(text, "nri_numa_loop_lag_longest_seconds")
    head = (f"{residents:,} residents, meanwhile", "p50 µs", "p99 µs", "p99 × quiet")
    return f"{table(head, rows)}\n\nLongest gap of the event loop in all of this: {ms(lag)} ms."


async def _timed(
    one: Bed, rounds: int, disturb: Callable[[], Awaitable[None]] | None
) -> list[float]:
    task = None if disturb is None else asyncio.ensure_future(disturb())
    await asyncio.sleep(0.1)
    gc.collect()
    gc.disable()
    try:
        samples = []
        for n in range(rounds):
            samples.append((await cycle(one, SHARED, f"i-{n}"))[0])
            await asyncio.sleep(0)
        if task is not None and task.done():
            task.result()  # raises: whatever was to disturb did not
        return samples
    finally:
        gc.enable()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task


async def _try(port: int) -> bytes:
    with contextlib.suppress(OSError):
        return await get(port, "/metrics")
    return b""


def _metric(text: str, name: str) -> float:
    for line in text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise RuntimeError(f"{name} is not in the scrape")
