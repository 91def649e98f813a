"""2,000 connections at each sort of our HTTP servers: probes are answered, memory has an end."""

import contextlib
import re
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.certificates import make_certificate
from tests.beds.fake_api_server import FakeAPIServer, Said
from tests.beds.plugin_process import free_port, plugin_environment

CONNECTIONS = 2000
MOST_KB = 150 << 10
"""A third of the memory limit of the manifests."""
HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
AGENT = """
import asyncio, sys
from nri_numa.config import HTTP
from nri_numa.agent.http_api import AgentServer
from nri_numa.observe.metrics import Metrics
from tests.beds.http_view import FakeView
config = HTTP(address=sys.argv[1], tls_cert="cert.pem", tls_key="key.pem")
asyncio.run(AgentServer(config, FakeView(), Metrics("0")).run())
"""


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """As many open files as an ordinary user may have: a shell begins with 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def serving(kind: str, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, bool]]:
    """A server as a process of its own, its port, and whether it speaks TLS."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    tls = kind != "publish"
    if kind == "agent":
        arguments = ["-c", AGENT, address]
    else:
        arguments = ["-m", "nri_numa", kind, "--config", str(directory / "config.yaml")]
        files = f"tlsCert: {directory}/cert.pem, tlsKey: {directory}/key.pem, " if tls else ""
        if kind == "scheduler":
            files += f"clientCA: {directory}/cert.pem, "
        section = f"{{address: '{address}', {files}credentialsDir: {directory}}}"
        (directory / "config.yaml").write_text(
            f"http: {{socket: {directory}/agent.sock}}\n{kind}: {section}\n"
        )
    with (
        FakeAPIServer(directory, lambda asked: Said(503)) as api,
        open(directory / "log", "wb") as log,
    ):
        environment = plugin_environment({"NODE_NAME": "n1", **api.environment()})
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=directory, env=environment, stdout=log, stderr=log
        )
        try:
            while True:
                assert process.poll() is None, (directory / "log").read_text()
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), 10).close()
                    break
            yield process, port, tls
        finally:
            process.kill()
            process.wait()


def probe(port: int, directory: Path, *, tls: bool, source: str) -> int:
    stream = socket.create_connection(("127.0.0.1", port), 10, (source, 0))
    if tls:
        context = ssl.create_default_context(cafile=str(directory / "cert.pem"))
        stream = context.wrap_socket(stream, server_hostname="127.0.0.1")
    with stream:
        stream.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return int(stream.recv(1000).split()[1])


def connect(port: int, context: ssl.SSLContext | None) -> socket.socket:
    """A connection that nothing waits for."""
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", port))
    if context is None:
        return made
    return context.wrap_socket(made, server_hostname="127.0.0.1", do_handshake_on_connect=False)


def go_on(client: socket.socket) -> None:
    """As far as it gets into a handshake, and then half of a request."""
    with contextlib.suppress(OSError):
        if isinstance(client, ssl.SSLSocket):
            client.do_handshake()
        client.send(HALF)


def peak_kb(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0])


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("kind", ["agent", "publish", "scheduler"])
def test_probes_are_answered_and_memory_has_an_end(kind: str, silent: bool, tmp_path: Path) -> None:
    make_certificate(tmp_path, "test")
    clients: list[socket.socket] = []
    try:
        with serving(kind, tmp_path) as (process, port, tls):
            context = ssl.create_default_context(cafile=f"{tmp_path}/cert.pem") if tls else None
            for number in range(1, CONNECTIONS + 1):
                clients.append(connect(port, context))
                if number % 100:
                    continue
                for source in ("127.0.0.1", "127.0.0.2"):  # the clients' address, and another one
                    if not silent:
                        for client in clients[-100:]:
                            go_on(client)
                    assert probe(port, tmp_path, tls=tls, source=source) == 200
            assert peak_kb(process) <= MOST_KB
    finally:
        for client in clients:
            client.close()
