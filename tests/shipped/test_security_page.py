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


def test_nothing_that_is_installed_asks_for_a_capability() -> None:
    unit = (ROOT / "systemd/nri-numa.service").read_text()
    assert re.search(r"^CapabilityBoundingSet=$", unit, re.MULTILINE)
    assert "AmbientCapabilities" not in unit
    manifests = [*(ROOT / "config/kubernetes").rglob("*.yaml"), *(ROOT / "config/helm").rglob("*")]
    # Chosen for its rights.
    manifests = [path for path in manifests if path.parent.name != "moves-memory"]
    texts = [path.read_text() for path in manifests if path.is_file()]
    drops = [text for text in texts if "capabilities:" in text]
    assert len(drops) == 10
    assert all(re.search(r"capabilities:\n\s+drop: \[ALL\]\n", text) for text in drops)
    asked = re.compile(r"\{\{- if \.Values\.movesMemory \}\}\n +hostPID: true\n")
    texts = [asked.sub("", text) for text in texts]
    assert not [text for text in texts if re.search(r"privileged: true|hostPID|hostIPC", text)]
