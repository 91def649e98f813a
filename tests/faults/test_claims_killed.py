"""Kill -9 at each change of a file while ResourceClaims are prepared and forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_at_every_change_of_a_file() -> None:
    """No claim is half prepared for a new process, and what the kubelet asks again is the same."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.claim_kills"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    # Question, record and CDI file are written and renamed, and taken away in the end.
    assert {"open", "fsync", "replace", "unlink", "makedirs"} == set(found["steps"])
    assert found["kills"] > len(found["steps"]) >= 15
