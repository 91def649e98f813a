"""CreateContainer and StopContainer through a real socket, ours against an empty plugin.

The same pod is created, stopped and removed at both plugins in turn, so whatever else the machine
does hits both. Residents are put there first; they are of two kinds, because what an exclusive
grant costs depends on how many others must be told.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable, Sequence
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
from tests.beds.embedded_node import EmbeddedNode, until

RESIDENTS = (0, 100, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """What the lives of pods cost at one plugin, in seconds; ``cpu`` is of each life."""

    create: Summary
    stop: Summary
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One kind of request at one kind of node."""

    machine: str
    residents: int
    case: str
    ours: Lives
    floor: Lives


CASES: tuple[tuple[str, Shape, Shape], ...] = (
    # Name, what is created, what the residents are.
    ("shared", SHARED, SHARED),
    ("exclusive, nobody to tell", EXCLUSIVE, LISTED),
    ("exclusive, all to be told", EXCLUSIVE, SHARED),
)


async def cycle(one: Bed, shape: Shape, name: str, gap: float = 0.0) -> tuple[float, float]:
    """Create and stop one container, with a pause before each request; the seconds of both."""
    pause = functools.partial(asyncio.sleep, gap) if gap else _no_pause
    pod = await one.runtime.run_pod(pod_of(shape, name))
    await pause()
    made = await one.runtime.create_container(pod.id, container_of(shape))
    created = one.last("CreateContainer")
    await pause()
    await one.runtime.start_container(made.id)
    await pause()
    await one.runtime.stop_container(made.id)
    stopped = one.last("StopContainer")
    await pause()
    await one.runtime.remove_pod(pod.id)
    return created, stopped


async def _no_pause() -> None:
    """Back to back."""


async def lives(
    beds: Sequence[Bed], shape: Callable[[int], Shape], rounds: int,
    *, warm: int, gap: float = 0.0, name: str = "new",
) -> list[Lives]:  # fmt: skip
    """The same lives of pods at each plugin in turn; the first ``warm`` are not counted."""
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in beds]
    before = [0.0 for _ in beds]
    gc.collect()
    gc.disable()
    try:
        for n in range(-warm, rounds):
            if n == 0:
                before = [cpu_seconds(one.pid) for one in beds]
            for (creates, stops), one in zip(samples, beds, strict=True):
                created, stopped = await cycle(one, shape(warm + n), f"{name}-{n}", gap)
                if n >= 0:
                    creates.append(created)
                    stops.append(stopped)
    finally:
        gc.enable()
    return [
        Lives(
            create=summary(creates),
            stop=summary(stops),
            cpu=(cpu_seconds(one.pid) - began) / rounds,
        )
        for (creates, stops), one, began in zip(samples, beds, before, strict=True)
    ]


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
                        mine, theirs = await lives(
                            (ours, floor), lambda _, shape=shape: shape, n, warm=max(20, n // 10)
                        )
                        found.append(
                            Measured(
                                machine=machine,
                                residents=count,
                                case=case,
                                ours=mine,
                                floor=theirs,
                            )
                        )
    return found


def report(found: list[Measured]) -> str:
    rows = []
    for m in found:
        for name, ours, floor in (
            ("CreateContainer", m.ours.create, m.floor.create),
            ("StopContainer", m.ours.stop, m.floor.stop),
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
                    us(m.ours.cpu) if name == "CreateContainer" else "",
                    us(m.floor.cpu) if name == "CreateContainer" else "",
                )
            )
    return table(
        (
            "machine", "pod", "residents", "request", "min µs", "p50 µs", "p99 µs",
            "empty p50", "empty p99", "p50 ×", "p99 ×", "CPU µs/cycle", "empty",
        ),
        rows,
    )  # fmt: skip


def _arrived(node: EmbeddedNode) -> bool:
    return all("-" not in one["mems"] for one in node.assignments().values())


def with_plan(rounds: int) -> str:
    """CreateContainer for which a movable container makes room, against one that fits as it is.

    On each NUMA node a movable container owns three eighths of the CPUs. Half of them fit beside
    it, and for three quarters it has to move. The residents follow the shared pool both times.
    """
    single = {"policy": "single-numa-node"}
    rows = []
    for machine, build in MACHINES.items():
        topology = build()
        size = min(len(numa_node.cpus) for numa_node in topology.numa_nodes.values())
        for residents in (0, 100):
            with (
                scratch() as name,
                EmbeddedNode(Path(name), topology=topology, request_timeout=30) as node,
            ):
                node.start()
                for n in range(residents):
                    node.free(f"resident-{n}")
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for n in range(-5, rounds):
                    movers = [
                        node.run(f"mover-{n}-{i}", single | {"movable": "true"}, cpus=size * 3 // 8)
                        for i in topology.numa_nodes
                    ]
                    made = [node.cgroups.directory(node.cgroup(one.id)) for one in movers]
                    until(lambda made=made: all(one.exists() for one in made), "they run")
                    for plan, cpus in ((False, size // 2), (True, size * 3 // 4)):
                        new = node.create(node.pod(f"new-{n}-{plan}", single), cpus=cpus)
                        call = next(
                            one for one in reversed(node.runtime.calls)
                            if one.method == "CreateContainer"
                        )  # fmt: skip
                        reason = node.assignments()[new.id]["reason"]
                        if ("fits after moving" in reason) is not plan:
                            raise RuntimeError(f"{cpus} CPUs: {reason}")
                        if n >= 0:
                            seconds[plan].append(call.seconds)
                        node.remove(new)
                    until(lambda node=node: _arrived(node), "all memory has moved")
                    for one in movers:
                        node.remove(one)
            without, planned = summary(seconds[False]), summary(seconds[True])
            rows.append((
                machine, residents,
                *(us(n) for one in (without, planned) for n in (one.least, one.p50, one.p99)),
                f"{planned.least / without.least:.2f}", f"{planned.p50 / without.p50:.2f}",
            ))  # fmt: skip
    head = (
        "machine", "residents", "min µs", "p50 µs", "p99 µs", "with a plan min", "p50", "p99",
        "min ×", "p50 ×",
    )  # fmt: skip
    return table(head, rows)
