"""Counting calls wants a process of its own: other tests leave handlers and hooks behind."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the counts in a session that runs other tests too; `make coverage` runs them alone."""
    if all(HERE in item.path.parents for item in items):
        return
    skip = pytest.mark.skip(reason="counts calls in a process of its own: pytest tests/perf")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
