"""Containers foreseen when the sandbox of their pod runs: what is known there, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nri_numa.engine.state import Kind
from nri_numa.engine.values.settings import Rule, Settings
from nri_numa.node.ahead import FORESEEN, ONCE
from nri_numa.nri.shapes import ReadyAnswer
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.world import PREFIX
from tests.scenarios.test_decided_ahead import OWN, SHARED, Node

Change = Callable[[pb.CreateContainerRequest], object]


class Bed(Node):
    """A node whose runtime tells of sandboxes."""

    def ask(
        self, name: str, asks: dict[str, str], cpus: int = 2, *, memory: int = 0
    ) -> pb.CreateContainerRequest:
        """The request for the one container of a pod, as a kubelet and containerd make it."""
        request = self.request(name, asks, cpus)
        request.container.linux.oom_score_adj.value = -997 if cpus else 999
        if memory:
            request.container.linux.resources.memory.limit.value = memory
        given, own = request.pod.linux.pod_resources, request.container.linux.resources
        for key in ("shares", "quota", "period"):
            getattr(given.cpu, key).value = getattr(own.cpu, key).value
        given.memory.limit.value = memory  # wrapped, also where it is 0
        return request

    def begins(self, request: pb.CreateContainerRequest) -> None:
        """Its sandbox runs, and then nothing happens for a moment."""
        self.adapter.run_pod(request.pod)
        self.rest()

    def comes(self, request: pb.CreateContainerRequest) -> bool:
        """The container is created; whether that was decided ahead."""
        return isinstance(self.adapter.create_container(request), ReadyAnswer)


@pytest.mark.parametrize(("asks", "cpus"), [(OWN, 2), (SHARED, 0), ({}, 0), ({}, 2)])
@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_the_first_container_of_its_shape_is_foreseen(
    asks: dict[str, str], cpus: int, memory: int
) -> None:
    bed = Bed()
    request = bed.ask("a", asks, cpus, memory=memory)
    bed.begins(request)
    # What decisions do not read is not known before: devices, swap, how the container is called.
    request.container.linux.resources.devices.add(access="rwm")
    request.container.linux.resources.memory.swap.value = 1 << 30
    request.container.name = "main"
    assert bed.comes(request)
    allocation = bed.agent.state.allocations["c-a"]
    assert allocation.full_name == "shop/a/main"
    assert allocation.owned == (asks == OWN)
    bed.rest()
    grounds = bed.agent.grounds_of("c-a")
    assert grounds is None or (grounds.pod, grounds.container) == ("a", "main")
    assert (bed.count("hit"), bed.count("new")) == (1, 0)


def test_a_memory_request_is_taken_to_be_the_limit() -> None:
    """Of Burstable pods the OOM score tells it, and the sandbox does not."""
    bed = Bed()
    total = bed.agent.machine.memory_total
    for name, score, foreseen in (("a", 875, True), ("b", 938, False)):
        request = bed.ask(name, SHARED, 0, memory=total // 8 + len(name))
        request.pod.namespace = name  # the second one is no replica of the first
        request.container.linux.oom_score_adj.value = score
        bed.begins(request)
        assert bed.comes(request) == foreseen


def _more_cpus(request: pb.CreateContainerRequest) -> None:
    request.container.linux.resources.cpu.quota.value *= 2


def _memory(request: pb.CreateContainerRequest) -> None:
    request.container.linux.resources.memory.limit.value = 1 << 20


def _pinned(request: pb.CreateContainerRequest) -> None:
    request.container.linux.resources.cpu.cpus = "3"


def _resized_meanwhile(request: pb.CreateContainerRequest) -> None:
    request.pod.linux.pod_resources.cpu.quota.value *= 2


CHANGES = (_more_cpus, _memory, _pinned, _resized_meanwhile)


@pytest.mark.parametrize("change", CHANGES)
def test_one_that_is_not_as_foreseen_is_decided_when_it_comes(change: Change) -> None:
    """As the first of several containers, for example."""
    bed = Bed()
    foreseen, request = bed.ask("a", OWN), bed.ask("a", OWN)
    bed.begins(foreseen)
    change(request)
    assert not bed.comes(request)
    assert bed.count("new") == 1


def test_what_was_foreseen_wrongly_is_forgotten() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    other = bed.ask("a", OWN)
    _memory(other)
    assert not bed.comes(other)
    bed.rest()
    assert not bed.comes(bed.ask("b", OWN))
    assert bed.count("new") == 2
    bed.rest()
    assert bed.comes(bed.ask("c", OWN))


def test_a_second_container_of_the_pod_is_decided_by_itself() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    assert bed.comes(request)
    bed.rest()
    request.container.id, request.container.name = "c-second", "second"
    assert not bed.comes(request)
    assert bed.count("unfit") == 1


def test_what_changes_between_the_sandbox_and_its_container_is_seen() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    assert bed.create("other", OWN, 4) is False
    assert not bed.comes(request)
    assert bed.count("late") == 1


def test_a_change_is_followed_by_another_decision() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    bed.create("other", OWN, 4)
    bed.rest()
    assert bed.comes(request)
    mine, other = (bed.agent.state.allocations[i].cpus for i in ("c-a", "c-other"))
    assert not mine & other


def test_a_container_that_is_refused_was_not_foreseen() -> None:
    bed = Bed()
    request = bed.ask("a", OWN, 200)
    bed.begins(request)
    with pytest.raises(Exception, match="pod shop/a, container app"):
        bed.comes(request)
    assert bed.count("unfit") == 1


def test_the_next_replica_is_foreseen_as_the_last_one_was() -> None:
    """Also when it has what no sandbox tells, and came long ago."""
    bed = Bed()
    first, second = bed.ask("a", OWN), bed.ask("b", OWN)
    for request in (first, second):
        _memory(request)
    assert not bed.comes(first)
    for number in range(ONCE):
        bed.create(f"other-{number}", SHARED, 0)
        bed.rest()
    bed.begins(second)
    assert bed.comes(second)


def test_what_is_never_asked_for_costs_nothing_any_more() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    for number in range(ONCE):
        bed.create(f"other-{number}", SHARED, 0)
        bed.rest()
        bed.create(f"more-{number}", OWN | {"load": "high"}, 1)
        bed.rest()
    assert not bed.comes(request)
    assert bed.count("late") == 0


@pytest.mark.parametrize(
    ("asks", "foreseen"),
    [
        ({"policy.app": "single-numa-node"}, True),
        ({"policy.app": "single-numa-node", "smt.app": "any", "load": "high"}, True),
        (OWN | {"placed": '{"app":"1"}'}, True),
        ({"policy.app": "restricted", "policy.side": "restricted"}, False),
        ({"policy.side": "single-numa-node"}, False),
        (OWN | {"placed": '{"app":"1","side":"0"}'}, False),
        (OWN | {"placed": "nonsense"}, False),
    ],
)
def test_a_name_that_counts_is_the_one_that_an_annotation_gives(
    asks: dict[str, str], foreseen: bool
) -> None:
    bed = Bed()
    request = bed.ask("a", asks)
    request.pod.annotations["else.example/policy.app"] = "nobody's"
    bed.begins(request)
    assert bed.comes(request) == foreseen
    kind = bed.agent.state.allocations["c-a"].kind
    assert kind is (Kind.UNBOUND if asks.keys() == {"policy.side"} else Kind.EXCLUSIVE)


def test_where_rules_look_at_names_nothing_is_foreseen() -> None:
    rule = Rule(containers=("app",), values={"policy": "single-numa-node"})
    bed = Bed(Settings(rules=(rule,)))
    request = bed.ask("a", {})
    bed.begins(request)
    assert not bed.comes(request)
    bed.rest()
    assert bed.comes(bed.ask("b", {}))
    bed.rest()
    other = bed.ask("c", {})
    other.container.name = "side"
    assert not bed.comes(other)


def _no_sum(request: pb.CreateContainerRequest) -> None:
    request.pod.linux.ClearField("pod_resources")


def _no_class(request: pb.CreateContainerRequest) -> None:
    request.pod.linux.cgroup_parent = "/machine.slice"


def _clutter(request: pb.CreateContainerRequest) -> None:
    request.pod.annotations.update({f"x.example/{number}": "" for number in range(70)})


def _long(request: pb.CreateContainerRequest) -> None:
    request.pod.annotations[PREFIX + "load"] = "1" * 5000


@pytest.mark.parametrize("change", [_no_sum, _no_class, _clutter, _long])
def test_of_a_pod_that_tells_too_little_or_too_much_nothing_is_foreseen(change: Change) -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    change(request)
    bed.begins(request)
    if change is _long:
        return  # it is refused
    assert not bed.comes(request)
    assert bed.count("hit") == bed.count("late") == bed.count("unfit") == 0


def test_pods_without_requests_are_best_effort() -> None:
    bed = Bed()
    request = bed.ask("a", {}, 0)
    request.pod.linux.cgroup_parent = "/kubepods/besteffort/pod"
    request.container.linux.oom_score_adj.value = 1000
    for cpu in (request.pod.linux.pod_resources.cpu, request.container.linux.resources.cpu):
        cpu.shares.value = 2
        cpu.ClearField("quota")
    bed.begins(request)
    assert bed.comes(request)


def test_only_the_latest_sandboxes_are_kept() -> None:
    bed = Bed()
    requests = [
        bed.ask(f"p{n}", SHARED | {"load": f"0{n}:00-12:00"}, 0) for n in range(FORESEEN + 1)
    ]
    for request in requests:
        bed.begins(request)
    assert not bed.comes(requests[0])
    bed.rest()
    assert bed.comes(requests[-1])


def test_two_sandboxes_of_one_workload_are_one_shape() -> None:
    bed = Bed()
    requests = [bed.ask(name, OWN) for name in ("a", "b")]
    for request in requests:
        bed.adapter.run_pod(request.pod)
    bed.rest()
    for request in requests:
        assert bed.comes(request)
        bed.rest()
    one, two = (bed.agent.state.allocations[i].cpus for i in ("c-a", "c-b"))
    assert not one & two


def test_a_reload_forgets_what_was_foreseen() -> None:
    bed = Bed()
    request = bed.ask("a", OWN)
    bed.begins(request)
    machine = bed.agent.machine
    bed.agent.retopology(replace(machine, settings=replace(machine.settings, oversale=2.0)))
    assert not bed.comes(request)
    assert bed.count("new") == 1


def test_the_news_of_a_sandbox_is_wanted_where_decisions_are_made_ahead() -> None:
    bed = Bed()
    assert bed.adapter.sandboxes
    assert not type(bed.adapter)(bed.agent, bed.world.metrics).sandboxes
