"""A short walk of every fuzz target, the same one every time; `python -m tests.fuzz` goes on."""

import pytest

from tests.fuzz.__main__ import case
from tests.fuzz.every import EVERY
from tests.fuzz.targets import Target

CASES = {"protocol": 40, "assigned": 60, "checkpoint": 60, "config": 60}


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_a_short_walk(kind: type[Target]) -> None:
    """No exception but the documented ones, within bounded time; and not always the same end."""
    target = kind()
    try:
        target.replay()
        outcomes = {case(target, seed) for seed in range(CASES.get(kind.name, 120))}
    finally:
        target.close()
    assert len(outcomes) > 1
