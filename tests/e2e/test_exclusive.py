"""CPUs of one's own: granted, kept from everybody else, given back, grown and shrunk."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.containerd import Containerd
from tests.beds.containerds import insist_on_rejection
from tests.beds.cri import CRI, QoS, Resources, burstable, guaranteed, poll
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.machines.cpus import LAST, MACHINE

EXCLUSIVE = {"numa.kubernetes.io/cpus": "exclusive"}


def affinity(interrupt: Path, name: str = "smp_affinity_list") -> CPUSet:
    return CPUSet.parse((interrupt / name).read_text().strip())


@pytest.fixture
def movable() -> Iterator[dict[Path, CPUSet]]:
    """The machine's interrupts that can be moved, and where they may go; so again afterwards."""
    found = {}
    for path in sorted(Path("/proc/irq").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            (path / "smp_affinity_list").write_text(str(affinity(path)))
            found[path] = affinity(path)
    if not found:
        pytest.skip("no interrupt of this machine can be moved")
    yield found
    for path, cpus in found.items():
        (path / "smp_affinity_list").write_text(str(cpus))


def test_interrupts_of_devices_leave_exclusive_cpus(
    cri: CRI, start_plugin: StartPlugin, movable: dict[Path, CPUSet]
) -> None:
    """The machine's real interrupts; those that the kernel manages stay, and the log names them."""

    def now() -> dict[Path, CPUSet]:
        return {path: affinity(path) for path in movable}

    plugin = start_plugin({"interruptsOffExclusiveCPUs": True})
    owner = cri.owner()
    own = cri.cpus(owner)
    apart = {path: cpus - own or MACHINE - own for path, cpus in movable.items()}
    poll(lambda: now() == apart, "interrupts leave the owner's CPU")
    for path in set(Path("/proc/irq").glob("[0-9]*")) - movable.keys():
        if affinity(path, "effective_affinity_list") & own:
            poll(lambda p=path: f"{p.name} (" in plugin.log(), "a word about it")  # type: ignore[misc]  # bound per turn
    plugin.kill()
    plugin.start()
    cri.remove_pod(owner.pod)
    poll(lambda: now() == movable, "interrupts go back with the CPU")
    cri.owner("second")
    poll(lambda: now() != movable, "interrupts leave the second owner's CPU")
    plugin.end()
    assert now() == movable


@pytest.mark.core
def test_grant_and_return(cri: CRI, plugin: PluginProcess) -> None:
    """The grant's own answer takes the CPUs from all others; the end of its pod gives them back."""
    before = cri.run(cri.run_pod("before", qos=QoS.BURSTABLE), resources=burstable(0.5))
    pod = cri.run_pod("owner", annotations=EXCLUSIVE)
    owner = cri.create(pod, resources=guaranteed(1))
    taken = MACHINE - cri.cpus(before)
    assert len(taken) == 1  # before the owner's first instruction
    cri.start(owner)
    assert CPUSet.parse(cri.first_line(owner).cpus) == taken
    after = cri.run(cri.run_pod("after", qos=QoS.BURSTABLE), resources=burstable(0.5))
    assert CPUSet.parse(cri.first_line(after).cpus) == MACHINE - taken
    cri.stop(owner)
    assert cri.cpus(before) == MACHINE - taken  # its pod may start it again
    cri.remove_pod(pod)
    for container in (before, after):
        poll(lambda c=container: cri.cpus(c) == MACHINE, "CPUs given back")  # type: ignore[misc]  # bound per turn


def test_no_owned_cpu_comes_back(containerd: Containerd, cri: CRI, plugin: PluginProcess) -> None:
    """Each way in which a neighbour's older set could return, beside updates (start race)."""
    neighbour = cri.pod("neighbour")
    shared = MACHINE - cri.cpus(cri.owner())
    assert containerd.paused_and_executed(neighbour.id) == str(shared)
    containerd.restart()
    assert cri.cpus(neighbour) == shared
    plugin.wait_ready()
    assert cri.cpus(neighbour) == shared
    plugin.kill()
    cri.update(neighbour, Resources(memory=96 << 20))
    plugin.start()
    assert cri.cpus(neighbour) == shared
    cri.stop(neighbour)
    again = cri.run(neighbour.pod, attempt=1)
    assert CPUSet.parse(cri.first_line(again).cpus) == cri.cpus(again) == shared


def test_an_owner_that_exits_by_itself_has_its_cpus_again(cri: CRI, plugin: PluginProcess) -> None:
    """They are kept for its pod; with the pod they are given back."""
    shared = cri.pod("shared")
    pod = cri.run_pod("short", annotations=EXCLUSIVE)
    first = cri.run(pod, resources=guaranteed(1), command=("/bin/true",))
    kept = MACHINE - cri.cpus(shared)
    assert len(kept) == 1
    poll(lambda: not cri.running(first), "its end")
    assert cri.cpus(cri.run(pod, "main", resources=guaranteed(1), attempt=1)) == kept
    assert cri.cpus(shared) == MACHINE - kept
    cri.remove_pod(pod)
    cri.settles(shared, MACHINE)


@pytest.mark.core
def test_listed_cpus_of_an_owner_are_rejected(cri: CRI, plugin: PluginProcess) -> None:
    owner = cri.owner()
    taken = cri.first_line(owner).cpus
    said = insist_on_rejection(cri, "thief", numacpu=taken)
    assert all(words in said for words in ("numacpu", taken, "default/owner/main"))


def test_an_unpaid_list_gives_way_to_an_owner(cri: CRI, plugin: PluginProcess) -> None:
    listed = cri.pod("listed", numacpu=str(MACHINE))
    assert cri.cpus(listed) == MACHINE
    owner = cri.owner()
    assert cri.cpus(listed) == MACHINE - cri.cpus(owner)
    cri.remove_pod(owner.pod)
    cri.settles(listed, MACHINE)


def test_listed_cpus_can_be_owned(cri: CRI, plugin: PluginProcess) -> None:
    shared = cri.pod("shared")
    owner = cri.pod("owner", limit=1, cpus="exclusive", numacpu=LAST)
    assert cri.first_line(owner).cpus == LAST
    assert cri.cpus(shared) == MACHINE - CPUSet.parse(LAST)


def test_nobody_widens_a_pin_by_accident(cri: CRI, plugin: PluginProcess) -> None:
    """Somebody else's cpuset in an update does not move an owner, a list or the shared ones."""
    owner = cri.owner()
    all_of_them = [owner, cri.pod("listed", numacpu=LAST), cri.pod("shared")]
    before = [cri.cpus(each) for each in all_of_them]
    for container in all_of_them:
        cri.update(container, Resources(cpus=str(MACHINE)))
    assert [cri.cpus(each) for each in all_of_them] == before


def test_files_say_what_containers_have_while_they_run(cri: CRI, start_plugin: StartPlugin) -> None:
    """Before the first instruction, while others come and go, after a crash; then they go, too."""
    plugin = start_plugin({"assignedFiles": True})
    show = ("/bin/sh", "-c", "exec 2>&1; cat /run/numa/*; touch /run/numa/x; sleep 3600")
    pod = cri.run_pod("shared", annotations={"numa.kubernetes.io/policy": "best-effort"})
    shared = cri.run(pod, resources=guaranteed(0.5), command=show)
    poll(lambda: len(cri.logs(shared)) >= 4, "what it sees")
    by_node = {"0": {"cpus": str(MACHINE), "devices": {}}}
    cpus, document, mems, refused = cri.logs(shared)[:4]
    assert (cpus, json.loads(document), mems) == (str(MACHINE), by_node, "0")
    assert "Read-only" in refused

    def seen() -> CPUSet:
        """As the container reads it now."""
        inside = Path(f"/proc/{cri.pid(shared)}/root/run/numa/assigned.cpuset")
        return CPUSet.parse(inside.read_text().strip())

    owner = cri.owner()
    left = MACHINE - cri.cpus(owner)
    poll(lambda: seen() == left, "the file follows")
    plugin.kill()
    cri.remove_pod(owner.pod)
    plugin.start()
    poll(lambda: seen() == MACHINE, "the file after the restart")
    directory = plugin.state_directory / "assigned"
    assert sorted(one.name for one in directory.iterdir()) == [shared.id]
    cri.remove_pod(pod)
    poll(lambda: not list(directory.iterdir()), "no files without containers")
