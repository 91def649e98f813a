"""Every case on every chosen virtual machine, each as a test of its own."""

import os
from collections.abc import Callable

import pytest

from tests.beds.machine_runs import MachineRuns
from tests.beds.testbed import TestbedUnavailable, skip_or_fail
from tests.beds.vm_bed import ARTIFACTS
from tests.beds.vm_records import Outcome
from tests.vm.registry import cases_for
from tests.vm.selection import MACHINES, chosen


def _chosen() -> list[str]:
    try:
        return chosen(os.environ.get("NRI_NUMA_VM", ""))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first case of a machine waits for its boot
@pytest.mark.parametrize(
    ("machine", "case"),
    [
        pytest.param(
            *(name, case.name),
            id=f"{name}-{case.name}",
            marks=() if case.turn is None else pytest.mark.turn(case.turn),
        )
        for name in _chosen()
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
        skip_or_fail(error, "VM")
    record_property("seconds_in_guest", result.seconds)
    record_property("again", sum(note.startswith("tried again") for note in result.notes))
    notes = "".join(f"\n    {note}" for note in result.notes)
    print(f"measured:{notes}")  # seen with -rP
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.detail)
    if result.outcome is Outcome.FAILED:
        pytest.fail(
            f"{result.detail}\nlogs: {ARTIFACTS / machine}\n"
            f"again: NRI_NUMA_VM={machine} pytest tests/vm -k {machine}-{case}",
            pytrace=False,
        )
