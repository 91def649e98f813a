"""Exclusive CPUs as an extended resource: the stock scheduler counts, the kubelet hands over."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject, unscheduled
from tests.beds.kube.device_plugin import RESOURCE, DevicePluginDaemon
from tests.beds.kube.manifests import EXCLUSIVE, container, pod
from tests.beds.kube.node import KubeNode
from tests.beds.plugin_process import plugin_environment
from tests.beds.processes import wait_for
from tests.machines.cpus import MACHINE

WRITTEN = "numa.example.com/exclusive-cpu"
"""The default, which the publisher writes and its policy allows."""

MOST = len(MACHINE) - max(1, len(MACHINE) // 20)
"""CPUs that can be exclusive: the shared pool of a machine without reserved CPUs keeps the rest."""


@pytest.fixture
def plugin(client: Client, node: KubeNode) -> Iterator[DevicePluginDaemon]:
    """A device plugin whose resource is on the node; afterwards it is gone again."""
    daemon = DevicePluginDaemon(node)
    daemon.start()
    try:
        wait_allocatable(client, node, MOST, daemon)
        yield daemon
    finally:
        daemon.end()
        wait_allocatable(client, node, 0)


def allocatable(client: Client, node: KubeNode, resource: str = RESOURCE) -> int:
    found = client.ask("GET", f"/api/v1/nodes/{node.name}")["status"]["allocatable"]
    return int(found.get(resource, 0))


def wait_allocatable(
    client: Client,
    node: KubeNode,
    count: int,
    *daemons: DevicePluginDaemon,
    resource: str = RESOURCE,
) -> None:
    def ask() -> bool:
        return allocatable(client, node, resource) == count

    wait_for(daemons, ask, f"{count} {resource} on the node")


def counted(count: int, resource: str = RESOURCE) -> JsonObject:
    """A container that asks for so many exclusive CPUs and as many CPUs, and for nothing else."""
    made = container(cpus=str(count))
    for amounts in ("requests", "limits"):
        made["resources"][amounts] = {**made["resources"][amounts], resource: str(count)}
    return made


def assignment(node: KubeNode, name: str) -> JsonObject:
    """What the agent says of a pod's only container."""
    (found,) = node.plugin.json(f"/v1/assignments?pod={name}")["containers"]
    return dict(found)


def test_the_scheduler_holds(client: Client, node: KubeNode, plugin: DevicePluginDaemon) -> None:
    before = client.run(pod("before"))
    first = client.run(pod("first", counted(MOST)))
    own = node.cpus(first)
    assert len(own) == MOST
    assert node.cpus(before) == MACHINE - own
    # From its first instruction.
    assert client.said("first").startswith(f"cpus={own} ")
    assert assignment(node, "first")["slots"].startswith("slot-0")

    # A name of its own: the agent remembers refusals of other tests' pods.
    client.apply(pod("kept-back", counted(1)))
    pending = client.wait_pod("kept-back", lambda it: RESOURCE in unscheduled(it), "kept back")
    assert "nodeName" not in pending["spec"]
    assert f"Insufficient {RESOURCE}" in unscheduled(pending)
    rejections = node.plugin.json("/v1/rejections")["rejections"]  # at most the last 256
    assert [one for one in rejections if one["pod"] == "kept-back"] == []
    assert node.cpus(first) == own
    client.kubectl("delete", "pod", "first")
    assert len(node.cpus(client.wait_ready("kept-back"))) == 1


def test_a_kubelet_restarts(client: Client, node: KubeNode, plugin: DevicePluginDaemon) -> None:
    running = client.run(pod("running", counted(1)))
    own, pid, times = node.cpus(running), node.pid(running), plugin.registrations()
    node.restart_kubelet()
    poll(lambda: plugin.registrations() > times, "registered again")
    wait_allocatable(client, node, MOST, plugin)
    assert (node.cpus(running), node.pid(running)) == (own, pid)
    after = client.wait_ready("running")
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_plugin_is_killed(client: Client, node: KubeNode, plugin: DevicePluginDaemon) -> None:
    running = client.run(pod("running", counted(1)))
    own, pid = node.cpus(running), node.pid(running)
    plugin.end(signal.SIGKILL)
    wait_allocatable(client, node, 0)
    assert node.cpus(running) == own
    plugin.start()  # over the socket that was left behind
    wait_allocatable(client, node, MOST, plugin)
    assert (node.cpus(running), node.pid(running)) == (own, pid)
    if MOST > 1:
        assert not node.cpus(client.run(pod("next", counted(1)))) & own


