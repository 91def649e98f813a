"""The kubelet's own managers: noticed, said once, and shown."""

import io

from nri_numa.kubelet.inherited_settings import KubeletPinningReporter
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics


def gauge(metrics: Metrics, manager: str) -> float | None:
    return metrics.registry.get_sample_value("nri_numa_kubelet_static_policy", {"manager": manager})


def test_a_static_policy_is_said_once_and_its_end_too() -> None:
    stream, metrics = io.StringIO(), Metrics("test")
    logs.setup_logging("info", stream=stream)
    watch = KubeletPinningReporter(metrics, "/var/lib/kubelet")
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (0, 0)
    watch.report_policy_changes({})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (0, 0)
    assert stream.getvalue() == ""
    for _ in range(3):
        watch.report_policy_changes({"cpu": "static", "memory": "None"})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (1, 0)
    (line,) = stream.getvalue().splitlines()
    assert "level=warning" in line
    assert "/var/lib/kubelet/cpu_manager_state" in line
    assert "cpuManagerPolicy: none" in line
    watch.report_policy_changes({"cpu": "none", "memory": "Static"})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (0, 1)
    assert "memoryManagerPolicy: None" in stream.getvalue()
    assert "kubelet static policy ended" in stream.getvalue()
