"""The metrics library is imported without its servers, and nobody else notices."""

import subprocess
import sys

import pytest

CODE = """
import sys
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.metrics import UNUSED_MODULES
assert not [name for name in UNUSED_MODULES if name in sys.modules], sorted(sys.modules)
metrics = Metrics("1")
metrics.internal_errors.inc()
assert "nri_numa_internal_errors_total 1.0" in metrics.render_metrics()
# Whoever needs them all the same gets the real ones.
import gzip, http.server, socketserver, urllib.request, wsgiref.simple_server
assert gzip.decompress(gzip.compress(b"text")) == b"text"
assert issubclass(http.server.HTTPServer, socketserver.TCPServer)
assert issubclass(wsgiref.simple_server.WSGIServer, http.server.HTTPServer)
assert urllib.request.Request("http://localhost/x").selector == "/x"
"""

ALREADY = """
import http.server, prometheus_client.exposition, urllib.request
"""
WANTS_MORE = """
import sys
from nri_numa.observe import logs
class Finder:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name == "prometheus_client.exposition" and not self.asked:
            self.asked += 1
            raise AttributeError("wants more")
sys.meta_path.insert(0, Finder())
"""
AS_IT_IS = """
from nri_numa.observe import metrics as client
import http.server, prometheus_client.exposition
assert issubclass(prometheus_client.exposition.ThreadingWSGIServer, http.server.HTTPServer)
assert client.Counter is prometheus_client.Counter
"""


@pytest.mark.parametrize(
    "code",
    [CODE, ALREADY + AS_IT_IS, WANTS_MORE + AS_IT_IS],
    ids=["left out", "imported already", "a later release that wants more of them"],
)
def test_metrics_work_and_the_modules_left_out_can_be_imported_later(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
