"""Tables and small texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.cli.common import (
    cell_width,
    clip,
    human_duration,
    human_size,
    table,
)
from nri_numa.text import harmless


@given(
    st.lists(st.tuples(*[st.text(max_size=120)] * 6), max_size=5),
    st.integers(min_value=60, max_value=200),
)
def test_a_table_fits_whatever_is_in_it(rows: list[tuple[str, ...]], width: int) -> None:
    """Names of 253 characters, wide letters, control characters: no line is longer."""
    made = table(("A", "B", "C", "D", "E", "F"), rows, width=width)
    assert len(made) == len(rows) + 1
    for line in made:
        assert cell_width(line) <= width
        assert line.isprintable()


def test_long_names_keep_both_ends() -> None:
    """Pods of one set differ at the end, pods of two sets at the beginning."""
    assert clip("cart-7d4b9c6f5d-x2x1z", 12) == "cart-7…x2x1z"
    assert clip("short", 12) == "short"
    assert clip("anything", 1) == "…"


def test_wide_letters_count_twice() -> None:
    assert cell_width("容器") == 4
    assert cell_width("e\u0301") == 1
    assert cell_width(clip("容器" * 20, 11)) <= 11


def test_control_characters_are_shown_as_escapes() -> None:
    assert harmless("a\x1b[31m\n") == "a\\x1b[31m\\n"
    assert harmless("plain ü") == "plain ü"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3600, "1h"),
        (11520, "3h12m"),
        (86400 * 9 + 4 * 3600, "9d4h"),
        (86400, "1d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1023, "1023"), (1536, "1.5Ki"), (67257405440, "62.6Gi"), (1 << 60, "1024.0Pi")],
)
def test_sizes(amount: int, text: str) -> None:
    assert human_size(amount) == text
