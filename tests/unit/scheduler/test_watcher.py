"""What the watches tell: nodes, and pods on their way."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.cluster.cluster_state import AssumedPod
from nri_numa.cluster.node_resources import NodeResources, UnreadableTopology
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.kube.requests import Resource
from nri_numa.model.cpuset import NUMASet
from tests.beds.objects import PREFIX, Watched, container, pod, single, table, topology
from tests.beds.stepped_loop import step

READER = PodReader(AgentConfig())


def watched_node() -> Watched:
    watched = Watched()
    watched.topologies.on_update(topology(4, 4))
    return watched


def bound(placed: str = '{"main":"1"}', **status: Any) -> dict[str, Any]:
    """A pod that a replica of ours bound."""
    made = single(3, node="n1", scheduled_numa_nodes=placed)
    made["status"].update(status)
    return made


def test_a_pod_bound_before_the_upgrade_is_counted_once() -> None:
    """Its annotation has the old key."""
    watched = watched_node()
    watched.pods.on_update(single(3, node="n1", placed='{"main":"1"}'))
    assert watched.free() == (4, 1)
    watched.pods.on_update(bound())
    assert watched.free() == (4, 1)


def test_where_the_object_names_nobody_time_ends_what_is_held() -> None:
    """The watch of Pending pods ends with the pod as it was before: it says Pending."""
    watched = watched_node()
    watched.pods.on_update(bound())
    assert watched.free() == (4, 1)
    assert watched.activator.pods == ["uid-p"]
    watched.pods.on_delete(bound())
    assert watched.at(9.9) == (4, 1)
    assert watched.at(10.0) == (4, 4)
    assert watched.activator.nodes == ["n1", "n1"]


def test_a_pod_with_several_containers_is_held_longer() -> None:
    """When it left Pending, one of them runs."""
    watched = watched_node()
    watched.pods.on_update(bound())
    several = bound()
    several["spec"]["containers"] = several["spec"]["containers"] * 2
    watched.pods.on_delete(several)
    assert watched.at(59.0) == (4, 1)
    assert watched.at(60.0) == (4, 4)


def ending(**status: Any) -> dict[str, Any]:
    found = bound(**status)
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return found


def test_a_pod_that_is_on_its_way_is_held_as_long_as_it_is() -> None:
    """Its image is large, or its node refuses it; deleted, it has until it ends."""
    watched = watched_node()
    watched.pods.on_update(bound())
    assert watched.at(3600.0) == (4, 1)
    watched.pods.on_update(ending())
    assert watched.at(7200.0) == (4, 1)


def counting_node(*charged: str, free: tuple[int, int] = (4, 4)) -> dict[str, Any]:
    """An object that names the containers that it counts."""
    return topology(*free, charged=[("uid-p", name) for name in charged])


async def test_an_object_that_is_late_by_an_hour_gives_nothing_away() -> None:
    """The pod runs all the time; it is asked after, and less and less often."""
    watched = Watched()
    watched.cluster.put(Resource.PODS, bound(phase="Running"))
    watched.topologies.on_update(counting_node())
    watched.pods.on_update(bound())
    watched.pods.on_delete(bound())
    for now in range(3600):
        assert watched.at(float(now)) == (4, 1)
        await watched.pods.query_overdue_pods()
    assert 3600 / 60 <= len(watched.cluster.requests) <= 3600 / 60 + 5
    watched.topologies.on_update(counting_node("main", free=(4, 1)))
    assert not watched.nodes.assumed_pods
    watched.topologies.on_update(counting_node())
    assert watched.free() == (4, 4)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "elsewhere", "another", "404"])
@pytest.mark.parametrize("deleted", [False, True])
async def test_a_pod_that_ended_uncounted_is_held_no_more(phase: str, deleted: bool) -> None:
    another = bound()
    another["metadata"]["uid"] = "another"
    now = {"elsewhere": [single(3, node="n2")], "another": [another], "404": []}
    watched = Watched()
    watched.cluster.fail(503, "busy")
    watched.topologies.on_update(counting_node())
    watched.pods.on_update(bound())
    watched.pods.on_delete(ending() if deleted else bound())
    first = 0.0 if deleted else 10.0
    await watched.pods.query_overdue_pods()
    assert len(watched.cluster.requests) == deleted, "one that was being deleted at once"
    assert watched.at(first) == (4, 1)
    await watched.pods.query_overdue_pods()
    assert watched.at(first) == (4, 1), "nothing answered"
    watched.cluster.recover()
    watched.cluster.put(Resource.PODS, *now.get(phase, [bound(phase=phase)]))
    watched.at(first + 10)
    await watched.pods.query_overdue_pods()
    assert watched.free() == (4, 4)
    assert watched.activator.nodes[-1] == "n1"


async def test_a_binding_that_was_never_written_is_held_no_more() -> None:
    watched = Watched()
    watched.cluster.put(Resource.PODS, single(3))
    watched.topologies.on_update(counting_node())
    watched.nodes.assume_pod(replace(hold("p"), expires_at=60.0))
    for now in range(0, 600, 20):
        assert watched.at(float(now)) == (1, 4)
        await watched.pods.query_overdue_pods()
    watched.at(660.0)
    await watched.pods.query_overdue_pods()
    assert not watched.nodes.assumed_pods


async def test_a_pod_that_seemed_to_have_left_is_held_as_before() -> None:
    """A list from before its binding, and then its status."""
    watched = Watched()
    watched.cluster.put(Resource.PODS, bound())
    watched.topologies.on_update(counting_node())
    watched.pods.on_update(bound())
    watched.pods.on_list(frozenset())
    watched.at(60.0)
    await watched.pods.query_overdue_pods()
    assert not watched.nodes.assumed_pods["uid-p"].left_pending
    watched.topologies.on_update(counting_node("main", free=(4, 1)))
    assert "uid-p" in watched.nodes.assumed_pods


def test_containers_are_counted_one_after_the_other() -> None:
    """The first one ended before the second one started: no object names both."""
    watched = Watched()
    two = bound('{"main":"0","two":"1"}')
    two["spec"]["containers"].append(container("two", "2", "1Gi"))
    watched.topologies.on_update(counting_node())
    watched.pods.on_update(two)
    assert watched.free() == (1, 2)
    watched.topologies.on_update(counting_node("main", free=(1, 4)))
    watched.pods.on_delete(two)
    assert watched.free() == (1, 2)
    watched.topologies.on_update(counting_node())
    assert watched.free() == (4, 2)
    watched.topologies.on_update(counting_node("two", free=(4, 2)))
    assert not watched.nodes.assumed_pods


def test_a_node_that_counts_nobody_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.topologies.on_update(counting_node())
    for name in ("a", "b"):
        watched.nodes.assume_pod(hold(name))
        watched.nodes.pod_left_pending(f"uid-{name}", 0.0, 1e9)
    for now in (59.0, 60.0, 61.0):
        watched.at(now)
        assert caplog.text.count("started pod not counted by node") == (now >= 60)
        assert len(watched.nodes.late_assumed_pods(now)) == 2 * (now >= 60)
    assert "'node': 'n1'" in str(vars(caplog.records[-1]))


def test_our_own_promise_is_not_replaced() -> None:
    watched = watched_node()
    request = watched.reader.read_pod_request(single(3))
    watched.nodes.assume_pod(
        AssumedPod(
            request=request,
            node="n1",
            numa_nodes={"main": NUMASet([0])},
            assumed_at=0,
            expires_at=600,
        )
    )
    watched.pods.on_update(bound())
    assert watched.free() == (1, 4)
    elsewhere = bound()
    elsewhere["spec"]["nodeName"] = "n2"  # somebody else bound it
    watched.pods.on_update(elsewhere)
    assert watched.free() == (4, 4)


def test_what_others_bound_is_not_held() -> None:
    watched = watched_node()
    for placed in ("{", "3", '{"main":"x"}', '{"main":3}', "{}"):
        watched.pods.on_update(bound(placed))
        assert watched.free() == (4, 4)
    watched.pods.on_update(single(3, node="n1"))
    assert not watched.nodes.assumed_pods


def test_a_list_ends_what_it_does_not_name() -> None:
    watched = watched_node()
    watched.pods.on_update(bound())
    watched.pods.on_list(frozenset({"uid-p"}))
    assert watched.at(100.0) == (4, 1)
    watched.pods.on_list(frozenset())
    assert watched.at(159.0) == (4, 1)
    watched.topologies.on_update(topology(4, 1, charged=[("uid-p", "main")]))
    assert not watched.nodes.assumed_pods
    assert watched.activator.nodes[-1] == "n1"


@pytest.mark.parametrize(
    ("key", "less", "more"),
    [("agent-state", "not-ready", "ready"), ("free-exclusive-cpus", "5", "8")],
)
def test_room_that_no_numa_node_says_wakes_pods_too(key: str, less: str, more: str) -> None:
    """The agent places containers again; a quota lets the whole node give more."""
    watched = Watched()
    for text in (more, less, more):
        watched.topologies.on_update(topology(4, 4, attributes={f"{PREFIX}/{key}": text}))
    assert watched.activator.nodes == ["n1", "n1"]


def test_nodes_come_change_and_go() -> None:
    watched = watched_node()
    watched.topologies.on_update({"metadata": {"name": "n1"}, "zones": 3})
    assert isinstance(watched.nodes.free_resources("n1"), UnreadableTopology)
    watched.topologies.on_update(topology(1, 1, name="n2"))
    watched.topologies.on_every_deleted_key("n1")
    assert watched.nodes.node_names == {"n2"}
    watched.topologies.on_every_deleted_key("n2")
    assert not watched.nodes.node_names
    for garbage in ({}, {"metadata": 3}, {"metadata": {"name": 3}}):
        watched.topologies.on_update(garbage)
        watched.pods.on_update(garbage)
        watched.pods.on_delete(garbage)


def test_a_list_from_before_a_binding_takes_nothing_back() -> None:
    watched = watched_node()
    watched.pods.on_update(bound())
    watched.pods.on_list(frozenset())
    watched.pods.on_update(bound())  # the watch tells of the binding
    assert watched.at(3600.0) == (4, 1)


def renewed(text: str, valid: object = "900") -> dict[str, Any]:
    found = topology(4, 4)
    found["metadata"]["annotations"] = {
        f"{PREFIX}/renewed-at": text, f"{PREFIX}/validity-seconds": valid
    }  # fmt: skip
    return found


def silent(watched: Watched, now: float) -> bool:
    watched.now = now
    watched.tick()
    known = watched.nodes.published_resources("n1")
    assert isinstance(known, NodeResources)
    return known.agent_not_ready


def test_a_node_whose_object_nobody_renews_is_silent_until_somebody_does() -> None:
    """Its publisher died, and left `ready` behind."""
    watched = watched_node()
    watched.topologies.on_update(renewed("12:00"))
    assert not silent(watched, 899.0)
    assert silent(watched, 900.0)
    watched.topologies.on_update(renewed("12:00"))  # somebody else touched it
    assert silent(watched, 900.0)
    watched.topologies.on_update(renewed("12:30"))
    assert not silent(watched, 900.0)
    watched.topologies.on_update(topology(4, 4))  # of a publisher that names no validity
    assert not silent(watched, 1e6)


@pytest.mark.parametrize("valid", [None, "", "0", "-1", "NaN", "1e3", "9" * 7, 900, []])
def test_without_a_validity_that_can_be_read_it_holds_for_ever(valid: object) -> None:
    watched = watched_node()
    watched.topologies.on_update(renewed("12:00"))
    watched.topologies.on_update(renewed("12:00", valid))
    assert not silent(watched, 1e9)
    watched.topologies.on_update({**topology(4, 4), "metadata": {"name": "n1", "annotations": "x"}})
    assert not silent(watched, 1e9)


def test_who_runs_is_held_where_its_node_does_not_count_it() -> None:
    """As a pod that left the phase Pending now."""
    watched = watched_node()
    watched.pods.on_pod_found(bound(phase="Running"))
    assert watched.free() == (4, 1)
    assert watched.at(9.9) == (4, 1)
    assert watched.at(10.0) == (4, 4)
    several = bound(phase="Running")
    several["spec"]["containers"].append(container("helper", "1", "1Gi"))
    watched.pods.on_pod_found(several)
    assert watched.at(69.9) == (4, 1)
    assert watched.at(70.0) == (4, 4)


def test_who_runs_is_held_until_its_node_counts_it() -> None:
    watched = watched_node()
    watched.pods.on_pod_found(ending(phase="Running"))  # until its processes have ended
    assert watched.free() == (4, 1)
    watched.topologies.on_update(topology(4, 1, charged=[("uid-p", "main")]))
    assert not watched.nodes.assumed_pods
    watched.pods.on_pod_found(bound(phase="Running"))
    assert not watched.nodes.assumed_pods
    assert watched.free() == (4, 1)


def test_who_is_held_or_not_ours_changes_nothing() -> None:
    watched = watched_node()
    watched.pods.on_update(bound())
    watched.pods.on_pod_found(bound('{"main":"0"}', phase="Running"))
    assert watched.free() == (4, 1)
    assert not watched.nodes.assumed_pods["uid-p"].left_pending
    elsewhere = bound()
    elsewhere["spec"]["nodeName"] = "n2"  # another replica bound it, and no watch said so yet
    watched.pods.on_pod_found(elsewhere)
    assert [hold.node for hold in watched.nodes.assumed_pods.values()] == ["n2"]
    watched = watched_node()
    nowhere = bound(phase="Running")
    del nowhere["spec"]["nodeName"]
    for one in (nowhere, single(3, node="n1"), bound("{"), bound("{}"), {}):
        watched.pods.on_pod_found(one)
    assert not watched.nodes.assumed_pods


def hold(name: str) -> AssumedPod:
    places = {"main": NUMASet([0])}
    return AssumedPod(
        request=READER.read_pod_request(single(3, name=name)),
        node="n1",
        numa_nodes=places,
        assumed_at=0.0,
        expires_at=100.0,
    )


def test_a_promise_outlives_the_object_of_its_node() -> None:
    watched = Watched()
    fleet = watched.nodes
    fleet.assume_pod(hold("a"))
    assert fleet.free_resources("n1") is None
    fleet.update_resources("n1", table(4, 4))
    assert watched.free() == (1, 4)
    fleet.remove_topology("n1")
    assert fleet.free_resources("n1") is None
    fleet.update_resources("n1", UnreadableTopology("why"))
    assert (fleet.unreadable_count, len(fleet), fleet.node_names) == (1, 1, {"n1"})
    assert fleet.free_resources("n1") == UnreadableTopology("why")


def test_containers_that_share_one_choice_are_held_until_all_are_counted() -> None:
    """Under scope ``pod`` what is missing cannot be told apart from what is there."""
    watched = Watched()
    fleet = watched.nodes
    fleet.update_resources("n1", table(8, 8))
    one, two = container("one", "2", "1Gi"), container("two", "3", "1Gi")
    wish = READER.read_pod_request(
        pod(one, two, name="a", policy="single-numa-node", cpus="exclusive", scope="pod")
    )
    places = {"one": NUMASet([0]), "two": NUMASet([0])}
    fleet.assume_pod(
        AssumedPod(request=wish, node="n1", numa_nodes=places, assumed_at=0, expires_at=100)
    )
    assert watched.free() == (3, 8)
    fleet.update_resources("n1", table(6, 8, charged=[("uid-a", "one")]))
    assert watched.free() == (1, 8)
    fleet.update_resources("n1", table(3, 8, charged=[("uid-a", "one"), ("uid-a", "two")]))
    assert watched.free() == (3, 8)


def test_an_init_container_alone_does_not_end_a_hold() -> None:
    watched = watched_node()
    fleet = watched.nodes
    wish = READER.read_pod_request(
        pod(container("main", "3", "1Gi"), name="a", init=[container("first", "2", "1Gi")],
            policy="single-numa-node", cpus="exclusive")
    )  # fmt: skip
    fleet.assume_pod(
        AssumedPod(
            request=wish, node="n1", numa_nodes={"main": NUMASet([0])}, assumed_at=0, expires_at=100
        )
    )
    fleet.update_resources("n1", table(2, 4, charged=[("uid-a", "first")]))
    assert watched.free() == (0, 4)
    fleet.update_resources("n1", table(1, 4, charged=[("uid-a", "main")]))
    assert watched.free() == (1, 4)


async def test_no_binding_waits_longer_than_one_reading_may_take() -> None:
    """The API server does not answer: each asks anew."""
    watched = Watched(bind_timeout=2)
    watched.cluster.hold("")
    watched.pods.on_list(frozenset())
    for _ in range(2):
        reading = asyncio.create_task(watched.pods.read_node("n1"))
        await step(1.9)
        assert not reading.done()
        await step(0.2)
        assert isinstance(reading.exception(), TimeoutError)
    assert len(watched.cluster.requests) == 2


@pytest.mark.parametrize("stale", [False, True])
def test_what_befalls_all_nodes_is_one_line(caplog: pytest.LogCaptureFixture, stale: bool) -> None:
    """Each write of an object may be wrong in another way, and all publishers may stand still."""
    watched = Watched()
    for now in range(100):
        for node in range(10):
            document = topology(4, name=f"n{node}")
            if stale:
                document["metadata"]["annotations"] = {
                    f"{PREFIX}/renewed-at": str(now), f"{PREFIX}/validity-seconds": "1",
                }  # fmt: skip
            else:
                document["apiVersion"] = f"v{now}"
            watched.topologies.on_update(document)
        watched.now = now + 1
        watched.tick()
    counts = [vars(record)["fields"]["object_count"] for record in caplog.records]
    assert counts == [10, 60 * 10]
