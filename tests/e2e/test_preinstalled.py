"""Pre-installed mode: containerd starts the plugin itself and gives it a connected socket."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, CRIError, Seen, allowed, guaranteed, poll
from tests.beds.plugin_process import REPOSITORY
from tests.machines.cpus import LAST, MACHINE

pytestmark = [pytest.mark.e2e, pytest.mark.every_series]

EXCLUSIVE = {"numa.kubernetes.io/cpus": "exclusive"}


@pytest.fixture
def launched(
    request: pytest.FixtureRequest, containerd: Containerd, tmp_path: Path
) -> Iterator[Path]:
    """Containerd restarted with ``90-nri-numa`` in its plugin directory; the plugin's log."""
    log = tmp_path / "plugin.log"
    program = containerd.nri_plugin_directory / "90-nri-numa"
    # The runtime gives no argument, no PATH, no HOME, and /dev/null for all output. What is read
    # at start comes from a file or the environment, because the drop-in arrives with the link.
    settings = {
        "PYTHONPATH": str(REPOSITORY),
        "NRI_NUMA_STATE_DIR": str(tmp_path / "state"),
        "NRI_NUMA_HTTP": "off",
        "NRI_NUMA_NRI_SOCKET": str(containerd.nri_socket),
    }
    exports = "".join(f"export {key}={shlex.quote(text)}\n" for key, text in settings.items())
    program.write_text(
        f"#!/bin/sh\n{exports}exec {shlex.quote(sys.executable)} -m nri_numa 2>>{log}\n"
    )
    program.chmod(0o755)
    drop_in = containerd.nri_config_directory / "90-nri-numa.conf"
    drop_in.write_text(
        json.dumps({"rules": [{"match": {"namespaces": ["ruled"]}, "set": {"numacpu": LAST}}]})
    )
    containerd.stop()
    try:
        containerd.start()
        yield log
    finally:
        if log.exists():
            request.node.add_report_section("teardown", "plugin.log", log.read_text()[-6000:])
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
    ruled = cri.pod("by-rule", namespace="ruled")
    assert cri.first_line(ruled).cpus == LAST


def test_the_next_one_started_goes_on(containerd: Containerd, cri: CRI, launched: Path) -> None:
    """It ends with its runtime, and the one that the next runtime starts moves nothing."""
    owner = cri.owner()
    shared = cri.pod("shared")
    before = (cri.allowed(owner), cri.allowed(shared))
    for kill in (False, True):
        containerd.restart(kill=kill)
        assert (cri.allowed(owner), cri.allowed(shared)) == before
    late = cri.run_pod("late", annotations=EXCLUSIVE)
    rest = MACHINE - CPUSet.parse(before[0].cpus)
    if len(MACHINE) == 2:
        with pytest.raises(CRIError, match="default/late"):
            cri.create(late, resources=guaranteed(1))
    else:
        own = cri.run(late, resources=guaranteed(1))
        assert not cri.cpus(own) & CPUSet.parse(before[0].cpus)
        cri.stop_pod(late)
    poll(lambda: cri.cpus(shared) == rest, "late gave back")
    # NRI 0.6 tells launched plugins no stop of a pod older than itself: the plugin looks.
    cri.remove_pod(owner.pod)
    poll(lambda: cri.allowed(shared).cpus == allowed("self").cpus, "CPUs given back")
