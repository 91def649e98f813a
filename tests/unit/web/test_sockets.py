"""The unix socket: for whoever may open the file, beside the address that asks for a token."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from nri_numa.agent import http_api
from nri_numa.web.server import unix_listener
from tests.beds.http_view import Reply, get, in_loop, read_reply, serving


async def ask(path: Path, target: str) -> Reply:
    """GET over a unix socket, with a name for a host that is nobody's."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(f"GET {target} HTTP/1.1\r\nHost: agent.example\r\n\r\n".encode())
        return await read_reply(reader)
    finally:
        writer.close()
        await writer.wait_closed()


async def there(path: Path) -> None:
    async with asyncio.timeout(180):
        while not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
            await asyncio.sleep(0.01)


@in_loop
async def test_the_file_is_the_permission_and_the_address_needs_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token of sixteen")
    path = tmp_path / "agent.sock"
    files = {"socket": str(path), "token_file": str(tmp_path / "token")}
    async with serving(**files) as (_, address):
        await there(path)
        assert (await get(address, "/v1/status")).status == 401
        for target in ("/v1/status", "/v1/notices", "/v1/assignments", "/metrics"):
            assert (await ask(path, target)).status == 200


@in_loop
async def test_the_address_may_be_off(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    async with serving(address="off", socket=str(path)) as (server, _):
        await there(path)
        assert server.address is None
        assert (await ask(path, "/readyz")).status == 200


@in_loop
async def test_the_service_manager_may_listen_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it listens must be http.address: what that may be was checked."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        monkeypatch.setattr(os, "dup", lambda number, own=os.dup: own(opened.fileno()))
        name = f"127.0.0.1:{opened.getsockname()[1]}"
        async with serving(address=name) as (server, address):
            assert (await get(address, "/readyz")).status == 200
            with pytest.raises(OSError, match=f"ListenStream= of the socket unit is {name}"):
                server.listen_on_port(1)


def test_it_is_for_its_user_and_the_group_of_its_directory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 65534)
    path = tmp_path / "agent.sock"
    for _ in range(2):  # what an earlier process left is taken away
        unix_listener(str(path)).close()
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert status.st_gid == tmp_path.stat().st_gid


@in_loop
async def test_a_file_in_its_place_stays_and_is_named_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_api, "LISTEN_RETRY_S", 0.01)
    path = tmp_path / "agent.sock"
    path.write_text("precious")
    async with serving(socket=str(path)) as (_, address):
        assert (await get(address, "/healthz")).status == 200
        async with asyncio.timeout(180):
            while "http not " not in caplog.text:
                await asyncio.sleep(0.01)
        assert path.read_text() == "precious"
        path.unlink()
        await there(path)
        assert (await ask(path, "/healthz")).status == 200
    assert caplog.text.count("http not ") == 1


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix_listener(str(tmp_path / "missing/agent.sock"))


@in_loop
async def test_many_clients_of_the_socket_do_not_keep_others_out(tmp_path: Path) -> None:
    """All of them are one client when places are counted."""
    path = tmp_path / "agent.sock"
    silent: list[socket.socket] = []
    async with serving(socket=str(path)) as (_, address):
        await there(path)
        for _ in range(200):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect(str(path))
            silent.append(one)
        assert (await get(address, "/healthz")).status == 200
        assert (await get(address, "/v1/status")).status == 200
    for one in silent:
        one.close()
