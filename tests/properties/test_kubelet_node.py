"""A node with the kubelet's settings decides as a kubelet with static managers does.

Random nodes with CPUs, memory and huge pages, random pods that come and go: verdict, CPUs and
memory nodes are equal after every pod. ``NRI_NUMA_KUBELET_NODES`` sets how many nodes are compared
(for the long run: 12000).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random

import pytest

from nri_numa.engine.admit import admit, forget_pod, release
from nri_numa.engine.decision import Admitted, Machine, Reading
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import CPUOrder, Settings
from nri_numa.engine.values.workload import Policy, QoSClass, Resources
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.synthetic import Numbering, synthetic
from tests.beds.world import GIB, container, pod, resources
from tests.checks.kubelet_node import Got, KubeletNode, NotAdmitted, Wanted

NODES = int(os.environ.get("NRI_NUMA_KUBELET_NODES", "240"))
CHUNKS = max(8, NODES // 250)
MIB = 1 << 20
PAGES = {"hugepages-1Gi": GIB, "hugepages-2Mi": 2 * MIB}


@dataclass(frozen=True)
class PodCase:
    """One pod of a random life."""

    name: str
    wanted: tuple[Wanted, ...]
    guaranteed: bool


def random_pod(random: Random, name: str, scope: str) -> PodCase:
    """A pod whose sum tells its whole CPUs: the runtime tells no more in scope ``pod``."""
    guaranteed = random.random() < 0.8
    wanted = []
    for n in range(random.choice([1, 1, 1, 2, 3])):
        milli = random.choice([1000, 1000, 1000, 2000, 2000, 3000, 5000, 7000])
        fraction = random.choice([100, 300]) if scope == "pod" else random.choice([500, 1500, 2500])
        if random.random() < 0.25:
            milli = fraction
        memory = {"memory": random.choice([1, 1, 1, 2, 2, 3, 4, 6, 9, 17]) * GIB}
        for resource, size in PAGES.items():
            if random.random() < 0.2:
                memory[resource] = random.choice([1, 1, 2]) * max(size, GIB // 4)
        wanted.append(Wanted(f"c{n}", milli, memory))
    return PodCase(name, tuple(wanted), guaranteed)


def limits(wanted: Wanted) -> Resources:
    """What the runtime tells about one container."""
    return resources(
        wanted.milli / 1000,
        wanted.memory["memory"] / GIB,
        hugepages={PAGES[t]: n for t, n in wanted.memory.items() if t in PAGES},
    )


class Node:
    """Our side: one state, the engine's own doors."""

    def __init__(self, machine: Machine, policy: Policy, scope: str, reading: Reading) -> None:
        self.machine, self.reading = machine, reading
        self.wishes = {"policy": policy.value, "scope": scope}
        self.state = NodeState()

    def add(self, case: PodCase) -> dict[str, Got] | None:
        """Create the containers one by one; None when one of them is refused."""
        qos = QoSClass.GUARANTEED if case.guaranteed else QoSClass.BURSTABLE
        types = {t for w in case.wanted for t in w.memory}
        whole = Wanted(
            "", sum(w.milli for w in case.wanted),
            {t: sum(w.memory.get(t, 0) for w in case.wanted) for t in types},
        )  # fmt: skip
        of = pod(case.name, self.wishes, qos=qos, total=limits(whole))
        got: dict[str, Got] = {}
        for one in case.wanted:
            made = container(of, one.name, limits(one))
            decision = admit(self.machine, self.state, of, made, self.reading)
            if not isinstance(decision, Admitted):
                self.remove(case)
                return None
            self.state = decision.state
            a = decision.allocation
            assert not a.mems or case.guaranteed, "only Guaranteed pods are booked"
            got[one.name] = Got(
                frozenset(a.cpus) if a.owned else None, frozenset(a.mems) if a.mems else None
            )
        return got

    def remove(self, case: PodCase) -> None:
        """Stop and forget a pod."""
        for one in case.wanted:
            self.state = release(self.machine, self.state, f"{case.name}-{one.name}").state
        self.state = forget_pod(self.machine, self.state, f"uid-{case.name}").state

    def check_groups(self) -> None:
        """Memory nodes of Guaranteed containers are the same or disjoint."""
        masks = {a.mems for a in self.state.allocations.values() if a.mems}
        for one in masks:
            for other in masks:
                assert one == other or not one & other, (one, other)


def compare(seed: int) -> int:
    """One random node; the number of pods that both admitted."""
    random = Random(seed)
    sockets, per_socket = random.choice([(1, 1), (2, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4)])
    pages_1g, pages_2m = random.choice([(0, 0), (2, 0), (2, 512), (4, 1024)])
    topology = synthetic(
        sockets=sockets,
        numa_per_socket=per_socket,
        cores_per_numa=random.choice([2, 4, 8]),
        threads=random.choice([1, 2]),
        memory_gib=random.choice([8, 16, 24]),
        numbering=random.choice(list(Numbering)),
        hugepages={GIB: pages_1g * GIB, 2 * MIB: pages_2m * 2 * MIB},
    )
    policy = random.choice([Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
    scope = random.choice(["container", "pod"])
    closest = random.random() < 0.5
    by_socket = policy is not Policy.SINGLE_NUMA_NODE and random.random() < 0.4
    held_back = {i: random.choice([0, GIB, 3 * GIB]) for i in topology.numa_ids}
    settings = Settings(
        kubelet_ties=True,
        kubelet_memory=True,
        kubelet_cpus=True,
        cpu_order=CPUOrder.KUBELET,
        align_l3=False,
        prefer_closest=closest,
        align_by_socket=by_socket,
        reserved_cpus=CPUSet([0]),
        reserved_memory=held_back,
    )
    allocatable = {
        i: {
            "memory": max(0, n.memory_bytes - sum(n.hugepages.values()) - held_back[i]),
            **{t: n.hugepages.get(size, 0) for t, size in PAGES.items()},
        }
        for i, n in topology.numa_nodes.items()
    }
    kubelet = KubeletNode(
        topology, policy, scope, frozenset([0]), allocatable,
        topology.distance if closest else None, by_socket=by_socket,
    )  # fmt: skip
    # What the kernel says is free must not matter.
    nothing = Reading(
        memory=dict.fromkeys(topology.numa_ids, 0),
        hugepages={i: dict.fromkeys(PAGES.values(), 0) for i in topology.numa_ids},
    )
    ours = Node(Machine(topology=topology, settings=settings), policy, scope, nothing)
    by = ", alignBySocket" if by_socket else ""
    live: list[PodCase] = []
    admitted = 0
    for number in range(random.randint(6, 14)):
        if live and random.random() < 0.25:
            gone = live.pop(random.randrange(len(live)))
            kubelet.remove(gone.name)
            ours.remove(gone)
        case = random_pod(random, f"p{number}", scope)
        want: dict[str, Got] | None
        try:
            want = kubelet.add(case.name, case.wanted, guaranteed=case.guaranteed)
        except NotAdmitted:
            want = None
        got = ours.add(case)
        assert got == want, f"seed {seed}, {policy}, scope {scope}{by}: {case}"
        ours.check_groups()
        if want is not None:
            live.append(case)
            admitted += 1
    return admitted


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_verdicts_cpus_and_memory_nodes_are_the_kubelets(chunk: int) -> None:
    size = NODES // CHUNKS
    admitted = sum(compare(seed) for seed in range(chunk * size, (chunk + 1) * size))
    assert admitted > size, "hardly a pod was admitted, so hardly anything was compared"
