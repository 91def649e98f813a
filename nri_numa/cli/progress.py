"""Says on a terminal what a command is at, when that takes longer than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from nri_numa.cli.common import clip, terminal_width
from nri_numa.text import harmless

MOMENT: Final = 1.0
"""Seconds in which nothing is said."""
_ERASE: Final = "\r\x1b[K"


@contextmanager
def progress(doing: str, *, after: float = MOMENT) -> Iterator[Callable[[str], None]]:
    """Show ``doing`` and the seconds since, while the block runs; nothing of it stays.

    It goes to standard error, and only where that is a terminal, so that neither pipes nor logs get
    it. The block must write nothing itself.

    Args:
        doing: what takes the time, such as ``asking 127.0.0.1:9891``.
        after: seconds that the block may take unannounced.

    Yields:
        What says that it is at something else now.
    """
    now = [doing]

    def at(other: str) -> None:
        now[0] = other

    if not sys.stderr.isatty():
        yield at
        return
    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        told = False
        while not done.wait(after):
            told = True
            seconds = time.monotonic() - started
            text = clip(harmless(f"{now[0]} … {seconds:.0f} s"), max(1, terminal_width() - 1))
            sys.stderr.write(f"{_ERASE}{text}")
            sys.stderr.flush()
        if told:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield at
    finally:
        done.set()
        teller.join()
