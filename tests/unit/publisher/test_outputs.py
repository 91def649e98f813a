"""What is done about what is not as it should be, and what each outcome leads to."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb
from nri_numa.observe.notices import Notice
from nri_numa.publisher.outbox import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    Output,
    OutputQueue,
    TokenBucket,
    VersionedQueue,
)
from nri_numa.publisher.outputs import (
    API_SERVER_EVENT_TTL_S,
    EVENT_BURST_PER_POD,
    AgentOfflineCapacityOutput,
    EventOutput,
    NodeCapacityOutput,
    NodeMetadataOutput,
    PodAnnotationOutput,
)
from nri_numa.web.responses import Assignment
from tests.beds.http_view import assignment
from tests.unit.publisher.test_desired_objects import NOTICE

NOW = 1_700_000_010.0
"""Unix time at which the notices are read."""


def outcome(result: OutcomeKind, *documents: dict[str, Any], retry_after: float = 0.0) -> Outcome:
    return Outcome(result=result, documents=documents, retry_after=retry_after)


@dataclass
class Server:
    """An API server as far as outputs see it."""

    objects: dict[tuple[Resource, str], dict[str, Any]] = field(default_factory=dict)
    answer: Callable[[APIRequest], Outcome | None] = lambda request: None
    requests: list[APIRequest] = field(default_factory=list)

    def __call__(self, request: APIRequest) -> Outcome:
        self.requests.append(request)
        if (forced := self.answer(request)) is not None:
            return forced
        key = request.resource, f"{request.namespace}/{request.name}"
        if request.verb is Verb.LIST:
            found = [one for (kind, _), one in self.objects.items() if kind is request.resource]
            return outcome(OutcomeKind.SUCCEEDED, *deepcopy(found))
        if request.verb is Verb.CREATE:
            if key in self.objects:
                return outcome(OutcomeKind.EXISTS)
            self.objects[key] = deepcopy(request.body)
            return outcome(OutcomeKind.SUCCEEDED, request.body)
        if key not in self.objects:
            return outcome(OutcomeKind.MISSING)
        there = self.objects[key]
        if request.verb is Verb.PATCH:
            for part, values in request.body.get("metadata", {}).items():
                if isinstance(values, dict):
                    merged = {**there["metadata"].get(part, {}), **values}
                    kept = {k: v for k, v in merged.items() if v is not None}
                    there["metadata"][part] = kept
            there.update({k: v for k, v in request.body.items() if k != "metadata"})
        return outcome(OutcomeKind.SUCCEEDED, {"metadata": deepcopy(there["metadata"])})

    def verbs(self) -> list[str]:
        return [request.verb.value for request in self.requests]


class World:
    """Outputs in front of a server, and a clock."""

    def __init__(
        self,
        *outputs: Output,
        answer: Callable[[APIRequest], Outcome | None] = lambda request: None,
        rate: float = 1000.0,
        burst: float = 1000.0,
    ) -> None:
        self.now = 0.0
        self.server = Server(answer=answer)
        self.queue = OutputQueue(outputs, rate=rate, burst=burst, now=0.0)

    def work(self, until: float = 0.0) -> None:
        """Everything that may be done up to a moment."""
        for _ in range(10_000):
            request = self.queue.next_request(self.now)
            if request is not None:
                self.queue.on_outcome(request, self.server(request), self.now, 1.0)
                continue
            wait = self.queue.seconds_until_request(self.now)
            if self.now + wait > until:
                break
            self.now += max(wait, 0.001)
        else:
            raise AssertionError("it never ends")
        self.now = max(self.now, until)

    def later(self, seconds: float = 0.0) -> None:
        """Everything that may be done in the next seconds."""
        self.work(self.now + seconds)

    @property
    def event(self) -> dict[str, Any]:
        (found,) = (o for (kind, _), o in self.server.objects.items() if kind is Resource.EVENTS)
        return found


# --- the Node ---------------------------------------------------------------------------------


@pytest.fixture
def node() -> NodeMetadataOutput:
    made = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    made.set_desired({"x.io/numacpu": "0|1"}, {"x.io/sockets": "1"})
    return made


def there(world: World, **metadata: Any) -> dict[str, Any]:
    world.server.objects[Resource.NODES, "/n1"] = {"metadata": {"name": "n1", **metadata}}
    return world.server.objects[Resource.NODES, "/n1"]["metadata"]


def test_the_node_gets_what_is_missing_and_keeps_what_is_not_ours(node: NodeMetadataOutput) -> None:
    world = World(node)
    metadata = there(world, labels={"zone": "a", "x.io/sockets": "1"})
    world.work()
    assert metadata["annotations"] == {"x.io/numacpu": "0|1"}
    assert metadata["labels"] == {"zone": "a", "x.io/sockets": "1"}
    assert world.server.requests[1].body == {"metadata": {"annotations": {"x.io/numacpu": "0|1"}}}


def test_a_node_that_is_right_is_not_written(node: NodeMetadataOutput) -> None:
    world = World(node)
    there(world, annotations={"x.io/numacpu": "0|1"}, labels={"x.io/sockets": "1"})
    world.work()
    world.queue.schedule_resync()
    world.work()
    assert world.server.verbs() == ["get", "get"]


def test_what_is_switched_off_is_taken_away() -> None:
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=False)
    node.set_desired({"x.io/numacpu": "0|1"}, {"x.io/sockets": "1"})
    world = World(node)
    metadata = there(world, labels={"x.io/sockets": "1", "zone": "a"})
    world.work()
    assert metadata["labels"] == {"zone": "a"}


def test_what_somebody_removed_is_put_back_at_the_next_look(node: NodeMetadataOutput) -> None:
    world = World(node)
    metadata = there(world)
    world.work()
    metadata["annotations"].clear()
    world.work()
    assert metadata["annotations"] == {}
    world.queue.schedule_resync()
    world.work()
    assert metadata["annotations"] == {"x.io/numacpu": "0|1"}


def test_a_node_that_is_deleted_and_made_again_is_written_again(node: NodeMetadataOutput) -> None:
    world = World(node)
    there(world)
    world.work()
    del world.server.objects[Resource.NODES, "/n1"]
    world.queue.schedule_resync()
    world.work(until=300.0)
    assert 5 < len(world.server.requests) < 20  # looked for, with growing pauses
    metadata = there(world)
    world.work(until=400.0)
    assert metadata["labels"] == {"x.io/sockets": "1"}
    del world.server.objects[Resource.NODES, "/n1"]
    world.queue.schedule_resync()
    world.server.requests.clear()
    world.later(MIN_BACKOFF_S + 0.1)
    assert world.server.verbs() == ["get", "get"], "the pauses begin anew"


def test_whoever_takes_a_label_away_at_once_is_not_fought_without_pause(
    node: NodeMetadataOutput,
) -> None:
    world = World(node)
    there(world)
    world.server.answer = lambda request: outcome(OutcomeKind.SUCCEEDED, {"metadata": {}})
    world.work(until=600.0)
    assert len(world.server.requests) < 30


def test_exclusive_cpus_are_written_when_they_change_and_put_back_at_the_next_look() -> None:
    """Before the agent has counted nothing is asked; the kubelet sets 0 when it registers."""
    capacity, output = {"cpu": "4"}, NodeCapacityOutput("n1", "x.io/cpu")

    def answer(request: APIRequest) -> Outcome:
        if request.verb is Verb.PATCH:
            assert request.resource is Resource.NODE_STATUS
            capacity.update(request.body["status"]["capacity"])
        return outcome(
            OutcomeKind.SUCCEEDED, {"metadata": {}, "status": {"capacity": dict(capacity)}}
        )

    world = World(output, answer=answer)
    world.later(100)
    assert (world.server.requests, output.pending_count()) == ([], 0)
    for count in (3, 3, 2):
        output.set_desired(count)
        world.later()
        assert capacity == {"cpu": "4", "x.io/cpu": str(count)}
    assert world.server.verbs() == ["get", "patch", "patch"]
    capacity["x.io/cpu"] = "0"
    for _ in range(2):
        output.schedule_resync()
        world.later()
        assert capacity["x.io/cpu"] == "2"
    assert world.server.verbs()[3:] == ["get", "patch", "get"]
    assert output.pending_count() == 0


# --- what the Node says of its capacity, on its way to the agent ------------------------------


def handover(**annotations: str) -> tuple[AgentOfflineCapacityOutput, World, dict[str, str]]:
    """With the Node's annotations, which were read once."""
    output = AgentOfflineCapacityOutput("n1", "x.io", 15.0)
    world = World(output)
    said = there(world, annotations={f"x.io/{key}": text for key, text in annotations.items()})
    assert output.document == ""
    world.work()
    return output, world, said["annotations"]


