"""An upgrade from the last release, and one step back, over containers that run: nothing moves."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.beds.embedded_node import EmbeddedNode

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
    ).stdout


def previous(into: Path) -> Path:
    """The interpreter of the last tag's sources; before there is a tag, of the last commit's."""
    tags = git("tag", "--list", "v[0-9]*", "--no-contains=HEAD", "--sort=-v:refname").split()
    archive = into / "sources.tar"
    git("archive", f"--output={archive}", (tags or ["HEAD"])[0], "nri_numa")
    subprocess.run(["tar", "-xf", archive, "-C", into], check=True)
    program = into / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={into} exec {sys.executable} -P "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history here")
def test_up_and_one_step_back_moves_nothing(tmp_path: Path) -> None:
    with EmbeddedNode(tmp_path) as node:
        former, present = str(previous(tmp_path)), node.plugin.python
        node.plugin.python = former
        node.start()
        node.four()
        for number, python in enumerate((present, former, present)):
            node.plugin.python = python
            node.plugin.restart()
            node.check()
            node.note(node.owner(f"new{number}"), "exclusive")
            node.check()
            assert not list(node.plugin.state_directory.glob("*.corrupt-*"))
