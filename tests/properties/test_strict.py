"""Strict policies on random nodes: no CPU and no byte elsewhere, at any step."""

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nri_numa.engine.node_model import MeasuredFree
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import IsolatedCPUs, KubeletRules, Settings
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.world import GIB, World, container, pod, resources, two_by_four
from tests.machines import named as machines

# Mostly such that one container fits easily and three of them hardly.
SIZES = st.sampled_from([1.0, 1.5, 0.5, 2.0, 2.5, 3.0, 6.5, 9.0])
MEMORIES = st.sampled_from([1.0, 2.0, 3.0, 5.0, 0.0, 9.0])
PAGES = st.sampled_from([0, 0, GIB, 2 * GIB])
WANTS = st.tuples(SIZES, MEMORIES, PAGES)
CONTAINERS = st.lists(WANTS, min_size=1, max_size=4)
PODS = st.tuples(
    CONTAINERS,
    st.sampled_from(["pod", "container"]),
    st.sampled_from(list(QoSClass)),
    st.sampled_from(["", "", "shared", "exclusive"]),
    st.sampled_from(["", "", "any", "full-core", "isolate"]),
    st.booleans(),
)
OTHERS = st.none() | st.tuples(
    st.sampled_from(
        [
            {"cpus": "exclusive"},
            {"cpus": "exclusive", "smt": "isolate"},
            {"policy": "best-effort", "cpus": "exclusive"},
            {"policy": "best-effort"},
            {"numacpu": "0-3", "cpus": "exclusive"},
            {"numacpu": "0-1"},
        ]
    ),
    st.integers(1, 9),
)
READINGS = st.none() | st.lists(st.integers(0, 6), min_size=4, max_size=4)

NODES = st.builds(
    build_synthetic_topology,
    sockets=st.sampled_from([1, 2]),
    numa_per_socket=st.sampled_from([1, 2]),
    cores_per_numa=st.sampled_from([2, 4]),
    threads=st.sampled_from([1, 2]),
    memory_gib=st.just(8),
    hugepages=st.sampled_from([{GIB: n * GIB} for n in (0, 2, 4)]),
)