def test_both_texts_are_handed_on_as_they_are_and_looked_for_again() -> None:
    output, world, said = handover(drained="0-1", numacpu="0", **{"offline-capacity": "anything"})
    assert json.loads(output.document) == {"offline-capacity": "anything", "drained": "0-1"}
    said.clear()
    world.later(16)
    assert len(world.server.requests) == 1
    world.later(1)
    assert json.loads(output.document) == {"offline-capacity": "", "drained": ""}
    assert output.pending_count() == 0


def test_a_node_that_cannot_be_seen_says_what_it_said() -> None:
    output, world, _ = handover(drained="0")
    before, results = output.document, [OutcomeKind.MISSING, OutcomeKind.FORBIDDEN]
    world.server.answer = lambda request: outcome(results.pop(0)) if results else None
    world.later(17 + MAX_BACKOFF_S)
    assert (len(world.server.requests), output.document) == (3, before)
    world.later(1)
    assert len(world.server.requests) == 4


def test_what_the_agent_would_refuse_for_its_length_stays_here() -> None:
    output, world, said = handover(drained="0")
    before = output.document
    for text, problem in (("0," * 40_000, "expected 65536 at most"), ("0", "")):
        said["x.io/drained"] = text
        world.later(17)
        assert output.document == before
        assert problem in output.problem
    assert output.problem == ""


