"""Which machines a test run boots."""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.machines.vm_machine import Machine, load_machines

MACHINES = load_machines(Path(__file__).parent / "machines")


def chosen(asked: str) -> list[str]:
    """Names of machines from the value of ``NRI_NUMA_VM``; empty: the core set."""
    if asked == "all":
        return list(MACHINES)
    if asked in ("", "core"):
        return [name for name, machine in MACHINES.items() if machine.core]
    names = asked.split(",")
    if unknown := [name for name in names if name not in MACHINES]:
        raise ValueError(
            f"NRI_NUMA_VM={asked}: no machine {', '.join(unknown)}, expected core, all, or some "
            f"of {', '.join(MACHINES)}"
        )
    return names


def booted(environment: Mapping[str, str] = os.environ) -> list[Machine]:
    """The machines that the run of this environment boots; none unless it says so."""
    asked = environment.get("NRI_NUMA_VM", "")
    if not asked and environment.get("NRI_NUMA_REQUIRE_VM") != "1":
        return []
    return [MACHINES[name] for name in chosen(asked)]
