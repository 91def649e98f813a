"""The same pods on the same machine get what they got: an upgrade places nothing elsewhere."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from tests.beds.lives import LIVES, RECORDED, Life


@pytest.mark.parametrize("name", LIVES)
def test_every_event_leaves_the_node_as_it_was_written_down(name: str) -> None:
    """When other places are meant: ``make recorded``, and read the difference."""
    recorded = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    event = ""
    for now, then in zip_longest(Life(name).lived(), recorded):
        if now is not None and not now.startswith(" "):
            event = now
        assert now == then, event
