"""The OpenAPI file is fresh, and the server answers as it says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nri_numa import web
from tests.beds.http_view import FakeView, Reply, exchange, get, in_loop, serving
from tests.beds.schemas import closed_schema
from tools import openapi

FILE = Path(web.__file__).with_name("openapi.yaml")


def test_the_file_is_what_the_documents_make() -> None:
    """Run ``python -m tools.openapi nri_numa/web/openapi.yaml`` when this fails."""
    assert FILE.read_text() == openapi.text()


def _check(description: dict[str, Any], path: str, reply: Reply) -> None:
    answers = description["paths"][path]["get"]["responses"]
    answer = answers.get(str(reply.status))
    assert answer is not None, f"{path} answered {reply.status}, which is not described"
    if "$ref" in answer:
        answer = description["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    media, content = next(iter(answer["content"].items()))
    assert reply.headers["content-type"].partition(";")[0] == media
    if media == "application/json":
        schema = {
            "components": closed_schema(description["components"]),
            "$ref": content["schema"]["$ref"],
        }
        errors = [e.message for e in Draft202012Validator(schema).iter_errors(reply.json)]
        assert errors == [], path


TARGETS = [
    ("/healthz", "/healthz"),
    ("/readyz", "/readyz"),
    ("/metrics", "/metrics"),
    ("/v1/status", "/v1/status"),
    ("/v1/topology", "/v1/topology"),
    ("/v1/assignments", "/v1/assignments"),
    ("/v1/assignments", "/v1/assignments?namespace=shop"),
    ("/v1/assignments", "/v1/assignments?colour=red"),
    ("/v1/explain/{namespace}/{pod}", "/v1/explain/shop/pod-1"),
    ("/v1/explain/{namespace}/{pod}", "/v1/explain/shop/nobody"),
    ("/v1/explain/{namespace}/{pod}/{container}", "/v1/explain/shop/pod-1/server"),
    ("/v1/explain/{namespace}/{pod}/{container}", "/v1/explain/shop/pod-1/%3Cb%3E"),
    ("/v1/rejections", "/v1/rejections"),
    ("/v1/slots", "/v1/slots"),
    ("/v1/zones", "/v1/zones"),
    ("/v1/kubelet", "/v1/kubelet"),
    ("/v1/notices", "/v1/notices"),
    ("/v1/notices", "/v1/notices?after=7"),
    ("/v1/notices", "/v1/notices?after=seven"),
    ("/v1/requests", "/v1/requests?after=7"),
    ("/v1/use", "/v1/use"),
    ("/v1/use/{namespace}/{pod}/{container}", "/v1/use/shop/pod-1/server"),
    ("/v1/use/{namespace}/{pod}/{container}", "/v1/use/shop/pod-1/nobody"),
    ("/v2/system/numa/info", "/v2/system/numa/info"),
    ("/openapi.yaml", "/openapi.yaml"),
]


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("token", [True, False])
@in_loop
async def test_every_answer_is_as_described(tmp_path: Path, ready: bool, token: bool) -> None:
    """With and without the token, ready or not, found or not found."""
    file = tmp_path / "token"
    file.write_text("0123456789abcdef")
    files = {"token_file": str(file)} if token else {}
    async with serving(FakeView(ready=ready), **files) as (_, address):
        served = yaml.safe_load(FILE.read_text())
        for path, target in TARGETS:
            _check(served, path, await get(address, target))


def test_every_described_path_is_served_and_tried() -> None:
    """No path of the file is a promise nobody keeps."""
    paths = set(openapi.describe()["paths"])
    assert {path for path, _ in TARGETS} | {"/v1/events"} == paths


@in_loop
async def test_writing_is_refused_on_every_path() -> None:
    async with serving() as (_, address):
        for _, target in TARGETS:
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                raw = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
                assert (await exchange(address, raw)).status == 405
