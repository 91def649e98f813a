"""What running costs: start, memory, idle time, and the share of a core at a steady trickle."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path

from bench.beds import (
    MACHINES,
    PLAIN,
    SHARED,
    bed,
    container_of,
    cpu_seconds,
    fill,
    pod_of,
    rss_bytes,
    scratch,
)
from bench.stats import ms, summary, table
from bench.synchronize import _populate
from nri_numa.model.machine import Topology

MACHINE = "64 CPUs, 2 NUMA nodes"


async def starts(topology: Topology, rounds: int) -> list[float]:
    """Seconds from exec to the active link; the first, on a cold cache, is left out."""
    found = []
    for _ in range(rounds + 1):
        with scratch() as directory:
            async with bed(Path(directory), topology, http=True) as one:
                found.append(one.seconds_to_active)
    return found[1:]


async def measure(*, quick: bool = False) -> str:
    topology = MACHINES[MACHINE]()
    rows: list[tuple[object, ...]] = []
    s = summary(await starts(topology, 3 if quick else 10))
    rows.append(
        (
            "exec to registered and synchronised",
            f"{ms(s.least, 0)} / {ms(s.p50, 0)} ms (min / p50)",
            "≤ 400 ms",
        )
    )
    idle = 5 if quick else 30
    with scratch() as directory:
        async with bed(Path(directory), topology, http=True) as one:
            await asyncio.sleep(4)  # the HTTP server is imported after the link stands
            base = rss_bytes(one.pid)
            rows.append(("resident memory, HTTP on", f"{base / 2**20:.1f} MiB", "≤ 45 MiB"))
            before = cpu_seconds(one.pid)
            await asyncio.sleep(idle)
            share = (cpu_seconds(one.pid) - before) / idle
            rows.append((f"CPU, idle for {idle} s", f"{share:.2%}", "≤ 0.1 %"))
            await fill(one, 200, SHARED)
            before, begun, n = cpu_seconds(one.pid), time.perf_counter(), 0
            while time.perf_counter() - begun < idle:
                pod = await one.runtime.run_pod(pod_of(SHARED, f"tick-{n}"))
                made = await one.runtime.create_container(pod.id, container_of(SHARED))
                await one.runtime.start_container(made.id)
                await asyncio.sleep(0.5)
                await one.runtime.stop_container(made.id)
                await one.runtime.remove_pod(pod.id)
                n += 1
                await asyncio.sleep(max(0.0, begun + n - time.perf_counter()))
            share = (cpu_seconds(one.pid) - before) / (time.perf_counter() - begun)
            rows.append(("CPU, 200 pods and one create and stop a second", f"{share:.2%}", "≤ 2 %"))
    for name, shape in (("with a policy", SHARED), ("that ask for nothing", PLAIN)):
        with scratch() as directory:
            populate = functools.partial(_populate, count=500, shape=shape)
            async with bed(Path(directory), topology, http=True, before=populate) as one:
                await asyncio.sleep(8)  # what the runtime told is given back within seconds
                what = f"resident memory after Synchronize of 500 {name}, HTTP on"
                rows.append((what, f"{rss_bytes(one.pid) / 2**20:.1f} MiB", "≤ 45 MiB"))
    for name, shape in (("shared", SHARED), ("unpinned", PLAIN)):
        with scratch() as directory:
            async with bed(Path(directory), topology) as one:
                await fill(one, 100, shape)
                await asyncio.sleep(2)
                low = rss_bytes(one.pid)
                count = 300 if quick else 600
                # In steps, as a node fills: hundreds within a second would measure what is in
                # the air at once.
                for reached in range(150, 101 + count, 50):
                    await fill(one, reached, shape)
                    await asyncio.sleep(0.2)
                await asyncio.sleep(2)
                grown = (rss_bytes(one.pid) - low) / count / 1024
                rows.append((f"memory for each {name} resident", f"{grown:.1f} KiB", "≤ 4 KiB"))
    return table(("what", "measured", "budget"), rows)
