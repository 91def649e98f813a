"""The commands an operator uses, against a live plugin on a real containerd."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, CRIError, guaranteed, poll
from tests.beds.plugin_process import PluginProcess, StartPlugin, plugin_environment

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


def test_status_shows_who_has_what(cri: CRI, plugin: PluginProcess) -> None:
    pod = cri.run_pod("listed", namespace="shop", annotations={f"{PREFIX}/numacpu": "0-1"})
    container = cri.run(pod, "web", resources=guaranteed(2))
    poll(lambda: plugin.responsive(), "HTTP served")
    done = nri_numa("status", f"--api={plugin.address}", "-o", "json")
    assert done.returncode == 0, done.stderr
    text = json.dumps(document(done))
    for words in ("shop", "listed", "web", "0-1"):
        assert words in text
    table = nri_numa("status", f"--api={plugin.address}")
    assert table.returncode == 0
    assert re.search(r"shop\s+listed\s+web\b.*\b0-1\b", table.stdout)
    cri.remove(container)
    gone = nri_numa("status", f"--api={plugin.address}")
    assert "listed" not in gone.stdout
    plugin.terminate()
    absent = nri_numa("status", f"--api={plugin.address}")
    assert absent.returncode == 3
    assert absent.stderr.strip()
    assert "Traceback" not in absent.stderr


def test_explain_tells_placements_and_refusals(cri: CRI, plugin: PluginProcess) -> None:
    cri.pod("fine", numacpu="1")
    bad = cri.run_pod("bad", annotations={f"{PREFIX}/numacpu": "63"})
    with pytest.raises(CRIError):
        cri.create(bad)
    poll(lambda: plugin.responsive(), "HTTP served")
    fine = nri_numa("explain", "fine", f"--api={plugin.address}")
    assert fine.returncode == 0, fine.stderr
    assert "numacpu" in fine.stdout
    refused = nri_numa("explain", "default/bad", f"--api={plugin.address}")
    assert refused.returncode == 1
    assert "63" in refused.stdout
    unknown = nri_numa("explain", "nobody", f"--api={plugin.address}")
    assert unknown.returncode == 1
    assert "nobody" in unknown.stdout + unknown.stderr


def test_the_checkpoint_can_be_read_while_the_plugin_runs(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("kept", numacpu="1")
    done = nri_numa("checkpoint", f"--state-dir={plugin.state_directory}", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert container.id in done.stdout


def test_a_second_plugin_on_the_same_state_leaves(
    containerd: Containerd, cri: CRI, plugin: PluginProcess
) -> None:
    """It says so and goes, and the first one goes on as if nothing had been."""
    owner = cri.owner()
    second = PluginProcess(plugin.directory / "second", containerd.nri_socket)
    second.state_directory = plugin.state_directory
    with pytest.raises(RuntimeError, match=str(plugin.state_directory)):
        second.start()
    assert second.wait() != 0
    assert "Traceback" not in second.log()
    assert plugin.ready()
    thief = cri.run_pod("thief", annotations={f"{PREFIX}/numacpu": cri.allowed(owner).cpus})
    with pytest.raises(CRIError, match="default/owner/main"):
        cri.create(thief)


def test_a_second_plugin_with_a_state_of_its_own_waits_and_plain_pods_start(
    containerd: Containerd, cri: CRI, plugin: PluginProcess
) -> None:
    """Both would set the annotation ``assigned``, and containerd failed every container."""
    second = PluginProcess(plugin.directory / "second", containerd.nri_socket)
    second.start(wait=False)
    try:
        poll(second.responsive, "the second one serves")
        status, body = second.get("/readyz")
        assert (status, "works on the runtime of this socket" in body) == (503, True)
        cri.run(cri.run_pod("plain"))
        plugin.kill()
        second.wait_ready()
        cri.run(cri.run_pod("later"))
    finally:
        second.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"strategie": "spread"}, ["strategie", "strategy"]),
        ({"reservedCPUs": "0-63"}, ["reservedCPUs", "63"]),
        ({"oversale": 0.5, "nonsense": 1}, ["oversale", "nonsense"]),
    ],
    ids=["misspelt", "absent-cpu", "both-mistakes-at-once"],
)
def test_a_configuration_with_mistakes_ends_the_start(
    start_plugin: StartPlugin, config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        start_plugin(config)
    plugin = start_plugin.started[0]
    assert plugin.wait() == 2
    for word in words:
        assert word in str(caught.value)
    assert "Traceback" not in plugin.log()


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
