"""Volcano's object: when it is written, and what stands in the way."""

from typing import Any

from nri_numa.kube.requests import ContentType, Outcome, OutcomeKind, Resource
from nri_numa.publisher.numatopology import NumatopologyOutput
from nri_numa.publisher.outbox import BLOCKED_RETRY_S
from tests.beds.publisher_bed import ObjectBed


def spec(free: str = "0-3") -> dict[str, Any]:
    return {
        "policies": {"CPUManagerPolicy": "static", "TopologyManagerPolicy": "none"},
        "numares": {"cpu": {"allocatable": free, "capacity": 4}},
    }


def test_it_is_written_when_it_changes_and_belongs_to_the_node() -> None:
    bed = ObjectBed(NumatopologyOutput("n1"), Resource.NUMATOPOLOGIES)
    output = bed.output
    output.set_desired(None)  # an agent that never said anything
    bed.work(100)
    assert bed.requests == []
    for free in ("0-3", "0-3", "0-1"):
        output.set_desired(spec(free))
        bed.later(60)
        assert output.pending_count() == 0
    assert bed.verbs() == ["get", "patch", "patch"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert bed.metadata["name"] == bed.requests[-1].name == "n1"
    assert bed.owner == owner
    assert {(one.form, one.force) for one in bed.requests[1:]} == {(ContentType.APPLY, False)}
    assert bed.object["spec"]["numares"]["cpu"]["allocatable"] == "0-1"
    output.set_desired(None)
    bed.later(60)
    assert bed.object["spec"]["numares"]["cpu"]["allocatable"] == ""
    bed.put_node(uid="node-2")
    output.schedule_resync()
    bed.later(60)
    assert bed.owner["uid"] == "node-2"


def test_what_stands_in_the_way_is_said_and_tried_again_slowly() -> None:
    bed = ObjectBed(NumatopologyOutput("n1"), Resource.NUMATOPOLOGIES)
    output = bed.output
    output.set_desired(spec())
    for answer, text, said in (
        (OutcomeKind.UNKNOWN, "no such kind", "no such kind; Volcano brings its definition"),
        (
            OutcomeKind.CONFLICT,
            'conflict with "exporter": .spec',
            "its fields belong to exporter; stop",
        ),
        (OutcomeKind.CONFLICT, "conflict", "its fields belong to another field manager; stop"),
        (OutcomeKind.INVALID, "no such field", "no such field; is its definition another one?"),
    ):
        bed.forced = Outcome(result=answer, text=text)
        bed.later(2 * BLOCKED_RETRY_S)
        assert output.problem.startswith(said), answer
        assert output.pending_count() == 1
    bed.forced = None
    bed.later(2 * BLOCKED_RETRY_S)
    assert (output.problem, output.pending_count()) == ("", 0)
