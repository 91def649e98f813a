"""Spans of decisions: from the runtime's requests to an OTLP receiver, through both processes."""

import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode, limits, until
from tests.beds.plugin_process import free_port, plugin_environment
from tests.beds.processes import Daemon
from tests.beds.trace_receiver import receive_traces, values

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_what_was_decided_is_a_span_below_the_runtimes(tmp_path: Path) -> None:
    """One for each request, sent again after an outage, with what an operator searches for."""
    with receive_traces() as receiver:
        off = dict.fromkeys(("events", "nodeAnnotations", "nodeLabels"), False)
        socket = {"socket": str(tmp_path / "agent.sock")}
        address = f"127.0.0.1:{free_port()}"
        publish = {"otlpEndpoint": receiver.url, "address": address, **off}
        with EmbeddedNode(tmp_path, config={"http": socket, "publish": publish}) as node:
            faults = node.runtime.faults
            faults.metadata = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
            node.start()
            words = [sys.executable, "-m", "nri_numa", "publish", "--node-name=n1"]
            config = f"--config={node.plugin.config_file}"
            publisher = Daemon("publish", [*words, config], tmp_path, plugin_environment())
            with publisher:
                assert values(receiver.named("Synchronize"))["numa.outcome"] == "synchronized"
                receiver.refuses = True
                db = node.owner("db", 2)
                until(lambda: receiver.refused > 1, "the receiver refuses")
                receiver.refuses = False
                span = receiver.named("CreateContainer", k8s_pod_name="db")
                assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, ABOVE)
                assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
                assert values(span) == {
                    "k8s.namespace.name": "default",
                    "k8s.pod.name": "db",
                    "k8s.pod.uid": "uid-db",
                    "k8s.container.name": "app",
                    "container.id": db.id,
                    "numa.outcome": "admitted",
                    "numa.kind": "exclusive",
                    "numa.cpus": "0-1",
                    "numa.mems": "0",
                    "numa.policy": "single-numa-node",
                    "numa.reason": "2 exclusive CPUs on NUMA node 0",
                }
                node.call(node.runtime.update_container(db.id, limits(3)))
                resized = values(receiver.named("UpdateContainer", k8s_pod_name="db"))
                assert (resized["numa.outcome"], resized["numa.cpus"]) == ("resized", "0-2")
                assert receiver.resource["service.name"] == "nri-numa"
                assert receiver.resource["k8s.node.name"] == "n1"
                with pytest.raises(PodOperationFailed):
                    node.run("big", {"policy": "single-numa-node"}, cpus=33)
                refused = receiver.named("CreateContainer", k8s_pod_name="big")
                assert refused.status.code == Status.STATUS_CODE_ERROR
                assert "exclusive CPUs" in refused.status.message
                faults.metadata = {"traceparent": f"00-{TRACE}-{ABOVE}-00"}
                node.free("unsampled")
                faults.metadata = {"traceparent": "00-0"}
                node.call(node.runtime.stop_container(db.id))
                stopped = receiver.named("StopContainer", k8s_pod_name="db")
                assert stopped.trace_id.hex() != TRACE
                assert not stopped.parent_span_id
                named = {values(one).get("k8s.pod.name") for one in receiver.spans.values()}
                assert "unsampled" not in named
                with urlopen(f"http://{address}/metrics") as metrics:
                    text = metrics.read().decode()
                assert 'publisher_objects_dropped_total{output="traces"} 0.0' in text
                assert 'publisher_output_up{output="traces"} 1.0' in text
                said = publisher.log_file.read_text()
                assert said.count("spans not sent") == said.count("opentelemetry") + 1 == 1
                assert "400" in said
                sent = dict(receiver.spans)
                publisher.end()
                publisher.start()
                node.owner("after", 2)
                receiver.named("CreateContainer", k8s_pod_name="after")
                assert len(receiver.spans) == len(sent) + 1
