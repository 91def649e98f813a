"""What a churn learns of the plugin."""

import contextlib
import json
import re
from datetime import datetime
from pathlib import Path

from tests.checks.churn_figures import Interval

# What Synchronize says of a container that started without us.
_UNPINNED = re.compile(r"stays unpinned: pod [^/\s]+/(?P<pod>\S+), container (?P<name>[^:\s]+):")


class LinkLog:
    """What the plugin says of its link, read from its log as it grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self.states: list[tuple[float, str]] = []
        # Said before the link is active, so they are of the Synchronize that then ends.
        self._found: list[tuple[float, str]] = []
        self._unpinned: list[tuple[float, list[tuple[float, str]]]] = []

    def read(self) -> list[tuple[float, str]]:
        """All (time, state) so far, in order."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.states
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if b'"msg":"link changed"' in line or b"stays unpinned" in line:
                with contextlib.suppress(ValueError, KeyError):
                    self._take(json.loads(line))
        return self.states

    def _take(self, record: dict[str, str]) -> None:
        when = datetime.fromisoformat(record["time"]).timestamp()
        if record["msg"] == "link changed":
            self.states.append((when, record["state"]))
            if record["state"] == "active":
                self._unpinned.append((when, self._found))
                self._found = []
        elif found := _UNPINNED.search(record.get("problem", "")):
            self._found.append((when, f"{found['pod']}/{found['name']}"))

    def unpinned(self, end: float) -> dict[str, list[Interval]]:
        """When each container, as ``POD/NAME``, could not have what it asked for.

        Each time from what Synchronize said until the next one, which tries again.
        """
        times: dict[str, list[Interval]] = {}
        ends = [when for when, _ in self._unpinned[1:]] + [end]
        for (_, found), until in zip(self._unpinned, ends, strict=False):
            for since, who in found:
                times.setdefault(who, []).append((since, max(since, until)))
        return times

    def active_since(self, when: float) -> bool:
        """Whether it got into use after a moment, and still is as far as it knows."""
        states = self.read()
        return bool(states) and states[-1][1] == "active" and states[-1][0] >= when
