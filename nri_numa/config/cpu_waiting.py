"""The ``cpuWaiting`` section: looking, all the time, how much containers wait for CPUs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case


class CPUWaiting(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How much containers wait for CPUs, read again and again beside the decisions."""

    enabled: Annotated[
        bool,
        Meta(
            description="Read for every container the CPU pressure of its cgroup and how many of "
            "its threads wait on run queues, for the page, nri-numa status -o wide and the API. "
            "Needs HTTP."
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
            description="Expose nri_numa_container_cpu_pressure_ratio and "
            "nri_numa_container_waiting_tasks as well: a series of each for each container."
        ),
    ] = False
    max_series: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Series of each of these metrics at most; the containers that wait most "
            "have them.",
        ),
    ] = 100
