"""CreateContainer at three paces of a node: ours, ours deciding ahead, and an empty plugin.

Back to back is what a benchmark does; with 20 ms between requests caches have gone cold, as on a
node that starts fifty containers a second. Pods are replicas, or each is of a shape of its own. The
three plugins take turns, so what else the machine does hits all of them. A fourth one serves HTTP
and tells how many were decided ahead; the others serve none.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import urllib.request
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
    """One case at one pace; times in seconds, creates of ours, of ours ahead, and of the empty."""

    case: str
    gap: float
    usual: Summary
    ahead: Summary
    floor: Summary
    hits: float
    stop: Summary
    stop_ahead: Summary
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


def _hits(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("nri_numa_decided_ahead_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


async def _compare(
    case: str, shape: Callable[[int], Shape], gap: float, beds: tuple[Bed, Bed, Bed, Bed],
    rounds: int, offset: int,
) -> Measured:  # fmt: skip
    warm = max(10, rounds // 10)
    creates: tuple[list[float], ...] = ([], [], [], [])
    stops: tuple[list[float], ...] = ([], [], [], [])
    before: dict[str, float] = {}
    gc.collect()
    gc.disable()
    try:
        for n in range(-warm, rounds):
            if n == 0:
                before = await asyncio.to_thread(_hits, beds[3].port)
            for into, left, one in zip(creates, stops, beds, strict=True):
                created, stopped = await _paced(
                    one, shape(offset + warm + n), f"new-{offset}-{n}", gap
                )
                if n >= 0:
                    into.append(created)
                    left.append(stopped)
    finally:
        gc.enable()
    after = await asyncio.to_thread(_hits, beds[3].port)
    return Measured(
        case=case,
        gap=gap,
        usual=summary(creates[0]),
        ahead=summary(creates[1]),
        floor=summary(creates[2]),
        hits=(after.get("hit", 0) - before.get("hit", 0)) / rounds,
        stop=summary(stops[0]),
        stop_ahead=summary(stops[1]),
        stop_floor=summary(stops[2]),
    )


async def measure(*, rounds: int = 150) -> list[Measured]:
    """Every case at every pace, on the smaller machine."""
    topology = MACHINES[next(iter(MACHINES))]()
    found: list[Measured] = []
    for case, shape, kind, residents in CASES:
        with scratch() as directory:
            config = Path(directory, "ahead.yaml")
            config.write_text("apiVersion: nri-numa/v1\nkind: AgentConfig\ndecideAhead: true\n")
            async with contextlib.AsyncExitStack() as stack:
                usual = await stack.enter_async_context(bed(Path(directory, "ours"), topology))
                ahead = await stack.enter_async_context(
                    bed(Path(directory, "ahead"), topology, more=[f"--config={config}"])
                )
                floor = await stack.enter_async_context(
                    bed(Path(directory, "floor"), topology, empty=True)
                )
                told = await stack.enter_async_context(
                    bed(Path(directory, "told"), topology, http=True, more=[f"--config={config}"])
                )
                beds = usual, ahead, floor, told
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
            *(us(s.least) for s in (m.usual, m.ahead, m.floor)),
            *(us(s.p50) for s in (m.usual, m.ahead, m.floor)),
            f"{m.usual.p50 / m.floor.p50:.2f}",
            f"{m.ahead.p50 / m.floor.p50:.2f}",
            *(us(s.p99) for s in (m.usual, m.ahead, m.floor)),
            f"{m.hits:.0%}",
            *(f"{s.p50 / m.stop_floor.p50:.2f}" for s in (m.stop, m.stop_ahead)),
        )
        for m in found
    ]
    return table(
        (
            "pod", "gap ms", "min µs", "ahead min", "empty min", "p50 µs", "ahead p50",
            "empty p50", "×", "ahead ×",
            "p99 µs", "ahead p99", "empty p99", "hits", "stop ×", "ahead stop ×",
        ),
        rows,
    )  # fmt: skip
