"""A whole node told at once: Synchronize of 1,000 containers, at a first start and at a restart."""

from __future__ import annotations

import functools
from pathlib import Path

from bench.beds import MACHINES, PLAIN, SHARED, Shape, bed, container_of, pod_of, scratch
from bench.stats import ms, summary, table
from nri_numa.runtime.embedded import EmbeddedRuntime


async def _populate(runtime: EmbeddedRuntime, count: int, shape: Shape) -> None:
    for n in range(count):
        pod = await runtime.run_pod(pod_of(shape, f"there-{n}"))
        made = await runtime.create_container(pod.id, container_of(shape))
        await runtime.start_container(made.id)


async def measure(*, containers: int = 1000, rounds: int = 5) -> str:
    rows = []
    topology = MACHINES["256 CPUs, 8 NUMA nodes"]()
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
                rows.append((what, containers, ms(s.least), ms(s.p50), ms(max(found))))
    return table(("1,000 containers", "containers", "min ms", "p50 ms", "max ms"), rows)
