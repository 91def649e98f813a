"""What a scrape tells of where containers' memory is; only where that is looked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nri_numa.observe.metrics import head, label, text


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """What part of containers' memory is on their own NUMA nodes.

    Attributes:
        ratios: ``(namespace, pod, container, ratio)``, as many as may be series.
        states: number of containers by whether they have a ratio: ``known``, ``unknown``, and
            ``left out`` for those beyond the limit of series.
    """

    ratios: Sequence[tuple[str, str, str, float]]
    states: Mapping[str, int]


def pieces(told: LocalMemory, at_once: int) -> Iterator[bytes]:
    """The rows, in pieces.

    Args:
        told: what is exposed.
        at_once: rows of a piece.
    """
    rows = head(
        "local_memory_containers",
        "Containers by whether the part of their memory on their own NUMA nodes is known, and "
        "exposed.",
    )
    rows += (
        f'nri_numa_local_memory_containers{{state="{state}"}} {count}\n'
        for state, count in sorted(told.states.items())
    )
    rows += head(
        "container_local_memory_ratio",
        "The part of a container's memory that is on its own NUMA nodes; none where not known.",
    )
    for namespace, pod, container, ratio in told.ratios:
        rows.append(
            f'nri_numa_container_local_memory_ratio{{pod_namespace="{label(namespace)}",'
            f'pod_name="{label(pod)}",container_name="{label(container)}"}} {ratio:.4g}\n'
        )
        if len(rows) >= at_once:
            yield text(rows)
    yield text(rows)
