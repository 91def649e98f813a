"""Faults on purpose, on a real containerd: nothing that runs moves, no CPU is owned twice."""

import json
import os
import shutil
import signal
import time

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.containerd import Containerd
from tests.beds.containerds import insist_on_rejection
from tests.beds.cri import BEST_EFFORT, CRI, CRIError, Resources, asks, guaranteed, poll, with_cpus
from tests.beds.link_thread import LinkThread
from tests.beds.plugin_process import PluginProcess
from tests.machines.cpus import MACHINE

MARK = "numa.kubernetes.io/assigned"


def test_a_plugin_that_hangs_is_dropped_and_comes_back(cri: CRI, plugin: PluginProcess) -> None:
    """Past the request timeout the runtime goes on without us; what it did meanwhile is found."""
    owner = cri.owner()
    own = cri.cpus(owner)
    listed = CPUSet([max(MACHINE - own)])
    os.kill(plugin.pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        missed = cri.pod("missed", numacpu=str(listed))
    finally:
        os.kill(plugin.pid, signal.SIGCONT)
    assert time.monotonic() - begin < 15
    assert CPUSet.parse(cri.first_line(missed).cpus) == MACHINE
    cri.settles(missed, listed)
    assert cri.cpus(owner) == own
    insist_on_rejection(cri, "late", numacpu=str(own))


@pytest.mark.parametrize("lost", ["checkpoint", "directory"])
def test_an_owner_ends_while_the_state_is_lost(cri: CRI, plugin: PluginProcess, lost: str) -> None:
    """Its neighbours are known by their mark, not by their CPUs, which are nobody's pool now."""
    pod = cri.run_pod("plain")
    neighbours = [cri.run(pod, f"c{number}") for number in range(2)]
    plugin.kill()
    gap = cri.run(pod, "gap")
    plugin.start()
    owner = cri.owner()
    own = cri.cpus(owner)
    for each in neighbours:
        assert json.loads(cri.spec_annotations(each)[MARK])["kind"] == "unpinned"
    assert MARK not in cri.spec_annotations(gap), "its cgroup has it"
    neighbours.append(gap)
    for each in neighbours:
        cri.settles(each, MACHINE - own)
    plugin.kill()
    cri.remove(owner)
    if lost == "directory":
        shutil.rmtree(plugin.state_directory)
    else:
        plugin.checkpoint.unlink()
    plugin.start()
    for each in neighbours:
        cri.settles(each, MACHINE)
    assert plugin.metric("nri_numa_unknown_cpusets_total") == 0
    assert plugin.metric("nri_numa_assigned_annotations_rejected_total") == 0
    later = cri.owner("later")
    for each in neighbours:
        cri.settles(each, MACHINE - cri.cpus(later))


def test_a_spoilt_creation_is_said(containerd: Containerd, cri: CRI, plugin: PluginProcess) -> None:
    """Both set the cpuset: the runtime fails the creation, and tells neither of them why."""
    shared, other = cri.pod("shared"), LinkThread(containerd)
    try:
        other.wait_active()
        pod = cri.run_pod("torn", annotations={**asks(cpus="exclusive"), "cpus": "0"})
        with pytest.raises(CRIError, match="both tried to set"):
            cri.create(pod, resources=guaranteed(1))
    finally:
        other.close()
    poll(lambda: plugin.metric("nri_numa_undone_creations_total") == 1, "it is counted")
    assert "container creation undone by runtime" in plugin.log()
    cri.remove_pod(pod)
    cri.settles(shared, MACHINE)


def test_a_forged_annotation_gives_nothing(cri: CRI, plugin: PluginProcess) -> None:
    """A container that was created without us, and carries what its author wrote."""
    honest = cri.pod("honest")
    plugin.kill()
    note = {
        "cpus": str(MACHINE), "mems": "", "policy": "none", "kind": "exclusive", "numaNodes": "0",
        "format": 2, "aligned": True, "reason": "mine", "signature": "0" * 32,
    }  # fmt: skip
    forged = cri.run(
        cri.run_pod("mallory"),
        annotations={MARK: json.dumps(note, separators=(",", ":"))},
        resources=with_cpus(BEST_EFFORT, str(MACHINE)),
    )
    plugin.start()
    poll(
        lambda: plugin.metric("nri_numa_assigned_annotations_rejected_total") == 1, "it is counted"
    )
    assert "default/mallory/main" in plugin.log()
    assert "but its pod requests 0" in plugin.log()
    assert cri.cpus(honest) == MACHINE
    owner = cri.owner()
    for each in (honest, forged):
        cri.settles(each, MACHINE - cri.cpus(owner))


def test_a_pin_that_is_taken_back_is_forgotten(cri: CRI, plugin: PluginProcess) -> None:
    """One write of somebody else makes a container foreign; all CPUs make it ours again."""
    plain = cri.pod("plain")
    last = CPUSet([max(MACHINE)])

    def kind() -> str:
        return str(plugin.json("/v1/assignments")["containers"][0]["kind"])

    cri.update(plain, Resources(cpus=str(last)))
    assert cri.cpus(plain) == last
    poll(lambda: kind() == "foreign", "it is somebody else's")
    cri.update(plain, Resources(cpus=str(MACHINE)))
    poll(lambda: kind() == "unpinned", "it is pinned no more")
    owner = cri.owner()
    poll(lambda: not cri.cpus(plain) & cri.cpus(owner), "off the owner's CPU")
    cri.update(plain, Resources(cpus=str(MACHINE)))
    assert cri.cpus(plain) == MACHINE - cri.cpus(owner)
    cri.remove_pod(owner.pod)
    cri.settles(plain, MACHINE)
