"""CreateContainer while somebody else keeps the plugin busy, and the longest gap of its loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bench.beds import MACHINES, REPOSITORY, SHARED, Bed, bed, environment, fill, scratch
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


@contextlib.asynccontextmanager
async def _client(*arguments: object) -> AsyncIterator[None]:
    """`bench.disturb` beside us; raises when it did not live to the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.disturb", *map(str, arguments),
        cwd=REPOSITORY, env=environment(), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the client {arguments} did not get an answer")
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the client {arguments} ended by itself")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _reloads(pid: int) -> AsyncIterator[None]:
    task = asyncio.ensure_future(_reload(pid))
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await task


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
            cases: list[tuple[str, Callable[[], AbstractAsyncContextManager[None]]]] = [
                ("quiet", contextlib.nullcontext),
                (
                    "/metrics scraped 5 times a second",
                    lambda: _client("get", one.port, "/metrics", 0.2),
                ),
                ("a page open, told of every change", lambda: _client("page", one.port)),
                (
                    f"/v1/assignments of {residents:,} 20 times a second",
                    lambda: _client("get", one.port, "/v1/assignments", 0.05),
                ),
                (
                    "/v1/explain of one pod 20 times a second",
                    lambda: _client("get", one.port, "/v1/explain/shop/resident-7", 0.05),
                ),
                ("SIGHUP five times a second", lambda: _reloads(one.pid)),
                ("quiet again", contextlib.nullcontext),
            ]
            for name, disturb in cases:
                samples = await _timed(one, rounds, disturb)
                s = summary(samples)
                quiet_p99 = quiet_p99 or s.p99
                rows.append((name, us(s.p50), us(s.p99), f"{s.p99 / quiet_p99:.2f}"))
            text = (await get(one.port, "/metrics")).decode()
    lag = _metric(text, "nri_numa_event_loop_max_lag_seconds")
    head = (f"{residents:,} residents, meanwhile", "p50 µs", "p99 µs", "p99 × quiet")
    return f"{table(head, rows)}\n\nLongest gap of the event loop in all of this: {ms(lag)} ms."


async def _timed(
    one: Bed, rounds: int, disturb: Callable[[], AbstractAsyncContextManager[None]]
) -> list[float]:
    async with disturb():
        gc.collect()
        gc.disable()
        try:
            samples = []
            for n in range(rounds):
                samples.append((await cycle(one, SHARED, f"i-{n}"))[0])
                # A node that starts twenty pods in a second is a busy one.
                await asyncio.sleep(0.02)
            return samples
        finally:
            gc.enable()


async def _try(port: int) -> bytes:
    with contextlib.suppress(OSError):
        return await get(port, "/metrics")
    return b""


def _metric(text: str, name: str) -> float:
    for line in text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise RuntimeError(f"{name} is not in the scrape")
