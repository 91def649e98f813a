"""Merges come out as they were written down, with the same work, and explain themselves alike."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.checks.searches import KINDS, RECORDED, told


@pytest.mark.parametrize("kind", KINDS)
def test_every_merge_finds_what_it_found(kind: str) -> None:
    """If something else is meant: ``make recorded``, and read the difference."""
    recorded = (RECORDED / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
    problem = ""
    for now, then in zip_longest(told(kind), recorded):
        if now is not None and not now.startswith(" "):
            problem = now
        assert now == then, problem
