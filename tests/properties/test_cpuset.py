"""Id sets behave as ``frozenset`` does, and their text form loses nothing."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet

ids = st.frozensets(st.integers(0, CPUSet.LIMIT - 1) | st.integers(0, 140), max_size=80)


@given(ids)
def test_formatting_and_parsing_is_the_identity(members: frozenset[int]) -> None:
    cpus = CPUSet(members)
    assert CPUSet.parse(str(cpus)) == cpus
    assert set(cpus) == members
    assert list(cpus) == sorted(members)
    assert len(cpus) == len(members)
    assert CPUSet.from_bits(cpus.bits) == cpus


@given(ids)
def test_text_is_the_shortest_the_kernel_would_write(members: frozenset[int]) -> None:
    items = [item.split("-") for item in str(CPUSet(members)).split(",") if item]
    bounds = [(int(item[0]), int(item[-1])) for item in items]
    # Ascending, and never two items that could be one.
    assert all(a[1] + 1 < b[0] for a, b in pairwise(bounds))
    assert all(len(item) == 1 or int(item[0]) < int(item[1]) for item in items)


@given(ids, ids)
def test_algebra_agrees_with_frozenset(a: frozenset[int], b: frozenset[int]) -> None:
    for one in (a, a & b):
        _agrees(one, b)


def _agrees(a: frozenset[int], b: frozenset[int]) -> None:
    x, y = CPUSet(a), CPUSet(b)
    assert frozenset(x & y) == a & b
    assert frozenset(x | y) == a | b
    assert frozenset(x - y) == a - b
    assert (x == y) == (a == b)
    assert (x <= y) == (a <= b)
    assert (x < y) == (a < b)
    assert (x >= y) == (a >= b)
    assert (x > y) == (a > b)
    assert bool(x) == bool(a)


@given(ids)
def test_equal_sets_hash_alike(members: frozenset[int]) -> None:
    assert hash(CPUSet(members)) == hash(CPUSet(sorted(members, reverse=True)))
    assert {CPUSet(members): 1}[CPUSet.parse(str(CPUSet(members)))] == 1


@given(ids, st.integers(-3, CPUSet.LIMIT + 3))
def test_membership_agrees_with_frozenset(members: frozenset[int], i: int) -> None:
    assert (i in CPUSet(members)) == (i in members)


@given(st.text() | st.text(alphabet="0123456789,- \n", max_size=30))
@example("0-\u0663")
@example("\n")
def test_any_text_is_a_set_or_a_list_format_error(text: str) -> None:
    for kind in (CPUSet, NUMASet):
        try:
            parsed = kind.parse(text)
        except ListFormatError:
            continue
        assert kind.parse(str(parsed)) == parsed
        assert text == "" or parsed
        assert text.strip() == text
