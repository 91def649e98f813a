"""In which order mutants are drawn, and with which tests survivors are asked again."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from tests.mutation import session
from tests.mutation.__main__ import Results, Tried, drawn
from tests.mutation.mutants import Mutant
from tests.mutation.reached import MOST_TESTS, Reached, at_import
from tests.mutation.session import KILLED, SURVIVED, TIMEOUT

MUTANTS = [Mutant("nri_numa/engine/x.py", "op", n, "a", "b", f"code {n}") for n in range(50)]
TESTS = [f"tests/unit/test_x.py::test_{n}" for n in range(MOST_TESTS + 7)]


class Lines:
    """All tests go through each line."""

    costs: ClassVar[dict[str, float]] = {}

    def tests(self, module: str, line: int) -> list[str]:
        return list(TESTS)

    def imported(self, module: str, line: int) -> bool:
        return False

    def through(self, module: str) -> list[str]:
        return list(TESTS)


class Values(Lines):
    """A module without functions: no test goes through a line, since all import it."""

    costs: ClassVar[dict[str, float]] = dict.fromkeys(TESTS, 0.0)

    def tests(self, module: str, line: int) -> list[str]:
        return []

    def imported(self, module: str, line: int) -> bool:
        return True

    def through(self, module: str) -> list[str]:
        return []


def asked(
    tmp_path: Path, outcomes: Sequence[str], lines: Lines | None = None
) -> tuple[list[list[str]], Results]:
    """The tests that one mutant is asked with, where they say this one after the other."""
    results = Results(tmp_path, 0)
    trying = Tried(MUTANTS[:1], cast(Reached, lines or Lines()), results, float("inf"), again=False)
    seen, left = [], list(outcomes)
    for mutant, tests, _ in trying.each():
        if mutant.operator == "none":
            trying.found(mutant, SURVIVED, "", tests)
            continue
        outcome = left.pop(0)
        trying.found(mutant, outcome, tests[0] if outcome == KILLED else "", tests)
        seen.append(tests)
    return seen, results


def test_what_runs_at_an_import_is_all_that_is_in_no_body() -> None:
    function = "@kept\ndef f(\n    most=A,\n):\n    return (\n        most\n    )\n"
    source = f"A = 1\n\n{function}\nclass C:\n    one = 1\n\n    def two(self): return 2\n"
    assert at_import(source) == {1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 15}


def test_a_seed_is_an_order_of_its_own() -> None:
    assert drawn(MUTANTS) == drawn(MUTANTS, 19)
    assert drawn(MUTANTS, 20) == drawn(MUTANTS, 20)
    assert drawn(MUTANTS, 20) != drawn(MUTANTS, 19)
    assert sorted(one.line for one in drawn(MUTANTS, 20)) == list(range(50))


def test_a_survivor_is_asked_with_the_tests_that_were_not_drawn(tmp_path: Path) -> None:
    (first, more), results = asked(tmp_path, (SURVIVED, KILLED))
    assert len(first) == MOST_TESTS
    assert sorted(first + more) == sorted(TESTS)
    assert results.by_key[MUTANTS[0].key]["outcome"] == KILLED


def test_a_survivor_of_all_tests_stays_one(tmp_path: Path) -> None:
    _, results = asked(tmp_path, (SURVIVED, SURVIVED))
    assert results.by_key[MUTANTS[0].key]["outcome"] == SURVIVED
    assert len(results.asked(MUTANTS[0])) == len(TESTS)
    kept = [json.loads(line) for line in (tmp_path / "results-0.jsonl").read_text().splitlines()]
    assert [one["tests"] for one in kept] == [MOST_TESTS, len(TESTS)]


def test_values_are_asked_about_with_all_tests(tmp_path: Path) -> None:
    (first, more), _ = asked(tmp_path, (SURVIVED, KILLED), Values())
    assert sorted(first + more) == sorted(TESTS)


def test_who_is_noticed_is_asked_once(tmp_path: Path) -> None:
    seen, _ = asked(tmp_path, (KILLED,))
    assert len(seen) == 1


def test_what_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.001)
    monkeypatch.setattr(session, "QUIET_S", 0.003)

    def hangs(tell: Callable[[], None]) -> bool:
        signal.pause()
        return True

    assert session.forked(hangs, 5) == (TIMEOUT, 0)


def test_a_run_that_is_stopped_and_goes_on_has_missed_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who measures stops everything for minutes; no test hangs for that."""
    really, looks = select.select, []

    def after_a_stop(*args: Any) -> Any:
        looks.append(args)
        return ([], [], []) if len(looks) == 1 else really(*args)

    monkeypatch.setattr(session.select, "select", after_a_stop)

    def ends(tell: Callable[[], None]) -> bool:
        tell()
        return True

    assert session.forked(ends, 5) == (SURVIVED, 1)
    assert len(looks) > 1
