"""What the Helm chart has from elsewhere: ``python -m tools.chart_files`` writes it.

A chart can only read files of its own, so it has copies of the alerts and of the dashboard; and its
README has a table of all values, in the form of helm-docs, from the comments of ``values.yaml``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

REPOSITORY: Final = Path(__file__).resolve().parents[1]
CHART: Final = REPOSITORY / "config/helm/nri-numa"
COPIES: Final = {
    CHART / "files/alerts.yaml": REPOSITORY / "config/prometheus/alerts.yaml",
    CHART / "files/nri-numa.json": REPOSITORY / "config/grafana/nri-numa.json",
}
README: Final = CHART / "README.md"

_INTRODUCTION: Final = """
nri-numa answers the container runtime before a container starts: which CPUs and which memory nodes
it may use. This chart runs it on every node. How to build the image, what the pods get of the host,
how to upgrade and how to uninstall is in `docs/install-cluster.md` of the sources.

    helm install nri-numa config/helm/nri-numa --namespace nri-numa --create-namespace \\
      --set image.repository=registry.example/nri-numa \\
      --set-json 'config={"reservedCPUs":"0","defaults":{"policy":"best-effort"}}'

Values are checked by a schema: one that is misspelt, in `config` too, stops the installation, and
so does an address that other machines reach without a token and TLS.

What nodes are for, in values files with words: `-f config/helm/nri-numa/profiles/` `latency.yaml`,
`ai-gpu.yaml`, `density.yaml`, or `observe.yaml`, which changes nothing and shows what would.

## With the Prometheus operator

The agent listens on the node's loopback, which no Prometheus reaches. Give it an address, a token
and a certificate from a Secret, and turn on what your cluster has:

    config:
      http:
        address: 0.0.0.0:9891
        tokenFile: /etc/nri-numa-secret/token
        tlsCert: /etc/nri-numa-secret/tls.crt
        tlsKey: /etc/nri-numa-secret/tls.key
    secretName: nri-numa-http
    monitoring:
      podMonitor: {enabled: true, labels: {release: prometheus}}
      prometheusRule: {enabled: true, labels: {release: prometheus}}
      dashboard: {enabled: true}
      tlsConfig: {insecureSkipVerify: true}
      runbookBaseURL: https://runbooks.example.org/nri-numa
"""


def described() -> Iterator[tuple[str, Any, str]]:
    """Dotted path, default and text of every value that ``values.yaml`` describes.

    Raises:
        ValueError: for a value without a text.
    """
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    values = yaml.safe_load("\n".join(lines))
    path: list[str] = []
    text, skipped = "", 0  # depth below which one text is for all
    for line in lines:
        if found := re.match(r" *# -- (.*)", line):
            text = found[1]
        elif text and (found := re.match(r" *# (.*)", line)):
            text += f" {found[1]}"
        elif found := re.match(r"( *)(\w+):", line):
            depth = len(found[1]) // 2
            path[depth:] = [found[2]]
            value: Any = values
            for key in path:
                value = value[key] if isinstance(value, dict) and key in value else None
            if text:
                yield ".".join(path), value, text
                text = ""
                deeper = isinstance(value, dict) and line.rstrip().endswith(":")
                skipped = len(path) if deeper else 0
            elif not (isinstance(value, dict) and value) and not (skipped and depth >= skipped):
                raise ValueError(f"values.yaml: {'.'.join(path)} has no '# --' comment")


def readme() -> str:
    """The text of README.md."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    kinds = {dict: "object", list: "list", bool: "bool", int: "int", str: "string"}
    rows = [
        f"| {path} | {kinds[type(value)]} | `{json.dumps(value)}` | {text} |"
        for path, value, text in sorted(described(), key=lambda one: one[0])
    ]
    return "\n".join(
        [
            f"# {chart['name']}",
            "",
            f"Version {chart['version']}: {chart['description']}.",
            _INTRODUCTION.rstrip(),
            "",
            "## Values",
            "",
            "| Key | Type | Default | Description |",
            "|-----|------|---------|-------------|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Write all of it."""
    for copy, original in COPIES.items():
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(original.read_bytes())
    README.write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
