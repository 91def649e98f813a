"""The list of docs/metrics.md, from the metrics themselves.

``python -m tools.docs_metrics`` writes it.
"""

from __future__ import annotations

import re

from nri_numa.metrics import Metrics, NUMANodeSample, Snapshot
from tools.docs_regions import cell, code, table, write

_SAMPLE = Snapshot(
    numa_nodes=(
        NUMANodeSample(
            numa_node=0,
            exclusive_cpus=1,
            idle_cpus=1,
            shared_cpus=1,
            reserved_cpus=1,
            allocatable_cpus=1,
            memory=1,
            memory_allocated=1,
            memory_available=1,
            hugepages={1: (1, 1)},
        ),
    ),
    container_kinds={"shared": 1},
    checkpoint_age=1.0,
)

_HELP = re.compile(r"^# HELP (nri_numa_\w+) (.*)$", re.MULTILINE)
_TYPE = re.compile(r"^# TYPE (nri_numa_\w+) (\w+)$", re.MULTILINE)

_CONTAINER_LABELS = ("namespace", "pod", "container", "kind", "policy", "numa_nodes")


def text() -> str:
    """A table with name, kind, labels and help text, in the order of a scrape."""
    metrics = Metrics("")
    metrics.snapshot = lambda: _SAMPLE
    labels = {
        str(one._name): tuple(one._labelnames)  # type: ignore[attr-defined]
        for one in metrics._own
        if hasattr(one, "_labelnames")
    }
    exposed = metrics.text()
    kinds = dict(_TYPE.findall(exposed))
    rows = []
    for name, meaning in _HELP.findall(exposed):
        found = labels.get(name, labels.get(name.removesuffix("_total")))
        if found is None:
            found = _labels_shown(exposed, name)
        shown = ", ".join(code(label) for label in found)
        rows.append((code(name), kinds[name], shown, cell(meaning)))
    return "\n".join(table(("name", "type", "labels", "meaning"), rows))


def _labels_shown(exposed: str, name: str) -> tuple[str, ...]:
    if name == "nri_numa_container_info":
        return _CONTAINER_LABELS
    line = re.search(rf"^{name}\{{(.*)\}} ", exposed, re.MULTILINE)
    return tuple(re.findall(r"(\w+)=", line[1])) if line else ()


if __name__ == "__main__":
    write("metrics.md", "tools.docs_metrics", text())
