"""Which machines a test run boots, and what their cases prove for tests that cannot run here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.machines.vm_machine import Machine, load_machines
from tests.vm.registry import all_cases

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


def unproven(proven_by: str | Iterable[str], machines: Iterable[Machine]) -> str:
    """Why cases do not prove what a test would; empty when each runs on one of the machines.

    `proven_by`: names of cases; one, or several that together say the same.
    """
    names = [proven_by] if isinstance(proven_by, str) else list(proven_by)
    if not names:
        return "no case is named that proves the same"
    there = list(machines)
    for name in names:
        found = all_cases().get(name)
        if found is None:
            return f"there is no case {name!r}; see python -m tests.vm list"
        if not any(found.applies(machine) for machine in there):
            booted_names = ", ".join(machine.name for machine in there) or "none"
            return f"case {name} runs on no machine that is booted ({booted_names})"
    return ""
