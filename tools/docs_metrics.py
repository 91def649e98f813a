"""The lists of docs/metrics.md, from the metrics of all processes.

``python -m tools.docs_metrics`` writes it.
"""

from __future__ import annotations

import re

from nri_numa.controller.service import ControllerMetrics
from nri_numa.observe.metrics import (
    CPUWaitGauges,
    LateStartMetrics,
    MeasuredValuesByContainer,
    Metrics,
    MetricsSnapshot,
    NUMANodeSample,
    Registry,
)
from nri_numa.publisher.publisher import PublisherMetrics
from nri_numa.scheduler.metrics import SchedulerMetrics
from tools.docs_regions import cell, code, table, write

_SAMPLE = MetricsSnapshot(
    numa_nodes=(
        NUMANodeSample(
            numa_node=0,
            cpus={"exclusive": 1},
            capacity_cpus=1,
            allocated_cpus=1,
            free_cpus=1,
            memory_bytes=1,
            memory_allocated_bytes=1,
            memory_free_bytes=1,
            hugepages={1: (1, 1)},
        ),
    ),
    node_name="node-1",
    container_counts={("shared", True): 1},
    checkpoint_written=1.0,
    local_memory=MeasuredValuesByContainer({("a", "b", "c"): (1.0,)}, {"known": 1}),
    cpu_waiting=MeasuredValuesByContainer({("a", "b", "c"): (1.0, 1.0)}, {"known": 1}),
)

_HELP = re.compile(r"^# HELP (nri_numa_\w+) (.*)$", re.MULTILINE)
_TYPE = re.compile(r"^# TYPE (nri_numa_\w+) (\w+)$", re.MULTILINE)

_CONTAINER_LABELS = (
    "namespace", "pod", "container", "kind", "policy", "numa_nodes", "aligned",
)  # fmt: skip


def text() -> str:
    """One table for each process: name, kind, labels and help text, in the order of a scrape."""
    metrics = Metrics("")
    metrics.snapshot = lambda: _SAMPLE
    CPUWaitGauges(metrics).update_gauges({0: 1.0}, {0: 0.0}, {0: 0.0}, {0: 2e9})
    LateStartMetrics(metrics)
    lines = ["### The agent", "", *_table(metrics, metrics.render_metrics())]
    for name, service in (
        ("publisher", PublisherMetrics("")),
        ("extender", SchedulerMetrics("")),
        ("controller", ControllerMetrics("")),
    ):
        lines += ["", f"### The {name}", "", *_table(service, service.render_metrics().decode())]
    return "\n".join(lines)


def _table(metrics: Registry, exposed: str) -> list[str]:
    labels = {
        str(one._name): tuple(one._labelnames) for one in metrics.all if hasattr(one, "_labelnames")
    }
    kinds = dict(_TYPE.findall(exposed))
    rows = []
    for name, meaning in _HELP.findall(exposed):
        found = labels.get(name, labels.get(name.removesuffix("_total")))
        if found is None:
            found = _labels_shown(exposed, name)
        shown = ", ".join(code(label) for label in found)
        rows.append((code(name), kinds[name], shown, cell(meaning)))
    return table(("name", "type", "labels", "meaning"), rows)


def _labels_shown(exposed: str, name: str) -> tuple[str, ...]:
    if name == "nri_numa_container_info":
        return _CONTAINER_LABELS
    line = re.search(rf"^{name}\{{(.*)\}} ", exposed, re.MULTILINE)
    return tuple(re.findall(r"(\w+)=", line[1])) if line else ()


if __name__ == "__main__":
    write("metrics.md", "tools.docs_metrics", text())
