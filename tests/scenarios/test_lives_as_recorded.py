"""The same pods on the same machine get what they got: an upgrade places nothing elsewhere."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.beds.lives import LIVES, ODD_LIVES, RECORDED, Life, OddLife


@pytest.mark.parametrize("name", LIVES + ODD_LIVES)
def test_every_event_leaves_the_node_as_it_was_written_down(name: str) -> None:
    """When other places are meant: ``make recorded``, and read the difference."""
    life = OddLife(name) if name in ODD_LIVES else Life(name)
    recorded = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    event = ""
    for now, then in zip_longest(life.lived(), recorded):
        if now is not None and not now.startswith(" "):
            event = now
        assert now == then, event
