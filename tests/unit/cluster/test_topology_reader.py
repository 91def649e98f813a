"""Objects of nodes, as they should be and as people leave them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.cluster.node_resources import NodeResources, UnreadableTopology
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.model.workload import Policy, Scope
from tests.beds.objects import GIB, PREFIX, named, table, topology


def why(document: dict[str, Any]) -> str:
    found = decode_topology(document, PREFIX)
    assert isinstance(found, UnreadableTopology), found
    return found.reason


def test_the_contract() -> None:
    found = table(
        7, 3,
        attributes={"topologyManagerPolicy": "restricted", "topologyManagerScope": "pod",
                    f"{PREFIX}/agent-state": "not-ready"},
        zone={f"{PREFIX}/free-exclusive-cpus": "2", f"{PREFIX}/threads-per-core": "2",
              f"{PREFIX}/free-cpu-milli": "2500",
              f"{PREFIX}/capacity-factor": "0.5"},
    )  # fmt: skip
    assert found.ids == (0, 1)
    assert found.cpu.free == (2500, 2500)
    assert found.exclusive.capacity == (16, 16)
    assert found.exclusive.free == (2, 2)
    assert found.other_resources[0].free == (32 * GIB, 32 * GIB)
    assert found.factor == (500, 500)
    assert (found.threads_per_core, found.policy, found.scope) == (2, Policy.RESTRICTED, Scope.POD)
    assert found.agent_not_ready
    assert found.distance(0, 1) == 21


@pytest.mark.parametrize(
    ("text", "milli"),
    [("3", 3000), (3, 3000), ("1500m", 1500), ("1.5", 1500), ("1k", 1_000_000), ("3e0", 3000),
     ("0", 0), (2.5, 2500), ("1Ki", 1024_000), ("0.0001", 0)],
)  # fmt: skip
def test_every_form_of_a_quantity(text: object, milli: int) -> None:
    document = topology(0, of=2_000_000)
    document["zones"][0]["resources"][0]["available"] = text
    found = decode_topology(document, PREFIX)
    assert isinstance(found, NodeResources)
    assert found.cpu.free == (milli,)


def test_ids_with_holes_and_zones_of_other_types() -> None:
    document = topology(4, 5)
    document["zones"][1]["name"] = "node-4"
    document["zones"] += [
        {"name": "socket-0", "type": "Socket"},
        {"name": "node-1", "type": "Node", "resources": []},
    ]
    found = decode_topology(document, PREFIX)
    assert isinstance(found, NodeResources)
    assert found.ids == (0, 4)
    # Costs to a NUMA node that nobody names are the kernel's.
    assert found.distance(0, 4) == 20
    assert found.exclusive.free == (4, 5)


def test_what_one_numa_node_does_not_name_it_does_not_have() -> None:
    document = topology(4, 5)
    document["zones"][1]["resources"].append(
        {"name": "hugepages-1Gi", "allocatable": "2Gi", "available": "1Gi"}
    )
    found = decode_topology(document, PREFIX)
    assert isinstance(found, NodeResources)
    assert {s.name: s.free for s in found.other_resources}["hugepages-1Gi"] == (0, GIB)


def zone(**changes: object) -> dict[str, Any]:
    document = topology(4, 4)
    document["zones"][0].update(changes)
    return document


def cpu(**changes: object) -> dict[str, Any]:
    document = topology(4, 4)
    document["zones"][0]["resources"][0].update(changes)
    return document


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "no zone of type Node has resources"),
        ({"zones": "x"}, "zones is 'x', expected a list"),
        ({"zones": [3]}, "zones[0] is 3, expected a zone"),
        ({"apiVersion": "topology.node.k8s.io/v1alpha1"}, "expected v1alpha2"),
        (zone(name="numa-0"), "zones[0].name is 'numa-0', expected node-0"),
        (zone(name="node-1"), "zone node-1 is there twice"),
        (zone(name="node-99999"), "expected node-0 and so on"),
        (zone(name=None), "zones[0].name is None"),
        (zone(resources=[{}]), "zone node-0, resources[0] has no name"),
        (zone(resources=3), "zone node-0 is 3, expected a list"),
        (zone(costs=[3]), "costs[0] is 3, expected name and value"),
        (zone(costs=[{"name": "node-0", "value": "near"}]), "value is 'near', expected a distance"),
        (zone(attributes=[{"name": "a"}]), "attributes[0] is no name and value"),
        (zone(attributes=named({f"{PREFIX}/free-exclusive-cpus": "-1"})), "a whole number"),
        (zone(attributes=named({f"{PREFIX}/capacity-factor": "NaN"})), "expected a number from 0"),
        (zone(attributes=named({f"{PREFIX}/capacity-factor": "1.5"})), "expected a number from 0"),
        (cpu(available="-1"), "zone node-0, cpu: available is '-1', expected 0 or more"),
        (cpu(available="lots"), "available is 'lots', expected a quantity"),
        (cpu(allocatable=None), "allocatable is None, expected a quantity"),
        (cpu(allocatable="9e99"), "expected what some machine has"),
        (cpu(name="pods"), ""),
        (topology(4, attributes={"topologyManagerPolicy": "strict"}), "expected one of none"),
        ({"zones": topology(4)["zones"], "attributes": {}}, "attributes is a mapping"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(document: dict[str, Any], text: str) -> None:
    if text:
        assert text in why(document)
    else:
        assert isinstance(decode_topology(document, PREFIX), NodeResources)


def test_no_cpus_anywhere() -> None:
    document = topology(4)
    del document["zones"][0]["resources"][0]
    assert why(document) == "no zone has the resource cpu"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(
            st.sampled_from(["zones", "name", "type", "resources", "costs", "attributes", "value",
                             "available", "allocatable", "apiVersion"]), inner),
        max_leaves=30,
    )
)  # fmt: skip
def test_garbage_never_raises(value: object) -> None:
    document = value if isinstance(value, dict) else {"zones": value}
    assert isinstance(decode_topology(document, PREFIX), NodeResources | UnreadableTopology)
    good = topology(4, 4)
    good["zones"][0]["resources"] = value
    assert isinstance(decode_topology(good, PREFIX), NodeResources | UnreadableTopology)
