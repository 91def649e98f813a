"""What the watches tell: nodes, and pods on their way."""

from __future__ import annotations

from typing import Any

from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import NUMASet
from nri_numa.scheduler.fleet import Fleet, Hold
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.published import Table, Unreadable
from nri_numa.scheduler.world import World
from tests.unit.scheduler.objects import PREFIX, container, single, topology


class Told:
    """A world with a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.grown: list[str] = []
        self.settled: list[str] = []
        self.fleet = Fleet()
        self.reader = Reader(Settings())
        self.world = World(
            self.fleet, self.reader, prefix=PREFIX, settle=10, limit=600, clock=lambda: self.now,
            grown=self.grown.append, settled=self.settled.append,
        )  # fmt: skip
        self.world.node(topology(4, 4))

    def free(self) -> tuple[int, ...]:
        room = self.fleet.room("n1")
        assert isinstance(room, Table)
        return room.exclusive.left

    def at(self, now: float) -> tuple[int, ...]:
        """What is free at some time."""
        self.now = now
        self.world.tick()
        return self.free()


def bound(placed: str = '{"main":"1"}', **status: Any) -> dict[str, Any]:
    """A pod that a replica of ours bound."""
    made = single(3, node="n1", placed=placed)
    made["status"].update(status)
    return made


def test_a_bound_pod_is_held_until_its_node_counts_it() -> None:
    """The watch of Pending pods ends with the pod as it was before: it says Pending."""
    told = Told()
    told.world.pod(bound())
    assert told.free() == (4, 1)
    assert told.settled == ["uid-p"]
    told.world.pod_gone(bound())
    assert told.at(9.9) == (4, 1)
    assert told.at(10.0) == (4, 4)
    assert told.grown == ["n1", "n1"]


def test_a_pod_with_several_containers_is_held_longer() -> None:
    """When it left Pending, one of them runs."""
    told = Told()
    told.world.pod(bound())
    several = bound()
    several["spec"]["containers"] = several["spec"]["containers"] * 2
    told.world.pod_gone(several)
    assert told.at(59.0) == (4, 1)
    assert told.at(60.0) == (4, 4)


def test_a_pod_that_is_being_deleted_gives_back_at_once() -> None:
    ending = bound()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for take in ("pod", "pod_gone"):
        told = Told()
        told.world.pod(bound())
        getattr(told.world, take)(ending)
        assert told.free() == (4, 4)


def test_no_pod_is_held_for_ever() -> None:
    told = Told()
    told.world.pod(bound())
    assert told.at(599.0) == (4, 1)
    assert told.at(600.0) == (4, 4)


def test_our_own_promise_is_not_replaced() -> None:
    told = Told()
    wish = told.reader.wish(single(3))
    told.fleet.hold(Hold(wish=wish, node="n1", places={"main": NUMASet([0])}, since=0, until=600))
    told.world.pod(bound())
    assert told.free() == (1, 4)
    elsewhere = bound()
    elsewhere["spec"]["nodeName"] = "n2"  # somebody else bound it
    told.world.pod(elsewhere)
    assert told.free() == (4, 4)


def test_what_others_bound_is_not_held() -> None:
    told = Told()
    for placed in ("{", "3", '{"main":"x"}', '{"main":3}', "{}"):
        told.world.pod(bound(placed))
        assert told.free() == (4, 4)
    told.world.pod(single(3, node="n1"))
    assert not told.fleet.holds


def test_a_list_ends_what_it_does_not_name() -> None:
    told = Told()
    told.world.pod(bound())
    told.world.pods_listed(frozenset({"uid-p"}))
    assert told.at(100.0) == (4, 1)
    told.world.pods_listed(frozenset())
    assert told.at(159.0) == (4, 1)
    assert told.at(160.0) == (4, 4)


def test_nodes_come_change_and_go() -> None:
    told = Told()
    told.world.node({"metadata": {"name": "n1"}, "zones": 3})
    assert isinstance(told.fleet.room("n1"), Unreadable)
    told.world.node(topology(1, 1, name="n2"))
    told.world.nodes_listed(frozenset({"n2"}))
    assert told.fleet.names == {"n2"}
    told.world.node_gone(topology(1, 1, name="n2"))
    assert not told.fleet.names
    for garbage in ({}, {"metadata": 3}, {"metadata": {"name": 3}}):
        told.world.node(garbage)
        told.world.pod(garbage)
        told.world.pod_gone(garbage)


def test_a_list_ends_what_it_does_not_name_and_is_counted() -> None:
    told = Told()
    told.world.pod(bound())
    told.world.node(topology(4, 1, charged=[("uid-p", "main")]))
    told.world.pods_listed(frozenset())
    assert not told.fleet.holds
    assert told.grown[-1] == "n1"


def test_a_list_from_before_a_binding_takes_nothing_back() -> None:
    told = Told()
    told.world.pod(bound())
    told.world.pods_listed(frozenset())
    told.world.pod(bound())  # the watch tells of the binding
    assert told.at(599.0) == (4, 1)
    assert told.at(600.0) == (4, 4)


def renewed(text: str) -> dict[str, Any]:
    found = topology(4, 4)
    annotations = {f"{PREFIX}/renewed": text, f"{PREFIX}/valid-seconds": "900"}
    found["metadata"] = {**found["metadata"], "annotations": annotations}
    return found


def test_a_node_whose_object_nobody_renews_is_silent_until_somebody_does() -> None:
    """Its publisher died, and left `ready` behind."""
    told = Told()

    def silent() -> bool:
        told.world.tick()
        known = told.fleet.published("n1")
        assert isinstance(known, Table)
        return known.silent

    told.world.node(renewed("12:00"))
    told.now = 899.0
    assert not silent()
    told.now = 900.0
    assert silent()
    told.world.node(renewed("12:00"))  # somebody else touched it
    assert silent()
    told.world.node(renewed("12:30"))
    assert not silent()
    told.world.node(topology(4, 4))  # of a publisher that names no validity
    told.now = 1e6
    assert not silent()


def test_who_runs_is_held_where_its_node_does_not_count_it() -> None:
    """As a pod that left the phase Pending now."""
    told = Told()
    told.world.runs(bound(phase="Running"))
    assert told.free() == (4, 1)
    assert told.at(9.9) == (4, 1)
    assert told.at(10.0) == (4, 4)
    several = bound(phase="Running")
    several["spec"]["containers"].append(container("helper", "1", "1Gi"))
    told.world.runs(several)
    assert told.at(69.9) == (4, 1)
    assert told.at(70.0) == (4, 4)


def test_who_runs_is_held_until_its_node_counts_it() -> None:
    told = Told()
    told.world.runs(bound(phase="Running"))
    told.world.node(topology(4, 1, charged=[("uid-p", "main")]))
    assert not told.fleet.holds
    told.world.runs(bound(phase="Running"))
    assert not told.fleet.holds
    assert told.free() == (4, 1)


def test_who_runs_and_is_held_or_ends_or_is_not_ours_changes_nothing() -> None:
    told = Told()
    told.world.pod(bound())
    told.world.runs(bound('{"main":"0"}', phase="Running"))
    assert told.free() == (4, 1)
    assert not told.fleet.holds["uid-p"].left
    told = Told()
    ending = bound(phase="Running")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    nowhere = bound(phase="Running")
    del nowhere["spec"]["nodeName"]
    for one in (ending, nowhere, single(3, node="n1"), bound("{"), bound("{}"), {}):
        told.world.runs(one)
    assert not told.fleet.holds
