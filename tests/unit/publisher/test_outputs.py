"""What is done about what is not as it should be, and what each outcome leads to."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.kube.api import name_of
from nri_numa.kube.requests import Outcome, OutcomeKind, Resource
from nri_numa.observe.notices import Notice
from nri_numa.publisher.outbox import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
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
from tests.beds.publisher_bed import NOTICE, NOW, OutputBed


def outcome(result: OutcomeKind, *documents: dict[str, Any], retry_after: float = 0.0) -> Outcome:
    return Outcome(result=result, documents=documents, retry_after=retry_after)


# --- the Node ---------------------------------------------------------------------------------


@pytest.fixture
def node() -> NodeMetadataOutput:
    made = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    made.set_desired({"x.io/numacpu": "0|1"}, {"x.io/sockets": "1"})
    return made


def test_the_node_gets_what_is_missing_and_keeps_what_is_not_ours(node: NodeMetadataOutput) -> None:
    bed = OutputBed(node)
    bed.put_node(labels={"zone": "a", "x.io/sockets": "1"})
    bed.work()
    assert bed.node["annotations"] == {"x.io/numacpu": "0|1"}
    assert bed.node["labels"] == {"zone": "a", "x.io/sockets": "1"}
    assert bed.requests[1].body == {"metadata": {"annotations": {"x.io/numacpu": "0|1"}}}


def test_a_node_that_is_right_is_not_written(node: NodeMetadataOutput) -> None:
    bed = OutputBed(node)
    bed.put_node(annotations={"x.io/numacpu": "0|1"}, labels={"x.io/sockets": "1"})
    bed.work()
    bed.queue.schedule_resync()
    bed.work()
    assert bed.verbs() == ["get", "get"]


def test_what_is_switched_off_is_taken_away() -> None:
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=False)
    node.set_desired({"x.io/numacpu": "0|1"}, {"x.io/sockets": "1"})
    bed = OutputBed(node)
    bed.put_node(labels={"x.io/sockets": "1", "zone": "a"})
    bed.work()
    assert bed.node["labels"] == {"zone": "a"}


def test_what_somebody_removed_is_put_back_at_the_next_look(node: NodeMetadataOutput) -> None:
    bed = OutputBed(node)
    bed.put_node()
    bed.work()
    bed.node["annotations"].clear()
    bed.work()
    assert bed.node["annotations"] == {}
    bed.queue.schedule_resync()
    bed.work()
    assert bed.node["annotations"] == {"x.io/numacpu": "0|1"}


def test_a_node_that_is_deleted_and_made_again_is_written_again(node: NodeMetadataOutput) -> None:
    bed = OutputBed(node)
    bed.put_node()
    bed.work()
    bed.cluster.remove(Resource.NODES, "n1")
    bed.queue.schedule_resync()
    bed.work(until=300.0)
    assert 5 < len(bed.requests) < 20  # looked for, with growing pauses
    bed.put_node()
    bed.work(until=400.0)
    assert bed.node["labels"] == {"x.io/sockets": "1"}
    bed.cluster.remove(Resource.NODES, "n1")
    bed.queue.schedule_resync()
    bed.requests.clear()
    bed.later(MIN_BACKOFF_S + 0.1)
    assert bed.verbs() == ["get", "get"], "the pauses begin anew"


def test_who_takes_a_label_away_at_once_is_fought_with_pauses(node: NodeMetadataOutput) -> None:
    bed = OutputBed(node)
    bed.put_node()
    bed.answer = lambda request: outcome(OutcomeKind.SUCCEEDED, {"metadata": {}})
    bed.work(until=600.0)
    assert len(bed.requests) < 30


def test_exclusive_cpus_are_written_when_they_change_and_put_back_at_the_next_look() -> None:
    """Before the agent has counted nothing is asked; the kubelet sets 0 when it registers."""
    output = NodeCapacityOutput("n1", "x.io/cpu")
    bed = OutputBed(output)
    node = {"metadata": {"name": "n1"}, "status": {"capacity": {"cpu": "4"}}}
    bed.cluster.put(Resource.NODES, node)

    def capacity() -> dict[str, str]:
        found: dict[str, str] = bed.cluster.get(Resource.NODES, "n1")["status"]["capacity"]
        return found

    bed.later(100)
    assert (bed.requests, output.pending_count()) == ([], 0)
    for count in (3, 3, 2):
        output.set_desired(count)
        bed.later()
        assert capacity() == {"cpu": "4", "x.io/cpu": str(count)}
    assert bed.verbs() == ["get", "patch", "patch"]
    assert bed.requests[-1].resource is Resource.NODE_STATUS
    capacity()["x.io/cpu"] = "0"
    for _ in range(2):
        output.schedule_resync()
        bed.later()
        assert capacity()["x.io/cpu"] == "2"
    assert bed.verbs()[3:] == ["get", "patch", "get"]
    assert output.pending_count() == 0


# --- what the Node says of its capacity, on its way to the agent ------------------------------


def handover(**annotations: str) -> tuple[AgentOfflineCapacityOutput, OutputBed, dict[str, str]]:
    """With the Node's annotations, which were read once."""
    output = AgentOfflineCapacityOutput("n1", "x.io", 15.0)
    bed = OutputBed(output)
    bed.put_node(annotations={f"x.io/{key}": text for key, text in annotations.items()})
    assert output.document == ""
    bed.work()
    return output, bed, bed.node["annotations"]


