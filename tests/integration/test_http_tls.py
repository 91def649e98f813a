"""HTTPS with a bearer token, as a node is scraped from elsewhere; and our own client."""

import asyncio
import contextlib
import gc
import http.client
import os
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.web import protocol
from nri_numa.web import server as server_module
from tests.beds import http_view
from tests.beds.certificates import make_certificate, make_expired
from tests.beds.http_view import in_loop, serving

TOKEN = "0123456789abcdef0123456789abcdef"


def certified(directory: Path, token: str = "") -> dict[str, str]:
    """Keys of the configuration for the certificate in a directory, and for a token."""
    files = {"tls_cert": str(directory / "cert.pem"), "tls_key": str(directory / "key.pem")}
    if token:
        (directory / "token").write_text(token + "\n")
        files["token_file"] = str(directory / "token")
    return files


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A server in a thread of its own: its port, and the directory of its files."""
    make_certificate(tmp_path, "first")
    with http_view.served(**certified(tmp_path, TOKEN)) as (_, port):
        yield port, tmp_path


def ask(
    port: int, directory: Path, path: str, token: str = TOKEN, *, verified: bool = True
) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=str(directory / "cert.pem"))
    if not verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_the_api_is_served_over_tls_to_whoever_has_the_token(served: tuple[int, Path]) -> None:
    port, directory = served
    assert ask(port, directory, "/v1/assignments")[0] == 200
    assert ask(port, directory, "/v1/assignments", "wrong")[0] == 401


def test_a_renewed_certificate_is_used_without_a_restart(served: tuple[int, Path]) -> None:
    """For the next connection already."""
    port, directory = served
    assert ask(port, directory, "/healthz")[0] == 200
    old = (directory / "cert.pem").read_bytes()
    make_certificate(directory, "second")
    os.utime(directory / "cert.pem", ns=(1, 1))  # whatever the clock's resolution, it changed
    new = (directory / "cert.pem").read_bytes()
    (directory / "cert.pem").write_bytes(new)
    previous = directory / "old"
    previous.mkdir()
    (previous / "cert.pem").write_bytes(old)
    assert ask(port, directory, "/healthz")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, previous, "/healthz")


def test_the_command_line_speaks_https_with_a_token(served: tuple[int, Path]) -> None:
    port, directory = served
    options = ["--api", f"https://127.0.0.1:{port}", "--ca-file", str(directory / "cert.pem")]
    result = CliRunner().invoke(cli, ["status", *options])
    assert (result.exit_code, "requires a token: --token-file" in result.output) == (1, True)
    result = CliRunner().invoke(cli, ["status", *options, "--token-file", str(directory / "token")])
    assert result.exit_code == 0, result.output
    # Without the authority nothing is sent to whoever answers.
    result = CliRunner().invoke(cli, ["status", "--api", f"https://127.0.0.1:{port}"])
    assert (result.exit_code, "certificate" in result.output) == (3, True)


def test_plain_http_at_a_tls_port_is_turned_away(served: tuple[int, Path]) -> None:
    port, directory = served
    result = CliRunner().invoke(cli, ["status", "--api", f"127.0.0.1:{port}"])
    assert result.exit_code == 3
    assert ask(port, directory, "/healthz")[0] == 200


def test_an_expired_certificate_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scraper that does not verify goes on, and the log says what is wrong with the others."""
    make_expired(tmp_path)
    with http_view.served(**certified(tmp_path, TOKEN)) as (_, port):
        assert ask(port, tmp_path, "/healthz", verified=False)[0] == 200
    assert "certificate expired" in caplog.text


def held(kind: str) -> int:
    """Objects of a class that are alive, found without collecting those that are garbage."""
    return sum(type(one).__name__ == kind for one in gc.get_objects())


@pytest.mark.parametrize("greeting", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_handshakes_that_come_to_nothing_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    """The plugin's collector looks at old objects every ten minutes; they must not wait for it."""
    monkeypatch.setattr(protocol, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 8)
    make_certificate(tmp_path, "first")

    async def one(address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(greeting)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def serve() -> None:
        async with serving(**certified(tmp_path)) as (server, address):
            for _ in range(4):
                await asyncio.gather(*(one(address) for _ in range(8)))
            while len(server._limiter):
                await asyncio.sleep(0.01)
            # A transport ends some rounds after its place is free, and what was leaked stays.
            async with asyncio.timeout(30):
                while held("SSLProtocol") > 2:  # the latest may not be forgotten yet
                    await asyncio.sleep(0.01)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(serve())
    finally:
        gc.enable()


@in_loop
async def test_silence_never_gets_to_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places are taken by whoever came first; a probe is answered, over TLS, all the same."""
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 4)
    monkeypatch.setattr(server_module, "MAX_RESERVE_CONNECTIONS", 8)
    make_certificate(tmp_path, "first")
    async with serving(**certified(tmp_path)) as (server, address):
        silent = [await asyncio.open_connection(*address) for _ in range(40)]
        while len(server._limiter) < 12:
            await asyncio.sleep(0.01)
        gc.collect()  # what clients of other tests left
        assert held("SSLProtocol") == 0
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        for _, other in silent:
            other.close()


@in_loop
async def test_a_probe_overtakes_clients_that_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has hundreds of requests there; nothing is wrong where one loses its place."""
    monkeypatch.setattr(server_module, "MAX_ORDINARY_CONNECTIONS", 24)
    make_certificate(tmp_path, "first")
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    request = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving(**certified(tmp_path)) as (server, address), AsyncExitStack() as stack:
        counted = server._metrics.http_requests.labels("/v1/status", "200")._value
        for _ in range(24):
            _, writer = await asyncio.open_connection(*address, ssl=context, limit=1)
            writer.write(request % b"/v1/status" * 300)
            stack.callback(writer.transport.abort)
        before = counted.get()
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        stack.callback(writer.transport.abort)
        writer.write(request % b"/healthz")
        assert (await reader.readline()).split()[1] == b"200"
        assert counted.get() - before <= 60  # one in a round; 24 in each were 250
        for _ in range(4):  # of another address: it has fewer connections
            other = await asyncio.open_connection(
                *address, ssl=context, local_addr=("127.0.0.2", 0)
            )
            stack.callback(other[1].transport.abort)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
