"""A real Prometheus that scrapes what a test tells it to, and is asked over its API."""

import contextlib
import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.beds.cri import poll
from tests.beds.plugin_process import free_port
from tests.beds.processes import Daemon

AGENT_POD = {"namespace": "nri-numa", "pod": "nri-numa-x7k2p", "container": "nri-numa"}
PROGRAM = shutil.which("prometheus")


class Prometheus(Daemon):
    """One server; a context manager.

    Args:
        targets: addresses to scrape, every half second, as the job ``nri-numa`` with the labels
            that discovery gives an agent's pod.
    """

    def __init__(self, directory: Path, targets: list[str], rules: list[Path]) -> None:
        assert PROGRAM is not None
        directory.mkdir(parents=True, exist_ok=True)
        scrape = {
            "job_name": "nri-numa",
            "honor_labels": True,
            "static_configs": [{"targets": targets, "labels": AGENT_POD}],
        }
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [scrape],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self._port = free_port()
        command = [
            PROGRAM,
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        super().__init__("prometheus", command, directory, os.environ)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; AssertionError when it says error."""
        query = urllib.parse.urlencode(parameters)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url = f"{self.url}/api/v1/{path}?{query}"
        try:
            with opener.open(url, timeout=10) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
        """Wait for a condition; a server that does not answer yet is waited for too."""

        def ask() -> object:
            with contextlib.suppress(OSError, AssertionError):  # not listening, or not ready
                return condition()
            return None

        poll(ask, what, timeout_s)
