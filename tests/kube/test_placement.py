"""The main job through a kubelet: what pods of kubectl get, by /proc and by ``kubectl exec``."""

from __future__ import annotations

import re

import pytest

from tests.beds.cri import Seen, poll
from tests.beds.kube.client import PATIENCE_S, Client
from tests.beds.kube.manifests import EXCLUSIVE, asks, container, pod
from tests.beds.kube.node import Node
from tests.machines.cpus import LAST, MACHINE, NO_CPU

pytestmark = pytest.mark.kube


def test_cpus_and_mems_as_listed(client: Client, node: Node) -> None:
    listed = client.run(pod("listed", annotations=asks(numacpu=LAST, numamem="0")))
    assert node.allowed(listed) == Seen(cpus=LAST, mems="0")
    # Another process of the container, started by the kubelet on request.
    status = client.kubectl("exec", "listed", "--", "cat", "/proc/self/status")
    assert re.search(rf"^Cpus_allowed_list:\s*{LAST}$", status, re.MULTILINE)
    assert re.search(r"^Mems_allowed_list:\s*0$", status, re.MULTILINE)
    # And the container's first instruction, by the kubelet's own log.
    assert client.said("listed").startswith(f"cpus={LAST} mems=0 numa_cpus={LAST} ")


def test_exclusive_cpus_are_taken_from_others_and_given_back(client: Client, node: Node) -> None:
    before = client.run(pod("before"))
    assert node.cpus(before) == MACHINE
    owner = client.run(pod("owner", container(cpus="1"), annotations=EXCLUSIVE))
    own = node.cpus(owner)
    assert len(own) == 1
    after = client.run(pod("after"))
    assert node.cpus(before) == node.cpus(after) == MACHINE - own
    client.kubectl("delete", "pod", "owner")
    for placed in (before, after):
        poll(
            lambda p=placed: node.cpus(p) == MACHINE or None,  # type: ignore[misc]  # bound per turn
            "CPUs given back",
            timeout_s=PATIENCE_S,
        )


def test_a_refusal_is_told_by_kubectl_describe(client: Client, node: Node) -> None:
    client.apply(pod("refused", annotations=asks(numacpu=NO_CPU)))
    refused = client.wait_refused("refused")
    words = ("default/refused", "main", "numacpu", f"'{NO_CPU}'", "does not exist")
    for word in words:
        assert word in refused
    described = client.kubectl("describe", "pod", "refused")
    waiting, _, events = described.partition("\nEvents:")
    assert "Reason:       CreateContainerError" in waiting
    for word in words:
        assert word in events


def test_a_refused_owner_starts_when_there_is_room(client: Client, node: Node) -> None:
    """The kubelet asks again by itself; nobody has to do anything."""
    first = client.run(pod("first", container(cpus="1"), annotations=EXCLUSIVE))
    client.apply(
        pod("second", container(cpus="900m"), annotations=asks(numacpu=str(node.cpus(first))))
    )
    refused = client.wait_refused("second")
    assert "default/first/main" in refused
    own = node.cpus(first)
    client.kubectl("delete", "pod", "first")
    assert node.cpus(client.wait_ready("second")) == own
