"""Who is on the node and has no container yet is named, so that nobody takes it for unknown."""

import pytest

from nri_numa.agent.agent import Agent
from nri_numa.agent.pod_observers import PENDING_POD_TIMEOUT_S, PendingPods
from nri_numa.agent.view import zones_document
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.model.workload import Container, PodSandbox, PodTable, QoSClass
from tests.beds.agent_bed import AgentBed
from tests.beds.world import container, pod, resources


class PendingBed(AgentBed):
    """With the pods that have no container yet."""

    def boot(self) -> Agent:
        agent = super().boot()
        self.pending = PendingPods(agent)
        self.observe_with(self.pending)
        return agent

    def names(self) -> list[tuple[str, str]]:
        """Whom the document for who schedules names."""
        snapshot = NodeSnapshot(self.machine, self.agent.current.state)
        found = zones_document(snapshot, pending_pods=self.pending.pod_names())
        return [(one.namespace, one.name) for one in found.pods]

    def charged(self) -> list[str]:
        """UIDs of the pods whose CPUs or memory are taken."""
        found = zones_document(NodeSnapshot(self.machine, self.agent.current.state))
        return [one.pod_uid for one in found.counted_containers]


@pytest.fixture
def bed() -> PendingBed:
    return PendingBed()


def sandbox(name: str = "p", qos: QoSClass = QoSClass.GUARANTEED, **asked: str) -> PodSandbox:
    return pod(name, asked, qos=qos, namespace="shop")


def app(of: PodSandbox) -> Container:
    return container(of, wants=resources(2, 0.25))


def test_a_pod_is_named_before_it_is_charged_and_goes_on_being_named(bed: PendingBed) -> None:
    of = sandbox(policy="restricted")
    bed.handler.run_pod(of)
    assert bed.names() == [("shop", "p")]
    assert not bed.charged()
    bed.handler.create_container(of, app(of))
    assert bed.names() == [("shop", "p")]
    assert bed.charged() == ["uid-p"]
    assert not bed.pending.pod_names()


def test_others_are_told_of_who_has_no_container_for_a_while(bed: PendingBed) -> None:
    """An image that is there already costs no write."""
    quick, slow = sandbox("quick"), sandbox("slow")
    bed.handler.run_pod(quick)
    bed.handler.run_pod(slow)
    bed.handler.create_container(quick, app(quick))
    first, second = bed.timers
    told = list[None]()
    bed.agent.current.subscribe(lambda: told.append(None))
    first()
    assert told == []
    second()
    assert told == [None]


def test_who_is_rejected_is_named_no_more(bed: PendingBed) -> None:
    """It takes nothing, and may be tried for ever."""
    of = sandbox(numacpu="9999")
    bed.handler.run_pod(of)
    with pytest.raises(Exception, match="9999"):
        bed.handler.create_container(of, app(of))
    assert not bed.names()


def test_only_guaranteed_pods_are_meant(bed: PendingBed) -> None:
    bed.handler.run_pod(sandbox(qos=QoSClass.BURSTABLE))
    assert not bed.names()
    assert not bed.timers


def test_it_ends_with_its_sandbox(bed: PendingBed) -> None:
    for name in ("a", "b", "c", "d"):
        bed.handler.run_pod(sandbox(name))
    bed.handler.stop_pod(sandbox("a"))
    bed.handler.remove_pod(sandbox("d"))
    assert bed.names() == [("shop", "b"), ("shop", "c")]
    bed.handler.synchronize(PodTable.from_pods([sandbox("c")]), [])
    assert bed.names() == [("shop", "c")]


def test_an_image_that_cannot_be_had_does_not_hide_the_node_for_ever(bed: PendingBed) -> None:
    bed.handler.run_pod(sandbox())
    bed.pass_time(PENDING_POD_TIMEOUT_S - 1)
    assert bed.names() == [("shop", "p")]
    bed.pass_time(1)
    assert not bed.names()
