"""Searches, choices of CPUs and requests come out as they were written down, word for word."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from tests.checks import choices, requested, searches

TOLD = {
    **{searches.RECORDED / f"{kind}.txt": (searches.told, kind) for kind in searches.KINDS},
    **{choices.RECORDED / f"{name}.txt": (choices.told, name) for name in choices.MACHINES},
    **{requested.RECORDED / f"{kind}.txt": (requested.told, kind) for kind in requested.KINDS},
}


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_everything_is_what_it_was(path: Path) -> None:
    """If something else is meant: ``make recorded``, and read the difference."""
    told, name = TOLD[path]
    # Of a value with odd line ends each is kept as it was quoted.
    recorded = path.read_text(encoding="utf-8").split("\n")[:-1]
    asked = ""
    for now, then in zip_longest(told(name), recorded):
        if now is not None and not now.startswith(" "):
            asked = now
        assert now == then, asked
