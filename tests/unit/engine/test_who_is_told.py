"""An exclusive container narrows the pool of its NUMA node, and nobody else is told."""

from __future__ import annotations

from nri_numa.engine.admit import admit, release
from nri_numa.engine.decision import Admitted, Machine
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import container, pod, resources


def test_those_on_its_numa_node_and_those_without_one_are_told() -> None:
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=8)
    machine, state = Machine(topology=topology, settings=Settings()), NodeState()
    on: dict[str, int] = {}
    for n in range(6):
        of = pod(f"shared-{n}", {"policy": "single-numa-node"})
        made = admit(machine, state, of, container(of, wants=resources(0.5)))
        assert isinstance(made, Admitted)
        state = made.state
        on[made.allocation.container_id] = made.allocation.numa_nodes.first
    assert set(on.values()) == {0, 1}
    everywhere = pod("plain")
    made = admit(machine, state, everywhere, container(everywhere, wants=resources(0.5)))
    assert isinstance(made, Admitted)
    state = made.state

    of = pod("owner", {"policy": "single-numa-node", "cpus": "exclusive"})
    owner = admit(machine, state, of, container(of, wants=resources(2, 2)))
    assert isinstance(owner, Admitted)
    (where,) = owner.allocation.numa_nodes
    affected = {i for i, node in on.items() if node == where} | {made.allocation.container_id}
    assert {update.container_id for update in owner.updates} == affected
    back = release(machine, owner.state, owner.allocation.container_id)
    assert {update.container_id for update in back.updates} == affected