def test_both_texts_are_handed_on_as_they_are_and_looked_for_again() -> None:
    output, bed, said = handover(drained="0-1", numacpu="0", **{"offline-capacity": "anything"})
    assert json.loads(output.document) == {"offline-capacity": "anything", "drained": "0-1"}
    said.clear()
    bed.later(16)
    assert len(bed.requests) == 1
    bed.later(1)
    assert json.loads(output.document) == {"offline-capacity": "", "drained": ""}
    assert output.pending_count() == 0


def test_a_node_that_cannot_be_seen_says_what_it_said() -> None:
    output, bed, _ = handover(drained="0")
    before, results = output.document, [OutcomeKind.MISSING, OutcomeKind.FORBIDDEN]
    bed.answer = lambda request: outcome(results.pop(0)) if results else None
    bed.later(17 + MAX_BACKOFF_S)
    assert (len(bed.requests), output.document) == (3, before)
    bed.later(1)
    assert len(bed.requests) == 4


def test_what_the_agent_would_reject_for_its_length_stays_here() -> None:
    output, bed, said = handover(drained="0")
    before = output.document
    for text, problem in (("0," * 40_000, "expected 65536 at most"), ("0", "")):
        said["x.io/drained"] = text
        bed.later(17)
        assert output.document == before
        assert problem in output.problem
    assert output.problem == ""


# --- pods -------------------------------------------------------------------------------------


def pods(*assignments: Assignment) -> tuple[PodAnnotationOutput, OutputBed]:
    output = PodAnnotationOutput("n1", "x.io")
    output.set_desired(assignments)
    bed = OutputBed(output)
    for one in assignments:
        metadata = {"namespace": one.namespace, "name": one.pod, "uid": one.pod_uid}
        bed.cluster.put(
            Resource.PODS,
            {"metadata": {**metadata, "annotations": {"a": "b"}}, "spec": {"nodeName": "n1"}},
        )
    return output, bed


def pod_annotations(bed: OutputBed, name: str, namespace: str = "shop") -> dict[str, str]:
    found: dict[str, str] = bed.cluster.get(Resource.PODS, name, namespace)["metadata"][
        "annotations"
    ]
    return found


def test_pods_are_annotated_once_and_again_when_it_is_removed() -> None:
    output, bed = pods(assignment(1), assignment(2))
    bed.work()
    assert pod_annotations(bed, "pod-1").keys() == {"a", "x.io/assigned"}
    assert bed.verbs() == ["patch", "patch"]
    output.set_desired([assignment(1), assignment(2)])
    bed.work()
    bed.cluster.patch(
        Resource.PODS, "pod-1", {"metadata": {"annotations": {"x.io/assigned": None}}}, "shop"
    )
    bed.queue.schedule_resync()
    bed.work()
    assert bed.verbs() == ["patch", "patch", "list", "patch"]
    assert "x.io/assigned" in pod_annotations(bed, "pod-1")


