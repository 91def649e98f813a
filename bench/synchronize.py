"""A whole node told at once: Synchronize of many containers, at a first start and at a restart."""

from __future__ import annotations

import functools
from pathlib import Path

from bench.beds import MACHINES, PLAIN, SHARED, Shape, bed, container_of, pod_of, scratch
from bench.stats import ms, summary, table
from tests.beds.embedded_runtime import EmbeddedRuntime


async def _populate(runtime: EmbeddedRuntime, count: int, shape: Shape) -> None:
    for n in range(count):
        pod = await runtime.run_pod(pod_of(shape, f"there-{n}"))
        made = await runtime.create_container(pod.id, container_of(shape))
        await runtime.start_container(made.id)


COUNTS = (500, 1000)


async def measure(*, rounds: int = 5) -> str:
    rows: list[tuple[object, ...]] = []
    for containers in COUNTS:
        rows += await _told(containers, rounds)
    return table(
        ("told at once", "containers", "min ms", "p50 ms", "max ms", "min × empty", "p50 × empty"),
        rows,
    )


async def _told(containers: int, rounds: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    topology = MACHINES["256 CPUs, 8 NUMA nodes"]()
    floor = None
    for name, shape, empty in (
        ("empty plugin", SHARED, True),
        ("strangers that ask for nothing", PLAIN, False),
        ("strangers with a policy", SHARED, False),
    ):
        samples, again = [], []
        for _ in range(rounds):
            with scratch() as directory:
                populate = functools.partial(_populate, count=containers, shape=shape)
                async with bed(Path(directory), topology, empty=empty, before=populate) as one:
                    samples.append(one.last("Synchronize"))
                    if not empty:
                        # The runtime hangs up: everything is known now.
                        await one.runtime.disconnect_plugins()
                        await one.runtime.wait_for_plugin(limit=60)
                        again.append(one.last("Synchronize"))
        for what, found in ((name, samples), (f"{name}, known", again)):
            if found:
                s = summary(found)
                floor = floor or s
                ratios = (s.least / floor.least, s.p50 / floor.p50)
                times = (ms(s.least), ms(s.p50), ms(max(found)))
                rows.append((what, containers, *times, *(f"{ratio:.2f}" for ratio in ratios)))
    return rows
