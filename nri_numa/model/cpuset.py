"""Immutable sets of CPU and NUMA node ids, in the kernel's list format.

The text form is the *list format* of cpuset(7): ``0-3,8``. A set is backed by one integer, bit *i*
set if id *i* is a member, so algebra, equality and hashing take a few machine words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import ClassVar, Self

# ASCII digits only: str.isdigit() also accepts digits of other scripts, which the kernel does not.
_RANGE_PATTERN = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)


class ListFormatError(ValueError):
    """A text that is not in the kernel's list format; the message has the item and the reason."""


@lru_cache(maxsize=1024)
def _format_id_list(bits: int) -> str:
    # A node has few different sets at any time, and every log line has some of them.
    parts: list[str] = []
    base = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        bits >>= gap
        base += gap
        run = (~bits & (bits + 1)).bit_length() - 1
        parts.append(str(base) if run == 1 else f"{base}-{base + run - 1}")
        bits >>= run
        base += run
    return ",".join(parts)


@lru_cache(maxsize=256)
def _cached_ids_of_bits(bits: int) -> tuple[int, ...]:
    return tuple(ids_of(bits))


def ids_of(bits: int) -> Iterator[int]:
    """Yield the ids whose bits are set, ascending."""
    while bits:
        bit = bits & -bits
        yield bit.bit_length() - 1
        bits ^= bit


_new_object = object.__new__


class _IdSet:
    """Set of small non-negative integers with the algebra of ``frozenset``.

    Ordering operators are the subset relations, as for ``frozenset``.
    """

    __slots__ = ("bits",)

    LIMIT: ClassVar[int] = 1024
    """Exclusive upper bound of ids; guards memory against a list such as ``0-4000000000``."""
    NOUN: ClassVar[str] = "id"

    bits: int

    def __init__(self, ids: Iterable[int] = ()) -> None:
        bits = 0
        for i in ids:
            if not 0 <= i < self.LIMIT:
                raise ValueError(f"{self.NOUN} {i} is outside 0..{self.LIMIT - 1}")
            bits |= 1 << i
        self.bits = bits

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Return the set of an integer whose bit *i* stands for id *i*."""
        self = _new_object(cls)
        self.bits = bits
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the list format, without white space; an empty text is the empty set.

        Raises:
            ListFormatError: with the offending part and what was expected.
        """
        bits = 0
        if not text:
            return cls.from_bits(0)
        for item in text.split(","):
            match = _RANGE_PATTERN.fullmatch(item)
            if match is None:
                raise ListFormatError(
                    f"{item[:24]!r} is not a number or a range such as 0-3"
                    if item
                    else "there is an empty item between commas"
                )
            low_text, high_text = match.groups()
            # int() of thousands of digits is slow and, beyond a limit, raises another error.
            if max(len(low_text), len(high_text or "")) > 9:
                raise ListFormatError(f"{cls.NOUN} {item[:24]} is above {cls.LIMIT - 1}")
            low_id = int(low_text)
            high_id = low_id if high_text is None else int(high_text)
            if high_id < low_id:
                raise ListFormatError(f"range {item[:24]} runs backwards")
            if high_id >= cls.LIMIT:
                raise ListFormatError(f"{cls.NOUN} {high_id} is above {cls.LIMIT - 1}")
            bits |= (1 << (high_id + 1)) - (1 << low_id)
        return cls.from_bits(bits)

    @classmethod
    def parse_or_none(cls, text: str) -> Self | None:
        """Read the list format as `parse` does; None for a text that is not in it."""
        try:
            return cls.parse(text)
        except ListFormatError:
            return None

    def __str__(self) -> str:
        return _format_id_list(self.bits)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        return ids_of(self.bits)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __contains__(self, i: object) -> bool:
        return isinstance(i, int) and i >= 0 and bool(self.bits >> i & 1)

    def __hash__(self) -> int:
        return hash(self.bits)

    def __eq__(self, value: object) -> bool:
        return self.bits == value.bits if isinstance(value, type(self)) else NotImplemented

    def __and__(self, ids: Self) -> Self:
        return self.from_bits(self.bits & ids.bits)

    def __or__(self, ids: Self) -> Self:
        return self.from_bits(self.bits | ids.bits)

    def __sub__(self, ids: Self) -> Self:
        return self.from_bits(self.bits & ~ids.bits)

    def __le__(self, superset: Self) -> bool:
        return not self.bits & ~superset.bits

    def __lt__(self, superset: Self) -> bool:
        return self.bits != superset.bits and not self.bits & ~superset.bits

    def __ge__(self, subset: Self) -> bool:
        return not subset.bits & ~self.bits

    @property
    def first_id(self) -> int:
        """Lowest id.

        Raises:
            ValueError: the set is empty.
        """
        if not self.bits:
            raise ValueError("an empty set has no first id")
        return (self.bits & -self.bits).bit_length() - 1


class CPUSet(_IdSet):
    """A set of logical CPUs, as the kernel numbers them."""

    __slots__ = ()
    LIMIT = 8192  # CONFIG_NR_CPUS_RANGE_END of the largest x86-64 kernels
    NOUN = "CPU"


class NUMASet(_IdSet):
    """A set of NUMA nodes, as the kernel numbers them."""

    __slots__ = ()
    LIMIT = 1024  # MAX_NUMNODES of the largest kernels
    NOUN = "NUMA node"

    def __iter__(self) -> Iterator[int]:
        return iter(_cached_ids_of_bits(self.bits))


def union_cpus(sets: Iterable[CPUSet]) -> CPUSet:
    """All CPUs of several sets."""
    bits = 0
    for cpus in sets:
        bits |= cpus.bits
    return CPUSet.from_bits(bits)


NO_CPUS = CPUSet()
NO_NUMA_NODES = NUMASet()
