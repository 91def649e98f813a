"""The HTTP server over a real loopback socket, with a made-up agent behind it."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.agent import http_api
from nri_numa.agent.http_api import AgentServer, SharedScrape
from nri_numa.config import HTTP
from nri_numa.errors import ConfigError
from nri_numa.observe.metrics import Metrics
from nri_numa.web import protocol
from nri_numa.web import server as server_module
from nri_numa.web.protocol import HTTPRequest
from nri_numa.web.responses import Assignment, Readiness, WholeNodeAllocation
from tests.beds.http_view import (
    FakeView,
    assignment,
    connected,
    exchange,
    get,
    in_loop,
    read_reply,
    serving,
)


class Counting(FakeView):
    """Counts how often it is asked whether it is ready."""

    asked = 0

    def readiness(self) -> Readiness:
        self.asked += 1
        return super().readiness()


async def has_places(server: AgentServer, count: int) -> None:
    """Wait until so many connections have a place."""
    while len(server._limiter) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 100, 1000])
@in_loop
async def test_a_list_made_in_pieces_is_one_document(count: int) -> None:
    """Whatever the number of containers, the pieces join to valid JSON with all of them."""
    view = FakeView([assignment(n) for n in range(count)])
    async with serving(view) as (_, address):
        for _ in range(2):  # made, and from the cache
            reply = await get(address, "/v1/assignments")
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert [c["pod"] for c in reply.json["containers"]] == [
                f"pod-{n}" for n in range(count)
            ]
            assert reply.json["serial"] == 7
            assert reply.json["numaNodes"][0]["memoryBytes"] == 1 << 34


@in_loop
async def test_metrics_come_whole_and_count_the_scrape() -> None:
    async with serving() as (_, address):
        await get(address, "/metrics")
        reply = await get(address, "/metrics")
        text = reply.body.decode()
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'nri_numa_http_requests_total{code="200",route="/metrics"} 2.0' in text
        assert "nri_numa_http_up 1.0" in text


def asked(target: bytes, more: bytes = b"", body: bytes = b"") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n" + body


CHUNKED = b"Content-Length: 40\r\nTransfer-Encoding: chunked\r\n"
STATUS = b"/v1/status"


@pytest.mark.parametrize(
    ("raw", "status", "reason"),
    [
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 421, "MisdirectedRequest"),
        (asked(b"/nowhere"), 404, "NotFound"),
        (asked(b"/v1/explain//pod"), 404, "NotFound"),
        (asked(b"/../etc/passwd"), 404, "NotFound"),
        (asked(b"/v1/status?x=1"), 400, "BadRequest"),
        (asked(b"/v1/explain/%ff/pod"), 400, "BadRequest"),
        (asked(b"/" + b"x" * 5000), 400, "BadRequest"),
        (asked(b"http://evil/"), 400, "BadRequest"),
        (b"DELETE /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "MethodNotAllowed"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "BadRequest"),
        (b"GET /v1/status HTTP/1.1\r\n\r\n", 400, "BadRequest"),
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400, "BadRequest"),
        (asked(STATUS, b"Content-Length: 9999\r\n", b"x" * 9999), 413, "BodyTooLarge"),
        (asked(STATUS, b"Content-Length: 5\r\nExpect: 100-continue\r\n"), 413, "BodyTooLarge"),
        (asked(b"/", b"X: " + b"y" * 60000 + b"\r\n"), 431, "BadRequest"),
        (asked(b"/", b"X: " + b"y" * 17000 + b"\r\n"), 431, "BadRequest"),
        (asked(b"/", CHUNKED, b"0\r\n\r\n" + asked(b"/readyz")), 400, "BadRequest"),
    ],
)
@in_loop
async def test_bad_requests_get_an_error_document(raw: bytes, status: int, reason: str) -> None:
    """Whatever comes in, the answer is an error in our form and the server goes on."""
    async with serving() as (_, address):
        reply = await exchange(address, raw)
        assert (reply.status, reply.json["error"]["reason"]) == (status, reason)
        assert reply.json["error"]["message"]
        assert (await get(address, "/healthz")).status == 200


@in_loop
async def test_an_old_path_names_the_new_one() -> None:
    async with serving() as (_, address):
        reply = await get(address, "/v1/refusals")
        assert (reply.status, reply.json["error"]["reason"]) == (404, "NotFound")
        assert reply.json["error"]["message"] == "this path is gone, expected /v1/rejections"


@in_loop
async def test_a_mistake_of_ours_is_a_500_and_not_the_end() -> None:
    async with serving(FakeView(broken=True)) as (_, address):
        reply = await get(address, "/v2/system/numa/info")
        assert (reply.status, reply.json["error"]["reason"]) == (500, "Internal")
        assert "a bug" not in reply.json["error"]["message"]
        assert (await get(address, "/healthz")).status == 200


@in_loop
async def test_head_answers_without_a_body_and_the_connection_stays() -> None:
    async with serving() as (_, address), connected(address) as (reader, writer):
        for path in (b"/v1/status", b"/v1/assignments", b"/v1/events", b"/healthz"):
            writer.write(b"HEAD " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await read_reply(reader, head=True)).status == 200
        writer.write(asked(b"/healthz"))
        assert (await read_reply(reader)).body == b"ok\n"


@in_loop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as (_, address), connected(address) as (reader, writer):
        one = asked(b"/healthz")
        two = asked(b"/readyz")
        writer.write(one + two + one)
        bodies = [(await read_reply(reader)).body for _ in range(3)]
        assert bodies == [b"ok\n", b'{"ready":true,"reason":""}\n', b"ok\n"]


@in_loop
async def test_the_token_guards_everything_but_the_probes(tmp_path: Path) -> None:
    """And a changed token file counts from the next request on."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    async with serving(token_file=str(token)) as (_, address):
        assert (await get(address, "/healthz")).status == 200
        assert (await get(address, "/readyz")).status == 200
        for path in ("/metrics", "/v1/assignments", "/v1/events", "/nowhere"):
            reply = await get(address, path)
            assert (reply.status, reply.json["error"]["reason"]) == (401, "Unauthorized")
            assert reply.headers["www-authenticate"].startswith("Bearer")
        ok = {"Authorization": "Bearer 0123456789abcdef"}
        assert (await get(address, "/v1/status", **ok)).status == 200
        wrong = {"Authorization": "Bearer 0123456789abcdeX"}
        assert (await get(address, "/v1/status", **wrong)).status == 401
        token.write_text("fedcba9876543210-new\n")
        assert (await get(address, "/v1/status", **ok)).status == 401
        new = {"Authorization": "bearer fedcba9876543210-new"}
        assert (await get(address, "/v1/status", **new)).status == 200
        token.unlink()  # a rotation half done keeps the last token
        assert (await get(address, "/v1/status", **new)).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer 0",
        "Bearer 0123456789abcde",
        "Bearer 0123456789abcdef0",
        "Bearer 0123456789ABCDEF",
        "Bearer 0123456789abcdef 0123456789abcdef",
        "Basic 0123456789abcdef",
        "0123456789abcdef",
    ],
)
@in_loop
async def test_what_only_resembles_the_token_is_turned_away(tmp_path: Path, header: str) -> None:
    """Nothing, a beginning of it, more than it, and another scheme."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    async with serving(token_file=str(token)) as (_, address):
        assert (await get(address, "/v1/status", Authorization=header)).status == 401


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        *((content, ["token_file"]) for content in (None, "", "   \n", "short")),
        ("nonsense", ["tls_cert", "tls_key"]),
    ],
)
def test_an_unusable_token_or_certificate_is_a_configuration_error(
    tmp_path: Path, content: str | None, keys: list[str]
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    section = HTTP(address="127.0.0.1:0", **dict.fromkeys(keys, str(file)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"http\.{'tokenFile' if len(keys) == 1 else 'tlsCert'}"):
        AgentServer(section, FakeView(), Metrics("0"))


@in_loop
async def test_a_taken_port_is_said_and_taken_over_when_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers are placed without HTTP meanwhile, so this must not be an exception."""
    monkeypatch.setattr(http_api, "LISTEN_RETRY_S", 0.01)
    blocker = socket.socket()
    blocker.bind(("127.0.0.1", 0))
    blocker.listen()
    port = blocker.getsockname()[1]
    metrics = Metrics("0")
    server = AgentServer(HTTP(address=f"127.0.0.1:{port}"), FakeView(), metrics)
    task = asyncio.create_task(server.run())
    while "http not " not in caplog.text:
        await asyncio.sleep(0)
    assert "nri_numa_http_up 0.0" in metrics.render_metrics()
    blocker.close()
    while server.address is None:
        await asyncio.sleep(0.01)
    assert (await get(server.address, "/healthz")).status == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "nri_numa_http_up 0.0" in metrics.render_metrics()


