"""Quantities mean what they mean to Kubernetes, and versions are read leniently."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.text import (
    BadQuantity,
    milli_cpus,
    page_bytes_of_resource,
    parse_exact_quantity,
    parse_version,
    whole_bytes,
)


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        (2, 2),
        (1.5, Fraction(3, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+3", 3),
        ("500m", Fraction(1, 2)),
        ("250u", Fraction(1, 4000)),
        ("7n", Fraction(7, 10**9)),
        ("3k", 3000),
        ("100M", 100_000_000),
        ("2Gi", 2 << 30),
        ("0.5Gi", 1 << 29),
        ("1Ki", 1024),
        ("1Ti", 1 << 40),
        ("1Pi", 1 << 50),
        ("1Ei", 1 << 60),
        ("1E", 10**18),
        ("1e3", 1000),
        (1e22, 10**22),
    ],
)
def test_a_quantity_has_its_exact_value(value: object, amount: Fraction) -> None:
    assert parse_exact_quantity(value) == amount


@pytest.mark.parametrize(
    "value",
    [
        "",
        "1 ",
        "1 Gi",
        "1GiB",
        "1K",
        "1_000",
        "0x10",
        "1e999",
        "٣",
        "1\n",
        ".",
        float("inf"),
        float("nan"),
        True,
        None,
        [],
        "9" * 41,
    ],
)
def test_what_is_no_quantity_is_rejected_with_an_example(value: object) -> None:
    with pytest.raises(BadQuantity, match="such as"):
        parse_exact_quantity(value)


@pytest.mark.parametrize("value", ["-1", -1, "-500m", -0.5])
def test_less_than_nothing_cannot_be_asked_for(value: object) -> None:
    with pytest.raises(BadQuantity, match="0 or more"):
        parse_exact_quantity(value)


@pytest.mark.parametrize(
    ("value", "milli"), [("500m", 500), (2, 2000), ("0.25", 250), ("1e-1", 100), (0, 0)]
)
def test_cpus_are_counted_in_thousandths(value: object, milli: int) -> None:
    assert milli_cpus(value) == milli


@pytest.mark.parametrize("value", ["0.5m", "100u", "1.0001"])
def test_cpus_finer_than_a_thousandth_are_rejected(value: str) -> None:
    with pytest.raises(BadQuantity, match="steps of 1m"):
        milli_cpus(value)


@pytest.mark.parametrize("value", ["400m", "0.5", "1.5"])
def test_a_part_of_a_byte_is_a_slip(value: str) -> None:
    with pytest.raises(BadQuantity, match="400Mi"):
        whole_bytes(value)


@pytest.mark.parametrize("read", [milli_cpus, whole_bytes])
def test_more_than_any_machine_has_is_rejected(read: type) -> None:
    with pytest.raises(BadQuantity, match="some machine"):
        read("1e30")


@pytest.mark.parametrize(
    ("name", "size"),
    [("hugepages-2Mi", 2 << 20), ("hugepages-1Gi", 1 << 30), ("hugepages-64Ki", 65536)],
)
def test_a_huge_page_resource_names_its_size(name: str, size: int) -> None:
    assert page_bytes_of_resource(name) == size


@pytest.mark.parametrize("name", ["hugepages-", "hugepages-3Mi", "hugepages-2M", "hugepages-big"])
def test_a_page_is_a_power_of_two(name: str) -> None:
    with pytest.raises(BadQuantity, match="hugepages-2Mi"):
        page_bytes_of_resource(name)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_rejected(text: str) -> None:
    try:
        amount = parse_exact_quantity(text)
    except BadQuantity:
        return
    assert amount >= 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.1.9+unknown", (2, 1, 9)),
        ("1.7.24~ds1", (1, 7, 24)),
        ("2.2.0-rc.1", (2, 2, 0)),
        (" 1.34", (1, 34, 0)),
        ("v0.12.2", (0, 12, 2)),
        ("", None),
        ("(devel)", None),
        ("2", None),
        ("٢.١", None),
        ("9999999999.1", None),
    ],
)
def test_versions_are_read_leniently(text: str, expected: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == expected
