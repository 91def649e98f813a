"""The addresses of the project, in ``pyproject.toml``, and written wherever they are needed.

    python -m tools.addresses                       # shows them
    python -m tools.addresses --image ghcr.io/you/nri-numa --documentation https://you.github.io/nri-numa

writes others into every file of the checkout, and into ``pyproject.toml`` itself.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.build_image import REPOSITORY

PLACES: Final = (
    "pyproject.toml",
    "*.md",
    "docs/*.md",
    "config/**/*",
    "tests/**/*.py",
    "tools/*.py",
)


def addresses(root: Path = REPOSITORY) -> dict[str, str]:
    """Address by name: image, homepage, documentation (alerts lead to it)."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["nri-numa"]["addresses"])


def files(root: Path = REPOSITORY) -> Iterator[Path]:
    """The files in which addresses stand."""
    for place in PLACES:
        for path in sorted(root.glob(place)):
            if path.is_file() and path.suffix != ".pyc" and path.name != "CHANGELOG.md":
                yield path


def write(new: Mapping[str, str], root: Path = REPOSITORY) -> list[Path]:
    """Put the addresses of ``new`` in the place of those that hold; the files that changed."""
    old = {address: new[name] for name, address in addresses(root).items() if name in new}
    # Not where the name goes on, as in localhost/nri-numa/busybox:test.
    # One may begin another, so the longest comes first.
    names = "|".join(map(re.escape, sorted(old, key=len, reverse=True)))
    pattern = re.compile(rf"({names})(?![\w-]|/[\w-]+:)")
    changed = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        written = pattern.sub(lambda found: old[found[0]], text) if old else text
        if written != text:
            path.write_text(written, encoding="utf-8")
            changed.append(path)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the addresses, or write others."""
    parser = argparse.ArgumentParser(description="Show the project's addresses, or write others.")
    held = addresses()
    for name in held:
        parser.add_argument(f"--{name}", metavar="ADDRESS")
    options = vars(parser.parse_args(arguments))
    given = {name: value.rstrip("/") for name, value in options.items() if value}
    for path in write(given):
        sys.stdout.write(f"{path.relative_to(REPOSITORY)}\n")
    for name, address in {} if given else held.items():
        sys.stdout.write(f"{name}: {address}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
