"""The API without sockets: pieces, caching, and what a client may send."""

import asyncio
import json

import pytest

from nri_numa.agent.http_api import API
from nri_numa.observe.metrics import Metrics
from nri_numa.web.protocol import APIError, HTTPRequest, Response, resolve_route
from tests.beds.http_view import FakeView, assignment


def api(view: FakeView) -> API:
    return API(view, Metrics("0"))


def ask(server: API, target: str) -> Response:
    request = HTTPRequest.from_method_and_target("GET", target.encode())
    answer = resolve_route(server.routes, request).answer(request)
    assert isinstance(answer, Response)
    return answer


async def pieces(response: Response) -> list[bytes]:
    assert not isinstance(response.body, bytes)
    return [piece async for piece in response.body]


@pytest.mark.parametrize(
    ("query", "least", "found"),
    [
        ("", 100, 1000),
        ("?namespace=shop&pod=pod-999", 20, 1),
        ("?namespace=infra&pod=pod-999", 20, 0),
    ],
)
def test_a_long_list_comes_in_short_pieces(query: str, least: int, found: int) -> None:
    """The loop gets its turn after at most ten containers, however many there are."""
    view = FakeView([assignment(n) for n in range(1000)])
    made = asyncio.run(pieces(ask(api(view), f"/v1/assignments{query}")))
    assert len(made) > least
    assert max(piece.count(b'"podUID"') for piece in made) <= 10
    assert len(json.loads(b"".join(made))["containers"]) == found


def test_a_change_in_the_middle_of_an_answer_does_not_mix_two_states() -> None:
    view = FakeView([assignment(n) for n in range(200)])
    server = api(view)

    async def interrupted() -> bytes:
        body = b""
        async for piece in ask(server, "/v1/assignments").body:  # type: ignore[union-attr]
            body += piece
            view.changed()
        return body

    first = json.loads(asyncio.run(interrupted()))
    assert (first["serial"], len(first["containers"])) == (7, 200)
    view.containers.clear()
    again = json.loads(b"".join(asyncio.run(pieces(ask(server, "/v1/assignments")))))
    assert again["containers"] == []


@pytest.mark.parametrize("target", [b"*", b"nothing", b"/%zz%ff", b"/?a=%ff", b"/" + b"a" * 9999])
def test_targets_that_no_client_of_ours_sends_are_rejected(target: bytes) -> None:
    with pytest.raises(APIError):
        HTTPRequest.from_method_and_target("GET", target)
