"""Containers get the CPUs that were written down for them."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.checks.choices import MACHINES, RECORDED, told


@pytest.mark.parametrize("machine", MACHINES)
def test_every_choice_is_what_it_was(machine: str) -> None:
    """If others are meant: ``make recorded``, and read the difference."""
    recorded = (RECORDED / f"{machine}.txt").read_text(encoding="utf-8").splitlines()
    asked = ""
    for now, then in zip_longest(told(machine), recorded):
        if now is not None and not now.startswith(" "):
            asked = now
        assert now == then, asked
