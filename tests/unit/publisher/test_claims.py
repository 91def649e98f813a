"""The publisher answers the agent's questions with what the API server has."""

import json
from pathlib import Path

import pytest

from nri_numa.dra.handover import ClaimFileRequester, ClaimFileResponder
from nri_numa.kube.requests import Resource
from nri_numa.publisher.claims import ClaimRequestAnswerer
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.resource_claims import UID, claim


async def answers(handover: Path, question: str, told: list[str]) -> dict[str, object]:
    """What is answered to one question."""
    (handover / "ask-0000000000000000.json").write_text(question)

    cluster = ClusterObjects()
    cluster.put(Resource.CLAIMS, claim())
    queue = ClaimRequestAnswerer(
        ClaimFileResponder(str(handover)), cluster, lambda: told.append("taken")
    )
    await queue.answer_pending()
    await queue.answer_pending()
    ClaimFileRequester(str(handover)).write_registration_marker()
    await queue.answer_pending()
    found: dict[str, object] = json.loads(
        (handover / "answer-0000000000000000.json").read_text(encoding="utf-8")
    )
    return found


async def test_a_claim_is_handed_over_without_what_nobody_reads(tmp_path: Path) -> None:
    told: list[str] = []
    question = json.dumps({"namespace": "shop", "name": "four", "uid": UID})
    found = await answers(tmp_path, question, told)
    whole = claim()
    handed = found["claim"]
    assert isinstance(handed, dict)
    made = {"resource.kubernetes.io/pod-claim-name": None}
    who = {"uid": UID, "namespace": "shop", "name": "four"}
    assert handed["metadata"] == {**who, "annotations": made}
    (one,) = handed["status"]["allocation"]["devices"]["results"]
    (meant,) = whole["status"]["allocation"]["devices"]["results"]
    assert one["consumedCapacity"] == meant["consumedCapacity"]
    assert one["device"] == meant["device"]
    # At the beginning, and when the kubelet took the driver.
    assert told == ["taken", "taken"]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"namespace": "shop", "name": "gone"}, "404"),
        ({"namespace": "shop"}, "names no claim"),
        ({"namespace": 1, "name": "four"}, "names no claim"),
    ],
)
async def test_what_cannot_be_had_is_said(
    tmp_path: Path, question: dict[str, object], words: str
) -> None:
    found = await answers(tmp_path, json.dumps(question), [])
    assert words in str(found["problem"])
