"""A node's day: pods come and go, most of them replicas; what becomes of decisions made ahead.

The day is made up from a seed and then the same for every plugin: four in five pods are replicas of
a dozen workloads, which come in small groups as a rollout makes them; one in five is single, of a
shape that no other has. Each stays for a while and ends. A day of 86,400 seconds is played in
minutes: what is kept of the time between two events is a pause of at most 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import random
from dataclasses import dataclass, replace
from pathlib import Path

from bench.beds import (
    EXCLUSIVE,
    MACHINES,
    PLAIN,
    SHARED,
    Bed,
    Shape,
    bed,
    container_of,
    fill,
    pod_of,
    scratch,
)
from bench.gaps import _hits
from bench.stats import summary, table, us

DAY = 86_400.0
GROUPS = 4 / 7
"""Part of the arrivals that are a group of replicas. A group has three pods on average, so four
pods in five are replicas: 3 · 4/7 against 1 · 3/7."""
WORKLOADS = 12
"""Workloads that have replicas: shared and unbound ones, and one with exclusive CPUs."""
STAYS = 7_200.0
"""Mean seconds that a pod lives."""
PAUSE = 0.02
"""Seconds between two events at most."""
RESIDENTS = 60


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """At some second of the day a pod comes, or ends where it has no shape."""

    at: float
    pod: int
    shape: Shape | None = None
    replica: bool = True


def day(pods: int, seed: int = 15) -> list[Event]:
    """The events of one day, in order.

    Args:
        pods: how many come.
        seed: of the day.
    """
    chance = random.Random(seed)
    workloads = [
        replace(chance.choice((SHARED, SHARED, PLAIN)), memory=(n + 1) << 26)
        for n in range(WORKLOADS - 1)
    ] + [replace(EXCLUSIVE, milli=2000)]
    events: list[Event] = []
    busy: list[float] = []  # when the exclusive ones end: the machine has room for eight of them
    number = 0
    while number < pods:
        at = chance.uniform(0, DAY)
        if chance.random() < GROUPS:
            shapes, replica = [chance.choice(workloads)] * chance.randint(2, 4), True
        else:
            shapes, replica = [replace(SHARED, memory=(1 << 30) + (number << 12))], False
        for shape in shapes[: pods - number]:
            ends = at + chance.expovariate(1 / STAYS)
            if shape.milli == 2000:
                while busy and busy[0] <= at:
                    heapq.heappop(busy)
                if len(busy) >= 8:
                    shape = workloads[0]
                else:
                    heapq.heappush(busy, ends)
            events.append(Event(at, number, shape, replica))
            events.append(Event(max(ends, at + 60), number))
            number += 1
            at += 1.0
    return sorted(events, key=lambda event: (event.at, event.pod, event.shape is None))


async def _play(events: list[Event], beds: list[Bed]) -> list[dict[bool, list[float]]]:
    """Play the day on every bed, in turn; seconds of each creation, of replicas and of others."""
    took: list[dict[bool, list[float]]] = [{True: [], False: []} for _ in beds]
    live: list[dict[int, tuple[str, str]]] = [{} for _ in beds]
    before = events[0].at
    for event in events:
        pause = min(PAUSE, event.at - before)
        before = event.at
        for into, there, one in zip(took, live, beds, strict=True):
            await asyncio.sleep(pause / len(beds))
            if event.shape is None:
                pod_id, container_id = there.pop(event.pod)
                await one.runtime.stop_container(container_id)
                await one.runtime.remove_pod(pod_id)
                continue
            pod = await one.runtime.run_pod(pod_of(event.shape, f"day-{event.pod}"))
            made = await one.runtime.create_container(pod.id, container_of(event.shape))
            into[event.replica].append(one.last("CreateContainer"))
            await one.runtime.start_container(made.id)
            there[event.pod] = pod.id, made.id
    return took


async def measure(*, pods: int = 400) -> str:
    """One day on the smaller machine, as a table, and what became of decisions made ahead."""
    events = day(pods)
    replicas = sum(event.shape is not None and event.replica for event in events)
    topology = MACHINES[next(iter(MACHINES))]()
    with scratch() as directory:
        config = Path(directory, "ahead.yaml")
        config.write_text("apiVersion: nri-numa/v1\nkind: AgentConfig\ndecideAhead: true\n")
        ahead = [f"--config={config}"]
        async with contextlib.AsyncExitStack() as stack:
            beds = [
                await stack.enter_async_context(
                    bed(Path(directory, name), topology, empty=empty, http=http, more=more)
                )
                for name, empty, http, more in (
                    ("ours", False, False, []),
                    ("ahead", False, False, ahead),
                    ("floor", True, False, []),
                    ("told", False, True, ahead),
                )
            ]
            for one in beds:
                await fill(one, RESIDENTS, SHARED)
            before = await asyncio.to_thread(_hits, beds[3].port)
            gc.collect()
            gc.disable()
            try:
                took = await _play(events, beds)
            finally:
                gc.enable()
            after = await asyncio.to_thread(_hits, beds[3].port)
    became = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    rows = []
    for name, kinds in (("replicas", (True,)), ("singles", (False,)), ("all", (True, False))):
        times = [summary([t for kind in kinds for t in one[kind]]) for one in took[:3]]
        ours, early, floor = times
        rows.append(
            (
                name,
                sum(len(took[0][kind]) for kind in kinds),
                *(us(s.p50) for s in times),
                f"{ours.p50 / floor.p50:.2f}",
                f"{early.p50 / floor.p50:.2f}",
                *(us(s.p99) for s in times),
            )
        )
    shares = ", ".join(f"{name} {count / pods:.0%}" for name, count in sorted(became.items()))
    return (
        table(
            (
                "pods", "number", "p50 µs", "ahead p50", "empty p50", "×", "ahead ×", "p99 µs",
                "ahead p99", "empty p99",
            ),
            rows,
        )
        + f"\n\nOf {pods} pods, {replicas / pods:.0%} replicas, decided ahead: {shares}."
    )  # fmt: skip
