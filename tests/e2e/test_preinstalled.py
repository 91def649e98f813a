"""Pre-installed: containerd starts the plugin itself, and a drop-in is all that configures it."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.containerd import Containerd
from tests.beds.containerds import insist_on_rejection
from tests.beds.cri import CRI, Seen, allowed, poll
from tests.beds.plugin_process import REPOSITORY, free_port
from tests.machines.cpus import LAST, MACHINE

pytestmark = pytest.mark.every_series

RULED = {"rules": [{"match": {"namespaces": ["ruled"]}, "set": {"numacpu": LAST}}]}


class Installed:
    """A containerd that launches the plugin."""

    def __init__(self, containerd: Containerd, directory: Path) -> None:
        self.containerd = containerd
        self.log = directory / "plugin.log"
        self.state = directory / "state"
        self.program = containerd.nri_plugin_directory / "90-nri-numa"
        self.drop_in = containerd.nri_config_directory / "nri-numa.conf"
        self.port = free_port()

    def configure(self, **more: object) -> None:
        document = {
            "stateDir": str(self.state),
            "http": {"address": f"127.0.0.1:{self.port}"},
            "log": {"file": str(self.log)},
            "runtime": {"nriSocket": str(self.containerd.nri_socket)},
        }
        self.drop_in.write_text(json.dumps(document | more))

    def pid(self) -> int:
        """Of the plugin, from the lock of its state directory."""
        return int((self.state / "lock").read_text())


@pytest.fixture
def installed(
    request: pytest.FixtureRequest, containerd: Containerd, tmp_path: Path
) -> Iterator[Installed]:
    bed = Installed(containerd, tmp_path)
    # Where the drop-ins are is the only thing that is not as on a real node.
    bed.program.write_text(
        f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(REPOSITORY))} exec {shlex.quote(sys.executable)}"
        f" -m nri_numa run --nri-config-dir={containerd.nri_config_directory}\n"
    )
    bed.program.chmod(0o755)
    bed.configure()
    containerd.stop()
    try:
        yield bed
    finally:
        if bed.log.exists():
            request.node.add_report_section("teardown", "plugin.log", bed.log.read_text()[-6000:])
        if containerd.running:
            containerd.stop()
        bed.program.unlink()
        bed.drop_in.unlink()
        containerd.start()


def test_the_drop_in_counts_at_once(containerd: Containerd, cri: CRI, installed: Installed) -> None:
    """State directory, HTTP address and log file come from it, and a changed one is reloaded.

    It is ready before the first pod, because the runtime waits for its own plugins.
    """
    containerd.start()
    assert cri.first_line(cri.pod("listed", numacpu="1")) == Seen(
        cpus="1", mems=allowed("self").mems
    )
    assert (installed.state / "checkpoint").exists()
    text = installed.log.read_text()
    assert f"127.0.0.1:{installed.port}" in text
    assert "too late" not in text

    installed.configure(**RULED)
    os.kill(installed.pid(), signal.SIGHUP)
    poll(lambda: "changed=rules" in installed.log.read_text(), "reloaded")
    assert cri.first_line(cri.pod("by-rule", namespace="ruled")).cpus == LAST


def test_the_next_one_continues(containerd: Containerd, cri: CRI, installed: Installed) -> None:
    """It ends with its runtime, and the one that the next runtime starts moves nothing."""
    containerd.start()
    owner, shared = cri.owner(), cri.pod("shared")
    before = (cri.allowed(owner), cri.allowed(shared))
    for kill in (False, True):
        containerd.restart(kill=kill)
        assert (cri.allowed(owner), cri.allowed(shared)) == before
    insist_on_rejection(cri, "late", numacpu=before[0].cpus)
    # NRI 0.6 tells launched plugins no stop of a pod older than itself: the plugin looks.
    cri.remove_pod(owner.pod)
    cri.settles(shared, MACHINE)


def test_mistakes_cost_the_drop_in(containerd: Containerd, cri: CRI, installed: Installed) -> None:
    """Older runtimes end when a plugin of theirs does; this one goes on with its defaults."""
    installed.program.write_text(
        installed.program.read_text().rstrip()
        + f" --state-dir={installed.state} --http=off 2>>{installed.log}\n"
    )
    installed.drop_in.write_text("strategie: spread\n")
    containerd.start()
    assert cri.allowed(cri.pod("listed", numacpu="1")).cpus == "1"
    assert "strategie" in installed.log.read_text()
    assert cri.allowed(cri.pod("free")).mems == allowed("self").mems
