"""The running plugin keeps to its OpenAPI file, whatever it is asked; cases by schemathesis."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.schemas import OpenApiSchema

from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode, until
from tests.beds.http_view import HOSTILE

# An event stream has no end; tests/unit/web reads it.
ENDLESS = "/v1/events"
# A slash in a path parameter is another segment to the generator.
NASTY = HOSTILE.replace("/", "")
TOKEN = "a-token-for-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module", params=["open", "token"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedNode]:
    """A plugin that placed containers of each kind, and refused one."""
    directory = tmp_path_factory.mktemp("api")
    config = {}
    if request.param == "token":
        secret = directory / "token"
        secret.write_text(TOKEN)
        secret.chmod(0o600)
        config = {"http": {"tokenFile": str(secret)}}
    with EmbeddedNode(directory, config=config) as node:
        node.start()
        node.listed()
        node.owner()
        node.shared()
        node.free()
        node.listed(NASTY)
        with pytest.raises(PodOperationFailed):
            node.listed("refused", cpus="4000")
        until(node.plugin.responsive, "the HTTP server")  # comes up after the link
        yield node


def address(node: EmbeddedNode) -> str:
    return f"http://{node.plugin.address}"


def schema_of(node: EmbeddedNode) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{address(node)}/openapi.yaml", headers=HEADERS)


def test_every_operation_answers_as_documented(node: EmbeddedNode) -> None:
    """Status, headers and bodies, for good requests and bad ones, with and without a token."""
    schema = schema_of(node)
    seen = set()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path == ENDLESS:
            continue
        seen.add(operation.path)

        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(base_url=address(node), headers=HEADERS, timeout=20)

        ask()
    assert len(seen) >= 10


def test_what_is_there_is_answered_as_documented(node: EmbeddedNode) -> None:
    """Made-up names are mostly not there: these are."""
    schema = schema_of(node)
    for pod in ("owner", "listed", "shared", "free", "refused", NASTY):
        for path, more in (
            ("/v1/explain/{namespace}/{pod}", {}),
            ("/v1/explain/{namespace}/{pod}/{container}", {"container": "app"}),
        ):
            case = schema[path]["GET"].Case(
                path_parameters={"namespace": "default", "pod": pod, **more}
            )
            response = case.call(base_url=address(node), headers=HEADERS, timeout=20)
            assert response.status_code == 200, (pod, response.text)
            case.validate_response(response)
