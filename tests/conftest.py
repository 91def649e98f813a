"""What every test gets: quiet logs, and Hypothesis profiles."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from nri_numa.observe import logs

# pytest-xdist tells its workers how wide the terminal is; what is tested here has none.
os.environ.pop("COLUMNS", None)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True)
settings.register_profile(
    "nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True)
def quiet_logs() -> None:
    """Lines go to a buffer that nobody reads; a test of the log sets up its own."""
    logs.setup("info", stream=io.StringIO())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What a test printed and logged, as pytest-xdist can send it: without surrogates."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's result object
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
