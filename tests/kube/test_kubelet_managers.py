"""Beside the kubelet's own CPU Manager: what it grants is the kubelet's, and nobody else's.

Two CPUs are enough: the kubelet reserves the first one, which leaves it one to grant. What needs
more (exclusive pods of ours beside grants, NUMA nodes, pod-level grants) is in
tests/scenarios/test_kubelet_grants.py.
"""

import json
from collections.abc import Iterator

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import poll
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.managers import MAY_LIST, NONE, STATIC, configure, first_line, granted
from tests.beds.kube.manifests import EXCLUSIVE, asks, container, pod
from tests.beds.kube.node import KubeNode
from tests.machines.cpus import FIRST, LAST, MACHINE

MEMORY = {
    "memoryManagerPolicy": "Static",
    "systemReserved": {"cpu": "500m", "memory": "100Mi"},
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "100Mi"}}],
}
# A pod may own a CPU that its request does not pay for: there is not enough to request.
MAY_OWN = {"permissions": [{"allowUnrequestedCPUs": True}]}


@pytest.fixture
def static_node(client: Client, node: KubeNode) -> Iterator[KubeNode]:
    """The node with the kubelet's static policy for the time of the test."""
    node.restart_kubelet(STATIC)
    yield node
    client.delete_pods()
    node.restart_kubelet(NONE)
    configure(node, {})


def kind(node: KubeNode, name: str) -> str:
    """What nri-numa calls the containers of a pod."""
    (kind,) = {one["kind"] for one in node.plugin.json(f"/v1/assignments?pod={name}")["containers"]}
    return str(kind)


def adopted(node: KubeNode, words: str) -> None:
    """Wait until something of the kubelet's configuration is nri-numa's too."""
    poll(
        lambda: any(words in one for one in node.plugin.json("/v1/kubelet")["inherited"]),
        f"{words} taken over",
    )


def test_grants_of_the_kubelet_are_nobody_elses(client: Client, static_node: KubeNode) -> None:
    before = client.run(pod("before"))
    owner = client.run(pod("owner", container(cpus="1")))
    own = granted(static_node, owner)
    assert len(own) == 1
    # From the first instruction, and once the kubelet's reconcile loop has been there.
    assert first_line(client, "owner") == static_node.cpus(owner) == own
    assert kind(static_node, "owner") == "kubelet"
    # In the answer that let it start, not when the kubelet's loop comes round.
    assert static_node.cpus(before) == MACHINE - own
    after = client.run(pod("after"))
    assert first_line(client, "after") == MACHINE - own
    client.kubectl("annotate", "pod", "owner", "seen=yes")
    assert static_node.cpus(owner) == own
    kubelet = static_node.plugin.json("/v1/kubelet")
    assert (kubelet["cpuPolicy"], kubelet["grantedCPUs"]) == ("static", str(own))
    (grant,) = kubelet["grants"]
    assert (grant["pod"], grant["container"], grant["cpus"]) == ("owner", "main", str(own))
    # Its reservation is ours: no CPU is left that a container of ours could own.
    adopted(static_node, "reservedCPUs")
    configure(static_node, MAY_OWN)
    wants = asks(numacpu=str(own), cpus="exclusive")
    client.apply(pod("ours", container(cpus="300m"), annotations=wants))
    rejected = client.wait_rejected("ours")
    assert "default/owner/main (by the kubelet)" in rejected
    client.kubectl("delete", "pod", "owner")
    # The kubelet tries again; it fits as soon as the kubelet took the grant back.
    ours = client.wait_ready("ours")
    assert first_line(client, "ours") == static_node.cpus(ours) == own
    for each in (before, after):
        assert static_node.cpus(each) == MACHINE - own
    client.kubectl("delete", "pod", "ours")
    for each in (before, after):
        poll(lambda p=each: static_node.cpus(p) == MACHINE, "CPUs given back")  # type: ignore[misc]  # bound per turn


