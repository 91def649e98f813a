"""The shipped alerts and dashboard: well formed, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from nri_numa.controller.service import ControllerMetrics
from nri_numa.observe.metrics import LateStartMetrics, Metrics, ServiceMetrics
from nri_numa.publisher.publisher import PublisherMetrics
from nri_numa.scheduler.metrics import SchedulerMetrics
from tools import docs_metrics

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "config" / "prometheus" / "alerts.yaml"
ALERTS_TEST = ALERTS.with_name("alerts_test.yaml")
DASHBOARD = ROOT / "config" / "grafana" / "nri-numa.json"
PAGE = ROOT / "docs" / "alerts.md"
# About no node: there is nothing that a label could name.
OF_THE_CLUSTER = frozenset({"NRINUMAAbsent", "NRINUMADaemonSetUnavailable", "NRINUMANoLeader"})
LABELS = frozenset({"job", "instance"})  # given by Prometheus


def known() -> dict[str, frozenset[str]]:
    """Every sample that we expose, with its labels."""
    metrics = Metrics("0.1.0")
    metrics.record_registration("containerd", "v2.1.9")
    metrics.record_request("CreateContainer", 0.001)
    metrics.record_decision("rejected", "TopologyAffinityError", "restricted")
    metrics.kubelet_static_policy.labels("cpu").set(True)
    metrics.http_requests.labels("/metrics", "200").inc()
    # Of what is off by default there is nothing to see.
    metrics.snapshot = lambda: replace(docs_metrics._SAMPLE, local_memory=None, cpu_waiting=None)
    LateStartMetrics(metrics)
    found = samples(metrics.render_metrics())
    return {**found, "nri_numa_container_info": frozenset(docs_metrics._CONTAINER_LABELS)}


def of_service(metrics: ServiceMetrics) -> dict[str, frozenset[str]]:
    """Every sample of the publisher, the extender or the controller, with its labels."""
    for one in metrics.all:
        if one._labelnames:
            one.labels(*one._labelnames)
    return samples(metrics.render_metrics().decode())


def of_the_cluster() -> dict[str, frozenset[str]]:
    return {**of_service(SchedulerMetrics("0.1.0")), **of_service(ControllerMetrics("0.1.0"))}


def samples(text: str) -> dict[str, frozenset[str]]:
    return {
        sample.name: frozenset(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def queries() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def test_every_metric_and_label_of_alerts_and_panels_exists() -> None:
    """A renamed metric would leave an alert silent for ever."""
    exposed = {**of_service(PublisherMetrics("0.1.0")), **of_the_cluster(), **known()}
    asked = 0
    for who, expression in queries():
        for name, selector in re.findall(
            r"\b((?:nri_numa|process)_\w+)(?:\{([^}]*)\})?", expression
        ):
            asked += 1
            assert name in exposed, f"{who}: {name} is not exposed"
            labels = set(re.findall(r"(\w+)\s*[=!]", selector)) - LABELS
            assert labels <= exposed[name], f"{who}: {name} has no {labels - exposed[name]}"
    assert asked > 60


def test_every_metric_of_ours_is_shown_or_watched() -> None:
    """What nobody looks at need not be made."""
    asked = " ".join(expression for _, expression in queries())
    suffix = re.compile(r"_(bucket|count|sum)$")
    for name in (suffix.sub("", one) for one in {**known(), **of_the_cluster()}):
        if name.startswith("nri_numa_"):
            assert re.search(rf"\b{name}(_bucket|_count|_sum)?\b", asked), name


def test_the_dashboard_can_be_imported() -> None:
    """Panels have ids of their own, do not overlap, and ask the data source that was chosen."""
    document = dashboard()
    assert document["uid"]
    assert document["schemaVersion"] >= 36
    variables = [one["name"] for one in document["templating"]["list"]]
    assert variables == ["datasource", "job", "instance"]
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            # The instances to choose from are nodes, and neither extender nor controller is one.
            of_a_node = not re.search("nri_numa_(scheduler|controller)_", target["expr"])
            assert ('instance=~"$instance"' in target["expr"]) is of_a_node


def test_the_dashboard_begins_with_the_fleet() -> None:
    """Tables sorted by what matters; a node's name leads to that node alone."""
    row, *tables = dashboard()["panels"][:4]
    assert (row["type"], row["title"]) == ("row", "Fleet")
    for table in tables:
        assert table["type"] == "table", table["title"]
        (organized,) = (t for t in table["transformations"] if t["id"] == "organize")
        shown = set(organized["options"]["renameByName"].values())
        (order,) = table["options"]["sortBy"]
        assert order["displayName"] in shown, table["title"]
        named = {
            o["matcher"]["options"]: o["properties"] for o in table["fieldConfig"]["overrides"]
        }
        assert named.keys() <= shown, table["title"]
        (links,) = (p["value"] for p in named["Node"] if p["id"] == "links")
        assert "var-instance=${__value.raw}" in links[0]["url"], table["title"]


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        if rule["alert"] not in OF_THE_CLUSTER:
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"], rule["alert"]
        assert len(rule["annotations"]["description"]) > 60, rule["alert"]
        assert rule["alert"].startswith("NRINUMA")


def test_every_alert_leads_to_its_section() -> None:
    headings = re.findall(
        r"^##+ (NRINUMA\w+|Critical|Warning|Info)$", PAGE.read_text(), re.MULTILINE
    )
    for rule in alerts():
        base, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert base == "https://docs.nri-numa.example/alerts.html", rule["alert"]
        assert anchor == rule["alert"].lower()
    expected: list[str] = []
    for severity in ("critical", "warning", "info"):
        names = [rule["alert"] for rule in alerts() if rule["labels"]["severity"] == severity]
        expected += [severity.capitalize(), *names]
    assert headings == expected


def test_every_alert_is_tried() -> None:
    text = ALERTS_TEST.read_text()
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in text] == []


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("command", [["check", "rules", ALERTS], ["test", "rules", ALERTS_TEST]])
def test_promtool_agrees(command: list[Any]) -> None:
    done = subprocess.run(["promtool", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
