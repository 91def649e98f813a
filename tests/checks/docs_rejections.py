"""A refusal of every kind, from the real engine, for the texts of docs/troubleshooting.md.

``python -m tests.checks.docs_rejections`` prints them.
"""

import sys
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from nri_numa.agent.links import supported_memory_policies
from nri_numa.engine.decision import Rejected
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.request.demand import claim_result_text
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.reasons import RejectionReason as R
from nri_numa.model.settings import AnnotationPermission, CPUAmount, QuotasAndPoolFloor, Settings
from nri_numa.model.workload import Device, DeviceRequest, DeviceStock
from nri_numa.runtime import RuntimeInfo
from tests.beds.world import GIB, PREFIX, SINGLE, World, container, pod, resources
from tests.machines import named as machines


def machine(*, offline: CPUSet | None = None, allowed: CPUSet | None = None) -> Topology:
    """Two NUMA nodes with four cores of two threads each: CPUs 0-3,8-11 and 4-7,12-15."""
    return machines.dual_smt_16(offline=offline or CPUSet(), allowed=allowed)


def reject(
    annotations: Mapping[str, str],
    *,
    cpus: float = 0,
    memory: float = 0,
    shares: int = 0,
    topology: Topology | None = None,
    settings: Settings | None = None,
    before: Callable[[World], object] | None = None,
    reading: MeasuredFree | None = None,
    slots: str = "",
    claim_problem: str = "",
    devices: tuple[DeviceRequest, ...] = (),
    added_cpus_source: str = "",
) -> Rejected:
    """Ask for a container ``app`` of a Guaranteed pod ``default/web``."""
    world = World(topology or machine(), settings, reading=reading)
    if before is not None:
        before(world)
    of = pod("web", annotations)
    wants = (
        replace(resources(cpus, memory), cpu_shares=shares) if shares else resources(cpus, memory)
    )
    made = replace(container(of, wants=wants), added_cpus_source=added_cpus_source)
    if slots:
        made = replace(made, annotations={f"{PREFIX}slots": slots})
    if claim_problem:
        made = replace(made, annotations={f"{PREFIX}slots": ""}, claim_problem=claim_problem)
    return world.reject(of, replace(made, devices=devices))


def device_on(kind: str, numa_node: int) -> DeviceRequest:
    """A device that the kubelet gave, of a node that has one on both NUMA nodes."""
    each = [Device(id=f"{kind}-{i}", numa_nodes=frozenset([i])) for i in (0, 1)]
    return DeviceRequest(
        resource=f"example.com/{kind}",
        count=1,
        devices=(each[numa_node],),
        stock=DeviceStock(capacity={0: 1, 1: 1}, free={0: 1, 1: 1}, choices=tuple(each)),
    )


def owner(cpus: str) -> Callable[[World], object]:
    """A container that owns these CPUs."""
    of = pod("db", {"numacpu": cpus, "cpus": "exclusive"})
    return lambda world: world.place(of, container(of, "engine", wants=resources(2)))


def _bare_node() -> Rejected:
    topology = machine()
    nodes = dict(topology.numa_nodes)
    nodes[1] = replace(nodes[1], memory_bytes=0)
    return reject({"numamem": "1"}, topology=replace(topology, numa_nodes=nodes))


_UID = "1f0cf4ba-5c1e-4f0e-9d0a-0c9f1f2e3d4c"
_RESULT = claim_result_text(0, _UID, 0, 2)


def _has_claim(world: World) -> object:
    of = pod("db")
    made = container(of, "engine", wants=resources(2))
    return world.place(of, replace(made, annotations={f"{PREFIX}slots": _RESULT}))


def _listed(world: World) -> object:
    of = pod("db", {"numacpu": "2-3"})
    return world.place(of, container(of, wants=resources(2)))


_KEEPING = Settings(limits=QuotasAndPoolFloor(pool=CPUAmount(4)))
_UNPAID = AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True)
_SHARED_ONLY = AnnotationPermission(
    name="permissions[1]", allowed_keys=("policy", "cpus"), allowed_values={"cpus": ("shared",)}
)


def _old_runtime(world: World) -> None:
    info = RuntimeInfo(
        name="containerd",
        version="2.1.9",
        nri_version="",
        registration_timeout=5.0,
        request_timeout=2.0,
        config="",
    )
    policies = supported_memory_policies(info, "6.12.0", over_cri=False)
    world.agent.current.machine = world.agent.current.machine.with_memory_policies(policies)


