"""The containerds of a session, one of each series, and plugins beside them.

Apart from `tests.beds.containerd`, which runs in machines without pytest.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.containerd import Containerd, find_binaries
from tests.beds.cri import CRI, CRIError, asks
from tests.beds.plugin_process import StartPlugin
from tests.beds.reports import attach_if_failed, pytest_runtest_makereport  # noqa: F401  # the hook
from tests.beds.testbed import TestbedUnavailable, require_root, skip_or_fail


class ContainerdBeds:
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


def without_pods(
    request: pytest.FixtureRequest, beds: ContainerdBeds, series: str, *, nri: bool = True
) -> Iterator[Containerd]:
    try:
        bed = beds.get(series, nri=nri)
    except TestbedUnavailable as error:
        skip_or_fail(error, "E2E")
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


def start_plugins(request: pytest.FixtureRequest, containerd: Containerd) -> Iterator[StartPlugin]:
    starter = StartPlugin(containerd.directory, containerd.nri_socket)
    yield starter
    for number, plugin in enumerate(starter.started):
        plugin.close()
        attach_if_failed(request.node, f"plugin-{number}.log", plugin.log)


def insist_on_rejection(cri: CRI, name: str, **keys: str) -> str:
    """Insist that a pod's container is not created; what its creation failed with."""
    pod = cri.run_pod(name, annotations=asks(**keys))
    with pytest.raises(CRIError, match=f"default/{name}") as caught:
        cri.create(pod)
    return caught.value.message
