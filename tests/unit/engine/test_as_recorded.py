"""Searches, choices of CPUs and requests come out as they were written down, word for word."""

from pathlib import Path

import pytest

from tests.beds.recorded import as_written_down
from tests.checks import choices, requested, searches

TOLD = {
    **{searches.RECORDED / f"{kind}.txt": (searches.told, kind) for kind in searches.KINDS},
    **{choices.RECORDED / f"{name}.txt": (choices.told, name) for name in choices.MACHINES},
    **{requested.RECORDED / f"{kind}.txt": (requested.told, kind) for kind in requested.KINDS},
}


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_everything_is_what_it_was(path: Path) -> None:
    told, name = TOLD[path]
    as_written_down(path, told(name))