def narrowest(topology: Topology, wants: list[tuple[float, float, int]]) -> int:
    """NUMA nodes that an empty machine needs for a sum of CPUs, memory and huge pages."""
    found = 1
    size = 1000 * max(len(n.cpus) for n in topology.numa_nodes.values())
    pages = max(n.hugepages.get(GIB, 0) for n in topology.numa_nodes.values())
    memory = max(n.memory_bytes - n.hugepages.get(GIB, 0) for n in topology.numa_nodes.values())
    needs = (
        (sum(round(cpus * 1000) for cpus, _, _ in wants), size),
        (sum(int(amount * GIB) for _, amount, _ in wants), memory),
        (sum(amount for _, _, amount in wants), pages),
    )
    for need, each in needs:
        if need and each:
            found = max(found, -(-need // each))
    return found


def kernel(levels: list[int] | None, topology: Topology) -> MeasuredFree | None:
    """What the kernel says is free, in GiB by NUMA node."""
    if levels is None:
        return None
    by_node = dict(zip(topology.numa_ids, levels, strict=False))
    return MeasuredFree(
        memory={i: level * GIB for i, level in by_node.items()},
        hugepages={i: {GIB: level * GIB // 2} for i, level in by_node.items()},
    )


@given(
    topology=NODES,
    policy=st.sampled_from(["restricted", "single-numa-node"]),
    order=st.booleans(),
    by_socket=st.booleans(),
    pods=st.lists(st.tuples(PODS, READINGS, OTHERS, st.booleans()), min_size=1, max_size=6),
    resizes=st.lists(st.tuples(st.integers(0, 20), WANTS), max_size=4),
)
@example(
    topology=machines.dual_no_smt(cores_per_numa=2, memory_gib=8),
    policy="restricted",
    order=True,
    by_socket=False,
    pods=[(([(2.5, 0.0, 0)], "pod", QoSClass.GUARANTEED, "", "", False), None, None, False)],
    resizes=[(0, (1.0, 0.0, 0)), (0, (3.0, 0.0, 0))],
)
@hypothesis_settings(deadline=None, max_examples=3 * hypothesis_settings().max_examples)
def test_a_strict_policy_never_uses_more_numa_nodes_than_it_promises(
    topology: Topology,
    policy: str,
    order: bool,
    by_socket: bool,
    pods: list[
        tuple[
            tuple[list[tuple[float, float, int]], str, QoSClass, str, str, bool],
            list[int] | None,
            tuple[dict[str, str], int] | None,
            bool,
        ]
    ],
    resizes: list[tuple[int, tuple[float, float, int]]],
) -> None:  # fmt: skip
    single = policy == "single-numa-node"
    settings = Settings(kubelet=KubeletRules(cpu_order=order, align_by_socket=by_socket and single))
    world = World(topology, settings)
    needs: dict[str, int] = {}
    for number, ((containers, scope, qos, mode, smt, told), levels, other, stop) in enumerate(pods):
        wishes = {"policy": policy, "scope": scope}
        wishes |= {"cpus": mode} if mode else {}
        wishes |= {"smt": smt} if smt and not (mode == "shared" and smt != "any") else {}
        total = None
        if told:
            cpus, memory, pages = (sum(c[k] for c in containers) for k in range(3))
            total = resources(cpus, memory, hugepages={GIB: int(pages)})
        of = pod(f"p{number}", wishes, qos=qos, total=total)
        for n, wants in enumerate(containers):
            # The kernel may have more or less left at every step.
            world.reading = kernel(levels if n % 2 == 0 else None, topology)
            made = container(of, f"c{n}", wanted(wants))
            # isolate takes a core for each CPU, and pods of a sum that is told count as a whole
            needs[made.id] = narrowest(topology, [(c * 2, m, p) for c, m, p in containers])
            if scope == "container" and smt != "isolate":
                needs[made.id] = narrowest(topology, [wants])
            world.create(of, made)
            check(world, needs, single=single)
        if other is not None:
            # What others ask for moves nobody either.
            of = pod(f"other{number}", other[0])
            world.create(of, container(of, wants=resources(other[1], 1)))
            check(world, needs, single=single)
        if stop and world.live:
            world.stop(sorted(world.live)[0])
    for pick, wants in resizes:
        strict = sorted(world.live.keys() & needs)
        if strict:
            name = strict[pick % len(strict)]
            had = world.agent.current.state.allocations[name]
            # A pod placed as a whole has its NUMA nodes, and a container of it may come back there.
            home = had.numa_nodes | (
                world.agent.current.state.pods[had.pod_uid].affinity or had.numa_nodes
            )
            world.update(name, wanted(wants))
            assert world.agent.current.state.allocations[name].numa_nodes <= home
            check(world, needs, single=single)


def wanted(wants: tuple[float, float, int]) -> Resources:
    cpus, memory, pages = wants
    return resources(cpus, memory, hugepages={GIB: pages} if pages else None)


def check(world: World, needs: dict[str, int], *, single: bool) -> None:
    """No container has CPUs or mems of more NUMA nodes than its policy allows."""
    world.check()
    topology = world.topology
    for name in world.live.keys() & needs:
        cpus, mems = world.has(name)
        used = topology.numa_of(CPUSet.parse(cpus)) | NUMASet.parse(mems)
        most = 1 if single else needs[name]
        if cpus or mems:
            assert len(used) <= most, (name, cpus, mems)


@given(
    isolated=st.sets(st.integers(0, 7), max_size=7),
    setting=st.sampled_from(IsolatedCPUs),
    policy=st.sampled_from(["restricted", "single-numa-node"]),
    wants=st.lists(st.tuples(st.sampled_from("01"), st.sampled_from([0.5, 1.0, 2.0])), max_size=5),
)
def test_cpus_are_on_the_numa_node_of_the_listed_memory(
    isolated: set[int], setting: IsolatedCPUs, policy: str, wants: list[tuple[str, float]]
) -> None:
    """Whichever CPUs may be owned, or shared."""
    world = World(two_by_four(isolated=CPUSet(isolated)), Settings(isolated=setting))
    for n, (listed, cpus) in enumerate(wants):
        of = pod(f"p{n}", {"policy": policy, "numamem": listed})
        world.create(of, container(of, wants=resources(cpus, 0.1)))
        if f"p{n}-app" in world.live:
            assert str(world.topology.numa_of(world.cpus(f"p{n}-app"))) == listed
