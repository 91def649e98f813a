"""Restarts of the plugin and of containerd: nothing that runs moves, nothing is given twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from nri_numa.model.cpuset import NO_CPUS, CPUSet
from tests.beds.containerd import Containerd
from tests.beds.containerds import insist_on_rejection
from tests.beds.cri import CRI, Container, CRIError, QoS, Resources, burstable, guaranteed, poll
from tests.beds.plugin_process import PluginProcess
from tests.machines.cpus import MACHINE

pytestmark = pytest.mark.every_series

EXCLUSIVE = {"numa.kubernetes.io/cpus": "exclusive"}
LISTED = {"numacpu": "1", "numamem": "0"}
MANY = min(2, len(MACHINE) - 1)
"""CPUs that one owner can have beside the list, more than one where there are three."""


@dataclass
class LifecyclePods:
    """Three pods that stand for all: an owner, one with a list, one that shares."""

    owner: Container
    listed: Container
    shared: Container
    seen: list[CPUSet] = field(default_factory=list)

    @classmethod
    def create(cls, cri: CRI) -> LifecyclePods:
        shared = cri.run(cri.run_pod("shared", qos=QoS.BURSTABLE), resources=burstable(0.5))
        listed = cri.pod("listed", **LISTED)
        owner = cri.owner()
        node = cls(owner=owner, listed=listed, shared=shared)
        node.seen = node.now(cri)
        assert node.seen[1] == CPUSet.parse("1")
        assert node.seen[2] == MACHINE - node.seen[0]
        return node

    def now(self, cri: CRI) -> list[CPUSet]:
        return [cri.cpus(each) for each in (self.owner, self.listed, self.shared)]

    def check(self, cri: CRI) -> None:
        """Nobody moved, and nobody gets what the owner has."""
        assert self.now(cri) == self.seen
        insist_on_rejection(cri, "late", numacpu=str(self.seen[0]))
        assert self.now(cri) == self.seen
        # Of a pod older than its runtime no stop is reported: the cgroup that is gone shows it.
        cri.remove_pod(self.owner.pod)
        cri.settles(self.shared, MACHINE)


@pytest.mark.core
@pytest.mark.parametrize("kill", [False, True], ids=["sigterm", "sigkill"])
def test_plugin_restart_moves_nothing(cri: CRI, plugin: PluginProcess, kill: bool) -> None:
    node = LifecyclePods.create(cri)
    plugin.restart(kill=kill)
    assert node.now(cri) == node.seen
    plugin.restart(kill=kill)
    node.check(cri)


def test_the_plugin_uses_no_deprecated_call(containerd: Containerd, plugin: PluginProcess) -> None:
    """``ctr deprecations list`` names plugins that leave an event to NRI's old StateChange."""
    owner = containerd.cri.owner()
    containerd.cri.update(owner, guaranteed(1))
    containerd.cri.remove_pod(owner.pod)
    assert "nri" not in containerd.ctr("deprecations", "list").lower()


# One pod's life, step by step; the plugin is killed after each of them in turn.
STEPS: tuple[tuple[str, Callable[[CRI, dict[str, Container]], None]], ...] = (
    ("nothing", lambda cri, own: None),
    (
        "created",
        lambda cri, own: own.update(
            owner=cri.create(
                cri.run_pod("owner", annotations=EXCLUSIVE), resources=guaranteed(MANY)
            )
        ),
    ),
    ("started", lambda cri, own: cri.start(own["owner"])),
    ("resized", lambda cri, own: cri.update(own["owner"], guaranteed(1))),
    ("stopped", lambda cri, own: cri.stop(own["owner"])),
    ("removed", lambda cri, own: cri.remove(own["owner"])),
    ("its pod removed", lambda cri, own: cri.remove_pod(own["owner"].pod)),
)


@pytest.mark.parametrize("killed_after", range(len(STEPS)), ids=[name for name, _ in STEPS])
def test_kill_between_any_two_steps(cri: CRI, plugin: PluginProcess, killed_after: int) -> None:
    """After each step of a pod's life: kill -9, start again, go on; the books stay right."""
    shared = cri.pod("shared")
    listed = cri.pod("listed", **LISTED)
    own: dict[str, Container] = {}
    for number, (name, step) in enumerate(STEPS):
        step(cri, own)
        if number == killed_after:
            plugin.restart(kill=True)
        if name in ("nothing", "its pod removed"):
            taken = NO_CPUS
        elif name in ("started", "resized"):
            taken = cri.cpus(own["owner"])
            assert len(taken) == (MANY if name == "started" else 1)
            assert CPUSet.parse("1") != taken
        if name != "created":
            cri.settles(shared, MACHINE - taken)
        assert cri.cpus(listed) == CPUSet.parse("1")
    # All CPUs but the listed one are free again, and can be owned.
    most = max(1, len(MACHINE) - 2)
    assert len(cri.cpus(cri.owner("final", most))) == most


