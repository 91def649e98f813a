"""Tests that need more CPUs than a machine has are proven elsewhere, and CI knows where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.selection import booted, unproven

REPOSITORY = Path(__file__).resolve().parents[2]


def ci_environment() -> dict[str, str]:
    """What ``.ci/run`` sets for the virtual machines."""
    text = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    return dict(re.findall(r"\b(NRI_NUMA_\w+)=(\S+)", text))


def marks() -> Iterator[tuple[str, ast.Call]]:
    """(where, call) of each ``pytest.mark.cpus(…)`` in the end-to-end tests."""
    for file in sorted((REPOSITORY / "tests/e2e").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.cpus":
                yield f"{file.name}:{node.lineno}", node


MARKS = dict(marks())


def test_there_are_such_tests() -> None:
    assert MARKS


@pytest.mark.parametrize("where", MARKS)
def test_what_needs_more_cpus_is_proven_on_a_machine_that_ci_boots(where: str) -> None:
    call = MARKS[where]
    (count,) = (ast.literal_eval(each) for each in call.args)
    keys = {key.arg: ast.literal_eval(key.value) for key in call.keywords}
    if count <= 2:
        return  # CI has two: never left out there
    assert unproven(keys.get("proven_by", ()), booted(ci_environment())) == ""
