"""Who is on the node and has no container yet is named, so that nobody takes it for unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nri_numa.engine.values.settings import Settings
from nri_numa.node.view import zones_document
from nri_numa.nri.adapter import Adapter
from nri_numa.nri.coming import PATIENCE, Coming
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.world import World
from tests.machines import named as machines

GUARANTEED, BURSTABLE = "/kubepods/pod1", "/kubepods/burstable/pod1"


class Bed:
    """An agent behind its adapter, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told = 0
        self.world = World(machines.dual_smt(), Settings())
        self.waiting: list[Callable[[], object]] = []
        self.coming = Coming(
            self._tell, lambda: self.now, lambda seconds, tell: self.waiting.append(tell)
        )
        self.adapter = Adapter(self.world.agent, self.world.metrics, coming=self.coming)

    def _tell(self) -> None:
        self.told += 1

    def names(self) -> list[tuple[str, str]]:
        """Whom the document for who schedules names."""
        agent = self.world.agent
        found = zones_document(agent.machine, agent.state, None, coming=self.coming.names())
        return [(one.namespace, one.name) for one in found.pods]

    def charged(self) -> list[str]:
        """UIDs of the pods whose CPUs or memory are taken."""
        agent = self.world.agent
        return [one.pod_uid for one in zones_document(agent.machine, agent.state, None).charged]


@pytest.fixture
def bed() -> Bed:
    return Bed()


def sandbox(name: str = "p", cgroup: str = GUARANTEED) -> pb.PodSandbox:
    made = pb.PodSandbox(id=f"s-{name}", uid=f"uid-{name}", namespace="shop", name=name)
    made.linux.cgroup_parent = cgroup
    return made


def asked(pod: pb.PodSandbox, **annotations: str) -> pb.CreateContainerRequest:
    made = pb.Container(id=f"c-{pod.name}", pod_sandbox_id=pod.id, name="main")
    cpu = made.linux.resources.cpu
    cpu.quota.value, cpu.period.value, cpu.shares.value = 200_000, 100_000, 2048
    made.linux.resources.memory.limit.value = 1 << 28
    request = pb.CreateContainerRequest(pod=pod, container=made)
    for key, value in annotations.items():
        request.pod.annotations[f"numa.kubernetes.io/{key}"] = value
    return request


def test_a_pod_is_named_before_it_is_charged_and_goes_on_being_named(bed: Bed) -> None:
    pod = sandbox()
    bed.adapter.run_pod(pod)
    assert bed.names() == [("shop", "p")]
    assert not bed.charged()
    bed.adapter.create_container(asked(pod, policy="restricted"))
    assert bed.names() == [("shop", "p")]
    assert bed.charged() == ["uid-p"]
    assert not bed.coming.names()


def test_others_are_told_of_who_has_no_container_for_a_while(bed: Bed) -> None:
    """An image that is there already costs no write."""
    quick, slow = sandbox("quick"), sandbox("slow")
    bed.adapter.run_pod(quick)
    bed.adapter.run_pod(slow)
    bed.adapter.create_container(asked(quick))
    first, second = bed.waiting
    first()
    assert bed.told == 0
    second()
    assert bed.told == 1


def test_who_is_refused_is_named_no_more(bed: Bed) -> None:
    """It takes nothing, and may be tried for ever."""
    pod = sandbox()
    bed.adapter.run_pod(pod)
    with pytest.raises(Exception, match="9999"):
        bed.adapter.create_container(asked(pod, numacpu="9999"))
    assert not bed.names()


def test_only_guaranteed_pods_are_meant(bed: Bed) -> None:
    bed.adapter.run_pod(sandbox(cgroup=BURSTABLE))
    assert not bed.names()
    assert not bed.waiting


def test_it_ends_with_its_sandbox(bed: Bed) -> None:
    for name in ("a", "b", "c"):
        bed.adapter.run_pod(sandbox(name))
    bed.adapter.stop_pod(pb.PodSandbox(id="s-a"))
    assert bed.names() == [("shop", "b"), ("shop", "c")]
    bed.adapter.synchronize([sandbox("c")], [])
    assert bed.names() == [("shop", "c")]


def test_an_image_that_cannot_be_had_does_not_hide_the_node_for_ever(bed: Bed) -> None:
    bed.adapter.run_pod(sandbox())
    bed.now = PATIENCE - 1
    assert bed.names() == [("shop", "p")]
    bed.now = PATIENCE
    assert not bed.names()
