"""An API server that answers what a test tells it to, over TLS, in threads of its own.

For tests of the client itself; processes have `tests.beds.cluster_objects`.
"""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.beds.certificates import make_certificate
from tests.beds.processes import ProcessBed


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    authorization: str
    content_type: str
    body: dict[str, Any]
    accept: str = ""


@dataclass(frozen=True)
class Said:
    """One answer; a text that is no JSON goes out as it is.

    Each piece of a `stream` goes out in a chunk and a TLS record of its own, as the events of a
    watch do.
    """

    status: int = 200
    body: dict[str, Any] | str = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    stream: Iterable[bytes] | None = None


def status(code: int, message: str, *causes: str, **headers: str) -> Said:
    """An answer of kind Status, as an API server says no."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "code": code,
        "details": {"causes": [{"reason": one, "message": message} for one in causes]},
    }
    return Said(code, body, {name.replace("_", "-"): text for name, text in headers.items()})


class FakeAPIServer(ProcessBed):
    """A context manager that listens on loopback.

    Args:
        directory: for its certificate; becomes the directory of credentials.
    """

    def __init__(self, directory: Path, answer: Callable[[Asked], Said]) -> None:
        self.directory = directory
        self.answer = answer
        self.skew = 0.0  # seconds that its clock is ahead
        self.asked: list[Asked] = []
        make_certificate(directory, "fake", ("ca.crt", "key"))
        (directory / "token").write_text("first")
        (directory / "namespace").write_text("nri-numa")
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (OSError, ssl.SSLError):
                    self.close_connection = True

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                text = self.rfile.read(length)
                asked = Asked(
                    self.command,
                    self.path,
                    self.headers.get("Authorization", ""),
                    self.headers.get("Content-Type", ""),
                    json.loads(text) if text else {},
                    self.headers.get("Accept", ""),
                )
                fake.asked.append(asked)
                said = fake.answer(asked)
                plain = isinstance(said.body, str)
                data = str(said.body).encode() if plain else json.dumps(said.body).encode()
                self.send_response_only(said.status)
                self.send_header("Date", formatdate(time.time() + fake.skew, usegmt=True))
                self.send_header("Content-Type", "text/plain" if plain else "application/json")
                if said.stream is None:
                    self.send_header("Content-Length", str(len(data)))
                else:
                    self.send_header("Transfer-Encoding", "chunked")
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if said.stream is None:
                    self.wfile.write(data)
                    return
                for piece in chain(said.stream, [b""]):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

            do_GET = do_POST = do_PATCH = do_PUT = _any

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that does not trust us is what some tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "ca.crt", directory / "key")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = int(self._server.server_address[1])

    def start(self) -> None:
        # It looks so often whether it is to end, which is waited for; half a second otherwise.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}


@contextmanager
def fake(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Asked], Said]
) -> Iterator[FakeAPIServer]:
    """An API server, and an environment as in a pod that is to talk to it."""
    with FakeAPIServer(directory, answer) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