def test_a_list_against_a_grant_needs_overriding(client: Client, static_node: KubeNode) -> None:
    configure(static_node, MAY_LIST)
    document = pod("listed", container(cpus="1"), annotations=asks(numacpu=FIRST))
    client.apply(document)
    rejected = client.wait_rejected("listed")
    for word in ("numacpu", "kubelet granted it CPU", "kubelet.overrideGrants is never"):
        assert word in rejected
    configure(static_node, {**MAY_LIST, "kubelet": {"overrideGrants": "annotated"}})
    listed = client.wait_ready("listed")
    assert granted(static_node, listed) == CPUSet.parse(LAST)
    assert first_line(client, "listed") == static_node.cpus(listed) == CPUSet.parse(FIRST)
    assert kind(static_node, "listed") == "listed"
    # A kubelet that starts again sends its wish for each container: ours is kept, and it is said.
    static_node.restart_kubelet()

    def conflicting() -> JsonObject | None:
        found = static_node.plugin.json("/v1/kubelet")["conflicts"]
        return found[0] if found else None

    conflict = poll(conflicting, "both write")
    assert (conflict["pod"], conflict["yieldsTo"]) == ("listed", "nri-numa")
    assert (conflict["requestedCPUs"], conflict["actualCPUs"]) == (LAST, FIRST)
    assert static_node.cpus(listed) == CPUSet.parse(FIRST)


def test_granted_memory_is_known(client: Client, static_node: KubeNode) -> None:
    """One NUMA node shows that a real state file is read; the rest is in the scenarios."""
    static_node.restart_kubelet({**STATIC, **MEMORY})
    owner = client.run(pod("owner", container(cpus="300m")))
    kubelet = static_node.plugin.json("/v1/kubelet")
    assert (kubelet["memoryPolicy"], kubelet["problems"]) == ("Static", [])
    (grant,) = kubelet["grants"]
    assert (grant["pod"], grant["cpus"], grant["mems"]) == ("owner", "", "0")
    assert static_node.allowed(owner).mems == "0"
    adopted(static_node, "reservedMemory 0: 104857600 bytes")


def test_a_grant_of_a_whole_pod_is_known(client: Client, static_node: KubeNode) -> None:
    """The third form of the state file, behind a gate of the kubelet's: ``podEntries``."""
    gates = {"PodLevelResources": True, "PodLevelResourceManagers": True}
    scope = {"topologyManagerScope": "pod", "topologyManagerPolicy": "best-effort"}
    static_node.restart_kubelet({**STATIC, **scope, "featureGates": gates})
    try:
        wants = {"cpu": "1", "memory": "64Mi"}
        parts = [container(name, cpus="", memory="") for name in ("main", "side")]
        whole = pod("whole", *parts, resources={"requests": wants, "limits": wants})
        whole = client.run(whole)
        notes = json.loads((static_node.kubelet_root / "cpu_manager_state").read_text("utf-8"))
        own = CPUSet.parse(notes["podEntries"][whole["metadata"]["uid"]]["cpuSet"])
        # The kubelet writes down containers that share their pod's CPUs as well.
        grants = static_node.plugin.json("/v1/kubelet")["grants"]
        assert {(g["pod"], g["container"], g["cpus"]) for g in grants} == {
            ("whole", name, str(own)) for name in ("", "main", "side")
        }
        assert static_node.cpus(whole, "main") == static_node.cpus(whole, "side") == own
        assert kind(static_node, "whole") == "kubelet"
        says = {"policy": "best-effort", "scope": "pod", "cpuManagerPolicy": "static"}
        poll(
            lambda: says.items() <= static_node.plugin.json("/v1/zones").items(),
            "the kubelet's policy for schedulers",
        )
        assert static_node.cpus(client.run(pod("shared"))) == MACHINE - own
    finally:
        static_node.configuration.update(topologyManagerScope="container", featureGates={})
        static_node.configuration.update(topologyManagerPolicy="none")


def test_both_ways_of_the_migration_with_running_containers(client: Client, node: KubeNode) -> None:
    """The guide drains the node; what stays all the same ends on the configured side."""
    owner = client.run(pod("owner", container(cpus="1"), annotations=EXCLUSIVE))
    own = node.cpus(owner)
    assert kind(node, "owner") == "exclusive"
    node.restart_kubelet(STATIC)
    try:
        grant = poll(lambda: granted(node, owner), "a grant to what runs")
        # The kubelet's side is the configured one: it takes its container, and we say so once.
        poll(lambda: kind(node, "owner") == "kubelet", "taken over")
        assert node.cpus(owner) == grant
        (conflict,) = node.plugin.json("/v1/kubelet")["conflicts"] if grant != own else ({},)
        assert conflict.get("yieldsTo", "kubelet") == "kubelet"
    finally:
        client.delete_pods()
        node.restart_kubelet(NONE)
    poll(lambda: not node.plugin.json("/v1/kubelet")["grantedCPUs"], "no grants any more")
    again = client.run(pod("again", container(cpus="1"), annotations=EXCLUSIVE))
    assert kind(node, "again") == "exclusive"
    assert len(node.cpus(again)) == 1
