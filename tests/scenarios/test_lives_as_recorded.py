"""The same pods on the same machine get what they got: an upgrade places nothing elsewhere."""

import pytest

from tests.beds.lives import LIVES, RECORDED, record_life
from tests.beds.recorded import as_written_down


@pytest.mark.parametrize("name", LIVES)
def test_every_event_leaves_the_node_as_it_was_written_down(name: str) -> None:
    record = record_life(name)
    as_written_down(RECORDED / f"{name}.jsonl", record.value_lines())
    as_written_down(RECORDED / f"{name}.txt", record.text_lines())
