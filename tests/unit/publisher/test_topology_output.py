"""When the object is written, and what becomes of it when others have a hand in it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from msgspec.structs import replace

from nri_numa.kube.requests import Form, Outcome, Request, Resource, Result, Verb
from nri_numa.publisher.outbox import LONGEST_PAUSE, SLOWLY
from nri_numa.publisher.outputs import HandoverOutput, NodeOutput
from nri_numa.publisher.topology import PRUNE, TOUCH, TopologyOutput, owners
from tests.beds.http_view import FakeView
from tests.unit.publisher.test_outputs import World

OURS = {"manager": "nri-numa-publish", "operation": "Apply", "fieldsV1": {"f:zones": {}}}
NFD = {"manager": "nfd-topology-updater", "operation": "Update", "fieldsV1": {"f:zones": {}}}


class Cluster:
    """One Node and its object behind the requests.

    Attributes:
        there: the object; None where there is none.
    """

    def __init__(self) -> None:
        self.node_uid: str | None = "node-1"
        self.there: dict[str, Any] | None = None
        self.broken = False
        self.forced: Outcome | None = None
        self.made = 0

    def __call__(self, request: Request) -> Outcome:
        if request.resource is Resource.NODES:
            if self.node_uid is None:
                return Outcome(result=Result.MISSING)
            return Outcome(result=Result.DONE, documents=({"metadata": {"uid": self.node_uid}},))
        if self.forced is not None:
            return self.forced
        if request.verb is Verb.GET:
            if self.there is None:
                return Outcome(result=Result.MISSING)
        elif request.form is Form.JSON:
            assert self.there is not None
            self.broken = False
            self.there["metadata"]["managedFields"] = []
        elif self.broken:
            return Outcome(result=Result.FAILED, text=f"500: {PRUNE} of us")
        else:
            self._apply(request)
        return Outcome(result=Result.DONE, documents=(deepcopy(self.there or {}),))

    def _apply(self, request: Request) -> None:
        uid = self.there["metadata"]["uid"] if self.there is not None else ""
        if not uid:
            self.made += 1
            uid = f"object-{self.made}"
        self.there = deepcopy(request.body)
        self.there["metadata"] |= {"uid": uid, "managedFields": [OURS]}

    @property
    def freed(self) -> str:
        assert self.there is not None
        return str(self.there["metadata"]["annotations"]["x.io/freed"])

    @property
    def agent(self) -> str:
        assert self.there is not None
        return str({a["name"]: a["value"] for a in self.there["attributes"]}["x.io/agent"])


def world_of(*, force: bool = False) -> tuple[World, TopologyOutput, Cluster, FakeView]:
    output = TopologyOutput("n1", "x.io", force=force)
    cluster = Cluster()
    return World(output, answer=cluster), output, cluster, FakeView()


def started() -> tuple[World, TopologyOutput, Cluster, FakeView]:
    """The object is there, and the second change after the first write is over."""
    world, output, cluster, view = world_of()
    output.want(view.zones())
    world.work(TOUCH + 1)
    world.server.requests.clear()
    return world, output, cluster, view


def test_nothing_is_asked_before_the_agent_spoke() -> None:
    world, output, _, _ = world_of()
    output.want(None)
    world.work(1000)
    assert (world.server.requests, output.waiting()) == ([], 0)


def test_the_object_is_made_with_its_node_as_owner() -> None:
    world, output, cluster, view = world_of()
    output.want(view.zones())
    assert output.waiting() == 1
    world.work()
    assert world.server.verbs() == ["get", "get", "patch"]
    assert world.server.requests[-1].form is Form.APPLY
    assert not world.server.requests[-1].force
    assert cluster.there is not None
    metadata = cluster.there["metadata"]
    assert metadata["name"] == "n1"
    assert metadata["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    ]
    assert output.waiting() == 0


def test_it_is_quiet_while_nothing_changes() -> None:
    world, output, _, view = started()
    for _ in range(5):
        output.want(view.zones())
        world.work(world.now + 60)
    assert world.server.requests == []


def test_free_memory_alone_is_no_change_before_the_next_look() -> None:
    world, output, cluster, view = started()
    listed = view.zones()
    (zone,) = listed.zones
    moved = replace(listed, zones=(replace(zone, memory_available_bytes=12345),))
    output.want(moved)
    world.work(world.now + 60)
    assert world.server.requests == []
    output.resync()
    output.want(moved)
    world.work(world.now + 1)
    assert "12345" in str(cluster.there)


def test_what_is_given_back_changes_the_object_twice() -> None:
    """The first change wakes pods, and the plugin looks at the object only a little later."""
    world, output, cluster, view = started()
    view.free_cpus = 1
    output.want(view.zones())
    world.work(world.now + 60)
    assert world.server.verbs() == ["patch"]
    before = cluster.freed
    view.free_cpus = 3
    output.want(view.zones())
    world.work(world.now + TOUCH - 1)
    assert (world.server.verbs(), cluster.freed) == (["patch"] * 2, before)
    world.work(world.now + 2)
    assert world.server.verbs() == ["patch"] * 3
    assert int(cluster.freed) == int(before) + 1
    world.work(world.now + 600)
    assert len(world.server.requests) == 3


def test_where_no_stock_plugin_reads_it_what_is_given_back_is_one_write() -> None:
    world, _, cluster, view = world_of()
    output = TopologyOutput("n1", "x.io", touch=False)
    world = World(output, answer=cluster)
    for free in (3, 1, 3):
        view.free_cpus = free
        output.want(view.zones())
        world.work(world.now + 60)
    assert world.server.verbs() == ["get", "get", "patch", "patch", "patch"]


def test_a_write_that_failed_is_tried_again_alone() -> None:
    """The server could not: nothing says that the Node or the object is another one."""
    world, output, cluster, view = started()
    view.free_cpus = 1
    output.want(view.zones())
    cluster.forced = Outcome(result=Result.FAILED, text="500: something")
    world.work(world.now)
    cluster.forced = None
    world.work(world.now + 60)
    assert world.server.verbs() == ["patch", "patch"]


def test_one_look_at_the_node_is_for_all_outputs() -> None:
    _, _, cluster, view = world_of()
    topology, node = (
        TopologyOutput("n1", "x.io"),
        NodeOutput("n1", "x.io", annotations=True, labels=True),
    )
    handover = HandoverOutput("n1", "x.io", 15.0)
    world = World(topology, node, handover, answer=cluster)
    topology.want(view.zones())
    node.want({}, {})
    world.work()
    assert world.server.verbs() == ["get", "get", "patch"], "one Node, one NodeResourceTopology"
    assert handover.document
    world.server.requests.clear()
    world.queue.resync()
    world.work(world.now + 10)
    nodes = [one for one in world.server.requests if one.resource is Resource.NODES]
    assert [one.metadata for one in nodes] == [False]
    world.work(world.now + 10)
    nodes = [one for one in world.server.requests if one.resource is Resource.NODES]
    assert [one.metadata for one in nodes] == [False, True], "for the annotations no images"


def test_the_count_goes_on_after_a_restart() -> None:
    _, _, cluster, view = started()
    before = int(cluster.freed)
    assert before > 0
    output = TopologyOutput("n1", "x.io")
    world = World(output, answer=cluster)
    output.want(view.zones())
    world.work()
    assert int(cluster.freed) == before


def test_an_agent_that_is_gone_is_not_ready_and_comes_back() -> None:
    world, output, cluster, view = started()
    output.want(None)
    world.work(world.now + 1)
    assert cluster.agent == "not-ready"
    output.want(None)
    world.work(world.now + 1)
    output.want(view.zones())
    world.work(world.now + 1)
    assert cluster.agent == "ready"
    assert world.server.verbs() == ["patch", "patch"]


def test_another_owner_is_named_and_not_fought() -> None:
    world, output, cluster, view = world_of()
    cluster.there = {"metadata": {"uid": "u", "managedFields": [OURS, NFD]}, "zones": []}
    output.want(view.zones())
    world.work(SLOWLY - 1)
    assert Verb.PATCH not in {one.verb for one in world.server.requests}
    assert "its fields belong to nfd-topology-updater;" in output.problem
    assert output.waiting() == 1
    assert len(world.server.requests) == 2
    # It left.
    cluster.there = None
    world.work(2 * SLOWLY)
    assert cluster.there is not None
    assert output.problem == ""


def test_unless_that_is_asked_for() -> None:
    world, output, cluster, view = world_of(force=True)
    cluster.there = {"metadata": {"uid": "u", "managedFields": [NFD]}, "zones": []}
    output.want(view.zones())
    world.work()
    assert world.server.requests[-1].force
    assert cluster.there["zones"]


def test_a_conflict_names_who_was_quicker() -> None:
    world, output, cluster, view = started()
    cluster.forced = Outcome(
        result=Result.CONFLICT,
        text='409: Apply failed with 1 conflict: conflict with "kubectl-edit" using v1: .zones',
    )
    view.free_cpus = 1
    output.want(view.zones())
    world.work(world.now + SLOWLY - 1)
    assert "belong to kubectl-edit;" in output.problem
    assert len(world.server.requests) == 1


def test_a_missing_definition_is_looked_for_slowly() -> None:
    world, output, cluster, view = world_of()
    cluster.forced = Outcome(result=Result.UNKNOWN, text="404: page not found")
    output.want(view.zones())
    world.work(3 * SLOWLY)
    assert "publish-topology/crd.yaml" in output.problem
    assert len(world.server.requests) <= 5
    cluster.forced = None
    world.work(5 * SLOWLY)
    assert (output.problem, output.waiting()) == ("", 0)


def test_entries_of_the_old_version_are_taken_away_once() -> None:
    world, output, cluster, view = started()
    cluster.broken = True
    view.free_cpus = 1
    output.want(view.zones())
    world.work(world.now + 1)
    forms = [one.form for one in world.server.requests]
    assert forms == [Form.APPLY, Form.JSON, Form.APPLY]
    assert world.server.requests[1].body[0]["path"] == "/metadata/managedFields"
    assert output.waiting() == 0


def test_where_that_does_not_help_it_is_not_tried_without_end() -> None:
    world, output, cluster, view = started()
    view.free_cpus = 1
    output.want(view.zones())

    def answer(request: Request) -> Outcome:
        cluster.broken = True
        return cluster(request)

    world.server.answer = answer
    world.work(world.now + 120)
    assert len([one for one in world.server.requests if one.form is Form.JSON]) == 1
    assert len(world.server.requests) < 25


def test_a_node_that_is_another_one_now_owns_it() -> None:
    """The garbage collector takes the object of the former one; the next one must not be its."""
    world, output, cluster, view = started()
    cluster.node_uid, cluster.there = "node-2", None
    view.free_cpus = 1
    output.want(view.zones())
    world.work(world.now + 1)
    there: Any = cluster.there
    assert there["metadata"]["ownerReferences"][0]["uid"] == "node-2"


def test_without_a_node_there_is_no_object() -> None:
    world, output, cluster, view = world_of()
    cluster.node_uid = None
    output.want(view.zones())
    world.work(120)
    assert cluster.there is None
    assert 2 < len(world.server.requests) < 20
    cluster.node_uid = "node-1"
    world.work(300)
    assert cluster.there is not None


def test_a_look_puts_back_what_somebody_removed() -> None:
    world, output, cluster, _ = started()
    cluster.there = None
    output.resync()
    world.work(world.now + 1)
    assert cluster.there is not None


def test_rights_and_rules() -> None:
    world, output, cluster, view = world_of()
    cluster.forced = Outcome(result=Result.FORBIDDEN)
    output.want(view.zones())
    world.work(LONGEST_PAUSE - 1)
    assert len(world.server.requests) == 2
    cluster.forced = Outcome(result=Result.INVALID, text="422: zones: unknown")
    world.work(LONGEST_PAUSE + SLOWLY / 2)
    assert "422" in output.problem
    assert len(world.server.requests) == 3
    cluster.forced = Outcome(result=Result.FAILED, text="500: something")
    world.work(LONGEST_PAUSE + 2 * SLOWLY)
    cluster.forced = None
    world.work(LONGEST_PAUSE + 3 * SLOWLY)
    assert (cluster.there is not None, output.problem) == (True, "")


def test_who_owns_something_else_is_no_owner() -> None:
    labels = {"manager": "kubectl-label", "fieldsV1": {"f:metadata": {}}}
    attributes = {"manager": "koordlet", "fieldsV1": {"f:attributes": {}}}
    assert owners([OURS, labels, {"manager": "x"}]) == []
    assert owners([OURS, NFD, NFD, attributes]) == ["koordlet", "nfd-topology-updater"]


def test_where_it_has_a_validity_each_look_renews_it() -> None:
    """Readers tell by that whether its publisher is alive."""
    output = TopologyOutput("n1", "x.io", validity=900)
    cluster = Cluster()
    world = World(output, answer=cluster)
    output.renew(1_795_000_000.0)
    output.want(FakeView().zones())
    world.work(TOUCH + 1)
    assert cluster.there is not None
    first = cluster.there["metadata"]["annotations"]
    assert first["x.io/valid-seconds"] == "900"
    output.renew(1_795_000_300.0)
    output.resync()
    world.work(world.now + 10)
    assert cluster.there["metadata"]["annotations"]["x.io/renewed"] > first["x.io/renewed"]


def test_without_a_validity_nothing_is_written_for_it() -> None:
    _, output, cluster, _ = started()
    output.renew(1_795_000_000.0)
    assert output.waiting() == 0
    assert cluster.there is not None
    assert set(cluster.there["metadata"]["annotations"]) == {"x.io/freed"}
