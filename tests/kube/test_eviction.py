"""Pods that somebody else ends: what they had is given back, and whoever replaces them gets it."""

from collections.abc import Iterator

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import poll
from tests.beds.kube.client import Client, JsonObject, is_ready
from tests.beds.kube.manifests import EXCLUSIVE, container, pod, template, workload
from tests.beds.kube.node import KubeNode
from tests.machines.cpus import MACHINE

OWNERS = template(container(cpus="1"), annotations=EXCLUSIVE)


def owner_of(client: Client, but: str = "") -> JsonObject:
    """The pod of the Deployment ``owner``, Ready; another one than `but`."""

    def ask() -> JsonObject | None:
        pods = [each for each in client.pods("app=owner") if each["metadata"]["name"] != but]
        return next((each for each in pods if is_ready(each)), None)

    return poll(ask, "a Ready pod of owner")


def settles(node: KubeNode, placed: JsonObject, cpus: CPUSet) -> None:
    """Wait until a pod may use exactly these CPUs."""
    name = placed["metadata"]["name"]
    poll(lambda: node.cpus(placed) == cpus, f"{name} on {cpus}")


def test_who_replaces_an_evicted_owner_owns(client: Client, node: KubeNode) -> None:
    """The replacement may start before the old one is gone; then it waits for its CPU."""
    client.apply(workload("Deployment", "owner", OWNERS))
    first = owner_of(client)
    shared = client.run(pod("shared"))
    assert node.cpus(shared) == MACHINE - node.cpus(first)
    name = first["metadata"]["name"]
    kind = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    client.ask("POST", f"/api/v1/namespaces/default/pods/{name}/eviction", kind)  # as kubectl drain
    second = owner_of(client, but=name)
    own = node.cpus(second)
    assert len(own) == 1
    settles(node, shared, MACHINE - own)


# A soft threshold: the hard one is taken off what the node may give to pods, and the kubelet would
# refuse to have them back when it restarts. Not 100%, which it takes for "no threshold".
PRESSURE = {
    "evictionSoft": {"memory.available": "99.9%"},
    "evictionSoftGracePeriod": {"memory.available": "1s"},
    "evictionPressureTransitionPeriod": "1s",
}
NO_PRESSURE: dict[str, object] = {"evictionSoft": {}, "evictionSoftGracePeriod": {}}


@pytest.fixture
def relieved(node: KubeNode) -> Iterator[None]:
    """A test may put the node under pressure; afterwards it has none."""
    yield
    node.restart_kubelet(NO_PRESSURE)


@pytest.mark.usefixtures("relieved")
def test_an_owner_that_the_kubelet_evicts_gives_back(client: Client, node: KubeNode) -> None:
    """Memory is short on the node: all go but the critical pod, which gets what they left.

    The owner's Deployment makes others, which are evicted in turn; the first that may stay owns.
    """
    critical = client.run(pod("critical", priorityClassName="system-node-critical"))
    client.apply(workload("Deployment", "owner", OWNERS))
    first = owner_of(client)
    assert node.cpus(critical) == MACHINE - node.cpus(first)
    name, pid = first["metadata"]["name"], node.pid(critical)
    node.restart_kubelet(PRESSURE, wait=False)
    evicted = client.wait_pod(name, lambda it: it["status"]["phase"] == "Failed", "evicted")
    assert evicted["status"]["reason"] == "Evicted"
    assert "low on resource: memory" in evicted["status"]["message"]
    settles(node, critical, MACHINE)
    node.restart_kubelet(NO_PRESSURE)
    second = owner_of(client, but=name)
    own = node.cpus(second)
    assert len(own) == 1
    settles(node, critical, MACHINE - own)
    assert node.pid(critical) == pid