@in_loop
async def test_events_tell_where_we_are_and_every_change_and_end_cleanly() -> None:
    """While nobody listens the agent has no listener of ours either."""
    view = FakeView()
    async with serving(view) as (_, address):
        assert view.listeners == []
        async with connected(address) as (reader, writer):
            writer.write(asked(b"/v1/events"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"text/event-stream" in head

            async def state() -> dict[str, object]:
                while not (line := await reader.readline()).startswith(b"data: "):
                    pass
                return dict(json.loads(line.removeprefix(b"data: ")))

            assert await state() == {"serial": 7, "version": "0.1.0", "ready": True, "notices": 0}
            assert len(view.listeners) == 1
            view.changed()
            view.changed()
            assert (await state())["serial"] == 9
            writer.close()
            while view.listeners:
                view.changed()
                await asyncio.sleep(0.01)


@in_loop
async def test_idle_streams_get_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a proxy would cut the line and the page would call the link lost."""
    monkeypatch.setattr(http_api, "HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(http_api, "CHANGE_DEBOUNCE_S", 0.0)
    async with serving() as (_, address), connected(address) as (reader, writer):
        writer.write(asked(b"/v1/events"))
        await reader.readuntil(b": still here")
        await reader.readuntil(b": still here")


@in_loop
async def test_too_many_streams_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "MAX_EVENT_STREAMS", 1)
    async with serving() as (_, address), connected(address) as (reader, writer):
        writer.write(asked(b"/v1/events"))
        await reader.readuntil(b"event: state")
        reply = await get(address, "/v1/events")
        assert (reply.status, reply.json["error"]["reason"]) == (503, "Busy")


@in_loop
async def test_when_all_places_are_taken_probes_alone_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is attacked must not be restarted by the kubelet for it."""
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 1)
    async with serving() as (server, address), connected(address) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\n")  # and no end of it
        await has_places(server, 1)
        for path in ("/healthz", "/readyz"):
            reply = await get(address, path)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        reply = await get(address, "/v1/status")
        assert (reply.status, reply.json["error"]["reason"]) == (503, "Busy")
        writer.write(b"Host: localhost\r\n\r\n")
        assert (await read_reply(reader)).status == 200


@in_loop
async def test_who_waits_between_two_requests_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 1)
    async with serving() as (_, address), connected(address) as (reader, writer):
        writer.write(asked(b"/healthz"))
        await read_reply(reader)
        assert (await get(address, "/v1/status")).status == 200
        assert await reader.read() == b""


