"""Fixtures of the end-to-end tests: private containerds, one of each series, kept for the session.

Tests run on the series that docs recommend, those marked ``every_series`` on each of `SERIES`.
``NRI_NUMA_SERIES`` names others for all of them: ``all``, or one series.

Without root, Debian packages or cgroups the tests skip with the reason; where
``NRI_NUMA_REQUIRE_E2E=1`` is set (CI) they fail instead. Logs of a failed test go to its report,
and into ``$NRI_NUMA_ARTIFACTS`` if that is set.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.containerd import MAIN_SERIES, SERIES, Containerd, find_binaries
from tests.beds.cri import CRI, CRIError, asks
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.beds.reports import attach_if_failed, pytest_runtest_makereport  # noqa: F401  # the hook
from tests.beds.testbed import TestbedUnavailable, require_root


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


def unavailable(error: TestbedUnavailable) -> None:
    """Skip, or fail where the beds must be there."""
    if os.environ.get("NRI_NUMA_REQUIRE_E2E") == "1":
        pytest.fail(f"NRI_NUMA_REQUIRE_E2E=1, but {error}", pytrace=False)
    pytest.skip(str(error))


class Beds:
    """The daemons of this session, started when first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, Containerd] = {}
        self._missing: dict[str, TestbedUnavailable] = {}
        self._count = 0

    def get(self, series: str, *, nri: bool = True) -> Containerd:
        """A daemon that runs and serves, without pods."""
        if series in self._missing:
            raise self._missing[series]
        name = f"{series}-{nri}"
        if name not in self._running:
            self._count += 1
            directory = self._directory / f"{series}-{self._count}"
            try:
                require_root("containerd")  # before anything is downloaded in vain
                bed = Containerd(find_binaries(series), directory, nri=nri)
                self._running[name] = bed.__enter__()
            except TestbedUnavailable as error:
                self._missing[series] = error
                raise
        return self._running[name]

    def drop(self, bed: Containerd) -> None:
        """Give a daemon up; the next test gets a new one."""
        self._running = {name: one for name, one in self._running.items() if one is not bed}
        bed.close()

    def close(self) -> None:
        for bed in self._running.values():
            bed.close()


@pytest.fixture(scope="session")
def beds() -> Iterator[Beds]:
    # Not pytest's own directory: socket paths must stay short.
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-e2e-"))
    beds = Beds(directory)
    try:
        yield beds
    finally:
        beds.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def containerd(request: pytest.FixtureRequest, beds: Beds, series: str) -> Iterator[Containerd]:
    """A running containerd without pods."""
    yield from without_pods(request, beds, series)


def without_pods(
    request: pytest.FixtureRequest, beds: Beds, series: str, *, nri: bool = True
) -> Iterator[Containerd]:
    try:
        bed = beds.get(series, nri=nri)
    except TestbedUnavailable as error:
        unavailable(error)
        raise
    begin = len(bed.log())
    yield bed
    attach_if_failed(request.node, f"containerd-{series}.log", lambda: bed.log()[begin:])
    try:
        if not bed.running:
            bed.start()
        bed.cri.remove_all()
    except Exception:
        # What the test did to the daemon is not the next test's business.
        beds.drop(bed)
        raise


@pytest.fixture
def cri(containerd: Containerd) -> CRI:
    """The client of `containerd`."""
    return containerd.cri


@pytest.fixture
def start_plugin(request: pytest.FixtureRequest, containerd: Containerd) -> Iterator[StartPlugin]:
    """Starts ``nri-numa run`` with a configuration of the test's own."""
    yield from starting(request, containerd)


def starting(request: pytest.FixtureRequest, containerd: Containerd) -> Iterator[StartPlugin]:
    starter = StartPlugin(containerd.directory, containerd.nri_socket)
    yield starter
    for number, plugin in enumerate(starter.started):
        plugin.close()
        attach_if_failed(request.node, f"plugin-{number}.log", plugin.log)


@pytest.fixture
def plugin(start_plugin: StartPlugin) -> PluginProcess:
    """``nri-numa run`` with the default configuration, ready."""
    return start_plugin()


def refused(cri: CRI, name: str, **keys: str) -> str:
    """Insist that a pod's container is not created; what its creation failed with."""
    pod = cri.run_pod(name, annotations=asks(**keys))
    with pytest.raises(CRIError, match=f"default/{name}") as caught:
        cri.create(pod)
    return caught.value.message
