"""What a scrape tells of how much containers wait for CPUs; only where that is looked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from nri_numa.observe.metrics import head, label, text

Named: TypeAlias = tuple[str, str, str, float]
"""Namespace, pod, container, and the value."""

_PRESSURE: Final = (
    "container_cpu_pressure_ratio",
    "The part of the last minute in which something of a container was ready and had no CPU; none "
    "where not known.",
)
_WAITING: Final = (
    "container_waiting_tasks",
    "Threads of a container that waited for a CPU, on average since the round before; none where "
    "not known.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How much containers wait, as many as may be series.

    Attributes:
        pressure: parts from 0 to 1.
        tasks: threads that waited on average.
        states: number of containers by whether something is known of them: ``known``, ``unknown``,
            and ``left out`` for those beyond the limit of series.
    """

    pressure: Sequence[Named]
    tasks: Sequence[Named]
    states: Mapping[str, int]


def pieces(told: Waiting, at_once: int) -> Iterator[bytes]:
    """The rows, in pieces.

    Args:
        told: what is exposed.
        at_once: rows of a piece.
    """
    rows = head(
        "cpu_waiting_containers",
        "Containers by whether it is known how much they wait for CPUs, and exposed.",
    )
    rows += (
        f'nri_numa_cpu_waiting_containers{{state="{state}"}} {count}\n'
        for state, count in sorted(told.states.items())
    )
    for (name, meaning), samples in ((_PRESSURE, told.pressure), (_WAITING, told.tasks)):
        rows += head(name, meaning)
        for namespace, pod, container, value in samples:
            rows.append(
                f'nri_numa_{name}{{pod_namespace="{label(namespace)}",'
                f'pod_name="{label(pod)}",container_name="{label(container)}"}} {value:.4g}\n'
            )
            if len(rows) >= at_once:
                yield text(rows)
    yield text(rows)