# --- pods -------------------------------------------------------------------------------------


def pods(*assignments: Assignment) -> tuple[PodAnnotationOutput, World]:
    output = PodAnnotationOutput("n1", "x.io")
    output.set_desired(assignments)
    world = World(output)
    for one in assignments:
        world.server.objects[Resource.PODS, f"{one.namespace}/{one.pod}"] = {
            "metadata": {"namespace": one.namespace, "name": one.pod, "annotations": {"a": "b"}}
        }
    return output, world


def test_pods_are_annotated_once_and_again_when_it_is_removed() -> None:
    output, world = pods(assignment(1), assignment(2))
    world.work()
    metadata = world.server.objects[Resource.PODS, "shop/pod-1"]["metadata"]
    assert metadata["annotations"].keys() == {"a", "x.io/assigned"}
    assert world.server.verbs() == ["patch", "patch"]
    output.set_desired([assignment(1), assignment(2)])
    world.work()
    del metadata["annotations"]["x.io/assigned"]
    world.queue.schedule_resync()
    world.work()
    assert world.server.verbs() == ["patch", "patch", "list", "patch"]
    assert "x.io/assigned" in metadata["annotations"]


def test_a_namesake_is_left_alone_and_a_static_pod_is_known_by_its_name() -> None:
    _, world = pods(
        replace(assignment(1), pod_uid="0a-0b"), replace(assignment(2), pod_uid="c0ffee")
    )
    world.server.answer = lambda request: (
        outcome(OutcomeKind.CONFLICT) if "uid" in request.body["metadata"] else None
    )
    world.work(until=600.0)
    assert [request.body["metadata"].get("uid") for request in world.server.requests] == [
        "0a-0b",
        None,
    ]


@pytest.mark.parametrize("result", [OutcomeKind.MISSING, OutcomeKind.INVALID, OutcomeKind.CONFLICT])
def test_what_cannot_be_done_is_not_tried_for_ever(result: OutcomeKind) -> None:
    output, world = pods(assignment(1))
    world.server.answer = lambda request: outcome(result)
    world.work(until=600.0)
    assert len(world.server.requests) == 1
    assert output.dropped == (result is OutcomeKind.INVALID)


