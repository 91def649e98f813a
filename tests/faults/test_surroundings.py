"""The world around the plugin: clocks, a second instance, cgroups, CPUs, short-lived containers."""

from functools import partial
from pathlib import Path

import pytest

from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.model.cpuset import CPUSet
from tests.beds.embedded_node import RUNTIMES, EmbeddedNode, FaultyPlugin, until
from tests.machines import named as machines


def test_a_clock_that_jumps(bare: EmbeddedNode) -> None:
    """Backwards by years and forwards by days: time is for people only."""
    node = bare
    clock = node.directory / "clock"

    def jump(offset: int) -> None:
        new = clock.with_suffix(".new")
        new.write_text(str(offset))
        new.rename(clock)

    jump(0)
    node.start(f"clock:{clock}")
    node.four()
    for offset in (-40 * 365 * 86_400, 3 * 86_400, -86_400, 0):
        jump(offset)
        node.note(node.owner(f"at{offset}"), "exclusive")
        node.check()
    jump(-86_400)
    node.plugin.restart(kill=True)
    node.check()
    node.usable()


def test_a_second_instance_says_so_and_leaves(node: EmbeddedNode) -> None:
    """It ends with 3 and the first one's process id, and disturbs nobody."""
    second = FaultyPlugin(
        node.directory / "second", node.socket, config=node.config, sysfs_root=node.sysfs_root
    )
    second.state_directory = node.plugin.state_directory
    node.others.append(second)
    second.start(wait=False)
    assert second.wait() == 3
    (line,) = [r for r in second.records() if r.get("level") == "error"]
    assert line["msg"] == "agent not started"
    assert str(node.plugin.pid) in line["problem"]
    assert node.plugin.ready()
    node.check()
    node.plugin.kill()
    second.start()  # the lock went with the first one
    second.kill()
    node.start()
    node.check()


def repaired(node: EmbeddedNode, times: int) -> None:
    """Wait until so many repairs are counted."""
    until(lambda: node.metric("nri_numa_drift_repaired_total") == times, "repaired")


def drifts(node: EmbeddedNode, container: DemoContainer, times: int) -> None:
    """Rewrite a cpuset until it was repaired as drift so many times.

    What is rewritten while the plugin still looks whether its own update has arrived is put right
    as late, which is counted elsewhere.
    """
    while True:
        before = node.metric("nri_numa_undelivered_updates_repaired_total")
        node.tamper(container, "0-31", "0-3")
        until(partial(_put_right, node, times, before), "put right")
        if node.metric("nri_numa_drift_repaired_total") == times:
            return


def _put_right(node: EmbeddedNode, times: int, late: float) -> bool:
    drift = node.metric("nri_numa_drift_repaired_total")
    return drift == times or node.metric("nri_numa_undelivered_updates_repaired_total") > late


def test_a_rewritten_cpuset_is_repaired_counted_and_said(tmp_path: Path) -> None:
    config = {"reconcile": {"interval": "200ms", "maxRepairs": 2}}
    with EmbeddedNode(tmp_path, config=config) as node:
        node.start()
        free, listed, _, owner = node.four()
        path = node.cgroup(listed.id)
        for number in (1, 2):
            drifts(node, listed, number)
            assert node.cgroups.cpus_of(path) == "1"
        # The effective set of this bed follows a write of ours a moment later than the kernel's.
        assert node.metric("nri_numa_drift_found_total") >= 2
        node.logged("drift found")
        node.logged("drift repaired")
        node.tamper(listed, "0-31", "0-3")
        until(lambda: node.metric("nri_numa_drift_repairs_abandoned_total") == 1, "given up")
        node.logged("another program keeps rewriting")
        assert node.cgroups.cpus_of(path) == "0-31"
        # The others are still looked after.
        node.tamper(free, "0-31")
        repaired(node, 3)
        owned = CPUSet.parse(owner.cpus)
        assert not CPUSet.parse(node.cgroups.cpus_of(node.cgroup(free.id))) & owned
        node.tamper(listed, "1", "0")
        node.check()


def test_a_plugin_that_only_watches_leaves_drift_alone(tmp_path: Path) -> None:
    config = {"observe": True, "reconcile": {"interval": "200ms"}}
    with EmbeddedNode(tmp_path, config=config) as node:
        node.start()
        listed = node.listed()
        assert listed.cpus == str(node.topology.online)
        node.logged("drift found")
        assert node.metric("nri_numa_drift_found_total") == 1
        assert node.metric("nri_numa_drift_repaired_total") == 0
        assert listed.cpus == str(node.topology.online)


@pytest.mark.parametrize("bare", RUNTIMES.values(), indirect=True, ids=RUNTIMES)
def test_a_container_that_dies_between_create_and_start(node: EmbeddedNode) -> None:
    """Its CPUs come back, also when the plugin is killed in between."""
    for number, kill in enumerate((False, True)):
        pod = node.pod(f"young{number}", {"policy": "single-numa-node"})
        container = node.create(pod, cpus=4)
        taken = CPUSet.parse(container.cpus)
        assert len(taken) == 4
        if kill:
            node.plugin.restart(kill=True)
        node.check()
        node.call(node.runtime.remove_pod(pod.id))
        node.check()
        again = node.owner(f"again{number}", 4)
        assert CPUSet.parse(again.cpus) == taken
        node.remove(again)
        node.check()


def test_a_start_that_fails(node: EmbeddedNode) -> None:
    """The kernel refuses the cpuset: the runtime reports it only when it removes the container."""
    pod = node.pod("young", {"policy": "single-numa-node"})
    container = node.create(pod, cpus=2)
    node.runtime.machine = machines.snc_no_smt(cores_per_numa=1)
    with pytest.raises(PodOperationFailed, match="failed to create"):
        node.begin(container)
    node.runtime.machine = node.topology
    node.plugin.restart(kill=True)
    node.check()
    node.call(node.runtime.remove_pod(pod.id))
    node.check()
    node.usable()


@pytest.mark.parametrize("bare", RUNTIMES.values(), indirect=True, ids=RUNTIMES)
def test_cpus_go_and_come_back(node: EmbeddedNode) -> None:
    """Nobody keeps CPUs that are not there, and everybody gets them back."""
    free, listed, shared, owner = node.live
    two = node.listed("two", "17-18", "3")
    seen = {c.id: c.cpus for c in (free, listed, shared, owner, two)}
    node.write_machine(machines.snc_smt(memory_gib=64, offline=CPUSet.parse("18")))
    until(lambda: two.cpus == "17", "the list is shorter")
    node.logged("CPUs changed")
    assert node.metric("nri_numa_offline_cpus") == 1
    assert 18 not in CPUSet.parse(free.cpus)
    with pytest.raises(PodOperationFailed, match="offline"):
        node.listed("late", "18", "3")
    node.write_machine(node.topology)
    until(lambda: {c.id: c.cpus for c in (free, listed, shared, owner, two)} == seen, "as before")
    node.check()
