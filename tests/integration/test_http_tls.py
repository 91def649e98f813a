"""HTTPS with a bearer token, as a node is scraped from elsewhere; and our own client."""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.config import HTTP
from nri_numa.http.server import HTTPServer
from nri_numa.metrics import Metrics
from tests.support.certificates import make_expired
from tests.support.http_view import FakeView

TOKEN = "0123456789abcdef0123456789abcdef"


def make_certificate(directory: Path, name: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A server in a thread of its own: its port, and the directory of its files."""
    make_certificate(tmp_path, "first")
    (tmp_path / "token").write_text(TOKEN + "\n")
    section = HTTP(
        address="127.0.0.1:0",
        token_file=str(tmp_path / "token"),
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )
    server = HTTPServer(section, FakeView(), Metrics("0"), version="0.1.0")
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        assert await server.start()
        started.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    assert server.address is not None
    yield server.address[1], tmp_path
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def ask(port: int, directory: Path, path: str, token: str = TOKEN) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=str(directory / "cert.pem"))
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
    """For the connection after the one that noticed it at the latest."""
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
    ask(port, previous, "/healthz")
    assert ask(port, directory, "/healthz")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, previous, "/healthz")


def test_the_command_line_speaks_https_with_a_token(served: tuple[int, Path]) -> None:
    port, directory = served
    options = ["--api", f"https://127.0.0.1:{port}", "--ca-file", str(directory / "cert.pem")]
    result = CliRunner().invoke(cli, ["status", *options])
    assert (result.exit_code, "wants a token: --token-file" in result.output) == (1, True)
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


def test_an_expired_certificate_is_said_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scraper that does not verify goes on, and the log says what is wrong with the others."""
    make_expired(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    section = HTTP(
        address="127.0.0.1:0",
        token_file=str(tmp_path / "token"),
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )

    def unverified(port: int) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        finally:
            connection.close()

    async def serve() -> int:
        server = HTTPServer(section, FakeView(), Metrics("0"), version="0.1.0")
        assert await server.start()
        assert server.address is not None
        try:
            return await asyncio.to_thread(unverified, server.address[1])
        finally:
            await server.stop()

    assert asyncio.run(serve()) == 200
    assert "certificate expired" in caplog.text
