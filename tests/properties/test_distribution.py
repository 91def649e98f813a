"""CPUs in proportion to devices, on random machines."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.workload import Device, DeviceRequest
from tests.beds.world import World, container, pod, resources

SMT_MODES = ("spread", "any", "full-core", "isolate")


@given(
    nodes=st.integers(2, 4),
    cores=st.integers(2, 12),
    threads=st.sampled_from((1, 2)),
    device_counts=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    cores_wanted=st.integers(1, 24),
    smt=st.sampled_from(SMT_MODES),
    taken=st.integers(0, 8),
)
def test_cpus_sum_up_and_are_in_proportion_where_all_are_free(
    nodes: int,
    cores: int,
    threads: int,
    device_counts: list[int],
    cores_wanted: int,
    smt: str,
    taken: int,
) -> None:
    topology = build_synthetic_topology(
        sockets=nodes, numa_per_socket=1, cores_per_numa=cores, threads=threads, memory_gib=8
    )
    world = World(topology)
    if taken:
        world.create(
            other := pod("other", {"cpus": "exclusive"}),
            container(other, wants=resources(taken, 1)),
        )
    device_counts = device_counts[:nodes]
    devices = tuple(
        Device(id=f"{i}-{k}", numa_nodes=frozenset({i}))
        for i, count in enumerate(device_counts)
        for k in range(count)
    )
    unit = threads if smt in ("any", "full-core") else 1
    count = cores_wanted * unit
    of = pod("job", {"policy": "best-effort", "smt": smt})
    requests = (DeviceRequest(resource="gpu", count=len(devices), devices=devices),)
    answer = world.create(
        of, replace(container(of, wants=resources(count, 1)), devices=requests if devices else ())
    )
    allocation = world.agent.current.state.allocations.get("job-app")
    if allocation is None:
        return
    assert len(allocation.cpus) == count, answer
    counts = topology.cpu_count_by_node(allocation.cpus)
    with_devices = [i for i, n in enumerate(device_counts) if n]
    if len(with_devices) < 2:
        return
    parts = {i: count * device_counts[i] / len(devices) for i in with_devices}
    in_proportion = all(abs(counts.get(i, 0) - part) <= unit for i, part in parts.items())
    if not taken and all(part + unit <= cores * unit for part in parts.values()):
        assert in_proportion
    if allocation.aligned:
        assert in_proportion