def test_a_namesake_is_left_alone_and_a_static_pod_is_known_by_its_name() -> None:
    _, bed = pods(replace(assignment(1), pod_uid="0a-0b"), replace(assignment(2), pod_uid="c0ffee"))
    for one in bed.cluster.all(Resource.PODS):
        one["metadata"]["uid"] = "another"
    bed.work(until=600.0)
    assert [request.body["metadata"].get("uid") for request in bed.requests] == ["0a-0b", None]


@pytest.mark.parametrize("result", [OutcomeKind.MISSING, OutcomeKind.INVALID, OutcomeKind.CONFLICT])
def test_what_cannot_be_done_is_not_tried_for_ever(result: OutcomeKind) -> None:
    output, bed = pods(assignment(1))
    bed.answer = lambda request: outcome(result)
    bed.work(until=600.0)
    assert len(bed.requests) == 1
    assert output.dropped == (result is OutcomeKind.INVALID)


def test_pods_that_are_gone_are_forgotten_and_places_are_bounded() -> None:
    output, bed = pods(assignment(1))
    output.set_desired([assignment(n) for n in range(2000)])
    assert output.dropped == 2000 - 1024
    output.set_desired([])
    bed.work()
    bed.queue.schedule_resync()
    bed.work()
    assert bed.requests == []


def test_a_list_that_fails_is_asked_for_again() -> None:
    _, bed = pods(assignment(1))
    bed.work()
    bed.queue.schedule_resync()
    results = iter([OutcomeKind.FAILED, OutcomeKind.FORBIDDEN])
    bed.answer = lambda request: (
        outcome(result) if (result := next(results, None)) is not None else None
    )
    bed.work(until=100.0)
    assert bed.verbs() == ["patch", "list", "list", "list"]


NOT_THIS_ONE = pytest.mark.parametrize(
    ("result", "until"), [(OutcomeKind.FAILED, 0.0), (OutcomeKind.FORBIDDEN, MAX_BACKOFF_S)]
)
"""A policy of one namespace may forbid what is a right elsewhere."""


@NOT_THIS_ONE
def test_one_pod_that_fails_does_not_hold_up_the_others(result: OutcomeKind, until: float) -> None:
    _, bed = pods(assignment(1), assignment(2))
    bed.answer = lambda request: (
        outcome(result) if request.name == "pod-1" and bed.now < until + 10 else None
    )
    bed.work(until=until)
    assert "x.io/assigned" in pod_annotations(bed, "pod-2", "infra")
    bed.work(until=until + 2 * MAX_BACKOFF_S)
    assert "x.io/assigned" in pod_annotations(bed, "pod-1")


# --- Events -----------------------------------------------------------------------------------


def events(*notices: Notice) -> tuple[EventOutput, OutputBed]:
    output = EventOutput("n1", "x.io")
    output.add_notices(notices, NOW)
    return output, OutputBed(output)


def event_of(bed: OutputBed) -> dict[str, Any]:
    (event,) = bed.cluster.all(Resource.EVENTS)
    return event


def test_what_goes_on_for_hours_costs_little() -> None:
    """Refused every ten seconds for an hour, told every five minutes, and in the end exactly."""
    output, bed = events(NOTICE)
    for n in range(2, 362):
        output.add_notices([replace(NOTICE, count=n)], NOW)
        bed.work(until=bed.now + 10.0)
    bed.work(until=bed.now + 301.0)
    assert event_of(bed)["series"]["count"] == 361
    assert len(bed.requests) < 20


def test_one_that_exists_and_happened_once_needs_no_more() -> None:
    _, bed = events(NOTICE)
    bed.work()
    output = EventOutput("n1", "x.io")
    output.add_notices([NOTICE], NOW)
    later = OutputBed(output, cluster=bed.cluster)
    later.work(until=60.0)
    assert later.verbs() == ["create"]
    assert later.queue.pending_count() == 0


def test_an_event_that_the_server_forgot_is_made_again_when_it_happens_again() -> None:
    output, bed = events(NOTICE)
    bed.work()
    bed.cluster.objects.clear()
    output.add_notices([replace(NOTICE, count=2)], NOW)
    bed.work(until=30.0)
    assert event_of(bed)["series"]["count"] == 2


def test_what_is_an_hour_old_is_no_news() -> None:
    output, bed = events()
    output.add_notices([NOTICE], NOTICE.last_time + API_SERVER_EVENT_TTL_S + 1)
    bed.work()
    assert (output.expired_count, bed.requests) == (1, [])