@in_loop
async def test_the_reserve_is_for_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sits there and says nothing is gone when the next one comes."""
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 1)
    monkeypatch.setattr(server_module, "MAX_RESERVE_CONNECTIONS", 1)
    async with serving() as (server, address), connected(address) as (_, first):
        first.write(b"GET /hea")
        async with connected(address) as (silent, _):
            await has_places(server, 2)
            assert (await get(address, "/healthz")).status == 200
            assert await silent.read() == b""
        assert (await get(address, "/healthz")).status == 200


@in_loop
async def test_one_connection_gets_a_number_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants more connects again, and stands in line with the others."""
    monkeypatch.setattr(server_module, "MAX_REQUESTS_PER_CONNECTION", 3)
    async with serving() as (_, address), connected(address) as (reader, writer):
        writer.write(asked(b"/healthz") * 10)
        replies = [await read_reply(reader) for _ in range(3)]
        assert [reply.headers.get("connection") for reply in replies] == [None, None, "close"]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await read_reply(reader)


@in_loop
async def test_pipelined_requests_take_turns_with_those_of_others() -> None:
    """Between two answers of one connection everybody else has a turn."""
    view = Counting()
    async with serving(view) as (_, address), connected(address) as (_, greedy):
        greedy.write(asked(b"/readyz") * 300)
        await greedy.drain()
        assert (await get(address, "/v1/numa")).status == 404
        assert view.asked < 300


