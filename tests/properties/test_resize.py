"""Random resizes on random machines: what runs stays where it is."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nri_numa.engine.decision import Refused
from nri_numa.engine.state import Allocation
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

MACHINES = [
    machines.single_smt,
    machines.dual_no_smt,
    machines.dual_alternating,
    machines.snc_smt,
    machines.memory_only,
]
SIZES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.5, 7.0, 9.0, 20.0])
MEMORIES = st.sampled_from([0.0, 0.5, 1.0, 5.0, 15.0, 40.0])
WISHES = st.fixed_dictionaries(
    {"policy": st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"])},
    optional={
        "scope": st.sampled_from(["container", "pod"]),
        "cpus": st.sampled_from(["shared", "exclusive"]),
        "smt": st.sampled_from(["any", "spread", "full-core", "isolate", "pair"]),
        "on-failure": st.sampled_from(["reject", "widen", "unpinned"]),
        "bind": st.sampled_from(["cpu", "cpu+mem"]),
    },
) | st.fixed_dictionaries(
    {"numacpu": st.sampled_from(["1", "0-1"])}, optional={"numamem": st.sampled_from(["0", "0-1"])}
)
PODS = st.lists(
    st.tuples(WISHES, SIZES, MEMORIES, st.sampled_from(list(QoSClass))), min_size=1, max_size=6
)
RESIZES = st.lists(st.tuples(st.integers(0, 20), SIZES, MEMORIES), min_size=1, max_size=12)


@given(
    machine=st.sampled_from(MACHINES),
    kubelet=st.booleans(),
    by_socket=st.booleans(),
    pods=PODS,
    resizes=RESIZES,
)
@example(
    machine=machines.dual_no_smt, kubelet=False, by_socket=False,
    pods=[({"policy": "best-effort"}, cpus, 1.0, QoSClass.GUARANTEED) for cpus in (2.0, 9.0)],
    resizes=[(0, 20.0, 5.0)],
)  # fmt: skip
@hypothesis_settings(deadline=None)
def test_a_resize_never_moves_a_running_container(
    machine: object,
    kubelet: bool,
    by_socket: bool,
    pods: list[tuple[dict[str, str], float, float, QoSClass]],
    resizes: list[tuple[int, float, float]],
) -> None:
    assert callable(machine)
    order = CPUOrder.KUBELET if kubelet else CPUOrder.DEFAULT
    world = World(machine(), Settings(cpu_order=order, align_by_socket=by_socket))
    for number, (wishes, cpus, memory, qos) in enumerate(pods):
        of = pod(f"p{number}", wishes, qos=qos)
        world.create(of, container(of, wants=resources(cpus, memory)))
    for pick, cpus, memory in resizes:
        if not world.live:
            return
        name = sorted(world.live)[pick % len(world.live)]
        before = dict(world.agent.state.allocations)
        record = world.agent.state.pods.get(before[name].pod_uid)
        home = (record and record.affinity) or NUMASet()
        has = {i: world.has(i) for i in world.live}
        refused = world.update(name, resources(cpus, memory))
        world.check()
        after = world.agent.state.allocations
        if isinstance(refused, Refused):
            assert {i: world.has(i) for i in world.live} == has
        assert {i: world.has(i)[1] for i in world.live} == {i: mems for i, (_, mems) in has.items()}
        for i, allocation in after.items():
            if i != name:
                assert allocation == before[i], "somebody else's allocation changed"
        stays(before[name], after[name], home, widened=pods_wish(pods, name) == "widen")
        for i, allocation in after.items():
            mine = world.topology.cpus_of(allocation.numa_nodes)
            if allocation.kind.value == "shared":
                assert CPUSet.parse(world.has(i)[0]) <= mine, "left its NUMA nodes"
        world.synchronize()
        assert world.agent.state.allocations == after, "a Synchronize changed what a resize did"


def pods_wish(pods: list[tuple[dict[str, str], float, float, QoSClass]], name: str) -> str:
    """What happens when a container of these pods cannot grow."""
    wishes = pods[int(name.removeprefix("p").removesuffix("-app"))][0]
    default = "widen" if wishes.get("policy") == "best-effort" else "reject"
    return wishes.get("on-failure", default)


def stays(before: Allocation, after: Allocation, home: NUMASet, *, widened: bool) -> None:
    """Check the CPUs and NUMA nodes of a container that was resized.

    It may grow on NUMA nodes that were chosen for its whole pod, ``home``, whether it was on them
    lately or not.
    """
    assert after.mems == before.mems
    if before.owned and after.owned:
        assert before.cpus <= after.cpus or after.cpus <= before.cpus
    if not widened:
        assert after.numa_nodes <= before.numa_nodes | home
    elif before.numa_nodes:
        assert after.numa_nodes & before.numa_nodes
