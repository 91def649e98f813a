"""The list format of cpuset(7), both ways, and sets of ids."""

import pytest

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, ListFormatError, NUMASet

REJECTED = [
    ("1,,2", "an empty item between commas"),
    ("1,", "an empty item between commas"),
    (" ", "' ' is not a number or a range such as 0-3"),
    ("1 ", "'1 ' is not"),
    ("1, 2", "' 2' is not"),
    ("1\n", "'1\\n' is not"),
    ("x" * 1000, "'xxxxxxxxxxxxxxxxxxxxxxxx' is not"),
    ("9" * 8 + "-" + "0" * 8, "range 99999999-00000000 runs backwards"),
    ("3-1", "range 3-1 runs backwards"),
    ("0-", "'0-' is not"),
    ("-1", "'-1' is not"),
    ("0-1-2", "'0-1-2' is not"),
    ("0-31:2/4", "'0-31:2/4' is not"),
    ("+1", "'+1' is not"),
    ("1_0", "'1_0' is not"),
    ("1,2,x", "'x' is not"),
    ("٣", "'٣' is not"),  # ARABIC-INDIC DIGIT THREE
    ("1\u00a0", "is not a number"),
    ("0-8192", "CPU 8192 is above 8191"),
    ("0-4000000000", "CPU 0-4000000000 is above 8191"),
    ("9" * 5000, "is above 8191"),
    ("0-" + "9" * 5000, "is above 8191"),
    ("0000000008", "is above 8191"),  # ten digits are refused unread
]


@pytest.mark.parametrize(
    ("text", "found"), REJECTED, ids=[f"{i}-{p[0][:12]!a}" for i, p in enumerate(REJECTED)]
)
def test_what_is_not_list_format_is_rejected_with_the_wrong_part(text: str, found: str) -> None:
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


def test_first_is_the_lowest_id() -> None:
    assert CPUSet([9, 4, 70]).first_id == 4
    with pytest.raises(ValueError, match="no first id"):
        _ = NO_CPUS.first_id


def test_repr_can_be_read() -> None:
    assert repr(CPUSet([0, 1, 2])) == "CPUSet('0-2')"
    assert repr(NO_NUMA_NODES) == "NUMASet('')"
