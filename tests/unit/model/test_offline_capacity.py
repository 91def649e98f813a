"""The documents about capacity from outside: what is read of them, and every way to be none."""

import math

import pytest

from nri_numa.model.offline_capacity import (
    MAX_CAPACITY_DOCUMENT_BYTES,
    BadCapacity,
    OfflineCapacity,
    encode_offline_capacity,
    format_id_list,
    parse_id_list,
    parse_ids_or_empty,
    parse_offline_capacity,
    parse_zone_factors,
    parse_zone_id,
)

GOOD = '{"zones":{"0":0.5,"1":1},"until":"2026-11-22T15:00:00Z","source":"put"}'


def test_what_is_written_is_read() -> None:
    found = parse_offline_capacity(GOOD)
    assert found == OfflineCapacity({0: 0.5, 1: 1.0}, 1795359600.0, "put")
    assert encode_offline_capacity(found) == GOOD.replace("1}", "1.0}")
    assert parse_offline_capacity(encode_offline_capacity(found)) == found
    assert parse_offline_capacity("") == OfflineCapacity()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a JSON object"),
        ("nonsense", "is no JSON"),
        ("[" * 30_000, "is no JSON"),
        ("x" * (MAX_CAPACITY_DOCUMENT_BYTES + 1), "expected 65536 at most"),
        ('{"zones":{"0":NaN},"until":"2026-11-22T15:00:00Z"}', "NaN"),
        ('{"zones":{"0":-0.1},"until":"2026-11-22T15:00:00Z"}', "-0.1, expected a number"),
        ('{"zones":{"0":1.1},"until":"2026-11-22T15:00:00Z"}', "1.1, expected a number"),
        ('{"zones":{"0":1e999},"until":"2026-11-22T15:00:00Z"}', "inf, expected a number"),
        ('{"zones":{"0":true},"until":"2026-11-22T15:00:00Z"}', "True is no number"),
        ('{"zones":{"0":"1"},"until":"2026-11-22T15:00:00Z"}', "'1' is no number"),
        ('{"zones":{"00":1},"until":"2026-11-22T15:00:00Z"}', "names no NUMA node"),
        ('{"zones":{"1024":1},"until":"2026-11-22T15:00:00Z"}', "names no NUMA node"),
        ('{"zones":{"0":1,"node-0":1},"until":"2026-11-22T15:00:00Z"}', "stands there twice"),
        ('{"zones":[1],"until":"2026-11-22T15:00:00Z"}', "expected a mapping"),
        ('{"zones":{"0":1}}', "until: None, expected a time"),
        ('{"zones":{"0":1},"until":"2026-13-22T15:00:00Z"}', "no day of the calendar"),
        ('{"zones":{"0":1},"until":"2026-11-22T15:00:00Z","source":"A\\n"}', "source"),
        ('{"zone":{}}', "unknown key 'zone'"),
    ],
)
def test_what_is_no_such_document_says_why(text: str, said: str) -> None:
    with pytest.raises(BadCapacity) as rejected:
        parse_offline_capacity(text)
    assert said in str(rejected.value)
    assert str(rejected.value).isprintable()


def test_zones_are_bounded_and_may_be_numbers() -> None:
    assert parse_zone_factors({0: 1, "node-3": 0}) == {0: 1.0, 3: 0.0}
    with pytest.raises(BadCapacity, match="1025 entries"):
        parse_zone_factors(dict.fromkeys(range(1025), 1))
    for name in (True, 1024, -1, None, math.nan):
        with pytest.raises(BadCapacity, match="names no NUMA node"):
            parse_zone_id(name)


@pytest.mark.parametrize(
    ("text", "ids", "shortest"),
    [(" ", set(), ""), ("0", {0}, "0"), ("2,5,1, 0", {0, 1, 2, 5}, "0-2,5")],
)
def test_lists_of_numa_nodes(text: str, ids: set[int], shortest: str) -> None:
    assert parse_id_list(text) == ids
    assert format_id_list(ids) == shortest


@pytest.mark.parametrize(
    "text", ["a", "2-1", "1024", "0,,1", "-1", "0-99999", "1" * (MAX_CAPACITY_DOCUMENT_BYTES + 1)]
)
def test_what_is_no_list_says_why(text: str) -> None:
    with pytest.raises(BadCapacity, match="expected"):
        parse_id_list(text)
    assert parse_ids_or_empty(text) == set()
