"""Exclusive CPUs with many to tell: ours, and an empty plugin that names the same containers.

An empty plugin that names nobody has nothing to do where ours names hundreds, and so has the
runtime. One that decides nothing and names the same containers is what deciding is compared with.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from bench.beds import EXCLUSIVE, MACHINES, SHARED, bed, fill, scratch
from bench.latency import Lives, lives
from bench.stats import table, us

CASES: tuple[tuple[int, float], ...] = ((100, 0.0), (100, 0.02), (500, 0.0), (500, 0.02))
"""How many are told, and seconds between two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Both plugins: ours, and the naming one."""

    told: int
    gap: float
    ours: Lives
    naming: Lives


async def measure(*, rounds: int = 150) -> list[Measured]:
    topology = MACHINES[next(iter(MACHINES))]()
    found: list[Measured] = []
    with scratch() as directory:
        async with contextlib.AsyncExitStack() as stack:
            beds = [
                await stack.enter_async_context(
                    bed(Path(directory, name), topology, empty=empty, more=more)
                )
                for name, empty, more in (
                    ("ours", False, []),
                    ("naming", True, ["naming"]),
                )
            ]
            for number, (told, gap) in enumerate(CASES):
                for one in beds:
                    await fill(one, told, SHARED)
                ours, naming = await lives(
                    beds, lambda _: EXCLUSIVE, rounds, warm=10, gap=gap, name=f"new-{number}"
                )
                found.append(Measured(told=told, gap=gap, ours=ours, naming=naming))
    return found


def report(found: list[Measured]) -> str:
    """As a table."""
    rows = []
    for m in found:
        for request, ours, floor in (
            ("Create", m.ours.create, m.naming.create),
            ("Stop", m.ours.stop, m.naming.stop),
        ):
            first = request == "Create"
            rows.append(
                (
                    m.told if first else "",
                    f"{m.gap * 1000:.0f}" if first else "",
                    f"{request}Container",
                    *(us(s.least) for s in (ours, floor)),
                    *(us(s.p50) for s in (ours, floor)),
                    f"{ours.p50 / floor.p50:.2f}",
                )
            )
    return table(
        (
            "told", "gap ms", "request", "min µs", "naming min", "p50 µs", "naming p50", "×",
        ),
        rows,
    )  # fmt: skip
