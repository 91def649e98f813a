"""The ``memoryLocality`` section: looking, all the time, where the memory of containers is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case


class MemoryLocality(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Where the memory of containers is, read again and again beside the decisions."""

    enabled: Annotated[
        bool,
        Meta(
            description="Read for every container what part of its memory is on its own NUMA "
            "nodes, for the page, nri-numa status -o wide, explain and the API. Needs HTTP."
        ),
    ] = False
    interval: Annotated[
        str | float,
        Meta(description="Time between two rounds over all containers; 1s or more."),
    ] = "30s"
    budget: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="Per cent of one CPU that reading may take; a round is stretched over as "
            "much time as that needs.",
        ),
    ] = 0.5
    metric: Annotated[
        bool,
        Meta(
            description="Expose nri_numa_container_local_memory_ratio as well: a series for each "
            "container."
        ),
    ] = False
    max_series: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Series of that metric at most; the containers with the lowest ratios "
            "have them.",
        ),
    ] = 100
