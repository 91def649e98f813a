"""A real Prometheus scrapes the real process, and knows the alerts and what the panels ask."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode
from tests.beds.prometheus import AGENT_POD, PROGRAM, Prometheus

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "config" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "config" / "grafana" / "nri-numa.json"

if PROGRAM is None or not shutil.which("promtool"):
    if os.environ.get("NRI_NUMA_REQUIRE_PROMETHEUS"):
        pytest.fail("prometheus and promtool are required and not installed", pytrace=False)
    pytest.skip("prometheus is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    """A node with one container of each sort, and a refusal."""
    with EmbeddedNode(tmp_path) as made:
        made.start()
        made.four()
        with pytest.raises(PodOperationFailed):
            made.run("big", {"policy": "single-numa-node"}, cpus=33)
        yield made


def test_a_live_scrape_is_clean(node: EmbeddedNode) -> None:
    """In names, types, units and help, as promtool judges them."""
    status, text = node.plugin.get("/metrics")
    assert status == 200
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "_created" not in text


def test_prometheus_scrapes_judges_and_draws(node: EmbeddedNode, tmp_path: Path) -> None:
    """Scraped without a complaint; every alert and panel has a valid expression with data."""
    target = node.plugin.address
    with Prometheus(tmp_path / "prometheus", [target], [ALERTS]) as server:
        server.until(lambda: server.query("count_over_time(up[1m]) > 3"), "four scrapes")
        (scraped,) = server.ask("targets")["activeTargets"]
        assert (scraped["health"], scraped["lastError"]) == ("up", "")
        values = {
            one["metric"]["kind"]: float(one["value"][1])
            for one in server.query("sum by (kind) (nri_numa_containers)")
        }
        assert values == {
            "exclusive": 1,
            "listed": 1,
            "foreign": 0,
            "kubelet": 0,
            "shared": 1,
            "unpinned": 1,
        }
        # Labels of a container are its own; those of discovery name the agent's pod elsewhere.
        pods = {one["metric"]["pod"] for one in server.query("nri_numa_container_info")}
        assert pods == {"free", "listed", "shared", "owner"}
        (ready,) = server.query("nri_numa_ready")
        assert ready["metric"]["pod"] == AGENT_POD["pod"]
        (rejected,) = server.query('sum(nri_numa_decisions_total{outcome="rejected"})')
        assert float(rejected["value"][1]) == 1
        kinds = server.ask("metadata")
        assert kinds["nri_numa_request_duration_seconds"][0]["type"] == "histogram"
        assert kinds["nri_numa_missed_starts_total"][0]["type"] == "counter"

        # Every rule can be evaluated, and a healthy node is quiet.
        (group,) = server.ask("rules")["groups"]
        server.until(
            lambda: all(r["health"] == "ok" for r in server.ask("rules")["groups"][0]["rules"]),
            "every rule was evaluated",
        )
        assert len(group["rules"]) > 10
        assert server.ask("alerts")["alerts"] == []

        # Every panel of a node has something to draw; this machine has no huge pages, and the
        # runtime is asked over NRI.
        empty = []
        for panel in json.loads(DASHBOARD.read_text())["panels"]:
            if panel["title"] == "Cluster":
                break
            for asked in panel.get("targets", ()):
                expression = (
                    asked["expr"]
                    .replace("$job", ".*")
                    .replace("$instance", ".*")
                    .replace("$__rate_interval", "1m")
                )
                assert "$" not in expression
                found = server.query(expression)
                if found or panel["title"].startswith("Huge pages"):
                    continue
                if "over CRI" not in panel["title"]:
                    empty.append((panel["title"], expression))
        assert empty == []

        # The runtime dies: within two minutes somebody is told.
        node.call(node.runtime.stop())

        def pending() -> bool:
            known = {one["labels"]["alertname"] for one in server.ask("alerts")["alerts"]}
            return "NRINUMALinkDown" in known

        server.until(pending, "the alert about the link is pending")
        node.call(node.runtime.start())
