"""What a decision made ahead saves: from the parsed request to the bytes of its answer.

In one process and without a socket, with the checkpoint on tmpfs. What is done afterwards is
measured by itself: that is where the next decision is made.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.beds import (
    EXCLUSIVE,
    LISTED,
    MACHINES,
    SHARED,
    Shape,
    container_of,
    pod_of,
    scratch,
)
from bench.stats import Summary, summary, table, us
from nri_numa.engine.decision import Machine
from nri_numa.engine.values.settings import Settings
from nri_numa.node.agent import Agent
from nri_numa.node.ahead import DecidedAhead
from nri_numa.nri.adapter import Adapter
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.observe.metrics import Metrics
from nri_numa.store.checkpoint import CheckpointStore

CASES: tuple[tuple[str, Shape, Shape, int], ...] = (
    # Name, what is created, what the residents are, how many.
    ("shared", SHARED, SHARED, 100),
    ("exclusive, nobody to tell", EXCLUSIVE, LISTED, 100),
    ("exclusive, 100 to tell", EXCLUSIVE, SHARED, 100),
    ("exclusive, 500 to tell", EXCLUSIVE, SHARED, 500),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case, in seconds: creation, what is done after it, and the stop."""

    case: str
    ahead: bool
    create: Summary
    after: Summary
    stop: Summary


def _request(shape: Shape, number: int) -> pb.CreateContainerRequest:
    pod, container = pod_of(shape, f"n{number}"), container_of(shape)
    pod.id, container.id = f"{number:064}", f"{number:064x}"
    container.pod_sandbox_id = pod.id
    return pb.CreateContainerRequest(pod=pod, container=container)


def _one(
    case: str, shape: Shape, kind: Shape, residents: int, ahead: bool, rounds: int
) -> Measured:
    with scratch() as directory:
        store = CheckpointStore(
            str(Path(directory, "state")), identity={"version": "bench"}, clock=time.time
        )
        store.load()
        metrics = Metrics("bench")
        waiting: deque[Callable[[], object]] = deque()
        agent = Agent(
            Machine(
                topology=MACHINES[next(iter(MACHINES))](),
                settings=Settings(),
                key=b"signs what is measured",
            ),
            metrics=metrics,
            store=store,
            now=time.time,
            later=waiting.append,
        )
        adapter = Adapter(
            agent,
            metrics,
            ahead=DecidedAhead(
                agent, metrics, now=time.time, reading=lambda: None, later=waiting.append
            )
            if ahead
            else None,
        )

        def rest() -> None:
            while waiting:
                waiting.popleft()()

        for number in range(residents):
            adapter.create_container(_request(kind, 1_000_000 + number))
            rest()
        samples: tuple[list[float], ...] = ([], [], [])
        gc.collect()
        gc.disable()
        try:
            for number in range(-10, rounds):
                request = _request(shape, number + 10)
                marks = [time.perf_counter()]
                adapter.create_container(request).SerializeToString()
                marks.append(time.perf_counter())
                rest()
                marks.append(time.perf_counter())
                stop = pb.StopContainerRequest(pod=request.pod, container=request.container)
                begun = time.perf_counter()
                adapter.stop_container(stop).SerializeToString()
                stopped = time.perf_counter() - begun
                rest()
                adapter.remove_pod(request.pod)
                rest()
                if number >= 0:
                    spans = (marks[1] - marks[0], marks[2] - marks[1], stopped)
                    for into, value in zip(samples, spans, strict=True):
                        into.append(value)
        finally:
            gc.enable()
        store.close()
    create, after, stops = map(summary, samples)
    return Measured(case=case, ahead=ahead, create=create, after=after, stop=stops)


def measure(*, rounds: int = 400) -> list[Measured]:
    """Every case, usual and ahead."""
    return [_one(*case, ahead, rounds) for case in CASES for ahead in (False, True)]


def report(found: list[Measured]) -> str:
    """As a table."""
    return table(
        ("pod", "decided", "create min µs", "p50", "p99", "afterwards p50", "stop p50"),
        [
            (
                "" if m.ahead else m.case,
                "ahead" if m.ahead else "when asked",
                us(m.create.least),
                us(m.create.p50),
                us(m.create.p99),
                us(m.after.p50),
                us(m.stop.p50),
            )
            for m in found
        ],
    )
