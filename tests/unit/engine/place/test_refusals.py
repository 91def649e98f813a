"""What a refusal says to the author of a pod."""

from __future__ import annotations

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Machine, Refused
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import container, pod, resources

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
        "pod default/db, container app: cpu and memory: different numbers of NUMA nodes needed: 6 "
        "exclusive CPUs on 2 NUMA nodes, 8 GiB on 1 NUMA node; it needs 6 exclusive CPUs and 8.0 "
        "GiB memory; policy restricted wants one number of NUMA nodes for all, as the kubelet's "
        "does, so take best-effort; free: NUMA node 0: 4 CPUs, 64.0 GiB memory; NUMA "
        "node 1: 4 CPUs, 64.0 GiB memory"
    )
    assert "; all its containers together need 6 " in refusal("restricted", 6, 8, "pod")
