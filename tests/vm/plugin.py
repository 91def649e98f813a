"""`nri-numa run` inside the guest, where everything takes ten times as long."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.beds.plugin_process import PluginProcess

START_LIMIT_S = 150.0
# A plugin that did not get ready once need not keep each further case waiting that long.
AGAIN_LIMIT_S = 15.0


class GuestPlugin(PluginProcess):
    """The plugin under test; its log is one file of the artifacts, over all its restarts."""

    def __init__(
        self,
        directory: Path,
        nri_socket: Path,
        log: Path,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, nri_socket, config=config)
        self.log_file = log
        self.offset = 0
        self._limit_s = START_LIMIT_S

    def start(self, *, wait: bool = True, timeout_s: float = START_LIMIT_S) -> None:
        """Start it; what it logs from now on is what `fresh_records` has."""
        self.offset = len(self.log().encode())
        super().start(wait=wait, timeout_s=timeout_s)

    def ensure_ready(self) -> None:
        """Start it unless it runs, and wait until it is connected."""
        if not self.running:
            self.start(wait=False)
        limit, self._limit_s = self._limit_s, AGAIN_LIMIT_S
        self.wait_ready(timeout_s=limit)
        self._limit_s = START_LIMIT_S

    def ready(self) -> bool:
        """Whether its last word on its link to the runtime is that it is in use."""
        states = [r.get("state") for r in self.fresh_records() if r.get("msg") == "link"]
        return bool(states) and states[-1] == "active"

    def fresh_records(self) -> list[dict[str, Any]]:
        """Log records since the last start."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(self.offset)
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # half written, or a traceback
            if isinstance(record, dict):
                found.append(record)
        return found
