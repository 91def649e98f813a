"""What the Node says of its capacity, on its way to the agent."""

from __future__ import annotations

import json

from nri_numa.kube.requests import Outcome, Result, Verb
from nri_numa.publisher.outbox import LONGEST_PAUSE
from nri_numa.publisher.outputs import HandoverOutput

PREFIX = "numa.kubernetes.io"


def answer(output: HandoverOutput, outcome: Outcome, now: float = 0.0) -> None:
    request = output.due(now)
    assert request is not None
    assert (request.verb, request.name) == (Verb.GET, "n")
    output.done(request, outcome, now, 0.5)


def node(**annotations: str) -> Outcome:
    found = {f"{PREFIX}/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return Outcome(result=Result.DONE, documents=({"metadata": {"annotations": found}},))


def test_both_texts_are_handed_on_as_they_are() -> None:
    output = HandoverOutput("n", PREFIX, 15.0)
    assert output.document == ""
    answer(output, node(offline_capacity="anything", drained="0-1", numacpu="0"))
    assert json.loads(output.document) == {"offline-capacity": "anything", "drained": "0-1"}
    assert output.due(14.0) is None
    assert output.next_due() == 15.0
    answer(output, node(), 15.0)
    assert json.loads(output.document) == {"offline-capacity": "", "drained": ""}
    assert output.waiting() == 0
    output.resync()


def test_a_node_that_cannot_be_seen_says_what_it_said() -> None:
    output = HandoverOutput("n", PREFIX, 15.0)
    answer(output, node(drained="0"))
    before = output.document
    answer(output, Outcome(result=Result.MISSING), 15.0)
    answer(output, Outcome(result=Result.FORBIDDEN), 16.0)
    assert output.document == before
    assert output.next_due() == 16.0 + LONGEST_PAUSE


def test_what_the_agent_would_refuse_for_its_length_stays_here() -> None:
    output = HandoverOutput("n", PREFIX, 15.0)
    answer(output, node(drained="0"))
    before = output.document
    answer(output, node(drained="0," * 40_000), 15.0)
    assert output.document == before
    assert "expected 65536 at most" in output.problem
    answer(output, node(drained="0"), 30.0)
    assert output.problem == ""
