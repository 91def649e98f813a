"""Which tests go through a line, what they cost, and which of them are asked.

A plugin of pytest as well, ``-p tests.mutation.reached``, which writes down what each test costs.
"""

import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import coverage
import pytest

from tests.mutation.rooms import strictest

FIRST: Final = 200, 4.0
"""For one mutant. Of more that go through the line so many are drawn, and for so many seconds of
CPU, those of the module first; at least one is."""
THEN: Final = 600, 12.0
"""And so many more, those first that compare the module with all that it should do."""
DEAR: Final = 0.5
"""Seconds of CPU of a test that comes after all others."""

OPTIONS: Final = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--no-header"),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)
_RULES: Final = "[run]\nbranch = false\nsource = nri_numa\nomit = */pb/*\n"


_costs: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Seconds of CPU, by the id of the test."""
    started = time.process_time()
    result = yield
    _costs[item.nodeid] = round(time.process_time() - started, 4)
    return result


def pytest_sessionfinish() -> None:
    """Into the file that ``MUTATION_COSTS`` names, where one does."""
    if file := os.environ.get("MUTATION_COSTS"):
        Path(file).write_text(json.dumps(_costs), encoding="utf-8")


class Reached:
    """Which test goes through which line, as coverage recorded it."""

    def __init__(
        self, repository: Path, work: Path, asked: Sequence[str], modules: Sequence[str]
    ) -> None:
        self._repository = repository
        self._work = work
        self.costs: dict[str, float] = {}
        data = [self._recorded(each) for each in asked]
        # All of it now: after a fork, coverage would begin its files anew.
        self._lines = {module: _lines(data, repository / module) for module in modules}
        self._places = {
            module: _places((repository / module).read_text(encoding="utf-8")) for module in modules
        }

    def tests(self, module: str, line: int) -> list[str]:
        """The tests that go through a line or its statement, by their ids.

        What runs when the module is imported is for every test that goes through it: coverage tells
        of such a line the one test that happened to import the module first, or none.
        """
        if self.imported(module, line):
            return self.through(module) or sorted(self.costs)
        lines = self._lines[module]
        within = {line} if line in lines else self._places[module][line]
        return sorted(set().union(*(lines.get(each, set()) for each in within)))

    def imported(self, module: str, line: int) -> bool:
        """Whether the line is in no function's body: it runs once, at the import."""
        return line not in self._places[module]

    def through(self, module: str) -> list[str]:
        """The tests that go through any line of a module, by their ids."""
        return sorted(set().union(*self._lines[module].values()))

    def _recorded(self, asked: str) -> coverage.CoverageData:
        """Recorded again when the package changed; of tests only the files that did."""
        name = asked.replace("/", ".")
        file, costs, seen = (self._work / f"{kind}-{name}" for kind in ("coverage", "costs", "of"))
        top = self._repository / asked
        tests = [top] if top.is_file() else sorted(top.rglob("test_*.py"))
        now = {
            "package": _digest(sorted((self._repository / "nri_numa").rglob("*.py"))),
            **{test.relative_to(self._repository).as_posix(): _digest([test]) for test in tests},
        }
        then = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {}
        if not file.exists() or then.get("package") != now["package"]:
            file.unlink(missing_ok=True)
            self._record([asked], file, costs)
        elif changed := [each for each, content in now.items() if then.get(each) != content]:
            self._record(changed, file, costs)
        seen.write_text(json.dumps(now), encoding="utf-8")
        self.costs.update(json.loads(costs.read_text(encoding="utf-8")))
        data = coverage.CoverageData(str(file))
        data.read()
        return data

    def _record(self, asked: Sequence[str], file: Path, costs: Path) -> None:
        print(f"which lines does {' '.join(asked)} go through?", flush=True)
        rules, unfinished = self._work / "coveragerc", Path(f"{file}.unfinished")
        said, new = Path(f"{file}.log"), Path(f"{file}.costs")
        rules.write_text(_RULES, encoding="utf-8")
        known = json.loads(costs.read_text(encoding="utf-8")) if file.exists() else {}
        if file.exists():
            shutil.copy(file, unfinished)
        else:
            unfinished.unlink(missing_ok=True)
        with said.open("wb") as output:
            ended = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", *OPTIONS, "-p", "tests.mutation.reached"),
                    *asked,
                    *("--cov=nri_numa", f"--cov-config={rules}", "--cov-context=test"),
                    *("--cov-append", "--cov-report="),
                ],
                env={**os.environ, "COVERAGE_FILE": str(unfinished), "MUTATION_COSTS": str(new)},
                cwd=self._repository,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if ended.returncode:
            raise NotGreen(f"{' '.join(asked)}: a test fails without any mutant, see {said}")
        costs.write_text(
            json.dumps({**known, **json.loads(new.read_text(encoding="utf-8"))}), encoding="utf-8"
        )
        unfinished.replace(file)


class NotGreen(Exception):
    """Tests fail as the code is, so that nothing can be said of mutants."""


def _digest(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(file.as_posix().encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:20]


def _lines(data: Sequence[coverage.CoverageData], module: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for one in data:
        for line, contexts in one.contexts_by_lineno(str(module)).items():
            tests = {context.partition("|")[0] for context in contexts if context}
            found.setdefault(line, set()).update(tests)
    return found


def _places(source: str) -> dict[int, range]:
    """By each line of a function's body, those of the innermost statement, or of its head."""
    inside: set[int] = set()
    found: dict[int, range] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones come first
        if isinstance(node, ast.stmt):
            body, after = getattr(node, "body", None), (node.end_lineno or node.lineno) + 1
            lines = range(node.lineno, max(body[0].lineno if body else after, node.lineno + 1))
            found.update(dict.fromkeys(lines, lines))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside.update(range(node.body[0].lineno, after))
    return {line: found.get(line, range(line, line + 1)) for line in inside}


class Choice:
    """In which order and how many of the tests are asked.

    Those that noticed other mutants of the module come first, then those that compare it with all
    that it should do, those named like it, and of the others those that cost least.

    Args:
        costs: seconds of CPU, by the id of a test.
    """

    def __init__(self, costs: dict[str, float]) -> None:
        self._costs = costs
        self._noticed: dict[str, Counter[str]] = {}

    def noticed(self, module: str, test: str) -> None:
        self._noticed.setdefault(module, Counter())[test] += 1

    def of(self, module: str, tests: Sequence[str]) -> list[str]:
        counted, best = self._noticed.get(module, Counter()), strictest(module)
        stem = Path(module).stem
        draw = random.Random(module)  # the same for every run
        drawn = {test: draw.random() for test in tests}

        def order(test: str) -> tuple[object, ...]:
            file, cost = test.partition("::")[0], self._costs.get(test, 0.0)
            strange = file not in best, stem not in file
            return cost > DEAR, -counted[test], *strange, int(cost * 100), drawn[test]

        first = self._within(sorted(tests, key=order), *FIRST)
        rest = sorted(set(tests).difference(first), key=order)
        rest.sort(key=lambda test: test.partition("::")[0] not in best)
        return [*first, *self._within(rest, *THEN)]

    def _within(self, tests: Sequence[str], most: int, most_s: float) -> list[str]:
        spent = list(accumulate(self._costs.get(test, 0.0) for test in tests[:most]))
        return list(tests[: max(1, bisect_right(spent, most_s))])
