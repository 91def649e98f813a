"""A node with the kubelet's settings decides as a kubelet with static managers does.

Random nodes with CPUs, memory and huge pages, random pods that come and go: verdict, CPUs and
memory nodes are equal after every pod. ``NRI_NUMA_KUBELET_NODES`` sets how many nodes are compared
(for the long run: 12000).

With init containers some differ, each by a way of ours that is known (`WAYS`). This counts them::

    python -m tests.properties.test_kubelet_node 500
"""

import copy
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import TypeAlias

import pytest

from nri_numa.config import AgentConfig, derive_settings
from nri_numa.config.sections import KubeletCompatibilityMode, KubeletCompatibilitySection
from nri_numa.engine.admit import forget_pod, release_container
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.pod_admission import admit_pod
from nri_numa.engine.state import NodeState
from nri_numa.machine.synthetic import Numbering, build_synthetic_topology
from nri_numa.model.workload import Policy, QoSClass, Resources
from tests.beds.world import GIB, container, pod, resources
from tests.checks.kubelet_node import WAYS, Got, KubeletNode, NotAdmitted, Wanted, peak

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


def random_pod(random: Random, name: str, scope: str, *, init: bool = False) -> PodCase:
    """A pod whose sum tells its whole CPUs: the runtime tells no more in scope ``pod``."""
    guaranteed = random.random() < 0.8
    wanted = []
    inits = random.choice([0, 1, 1, 2]) if init else 0
    for n in range(inits + random.choice([1, 1, 1, 2, 3])):
        milli = random.choice([1000, 1000, 1000, 2000, 2000, 3000, 5000, 7000])
        fraction = random.choice([100, 300]) if scope == "pod" else random.choice([500, 1500, 2500])
        if random.random() < 0.25:
            milli = fraction
        memory = {"memory": random.choice([1, 1, 1, 2, 2, 3, 4, 6, 9, 17]) * GIB}
        for resource, size in PAGES.items():
            if random.random() < 0.2:
                memory[resource] = random.choice([1, 1, 2]) * max(size, GIB // 4)
        wanted.append(Wanted(f"c{n}", milli, memory, init=n < inits))
    return PodCase(name, tuple(wanted), guaranteed)


def limits(wanted: Wanted) -> Resources:
    """What the runtime tells about one container."""
    return resources(
        wanted.milli / 1000,
        wanted.memory["memory"] / GIB,
        hugepages={PAGES[t]: n for t, n in wanted.memory.items() if t in PAGES},
    )


class KubeletModelNode:
    """Our side: one state, the engine's own doors."""

    def __init__(
        self, machine: NodeModel, policy: Policy, scope: str, reading: MeasuredFree
    ) -> None:
        self.machine, self.reading = machine, reading
        self.wishes = {"policy": policy.value, "scope": scope}
        self.state = NodeState()

    def add(self, case: PodCase) -> dict[str, Got] | None:
        """Create the containers one by one; None when one of them is refused."""
        qos = QoSClass.GUARANTEED if case.guaranteed else QoSClass.BURSTABLE
        types = {t for w in case.wanted for t in w.memory}
        whole = Wanted(
            "", peak(case.wanted, lambda w: w.milli),
            {t: peak(case.wanted, lambda w, t=t: w.memory.get(t, 0)) for t in types},
        )  # fmt: skip
        of = pod(case.name, self.wishes, qos=qos, total=limits(whole))
        got: dict[str, Got] = {}
        for one in case.wanted:
            made = container(of, one.name, limits(one))
            decision = admit_pod(self.snapshot(), of, made)
            if not isinstance(decision, Admitted):
                self.remove(case)
                return None
            self.state = decision.state
            a = decision.allocation
            assert not a.mems or case.guaranteed, "only Guaranteed pods are booked"
            got[one.name] = Got(
                frozenset(a.cpus) if a.exclusive else None, frozenset(a.mems) if a.mems else None
            )
            if one.init:
                self.state = release_container(self.snapshot(), made.id, 1.0).state
        return got

    def snapshot(self) -> NodeSnapshot:
        return NodeSnapshot(self.machine, self.state, self.reading, 1.0)

    def remove(self, case: PodCase) -> None:
        for one in case.wanted:
            self.state = release_container(self.snapshot(), f"{case.name}-{one.name}").state
        self.state = forget_pod(NodeSnapshot(self.machine, self.state), f"uid-{case.name}").state

    def check_groups(self) -> None:
        """Memory nodes of Guaranteed containers are the same or disjoint."""
        masks = {a.mems for a in self.state.allocations.values() if a.mems}
        for one in masks:
            for other in masks:
                assert one == other or not one & other, (one, other)


def random_node(
    random: Random, ways: Collection[str] = (), kept: float = 0.0
) -> tuple[KubeletNode, KubeletModelNode, str]:
    """A kubelet and a node of ours on the same machine, and what both are like."""
    sockets, per_socket = random.choice([(1, 1), (2, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4)])
    pages_1g, pages_2m = random.choice([(0, 0), (2, 0), (2, 512), (4, 1024)])
    topology = build_synthetic_topology(
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
    exceptions = {"alignBySocket": by_socket}
    settings = derive_settings(
        AgentConfig(
            kubelet_compatibility=KubeletCompatibilitySection(
                mode=KubeletCompatibilityMode.FULL, exceptions=exceptions
            ),
            prefer_closest_numa_nodes=closest,
            reserved_cpus="0",
            reserved_memory=dict(held_back),
            pod_reservation_timeout=kept,
        )
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
        topology.distance if closest else None, by_socket=by_socket, ways=ways,
    )  # fmt: skip
    # What the kernel says is free must not matter.
    nothing = MeasuredFree(
        memory=dict.fromkeys(topology.numa_ids, 0),
        hugepages={i: dict.fromkeys(PAGES.values(), 0) for i in topology.numa_ids},
    )
    ours = KubeletModelNode(NodeModel(topology=topology, settings=settings), policy, scope, nothing)
    by = ", alignBySocket" if by_socket else ""
    return kubelet, ours, f"{policy}, scope {scope}{by}"


Step: TypeAlias = tuple[KubeletNode, KubeletModelNode, str, PodCase, list[PodCase]]


def life(seed: int, *, init: bool = False) -> Iterator[Step]:
    """One random node, and the pods that come; those that were put into the list may end."""
    random = Random(seed)
    kubelet, ours, how = random_node(random, *((WAYS, 600.0) if init else ()))
    live: list[PodCase] = []
    for number in range(random.randint(6, 14)):
        if live and random.random() < 0.25:
            gone = live.pop(random.randrange(len(live)))
            kubelet.remove(gone.name)
            ours.remove(gone)
        case = random_pod(random, f"p{number}", kubelet.scope, init=init)
        yield kubelet, ours, f"seed {seed}, {how}: {case}", case, live


def compare(seed: int) -> int:
    """One random node; the number of pods that both admitted."""
    admitted = 0
    for kubelet, ours, how, case, live in life(seed):
        want: dict[str, Got] | None
        try:
            want = kubelet.add(case.name, case.wanted, guaranteed=case.guaranteed)
        except NotAdmitted:
            want = None
        assert ours.add(case) == want, how
        ours.check_groups()
        if want is not None:
            live.append(case)
            admitted += 1
    return admitted


def judged(kubelet: KubeletNode, case: PodCase, ways: Collection[str]) -> dict[str, Got] | None:
    """What a kubelet that goes these ways of ours would do next; None where it refuses."""
    same = {id(one): one for one in (kubelet.oracle, kubelet.distance)}
    other = copy.deepcopy(kubelet, same)
    other.ways = frozenset(ways)
    try:
        return other.add(case.name, case.wanted, guaranteed=case.guaranteed)
    except NotAdmitted:
        return None


def differences(seed: int) -> Counter[str]:
    """One random node with init containers: what became of its pods, and why otherwise.

    Each pod is decided by the node, by the kubelet in the same state, and where they differ by
    the kubelet with as few of our ways as give what the node did.
    """
    found: Counter[str] = Counter()
    for kubelet, ours, how, case, live in life(seed, init=True):
        inits = any(w.init for w in case.wanted)
        found["with init containers"] += inits
        strict = judged(kubelet, case, ())
        want = judged(kubelet, case, WAYS)
        got = ours.add(case)
        if got != want:
            found[f"UNEXPLAINED: {how}: {got}, not {want}"] += 1
            return found
        sets = (some for n in range(len(WAYS) + 1) for some in combinations(WAYS, n))
        why = next(some for some in sets if judged(kubelet, case, some) == got)
        verdict = "other CPUs or NUMA nodes"
        if got is None or strict is None:
            verdict = "refused here" if got is None else "admitted here"
        found[f"{verdict}: {', and '.join(why)}" if why else "equal"] += 1
        if want is not None:
            kubelet.add(case.name, case.wanted, guaranteed=case.guaranteed)
            live.append(case)
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_verdicts_cpus_and_memory_nodes_are_the_kubelets(chunk: int) -> None:
    size = NODES // CHUNKS
    admitted = sum(compare(seed) for seed in range(chunk * size, (chunk + 1) * size))
    assert admitted > size, "hardly a pod was admitted, so hardly anything was compared"


@pytest.mark.parametrize("chunk", range(4))
def test_with_init_containers_every_difference_is_one_of_our_ways(chunk: int) -> None:
    found = sum((differences(seed) for seed in range(chunk * 15, chunk * 15 + 15)), Counter[str]())
    assert not [what for what in found if what.startswith("UNEXPLAINED")], found
    assert found["with init containers"] > 50


# CPUs that the pod had in the socket and outside the affinity; more kept than its sum; what is kept
# counted where it is not.
@pytest.mark.parametrize("seed", [565, 704, 1643, 3094, 3268, 30, 461])
def test_nodes_that_differed_once_for_no_good_reason(seed: int) -> None:
    found = differences(seed)
    assert not [what for what in found if what.startswith("UNEXPLAINED")], found


if __name__ == "__main__":
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    each = [differences(seed) for seed in range(nodes)]
    total = sum(each, Counter[str]())
    pods = total.total() - total["with init containers"]
    print(f"{nodes} nodes, {pods} pods, {total.pop('with init containers')} with init containers")
    for what, count in sorted(total.items(), key=lambda item: (-item[1], item[0])):
        print(f"{count:6}  {what}")
    unexplained = sum(n for what, n in total.items() if what.startswith("UNEXPLAINED"))
    others = sum(1 for one in each if set(one) - {"equal", "with init containers"})
    print(f"{others} nodes with a difference, {unexplained} pods unexplained")
    sys.exit(1 if unexplained else 0)
