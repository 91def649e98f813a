"""Every case on every chosen virtual machine, each as a test of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.testbed import TestbedUnavailable
from tests.support.vm_bed import ARTIFACTS
from tests.support.vm_machine import load_machines
from tests.support.vm_records import Outcome
from tests.vm.conftest import MachineRuns, required
from tests.vm.registry import cases_for

MACHINES = load_machines(Path(__file__).parent / "machines")


def chosen() -> list[str]:
    """Names of the machines that ``NRI_NUMA_VM`` asks for; default: the core set."""
    asked = os.environ.get("NRI_NUMA_VM", "") or "core"
    if asked == "all":
        return list(MACHINES)
    if asked == "core":
        return [name for name, machine in MACHINES.items() if machine.core]
    names = asked.split(",")
    if unknown := [name for name in names if name not in MACHINES]:
        raise pytest.UsageError(
            f"NRI_NUMA_VM={asked}: no machine {', '.join(unknown)}, expected core, all, or some "
            f"of {', '.join(MACHINES)}"
        )
    return names


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first case of a machine waits for its boot
@pytest.mark.parametrize(
    ("machine", "case"),
    [
        pytest.param(name, case.name, id=f"{name}-{case.name}")
        for name in chosen()
        for case in cases_for(MACHINES[name])
    ],
)
def test_case(
    machine: str,
    case: str,
    machine_runs: MachineRuns,
    record_property: Callable[[str, object], None],
) -> None:
    """What the case's docstring says holds on the machine, in the kernel's own words."""
    try:
        result = machine_runs.result(MACHINES[machine], case)
    except TestbedUnavailable as error:
        if required():
            pytest.fail(f"NRI_NUMA_REQUIRE_VM=1, but {error}", pytrace=False)
        pytest.skip(str(error))
    record_property("seconds_in_guest", result.seconds)
    notes = "".join(f"\n    {note}" for note in result.notes)
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.detail)
    if result.outcome is Outcome.FAILED:
        pytest.fail(
            f"{result.detail}\nmeasured:{notes or ' nothing'}\nlogs: {ARTIFACTS / machine}\n"
            f"again: python -m tests.vm run {machine} {case}",
            pytrace=False,
        )
