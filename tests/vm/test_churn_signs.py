"""What a churn takes from the plugin: when it was in use, and whether its runtime hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.vm.churn_signs import LinkLog, cpu_seconds, unanswered

HUNG = b'{"ready":false,"reason":"the runtime has not answered a registration for 61 s"}\n'


def test_the_link_is_read_as_the_log_grows(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = LinkLog(file)
    assert not log.active_since(0)
    line = '{"time":"1970-01-01T00:0%d:00Z","msg":"link","state":"%s"}\n'
    file.write_text(line % (1, "active") + "a traceback\n" + (line % (2, "disconnected"))[:30])
    assert log.active_since(60)
    assert not log.active_since(61)
    file.write_text(line % (1, "active") + "a traceback\n" + line % (2, "disconnected"))
    assert not log.active_since(0)
    assert log.read() == [(60.0, "active"), (120.0, "disconnected")]


def test_who_stays_unpinned_is_known_until_synchronize_tries_again(tmp_path: Path) -> None:
    file = tmp_path / "log"
    active = '{"time":"1970-01-01T00:0%d:00Z","msg":"link","state":"active"}\n'
    problem = (
        '{"time":"1970-01-01T00:0%d:00Z","msg":"synchronize","problem":"started while we were away'
        ' and stays unpinned: pod default/isolate-42, container c0: cpu: 1 exclusive CPU needed"}\n'
    )
    file.write_text(active % 1 + problem % 2 + active % 2 + active % 3 + problem % 4 + active % 4)
    log = LinkLog(file)
    log.read()
    assert log.unpinned(300.0) == {"isolate-42/c0": [(120.0, 180.0), (240.0, 300.0)]}


class Ready(BaseHTTPRequestHandler):
    """Answers as the plugin does."""

    body = b""

    def do_GET(self) -> None:
        """Not ready, whatever is asked."""
        self.send_response(503)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a plugin."""
    server = HTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_runtime_that_does_not_answer_is_told_from_one_that_is_away(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ready, "body", HUNG)
    assert "has not answered a registration" in unanswered(address)
    monkeypatch.setattr(Ready, "body", b'{"ready":false,"reason":"the link is connecting"}\n')
    assert unanswered(address) == ""
    assert unanswered("127.0.0.1:1") == ""


def test_processor_time_is_that_of_programs_that_run() -> None:
    assert sum(cpu_seconds().values()) > 0
