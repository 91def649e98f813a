"""A real Prometheus that scrapes what a test tells it to, and is asked over its API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.beds.plugin_process import free_port
from tests.beds.processes import end, spawn

PROGRAM = shutil.which("prometheus")


class Prometheus:
    """One server; a context manager.

    Args:
        targets: addresses to scrape, every half second, as the job ``nri-numa``.
    """

    def __init__(self, directory: Path, targets: list[str], rules: list[Path]) -> None:
        self.directory = directory
        self._targets = targets
        self._rules = rules
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(path) for path in self._rules],
            "scrape_configs": [
                {"job_name": "nri-numa", "static_configs": [{"targets": self._targets}]}
            ],
        }
        file = self.directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        command = [
            PROGRAM,
            f"--config.file={file}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._process = spawn(command, self.directory / "log", os.environ)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print((self.directory / "log").read_text()[-3000:])
        if self._process is not None:
            end(self._process, signal.SIGTERM, 20)

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
        """The samples of an expression, now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
        """Wait for a condition; a server that does not answer yet is waited for too."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except (OSError, AssertionError):  # not listening, or not ready
                pass
            assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.1)
