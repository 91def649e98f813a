"""Who places the pods: the engine with its policies and strategies, and a model of the kubelet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from bench.replay.trace import Pod
from nri_numa.engine.admit import admit, forget_pod, release
from nri_numa.engine.decision import Admitted, Machine
from nri_numa.engine.room import make_room
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    Container,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
    Strategy,
)
from tests.checks.kubelet_node import KubeletNode, NotAdmitted, Wanted


@dataclass(frozen=True, slots=True)
class Got:
    """What a pod has.

    Attributes:
        cpus: exclusive to it.
        numa_nodes: of its memory.
    """

    cpus: frozenset[int]
    numa_nodes: frozenset[int]


class Node(Protocol):
    """A machine on which pods are started and ended."""

    def start(self, pod: Pod) -> Got | None:
        """Place a pod; None when it is refused, with nothing left behind."""

    def end(self, pod: Pod) -> None:
        """Take back what a pod has that was placed."""

    @property
    def moved(self) -> Mapping[int, Got]:
        """By number, the pods that the last start moved, and what they have now."""


class Ours:
    """The engine that decides on a node."""

    def __init__(
        self,
        topology: Topology,
        reserved: CPUSet,
        policy: Policy,
        strategy: Strategy,
        movable: int = 0,
    ) -> None:
        self._movable = movable
        self.moved: dict[int, Got] = {}
        settings = Settings(strategy=strategy, reserved_cpus=reserved)
        self._machine = Machine(topology=topology, settings=settings)
        self._annotations = {
            f"{settings.prefix}/policy": policy.value,
            f"{settings.prefix}/cpus": "exclusive",
        }
        self._state = NodeState()

    def start(self, pod: Pod) -> Got | None:
        sandbox = PodSandbox(
            id=f"s{pod.number}", uid=f"u{pod.number}", namespace="d", name=f"p{pod.number}",
            annotations=self._annotations, qos=QoSClass.GUARANTEED,
        )  # fmt: skip
        resources = Resources(
            cpu_shares=pod.cpus * 1024, cpu_quota=pod.cpus * 100_000, cpu_period=100_000,
            memory_limit=pod.memory,
        )  # fmt: skip
        container = Container(id=f"c{pod.number}", pod_id=sandbox.id, name="c", resources=resources)
        decision = admit(self._machine, self._state, sandbox, container)
        self.moved = {}
        if isinstance(decision, Admitted):
            self._state = decision.state
            return _got(decision.allocation)
        plan = None
        if self._movable:
            # Spread evenly over the numbers: 50 % are every other one.
            still = [c for c in self._state.allocations if int(c[1:]) * self._movable % 100]
            plan = make_room(self._machine, self._state, decision, still=still)
        if plan is None:
            return None
        self._state = plan.state
        self.moved = {int(m.after.pod[1:]): _got(m.after) for m in plan.moves}
        return _got(plan.newcomer)

    def end(self, pod: Pod) -> None:
        self._state = release(self._machine, self._state, f"c{pod.number}").state
        self._state = forget_pod(self._machine, self._state, f"u{pod.number}").state


def _got(made: Allocation) -> Got:
    return Got(frozenset(made.cpus), frozenset(made.mems))


class Kubelets:
    """A kubelet with static CPU Manager and static Memory Manager, as the tests model it.

    The model shares no code with the engine; `tests/properties/test_kubelet_node.py` compares the
    two pod by pod.
    """

    moved: Mapping[int, Got] = MappingProxyType({})

    def __init__(self, topology: Topology, reserved: CPUSet, policy: Policy) -> None:
        memory = {i: {"memory": n.memory_bytes} for i, n in topology.numa_nodes.items()}
        self._node = KubeletNode(topology, policy, "container", frozenset(reserved), memory)

    def start(self, pod: Pod) -> Got | None:
        wanted = Wanted("c", pod.cpus * 1000, {"memory": pod.memory})
        try:
            got = self._node.add(f"p{pod.number}", [wanted], guaranteed=True)["c"]
        except NotAdmitted:
            return None
        return Got(got.cpus or frozenset(), got.mems or frozenset())

    def end(self, pod: Pod) -> None:
        self._node.remove(f"p{pod.number}")


@dataclass(frozen=True, slots=True)
class Placement:
    """One way of placing pods.

    Attributes:
        title: for tables.
        one_node: every pod is on one NUMA node, or refused.
        make: a node of a machine with these CPUs reserved.
    """

    title: str
    one_node: bool
    make: Callable[[Topology, CPUSet], Node]


def _ours(policy: Policy, strategy: Strategy, movable: int = 0) -> Placement:
    return Placement(
        f"{policy.value}, {strategy.value}{f', movable {movable} %' if movable else ''}",
        policy is Policy.SINGLE_NUMA_NODE,
        lambda topology, reserved: Ours(topology, reserved, policy, strategy, movable),
    )


def _kubelets(policy: Policy) -> Placement:
    return Placement(
        f"kubelet: static, {policy.value}",
        policy is Policy.SINGLE_NUMA_NODE,
        lambda topology, reserved: Kubelets(topology, reserved, policy),
    )


PLACEMENTS: Mapping[str, Placement] = {
    "kubelet-single": _kubelets(Policy.SINGLE_NUMA_NODE),
    "kubelet-best-effort": _kubelets(Policy.BEST_EFFORT),
    "kubelet-none": _kubelets(Policy.NONE),
    "single-pack": _ours(Policy.SINGLE_NUMA_NODE, Strategy.PACK),
    "single-pack-50": _ours(Policy.SINGLE_NUMA_NODE, Strategy.PACK, movable=50),
    "single-pack-100": _ours(Policy.SINGLE_NUMA_NODE, Strategy.PACK, movable=100),
    "single-spread": _ours(Policy.SINGLE_NUMA_NODE, Strategy.SPREAD),
    "best-effort-pack": _ours(Policy.BEST_EFFORT, Strategy.PACK),
    "best-effort-spread": _ours(Policy.BEST_EFFORT, Strategy.SPREAD),
}
