"""CreateContainer and StopContainer through a real socket, ours against an empty plugin.

The same pod is created, stopped and removed at both plugins in turn, so whatever else the machine
does hits both. Residents are put there first; they are of two kinds, because what an exclusive
grant costs depends on how many others must be told.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
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
    cpu_seconds,
    fill,
    pod_of,
    scratch,
)
from bench.stats import Summary, summary, table, us

RESIDENTS = (0, 100, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One kind of request at one kind of node, in seconds."""

    machine: str
    residents: int
    case: str
    create: Summary
    create_floor: Summary
    stop: Summary
    stop_floor: Summary
    cpu: float
    cpu_floor: float


CASES: tuple[tuple[str, Shape, Shape], ...] = (
    # Name, what is created, what the residents are.
    ("shared", SHARED, SHARED),
    ("exclusive, nobody to tell", EXCLUSIVE, LISTED),
    ("exclusive, all to be told", EXCLUSIVE, SHARED),
)


async def cycle(one: Bed, shape: Shape, name: str) -> tuple[float, float]:
    """Create and stop one container; the seconds of both requests."""
    pod = await one.runtime.run_pod(pod_of(shape, name))
    made = await one.runtime.create_container(pod.id, container_of(shape))
    created = one.last("CreateContainer")
    await one.runtime.start_container(made.id)
    await one.runtime.stop_container(made.id)
    stopped = one.last("StopContainer")
    await one.runtime.remove_pod(pod.id)
    return created, stopped


async def compare(
    machine: str, residents: int, case: str, shape: Shape, ours: Bed, floor: Bed, rounds: int
) -> Measured:
    warm = max(20, rounds // 10)
    samples: tuple[list[float], ...] = ([], [], [], [])
    before = 0.0, 0.0
    gc.collect()
    gc.disable()
    try:
        for n in range(-warm, rounds):
            if n == 0:
                before = cpu_seconds(ours.pid), cpu_seconds(floor.pid)
            mine = await cycle(ours, shape, f"new-{n}")
            theirs = await cycle(floor, shape, f"new-{n}")
            if n >= 0:
                for into, value in zip(samples, (*mine, *theirs), strict=True):
                    into.append(value)
    finally:
        gc.enable()
    return Measured(
        machine=machine,
        residents=residents,
        case=case,
        create=summary(samples[0]),
        stop=summary(samples[1]),
        create_floor=summary(samples[2]),
        stop_floor=summary(samples[3]),
        cpu=(cpu_seconds(ours.pid) - before[0]) / rounds,
        cpu_floor=(cpu_seconds(floor.pid) - before[1]) / rounds,
    )


async def measure(
    *, rounds: int = 300, machines: tuple[str, ...] = tuple(MACHINES),
    residents: tuple[int, ...] = RESIDENTS, cases: tuple[tuple[str, Shape, Shape], ...] = CASES,
) -> list[Measured]:  # fmt: skip
    found: list[Measured] = []
    for machine in machines:
        topology = MACHINES[machine]()
        for case, shape, kind in cases:
            with scratch() as directory:
                async with (
                    bed(Path(directory, "ours"), topology) as ours,
                    bed(Path(directory, "floor"), topology, empty=True) as floor,
                ):
                    for count in residents:
                        if not count and case == CASES[1][0]:
                            continue  # the same as the next case without residents
                        await fill(ours, count, kind)
                        await fill(floor, count, kind)
                        n = rounds if count < 500 or kind is not SHARED else rounds // 2
                        found.append(await compare(machine, count, case, shape, ours, floor, n))
    return found


def report(found: list[Measured]) -> str:
    rows = []
    for m in found:
        for name, ours, floor in (
            ("CreateContainer", m.create, m.create_floor),
            ("StopContainer", m.stop, m.stop_floor),
        ):
            rows.append(
                (
                    m.machine if name == "CreateContainer" else "",
                    m.case if name == "CreateContainer" else "",
                    m.residents if name == "CreateContainer" else "",
                    name,
                    us(ours.least),
                    us(ours.p50),
                    us(ours.p99),
                    us(floor.p50),
                    us(floor.p99),
                    f"{ours.p50 / floor.p50:.2f}",
                    f"{ours.p99 / floor.p99:.2f}",
                    us(m.cpu) if name == "CreateContainer" else "",
                    us(m.cpu_floor) if name == "CreateContainer" else "",
                )
            )
    return table(
        (
            "machine", "pod", "residents", "request", "min µs", "p50 µs", "p99 µs",
            "empty p50", "empty p99", "p50 ×", "p99 ×", "CPU µs/cycle", "empty",
        ),
        rows,
    )  # fmt: skip
