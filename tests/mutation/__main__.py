"""Do tests notice when the code is wrong? ``python -m tests.mutation`` makes it wrong and looks.

    make mutation BUDGET=600 ONLY=nri_numa/engine/place

One change at a time: an operator, a number, a condition, a statement that is left out. The tests
that go through the changed line are run until one fails. Mutants are drawn at random over all
modules, so that a run that is cut short is a sample; what was found is kept in ``build/mutation``,
and the next run goes on from there. ``--seed`` draws in another order: a sample in an order for
which nobody has written tests says more of the rest. A module that changed begins anew, survivors
are tried again with ``--again``.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.reached import FIRST, THEN, Choice, NotGreen, Reached
from tests.mutation.rooms import modules
from tests.mutation.session import SURVIVED, Work, tried

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_TRIED, NOT_REACHED = "not tried", "not reached"
SEED = 19
"""Of the order in which mutants are drawn, so that a run goes on where another ended."""


class Results:
    """What was found about mutants so far, by their keys; a line of a file each."""

    def __init__(self, work: Path) -> None:
        self._file = work / "results.jsonl"
        self.by_key: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.by_key[record["key"]] = record

    def outcome(self, mutant: Mutant) -> str:
        return str(self.by_key.get(mutant.key, {}).get("outcome", NOT_TRIED))

    def add(self, mutant: Mutant, outcome: str, by: str, tests: int) -> None:
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
            "tests": tests,
        }
        self.by_key[mutant.key] = record
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def trying(some: Sequence[Mutant], reached: Reached, results: Results, end: float) -> Work:
    """Hand out mutants until the time is over, and keep what became of them."""
    choice = Choice(reached.costs)
    for one in results.by_key.values():
        if one["by"]:
            choice.noticed(one["module"], one["by"])
    for at_import in (False, True):  # first nothing changed, twice: such tests must not fail
        module = some[0].module
        tests = choice.of(module, reached.through(module))[:20]
        outcome, by = yield Mutant(module, "none", 0, "", "", ""), tests, at_import
        if outcome != SURVIVED:
            raise NotGreen(f"{outcome} without any mutant: {by}")
    for mutant in some:
        if time.monotonic() > end:
            break
        module, line = mutant.module, mutant.line
        outcome, by, tests = NOT_REACHED, "", choice.of(module, reached.tests(module, line))
        if tests:
            outcome, by = yield mutant, tests, reached.imported(module, line)
        if by:
            choice.noticed(module, by)
        results.add(mutant, outcome, by, len(tests))


def run(only: Sequence[str], budget_s: float, work: Path, *, again: bool, seed: int = SEED) -> int:
    """Try mutants until the time is over, and print the report.

    `only`: modules or directories; everything when empty.
    `budget_s`: seconds.
    """
    rooms = modules(REPOSITORY, only)
    if not rooms:
        print(f"error: no module of these is below {' '.join(only)}", file=sys.stderr)
        return 2
    results = Results(work)
    known = {module: mutants(REPOSITORY, module, work) for module in rooms}
    everything = [one for some in known.values() for one in some]
    random.Random(seed).shuffle(everything)
    old = {NOT_TRIED} if not again else {SURVIVED, NOT_REACHED}
    wanted = [one for one in everything if results.outcome(one) in old]
    asked = sorted({each for tests in rooms.values() for each in tests})
    began = time.time()
    try:
        reached = Reached(REPOSITORY, work, asked, list(rooms))
    except NotGreen as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if wanted:
        said = work / "session.log"
        tries = trying(wanted, reached, results, time.monotonic() + budget_s)
        if status := tried(REPOSITORY, asked, tries, said):
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
    print("\n| module | mutants | tried | noticed | score |\n|---|---|---|---|---|")
    everything = []
    for module, some in known.items():
        found = [results.by_key[one.key] for one in some if one.key in results.by_key]
        everything += found
        if some:
            _row(f"`{module}`", len(some), found)
    count = sum(map(len, known.values()))
    _row("all", count, everything)
    _row("of these in this run", count, [one for one in everything if one["at"] >= began])
    print(f"\nSurvivors (of many tests {FIRST[0]}, then {THEN[0]} more):\n")
    for one in sorted(everything, key=lambda each: (each["module"], each["line"])):
        if not _noticed(one):
            print(
                f"{one['module']}:{one['line']} {one['outcome']} "
                f"({one['operator']}, {one['tests']} tests)\n"
                f"    - {one['before']}\n    + {one['after']}"
            )


def _noticed(one: dict[str, Any]) -> bool:
    return one["outcome"] not in (SURVIVED, NOT_REACHED)


def _row(name: str, known: int, found: Sequence[dict[str, Any]]) -> None:
    noticed = sum(map(_noticed, found))
    score = f"{100 * noticed / len(found):.0f} %" if found else "-"
    print(f"| {name} | {known} | {len(found)} | {noticed} | {score} |")


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], help="modules or directories, such as nri_numa/store"
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds (default 600)")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/mutation")
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"of the order of the mutants (default {SEED})"
    )
    args = parser.parse_args()
    return run(args.only, args.budget, args.work, again=args.again, seed=args.seed)


if __name__ == "__main__":
    sys.exit(main())
