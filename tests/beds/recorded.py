"""Writes down what came out, for ``make recorded``, and compares it later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path


def write_down(
    directory: Path, names: Iterable[str], lines_of: Callable[[str], Iterable[str]]
) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        text = "\n".join(lines_of(name)) + "\n"
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")


def as_written_down(file: Path, lines: Iterable[str]) -> None:
    """If something else is meant: ``make recorded``, and read the difference."""
    # Of a value with odd line ends each is kept as it was quoted.
    recorded = file.read_text(encoding="utf-8").split("\n")[:-1]
    asked = ""
    for now, then in zip_longest(lines, recorded):
        if now is not None and not now.startswith(" "):
            asked = now
        assert now == then, f"{asked}\n{now}\nwas\n{then}"
