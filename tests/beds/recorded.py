"""Writes down what came out, for ``make recorded``, and compares it later."""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path


def write_down(
    directory: Path, names: Iterable[str], lines_of: Callable[[str], Iterable[str]]
) -> int:
    """Write a file for each name, and return how many lines are other than before."""
    directory.mkdir(exist_ok=True)
    different = 0
    for name in names:
        lines, file = list(lines_of(name)), directory / f"{name}.txt"
        recorded = _lines_of(file) if file.exists() else []
        different += sum(now != then for now, then in zip_longest(lines, recorded))
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return different


def as_written_down(file: Path, lines: Iterable[str]) -> None:
    """If something else is meant: ``make recorded``, and read the difference."""
    asked = ""
    for now, then in zip_longest(lines, _lines_of(file)):
        if now is not None and not now.startswith(" "):
            asked = now
        assert now == then, f"{asked}\n{now}\nwas\n{then}"


def _lines_of(file: Path) -> list[str]:
    # Of a value with odd line ends each is kept as it was quoted.
    return file.read_text(encoding="utf-8").split("\n")[:-1]
