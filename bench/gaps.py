"""CreateContainer at two paces of a node: ours and an empty plugin.

Back to back is what a benchmark does; with 20 ms between requests caches have gone cold, as on a
node that starts fifty containers a second. Pods are replicas, or each is of a shape of its own. The
two plugins take turns, so what else the machine does hits both of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.beds import (
    EXCLUSIVE,
    LISTED,
    MACHINES,
    SHARED,
    Bed,
    Shape,
    bed,
    container_of,
    fill,
    pod_of,
    scratch,
)
from bench.latency import cycle
from bench.stats import Summary, summary, table, us

GAPS = (0.0, 0.02)
"""Seconds between two requests of one plugin."""


def _same(shape: Shape) -> Callable[[int], Shape]:
    return lambda number: shape


def _new(shape: Shape) -> Callable[[int], Shape]:
    """A shape that never came before: as much memory as no other has asked for."""
    return lambda number: replace(shape, memory=shape.memory + (number << 12))


CASES: tuple[tuple[str, Callable[[int], Shape], Shape, int], ...] = (
    # Name, the shape of each pod, what the residents are, how many.
    ("shared, replicas", _same(SHARED), SHARED, 100),
    ("shared, each of a new shape", _new(SHARED), SHARED, 100),
    ("exclusive, nobody to tell, replicas", _same(EXCLUSIVE), LISTED, 100),
    ("exclusive, 100 to tell, replicas", _same(EXCLUSIVE), SHARED, 100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case at one pace; times in seconds, of ours and of the empty one."""

    case: str
    gap: float
    ours: Summary
    floor: Summary
    stop: Summary
    stop_floor: Summary


async def _paced(one: Bed, shape: Shape, name: str, gap: float) -> tuple[float, float]:
    """One life of a pod, with a pause before each request that is measured."""
    if not gap:
        return await cycle(one, shape, name)
    pod = await one.runtime.run_pod(pod_of(shape, name))
    await asyncio.sleep(gap)
    made = await one.runtime.create_container(pod.id, container_of(shape))
    created = one.last("CreateContainer")
    await asyncio.sleep(gap)
    await one.runtime.start_container(made.id)
    await asyncio.sleep(gap)
    await one.runtime.stop_container(made.id)
    stopped = one.last("StopContainer")
    await asyncio.sleep(gap)
    await one.runtime.remove_pod(pod.id)
    return created, stopped


async def _compare(
    case: str, shape: Callable[[int], Shape], gap: float, beds: tuple[Bed, Bed], rounds: int,
    offset: int,
) -> Measured:  # fmt: skip
    warm = max(10, rounds // 10)
    creates: tuple[list[float], ...] = ([], [])
    stops: tuple[list[float], ...] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for n in range(-warm, rounds):
            for into, left, one in zip(creates, stops, beds, strict=True):
                created, stopped = await _paced(
                    one, shape(offset + warm + n), f"new-{offset}-{n}", gap
                )
                if n >= 0:
                    into.append(created)
                    left.append(stopped)
    finally:
        gc.enable()
    return Measured(
        case=case,
        gap=gap,
        ours=summary(creates[0]),
        floor=summary(creates[1]),
        stop=summary(stops[0]),
        stop_floor=summary(stops[1]),
    )


async def measure(*, rounds: int = 150) -> list[Measured]:
    """Every case at every pace, on the smaller machine."""
    topology = MACHINES[next(iter(MACHINES))]()
    found: list[Measured] = []
    for case, shape, kind, residents in CASES:
        with scratch() as directory:
            async with contextlib.AsyncExitStack() as stack:
                ours = await stack.enter_async_context(bed(Path(directory, "ours"), topology))
                floor = await stack.enter_async_context(
                    bed(Path(directory, "floor"), topology, empty=True)
                )
                beds = ours, floor
                for one in beds:
                    await fill(one, residents, kind)
                for number, gap in enumerate(GAPS):
                    offset = number * 10 * rounds
                    found.append(await _compare(case, shape, gap, beds, rounds, offset))
    return found


def report(found: list[Measured]) -> str:
    """As a table."""
    rows = [
        (
            m.case,
            f"{m.gap * 1000:.0f}",
            *(us(s.least) for s in (m.ours, m.floor)),
            *(us(s.p50) for s in (m.ours, m.floor)),
            f"{m.ours.p50 / m.floor.p50:.2f}",
            *(us(s.p99) for s in (m.ours, m.floor)),
            f"{m.stop.p50 / m.stop_floor.p50:.2f}",
        )
        for m in found
    ]
    return table(
        (
            "pod", "gap ms", "min µs", "empty min", "p50 µs", "empty p50", "×", "p99 µs",
            "empty p99", "stop ×",
        ),
        rows,
    )  # fmt: skip
