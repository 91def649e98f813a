"""Options of a request whose values are words."""

from __future__ import annotations

from enum import StrEnum

from nri_numa.model.workload import (
    SMT,
    Bind,
    CPUMode,
    DeviceAlignmentMode,
    MemoryPolicy,
    OnFailure,
    Policy,
    Scope,
)

OPTION_ENUMS: dict[str, type[StrEnum]] = {
    "bind": Bind,
    "policy": Policy,
    "scope": Scope,
    "cpus": CPUMode,
    "smt": SMT,
    "on-failure": OnFailure,
    "devices": DeviceAlignmentMode,
    "mempolicy": MemoryPolicy,
}
