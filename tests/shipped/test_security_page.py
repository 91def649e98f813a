"""The threat model points at what exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_each_test_that_stands_for_a_sentence_is_there() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"def (test_\w+)\(", "".join(texts)))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= there
