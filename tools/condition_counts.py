"""Count the branches and conditions of each function of the engine; fail above `MAX_CONDITIONS`.

``python -m tools.condition_counts`` counts what ruff's C901 does not see as well: each further
operand of ``and`` and ``or``, conditional expressions, and the ``if`` of a comprehension. What is
in a nested function counts for the one around it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_CONDITIONS: Final = 20
PACKAGE: Final = Path("nri_numa/engine")
EXEMPT: Final = {
    "preferred_mask": "mathematics, held to an oracle",
}
"""Functions that may be above, and why."""
_BRANCHES: Final = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While),
    *(ast.ExceptHandler, ast.match_case),
)


def count_conditions(function: ast.AST) -> int:
    """Branches and conditions of a function, and one."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def complex_functions() -> Iterator[tuple[int, str, str]]:
    """Count, name and place of each function that is above the limit."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = count_conditions(node)
                if count > MAX_CONDITIONS:
                    yield count, node.name, f"{path}:{node.lineno}"


def main() -> int:
    """Print those that are above, and exemptions that nothing needs; 1 where there are any."""
    functions = [*complex_functions()]
    problems = [
        f"{place}: {name} has {count} branches and conditions, expected at most {MAX_CONDITIONS}"
        for count, name, place in functions
        if name not in EXEMPT
    ]
    names = {name for _, name, _ in functions}
    problems += [
        f"{name}: is exempt and not above the limit" for name in EXEMPT if name not in names
    ]
    for problem in problems:
        print(problem)
    print(f"conditions: {len(functions)} functions above {MAX_CONDITIONS}, {len(EXEMPT)} exempt")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
