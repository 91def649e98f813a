"""The text form of a container's load; any windows are in properties/test_requested.py."""

from __future__ import annotations

import pytest

from nri_numa.engine.request.annotations import format_load, parse_load
from nri_numa.model.workload import HIGH, LOW, Load


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        ("high", ((0, 1440),)),
        ("low", ()),
        ("09:00-18:00", ((540, 1080),)),
        ("22:00-24:00", ((1320, 1440),)),
        ("00:00-24:00", ((0, 1440),)),
        ("09:00-12:00,12:00-14:00", ((540, 840),)),
    ],
)
def test_text_becomes_sorted_separate_minutes(text: str, busy: tuple[tuple[int, int], ...]) -> None:
    assert parse_load(text) == Load(busy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "load '': expected high, low, or daily peak hours such as 09:00-18:00"),
        ("HIGH", "load 'HIGH': expected high, low"),
        ("9:00-18:00", "load '9:00-18:00': expected"),
        ("09:00-10:00, 11:00-12:00", "load ' 11:00-12:00' in '09:00-10:00, 11:00-12:00'"),
        ("09:00-18:00,", "load '' in '09:00-18:00,': expected"),
        ("09:00-18:00,low", "load 'low' in '09:00-18:00,low': expected"),
        ("٠٩:00-18:00", "expected high, low"),
        ("24:00-06:00", "expected times from 00:00 to 24:00"),
        ("09:00-24:01", "expected times from 00:00 to 24:00"),
        ("09:60-10:00", "expected times from 00:00 to 24:00"),
        ("09:00-09:00", "starts when it ends; expected high for the whole day"),
    ],
)
def test_bad_text_is_an_error_that_says_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="load") as caught:
        parse_load(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("load", "text"),
    [(HIGH, "high"), (LOW, "low"), (Load(((0, 65), (600, 1440))), "00:00-01:05,10:00-24:00")],
)
def test_a_load_is_written_as_it_is_read(load: Load, text: str) -> None:
    assert format_load(load) == text