@contextlib.contextmanager
def unread(where: tuple[str, int] | str, count: int, said: bytes) -> Iterator[socket.socket]:
    """The last of clients that say something and read no answer; they connect at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            kind = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
            client = stack.enter_context(socket.socket(kind))
            client.connect(where)
            client.sendall(said)
        client.setblocking(False)
        yield client


class Watched(AgentServer):
    """Counts its answers."""

    count = 0

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        self.count += 1
        super().on_request_answered(request, status)


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("begun", [0, 50])
@pytest.mark.parametrize(
    "said",
    [
        asked(b"/healthz") * 60,  # no kubelet asks twice at once
        asked(b"/v1/status"),
        asked(b"/v1/assignments"),
        b"GET /v1/status HTTP/1.1\r\n",  # and no end of it
        b"HELO\r\n\r\n",
    ],
)
@in_loop
async def test_probes_overtake_others(tmp_path: Path, said: bytes, begun: int, unix: bool) -> None:
    """Polite or not, in the kernel's queue or in the midst of answers: few are answered first."""
    path = str(tmp_path / "http.sock")
    config = HTTP(address="127.0.0.1:0", socket=path)
    view = FakeView([assignment(n) for n in range(500)])
    server = Watched(config, view, Metrics("0"))
    await server.start()
    while not Path(path).exists():
        await asyncio.sleep(0)
    where = path if unix else server.address or ("", 0)
    with unread(where, 200, said):
        for _ in range(begun):
            await asyncio.sleep(0)
        before = server.count
        with unread(where, 1, asked(b"/healthz")) as probe:
            answer = await asyncio.get_running_loop().sock_recv(probe, 100)
        assert answer.startswith(b"HTTP/1.1 200")
        assert server.count - before <= 20
    await server.stop()


