"""Memory that nobody uses any more goes back to the kernel.

A Synchronize of 500 containers is two megabytes of request, and as much again of messages and
values that live until the answer has left. The allocator keeps what they leave, because more is
usually asked for soon; an agent that then places a container now and again never does. Imports
leave such memory too: that of compiled files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, cast

GROWN: Final = 2 << 20
"""Bytes of resident memory more than after the last time that make it worth a look."""
REST: Final = 5
"""Rounds between two times at least: a busy node needs again what it gave back."""
_KEPT: Final = 1 << 18
"""Bytes left at the end of the heap, for the requests that come next."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of resident memory; 0 where nobody tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _malloc_trim() -> Callable[[int], object]:
    """The C library's ``malloc_trim(3)``; nothing where it is none of GNU's, or out of reach."""
    try:
        import ctypes

        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = (ctypes.c_size_t,)
    except (ImportError, OSError, AttributeError):
        return lambda kept: None
    return cast(Callable[[int], object], trim)


_trim: Final = _malloc_trim()


def give_back() -> None:
    """Give free pages of the heap back."""
    _trim(_KEPT)


class Trim:
    """Gives memory back after it was needed for a moment.

    Args:
        resident: bytes of resident memory.
        give_back: does it; takes a few milliseconds for ten megabytes.
    """

    def __init__(
        self,
        resident: Callable[[], int] = resident,
        give_back: Callable[[], object] = give_back,
    ) -> None:
        self._resident = resident
        self._give_back = give_back
        self._least = 0
        self._rest = 0

    def look(self) -> None:
        """One round: look whether there is something to give back."""
        if self._rest:
            self._rest -= 1
            return
        now = self._resident()
        if now - self._least < GROWN:
            self._least = min(self._least, now)
            return
        self._give_back()
        self._least = self._resident()
        self._rest = REST
