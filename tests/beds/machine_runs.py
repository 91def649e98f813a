"""The virtual machines of a session, one after the other."""

from collections.abc import Iterator

from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import Parts, Run
from tests.beds.vm_records import Result
from tests.machines.vm_machine import Machine


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
            self._running = name, iter(Run(self._parts, machine, self._selected[name]))
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
