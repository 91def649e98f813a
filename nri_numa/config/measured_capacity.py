"""The ``measuredCapacity`` section: capacity factors that follow what the host takes away."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case


class MeasuredMode(StrEnum):
    """What is done with steal."""

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


class MeasuredCapacity(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Steal on each NUMA node, for virtual machines on hosts that promise more than they have."""

    mode: Annotated[
        MeasuredMode,
        Meta(
            description="off; observe: measure steal of each NUMA node, log and expose the "
            "capacity factors that would follow; act: give new containers no more than these "
            "leave, and what capacityFactor says. What runs stays where it is."
        ),
    ] = MeasuredMode.OFF
    interval: Annotated[str | float, Meta(description="Time between two readings; 1s or more.")] = (
        "5s"
    )
    half_life: Annotated[
        str | float,
        Meta(
            description="Time after which half of a change has arrived in what is averaged; 1s "
            "or more."
        ),
    ] = "30s"
    step: Annotated[
        float,
        Meta(
            ge=0.01,
            le=0.5,
            description="How far the average must be from a factor before it changes; below half "
            "of it a NUMA node is whole again.",
        ),
    ] = 0.1
    floor: Annotated[
        float, Meta(ge=0, le=1, description="No factor is lower, however much is stolen.")
    ] = 0.5
