"""Writes down what came out, for ``make recorded``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def write_down(
    directory: Path, names: Iterable[str], lines_of: Callable[[str], Iterable[str]]
) -> None:
    """Write a file of lines for each name."""
    directory.mkdir(exist_ok=True)
    for name in names:
        text = "\n".join(lines_of(name)) + "\n"
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
