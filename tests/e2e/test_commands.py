"""The commands an operator uses, against a live plugin on a real containerd."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.beds.containerd import Containerd
from tests.beds.cri import poll
from tests.beds.plugin_process import plugin_environment


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


def test_check_sees_a_runtime_that_answers(containerd: Containerd, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    runtime = {"nriSocket": str(containerd.nri_socket)}
    config.write_text(json.dumps({"runtime": runtime, "stateDir": str(tmp_path / "state")}))
    done = nri_numa("check", f"--config={config}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(containerd.nri_socket) in done.stdout
    config.write_text(json.dumps({"runtime": {"nriSocket": str(tmp_path / "none.sock")}}))
    done = nri_numa("check", f"--config={config}")
    assert done.returncode == 1
    assert "none.sock" in done.stdout
    assert "FAIL" in done.stdout


def test_check_turns_nri_on_in_containerds_file(containerd: Containerd, tmp_path: Path) -> None:
    """What --fix-runtime writes is a configuration that this containerd serves NRI with."""
    with Containerd(containerd.binaries, Path(containerd.directory, "nri-off"), nri=False) as other:
        assert not other.nri_socket.exists()
        done = nri_numa(
            "check", "--fix-runtime", "--write", f"--containerd-config={other.configuration}"
        )
        assert done.returncode in (0, 1), done.stderr  # 1: other findings on this machine
        other.stop()
        other.start(keep_configuration=True)
        poll(lambda: other.nri_socket.exists(), f"NRI socket; {done.stdout}{done.stderr}")
        assert other.cri.ready()
    shutil.rmtree(other.directory)
