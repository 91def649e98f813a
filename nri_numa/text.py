"""Text formats of several rooms: escaping, Kubernetes quantities, versions. Pure.

The grammar of quantities (``500m``, ``1.5``, ``2Gi``, ``100M``, ``1e3``) is that of
``k8s.io/apimachinery/pkg/api/resource``: a decimal number with a decimal suffix (n u m k M G T P
E), a binary one (Ki Mi Gi Ti Pi Ei) or an exponent.
"""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from fractions import Fraction
from typing import Final

Version = tuple[int, int, int]
"""Major, minor and patch level."""

# --- escaping ---------------------------------------------------------------------------------


def escape_unprintable(text: str) -> str:
    """Escape ``text`` to one line that cannot move a cursor or reorder characters.

    Control characters, line and paragraph separators, direction marks and lone surrogates are
    escaped; letters of every script stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def utc_text(seconds: float) -> str:
    """Format a Unix time for people, such as ``2026-11-25 17:04:05 UTC``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def micro_time_text(seconds: float) -> str:
    """Format seconds since the epoch as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def human_bytes(amount: int, *, free: bool = False) -> str:
    """Format bytes: ``512 B``, ``6 GiB``, ``1.5 TiB``; free amounts are rounded down."""
    power = min(max(0, abs(amount).bit_length() - 1) // 10, 5)
    unit = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power]
    tenths = 10 * amount // (1 << 10 * power) if free else 10 * amount / (1 << 10 * power)
    return f"{tenths / 10:.1f}".removesuffix(".0") + f" {unit}"


# --- quantities -------------------------------------------------------------------------------

_QUANTITY_PATTERN = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))"
    r"(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]))?",
    re.ASCII,
)
_FACTOR_BY_SUFFIX: Final = {
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
HUGEPAGES_PREFIX: Final = "hugepages-"


class BadQuantity(ValueError):
    """A value that is no quantity; the text is what was expected."""


def parse_exact_quantity(value: object) -> Fraction:
    """Parse the exact value of a quantity.

    Args:
        value: text, or the number that a YAML reader made of it.

    Raises:
        BadQuantity: the value is no quantity, or negative.
    """
    is_readable = isinstance(value, int | float | str) and not isinstance(value, bool)
    match = _QUANTITY_PATTERN.fullmatch(str(value)) if is_readable else None
    if match is None:
        raise BadQuantity("a quantity such as 2, 500m, 1.5 or 4Gi")
    digits, exponent, suffix = match.groups()
    amount = Fraction(digits)
    if exponent:
        amount *= Fraction(10) ** int(exponent)
    elif suffix:
        amount *= _FACTOR_BY_SUFFIX[suffix]
    if amount < 0:
        raise BadQuantity("0 or more")
    return amount


def milli_cpus(value: object) -> int:
    """Parse a quantity of CPUs to thousandths.

    Raises:
        BadQuantity: no quantity, or finer than a thousandth, which the API server rejects.
    """
    milli = parse_exact_quantity(value) * 1000
    if milli.denominator != 1:
        raise BadQuantity("CPUs in steps of 1m, such as 1.5 or 250m")
    if milli > 1_000_000_000:
        raise BadQuantity("a number of CPUs that some machine has")
    return int(milli)


def whole_bytes(value: object) -> int:
    """Parse a quantity of bytes.

    Raises:
        BadQuantity: no quantity, or a part of a byte (``400m`` instead of ``400Mi``).
    """
    amount = parse_exact_quantity(value)
    if amount.denominator != 1:
        raise BadQuantity("whole bytes, such as 400Mi (the suffix m is a thousandth of a byte)")
    if amount >= 1 << 62:
        raise BadQuantity("an amount that some machine has")
    return int(amount)


def hugepages_resource_name(size: int) -> str:
    """Return the resource name of huge pages of a size in bytes: ``hugepages-2Mi``."""
    for power, unit in ((30, "Gi"), (20, "Mi")):
        if size >= 1 << power:
            return f"{HUGEPAGES_PREFIX}{size >> power}{unit}"
    return f"{HUGEPAGES_PREFIX}{size >> 10}Ki"


def page_bytes_of_resource(resource: str) -> int:
    """Parse the page size in bytes from the name of a resource such as ``hugepages-2Mi``.

    Raises:
        BadQuantity: the name has no page size that is a power of two.
    """
    size = 0
    if resource.startswith(HUGEPAGES_PREFIX):
        with contextlib.suppress(BadQuantity):
            size = whole_bytes(resource.removeprefix(HUGEPAGES_PREFIX))
    if size < 1024 or size & (size - 1):
        raise BadQuantity(
            f"{HUGEPAGES_PREFIX}2Mi, {HUGEPAGES_PREFIX}1Gi or another size of huge pages"
        )
    return size


def whole_pages_text(page_bytes: int) -> str:
    """Describe the expected amount of huge pages: ``a multiple of 1 GiB such as 2Gi``."""
    example = human_bytes(2 * page_bytes).replace(" ", "").removesuffix("B")
    return f"a multiple of {human_bytes(page_bytes)} such as {example}"


def parse_hugepages(resource: str, value: object) -> tuple[int, int]:
    """Parse the page size and the amount of a resource such as ``hugepages-2Mi``, in bytes.

    Raises:
        BadQuantity: it is no such resource, or the amount is no whole number of pages.
    """
    page_bytes, amount = page_bytes_of_resource(resource), whole_bytes(value)
    if amount % page_bytes:
        raise BadQuantity(whole_pages_text(page_bytes))
    return page_bytes, amount


# --- versions ---------------------------------------------------------------------------------

_VERSION_PATTERN: Final = re.compile(r"\s*v?([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")


def parse_version(text: str) -> Version | None:
    """Return the numbers of a version, or None if the text has none.

    A missing patch level counts as 0, and suffixes are ignored: ``v2.1.9``, ``2.1.9+unknown``,
    ``1.7.24~ds1`` and ``2.2.0-rc.1`` are all in use.
    """
    match = _VERSION_PATTERN.match(text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)
