"""Each policy admits and refuses as annotated, and a pod's containers hand CPUs on, for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import CRI, CRIError, guaranteed
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.machines.named import write_sysfs

pytestmark = pytest.mark.e2e

PREFIX = "numa.kubernetes.io/"


def asks(**keys: str) -> dict[str, str]:
    """Annotations of a pod whose memory is left alone: the real kernel has one NUMA node."""
    return {PREFIX + "bind": "cpu", **{PREFIX + key: text for key, text in keys.items()}}


@pytest.fixture
def node(tmp_path: Path, start_plugin: StartPlugin) -> PluginProcess:
    """The plugin on a machine of two NUMA nodes made of this machine's CPUs, 0-1 and 2-3."""
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=2, threads=1)
    return start_plugin(sysfs_root=write_sysfs(tmp_path / "machine", topology))


@pytest.mark.cpus(4, proven_by=("restricted_admitted", "restricted_refused"))
def test_restricted_takes_two_nodes_only_when_an_empty_machine_would_need_them(
    cri: CRI, node: PluginProcess
) -> None:
    wide = cri.run_pod("wide", annotations=asks(policy="restricted"))
    three = cri.run(wide, resources=guaranteed(3))
    assert len(CPUSet.parse(cri.first_line(three).cpus)) == 3
    late = cri.run_pod("late", annotations=asks(policy="restricted"))
    with pytest.raises(CRIError, match="TopologyAffinityError") as caught:
        cri.create(late, resources=guaranteed(2))
    assert "default/late" in caught.value.message
    assert "NUMA node 0" in caught.value.message
    cri.stop(three)
    assert cri.first_line(cri.run(late, resources=guaranteed(2))).cpus in ("0-1", "2-3")


@pytest.mark.cpus(4, proven_by=("best_effort_widens", "single_numa_node_refused"))
def test_best_effort_takes_what_is_left_and_says_so(cri: CRI, node: PluginProcess) -> None:
    """One CPU is taken on each NUMA node; two more are had by crossing over."""
    for number in (0, 2):
        pod = cri.run_pod(f"one-{number}", annotations={PREFIX + "numacpu": str(number)})
        cri.run(pod)
    crossing = cri.run_pod("crossing", annotations=asks(policy="best-effort"))
    # All four CPUs would leave nothing for others: two listed ones stay in the pool.
    assert cri.first_line(cri.run(crossing, resources=guaranteed(2))).cpus == "1,3"
    strict = cri.run_pod("strict", annotations=asks(policy="single-numa-node"))
    with pytest.raises(CRIError, match="TopologyAffinityError"):
        cri.create(strict, resources=guaranteed(2))


@pytest.mark.cpus(4, proven_by="single_numa_node_exclusive")
def test_single_numa_node_admits_what_one_node_has(cri: CRI, node: PluginProcess) -> None:
    pod = cri.run_pod("single", annotations=asks(policy="single-numa-node"))
    assert cri.first_line(cri.run(pod, resources=guaranteed(2))).cpus in ("0-1", "2-3")


@pytest.mark.cpus(4, proven_by="refusal_softened")
def test_unpinned_starts_where_a_policy_would_refuse(cri: CRI, node: PluginProcess) -> None:
    annotations = asks(policy="single-numa-node") | {PREFIX + "on-failure": "unpinned"}
    pod = cri.run_pod("anyhow", annotations=annotations)
    assert cri.first_line(cri.run(pod, resources=guaranteed(3))).cpus == "0-3"


@pytest.mark.cpus(4, proven_by="init_hands_its_cpus_on")
def test_the_app_gets_the_cpus_of_its_init_container(cri: CRI, node: PluginProcess) -> None:
    pod = cri.run_pod("stages", annotations=asks(policy="single-numa-node"))
    init = cri.run(pod, "init", resources=guaranteed(1))
    before = cri.first_line(init).cpus
    cri.stop(init)
    cri.remove(init)
    app = cri.run(pod, "app", resources=guaranteed(1))
    assert cri.first_line(app).cpus == before
