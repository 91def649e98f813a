"""Pre-installed mode: containerd starts the plugin itself and gives it a connected socket."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.topology.cpuset import CPUSet
from tests.support.containerd import Containerd
from tests.support.cri import CRI, Seen, allowed, guaranteed, poll
from tests.support.plugin_process import REPOSITORY

pytestmark = pytest.mark.e2e

EXCLUSIVE = {"numa.kubernetes.io/cpus": "exclusive"}


@pytest.fixture
def launched(containerd: Containerd, tmp_path: Path) -> Iterator[Path]:
    """Containerd restarted with ``90-nri-numa`` in its plugin directory; the plugin's log."""
    log = tmp_path / "plugin.log"
    program = containerd.nri_plugin_directory / "90-nri-numa"
    # The runtime gives no argument, no PATH, no HOME, and /dev/null for all output.
    program.write_text(
        "#!/bin/sh\n"
        f"PYTHONPATH={shlex.quote(str(REPOSITORY))} exec {shlex.quote(sys.executable)} "
        f"-m nri_numa run 2>>{shlex.quote(str(log))}\n"
    )
    program.chmod(0o755)
    drop_in = containerd.nri_config_directory / "90-nri-numa.conf"
    config = {
        "stateDir": str(tmp_path / "state"),
        "http": {"address": "off"},
        "log": {"format": "json"},
        "rules": [{"match": {"namespaces": ["ruled"]}, "set": {"numacpu": "3"}}],
    }
    drop_in.write_text(json.dumps(config))
    containerd.stop()
    try:
        containerd.start()
        yield log
    finally:
        containerd.stop()
        program.unlink()
        drop_in.unlink()
        containerd.start()


def test_pins_and_takes_its_drop_in_configuration(
    containerd: Containerd, cri: CRI, launched: Path
) -> None:
    """Ready before the first pod, because the runtime waits for its own plugins."""
    pod = cri.run_pod("listed", annotations={"numa.kubernetes.io/numacpu": "1"})
    assert cri.first_line(cri.run(pod)) == Seen(cpus="1", mems=allowed("self").mems)
    ruled = cri.run(cri.run_pod("by-rule", namespace="ruled"))
    assert cri.first_line(ruled).cpus == "3"


def test_the_next_one_started_goes_on(containerd: Containerd, cri: CRI, launched: Path) -> None:
    """It ends with its runtime, and the one that the next runtime starts moves nothing."""
    owner = cri.run(cri.run_pod("owner", annotations=EXCLUSIVE), resources=guaranteed(1))
    shared = cri.run(cri.run_pod("shared"))
    before = (cri.allowed(owner), cri.allowed(shared))
    for kill in (False, True):
        containerd.restart(kill=kill)
        assert (cri.allowed(owner), cri.allowed(shared)) == before
    late = cri.run(cri.run_pod("late", annotations=EXCLUSIVE), resources=guaranteed(1))
    assert not CPUSet.parse(cri.allowed(late).cpus) & CPUSet.parse(before[0].cpus)
    cri.stop(owner)
    cri.stop(late)
    poll(lambda: cri.allowed(shared).cpus == allowed("self").cpus or None, "CPUs given back")
