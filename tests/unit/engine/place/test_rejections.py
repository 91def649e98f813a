"""What a refusal says to the author of a pod."""

from dataclasses import dataclass
from typing import cast

import pytest

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.place.needs import FreeResources, memory_shortage_text
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import NodeState
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import KubeletRules, Settings
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

MACHINE = NodeModel(
    topology=machines.dual_no_smt(cores_per_numa=4, memory_gib=64), settings=Settings()
)

KUBELETS = NodeModel(
    topology=MACHINE.topology, settings=Settings(kubelet=KubeletRules(memory=True))
)


def rejection(
    policy: str, cpus: float, memory: float, scope: str = "container", machine: NodeModel = MACHINE
) -> str:
    of = pod(
        "db", {"policy": policy, "cpus": "exclusive", "scope": scope}, total=resources(cpus, memory)
    )
    rejected = admit(
        NodeSnapshot(machine, NodeState()), of, container(of, wants=resources(cpus, memory))
    )
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "TopologyAffinityError"
    return rejected.message


def test_restricted_says_when_no_machine_state_would_help() -> None:
    """By the kubelet's rules: two NUMA nodes for CPUs and one for memory never agree."""
    assert rejection("restricted", 6, 8, machine=KUBELETS) == (
        "pod default/db, container app: cpu and memory: different numbers of NUMA nodes needed: 6 "
        "exclusive CPUs on 2 NUMA nodes, 8 GiB on 1 NUMA node; it needs 6 exclusive CPUs and 8 "
        "GiB memory; policy restricted requires the same number of NUMA nodes for all, as the "
        "kubelet's does (kubeletCompatibility: memory); waiting does not help, best-effort does; "
        "free: NUMA "
        "node 0: 4 CPUs for exclusive use, 64 GiB memory; NUMA node 1: 4 CPUs for exclusive use, "
        "64 GiB memory"
    )
    assert "; all its containers together need 6 " in rejection("restricted", 6, 8, "pod", KUBELETS)


def test_cpus_are_counted_where_the_pod_was_placed() -> None:
    world = World(MACHINE.topology)
    of = pod("db", {"policy": "single-numa-node", "scope": "pod"})
    where = world.place(of, container(of, "a", resources(2, 1)))[1]
    rejected = world.reject(of, container(of, "b", resources(3, 1)))
    assert (
        "container b: cpu: 3 exclusive CPUs needed, 2 free for exclusive use on NUMA node "
        f"{where}; " in rejected.message
    )


def test_other_rejections_name_the_limit() -> None:
    assert "8 GiB memory on one NUMA node (policy single-numa-node)" in rejection(
        "single-numa-node", 6, 8
    )


@dataclass
class Left:
    """What is left, as far as memory goes."""

    free_memory: dict[int, int]
    free_hugepages: dict[int, dict[int, int]]


@pytest.mark.parametrize(
    ("memory", "pages", "lacking"),
    [
        (5, 9, "hugepages-2Mi: 9 B needed, 8 B free here"),
        (6, 8, "memory: 6 B needed, 5 B free here"),
        (6, 9, "memory: 6 B needed, 5 B free here and hugepages-2Mi: 9 B needed, 8 B free here"),
    ],
)
def test_memory_that_just_suffices_is_not_named(memory: int, pages: int, lacking: str) -> None:
    size = 2 << 20
    left = cast(FreeResources, Left({0: 5, 1: 99}, {size: {0: 8, 1: 99}}))
    demand = Demand(memory_bytes=memory, hugepages={size: pages})
    assert memory_shortage_text(demand, left, NUMASet([0]), "here") == lacking
