"""What a refusal says to the author of a pod."""

from __future__ import annotations

from nri_numa.engine.decide import admit
from nri_numa.engine.decision import Machine, Refused
from nri_numa.engine.settings import Settings
from nri_numa.engine.state import NodeState
from nri_numa.topology.synthetic import synthetic
from tests.support.world import container, pod, resources

MACHINE = Machine(
    topology=synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=64),
    settings=Settings(),
)


def refusal(policy: str, cpus: float, memory: float, scope: str = "container") -> str:
    of = pod(
        "db",
        {"policy": policy, "cpus": "exclusive", "scope": scope},
        total=resources(cpus, memory),
    )
    refused = admit(MACHINE, NodeState(), of, container(of, wants=resources(cpus, memory)))
    assert isinstance(refused, Refused)
    assert refused.reason == "TopologyAffinityError"
    return refused.message


def test_restricted_says_when_no_machine_state_would_help() -> None:
    """CPUs that need two NUMA nodes and memory that needs one are refused when all is free."""
    assert refusal("restricted", 6, 8) == (
        "pod default/db, container app: it needs 6 exclusive CPUs and 8.0 GiB memory, and the "
        "resources need different numbers of NUMA nodes: cpu fits on 2 NUMA nodes, memory fits on "
        "1 NUMA node; policy restricted wants one number for all, as the kubelet's does, so take "
        "best-effort; free: NUMA node 0: 4 CPUs, 64.0 GiB memory; NUMA node 1: 4 CPUs, 64.0 GiB "
        "memory"
    )
    assert ": all its containers together need 6 " in refusal("restricted", 6, 8, "pod")


def test_other_refusals_name_the_limit() -> None:
    assert "8.0 GiB memory on one NUMA node (policy single-numa-node)" in refusal(
        "single-numa-node", 6, 8
    )
