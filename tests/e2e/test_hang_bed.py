"""The bed that hangs a runtime on purpose: it does, it says so, and it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import poll
from tests.beds.hang_bed import keep_stacks, provoke_hang, register_once
from tests.beds.plugin_process import PluginProcess

pytestmark = pytest.mark.e2e


def test_a_registration_during_a_forced_removal_hangs_containerd(
    disposable: Containerd, tmp_path: Path
) -> None:
    if not disposable.binaries.version.startswith("2.1."):
        pytest.skip(f"known of 2.1, this is {disposable.binaries.version}")
    assert register_once(disposable.nri_socket) == "synchronised"
    assert provoke_hang(disposable)
    # From now on nobody gets in: what the plugin's watchdog is there to notice.
    assert register_once(disposable.nri_socket, timeout_s=2) != "synchronised"
    stacks = keep_stacks(disposable, tmp_path / "containerd.log")
    assert "RemovePodSandbox" in stacks
    assert "requestPluginSync" in stacks
    disposable.close()
    assert disposable.shims() == []
    assert str(disposable.directory) not in Path("/proc/self/mountinfo").read_text()


def test_the_plugin_says_that_the_runtime_hangs(disposable: Containerd, tmp_path: Path) -> None:
    """No pod starts any more and no request comes: only a call of ours without an answer tells."""
    if not disposable.binaries.version.startswith("2.1."):
        pytest.skip(f"known of 2.1, this is {disposable.binaries.version}")
    with PluginProcess(
        tmp_path / "plugin", disposable.nri_socket, config={"runtime": {"hungAfter": "2s"}}
    ) as plugin:
        poll(lambda: plugin.responsive() or None, "page", timeout_s=180)
        assert plugin.metric("nri_numa_runtime_unanswered_seconds") == 0
        assert provoke_hang(disposable)
        plugin.restart(kill=True, wait=False)
        poll(lambda: "does not answer" in plugin.log() or None, "said", timeout_s=180)
        poll(lambda: plugin.responsive() or None, "page", timeout_s=180)
        status, text = plugin.get("/readyz")
        assert status == 503
        assert "has not answered a registration" in text
        assert plugin.metric("nri_numa_runtime_unanswered_seconds") >= 2
        [line] = [r for r in plugin.records() if r.get("msg") == "the runtime does not answer"]
        assert "restart the runtime" in line["remedy"]
        disposable.kill()
        disposable.start()
        plugin.wait_ready()
        poll(lambda: "answers again" in plugin.log() or None, "said", timeout_s=180)
        assert plugin.metric("nri_numa_runtime_unanswered_seconds") == 0
