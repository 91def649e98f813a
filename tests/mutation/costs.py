"""A plugin of pytest that writes down what each test costs: ``-p tests.mutation.costs``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_costs: dict[str, float] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Seconds of CPU, by the id of the test."""
    started = time.process_time()
    yield
    _costs[item.nodeid] = round(time.process_time() - started, 4)


def pytest_sessionfinish() -> None:
    """Into the file that ``MUTATION_COSTS`` names."""
    Path(os.environ["MUTATION_COSTS"]).write_text(json.dumps(_costs), encoding="utf-8")
