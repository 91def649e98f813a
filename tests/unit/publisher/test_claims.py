"""The publisher answers the agent's questions with what the API server has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_numa.dra.handover import ClaimFileRequester, ClaimFileResponder
from nri_numa.kube.api import KubeAPI
from nri_numa.publisher.claims import ClaimRequestAnswerer
from tests.beds.fake_api_server import Asked, Said, fake, status
from tests.beds.resource_claims import UID, claim

PATH = "/apis/resource.k8s.io/v1/namespaces/shop/resourceclaims/four"


def server(asked: Asked) -> Said:
    if asked.path.partition("?")[0] == PATH:
        document = claim()
        return Said(body={"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **document})
    return status(404, "not found")


async def answers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, question: str, told: list[str]
) -> dict[str, object]:
    """What is answered to one question."""
    credentials, handover = directory / "credentials", directory / "handover"
    credentials.mkdir()
    handover.mkdir()
    (handover / "ask-0000000000000000.json").write_text(question)

    api = KubeAPI(str(credentials), "test")
    queue = ClaimRequestAnswerer(
        ClaimFileResponder(str(handover)), api, lambda: told.append("taken")
    )
    with fake(credentials, monkeypatch, server):
        await queue.answer_pending()
        await queue.answer_pending()
        ClaimFileRequester(str(handover)).write_registration_marker()
        await queue.answer_pending()
        await api.close()
    found: dict[str, object] = json.loads(
        (handover / "answer-0000000000000000.json").read_text(encoding="utf-8")
    )
    return found


async def test_a_claim_is_handed_over_without_what_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    question = json.dumps({"namespace": "shop", "name": "four", "uid": UID})
    found = await answers(tmp_path, monkeypatch, question, told)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: dict[str, object], words: str
) -> None:
    found = await answers(tmp_path, monkeypatch, json.dumps(question), [])
    assert words in str(found["problem"])
