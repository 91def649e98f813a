"""Logs of daemons in the report of a test that failed; a conftest imports the hook with them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's result object
    if report.failed:
        item.stash[_FAILED] = True


def attach_if_failed(node: pytest.Item, name: str, log: Callable[[], str]) -> None:
    """Put a log into the report of a test that failed, and into ``$NRI_NUMA_ARTIFACTS``."""
    if not node.stash.get(_FAILED, False):
        return
    text = log()
    node.add_report_section("teardown", name, "\n".join(text.splitlines()[-60:]))
    artifacts = os.environ.get("NRI_NUMA_ARTIFACTS")
    if artifacts:
        directory = Path(artifacts) / node.name.replace("/", "_")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
