"""Mutants are exchanged in a running program where that is the same as to import them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutation.live import Functions

SOURCE = """
import functools

LIMIT = 3

def small(number, most=LIMIT):
    return number < most

class Counter:
    start = 1

    def __init__(self):
        self.count = self.start

    @property
    def twice(self):
        return self.count * 2

    @functools.lru_cache
    def adder(self, by):
        def add(number):
            return number + by
        return add

two_more = Counter().adder(2)
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """The source, imported."""
    path = tmp_path / "counting.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("counting", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def exchanged(module: ModuleType, before: str, after: str) -> bool:
    """Whether this difference was put into the functions."""
    assert SOURCE.count(before) == 1
    path = Path(str(module.__file__))
    return Functions(path.parent).replace(path, SOURCE, SOURCE.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "asked", "was", "becomes"),
    [
        ("number < most", "number <= most", lambda m: m.small(3), False, True),
        ("self.count * 2", "self.count * 3", lambda m: m.Counter().twice, 2, 3),
        ("self.count = self.start", "pass\n", lambda m: hasattr(m.Counter(), "count"), True, False),
        ("number + by", "number - by", lambda m: m.two_more(5), 7, 3),
    ],
    ids=["function", "property", "left out", "closure made at import"],
)
def test_a_function_gets_its_mutant(
    module: ModuleType,
    before: str,
    after: str,
    asked: Callable[[ModuleType], object],
    was: object,
    becomes: object,
) -> None:
    assert asked(module) == was
    assert exchanged(module, before, after)
    assert asked(module) == becomes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("start = 1", "start = 2"),
        ("most=LIMIT", "most=-LIMIT"),
        ("adder(2)", "adder(3)"),
    ],
    ids=["constant", "attribute of a class", "default", "call"],
)
def test_what_runs_at_import_is_left_to_an_import(
    module: ModuleType, before: str, after: str
) -> None:
    assert not exchanged(module, before, after)
    assert not module.small(3)
    assert module.Counter().twice == 2
    assert module.two_more(5) == 7
