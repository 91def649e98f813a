"""What every test gets: quiet logs, Hypothesis profiles, and a report that says what is missing."""

import collections
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from nri_numa.machine import cgroups
from nri_numa.observe import logs

# pytest-xdist tells its workers how wide the terminal is; what is tested here has none.
os.environ.pop("COLUMNS", None)

# How long examples take to make says how busy the machine is.
settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("dev"), max_examples=15)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=200, print_blob=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# So does how long the write of a file takes; tests.beds.cgroup_bed.blocked has the usual bound.
assert "MAX_WRITE_WAIT_S" in vars(cgroups)
vars(cgroups)["MAX_WRITE_WAIT_S"] = 60.0


@pytest.fixture(autouse=True)
def quiet_logs() -> None:
    """Lines go to a buffer that nobody reads; a test of the log sets up its own."""
    logs.setup_logging("info", stream=io.StringIO())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test of one of these folders its marker."""
    if (folder := item.path.parent.name) in ("browser", "e2e", "kube"):
        item.add_marker(folder)


TARGETS = {
    "e2e": "of real containerd: make test-e2e",
    "vm": "in emulated machines: make test-vm",
    "kube": "in a real Kubernetes: make test-kube",
    "browser": "in a browser: make test-browser",
    "release": "of a release, built twice: make test-release",
}
"""What `make test` leaves out, by marker, and which target runs it."""
TURN = "NRI_NUMA_TURN"
"""Whose turn it is where tests with the marker ``turn`` take turns, as in CI: 0 or 1."""


class Report:
    """Prints a failure when it happens, and at the end what was left out."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left_out: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"FAILED {report.nodeid}, {report.when}:\n{report.longreprtext}")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if turn := os.environ.get(TURN):
            there = len(items)
            items[:] = [
                item
                for item in items
                if all(mark.args == (int(turn),) for mark in item.iter_markers("turn"))
            ]
            if left := there - len(items):
                self._left_out["turn"] = left

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._left_out.update(key for key in TARGETS if item.get_closest_marker(key))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # of pytest-xdist; each worker has the same
            session.config.workeroutput["left_out"] = dict(self._left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out |= collections.Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for key, count in self._left_out.items():
            where = TARGETS.get(key, "that have their turn on another day: make test-all")
            terminalreporter.write_line(f"left out: {count} tests {where}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What a test printed and logged, as pytest-xdist can send it: without surrogates."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's result object
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
