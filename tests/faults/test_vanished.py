"""Pods that end while nobody tells the agent: what they had is free for others within seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nri_numa.demo.runtime import DemoContainer
from nri_numa.model.cpuset import CPUSet
from tests.beds.embedded_node import RUNTIMES, EmbeddedNode, limits, until

OWN = {"policy": "single-numa-node"}


def stopped(node: EmbeddedNode, of: DemoContainer) -> None:
    node.call(node.runtime.stop_container(of.id))
    node.call(node.runtime.stop_pod(of.message.pod_sandbox_id))


def sandbox_stopped(node: EmbeddedNode, of: DemoContainer) -> None:
    node.call(node.runtime.stop_pod(of.message.pod_sandbox_id))


def removed_by_force(node: EmbeddedNode, of: DemoContainer) -> None:
    node.call(node.runtime.remove_pod(of.message.pod_sandbox_id))


def container_removed_first(node: EmbeddedNode, of: DemoContainer) -> None:
    node.call(node.runtime.remove_container(of.id))
    node.call(node.runtime.stop_pod(of.message.pod_sandbox_id))


def sandbox_died(node: EmbeddedNode, of: DemoContainer) -> None:
    """Its process ended, and those of its containers: that is no call, and no event of a pod."""
    node.call(node.runtime.stop_container(of.id))
    node.runtime.end_sandbox(of.message.pod_sandbox_id)


WAYS = (stopped, sandbox_stopped, removed_by_force, container_removed_first, sandbox_died)


def agent_away(node: EmbeddedNode, end: Callable[[], None]) -> None:
    node.plugin.kill()
    end()
    node.plugin.start()


def runtime_restarted(node: EmbeddedNode, end: Callable[[], None]) -> None:
    before = node.connections
    node.restart_runtime()
    node.reconnected(before)
    end()


def both_restarted(node: EmbeddedNode, end: Callable[[], None]) -> None:
    node.plugin.kill()
    node.restart_runtime()
    node.plugin.start()
    end()


def both_away(node: EmbeddedNode, end: Callable[[], None]) -> None:
    node.plugin.kill()
    node.restart_runtime()
    end()
    node.plugin.start()


@pytest.mark.parametrize(
    ("away", "runtime"),
    [
        (agent_away, "containerd"),
        (agent_away, "cri-o"),
        (runtime_restarted, "containerd"),
        (both_restarted, "containerd"),
        (both_away, "containerd"),
    ],
)
def test_what_a_pod_had_that_vanished_is_free(
    tmp_path: Path, away: Callable[[EmbeddedNode, Callable[[], None]], None], runtime: str
) -> None:
    """Ten minutes long it was kept for pods that nobody could start any more."""
    with EmbeddedNode(tmp_path, **RUNTIMES[runtime]) as node:
        node.start()
        neighbour = node.free()
        ran = [node.owner(way.__name__.replace("_", "-"), 1) for way in WAYS]
        created = node.create(node.pod("never-started", OWN), cpus=1)
        whole = node.pod("to-come", {**OWN, "scope": "pod"}, given=limits(2))
        assert len(node.assignments()) == len(ran) + 3

        def end() -> None:
            for way, of in zip(WAYS, ran, strict=True):
                way(node, of)
            for pod_id in (created.message.pod_sandbox_id, whole.id):
                node.call(node.runtime.stop_pod(pod_id))

        away(node, end)

        def left() -> list[str]:
            every = [one for one in node.assignments().values() if one["pod"] != "free"]
            return [one["pod"] for one in every if one.get("reservation") != "soft"]

        until(lambda: not left(), "all that is kept gives way", timeout_s=60)
        for pod_id in [i for i in node.runtime.pods if i != neighbour.message.pod_sandbox_id]:
            node.call(node.runtime.remove_pod(pod_id))
        until(lambda: CPUSet.parse(neighbour.cpus) == node.topology.online, "it has all CPUs")
        node.usable()
