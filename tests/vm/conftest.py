"""Boots each machine once for all its selected cases, and hands each case its own result.

Machines run when they are asked for: by ``-m vm`` (``make test-vm``), by ``NRI_NUMA_VM`` (``core``,
``all``, or names of machines with commas between them), or by ``NRI_NUMA_REQUIRE_VM=1``, which also
installs what is missing and makes a failure of what would be a skip. Otherwise they are skipped, so
that a plain test run stays short.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import Parts, Run, available, prepare
from tests.beds.vm_records import Result
from tests.machines.vm_machine import Machine
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


class MachineRuns:
    """The machines of this session; one runs at a time."""

    def __init__(self, parts: Parts, selected: dict[str, list[str]]) -> None:
        self._parts = parts
        self._selected = selected
        self._results: dict[tuple[str, str], Result] = {}
        self._unbootable: dict[str, TestbedUnavailable] = {}
        self._running: tuple[str, Iterator[Result]] | None = None

    def result(self, machine: Machine, case: str) -> Result:
        """The result of one case; boots the machine when it is the first one."""
        name = machine.name
        if name in self._unbootable:
            raise self._unbootable[name]
        if (name, case) not in self._results and (
            self._running is None or self._running[0] != name
        ):
            self._finish()
            run = Run(self._parts, machine, self._selected[name])
            self._running = name, iter(run)
        try:
            while (name, case) not in self._results:
                assert self._running is not None
                result = next(self._running[1])
                self._results[name, result.case] = result
        except TestbedUnavailable as error:
            self._unbootable[name] = error
            self._running = None
            raise
        if all((name, each) in self._results for each in self._selected[name]):
            # Nothing is left to ask of it, and the lock that it holds may be what the next test
            # waits for: the Kubernetes node in a virtual machine runs in this process too.
            self._finish()
        return self._results[name, case]

    def _finish(self) -> None:
        """Let the machine before come to its end, and keep what it says."""
        if self._running is None:
            return
        name, results = self._running
        self._running = None
        try:
            for result in results:
                self._results[name, result.case] = result
        except TestbedUnavailable as error:
            self._unbootable[name] = error

    def close(self) -> None:
        if self._running is not None:
            self._running[1].close()  # type: ignore[attr-defined]  # it is a generator


def unavailable(reason: str) -> None:
    """Skip, or fail where machines must be there."""
    if required():
        pytest.fail(f"NRI_NUMA_REQUIRE_VM=1, but {reason}", pytrace=False)
    pytest.skip(reason)


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
        unavailable(str(error))
        raise
    runs = MachineRuns(parts, selected)
    yield runs
    runs.close()