REJECTIONS: dict[R, Callable[[], Rejected]] = {
    R.INVALID_ANNOTATION: lambda: reject({"policy": "single-node"}),
    R.TOPOLOGY_AFFINITY: lambda: reject(SINGLE, cpus=12, memory=4),
    R.DEVICE_AFFINITY: lambda: reject(
        SINGLE, cpus=2, devices=(device_on("gpu", 0), device_on("nic", 1))
    ),
    R.NOT_ENOUGH_CPUS: lambda: reject(
        {"cpus": "exclusive", "smt": "isolate"}, cpus=8, before=owner("0-1")
    ),
    R.NOT_ENOUGH_MEMORY: lambda: reject(
        {"numamem": "0"}, cpus=2, memory=12, reading=MeasuredFree(memory={0: 5 * GIB, 1: 15 * GIB})
    ),
    R.SMT_ALIGNMENT: lambda: reject({"cpus": "exclusive", "smt": "full-core"}, cpus=3),
    R.SHARED_POOL_EMPTY: lambda: reject({"cpus": "exclusive"}, cpus=16),
    R.SHARED_POOL_FLOOR: lambda: reject(
        {"cpus": "exclusive"}, cpus=12, before=owner("0-1"), settings=_KEEPING
    ),
    R.QUOTA_EXCEEDED: lambda: reject(
        {"numacpu": "0-8"}, before=_listed, settings=Settings(permissions=(_UNPAID,))
    ),
    R.NOT_PERMITTED: lambda: reject(
        {"cpus": "exclusive"}, cpus=2, settings=Settings(permissions=(_SHARED_ONLY,))
    ),
    R.CPUS_NOT_REQUESTED: lambda: reject({"numacpu": "2-5", "cpus": "exclusive"}, cpus=1),
    R.FRACTIONAL_CPUS: lambda: reject({"cpus": "exclusive"}, cpus=1.5),
    R.NO_CPU_REQUEST: lambda: reject({"cpus": "exclusive"}),
    R.CPU_REQUEST_UNKNOWN: lambda: reject({"cpus": "exclusive"}, shares=262_144),
    R.INVALID_SLOTS: lambda: reject({}, cpus=2, slots="cpu-2,cpu-3"),
    R.SLOTS_CONFLICT: lambda: reject({"numacpu": "2-3"}, cpus=2, slots="slot-0,slot-1"),
    R.SLOTS_MISMATCH: lambda: reject({}, cpus=1.5, slots="slot-0,slot-1"),
    R.CLAIM_NOT_PREPARED: lambda: reject(
        {}, cpus=2, claim_problem=f"its ResourceClaim {_UID} is not prepared on this node"
    ),
    R.CLAIM_IN_USE: lambda: reject({}, cpus=2, slots=_RESULT, before=_has_claim),
    R.UNKNOWN_CPU: lambda: reject({"numacpu": "14-17"}),
    R.CPU_OFFLINE: lambda: reject({"numacpu": "4-7"}, topology=machine(offline=CPUSet([5]))),
    R.CPU_NOT_ALLOWED: lambda: reject(
        {"numacpu": "3-4"}, topology=machine(allowed=CPUSet([0, 1, 2, 3]))
    ),
    R.CPU_RESERVED: lambda: reject(
        {"numacpu": "0-1"}, cpus=2, settings=Settings(reserved_cpus=CPUSet([0, 8]))
    ),
    R.CPU_EXCLUSIVE: lambda: reject({"numacpu": "2-4"}, before=owner("2-3")),
    R.KUBELET_PINNED: lambda: reject(
        {"numacpu": "2-3"}, cpus=2, before=lambda world: world.kubelet({("web", "app"): "4-5"})
    ),
    R.CPU_LISTED: lambda: reject({"numacpu": "2-4", "cpus": "exclusive"}, cpus=3, before=_listed),
    R.UNKNOWN_NUMA_NODE: lambda: reject({"numamem": "2"}),
    R.NUMA_NODE_NOT_ALLOWED: lambda: reject(
        {"numamem": "1"}, topology=replace(machine(), withheld_memory=NUMASet([1]))
    ),
    R.RUNTIME_ADDS_CPUS: lambda: reject(
        {"cpus": "exclusive"}, cpus=2, added_cpus_source="annotation cpu-shared.crio.io/app"
    ),
    R.MEMORY_POLICY_UNSUPPORTED: lambda: reject(
        {"numamem": "0", "mempolicy": "interleave"}, before=_old_runtime
    ),
    R.MEMORY_POLICY_NEEDS_NODES: lambda: reject({"mempolicy": "bind"}),
    R.NUMA_NODE_WITHOUT_MEMORY: _bare_node,
}
"""By reason, how to come by one."""


def line(rejected: Rejected) -> str:
    return f"{rejected.reason}: {rejected.message}"


if __name__ == "__main__":
    for _reason, _make in REJECTIONS.items():
        sys.stdout.write(f"{_reason}\n    {line(_make())}\n")
