"""Promises: made, counted, given back."""

from __future__ import annotations

from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import NUMASet
from nri_numa.scheduler.fleet import Fleet, Hold
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.published import Table, Unreadable
from nri_numa.scheduler.verdict import Charge
from tests.unit.scheduler.objects import PREFIX, container, pod, single, table

READER = Reader(Settings())


def hold(name: str, *, node: str = "n1", at: str = "0", until: float = 100.0) -> Hold:
    wish = READER.wish(single(3, name=name))
    return Hold(wish=wish, node=node, places={"main": NUMASet.parse(at)}, since=0.0, until=until)


def free(fleet: Fleet, node: str = "n1") -> tuple[int, ...]:
    room = fleet.room(node)
    assert isinstance(room, Table)
    return room.exclusive.left


def test_a_promise_is_counted_until_it_ends() -> None:
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    fleet.hold(hold("a"))  # a second time, for the same pod
    fleet.hold(hold("b", at="1", until=50.0))
    assert free(fleet) == (1, 1)
    assert [h.uid for h in fleet.expire(50.0)] == ["uid-b"]
    assert free(fleet) == (1, 4)
    assert fleet.leaves("uid-a", 60.0) is None
    assert fleet.leaves("uid-a", 90.0) is None  # never longer
    assert fleet.leaves("uid-c", 1.0) is None
    assert [h.uid for h in fleet.expire(60.0)] == ["uid-a"]
    assert fleet.release("uid-a") is None
    assert free(fleet) == (4, 4)
    assert not fleet.holds


def test_a_promise_outlives_the_object_of_its_node() -> None:
    fleet = Fleet()
    fleet.hold(hold("a"))
    assert fleet.room("n1") is None
    fleet.put("n1", table(4, 4))
    assert free(fleet) == (1, 4)
    fleet.remove("n1")
    assert fleet.room("n1") is None
    fleet.put("n1", Unreadable("why"))
    assert (fleet.unreadable, len(fleet), fleet.names) == (1, 1, {"n1"})
    assert fleet.room("n1") == Unreadable("why")


def test_more_room_is_noticed() -> None:
    fleet = Fleet()
    assert fleet.put("n1", table(4, 4))
    assert not fleet.put("n1", table(4, 4))
    assert not fleet.put("n1", table(4, 3, memory=(32, 16)))
    assert fleet.put("n1", table(4, 3, memory=(32, 17)))
    assert fleet.put("n1", table(0, 5))
    assert not fleet.put("n1", Unreadable("why"))
    assert fleet.put("n1", table(0, 0))
    assert fleet.put("n1", table(0, 0, 0))


def test_what_the_object_counts_is_not_taken_away_again() -> None:
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    assert free(fleet) == (1, 4)
    # The same numbers, and the node says that it counts another pod.
    fleet.put("n1", table(4, 4, charged=[("uid-z", "main")]))
    assert free(fleet) == (1, 4)
    both = [("uid-a", "main"), ("uid-z", "main")]
    assert not fleet.put("n1", table(1, 4, memory=(31, 32), charged=both))
    assert free(fleet) == (1, 4)
    # Two pods of one size in turn: the numbers alone do not change.
    fleet.hold(hold("b", at="1"))
    assert free(fleet) == (1, 1)
    assert fleet.put("n1", table(1, 4, charged=[("uid-a", "main"), ("uid-b", "main")]))
    assert free(fleet) == (1, 4)