def test_containers_started_while_we_were_away_are_found(cri: CRI, plugin: PluginProcess) -> None:
    shared = cri.pod("shared")
    plugin.kill()
    listed = cri.pod("listed", **LISTED)
    owner = cri.owner()
    impossible = cri.pod("impossible", numacpu="63")
    for container in (listed, owner, impossible):
        assert CPUSet.parse(cri.first_line(container).cpus) == MACHINE  # nobody was there
    plugin.start()
    cri.settles(listed, CPUSet.parse("1"))
    poll(lambda: len(cri.cpus(owner)) == 1, "the owner pinned")
    cri.settles(shared, MACHINE - cri.cpus(owner))
    assert cri.running(impossible)  # it runs already: said and counted, not killed
    gaps = [record for record in plugin.records() if "missed_start" in str(record)]
    assert gaps, "found containers are in the log"


@pytest.mark.core
@pytest.mark.parametrize("kill", [False, True], ids=["sigterm", "sigkill"])
def test_containerd_restart_loses_nothing(
    containerd: Containerd, cri: CRI, plugin: PluginProcess, kill: bool
) -> None:
    """The plugin comes back by itself, its process untouched, and goes on where it was."""
    node = LifecyclePods.create(cri)
    process = plugin.pid
    if kill:
        containerd.kill()
    else:
        containerd.stop()
    plugin.wait_ready(ready=False)
    containerd.start()
    plugin.wait_ready()
    assert plugin.pid == process
    node.check(cri)


@pytest.mark.parametrize("away", ["plugin", "containerd", "both"])
def test_what_a_pod_had_that_vanished_is_free(
    containerd: Containerd, cri: CRI, plugin: PluginProcess, away: str
) -> None:
    """Its container ends and its pod stops, and neither is reported; it may stay listed."""
    shared, owner = cri.pod("shared"), cri.owner()
    assert cri.cpus(shared) < MACHINE
    process = cri.pid(owner)
    if away != "containerd":
        plugin.kill()
    if away != "plugin":
        containerd.kill()
    os.kill(process, signal.SIGKILL)
    if away != "plugin":
        containerd.start()
    poll(lambda: not cri.running(owner), "its end")
    if away == "plugin":
        cri.remove_pod(owner.pod)
    if away == "containerd":
        plugin.wait_ready()
    else:
        plugin.start()
    if away != "plugin":
        cri.remove_pod(owner.pod)
    cri.settles(shared, MACHINE)
    cri.owner("next", max(1, len(MACHINE) - 1))


def test_a_failed_start_keeps_its_cpus_for_its_pod_alone(cri: CRI, plugin: PluginProcess) -> None:
    """Not reported by the runtime: the next attempt has the same CPUs, until the sandbox stops."""
    shared = cri.pod("shared")
    pod = cri.run_pod("owner", annotations=EXCLUSIVE)
    failed = cri.create(pod, resources=guaranteed(1), command=["/missing"])
    own = MACHINE - cri.cpus(shared)
    assert len(own) == 1
    with pytest.raises(CRIError, match="missing"):
        cri.start(failed)
    insist_on_rejection(cri, "late", numacpu=str(own))
    again = cri.run(pod, resources=guaranteed(1), attempt=1)
    assert cri.cpus(again) == own
    cri.stop(again)
    with pytest.raises(CRIError, match="missing"):
        cri.run(pod, resources=guaranteed(1), command=["/missing"], attempt=2)
    assert cri.cpus(shared) == MACHINE - own
    cri.remove_pod(pod)
    cri.settles(shared, MACHINE)


def test_a_create_that_its_client_cancelled_gives_back_when_its_pod_ends(
    containerd: Containerd, cri: CRI, plugin: PluginProcess
) -> None:
    """Containerd 1.7 does not undo it; later series do."""
    shared = cri.pod("shared")
    pod = cri.run_pod("owner", annotations=EXCLUSIVE)
    began = f'CreateContainer within sandbox \\"{pod.id}\\"'
    with containerd.client() as hasty, ThreadPoolExecutor(1) as thread:
        os.kill(plugin.pid, signal.SIGSTOP)
        try:
            creation = thread.submit(hasty.create, pod, resources=guaranteed(1))
            poll(lambda: began in containerd.log(), "the runtime asks the plugin")
            hasty.close()
            with pytest.raises(CRIError, match="CANCELLED"):
                creation.result()
        finally:
            os.kill(plugin.pid, signal.SIGCONT)
    poll(lambda: '"pod":"default/owner"' in plugin.log(), "decided")
    cri.remove_pod(pod)
    cri.settles(shared, MACHINE)


def test_updates_before_and_after_a_restart_agree(cri: CRI, plugin: PluginProcess) -> None:
    """An update that comes after a restart starts from the pin, not from the whole machine."""
    listed = cri.pod("listed", **LISTED)
    plugin.restart(kill=True)
    cri.update(listed, Resources(shares=512))
    cri.update(listed, Resources(cpus=str(MACHINE)))
    assert cri.cpus(listed) == CPUSet.parse("1")
