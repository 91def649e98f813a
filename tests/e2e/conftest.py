"""Fixtures of the end-to-end tests: private containerds, one of each series, kept for the session.

Tests run on the series that docs recommend, those marked ``every_series`` on each of `SERIES`.
``NRI_NUMA_SERIES`` names others for all of them: ``all``, or one series.

Without root, Debian packages or cgroups the tests skip with the reason; where
``NRI_NUMA_REQUIRE_E2E=1`` is set (CI) they fail instead. Logs of a failed test go to its report,
and into ``$NRI_NUMA_ARTIFACTS`` if that is set.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.containerd import MAIN_SERIES, SERIES, Containerd
from tests.beds.containerds import ContainerdBeds, start_plugins, without_pods
from tests.beds.cri import CRI
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.beds.reports import attach_if_failed, pytest_runtest_makereport  # noqa: F401  # the hook


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Say on which series of containerd a test runs."""
    if "series" not in metafunc.fixturenames:
        return
    everywhere = metafunc.definition.get_closest_marker("every_series") is not None
    asked = os.environ.get("NRI_NUMA_SERIES") or ("all" if everywhere else MAIN_SERIES)
    if asked not in ("all", *SERIES):
        raise pytest.UsageError(f"NRI_NUMA_SERIES={asked}, expected all or one of {SERIES}")
    chosen = SERIES if asked == "all" else (asked,)
    names = [f"containerd-{each}" for each in chosen]
    metafunc.parametrize("series", chosen, ids=names, scope="session")


@pytest.fixture(scope="session")
def beds() -> Iterator[ContainerdBeds]:
    # Not pytest's own directory: socket paths must stay short.
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-e2e-"))
    beds = ContainerdBeds(directory)
    try:
        yield beds
    finally:
        beds.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def containerd(
    request: pytest.FixtureRequest, beds: ContainerdBeds, series: str
) -> Iterator[Containerd]:
    """A running containerd without pods."""
    yield from without_pods(request, beds, series)


@pytest.fixture
def cri(containerd: Containerd) -> CRI:
    """The client of `containerd`."""
    return containerd.cri


@pytest.fixture
def start_plugin(request: pytest.FixtureRequest, containerd: Containerd) -> Iterator[StartPlugin]:
    """Starts ``nri-numa run`` with a configuration of the test's own."""
    yield from start_plugins(request, containerd)


@pytest.fixture
def plugin(start_plugin: StartPlugin) -> PluginProcess:
    """``nri-numa run`` with the default configuration, ready."""
    return start_plugin()