def test_a_pod_that_is_still_on_its_way_is_held_again_when_the_node_drops_it() -> None:
    """Its container could not be started, and will be created once more."""
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    fleet.put("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert not fleet.put("n1", table(4, 4))
    assert free(fleet) == (1, 4)


def test_a_hold_ends_when_its_pod_left_and_was_counted_in_either_order() -> None:
    counted = table(1, 4, charged=[("uid-a", "main")])
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    assert fleet.leaves("uid-a", 50.0) is None
    fleet.put("n1", counted)
    assert not fleet.holds
    fleet.hold(hold("a"))  # the object was there first, as after a restart
    ended = fleet.leaves("uid-a", 50.0)
    assert ended is not None
    assert ended.counted
    assert not fleet.holds
    # It came and went, and the pods are told later.
    fleet.hold(hold("a"))
    fleet.put("n1", table(4, 4))
    assert free(fleet) == (1, 4)
    assert fleet.leaves("uid-a", 50.0) is not None
    assert free(fleet) == (4, 4)


def test_a_pod_that_had_not_left_after_all_is_held_as_before() -> None:
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    fleet.hold(hold("a"))
    fleet.stays("uid-a", 70.0)
    fleet.leaves("uid-a", 50.0)
    fleet.stays("uid-a", 100.0)
    fleet.stays("uid-b", 100.0)
    assert not fleet.expire(99.0)
    fleet.put("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert set(fleet.holds) == {"uid-a"}


def test_of_several_containers_those_are_held_that_are_not_counted() -> None:
    helper, main = container("helper", "2", "1Gi"), container("main", "3", "1Gi")
    asks = {"policy": "single-numa-node", "cpus": "exclusive"}
    places = {"helper": NUMASet([0]), "main": NUMASet([1])}
    for charge in (None, Charge((2, 3), (2000, 3000))):
        fleet = Fleet()
        fleet.put("n1", table(4, 4))
        wish = READER.wish(pod(helper, main, name="a", **asks))
        fleet.hold(Hold(wish=wish, node="n1", places=places, charge=charge, since=0, until=100))
        assert free(fleet) == (2, 1)
        fleet.put("n1", table(2, 4, charged=[("uid-a", "helper")]))
        assert free(fleet) == (2, 1)
        assert fleet.leaves("uid-a", 50.0) is None
        fleet.put("n1", table(2, 1, charged=[("uid-a", "helper"), ("uid-a", "main")]))
        assert free(fleet) == (2, 1)
        assert not fleet.holds


def test_containers_that_share_one_choice_are_held_until_all_are_counted() -> None:
    """Under scope ``pod`` what is missing cannot be told apart from what is there."""
    fleet = Fleet()
    fleet.put("n1", table(8, 8))
    one, two = container("one", "2", "1Gi"), container("two", "3", "1Gi")
    wish = READER.wish(
        pod(one, two, name="a", policy="single-numa-node", cpus="exclusive", scope="pod")
    )
    places = {"one": NUMASet([0]), "two": NUMASet([0])}
    fleet.hold(Hold(wish=wish, node="n1", places=places, since=0, until=100))
    assert free(fleet) == (3, 8)
    fleet.put("n1", table(6, 8, charged=[("uid-a", "one")]))
    assert free(fleet) == (1, 8)
    fleet.put("n1", table(3, 8, charged=[("uid-a", "one"), ("uid-a", "two")]))
    assert free(fleet) == (3, 8)


def test_an_init_container_alone_does_not_end_a_hold() -> None:
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    wish = READER.wish(
        pod(container("main", "3", "1Gi"), name="a", init=[container("first", "2", "1Gi")],
            policy="single-numa-node", cpus="exclusive")
    )  # fmt: skip
    fleet.hold(Hold(wish=wish, node="n1", places={"main": NUMASet([0])}, since=0, until=100))
    fleet.put("n1", table(2, 4, charged=[("uid-a", "first")]))
    assert free(fleet) == (0, 4)
    fleet.put("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert free(fleet) == (1, 4)


def test_what_the_kubelet_alone_aligns_is_never_counted_by_name() -> None:
    fleet = Fleet()
    fleet.put("n1", table(4, 4))
    wish = READER.wish(pod(container("main", "3", "1Gi"), name="a"))
    assert wish.kubelets
    assert not wish.needs
    charge = Charge((3, 0), (3000, 0))
    fleet.hold(Hold(wish=wish, node="n1", charge=charge, since=0, until=100))
    fleet.put("n1", table(4, 4, charged=[("uid-a", "main")]))
    assert free(fleet) == (1, 4)


def test_a_numa_node_has_no_more_than_the_whole_node() -> None:
    """A CPU of the node stays with those that share, wherever exclusive ones are taken."""
    fleet = Fleet()
    fleet.put("n1", table(4, 4, attributes={f"{PREFIX}/free-exclusive-cpus": "7"}))
    assert free(fleet) == (4, 4)
    fleet.hold(hold("a"))
    assert free(fleet) == (1, 4)
    wish = READER.wish(single(1, name="b"))
    fleet.hold(Hold(wish=wish, node="n1", places={"main": NUMASet([0])}, since=0.0, until=100.0))
    assert free(fleet) == (0, 3)
    fleet.put("n1", table(1, 1, attributes={f"{PREFIX}/free-exclusive-cpus": "0"}))
    assert free(fleet) == (0, 0)
