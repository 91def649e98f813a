"""What is asked for is taken for what it was taken for, and refused in the same words."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.checks.requested import KINDS, RECORDED, told


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_taken_for_what_it_was(kind: str) -> None:
    """If something else is meant: ``make recorded``, and read the difference."""
    # Of a value with odd line ends each is kept as it was quoted.
    recorded = (RECORDED / f"{kind}.txt").read_text(encoding="utf-8").split("\n")[:-1]
    asked = ""
    for now, then in zip_longest(told(kind), recorded):
        if now is not None and not now.startswith(" "):
            asked = now
        assert now == then, asked