def test_pods_that_are_gone_are_forgotten_and_places_are_bounded() -> None:
    output, world = pods(assignment(1))
    output.set_desired([assignment(n) for n in range(2000)])
    assert output.dropped == 2000 - 1024
    output.set_desired([])
    world.work()
    world.queue.schedule_resync()
    world.work()
    assert world.server.requests == []


def test_a_list_that_fails_is_asked_for_again() -> None:
    _, world = pods(assignment(1))
    world.work()
    world.queue.schedule_resync()
    results = iter([OutcomeKind.FAILED, OutcomeKind.FORBIDDEN])
    world.server.answer = lambda request: (
        outcome(result) if (result := next(results, None)) is not None else None
    )
    world.work(until=100.0)
    assert world.server.verbs() == ["patch", "list", "list", "list"]


NOT_THIS_ONE = pytest.mark.parametrize(
    ("result", "until"), [(OutcomeKind.FAILED, 0.0), (OutcomeKind.FORBIDDEN, MAX_BACKOFF_S)]
)
"""A policy of one namespace may forbid what is a right elsewhere."""


@NOT_THIS_ONE
def test_one_pod_that_fails_does_not_hold_up_the_others(result: OutcomeKind, until: float) -> None:
    _, world = pods(assignment(1), assignment(2))
    world.server.answer = lambda request: (
        outcome(result) if request.name == "pod-1" and world.now < until + 10 else None
    )
    world.work(until=until)
    assert "x.io/assigned" in str(world.server.objects[Resource.PODS, "infra/pod-2"])
    world.work(until=until + 2 * MAX_BACKOFF_S)
    assert "x.io/assigned" in str(world.server.objects[Resource.PODS, "shop/pod-1"])


# --- Events -----------------------------------------------------------------------------------


def events(*notices: Notice) -> tuple[EventOutput, World]:
    output = EventOutput("n1", "x.io")
    output.add_notices(notices, NOW)
    return output, World(output)


def test_what_goes_on_for_hours_costs_little() -> None:
    """Refused every ten seconds for an hour, told every five minutes, and in the end exactly."""
    output, world = events(NOTICE)
    for n in range(2, 362):
        output.add_notices([replace(NOTICE, count=n)], NOW)
        world.work(until=world.now + 10.0)
    world.work(until=world.now + 301.0)
    assert world.event["series"]["count"] == 361
    assert len(world.server.requests) < 20


def test_one_that_exists_and_happened_once_needs_no_more() -> None:
    _, world = events(NOTICE)
    world.work()
    output = EventOutput("n1", "x.io")
    output.add_notices([NOTICE], NOW)
    later = World(output)
    later.server.objects = world.server.objects
    later.work(until=60.0)
    assert later.server.verbs() == ["create"]
    assert later.queue.pending_count() == 0


def test_an_event_that_the_server_forgot_is_made_again_when_it_happens_again() -> None:
    output, world = events(NOTICE)
    world.work()
    world.server.objects.clear()
    output.add_notices([replace(NOTICE, count=2)], NOW)
    world.work(until=30.0)
    assert world.event["series"]["count"] == 2


def test_what_is_an_hour_old_is_no_news() -> None:
    output, world = events()
    output.add_notices([NOTICE], NOTICE.last_time + API_SERVER_EVENT_TTL_S + 1)
    world.work()
    assert (output.expired_count, world.server.requests) == (1, [])


@pytest.mark.parametrize("result", [OutcomeKind.MISSING, OutcomeKind.ENDING, OutcomeKind.INVALID])
def test_an_event_that_nobody_can_have_is_dropped(result: OutcomeKind) -> None:
    output, world = events(NOTICE)
    world.server.answer = lambda request: outcome(result)
    world.work(until=600.0)
    assert len(world.server.requests) == 1
    assert output.dropped == 1
    assert output.pending_count() == 0


def test_events_without_the_right_are_tried_once_a_minute_and_not_lost() -> None:
    output, world = events(NOTICE, replace(NOTICE, id="second"))
    world.server.answer = lambda request: (
        outcome(OutcomeKind.FORBIDDEN) if world.now < 299 else None
    )
    world.work(until=298.0)
    assert len(world.server.requests) == 5
    world.work(until=400.0)
    assert len(world.server.objects) == 2
    assert output.dropped == 0