@in_loop
async def test_it_is_crowded_while_newcomers_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after the end of a server: its successor begins without hurry."""
    crowded: list[bool] = []
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 2)
    async with serving(more={"crowded": crowded.append}) as (server, address):
        many = [socket.create_connection(address) for _ in range(2)]
        await has_places(server, 2)
        assert crowded[-1] is False
        many.append(socket.create_connection(address))
        await has_places(server, 3)
        assert crowded[-1] is True
    assert crowded[-1] is False
    for one in many:
        one.close()


BEGUN = b"GET /healthz HTTP/1.1"
WITH_BODY = asked(b"/healthz", b"Content-Length: 4000\r\n")


@pytest.mark.parametrize(
    ("first", "then", "trickles"),
    [
        (asked(b"/healthz") + BEGUN, b"", True),
        (asked(b"/healthz"), WITH_BODY, True),
        (asked(b"/healthz") + BEGUN, b"", False),  # what came along has begun if nothing follows
    ],
)
@in_loop
async def test_a_request_that_trickles_in_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes, trickles: bool
) -> None:
    """A byte now and then, of a body too, buys no more time; a second request has no less."""
    monkeypatch.setattr(protocol, "REQUEST_TIMEOUT_S", 0.3)
    async with serving() as (_, address), connected(address) as (reader, writer):
        writer.write(first)
        assert (await read_reply(reader)).status == 200
        writer.write(then)
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            writer.write(b"x" * trickles)
            await asyncio.sleep(0.02)
        # Closed, or reset because of the byte that was on its way.
        assert isinstance(rest.exception(), ConnectionResetError) or rest.result() == b""


@in_loop
async def test_running_out_of_files_is_said_once_and_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "EXHAUSTION_RETRY_S", 0.001)
    async with serving() as (_, address):
        failures = iter(range(20))
        accept = socket.socket.accept

        def exhausted(listener: socket.socket) -> object:
            for _ in failures:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", exhausted)
        assert (await get(address, "/healthz")).status == 200
        assert (await get(address, "/healthz")).status == 200
    said = [r for r in caplog.records if "connections not accepted" in r.getMessage()]
    assert len(said) == 1


@in_loop
async def test_a_loop_that_is_stuck_is_not_healthy() -> None:
    """HTTP lives in a thread of its own: that it answers says nothing of the other one."""
    busy = 0.0
    async with serving(more={"busy_seconds": lambda: busy}) as (_, address):
        assert (await get(address, "/healthz")).status == 200
        busy = 12.0
        reply = await get(address, "/healthz")
        assert (reply.status, b"blocked for 12 s" in reply.body) == (503, True)


@in_loop
async def test_loopback_refuses_names_that_dns_could_point_at_it() -> None:
    """A web page elsewhere must not read the node's pods through its visitor's browser."""
    async with serving() as (_, address):
        for host, status in (
            ("localhost:9891", 200),
            ("127.0.0.1", 200),
            ("[::1]:9891", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil.example:9891", 421),
        ):
            assert (await get(address, "/v1/status", Host=host)).status == status, host


def test_the_runtime_goes_first_between_two_answers_and_two_pieces() -> None:
    """Nothing that a client asks for takes longer than one of these without a look around."""
    order: list[str] = []

    class Looking(selectors.DefaultSelector):
        """Where the loop of the real server gives way."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            order.append("way")
            return super().select(timeout)

    async def test() -> None:
        class Watched(FakeView):
            def list_assignments(self) -> tuple[WholeNodeAllocation, Iterator[Assignment]]:
                head, containers = super().list_assignments()

                def watched() -> Iterator[Assignment]:
                    for one in containers:
                        order.append("container")
                        yield one

                return head, watched()

            def readiness(self) -> Readiness:
                order.append("ready")
                return super().readiness()

        async with serving(Watched([assignment(n) for n in range(30)])) as (_, address):
            assert (await get(address, "/v1/assignments")).status == 200
            async with connected(address) as (reader, writer):
                writer.write(asked(b"/readyz") * 20)
                for _ in range(20):
                    await read_reply(reader)
        told = "".join(one[0] for one in order)
        assert "c" * 11 not in told
        assert "rr" not in told

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Looking())) as runner:
        runner.run(asyncio.wait_for(test(), 180))


@in_loop
async def test_clients_take_half_of_the_files_that_may_be_open_at_most() -> None:
    """The checkpoint and the runtime's socket need some too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What other tests of this process have open must not be what runs out here.
    quarter = 50 + len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * quarter, before[1]))
    try:
        async with serving() as (server, address):
            others = [socket.create_connection(address) for _ in range(quarter + 10)]
            await has_places(server, quarter + 10)
            assert (server._limiter.limit, server._limiter.reserve) == (quarter, quarter)
            assert (await get(address, "/healthz")).status == 200
            assert (await get(address, "/v1/status")).status == 503
            for other in others:
                other.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@in_loop
async def test_scrapes_at_the_same_time_are_made_once() -> None:
    """And whoever asks while one is being made gets a newer one: nothing is told late."""
    made: list[int] = []

    def chunks() -> Iterator[bytes]:
        number = len(made)
        made.append(0)
        for _ in range(5):
            made[number] += 1
            yield f"{number} ".encode() * 10_000

    scrape = SharedScrape(chunks)

    async def whole() -> bytes:
        return b"".join([piece async for piece in scrape.stream_text()])

    first = asyncio.ensure_future(whole())
    while not made:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(whole()) for _ in range(20)]
    gone = asyncio.ensure_future(whole())
    await asyncio.sleep(0)
    gone.cancel()  # a client that leaves takes nothing from the others
    assert await first == b"0 " * 50_000
    assert {await one for one in later} == {b"1 " * 50_000}
    assert await whole() == b"2 " * 50_000
    assert made == [5, 5, 5]


@in_loop
async def test_a_scrape_that_fails_fails_for_those_who_asked_and_is_tried_again() -> None:
    tries = iter((True, False))

    def chunks() -> Iterator[bytes]:
        yield b"some"
        if next(tries):
            raise RuntimeError("a bug")

    scrape = SharedScrape(chunks)
    with pytest.raises(RuntimeError, match="a bug"):
        await anext(scrape.stream_text())
    assert await anext(scrape.stream_text()) == b"some"
