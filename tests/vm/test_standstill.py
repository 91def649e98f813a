"""A case that failed is tried again where the machine stood still, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beds.vm_records import Outcome, Result
from tests.vm.standstill import STEP_S, TOO_LONG_S, TRIES, Standstill, insist


class Host:
    """A clock that goes on for longer than anybody slept, as often as it is told."""

    def __init__(self, *late: float) -> None:
        self.now = 100.0
        self._late = iter(late)

    def sleep(self, seconds: float) -> None:
        """What was asked for, and how late the turn came."""
        self.now += seconds + next(self._late, 0.0)


def _result(outcome: Outcome, detail: str = "", *, final: bool = False) -> Result:
    return Result(case="churn", outcome=outcome, seconds=1.0, detail=detail, final=final)


def _run(results: list[Result], late: list[float]) -> tuple[Result, list[str]]:
    """The case's results one after the other, each with how late the machine was meanwhile."""
    host = Host(*late)
    standstill = Standstill(lambda: host.now, host.sleep)
    left: Iterator[Result] = iter(results)

    def attempt() -> Result:
        standstill.look()
        return next(left)

    said: list[str] = []
    return insist(attempt, standstill, said.append), said


def test_the_longest_is_told_once() -> None:
    host = Host(0.25, 3.0, 0.5)
    standstill = Standstill(lambda: host.now, host.sleep)
    for _ in range(3):
        standstill.look()
    assert standstill.longest() == pytest.approx(3.0)
    assert standstill.longest() == 0.0
    standstill.look()
    assert standstill.longest() == pytest.approx(0.0)
    assert host.now == pytest.approx(100 + 4 * STEP_S + 3.75)


def test_a_case_that_passed_is_not_tried_again_however_slow_it_was() -> None:
    result, said = _run([_result(Outcome.PASSED)], [10.0])
    assert (result.outcome, result.notes) == (Outcome.PASSED, [])
    assert said == ["churn passed, stood still for 10.00 s at most"]


@pytest.mark.parametrize(
    ("result", "late"),
    [
        pytest.param(_result(Outcome.FAILED, "wrong CPU"), TOO_LONG_S / 2, id="it was in time"),
        pytest.param(_result(Outcome.FAILED, "twice", final=True), 10.0, id="must never be"),
    ],
)
def test_a_case_fails_at_once(result: Result, late: float) -> None:
    assert _run([result], [late])[0] == result


def test_a_case_that_failed_while_the_machine_stood_still_is_tried_again_and_says_so() -> None:
    results = [_result(Outcome.FAILED, "Traceback\nshim gone"), _result(Outcome.PASSED)]
    result, said = _run(results, [4.0, 0.0])
    assert result.outcome is Outcome.PASSED
    assert result.notes == [
        "tried again, since the machine stood still for 4.0 s:",
        "Traceback",
        "shim gone",
    ]
    assert len(said) == 2


def test_a_machine_that_always_stands_still_gets_its_failure_in_the_end() -> None:
    failures = [_result(Outcome.FAILED, f"try {n}") for n in range(TRIES)]
    result, said = _run(failures, [4.0] * TRIES)
    assert (result.outcome, result.detail, len(said)) == (Outcome.FAILED, "try 2", TRIES)
    assert [line for line in result.notes if line.startswith("try ")] == ["try 0", "try 1"]
