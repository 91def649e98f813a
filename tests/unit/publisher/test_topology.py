"""The object that schedulers read, from the agent's document."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.cluster import topology_reader
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.kubelet.configuration import KubeletFacts
from nri_numa.kubelet.pod_resources import DeviceCount
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.counted_containers import (
    COUNTED_CONTAINERS_NRT_ATTRIBUTE,
    counted_container_hash,
)
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass
from nri_numa.publisher import topology
from nri_numa.publisher.topology import build_topology_contents, pods_fingerprint
from nri_numa.web.responses import Zones
from tests.beds.http_view import FakeView
from tests.beds.topology_match import Pod, passes
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

GIB = 1 << 30


def said(world: World) -> Zones:
    return zones_document(NodeSnapshot(world.agent.current.machine, world.agent.current.state))


def by_name(listed: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["name"]: one for one in listed}


def values(listed: list[dict[str, str]]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in listed}


def resource(what: dict[str, Any], zone: str, name: str) -> tuple[int, int, int]:
    one = by_name(by_name(what["zones"])[zone]["resources"])[name]
    return int(one["capacity"]), int(one["allocatable"]), int(one["available"])


def test_an_empty_machine() -> None:
    what = build_topology_contents(
        "x.io", said(World(machines.snc_smt(), Settings(defaults={"scope": "pod"})))
    )
    assert [zone["name"] for zone in what["zones"]] == [
        "node-0", "node-1", "node-2", "node-3", "socket-0", "socket-1",
    ]  # fmt: skip
    zone = what["zones"][2]
    assert (zone["type"], zone["parent"]) == ("Node", "socket-1")
    assert zone["costs"] == [
        {"name": "node-0", "value": 21}, {"name": "node-1", "value": 21},
        {"name": "node-2", "value": 10}, {"name": "node-3", "value": 12},
    ]  # fmt: skip
    assert what["zones"][4] == {"name": "socket-0", "type": "Socket"}
    assert values(zone["attributes"]) == {
        "x.io/free-exclusive-cpus": "8",
        "x.io/shared-cpus": "8",
        "x.io/free-cpu-milli": "8000",
        "x.io/threads-per-core": "2",
    }
    assert values(what["attributes"]) == {
        "topologyManagerPolicy": "none",
        "topologyManagerScope": "pod",
        "topologyManagerMaxNUMANodes": "8",
        "nodeTopologyPodsFingerprint": pods_fingerprint([]),
        "nodeTopologyPodsFingerprintMethod": "with-exclusive-resources",
        "x.io/free-exclusive-cpus": "31",
        "x.io/agent-state": "ready",
        "x.io/counted-containers": "",
    }


def test_where_the_kubelet_pins_its_policy_is_said_and_judged_by() -> None:
    world = World(machines.snc_smt(), Settings(defaults={"policy": "restricted"}))
    machine, state = world.agent.current.machine, world.agent.current.state
    idle = KubeletFacts(topology_policy="single-numa-node", topology_scope="pod")
    assert zones_document(NodeSnapshot(machine, state), kubelet=idle) == said(world)
    pins = replace(idle, memory_policy="Static")
    what = build_topology_contents(
        "x.io", zones_document(NodeSnapshot(machine, state), kubelet=pins)
    )
    expected = {
        "topologyManagerPolicy": "single-numa-node",
        "topologyManagerScope": "pod",
        "cpuManagerPolicy": "none",
        "memoryManagerPolicy": "Static",
    }
    assert expected.items() <= values(what["attributes"]).items()
    room = topology_reader.decode_topology(what, "x.io")
    assert isinstance(room, NodeResources)
    assert (room.policy, room.scope) == ("single-numa-node", "pod")
    assert (room.aligns_cpus, room.aligns_memory) == (False, True)


def test_what_a_pod_takes_is_charged_and_its_name_counted() -> None:
    world = World(machines.huge_pages(), Settings(defaults={"policy": "single-numa-node"}))
    before = build_topology_contents("x.io", said(world))
    of = pod("p", namespace="shop")
    world.create(of, container(of, wants=resources(3, 2, hugepages={2 << 20: 4 << 20})))
    what = build_topology_contents("x.io", said(world))
    (place,) = (
        zone for zone in ("node-0", "node-1")
        if resource(what, zone, "cpu") != resource(before, zone, "cpu")
    )  # fmt: skip
    assert resource(what, place, "cpu") == (8, 8, 5)
    memory, pages = "memory", "hugepages-2Mi"
    assert resource(before, place, memory)[2] - resource(what, place, memory)[2] == 2 * GIB
    assert resource(what, place, pages) == (GIB, GIB, GIB - (4 << 20))
    assert resource(what, place, "hugepages-1Gi") == (4 * GIB, 4 * GIB, 4 * GIB)
    # The pages are no ordinary memory.
    capacity, allocatable, _ = resource(what, place, memory)
    assert capacity - allocatable == 5 * GIB
    assert values(what["attributes"])["nodeTopologyPodsFingerprint"] == pods_fingerprint(
        [("shop", "p")]
    )
    assert topology.has_more_available(what, before)
    assert not topology.has_more_available(before, what)
    assert topology.has_more_available(None, what)


def test_only_guaranteed_pods_are_counted() -> None:
    """As the method says that is named beside the fingerprint."""
    listed = FakeView().scheduler_zones_document()
    pods = tuple(replace(one, qos=qos) for one, qos in zip(
        listed.pods, ("Guaranteed", "Burstable"), strict=True))  # fmt: skip
    what = build_topology_contents("x.io", replace(listed, pods=pods))
    counted = [(pods[0].namespace, pods[0].name)]
    assert values(what["attributes"])["nodeTopologyPodsFingerprint"] == pods_fingerprint(counted)


@pytest.mark.parametrize("numa_nodes", [64, 65, 66])
def test_the_plugin_lives_through_more_numa_nodes_than_it_has_places_for(numa_nodes: int) -> None:
    settings = Settings(defaults={"policy": "single-numa-node"})
    machine = build_synthetic_topology(sockets=1, numa_per_socket=numa_nodes, cores_per_numa=1)
    what = build_topology_contents("x.io", said(World(machine, settings)))
    assert passes(what, Pod(apps=[{"cpu": 2000, "memory": GIB}]))
    names = {zone["name"] for zone in what["zones"] if zone["type"] == "Node"}
    assert names == {f"node-{i}" for i in range(numa_nodes) if i != 64}
    costs = {one["name"] for zone in what["zones"] for one in zone.get("costs", ())}
    assert costs == names
    assert values(what["attributes"])["topologyManagerMaxNUMANodes"] == str(len(names))


def test_memory_without_cpus_is_a_zone_without_cpus() -> None:
    what = build_topology_contents("x.io", said(World(machines.memory_only())))
    zone = by_name(what["zones"])["node-2"]
    assert "parent" not in zone
    assert set(by_name(zone["resources"])) == {"memory"}
    what = build_topology_contents("x.io", said(World(machines.cpu_only())))
    assert set(by_name(by_name(what["zones"])["node-0"]["resources"])) == {"cpu"}


@pytest.mark.parametrize(
    ("settings", "amounts", "factor"),
    [
        (Settings(), (8, 8, 8), None),
        (Settings(capacity_factor={0: 0.5}), (8, 4, 4), "0.5"),
        (Settings(capacity_factor={0: 0.0}), (8, 0, 0), "0"),
        (Settings(capacity_factor={0: 1 / 3}), (8, 2, 2), "0.333333"),
        (Settings(reserved_cpus=CPUSet([0])), (8, 7, 7), None),
        # Oversold CPUs serve those who share; exclusive ones are what there is.
        (Settings(cpu_overcommit=2.0), (8, 8, 8), None),
        (Settings(cpu_overcommit=2.0, defaults={"cpus": "shared"}), (16, 16, 16), None),
    ],
)
def test_settings_are_folded_in(
    settings: Settings, amounts: tuple[int, int, int], factor: str | None
) -> None:
    what = build_topology_contents("x.io", said(World(machines.dual_no_smt(), settings)))
    assert resource(what, "node-0", "cpu") == amounts
    attributes = values(by_name(what["zones"])["node-0"]["attributes"])
    assert attributes.get("x.io/capacity-factor") == factor


def test_whole_cpus_are_left_where_pods_share() -> None:
    world = World(machines.dual_no_smt(), Settings(defaults={"cpus": "shared"}))
    world.put("shares", {"policy": "single-numa-node"}, 2.5, 1)
    what = build_topology_contents("x.io", said(world))
    assert sorted(resource(what, f"node-{i}", "cpu")[2] for i in (0, 1)) == [5, 8]


def test_what_was_measured_is_told_apart() -> None:
    """Who evicts because of it must not take a factor of the configuration for a measured one."""
    world = World(machines.dual_no_smt(), Settings(capacity_factor={0: 0.5, 1: 0.7}))
    found = zones_document(
        NodeSnapshot(world.agent.current.machine, world.agent.current.state), measured={1: 0.7}
    )
    what = by_name(build_topology_contents("x.io", found)["zones"])
    assert "x.io/measured-capacity-factor" not in values(what["node-0"]["attributes"])
    assert values(what["node-1"]["attributes"])["x.io/measured-capacity-factor"] == "0.7"


def test_numbers_are_in_order_whatever_the_agent_says() -> None:
    listed = FakeView().scheduler_zones_document()
    (zone,) = listed.zones
    wrong = replace(
        zone, free_exclusive_cpus=9, memory_available_bytes=-5, memory_allocatable_bytes=-7
    )
    what = build_topology_contents("x.io", replace(listed, zones=(wrong,)))
    assert resource(what, "node-0", "cpu") == (4, 3, 3)
    assert resource(what, "node-0", "memory") == (16 * GIB, 0, 0)


def test_an_agent_that_is_gone_keeps_its_numbers() -> None:
    what = build_topology_contents("x.io", FakeView().scheduler_zones_document())
    silent = topology.contents_with_agent_not_ready("x.io", what)
    assert silent["zones"] == what["zones"]
    assert values(silent["attributes"]) == {
        **values(what["attributes"]),
        "x.io/agent-state": "not-ready",
    }
    not_ready = build_topology_contents("x.io", FakeView(ready=False).scheduler_zones_document())
    assert values(not_ready["attributes"])["x.io/agent-state"] == "not-ready"


# --- the plugin's verdicts, on what is published --------------------------------------------------


def test_who_is_counted_is_named_beside_the_numbers() -> None:
    """By UID of the pod and name of the container; who asks for nothing is not."""
    world = World(machines.snc_smt(), Settings())
    one, other = pod("a", {"policy": "single-numa-node"}), pod("b", qos=QoSClass.BEST_EFFORT)
    world.create(one, container(one, wants=resources(2, 1)))
    world.create(other, container(other))
    assert [(each.pod_uid, each.name) for each in said(world).counted_containers] == [
        (one.uid, "app")
    ]
    found = values(build_topology_contents("x.io", said(world))["attributes"])
    assert found[f"x.io/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}"] == counted_container_hash(
        one.uid, "app"
    )
    # An agent of an earlier version does not say whom it counts.
    earlier = replace(said(world), counted_containers=None, free_exclusive_cpus=None)
    attributes = values(build_topology_contents("x.io", earlier)["attributes"])
    assert not attributes.keys() & {
        f"x.io/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}",
        "x.io/free-exclusive-cpus",
    }


# --- devices ------------------------------------------------------------------------------------


def with_devices(counts: tuple[DeviceCount, ...] | str | None) -> dict[str, Any]:
    world = World(machines.snc_smt())
    agent = world.agent
    return build_topology_contents(
        "x.io",
        zones_document(NodeSnapshot(agent.current.machine, agent.current.state), devices=counts),
    )


def test_devices_are_resources_of_their_numa_node() -> None:
    """In the order of their names, after those that every machine has."""
    what = with_devices(
        (
            DeviceCount(resource="a/gpu", numa_node=1, allocatable=4, available=3),
            DeviceCount(resource="b/nic", numa_node=1, allocatable=1, available=0),
            DeviceCount(resource="b/nic", numa_node=77, allocatable=1, available=1),
        )
    )
    assert resource(what, "node-1", "a/gpu") == (4, 4, 3)
    assert resource(what, "node-1", "b/nic") == (1, 1, 0)
    names = [one["name"] for one in by_name(what["zones"])["node-1"]["resources"]]
    assert names == ["cpu", "memory", "a/gpu", "b/nic"]
    assert "a/gpu" not in by_name(by_name(what["zones"])["node-0"]["resources"])
    assert values(what["attributes"])["x.io/device-counts"] == "counted"


def test_devices_that_nobody_knows_are_not_none() -> None:
    assert "x.io/device-counts" not in values(with_devices(None)["attributes"])
    what = with_devices("the kubelet has not answered yet")
    assert values(what["attributes"])["x.io/device-counts"] == "unknown"
    assert [one["name"] for one in what["zones"][0]["resources"]] == ["cpu", "memory"]


def test_our_own_scheduler_reads_zones_with_devices_as_before() -> None:
    gpu = DeviceCount(resource="a/gpu", numa_node=1, allocatable=4, available=3)
    with_them, without = (
        topology_reader.decode_topology(with_devices(c), "x.io") for c in ((gpu,), None)
    )
    assert isinstance(with_them, NodeResources)
    assert isinstance(without, NodeResources)
    assert (with_them.cpu, with_them.exclusive) == (without.cpu, without.exclusive)
