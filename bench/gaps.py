"""CreateContainer at two paces of a node: ours and an empty plugin.

Back to back is what a benchmark does; with 20 ms between requests caches have gone cold, as on a
node that starts fifty containers a second. Pods are replicas, or each is of a shape of its own. The
two plugins take turns, so what else the machine does hits both of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.beds import EXCLUSIVE, LISTED, MACHINES, SHARED, Shape, bed, fill, scratch
from bench.latency import Lives, lives
from bench.stats import table, us

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
    """One case at one pace."""

    case: str
    gap: float
    ours: Lives
    floor: Lives


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
                    mine, theirs = await lives(
                        beds,
                        lambda n, shape=shape, offset=offset: shape(offset + n),
                        rounds,
                        warm=max(10, rounds // 10),
                        gap=gap,
                        name=f"new-{offset}",
                    )
                    found.append(Measured(case=case, gap=gap, ours=mine, floor=theirs))
    return found


def report(found: list[Measured]) -> str:
    """As a table."""
    rows = [
        (
            m.case,
            f"{m.gap * 1000:.0f}",
            *(us(s.least) for s in (m.ours.create, m.floor.create)),
            *(us(s.p50) for s in (m.ours.create, m.floor.create)),
            f"{m.ours.create.p50 / m.floor.create.p50:.2f}",
            *(us(s.p99) for s in (m.ours.create, m.floor.create)),
            f"{m.ours.stop.p50 / m.floor.stop.p50:.2f}",
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
