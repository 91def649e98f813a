"""Do tests notice when the code is wrong? ``python -m tests.mutation`` makes it wrong and looks.

    make mutation BUDGET=600 ONLY=nri_numa/engine/place

One change at a time: an operator, a number, a condition, a statement that is left out. The tests
that go through the changed line are run until one fails. Mutants are drawn at random over all
modules, so that a run that is cut short is a sample; what was found is kept in ``build/mutation``,
and the next run goes on from there. ``--seed`` draws in another order: a sample in an order for
which nobody has written tests says more of the rest. A mutant that survives the tests that were
drawn is asked with more of those that go through the line, at once. A module that changed begins
anew, survivors are tried again with ``--again``, with tests that were not asked yet.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.reached import MORE_TESTS, MOST_TESTS, Choice, NotGreen, Reached, mark
from tests.mutation.rooms import deterministic, modules
from tests.mutation.session import SURVIVED, tried

REPOSITORY = Path(__file__).resolve().parents[2]
NOTICED = ("killed", "timeout")
SEED = 19
"""Of the order in which mutants are drawn, so that a run goes on where another ended."""


class Results:
    """What was found about mutants so far, by their keys; a line of a file each.

    Args:
        part: which of several runs at once this is; each has a file of its own.
    """

    def __init__(self, work: Path, part: int) -> None:
        self._file = work / f"results-{part}.jsonl"
        self._work = work
        self.by_key: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        for file in sorted(
            self._work.glob("results*.jsonl"), key=lambda each: each.stat().st_mtime
        ):
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                known = self.by_key.get(record["key"])
                if known is None or known["at"] < record["at"]:
                    self.by_key[record["key"]] = record

    def add(self, mutant: Mutant, outcome: str, by: str, tests: Sequence[str]) -> None:
        """Keep one; of a survivor also which tests did not notice it."""
        asked: set[int] = set()
        if outcome == SURVIVED:
            asked.update(self.asked(mutant), map(mark, tests))
        record = {
            "at": time.time(),
            "key": mutant.key,
            "module": mutant.module,
            "line": mutant.line,
            "operator": mutant.operator,
            "before": mutant.before,
            "after": mutant.after,
            "outcome": outcome,
            "by": by,
            "tests": len(asked) or len(tests),
            "asked": sorted(asked),
        }
        self.by_key[mutant.key] = record
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def asked(self, mutant: Mutant) -> Sequence[int]:
        """Which tests did not notice a mutant before, as far as that is known."""
        return self.by_key.get(mutant.key, {}).get("asked", ())


class Tried:
    """Hands out mutants until the time is over."""

    def __init__(
        self, some: Sequence[Mutant], reached: Reached, results: Results, end: float, *, again: bool
    ) -> None:
        self._some = some
        self._reached = reached
        self._results = results
        self._end = end
        self._again = again
        self._choice = Choice(reached.costs)
        for one in results.by_key.values():
            if one["by"]:
                self._choice.noticed(one["module"], one["by"])

    def each(self) -> Iterator[tuple[Mutant, list[str], bool]]:
        """First nothing changed, twice: such tests must not fail."""
        for at_import in (False, True):
            module = self._some[0].module
            unchanged = Mutant(module, "none", 0, "", "", "")
            tests = self._choice.of(module, self._reached.through(module))[:20]
            yield unchanged, tests, at_import
        for mutant in self._some:
            if time.monotonic() > self._end:
                break
            module, line = mutant.module, mutant.line
            at_import = self._reached.imported(module, line)
            if at_import:
                # Everybody sees what an import made; a module of values has no line of its own.
                tests = self._reached.through(module) or sorted(self._reached.costs)
            else:
                tests = self._reached.tests(module, line)
            if tests:
                before = self._results.asked(mutant) if self._again else None
                if chosen := self._choice.of(module, tests, before):
                    yield mutant, chosen, at_import
                if before is None and self._survived(mutant):
                    # Few survive, so that more of them costs less than it tells.
                    asked = self._results.asked(mutant)
                    if chosen := self._choice.of(module, tests, asked):
                        yield mutant, chosen, at_import
            else:
                self._results.add(mutant, "not reached", "", ())

    def _survived(self, mutant: Mutant) -> bool:
        return self._results.by_key.get(mutant.key, {}).get("outcome") == SURVIVED

    def found(self, mutant: Mutant, outcome: str, by: str, tests: Sequence[str]) -> None:
        """Keep it; without a change nothing may be noticed."""
        if mutant.operator == "none":
            if outcome != SURVIVED:
                raise NotGreen(f"{outcome} without any mutant: {by}")
            return
        if by:
            self._choice.noticed(mutant.module, by)
        self._results.add(mutant, outcome, by, tests)


def drawn(everything: Sequence[Mutant], seed: int = SEED) -> list[Mutant]:
    """All mutants, in an order that only they and the seed decide."""
    order = list(everything)
    random.Random(seed).shuffle(order)
    return order


def run(
    only: Sequence[str],
    budget_s: float,
    work: Path,
    *,
    again: bool,
    part: tuple[int, int] = (0, 1),
    seed: int = SEED,
) -> int:
    """Try mutants until the time is over, and print the report.

    `only`: modules or directories; everything when empty.
    `budget_s`: seconds.
    `part`: which of how many runs at once this is, from 0.
    """
    rooms = modules(REPOSITORY, only)
    if not rooms:
        print(f"error: no module of these is below {' '.join(only)}", file=sys.stderr)
        return 2
    results = Results(work, part[0])
    known = {module: mutants(REPOSITORY, module, work) for module in rooms}
    everything = drawn([one for some in known.values() for one in some], seed)
    wanted = [
        mutant
        for mutant in everything[part[0] :: part[1]]
        if (
            results.by_key.get(mutant.key, {"outcome": NOTICED[0]})["outcome"] not in NOTICED
            if again
            else mutant.key not in results.by_key
        )
    ]
    asked = sorted({each for tests in rooms.values() for each in tests})
    began = time.time()
    try:
        reached = Reached(REPOSITORY, work, asked, list(rooms))
    except NotGreen as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if wanted:
        end = time.monotonic() + budget_s
        trying = Tried(wanted, reached, results, end, again=again)
        said = work / f"session-{part[0]}.log"
        if status := tried(REPOSITORY, asked, trying, said, lambda each: not deterministic(each)):
            print(f"error: the tests ended with {status}, see {said}", file=sys.stderr)
            return 1
        results.read()
    report(known, results, began)
    return 0


def report(known: dict[str, list[Mutant]], results: Results, began: float) -> None:
    """Print the score of each module, and who survived.

    `began`: when this run did, by the wall clock; what it tried is told apart, since these
    mutants were drawn after the tests had been written.
    """
    total: Counter[str] = Counter()
    now: Counter[str] = Counter()
    print("\n| module | mutants | tried | noticed | score |\n|---|---|---|---|---|")
    survivors = []
    for module, some in known.items():
        found = [results.by_key[one.key] for one in some if one.key in results.by_key]
        noticed = sum(one["outcome"] in NOTICED for one in found)
        total.update(mutants=len(some), tried=len(found), noticed=noticed)
        fresh = [one for one in found if one["at"] >= began]
        now.update(tried=len(fresh), noticed=sum(one["outcome"] in NOTICED for one in fresh))
        survivors += [one for one in found if one["outcome"] not in NOTICED]
        if some:
            print(_row(f"`{module}`", len(some), len(found), noticed))
    print(_row("all", total["mutants"], total["tried"], total["noticed"]))
    print(_row("of these in this run", total["mutants"], now["tried"], now["noticed"]))
    print(
        f"\nSurvivors (of many tests {MOST_TESTS}, then {MORE_TESTS} more; --again asks others):\n"
    )
    for one in sorted(survivors, key=lambda each: (each["module"], each["line"])):
        print(_line(one))


def _row(name: str, known: int, tried: int, noticed: int) -> str:
    score = f"{100 * noticed / tried:.0f} %" if tried else "-"
    return f"| {name} | {known} | {tried} | {noticed} | {score} |"


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['module']}:{one['line']} {one['outcome']} "
        f"({one['operator']}, {one['tests']} tests)\n"
        f"    - {one['before']}\n    + {one['after']}"
    )


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], help="modules or directories, such as nri_numa/store"
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds (default 600)")
    parser.add_argument("--again", action="store_true", help="try survivors again with other tests")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/mutation")
    parser.add_argument(
        "--part", default="0/1", help="of runs at the same time, such as 0/2 and 1/2"
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"of the order of the mutants (default {SEED})"
    )
    args = parser.parse_args()
    number, _, of = args.part.partition("/")
    part = (int(number), int(of))
    return run(args.only, args.budget, args.work, again=args.again, part=part, seed=args.seed)


if __name__ == "__main__":
    sys.exit(main())
