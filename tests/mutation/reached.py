"""Which tests go through a line, what they cost, and which of them are asked."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import coverage

from tests.mutation.rooms import strictest

MOST_TESTS: Final = 200
"""For one mutant. Of more that go through the line so many are drawn, those of the module first;
survivors are tried again with others."""
MOST_SECONDS: Final = 4.0
"""Of CPU, for the tests that are drawn; at least one is."""
MORE_TESTS: Final = 600
MORE_SECONDS: Final = 12.0
"""The same for survivors, which are asked with others at once, and again with `--again`."""

OPTIONS: Final = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--no-header"),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)
_RULES: Final = "[run]\nbranch = false\nsource = nri_numa\nomit = */pb/*\n"


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
        self._at_import = {
            module: at_import((repository / module).read_text(encoding="utf-8"))
            for module in modules
        }
        self._statements = {
            module: _statements((repository / module).read_text(encoding="utf-8"))
            for module in modules
        }

    def tests(self, module: str, line: int) -> list[str]:
        """The tests that go through a line or its statement, by their ids."""
        return sorted(
            {context.partition("|")[0] for context in self._contexts(module, line) if context}
        )

    def imported(self, module: str, line: int) -> bool:
        """Whether the line runs when the module is imported, and so for every test.

        Coverage tells of such a line the one test that happened to import the module first, or
        none: whoever comes later sees what the import made all the same.
        """
        return line in self._at_import[module]

    def through(self, module: str) -> list[str]:
        """The tests that go through any line of a module, by their ids."""
        contexts = set().union(*self._lines[module].values())
        return sorted({context.partition("|")[0] for context in contexts if context})

    def _contexts(self, module: str, line: int) -> set[str]:
        lines = self._lines[module]
        if line in lines:
            return lines[line]
        within = self._statements[module].get(line, range(line, line + 1))
        return set().union(*(lines.get(each, set()) for each in within))

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
                    *(sys.executable, "-m", "pytest", *OPTIONS, "-p", "tests.mutation.costs"),
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
            found.setdefault(line, set()).update(contexts)
    return found


def at_import(source: str) -> frozenset[int]:
    """The lines that are in no function's body: they run once, when the module is imported."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(range(1, source.count("\n") + 2)) - inside


def _statements(source: str) -> dict[int, range]:
    """The lines of the innermost statement, or of its head, by each of them."""
    found: dict[int, range] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones come first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            lines = range(node.lineno, max(end, node.lineno + 1))
            found.update(dict.fromkeys(lines, lines))
    return found


def mark(test: str) -> int:
    """Stands for a test where many of them are kept."""
    return zlib.crc32(test.encode())


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

    def of(
        self, module: str, tests: Sequence[str], before: Sequence[int] | None = None
    ) -> list[str]:
        again, known = before is not None, set(before or ())
        tests = [test for test in tests if mark(test) not in known]
        counted, best = self._noticed.get(module, Counter()), strictest(module)
        stem = Path(module).stem
        draw = random.Random(module)  # the same for every run
        drawn = {test: draw.random() for test in tests}

        def order(test: str) -> tuple[object, ...]:
            file = test.partition("::")[0]
            strict = file in best
            dear = self._costs.get(test, 0.0) > MOST_SECONDS / 8 and not (strict and again)
            cheap = int(self._costs.get(test, 0.0) * 100)  # so more of them are asked in the time
            return dear, -counted[test], not strict, stem not in file, cheap, drawn[test]

        tests.sort(key=order)
        if again:
            return self._within(tests, MORE_TESTS, MORE_SECONDS)
        return self._within(tests, MOST_TESTS, MOST_SECONDS)

    def _within(self, tests: Sequence[str], most: int, most_s: float) -> list[str]:
        chosen, spent = list(tests[:1]), sum(self._costs.get(test, 0.0) for test in tests[:1])
        for test in tests[1:most]:
            spent += self._costs.get(test, 0.0)
            if spent > most_s:
                break
            chosen.append(test)
        return chosen
