"""The commands an operator uses, against a live plugin on a real containerd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, poll
from tests.beds.plugin_process import PluginProcess, plugin_environment

pytestmark = pytest.mark.e2e

PREFIX = "numa.kubernetes.io"


def nri_numa(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as an operator would."""
    return subprocess.run(
        [sys.executable, "-m", "nri_numa", *arguments],
        env=plugin_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def document(done: subprocess.CompletedProcess[str]) -> Any:
    """What a command wrote with ``-o json``."""
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_the_checkpoint_can_be_read_while_the_plugin_runs(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("kept", numacpu="1")
    done = nri_numa("checkpoint", f"--state-dir={plugin.state_directory}", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert container.id in done.stdout


def test_check_sees_a_runtime_that_answers(containerd: Containerd, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(
        json.dumps(
            {
                "runtime": {"nriSocket": str(containerd.nri_socket)},
                "stateDir": str(tmp_path / "state"),
            }
        )
    )
    done = nri_numa("check", f"--config={config}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(containerd.nri_socket) in done.stdout
    config.write_text(json.dumps({"runtime": {"nriSocket": str(tmp_path / "none.sock")}}))
    done = nri_numa("check", f"--config={config}")
    assert done.returncode == 1
    assert "none.sock" in done.stdout
    assert "FAIL" in done.stdout


def test_check_turns_nri_on_in_containerds_own_configuration(
    containerd: Containerd, tmp_path: Path
) -> None:
    """What --fix-containerd writes is a configuration that this containerd serves NRI with."""
    with Containerd(containerd.binaries, Path(containerd.directory, "nri-off"), nri=False) as other:
        assert not other.nri_socket.exists()
        done = nri_numa(
            "check", "--fix-containerd", "--write", f"--containerd-config={other.configuration}"
        )
        assert done.returncode in (0, 1), done.stderr  # 1: other findings on this machine
        other.stop()
        other.start(keep_configuration=True)
        poll(lambda: other.nri_socket.exists(), f"NRI socket; {done.stdout}{done.stderr}")
        assert other.cri.ready()
    shutil.rmtree(other.directory)
