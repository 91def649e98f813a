"""What becomes of a request: every status, every way not to reach the API server."""

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nri_numa.kube.api import KubeAPI
from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource, Verb
from tests.beds.fake_api_server import FakeAPIServer, Said, fake, status

NODE = {"metadata": {"name": "n1", "labels": {"a": "b"}}}
GET = APIRequest(output="node", verb=Verb.GET, resource=Resource.NODES, name="n1")
PATCH = APIRequest(
    output="node", verb=Verb.PATCH, resource=Resource.NODES, name="n1", body={"metadata": {}}
)
CREATE = APIRequest(
    output="events",
    verb=Verb.CREATE,
    resource=Resource.EVENTS,
    namespace="shop",
    name="e",
    body={"metadata": {"name": "e", "namespace": "shop"}, "eventTime": "2026-01-01T00:00:00.5Z"},
)
LIST = APIRequest(
    output="pods", verb=Verb.LIST, resource=Resource.PODS, field_selector={"spec.nodeName": "n1"}
)


APPLY = APIRequest(
    output="topology",
    verb=Verb.PATCH,
    resource=Resource.TOPOLOGIES,
    name="n1",
    form=ContentType.APPLY,
    body={"apiVersion": "topology.node.k8s.io/v1alpha2", "metadata": {"name": "n1"}, "zones": []},
)
CLEAN = replace(
    APPLY,
    form=ContentType.JSON,
    body=[{"op": "replace", "path": "/metadata/managedFields", "value": [{}]}],
)
TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n1"


Ask = Callable[..., Coroutine[Any, Any, Outcome]]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAPIServer]:
    with fake(tmp_path, monkeypatch, lambda asked: Said(200, NODE)) as made:
        yield made


@pytest.fixture
async def ask(server: FakeAPIServer) -> AsyncIterator[Ask]:
    """Does a request; the server's answer may be given with it."""
    api = KubeAPI(str(server.directory), "nri-numa-publish")

    async def done(request: APIRequest, said: Said | None = None) -> Outcome:
        if said is not None:
            server.answer = lambda asked: said
        return await api.execute_request(request)

    yield done
    await api.close()


@pytest.mark.parametrize(
    ("request_", "method", "path"),
    [
        (GET, "GET", "/api/v1/nodes/n1"),
        (PATCH, "PATCH", "/api/v1/nodes/n1?fieldManager=nri-numa-publish"),
        (CREATE, "POST", "/apis/events.k8s.io/v1/namespaces/shop/events"
         "?fieldManager=nri-numa-publish"),
    ],
)  # fmt: skip
async def test_requests_are_what_kubernetes_expects(
    ask: Ask, server: FakeAPIServer, request_: APIRequest, method: str, path: str
) -> None:
    outcome = await ask(request_)
    (asked,) = server.asked
    assert (asked.method, asked.path) == (method, path)
    assert asked.authorization == "Bearer first"
    if method == "PATCH":
        assert asked.content_type == "application/merge-patch+json"
    if method == "POST":
        assert asked.body["eventTime"].startswith("2026-01-01T00:00:00.5")
    assert outcome.result is OutcomeKind.SUCCEEDED
    assert outcome.documents[0]["metadata"]["labels"] == {"a": "b"}


@pytest.mark.parametrize(
    ("request_", "query", "kind"),
    [
        (APPLY, "fieldManager=nri-numa-publish", "apply-patch+yaml"),
        (replace(APPLY, force=True), "force=true&fieldManager=nri-numa-publish",
         "apply-patch+yaml"),
        (CLEAN, "fieldManager=nri-numa-publish", "json-patch+json"),
    ],
)  # fmt: skip
async def test_each_form_of_a_patch_says_what_it_is(
    ask: Ask, server: FakeAPIServer, request_: APIRequest, query: str, kind: str
) -> None:
    owned = {"metadata": {"name": "n1", "uid": "u", "managedFields": [
        {"manager": "nfd", "operation": "Update", "fieldsV1": {"f:zones": {}}}]}}  # fmt: skip
    outcome = await ask(request_, Said(200, owned))
    (asked,) = server.asked
    assert (asked.path, asked.content_type) == (f"{TOPOLOGY}?{query}", f"application/{kind}")
    assert asked.body == request_.body
    metadata = outcome.documents[0]["metadata"]
    assert metadata["uid"] == "u"
    assert metadata["managedFields"][0]["fieldsV1"] == {"f:zones": {}}


