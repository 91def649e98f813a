"""Who decides where a container runs: the kubelet or nri-numa, tried out case by case.

    python -m tests.kube.who_wins

runs every case on a real Kubernetes of this machine (root) and writes the table of docs/kubelet.md.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import JsonObject, is_ready, waiting_reason
from tests.beds.kube.managers import MAY_LIST, NONE, STATIC, configure, first_line
from tests.beds.kube.manifests import asks, container, pod
from tests.beds.plugin_process import REPOSITORY
from tests.machines.cpus import FIRST

Row = tuple[str, str, tuple[str, ...]]
"""Container, annotation, and the outcome under each mode."""

PAGE = REPOSITORY / "docs/kubelet.md"
BEGIN, END = "<!-- generated: python -m tests.kube.who_wins -->", "<!-- end of generated -->"

BURSTABLE = container(cpus="900m", limits=False)
BURSTABLE["resources"]["limits"] = {"cpu": "1", "memory": "32Mi"}
PODS: Mapping[str, JsonObject] = {
    "Guaranteed, 1 CPU": container(cpus="1"),
    "Guaranteed, 300m": container(cpus="300m"),
    "Burstable": BURSTABLE,
}
ANNOTATIONS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    f"`numacpu: {FIRST}`": asks(numacpu=FIRST),
    f"`numacpu: {FIRST}`, `on-failure: unpinned`": asks(numacpu=FIRST, on_failure="unpinned"),
    '`numamem: "0"`': asks(numamem="0"),
    "`policy: single-numa-node`": asks(policy="single-numa-node"),
}
MODES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "kubelet `none`": (NONE, MAY_LIST),
    "`static`, override `never`": (STATIC, MAY_LIST),
    "`static`, override `annotated`": (
        STATIC,
        {**MAY_LIST, "kubelet": {"overrideGrants": "annotated"}},
    ),
}


def outcome(bed: KubeBed, name: str, document: JsonObject) -> str:
    """What became of one pod, in a few words."""
    client, node = bed.client, bed.node
    client.apply(document)
    found = client.wait_pod(
        name,
        lambda it: is_ready(it) or waiting_reason(it)[0] == "CreateContainerError",
        "an outcome",
    )
    if not is_ready(found):
        message = waiting_reason(found)[1]
        reason = re.search(r"\b([A-Z][a-z]+[A-Z]\w+):", message)
        return f"refused: {reason[1] if reason else message[:80]}"
    (one,) = node.plugin.json(f"/v1/assignments?pod={name}")["containers"]
    first, mems = first_line(client, name), one["mems"]
    now = node.cpus(found)
    grant = next((g for g in node.plugin.json("/v1/kubelet")["grants"] if g["pod"] == name), None)
    if one["kind"] == "kubelet":
        who = "kubelet"
    elif one["kind"] in ("unpinned", "foreign"):
        who = "nri-numa, memory" if mems else "nobody"
    else:
        who = "nri-numa"
        if grant and grant["cpus"] == str(now):
            who = "kubelet, memory nri-numa"
    text = f"{who}: CPUs {first}" if len(first) > 1 else f"{who}: CPU {first}"
    if grant and str(now) != grant["cpus"]:
        text += f" (granted {grant['cpus']})"
    return text if first == now else f"{text}, then {now}"


def run(bed: KubeBed) -> Iterator[tuple[str, str, list[str]]]:
    """Every case; each begins on a node without pods."""
    cells: dict[tuple[str, str], list[str]] = {}
    for number, (kubelet, plugin) in enumerate(MODES.values()):
        configure(bed.node, dict(plugin))
        if number < 2:
            bed.node.restart_kubelet(kubelet)
        for p, (size, made) in enumerate(PODS.items()):
            for a, (asked, keys) in enumerate(ANNOTATIONS.items()):
                name = f"case-{number}-{p}-{a}"
                document = pod(name, made, annotations=keys)
                cells.setdefault((size, asked), []).append(outcome(bed, name, document))
                print(name, size, asked, cells[size, asked][-1], file=sys.stderr, flush=True)
                bed.client.delete_pods()
                poll(lambda: _empty(bed), "an empty node")
    for (size, asked), row in cells.items():
        yield size, asked, row


def _empty(bed: KubeBed) -> bool:
    notes = json.loads((bed.node.kubelet_root / "cpu_manager_state").read_text("utf-8"))
    running = bed.node.containerd.cri.containers(running=True)
    if notes.get("entries"):
        # The kubelet takes grants back at its next allocation, or when its loop comes round.
        return False
    return not running


def table(bed: KubeBed) -> str:
    lines = [f"| container | annotation | {' | '.join(MODES)} |", f"|---|---|{'---|' * len(MODES)}"]
    joined = join_equal_rows([(size, asked, tuple(row)) for size, asked, row in run(bed)])
    lines += [f"| {size} | {asked} | {' | '.join(row)} |" for size, asked, row in joined]
    return "\n".join(lines)


def join_equal_rows(rows: list[Row]) -> list[Row]:
    """Join containers of equal outcome, then annotations."""
    sizes_by_outcome: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for size, annotation, outcomes in rows:
        sizes_by_outcome.setdefault((annotation, outcomes), []).append(size)
    annotations_by_outcome: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (annotation, outcomes), sizes in sizes_by_outcome.items():
        annotations_by_outcome.setdefault((" · ".join(sizes), outcomes), []).append(annotation)
    return [
        (size, " · ".join(annotations), outcomes)
        for (size, outcomes), annotations in annotations_by_outcome.items()
    ]


def main() -> None:
    """Run all cases and write the page."""
    with KubeBed(build=False) as bed:
        made = table(bed)
    write(PAGE, made)


def write(page: Path, made: str) -> None:
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
