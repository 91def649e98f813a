"""The list format of cpuset(7), both ways, and sets of ids."""

from __future__ import annotations

import pytest

from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, ListFormatError, NUMASet

PARSES = [
    ("", [], ""),
    ("0", [0], "0"),
    ("7", [7], "7"),
    ("0-3", [0, 1, 2, 3], "0-3"),
    ("0-3,8", [0, 1, 2, 3, 8], "0-3,8"),
    ("1,23", [1, 23], "1,23"),
    ("3,1,2", [1, 2, 3], "1-3"),  # any order
    ("1,1,1", [1], "1"),  # repeated
    ("0-2,1-4", [0, 1, 2, 3, 4], "0-4"),  # overlapping
    ("0-1,2-3", [0, 1, 2, 3], "0-3"),  # touching
    ("5-5", [5], "5"),  # a range of one
    ("0,1", [0, 1], "0-1"),  # the kernel writes two neighbours as a range too
    ("0,2,4,6", [0, 2, 4, 6], "0,2,4,6"),
    ("007", [7], "7"),  # the kernel's own parser takes leading zeros
    ("00-03", [0, 1, 2, 3], "0-3"),
    ("8191", [8191], "8191"),  # the highest CPU
    ("0-8191", list(range(8192)), "0-8191"),
    ("63,64,65", [63, 64, 65], "63-65"),  # over a machine word
    ("000000008", [8], "8"),
]


@pytest.mark.parametrize(
    ("text", "ids", "formatted"), PARSES, ids=[p[0] or "empty" for p in PARSES]
)
def test_list_format_is_read_and_written_in_its_shortest_form(
    text: str, ids: list[int], formatted: str
) -> None:
    cpus = CPUSet.parse(text)
    assert list(cpus) == ids
    assert str(cpus) == formatted
    assert len(cpus) == len(ids)


REFUSED = [
    (",", "an empty item between commas"),
    ("1,,2", "an empty item between commas"),
    (",1", "an empty item between commas"),
    ("1,", "an empty item between commas"),
    (" ", "' ' is not a number or a range such as 0-3"),
    (" 1", "' 1' is not"),
    ("1 ", "'1 ' is not"),
    ("1, 2", "' 2' is not"),
    ("1 2", "'1 2' is not"),
    ("0 - 3", "'0 - 3' is not"),
    ("\t1", "'\\t1' is not"),
    ("1\n", "'1\\n' is not"),
    ("x" * 1000, "'xxxxxxxxxxxxxxxxxxxxxxxx' is not"),
    ("9" * 8 + "-" + "0" * 8, "range 99999999-00000000 runs backwards"),
    ("0-3\n", "'0-3\\n' is not"),
    ("3-1", "range 3-1 runs backwards"),
    ("0-", "'0-' is not"),
    ("-1", "'-1' is not"),
    ("-", "'-' is not"),
    ("0--3", "'0--3' is not"),
    ("0-1-2", "'0-1-2' is not"),
    ("0..3", "'0..3' is not"),
    ("0:3", "'0:3' is not"),
    ("0-31:2/4", "'0-31:2/4' is not"),
    ("+1", "'+1' is not"),
    ("1.0", "'1.0' is not"),
    ("1e3", "'1e3' is not"),
    ("0x3", "'0x3' is not"),
    ("1_0", "'1_0' is not"),
    ("all", "'all' is not"),
    ("N", "'N' is not"),
    ("cpu0", "'cpu0' is not"),
    ("[0]", "'[0]' is not"),
    ("0;1", "'0;1' is not"),
    ("1,2,x", "'x' is not"),
    ("٣", "'٣' is not"),  # ARABIC-INDIC DIGIT THREE
    ("0-٣", "is not a number"),
    ("１", "is not a number"),  # FULLWIDTH DIGIT ONE
    ("²", "is not a number"),
    ("1\u00a0", "is not a number"),
    ("1\x00", "is not a number"),
    ("8192", "CPU 8192 is above 8191"),
    ("0-8192", "CPU 8192 is above 8191"),
    ("0-4000000000", "CPU 0-4000000000 is above 8191"),
    ("99999999999999999999", "is above 8191"),
    ("9" * 5000, "is above 8191"),
    ("0-" + "9" * 5000, "is above 8191"),
    ("0000000008", "is above 8191"),  # ten digits are refused unread
]


@pytest.mark.parametrize(
    ("text", "found"), REFUSED, ids=[f"{i}-{p[0][:12]!a}" for i, p in enumerate(REFUSED)]
)
def test_what_is_not_list_format_is_refused_with_the_part_that_is_wrong(
    text: str, found: str
) -> None:
    with pytest.raises(ListFormatError) as caught:
        CPUSet.parse(text)
    assert found in str(caught.value)
    assert len(str(caught.value)) < 100  # a hostile text does not fill the log


def test_numa_nodes_have_their_own_limit_and_noun() -> None:
    assert list(NUMASet.parse("0-1,1023")) == [0, 1, 1023]
    with pytest.raises(ListFormatError, match="NUMA node 1024 is above 1023"):
        NUMASet.parse("1024")
    with pytest.raises(ValueError, match=r"NUMA node 1024 is outside 0\.\.1023"):
        NUMASet([1024])


def test_ids_outside_the_range_cannot_be_members() -> None:
    with pytest.raises(ValueError, match=r"CPU -1 is outside 0\.\.8191"):
        CPUSet([0, -1])
    with pytest.raises(ValueError, match="CPU 8192 is outside"):
        CPUSet([8192])


def test_membership_asks_for_integers_of_the_set() -> None:
    cpus = CPUSet([0, 70])
    assert 70 in cpus
    assert 0 in cpus
    assert 1 not in cpus
    assert -1 not in cpus
    assert 9000 not in cpus
    assert "0" not in cpus


def test_first_is_the_lowest_id() -> None:
    assert CPUSet([9, 4, 70]).first == 4
    with pytest.raises(ValueError, match="no first id"):
        _ = NO_CPUS.first


def test_sets_of_different_kinds_are_never_equal() -> None:
    assert CPUSet([1]) == CPUSet.parse("1")
    assert CPUSet([1]) != NUMASet([1])
    assert CPUSet([1]) != 1
    assert NO_CPUS != NO_NUMA_NODES


def test_repr_can_be_read() -> None:
    assert repr(CPUSet([0, 1, 2])) == "CPUSet('0-2')"
    assert repr(NO_NUMA_NODES) == "NUMASet('')"


def test_truth_is_having_members() -> None:
    assert CPUSet([0])
    assert not NO_CPUS


def test_algebra_is_that_of_sets() -> None:
    a, b = CPUSet.parse("0-3"), CPUSet.parse("2-5")
    assert str(a & b) == "2-3"
    assert str(a | b) == "0-5"
    assert str(a - b) == "0-1"
    assert str(a ^ b) == "0-1,4-5"
    assert not a.isdisjoint(b)
    assert (a - b).isdisjoint(b)


def test_comparison_is_inclusion() -> None:
    a, b = CPUSet.parse("0-3"), CPUSet.parse("0-5")
    assert a <= b
    assert a < b
    assert b >= a
    assert b > a
    assert not b <= a
    assert not a < CPUSet(a)
    assert a <= CPUSet(a)
    assert len({a, CPUSet(a), b}) == 2
