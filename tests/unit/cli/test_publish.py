"""``nri-numa publish`` on the command line: what it says before it begins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.beds.plugin_process import plugin_environment
from tests.unit.cli.conftest import invoke


def test_without_a_socket_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRI_NUMA_CONFIG", raising=False)
    done = invoke("publish")
    assert done.exit_code == 2
    assert "http.socket: is empty; nri-numa publish reads the agent there" in done.output


def test_mistakes_of_flags_are_mistakes_of_the_configuration() -> None:
    done = invoke("publish", "--socket", "x", "--address", "10.0.0.1:1")
    assert done.exit_code == 2
    assert "http.socket: 'x', expected an absolute path" in done.output
    assert "publish.address: 10.0.0.1:1, expected one on loopback, or off" in done.output


def test_the_agent_needs_no_kubernetes_client() -> None:
    """Neither its memory nor its start pays for the publisher."""
    code = (
        "import sys, nri_numa.cli.processes, nri_numa.agent.daemon, nri_numa.web.server;"
        "print([m for m in ('aiohttp', 'nri_numa.kube', 'nri_numa.publisher') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_it_ends_on_sigterm_and_says_what_it_waits_for(tmp_path: Path) -> None:
    """Without an agent, without an API server: nothing of that is a reason to end."""
    command = [sys.executable, "-m", "nri_numa", "publish", "--socket", str(tmp_path / "none"),
               "--node-name", "n1", "--address", "off", "--log-format", "json"]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=plugin_environment())
    deadline = time.monotonic() + 60
    while b"the agent does not answer" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert next(line["node"] for line in lines if line["msg"] == "publishing") == "n1"
    said = [line["msg"] for line in lines]
    assert said[-1] == "stopping"
    assert said.count("the agent does not answer") == 1
