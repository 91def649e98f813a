"""When the object is written, and what becomes of it when others have a hand in it."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.config.sections import Publish
from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource
from nri_numa.publisher.outbox import BLOCKED_RETRY_S, MAX_BACKOFF_S, MIN_BACKOFF_S
from nri_numa.publisher.outputs import AgentOfflineCapacityOutput, NodeMetadataOutput
from nri_numa.publisher.topology import RELEASE_TOUCH_DELAY_S, TopologyOutput, other_field_managers
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.http_view import FakeView
from tests.beds.publisher_bed import NFD, OURS, ObjectBed, OutputBed


class TopologyBed(ObjectBed):
    """The output with an agent that is asked for its zones."""

    def __init__(self, cluster: ClusterObjects | None = None, **keys: Any) -> None:
        self.view = FakeView()
        config = Publish(**{f"node_resource_topology_{key}": value for key, value in keys.items()})
        super().__init__(TopologyOutput("n1", "x.io", config), Resource.TOPOLOGIES, cluster=cluster)

    def says(self, free: int = 3, seconds: float = 0.0) -> None:
        """So many CPUs are free, and time passes."""
        self.view.free_cpus = free
        self.output.set_desired(self.view.scheduler_zones_document())
        self.later(seconds)

    @property
    def freed(self) -> int:
        return int(self.metadata["annotations"]["x.io/release-counter"])

    @property
    def agent(self) -> str:
        return str({a["name"]: a["value"] for a in self.object["attributes"]}["x.io/agent-state"])


@pytest.fixture
def new() -> TopologyBed:
    return TopologyBed()


@pytest.fixture
def started() -> TopologyBed:
    """The object is there, and the second change after the first write is over."""
    made = TopologyBed()
    made.says(seconds=RELEASE_TOUCH_DELAY_S + 1)
    made.requests.clear()
    return made


def test_before_the_agent_spoke_nothing_is_written_but_to_our_own_object() -> None:
    new = TopologyBed(force=True)
    new.later(1000)  # nothing is asked
    new.output.set_desired(None)
    for there in ({}, {"zones": []}, {"zones": [], "metadata": {"managedFields": [NFD]}}):
        new.put_object(**there)
        new.output.schedule_resync()
        new.later(1000)
    assert (new.verbs(), new.output.pending_count()) == (["get"] * 3, 0)


def test_the_object_is_made_with_its_node_as_owner(new: TopologyBed) -> None:
    new.output.set_desired(new.view.scheduler_zones_document())
    assert new.output.pending_count() == 1
    new.later()
    assert new.verbs() == ["get", "get", "patch"]
    assert (new.requests[-1].form, new.requests[-1].force) == (ContentType.APPLY, False)
    assert new.metadata["name"] == "n1"
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert new.owner == owner
    assert new.output.pending_count() == 0


def test_it_is_quiet_while_nothing_but_free_memory_changes(started: TopologyBed) -> None:
    """Which is taken over at the next look."""
    for _ in range(5):
        started.says(seconds=60)
    listed = started.view.scheduler_zones_document()
    (zone,) = listed.zones
    moved = replace(listed, zones=(replace(zone, memory_available_bytes=12345),))
    started.output.set_desired(moved)
    started.later(60)
    assert started.requests == []
    started.output.schedule_resync()
    started.output.set_desired(moved)
    started.later(1)
    assert "12345" in str(started.object)


def test_what_is_given_back_changes_the_object_twice(started: TopologyBed) -> None:
    """The first change wakes pods, and the plugin looks at the object only a little later."""
    started.says(1, seconds=60)
    assert started.verbs() == ["patch"]
    before = started.freed
    started.says(3, seconds=RELEASE_TOUCH_DELAY_S - 1)
    assert (started.verbs(), started.freed) == (["patch"] * 2, before)
    started.later(2)
    assert (started.verbs(), started.freed) == (["patch"] * 3, before + 1)
    started.later(600)
    assert len(started.requests) == 3
    again = TopologyBed(started.cluster)
    again.says()
    assert again.freed == before + 1, "the count goes on after a restart"


def test_where_no_stock_plugin_reads_it_what_is_given_back_is_one_write() -> None:
    bed = TopologyBed(touch_on_release=False)
    for free in (3, 1, 3):
        bed.says(free, seconds=60)
    assert bed.verbs() == ["get", "get", "patch", "patch", "patch"]


def test_a_write_that_failed_is_tried_again_alone(started: TopologyBed) -> None:
    """The server could not: nothing says that the Node or the object is another one."""
    started.forced = Outcome(result=OutcomeKind.FAILED, text="500: something")
    started.says(1, seconds=MIN_BACKOFF_S - 0.1)
    assert started.verbs() == ["patch"]
    started.forced = None
    started.later(60)
    assert started.verbs() == ["patch", "patch"]


def test_one_look_at_the_node_is_for_all_outputs() -> None:
    topology = TopologyOutput("n1", "x.io", Publish())
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    handover = AgentOfflineCapacityOutput("n1", "x.io", 15.0)
    bed = OutputBed(topology, node, handover)
    bed.put_node(uid="node-1")
    topology.set_desired(FakeView().scheduler_zones_document())
    node.set_desired({}, {})
    bed.work()
    assert bed.verbs() == ["get", "get", "patch"], "one Node, one NodeResourceTopology"
    assert handover.document
    bed.requests.clear()
    bed.queue.schedule_resync()
    for asked in ([False], [False, True]):
        bed.later(10)
        nodes = [one for one in bed.requests if one.resource is Resource.NODES]
        assert [one.metadata for one in nodes] == asked, "for the annotations no images"


def test_an_agent_that_is_gone_is_not_ready_and_comes_back(started: TopologyBed) -> None:
    started.output.set_desired(None)
    started.later(1)
    assert started.agent == "not-ready"
    started.output.set_desired(None)
    started.later(1)
    started.says(seconds=1)
    assert started.agent == "ready"
    assert started.verbs() == ["patch", "patch"]


def test_another_owner_is_named_and_not_fought(new: TopologyBed) -> None:
    new.put_object(metadata={"uid": "u", "managedFields": [OURS, NFD]}, zones=[])
    new.says(seconds=BLOCKED_RETRY_S - 1)
    assert new.verbs() == ["get", "get"]
    assert "its fields belong to nfd-topology-updater;" in new.output.problem
    assert new.output.pending_count() == 1
    new.put_object()  # it left
    new.later(BLOCKED_RETRY_S)
    assert (bool(new.object), new.output.problem) == (True, "")


def test_unless_that_is_asked_for() -> None:
    bed = TopologyBed(force=True)
    bed.put_object(metadata={"uid": "u", "managedFields": [NFD]}, zones=[])
    bed.says()
    assert bed.requests[-1].force
    assert bed.object["zones"]


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
    started: TopologyBed, result: OutcomeKind, text: str, said: str, pause: float
) -> None:
    started.forced = Outcome(result=result, text=text)
    started.says(1, seconds=pause - 1)
    assert said in started.output.problem
    assert (len(started.requests), started.output.pending_count()) == (1, 1)
    started.forced = None
    started.later(pause)
    assert (started.output.problem, started.output.pending_count()) == ("", 0)


def test_entries_of_the_old_version_are_taken_away_once(started: TopologyBed) -> None:
    started.broken = True
    started.says(1, seconds=1)
    forms = [one.form for one in started.requests]
    assert forms == [ContentType.APPLY, ContentType.JSON, ContentType.APPLY]
    assert started.requests[1].body[0]["path"] == "/metadata/managedFields"
    assert started.output.pending_count() == 0


def test_where_that_does_not_help_it_is_not_tried_without_end(started: TopologyBed) -> None:
    def answer(request: APIRequest) -> Outcome | None:
        started.broken = True
        return started.forced_answer(request)

    started.answer = answer
    started.says(1, seconds=120)
    assert len([one for one in started.requests if one.form is ContentType.JSON]) == 1
    assert len(started.requests) < 25


def test_a_node_that_is_another_one_now_owns_it(started: TopologyBed) -> None:
    """The garbage collector takes the object of the former one; the next one must not be its."""
    started.put_node(uid="node-2")
    started.put_object()
    started.says(1, seconds=1)
    assert started.owner["uid"] == "node-2"


def test_without_a_node_there_is_no_object(new: TopologyBed) -> None:
    new.cluster.remove(Resource.NODES, "n1")
    new.says(seconds=120)
    assert not new.object
    assert 2 < len(new.requests) < 20
    new.put_node(uid="node-1")
    new.later(180)
    assert new.object


def test_a_look_puts_back_what_somebody_removed(started: TopologyBed) -> None:
    started.put_object()
    started.output.schedule_resync()
    started.later(1)
    assert started.object


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
    bed, before = TopologyBed(validity=900), ""
    for wall in (1_795_000_000.0, 1_795_000_300.0):
        bed.output.renew_validity(wall)
        bed.output.schedule_resync()
        bed.says(seconds=RELEASE_TOUCH_DELAY_S + 1)
        said = bed.metadata["annotations"]
        assert said["x.io/validity-seconds"] == "900"
        assert said["x.io/renewed-at"] > before
        before = said["x.io/renewed-at"]


def test_without_a_validity_nothing_is_written_for_it(started: TopologyBed) -> None:
    started.output.renew_validity(1_795_000_000.0)
    assert started.output.pending_count() == 0
    assert set(started.metadata["annotations"]) == {"x.io/release-counter"}
