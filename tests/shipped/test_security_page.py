"""The threat model points at what exists, and the licence is the one that is named."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_each_test_that_stands_for_a_sentence_is_there() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"def (test_\w+)\(", "".join(texts)))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= there


def test_the_licence_is_whole_and_goes_with_the_package() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert "END OF TERMS AND CONDITIONS" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