async def test_a_list_is_of_one_node_and_of_all_namespaces(ask: Ask, server: FakeAPIServer) -> None:
    pod = {"metadata": {"name": "p", "namespace": "shop", "annotations": {"a": "b"}}}
    items = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod]}
    outcome = await ask(LIST, Said(200, items))
    assert server.asked[0].path == "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1&limit=500"
    assert outcome.documents[0]["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("request_", "said", "result", "words"),
    [
        (GET, status(404, "no node"), OutcomeKind.MISSING, "get nodes/n1: 404"),
        (CREATE, status(409, "exists"), OutcomeKind.EXISTS, ""),
        (PATCH, status(409, "uid"), OutcomeKind.CONFLICT, ""),
        (PATCH, status(410, "gone"), OutcomeKind.FAILED, "410"),
        (CREATE, status(422, "too long"), OutcomeKind.INVALID, "too long"),
        (CREATE, status(403, "no", "NamespaceTerminating"), OutcomeKind.ENDING, ""),
        (GET, status(403, "no"), OutcomeKind.FORBIDDEN,
         "apiGroups [''], resources [nodes], verbs [get]"),
        (PATCH, status(403, "no"), OutcomeKind.FORBIDDEN, "resources [nodes], verbs [patch]"),
        (APPLY, status(404, 'noderesourcetopologies "n1" not found'), OutcomeKind.MISSING, ""),
        (APPLY, status(404, "the server could not find the requested resource"),
         OutcomeKind.UNKNOWN,
         "no such kind"),
        (APPLY, Said(404, "404 page not found"), OutcomeKind.UNKNOWN, "no such kind"),
        (APPLY, status(500, "failed to prune fields"), OutcomeKind.FAILED,
         "failed to prune fields"),
        (LIST, status(403, "no"), OutcomeKind.FORBIDDEN, "resources [pods], verbs [list]"),
        (CREATE, status(403, "no"), OutcomeKind.FORBIDDEN,
         "apiGroups ['events.k8s.io'], resources [events], verbs [create]"),
        (PATCH, status(403, "ValidatingAdmissionPolicy 'x' denied"), OutcomeKind.FORBIDDEN,
         "does the token name this node"),
        (GET, status(401, "Unauthorized"), OutcomeKind.UNAUTHORIZED, "the clocks differ"),
        (GET, status(500, "oops"), OutcomeKind.FAILED, "oops"),
        (GET, status(503, "starting"), OutcomeKind.THROTTLED, "starting"),
        (GET, Said(502, "a proxy's page"), OutcomeKind.FAILED, "a proxy's page"),
        (GET, Said(403, {"nothing": "of Kubernetes"}), OutcomeKind.FORBIDDEN, "verbs [get]"),
        (GET, Said(200, "no JSON"), OutcomeKind.FAILED, "cannot read the answer"),
        (GET, Said(200, {"metadata": []}), OutcomeKind.FAILED, "cannot read the answer"),
        # A budget that forbids an eviction is not a busy server.
        (GET, status(429, "Cannot evict pod", "DisruptionBudget", Retry_After="10"),
         OutcomeKind.BLOCKED, "Cannot evict pod"),
    ],
)  # fmt: skip
async def test_what_a_no_means(
    ask: Ask, request_: APIRequest, said: Said, result: OutcomeKind, words: str
) -> None:
    outcome = await ask(request_, said)
    assert outcome.result is result, outcome
    assert words in outcome.text


@pytest.mark.parametrize(("text", "seconds"), [("17", 17.0), ("9" * 5000, 3600.0), ("soon", 1.0)])
async def test_retry_after_is_read(ask: Ask, text: str, seconds: float) -> None:
    outcome = await ask(GET, status(429, "slow down", Retry_After=text))
    assert (outcome.result, outcome.retry_after) == (OutcomeKind.THROTTLED, seconds)


async def test_a_renewed_certificate_authority_is_read(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with FakeAPIServer(tmp_path / "old", lambda asked: Said(200, NODE)):
        pass
    right = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").write_bytes((tmp_path / "old/ca.crt").read_bytes())
    wrong = await ask(GET)
    (tmp_path / "ca.crt").write_bytes(right)
    assert (await ask(GET)).result is OutcomeKind.SUCCEEDED
    assert wrong.result is OutcomeKind.UNREACHABLE
    assert "certificate is not accepted" in wrong.text
    assert str(tmp_path / "ca.crt") in wrong.text


@pytest.mark.parametrize("name", ["token", "ca.crt"])
async def test_missing_credentials_are_named(ask: Ask, tmp_path: Path, name: str) -> None:
    (tmp_path / name).unlink()
    outcome = await ask(GET)
    assert outcome.result is OutcomeKind.UNREACHABLE
    assert name in outcome.text
    assert str(tmp_path) in outcome.text


async def test_rubbish_for_a_certificate_authority(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("rubbish")
    outcome = await ask(GET)
    assert outcome.result is OutcomeKind.UNREACHABLE
    assert "holds no certificate" in outcome.text


async def test_outside_of_a_pod(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert "KUBERNETES_SERVICE_HOST is not set" in (await ask(GET)).text


async def test_nobody_there(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    outcome = await ask(GET)
    assert outcome.result is OutcomeKind.UNREACHABLE
    assert "no answer from the API server" in outcome.text


async def test_the_clocks_are_compared(server: FakeAPIServer) -> None:
    server.skew = 600.0
    api = KubeAPI(str(server.directory), "test")
    await api.execute_request(GET)
    await api.close()
    assert 595 < api.server_time() - time.time() < 605
