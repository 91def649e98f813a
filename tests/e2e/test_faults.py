"""Faults on purpose, on a real containerd: nothing that runs moves, no CPU is owned twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.topology.cpuset import NO_CPUS, CPUSet
from tests.support.containerd import Containerd
from tests.support.cri import CRI, Container, CRIError, allowed, guaranteed, poll
from tests.support.plugin_process import PluginProcess, StartPlugin

pytestmark = pytest.mark.e2e

EXCLUSIVE = {"numa.kubernetes.io/cpus": "exclusive"}
MACHINE = CPUSet.parse(allowed("self").cpus)


def cpus(cri: CRI, container: Container) -> CPUSet:
    """CPUs that a running container may use now."""
    return CPUSet.parse(cri.allowed(container).cpus)


@pytest.mark.cpus(4)
def test_a_plugin_that_hangs_is_dropped_and_comes_back(cri: CRI, plugin: PluginProcess) -> None:
    """Past the request timeout the runtime goes on without us; what it did meanwhile is found."""
    owner = cri.run(cri.run_pod("owner", annotations=EXCLUSIVE), resources=guaranteed(1))
    own = cpus(cri, owner)
    os.kill(plugin.pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        missed = cri.run(cri.run_pod("missed", annotations={"numa.kubernetes.io/numacpu": "2"}))
    finally:
        os.kill(plugin.pid, signal.SIGCONT)
    assert time.monotonic() - begin < 15
    assert CPUSet.parse(cri.first_line(missed).cpus) == MACHINE
    poll(lambda: cpus(cri, missed) == CPUSet.parse("2") or None, "the missed one pinned")
    assert cpus(cri, owner) == own
    late = cri.run(cri.run_pod("late", annotations=EXCLUSIVE), resources=guaranteed(1))
    assert not cpus(cri, late) & (own | CPUSet.parse("2"))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.cpus(4)
def test_a_full_state_directory_stops_nobody(
    cri: CRI, start_plugin: StartPlugin, tiny: Path
) -> None:
    """Containers are placed as before; it is said, and written again once there is room."""
    plugin = start_plugin(state_directory=tiny)
    filler = tiny / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    owners = []
    for number in range(2):
        pod = cri.run_pod(f"owner{number}", annotations=EXCLUSIVE)
        owners.append(cri.run(pod, resources=guaranteed(1)))
    assert not cpus(cri, owners[0]) & cpus(cri, owners[1])
    # A journal has what is left of its last page; many small changes fill that.
    many = cri.run_pod("many", annotations={"numa.kubernetes.io/numacpu": "3"})
    for number in range(60):
        cri.create(many, f"c{number}")
        if "not written" in plugin.log():
            break
    poll(lambda: "checkpoint not written" in plugin.log() or None, "the failure said")
    assert plugin.metric("nri_numa_checkpoint_errors_total") > 0
    filler.unlink()
    poll(lambda: "checkpoint written again" in plugin.log() or None, "the recovery said")
    before = [cpus(cri, each) for each in owners]
    plugin.restart(kill=True)
    assert [cpus(cri, each) for each in owners] == before
    thief = cri.run_pod("thief", annotations={"numa.kubernetes.io/numacpu": str(before[0])})
    with pytest.raises(CRIError, match="default/thief"):
        cri.create(thief)


def test_a_socket_that_is_replaced_is_found(
    containerd: Containerd, cri: CRI, plugin: PluginProcess
) -> None:
    """Containerd removes and makes its socket anew at each start; ours must not stay on the old."""
    for _ in range(3):
        containerd.kill()
        plugin.wait_ready(ready=False)
        containerd.nri_socket.unlink(missing_ok=True)
        containerd.start()
        plugin.wait_ready()
    pod = cri.run_pod("after", annotations={"numa.kubernetes.io/numacpu": "1"})
    assert cri.first_line(cri.run(pod)).cpus == "1"


@pytest.mark.cpus(4)
def test_random_kills_under_churn(cri: CRI, plugin: PluginProcess) -> None:
    """Kill -9 at any moment, also inside a request: the books of plugin and kernel agree after."""
    rng = random.Random(20_251_121)
    shared = cri.run(cri.run_pod("shared"))
    owners: dict[str, Container] = {}
    for number in range(18):
        if rng.random() < 0.3:
            plugin.kill()
            plugin.start(wait=rng.random() < 0.5)
        if len(owners) < 3 and (not owners or rng.random() < 0.6):
            name = f"owner{number}"
            pod = cri.run_pod(name, annotations=EXCLUSIVE)
            with contextlib.suppress(CRIError):
                owners[name] = cri.run(pod, resources=guaranteed(1))
        else:
            name = rng.choice(sorted(owners))
            cri.remove(owners.pop(name))
    plugin.wait_ready()

    def agreed() -> bool | None:
        taken = NO_CPUS
        for owner in owners.values():
            own = cpus(cri, owner)
            if len(own) != 1 or own & taken:
                return None
            taken = taken | own
        return cpus(cri, shared) == MACHINE - taken or None

    poll(agreed, "each owner with one CPU of its own, the rest shared")
