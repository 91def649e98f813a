"""Spans of decisions beside those of a real containerd."""

import tempfile
from pathlib import Path

from tests.beds.containerd import Containerd, find_binaries
from tests.beds.cri import poll
from tests.beds.plugin_process import StartPlugin
from tests.beds.testbed import TestbedUnavailable, skip_or_fail
from tests.beds.trace_receiver import receive_traces


def test_a_decision_is_below_the_request_in_the_trace_of_containerd() -> None:
    with tempfile.TemporaryDirectory(prefix="nri-numa-e2e-") as name, receive_traces() as receiver:
        try:
            bed = Containerd(find_binaries(), Path(name))
            bed.spans_to = receiver.url
            bed.start()
        except TestbedUnavailable as error:
            skip_or_fail(error, "E2E")
        with bed:
            start = StartPlugin(bed.directory, bed.nri_socket)
            plugin = start({"publish": {"otlpEndpoint": receiver.url}})
            try:
                bed.cri.run(bed.cri.run_pod("traced"))
                _, created = plugin.json("/v1/requests")["requests"]
            finally:
                plugin.close()
            _, trace, span, _ = created["traceparent"].split("-")
            poll(lambda: bytes.fromhex(span) in receiver.spans, "containerd's span")
            above = receiver.spans[bytes.fromhex(span)]
            assert above.name == "nri.pkg.api.v1alpha1.Plugin/CreateContainer"
            assert above.trace_id.hex() == trace
            bed.cri.remove_all()
