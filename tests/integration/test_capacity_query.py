"""A real Prometheus is asked what capacity nodes have."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nri_numa.config.sections import PrometheusCapacityQuery as Query
from nri_numa.controller.capacity import CapacityReport
from nri_numa.controller.sources import PrometheusSource
from tests.beds.prometheus import PROGRAM, Prometheus

if PROGRAM is None:
    if os.environ.get("NRI_NUMA_REQUIRE_PROMETHEUS"):
        pytest.fail("prometheus is required and not installed", pytrace=False)
    pytest.skip("prometheus is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

SAMPLES = b"""\
offline{node="a",numa_node="0"} 0.25
offline{node="a",numa_node="1"} 0
offline{node="b",numa_node="0"} 1.5
offline{node="c",numa_node="0"} NaN
offline{node="d"} 0.5
"""


class _Exporter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(SAMPLES)))
        self.end_headers()
        self.wfile.write(SAMPLES)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    exporter = ThreadingHTTPServer(("127.0.0.1", 0), _Exporter)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    try:
        target = f"127.0.0.1:{exporter.server_address[1]}"
        with Prometheus(tmp_path_factory.mktemp("query"), [target], []) as made:
            made.until(lambda: len(made.query("offline")) == 5, "the samples to be there")
            yield made
    finally:
        exporter.shutdown()
        exporter.server_close()


class Heard:
    """What a query says."""

    def __init__(self, url: str, query: str) -> None:
        self.offers: list[CapacityReport] = []
        self.up: list[bool] = []
        source = PrometheusSource(Query(url=url, query=query), self._take, self.up.append)
        asyncio.run(source.poll_once())

    def _take(self, source: str, offers: Sequence[CapacityReport]) -> list[str]:
        self.offers = list(offers)
        return []


def test_sound_parts_of_answers_count(server: Prometheus, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard(server.url, "1 - offline")
    assert heard.offers == [CapacityReport("a", {0: 0.75, 1: 1.0})]
    assert heard.up == [True]
    assert len([r for r in caplog.records if r.message == "capacity source faulty"]) == 3


@pytest.mark.parametrize("query", ["1 -", "offline[1m]", "1"])
def test_a_query_that_tells_no_factors_is_said(server: Prometheus, query: str) -> None:
    heard = Heard(server.url, query)
    assert heard.offers == []
    assert heard.up == [False]
