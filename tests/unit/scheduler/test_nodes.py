"""Promises: made, counted, given back."""

from __future__ import annotations

from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import Settings
from nri_numa.scheduler.node_room import NodeRoom, Unreadable
from nri_numa.scheduler.nodes import Hold, Nodes
from nri_numa.scheduler.pod_reader import PodReader
from tests.unit.scheduler.objects import container, pod, single, table

READER = PodReader(Settings())


def hold(name: str, *, node: str = "n1", at: str = "0", until: float = 100.0) -> Hold:
    wish = READER.request(single(3, name=name))
    return Hold(request=wish, node=node, places={"main": NUMASet.parse(at)}, since=0.0, until=until)


def free(fleet: Nodes, node: str = "n1") -> tuple[int, ...]:
    room = fleet.room(node)
    assert isinstance(room, NodeRoom)
    return room.exclusive.free


def test_a_promise_outlives_the_object_of_its_node() -> None:
    fleet = Nodes()
    fleet.hold(hold("a"))
    assert fleet.room("n1") is None
    fleet.put("n1", table(4, 4))
    assert free(fleet) == (1, 4)
    fleet.remove("n1")
    assert fleet.room("n1") is None
    fleet.put("n1", Unreadable("why"))
    assert (fleet.unreadable, len(fleet), fleet.names) == (1, 1, {"n1"})
    assert fleet.room("n1") == Unreadable("why")


def test_a_pod_that_had_not_left_after_all_is_held_as_before() -> None:
    fleet = Nodes()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    fleet.stays("uid-a", 70.0)
    fleet.leaves("uid-a", 50.0)
    fleet.stays("uid-a", 100.0)
    fleet.stays("uid-b", 100.0)
    assert not fleet.expire(99.0)
    fleet.put("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert set(fleet.holds) == {"uid-a"}


def test_containers_that_share_one_choice_are_held_until_all_are_counted() -> None:
    """Under scope ``pod`` what is missing cannot be told apart from what is there."""
    fleet = Nodes()
    fleet.put("n1", table(8, 8))
    one, two = container("one", "2", "1Gi"), container("two", "3", "1Gi")
    wish = READER.request(
        pod(one, two, name="a", policy="single-numa-node", cpus="exclusive", scope="pod")
    )
    places = {"one": NUMASet([0]), "two": NUMASet([0])}
    fleet.hold(Hold(request=wish, node="n1", places=places, since=0, until=100))
    assert free(fleet) == (3, 8)
    fleet.put("n1", table(6, 8, charged=[("uid-a", "one")]))
    assert free(fleet) == (1, 8)
    fleet.put("n1", table(3, 8, charged=[("uid-a", "one"), ("uid-a", "two")]))
    assert free(fleet) == (3, 8)


def test_an_init_container_alone_does_not_end_a_hold() -> None:
    fleet = Nodes()
    fleet.put("n1", table(4, 4))
    wish = READER.request(
        pod(container("main", "3", "1Gi"), name="a", init=[container("first", "2", "1Gi")],
            policy="single-numa-node", cpus="exclusive")
    )  # fmt: skip
    fleet.hold(Hold(request=wish, node="n1", places={"main": NUMASet([0])}, since=0, until=100))
    fleet.put("n1", table(2, 4, charged=[("uid-a", "first")]))
    assert free(fleet) == (0, 4)
    fleet.put("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert free(fleet) == (1, 4)
