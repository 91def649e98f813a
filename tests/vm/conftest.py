"""Boots each machine once for all its selected cases, and hands each case its own result.

Machines run when they are asked for: by ``-m vm`` (``make test-vm``), by ``NRI_NUMA_VM`` (``core``,
``all``, or names of machines with commas between them), or by ``NRI_NUMA_REQUIRE_VM=1``, which also
installs what is missing and makes a failure of what would be a skip. Otherwise they are skipped, so
that a plain test run stays short.
"""

import os
from collections.abc import Iterator

import pytest

from tests.beds.machine_runs import MachineRuns
from tests.beds.testbed import TestbedUnavailable, skip_or_fail
from tests.beds.vm_bed import available, prepare
from tests.vm.pod_cards import moves_cards
from tests.vm.registry import all_cases
from tests.vm.selection import MACHINES


def required() -> bool:
    """Whether a machine that cannot be booted is a failure."""
    return os.environ.get("NRI_NUMA_REQUIRE_VM") == "1"


def _of(item: pytest.Item) -> tuple[str, str] | None:
    """(machine, case) of a test item that stands for a case."""
    parameters = getattr(item, "callspec", None)
    if parameters is None or not {"machine", "case"} <= parameters.params.keys():
        return None  # tests/kube has tests of machines without cases
    return parameters.params["machine"], parameters.params["case"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases of one machine together, in the guest's order, after any shuffling."""
    places = [i for i, item in enumerate(items) if _of(item) is not None]
    names = list(MACHINES)
    order = {case: i for i, case in enumerate(all_cases())}

    def key(item: pytest.Item) -> tuple[int, int]:
        machine, case = _of(item) or ("", "")
        return names.index(machine), order[case]

    cases = sorted((items[i] for i in places), key=key)
    for place, item in zip(places, cases, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def machine_runs(request: pytest.FixtureRequest) -> Iterator[MachineRuns]:
    """The machines, with everything there that they need."""
    asked = os.environ.get("NRI_NUMA_VM") or "vm" in request.config.getoption("markexpr", "")
    if not asked and not required():
        pytest.skip("takes minutes; run make test-vm, or set NRI_NUMA_VM=core")
    if (reason := available()) and not required():
        pytest.skip(reason)
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if (found := _of(item)) is not None:
            selected.setdefault(found[0], []).append(found[1])
    try:
        parts = prepare(
            containerd=sorted({MACHINES[name].containerd for name in selected}),
            cni=any(moves_cards(MACHINES[name]) for name in selected),
            systems={MACHINES[name].system for name in selected},
        )
    except TestbedUnavailable as error:
        skip_or_fail(error, "VM")
    runs = MachineRuns(parts, selected)
    yield runs
    runs.close()
