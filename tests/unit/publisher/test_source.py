"""The agent's answers as its publisher reads them, and answers that nobody can read."""

import asyncio
from pathlib import Path

import pytest

from nri_numa.agent.http_api import AgentServer
from nri_numa.config import HTTP
from nri_numa.observe.metrics import Metrics
from nri_numa.publisher.source import AgentSource, AgentUnavailable
from nri_numa.web.responses import Assignments, Notices
from tests.beds.http_view import FakeView
from tests.beds.stepped_loop import until


@pytest.mark.parametrize("body", [b'{"instance":"\xff"}', b"\xed\xa0\x80", b"[1]", b""])
async def test_what_is_no_document_of_the_agent_is_no_agent(tmp_path: Path, body: bytes) -> None:
    """One sentence, after which the publisher asks again; bytes that are no text included."""
    path = str(tmp_path / "s")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    source = AgentSource(path)
    async with await asyncio.start_unix_server(answer, path):
        with pytest.raises(AgentUnavailable, match="something else than expected"):
            await source.read_document(Notices, "/v1/notices?after=0")
        await source.close()


async def test_changes_that_came_meanwhile_are_one(tmp_path: Path) -> None:
    """Else the publisher reads the agent for minutes after a minute with many pods."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        said = b"".join(b'data: {"serial":%d,"notices":0}\n\n' % n for n in range(50))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said)
        writer.close()

    source = AgentSource(str(tmp_path / "s"))
    async with await asyncio.start_unix_server(answer, str(tmp_path / "s")):
        changes = source.watch_changes()
        assert (await anext(changes)).serial == 49
        with pytest.raises(AgentUnavailable, match="ended the stream"):
            await anext(changes)
        await source.close()


async def test_proxies_and_authorities_of_the_environment_are_not_for_the_agents_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "not there"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    socket = str(tmp_path / "s")
    server = AgentServer(HTTP(address="off", socket=socket), FakeView(), Metrics("1"))
    await server.start()
    await until(Path(socket).exists)
    source = AgentSource(socket)
    assert (await source.read_document(Assignments)).containers
    await source.close()
    await server.stop()
