"""``nri-numa publish`` as a process; what it refuses is in `tests.unit.cli.test_cli`."""

import sys
from pathlib import Path

from tests.beds.plugin_process import plugin_environment
from tests.beds.processes import Daemon, wait_for


def test_it_ends_on_sigterm_and_says_what_it_waits_for(tmp_path: Path) -> None:
    """Without an agent, without an API server: nothing of that is a reason to end."""
    command = [sys.executable, "-m", "nri_numa", "publish", "--socket", str(tmp_path / "none"),
               "--node-name", "n1", "--address", "off", "--log-format", "json"]  # fmt: skip
    with Daemon("publish", command, tmp_path, plugin_environment()) as process:
        complaint = "agent connection lost"
        wait_for([process], lambda: process.records(complaint), complaint)
        assert process.end() == 0
    (begins,) = process.records("publisher starting")
    assert begins["node"] == "n1"
    assert process.records()[-1]["msg"] == "service stopping"
    assert len(process.records(complaint)) == 1