@pytest.mark.parametrize("result", [OutcomeKind.MISSING, OutcomeKind.ENDING, OutcomeKind.INVALID])
def test_an_event_that_nobody_can_have_is_dropped(result: OutcomeKind) -> None:
    output, bed = events(NOTICE)
    bed.answer = lambda request: outcome(result)
    bed.work(until=600.0)
    assert len(bed.requests) == 1
    assert output.dropped == 1
    assert output.pending_count() == 0


def test_events_without_the_right_are_tried_once_a_minute_and_not_lost() -> None:
    output, bed = events(NOTICE, replace(NOTICE, id="second"))
    bed.answer = lambda request: outcome(OutcomeKind.FORBIDDEN) if bed.now < 299 else None
    bed.work(until=298.0)
    assert len(bed.requests) == 5
    bed.work(until=400.0)
    assert len(bed.cluster.objects) == 2
    assert output.dropped == 0


@NOT_THIS_ONE
def test_one_failed_event_does_not_hold_up_the_others(result: OutcomeKind, until: float) -> None:
    _, bed = events(NOTICE, replace(NOTICE, id="second"))
    bed.answer = lambda request: (
        outcome(result) if request.name.endswith(NOTICE.id) and bed.now < until + 30 else None
    )
    bed.work(until=until)
    assert [name_of(one) for one in bed.cluster.all(Resource.EVENTS)] == ["web-0.second"]
    bed.work(until=until + 2 * MAX_BACKOFF_S)
    assert len(bed.cluster.objects) == 2


def test_one_pod_does_not_flood_and_loses_nothing() -> None:
    notices = [
        replace(NOTICE, id=f"i{n}", container=f"c{n}") for n in range(EVENT_BURST_PER_POD + 2)
    ]
    _, bed = events(*notices, replace(NOTICE, id="other", pod="quiet", pod_uid="another"))
    bed.work()
    assert len(bed.requests) == EVENT_BURST_PER_POD + 1
    bed.work(until=700.0)
    assert len(bed.requests) == EVENT_BURST_PER_POD + 3


def test_events_that_find_no_place_are_counted() -> None:
    output, bed = events()
    output.add_notices([replace(NOTICE, id=f"i{n}", pod_uid=f"p{n}") for n in range(1500)], NOW)
    assert output.dropped == 1500 - 1024
    bed.work()
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
    bed = OutputBed(output, rate=5.0, burst=10.0)
    for second in range(1, 60):
        bed.work(until=float(second))
        assert len(bed.requests) <= 10 + 5 * second
    assert len(bed.requests) == 200


@pytest.mark.parametrize(
    "result", [OutcomeKind.THROTTLED, OutcomeKind.UNREACHABLE, OutcomeKind.UNAUTHORIZED]
)
def test_an_api_server_that_is_away_for_ten_minutes_loses_nothing(result: OutcomeKind) -> None:
    notices = [replace(NOTICE, id=f"i{n}", pod_uid=f"p{n}") for n in range(50)]
    output, bed = events(*notices)
    bed.answer = lambda request: outcome(result) if bed.now < 600 else None
    bed.work(until=599.0)
    assert len(bed.requests) < 20  # nobody hammers a server that is coming up
    bed.work(until=700.0)
    assert len(bed.cluster.objects) == 50
    assert output.dropped == 0
    output.add_notices([replace(NOTICE, id="later")], NOW)
    bed.requests.clear()
    bed.answer = lambda request: outcome(result)
    bed.later(MIN_BACKOFF_S - 0.1)
    assert len(bed.requests) == 1, "the pauses begin anew, with the first"


def test_retry_after_is_kept() -> None:
    _, bed = events(NOTICE)
    bed.answer = lambda request: (
        outcome(OutcomeKind.THROTTLED, retry_after=30.0) if not bed.now else None
    )
    bed.work(until=29.0)
    assert len(bed.requests) == 1
    bed.work(until=40.0)
    assert event_of(bed)


def test_a_desk_without_work_waits_for_ever() -> None:
    assert OutputQueue([], rate=1, burst=1, now_s=0.0).seconds_until_request(0.0) == float("inf")
    node = NodeMetadataOutput("n1", "x.io", annotations=True, labels=True)
    assert OutputBed(node).queue.seconds_until_request(0.0) == float("inf")