def test_restarts_keep_slots(client: Client, node: KubeNode, plugin: DevicePluginDaemon) -> None:
    client.run(pod("again", counted(1)))
    before = assignment(node, "again")
    placed = client.pod("again")
    assert placed is not None
    os.kill(node.pid(placed), signal.SIGKILL)
    client.wait_pod(
        "again",
        lambda it: (
            it["status"]["containerStatuses"][0]["restartCount"] == 1
            and it["status"]["containerStatuses"][0]["ready"]
        ),
        "restarted",
    )
    after = assignment(node, "again")
    assert (after["cpus"], after["slots"]) == (before["cpus"], before["slots"])


def explained(node: KubeNode, name: str) -> str:
    """What ``nri-numa explain`` says on the node, as one line."""
    command = [
        *node.control.namespaces.enter(network=False),
        *(sys.executable, "-m", "nri_numa", "explain", "-v", f"default/{name}"),
        f"--api={node.plugin.address}",
    ]
    done = subprocess.run(
        command, env=plugin_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_explain_has_both_sides(client: Client, node: KubeNode, plugin: DevicePluginDaemon) -> None:
    """Ours, and what the kubelet's PodResources says."""
    client.run(pod("counted", counted(1)))
    client.run(pod("plain"))
    both = explained(node, "counted")
    assert "It runs on exclusive CPU" in both
    assert "1 slot of the device plugin" in both
    assert f"The kubelet granted container main {RESOURCE} slot-0." in both
    assert "no exclusive CPUs" in explained(node, "plain")
    socket = node.kubelet_root / "pod-resources/kubelet.sock"
    away = socket.with_suffix(".away")
    socket.rename(away)
    try:
        assert "Could not ask the kubelet" in explained(node, "counted")
    finally:
        away.rename(socket)


def test_numa_nodes_that_are_announced_bind(client: Client, node: KubeNode) -> None:
    daemon = DevicePluginDaemon(
        node, "topology", environment={"NRI_NUMA_DEVICE_PLUGIN_ADVERTISE_TOPOLOGY": "true"}
    )
    daemon.start()
    try:
        wait_allocatable(client, node, MOST, daemon)
        placed = client.run(pod("placed", counted(1)))
        assert assignment(node, "placed")["slots"] == "numa0-slot-0"
        assert len(node.cpus(placed)) == 1
        assert f"{RESOURCE} numa0-slot-0 of NUMA node 0" in explained(node, "placed")
    finally:
        daemon.end()
        wait_allocatable(client, node, 0)


@pytest.fixture
def published(bed: KubeBed, client: Client, node: KubeNode) -> Iterator[Publisher]:
    """A publisher that writes the number into the Node's status; afterwards it is gone."""
    install(client)
    try:
        with Publisher(bed, token(client, node.name), config={"nodeCapacity": True}) as publisher:
            wait_allocatable(client, node, MOST, resource=WRITTEN)
            yield publisher
    finally:
        status_path = f"/api/v1/nodes/{node.name}/status"
        body = {"status": {"capacity": {WRITTEN: None}}}
        client.ask("PATCH", status_path, body)
        wait_allocatable(client, node, 0, resource=WRITTEN)


def test_the_status_of_the_node_counts_without_a_device_plugin(
    client: Client, node: KubeNode, published: Publisher
) -> None:
    """The annotation asks then, because the kubelet hands over nothing."""
    first = client.run(pod("first", counted(MOST, resource=WRITTEN), annotations=EXCLUSIVE))
    assert len(node.cpus(first)) == MOST
    assert assignment(node, "first")["slots"] == ""
    client.apply(pod("second", counted(1, resource=WRITTEN), annotations=EXCLUSIVE))
    pending = client.wait_pod("second", lambda it: WRITTEN in unscheduled(it), "kept back")
    assert "nodeName" not in pending["spec"]
    assert allocatable(client, node, WRITTEN) == MOST
    client.kubectl("delete", "pod", "first")
    assert len(node.cpus(client.wait_ready("second"))) == 1
    # As a kubelet does that registers anew; and as nobody should.
    for value in ("0", None, "99"):
        body = {"status": {"capacity": {WRITTEN: value}}}
        path = f"/api/v1/nodes/{node.name}/status"
        client.ask("PATCH", path, body)
        wait_allocatable(client, node, MOST, resource=WRITTEN)
