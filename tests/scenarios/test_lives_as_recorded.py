"""The same pods on the same machine get what they got: an upgrade places nothing elsewhere."""

from __future__ import annotations

import pytest

from tests.beds.lives import LIVES, RECORDED, told
from tests.beds.recorded import as_written_down


@pytest.mark.parametrize("name", LIVES)
def test_every_event_leaves_the_node_as_it_was_written_down(name: str) -> None:
    as_written_down(RECORDED / f"{name}.txt", told(name))