@NOT_THIS_ONE
def test_one_event_that_fails_does_not_hold_up_the_others(
    result: OutcomeKind, until: float
) -> None:
    _, world = events(NOTICE, replace(NOTICE, id="second"))
    world.server.answer = lambda request: (
        outcome(result) if request.name.endswith(NOTICE.id) and world.now < until + 30 else None
    )
    world.work(until=until)
    assert [name for _, name in world.server.objects] == ["shop/web-0.second"]
    world.work(until=until + 2 * MAX_BACKOFF_S)
    assert len(world.server.objects) == 2


def test_one_pod_does_not_flood_and_loses_nothing() -> None:
    notices = [
        replace(NOTICE, id=f"i{n}", container=f"c{n}") for n in range(EVENT_BURST_PER_POD + 2)
    ]
    other = replace(NOTICE, id="other", pod="quiet", pod_uid="another")
    _, world = events(*notices, other)
    world.work()
    assert len(world.server.requests) == EVENT_BURST_PER_POD + 1
    world.work(until=700.0)
    assert len(world.server.requests) == EVENT_BURST_PER_POD + 3


def test_events_that_find_no_place_are_counted() -> None:
    output, world = events()
    output.add_notices([replace(NOTICE, id=f"i{n}", pod_uid=f"p{n}") for n in range(1500)], NOW)
    assert output.dropped == 1500 - 1024
    world.work()
    output.add_notices([replace(NOTICE, id="new")], NOW)
    assert output.dropped == 1500 - 1024


# --- all of them ------------------------------------------------------------------------------


def test_a_bucket_says_when() -> None:
    bucket = TokenBucket(2.0, 1, 0.0)
    bucket.take_token(0.0)
    assert bucket.seconds_until_token(0.0) == 0.5
    assert bucket.seconds_until_token(0.5) == 0


def test_places_are_bounded_and_what_is_sent_makes_room() -> None:
    shelf: VersionedQueue[int] = VersionedQueue(2)
    assert [shelf.set_desired(key, "a") for key in (1, 2, 3)] == [True, True, False]
    shelf[1].mark_sent("a")
    assert shelf.set_desired(3, "a")
    assert list(shelf) == [2, 3]


def test_never_faster_than_configured() -> None:
    notices = [replace(NOTICE, id=f"i{n}", pod_uid=f"p{n}") for n in range(200)]
    output, _ = events(*notices)
    world = World(output, rate=5.0, burst=10.0)
    for second in range(1, 60):
        world.work(until=float(second))
        assert len(world.server.requests) <= 10 + 5 * second
    assert len(world.server.requests) == 200


@pytest.mark.parametrize(
    "result", [OutcomeKind.THROTTLED, OutcomeKind.UNREACHABLE, OutcomeKind.UNAUTHORIZED]
)
def test_an_api_server_that_is_away_for_ten_minutes_loses_nothing(result: OutcomeKind) -> None:
    notices = [replace(NOTICE, id=f"i{n}", pod_uid=f"p{n}") for n in range(50)]
    output, world = events(*notices)
    world.server.answer = lambda request: outcome(result) if world.now < 600 else None
    world.work(until=599.0)
    assert len(world.server.requests) < 20  # nobody hammers a server that is coming up
    world.work(until=700.0)
    assert len(world.server.objects) == 50
    assert output.dropped == 0
    output.add_notices([replace(NOTICE, id="later")], NOW)
    world.server.requests.clear()
    world.server.answer = lambda request: outcome(result)
    world.later(MIN_BACKOFF_S - 0.1)
    assert len(world.server.requests) == 1, "the pauses begin anew, with the first"


def test_retry_after_is_kept() -> None:
    _, world = events(NOTICE)
    world.server.answer = lambda request: (
        outcome(OutcomeKind.THROTTLED, retry_after=30.0) if not world.now else None
    )
    world.work(until=29.0)
    assert len(world.server.requests) == 1
    world.work(until=40.0)
    assert world.event


def test_a_desk_without_work_waits_for_ever() -> None:
    assert OutputQueue([], rate=1, burst=1, now=0.0).seconds_until_request(0.0) == float("inf")
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    assert World(node).queue.seconds_until_request(0.0) == float("inf")
