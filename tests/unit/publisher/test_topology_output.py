"""When the object is written, and what becomes of it when others have a hand in it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource, Verb
from nri_numa.publisher.outbox import BLOCKED_RETRY_S, MAX_BACKOFF_S, MIN_BACKOFF_S
from nri_numa.publisher.outputs import AgentOfflineCapacityOutput, NodeMetadataOutput
from nri_numa.publisher.topology import (
    RELEASE_TOUCH_DELAY_S,
    SERVER_PRUNE_ERROR_TEXT,
    TopologyOutput,
    other_field_managers,
)
from tests.beds.http_view import FakeView
from tests.unit.publisher.test_outputs import World

OURS = {"manager": "nri-numa-publish", "operation": "Apply", "fieldsV1": {"f:zones": {}}}
NFD = {"manager": "nfd-topology-updater", "operation": "Update", "fieldsV1": {"f:zones": {}}}


class Cluster:
    """One Node and its object behind the requests.

    Attributes:
        there: the object; empty where there is none.
    """

    def __init__(self) -> None:
        self.node_uid: str | None = "node-1"
        self.there: dict[str, Any] = {}
        self.broken = False
        self.forced: Outcome | None = None
        self.made = 0

    def __call__(self, request: APIRequest) -> Outcome:
        if request.resource is Resource.NODES:
            if self.node_uid is None:
                return Outcome(result=OutcomeKind.MISSING)
            return Outcome(
                result=OutcomeKind.SUCCEEDED, documents=({"metadata": {"uid": self.node_uid}},)
            )
        if self.forced is not None:
            return self.forced
        if request.verb is Verb.GET:
            if not self.there:
                return Outcome(result=OutcomeKind.MISSING)
        elif request.form is ContentType.JSON:
            self.broken = False
            self.metadata["managedFields"] = []
        elif self.broken:
            return Outcome(result=OutcomeKind.FAILED, text=f"500: {SERVER_PRUNE_ERROR_TEXT} of us")
        else:
            self.made += not self.there
            uid = self.metadata["uid"] if self.there else f"object-{self.made}"
            self.there = deepcopy(request.body)
            self.metadata.update(uid=uid, managedFields=[OURS])
        return Outcome(result=OutcomeKind.SUCCEEDED, documents=(deepcopy(self.there),))

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = self.there["metadata"]
        return found

    @property
    def owner(self) -> dict[str, Any]:
        (found,) = self.metadata["ownerReferences"]
        return dict(found)

    @property
    def freed(self) -> int:
        return int(self.metadata["annotations"]["x.io/freed"])

    @property
    def agent(self) -> str:
        return str({a["name"]: a["value"] for a in self.there["attributes"]}["x.io/agent"])


class Topology(World):
    """The output before its cluster, with an agent that is asked for its zones."""

    def __init__(self, cluster: Cluster | None = None, **keys: Any) -> None:
        self.cluster, self.view = cluster or Cluster(), FakeView()
        self.output = TopologyOutput("n1", "x.io", **keys)
        super().__init__(self.output, answer=self.cluster)

    def says(self, free: int = 3, seconds: float = 0.0) -> None:
        """So many CPUs are free, and time passes."""
        self.view.free_cpus = free
        self.output.set_desired(self.view.scheduler_zones_document())
        self.later(seconds)


@pytest.fixture
def new() -> Topology:
    return Topology()


@pytest.fixture
def started() -> Topology:
    """The object is there, and the second change after the first write is over."""
    made = Topology()
    made.says(seconds=RELEASE_TOUCH_DELAY_S + 1)
    made.server.requests.clear()
    return made


def test_before_the_agent_spoke_nothing_is_written_but_to_our_own_object() -> None:
    new = Topology(force=True)
    new.later(1000)  # nothing is asked
    new.output.set_desired(None)
    for there in ({}, {"zones": []}, {"zones": [], "metadata": {"managedFields": [NFD]}}):
        new.cluster.there = there
        new.output.schedule_resync()
        new.later(1000)
    assert (new.server.verbs(), new.output.pending_count()) == (["get"] * 3, 0)


def test_the_object_is_made_with_its_node_as_owner(new: Topology) -> None:
    new.output.set_desired(new.view.scheduler_zones_document())
    assert new.output.pending_count() == 1
    new.later()
    assert new.server.verbs() == ["get", "get", "patch"]
    assert (new.server.requests[-1].form, new.server.requests[-1].force) == (
        ContentType.APPLY,
        False,
    )
    assert new.cluster.metadata["name"] == "n1"
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert new.cluster.owner == owner
    assert new.output.pending_count() == 0


def test_it_is_quiet_while_nothing_but_free_memory_changes(started: Topology) -> None:
    """Which is taken over at the next look."""
    for _ in range(5):
        started.says(seconds=60)
    listed = started.view.scheduler_zones_document()
    (zone,) = listed.zones
    moved = replace(listed, zones=(replace(zone, memory_available_bytes=12345),))
    started.output.set_desired(moved)
    started.later(60)
    assert started.server.requests == []
    started.output.schedule_resync()
    started.output.set_desired(moved)
    started.later(1)
    assert "12345" in str(started.cluster.there)


def test_what_is_given_back_changes_the_object_twice(started: Topology) -> None:
    """The first change wakes pods, and the plugin looks at the object only a little later."""
    started.says(1, seconds=60)
    assert started.server.verbs() == ["patch"]
    before = started.cluster.freed
    started.says(3, seconds=RELEASE_TOUCH_DELAY_S - 1)
    assert (started.server.verbs(), started.cluster.freed) == (["patch"] * 2, before)
    started.later(2)
    assert (started.server.verbs(), started.cluster.freed) == (["patch"] * 3, before + 1)
    started.later(600)
    assert len(started.server.requests) == 3
    again = Topology(started.cluster)
    again.says()
    assert again.cluster.freed == before + 1, "the count goes on after a restart"


def test_where_no_stock_plugin_reads_it_what_is_given_back_is_one_write() -> None:
    world = Topology(touch=False)
    for free in (3, 1, 3):
        world.says(free, seconds=60)
    assert world.server.verbs() == ["get", "get", "patch", "patch", "patch"]


def test_a_write_that_failed_is_tried_again_alone(started: Topology) -> None:
    """The server could not: nothing says that the Node or the object is another one."""
    started.cluster.forced = Outcome(result=OutcomeKind.FAILED, text="500: something")
    started.says(1, seconds=MIN_BACKOFF_S - 0.1)
    assert started.server.verbs() == ["patch"]
    started.cluster.forced = None
    started.later(60)
    assert started.server.verbs() == ["patch", "patch"]


def test_one_look_at_the_node_is_for_all_outputs() -> None:
    topology = TopologyOutput("n1", "x.io")
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    handover = AgentOfflineCapacityOutput("n1", "x.io", 15.0)
    world = World(topology, node, handover, answer=Cluster())
    topology.set_desired(FakeView().scheduler_zones_document())
    node.set_desired({}, {})
    world.work()
    assert world.server.verbs() == ["get", "get", "patch"], "one Node, one NodeResourceTopology"
    assert handover.document
    world.server.requests.clear()
    world.queue.schedule_resync()
    for asked in ([False], [False, True]):
        world.later(10)
        nodes = [one for one in world.server.requests if one.resource is Resource.NODES]
        assert [one.metadata for one in nodes] == asked, "for the annotations no images"


def test_an_agent_that_is_gone_is_not_ready_and_comes_back(started: Topology) -> None:
    started.output.set_desired(None)
    started.later(1)
    assert started.cluster.agent == "not-ready"
    started.output.set_desired(None)
    started.later(1)
    started.says(seconds=1)
    assert started.cluster.agent == "ready"
    assert started.server.verbs() == ["patch", "patch"]


def test_another_owner_is_named_and_not_fought(new: Topology) -> None:
    new.cluster.there = {"metadata": {"uid": "u", "managedFields": [OURS, NFD]}, "zones": []}
    new.says(seconds=BLOCKED_RETRY_S - 1)
    assert new.server.verbs() == ["get", "get"]
    assert "its fields belong to nfd-topology-updater;" in new.output.problem
    assert new.output.pending_count() == 1
    new.cluster.there = {}  # it left
    new.later(BLOCKED_RETRY_S)
    assert (bool(new.cluster.there), new.output.problem) == (True, "")


def test_unless_that_is_asked_for() -> None:
    world = Topology(force=True)
    world.cluster.there = {"metadata": {"uid": "u", "managedFields": [NFD]}, "zones": []}
    world.says()
    assert world.server.requests[-1].force
    assert world.cluster.there["zones"]


@pytest.mark.parametrize(
    ("result", "text", "said", "pause"),
    [
        (OutcomeKind.FORBIDDEN, "", "", MAX_BACKOFF_S),
        (
            OutcomeKind.INVALID,
            "422: zones: unknown",
            "422: zones: unknown; is its defin",
            BLOCKED_RETRY_S,
        ),
        (
            OutcomeKind.UNKNOWN,
            "404: page not found",
            "not found; apply config/kubernetes/pub",
            BLOCKED_RETRY_S,
        ),
        (
            OutcomeKind.CONFLICT,
            'conflict with "kubectl-edit" using v1: .zones',
            "kubectl-edit;",
            BLOCKED_RETRY_S,
        ),
    ],
)
def test_what_stands_in_the_way_is_said_and_tried_again_slowly(
    started: Topology, result: OutcomeKind, text: str, said: str, pause: float
) -> None:
    started.cluster.forced = Outcome(result=result, text=text)
    started.says(1, seconds=pause - 1)
    assert said in started.output.problem
    assert (len(started.server.requests), started.output.pending_count()) == (1, 1)
    started.cluster.forced = None
    started.later(pause)
    assert (started.output.problem, started.output.pending_count()) == ("", 0)


def test_entries_of_the_old_version_are_taken_away_once(started: Topology) -> None:
    started.cluster.broken = True
    started.says(1, seconds=1)
    forms = [one.form for one in started.server.requests]
    assert forms == [ContentType.APPLY, ContentType.JSON, ContentType.APPLY]
    assert started.server.requests[1].body[0]["path"] == "/metadata/managedFields"
    assert started.output.pending_count() == 0


def test_where_that_does_not_help_it_is_not_tried_without_end(started: Topology) -> None:
    def answer(request: APIRequest) -> Outcome:
        started.cluster.broken = True
        return started.cluster(request)

    started.server.answer = answer
    started.says(1, seconds=120)
    assert len([one for one in started.server.requests if one.form is ContentType.JSON]) == 1
    assert len(started.server.requests) < 25


def test_a_node_that_is_another_one_now_owns_it(started: Topology) -> None:
    """The garbage collector takes the object of the former one; the next one must not be its."""
    started.cluster.node_uid, started.cluster.there = "node-2", {}
    started.says(1, seconds=1)
    assert started.cluster.owner["uid"] == "node-2"


def test_without_a_node_there_is_no_object(new: Topology) -> None:
    new.cluster.node_uid = None
    new.says(seconds=120)
    assert not new.cluster.there
    assert 2 < len(new.server.requests) < 20
    new.cluster.node_uid = "node-1"
    new.later(180)
    assert new.cluster.there


def test_a_look_puts_back_what_somebody_removed(started: Topology) -> None:
    started.cluster.there = {}
    started.output.schedule_resync()
    started.later(1)
    assert started.cluster.there


def test_who_owns_something_else_is_no_owner() -> None:
    labels = {"manager": "kubectl-label", "fieldsV1": {"f:metadata": {}}}
    attributes = {"manager": "koordlet", "fieldsV1": {"f:attributes": {}}}
    assert other_field_managers([OURS, labels, {"manager": "x"}]) == []
    assert other_field_managers([OURS, NFD, NFD, attributes]) == [
        "koordlet",
        "nfd-topology-updater",
    ]


def test_where_it_has_a_validity_each_look_renews_it() -> None:
    """Readers tell by that whether its publisher is alive."""
    world, before = Topology(validity=900), ""
    for wall in (1_795_000_000.0, 1_795_000_300.0):
        world.output.renew_validity(wall)
        world.output.schedule_resync()
        world.says(seconds=RELEASE_TOUCH_DELAY_S + 1)
        said = world.cluster.metadata["annotations"]
        assert said["x.io/valid-seconds"] == "900"
        assert said["x.io/renewed"] > before
        before = said["x.io/renewed"]


def test_without_a_validity_nothing_is_written_for_it(started: Topology) -> None:
    started.output.renew_validity(1_795_000_000.0)
    assert started.output.pending_count() == 0
    assert set(started.cluster.metadata["annotations"]) == {"x.io/freed"}
