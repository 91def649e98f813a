"""Tables that give way without losing anything that has to be copied, and small texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.cli.output import (
    CellWrapping,
    Column,
    cell_width,
    clip_text,
    fit_table,
    human_duration,
)
from nri_numa.text import escape_unprintable, human_bytes

COLUMNS = (
    Column("POD", CellWrapping.NAME),
    Column("CPUS", CellWrapping.LIST),
    Column("POLICY", drop_rank=1),
    Column("AGE", drop_rank=2),
)
ROW = ("checkout-7d4b9c6f5d-x2x1z", "0-3,8,16-19,24,32-35,40", "single-numa-node", "3h12m")


def cells(lines: list[str], start: int, end: int) -> str:
    """What stands in the columns of a row, over all of its lines."""
    return "".join(line[start:end].strip() for line in lines[1:])


def test_lists_give_way_first_then_columns_then_names() -> None:
    made = fit_table(COLUMNS, [ROW], 70)
    assert (made.dropped_columns, len(made.lines)) == ([], 3), "the list takes two lines"
    made = fit_table(COLUMNS, [ROW], 58)
    assert made.dropped_columns == ["AGE"]
    assert "single-numa-node" in made.lines[1]
    made = fit_table(COLUMNS, [ROW], 20)
    assert made.dropped_columns == ["POLICY", "AGE"]
    assert cells(made.lines, 0, made.lines[0].index("CPUS")) == ROW[0]
    assert cells(made.lines, made.lines[0].index("CPUS"), 99) == ROW[1]


def test_a_name_is_broken_behind_a_hyphen_where_that_leaves_a_long_line() -> None:
    made = fit_table((Column("POD", CellWrapping.NAME),), [("checkout-7d4b9c6f5d-x2x1z",)], 22)
    assert made.lines[1:] == ["checkout-7d4b9c6f5d-", "x2x1z"]


def test_no_column_of_names_gets_narrower_than_can_be_read() -> None:
    columns = (
        Column("POD", CellWrapping.NAME),
        Column("POLICY"),
        Column("CONTAINER", CellWrapping.NAME),
    )
    made = fit_table(columns, [("checkout-7d4b9c6f5d-x2x1z", "single-numa-node", "server")], 20)
    assert made.lines[0] == "POD       POLICY            CONTAINER"


def test_two_columns_of_a_table_never_share_a_heading() -> None:
    with pytest.raises(ValueError, match="have one heading"):
        fit_table((Column("CPUS"), Column("CPUS")), [("1", "2")], None)


NAMES = st.text(max_size=60)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=4), st.integers(min_value=24, max_value=120))
def test_everything_fits_and_names_are_whole(rows: list[tuple[str, str]], width: int) -> None:
    """Wide letters and control characters too."""
    columns = (
        Column("A", CellWrapping.NAME),
        Column("SPARE", drop_rank=1),
        Column("B", CellWrapping.NAME),
    )
    made = fit_table(columns, [(a, "spared", b) for a, b in rows], width)
    assert all(cell_width(line) <= width and line.isprintable() for line in made.lines)
    shown = "".join("".join(made.lines[1:]).split()).replace("spared", "")
    for name in {part for row in rows for part in row}:
        for letter in set(escape_unprintable(name)) - set(" \u3000"):
            if not letter.isspace():
                assert letter in shown


@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_terminal_too_narrow_for_anything_still_gets_every_letter(width: int) -> None:
    made = fit_table(COLUMNS[:1], [ROW[:1]], width)
    assert "".join(made.lines) == f"POD{ROW[0]}"
    assert max(map(len, made.lines)) <= 8


def test_long_names_keep_both_ends() -> None:
    """Pods of one set differ at the end, pods of two sets at the beginning."""
    assert clip_text("cart-7d4b9c6f5d-x2x1z", 12) == "cart-7…x2x1z"
    assert clip_text("short", 12) == "short"
    assert clip_text("anything", 1) == "…"


def test_wide_letters_count_twice() -> None:
    assert cell_width("容器") == 4
    assert cell_width("e\u0301") == 1
    assert cell_width(clip_text("容器" * 20, 11)) <= 11


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
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (6 << 30, "6 GiB"),
        (67257405440, "62.6 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(amount: int, text: str) -> None:
    assert human_bytes(amount) == text
