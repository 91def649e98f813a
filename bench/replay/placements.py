"""Who places the pods: the engine with its policies and strategies, and a model of the kubelet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from bench.replay.optimum import moved_least
from bench.replay.trace import Pod
from nri_numa.engine.admit import admit, forget_pod, release_container
from nri_numa.engine.decision import Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.rebalance import admit_by_moving, state_after_migration
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
        settings = Settings(strategy=strategy, reserved_cpus=reserved, rebalance_moves=2)
        self._machine = NodeModel(topology=topology, settings=settings)
        self._annotations = {
            f"{settings.prefix}/policy": policy.value,
            f"{settings.prefix}/cpus": "exclusive",
        }
        self._movable_key = f"{settings.prefix}/movable"
        self._state = NodeState()

    def start(self, pod: Pod) -> Got | None:
        # Spread evenly over the numbers: 50 % are every other one.
        movable = self._movable and not pod.number * self._movable % 100
        sandbox = PodSandbox(
            id=f"s{pod.number}", uid=f"u{pod.number}", namespace="d", name=f"p{pod.number}",
            annotations=self._annotations | {self._movable_key: "true" if movable else "false"},
            qos=QoSClass.GUARANTEED,
        )  # fmt: skip
        resources = Resources(
            cpu_shares=pod.cpus * 1024, cpu_quota=pod.cpus * 100_000, cpu_period=100_000,
            memory_limit=pod.memory,
        )  # fmt: skip
        container = Container(id=f"c{pod.number}", pod_id=sandbox.id, name="c", resources=resources)
        node = NodeSnapshot(self._machine, self._state)
        decision = admit(node, sandbox, container)
        self.moved = {}
        if isinstance(decision, Rejected) and self._movable:
            decision = admit_by_moving(node, decision)
        if isinstance(decision, Rejected):
            return None
        # Memory has moved before the next pod comes.
        self._state = state_after_migration(decision)
        self.moved = {
            int(m.after.pod[1:]): _got(m.after.with_migration_finished) for m in decision.moves
        }
        return _got(decision.allocation)

    def end(self, pod: Pod) -> None:
        self._state = release_container(
            NodeSnapshot(self._machine, self._state), f"c{pod.number}"
        ).state
        self._state = forget_pod(NodeSnapshot(self._machine, self._state), f"u{pod.number}").state


def _got(made: Allocation) -> Got:
    return Got(frozenset(made.cpus), frozenset(made.mems))


class AtWill:
    """No engine: whoever fits by any moves at all of those that run, one NUMA node each.

    No bound: who fits so is in the way of those that come later.
    """

    def __init__(self, topology: Topology, reserved: CPUSet) -> None:
        self._topology, self._reserved = topology, reserved
        self._pods: dict[int, tuple[Pod, int, Got]] = {}
        self.moved: dict[int, Got] = {}

    def start(self, pod: Pod) -> Got | None:
        self.moved = {}
        there = [*self._pods.values()]
        homes = [home for _, home, _ in there]
        to, goes = self._first(pod), {}
        if to is None:
            every = [*(one for one, _, _ in there), pod]
            found = moved_least(self._topology, self._reserved, every, [*homes, None])
            if found is None:
                return None
            *places, to = found
            goes = {
                p.number: (p, n) for (p, at, _), n in zip(there, places, strict=True) if at != n
            }
        for number in goes:
            del self._pods[number]
        for one, n in [*goes.values(), (pod, to)]:
            got = Got(frozenset(self._free(n)[: one.cpus]), frozenset({n}))
            self._pods[one.number] = one, n, got
        self.moved = {number: self._pods[number][2] for number in goes}
        return self._pods[pod.number][2]

    def _free(self, numa_node: int) -> list[int]:
        taken = {cpu for _, _, got in self._pods.values() for cpu in got.cpus}
        return sorted(self._topology.numa_nodes[numa_node].cpus - self._reserved - CPUSet(taken))

    def _first(self, pod: Pod) -> int | None:
        """The fullest NUMA node that has room, then the lowest id."""
        memory = {i: n.memory_bytes for i, n in self._topology.numa_nodes.items()}
        for one, home, _ in self._pods.values():
            memory[home] -= one.memory
        fits = [
            (len(free), i)
            for i, left in memory.items()
            if left >= pod.memory and len(free := self._free(i)) >= pod.cpus
        ]
        return min(fits)[1] if fits else None

    def end(self, pod: Pod) -> None:
        del self._pods[pod.number]


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
    "single-at-will": Placement("single-numa-node, all moved at will", True, AtWill),
    "single-spread": _ours(Policy.SINGLE_NUMA_NODE, Strategy.SPREAD),
    "best-effort-pack": _ours(Policy.BEST_EFFORT, Strategy.PACK),
    "best-effort-spread": _ours(Policy.BEST_EFFORT, Strategy.SPREAD),
}
