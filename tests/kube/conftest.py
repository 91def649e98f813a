"""One Kubernetes for all tests here, which run together; each begins without pods.

The programs are never built here: ``make test-kube`` does it first. Without them, without root or
Debian packages the tests skip with the reason; where ``NRI_NUMA_REQUIRE_KUBE=1`` is set they fail
instead. Logs of a failed test go to its report, and into ``$NRI_NUMA_ARTIFACTS`` if that is set.

However tests are shuffled, those here stay together, and the bed ends after the last of them: six
daemons that are never quite idle would be in the way of whatever comes next.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.cri import CRI, CRIError, poll
from tests.beds.images import build_agent_image
from tests.beds.kube.bed import KubeBed, Numa
from tests.beds.kube.client import Client
from tests.beds.kube.node import KubeNode
from tests.beds.plugin_process import REPOSITORY
from tests.beds.reports import attach_if_failed, pytest_runtest_makereport  # noqa: F401  # the hook
from tests.beds.testbed import TestbedUnavailable, skip_or_fail

# Each wait has its own limit; this one is for what has none.
_LIMIT_S = 1200
_BED = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder together, and give them time."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not ours:
        return
    place = items.index(ours[0])
    others = [item for item in items if item not in ours]
    modules = list(dict.fromkeys(item.path for item in ours))

    def place_of(item: pytest.Item) -> tuple[int, str, int]:
        """What empties an emulated node comes last: its pods take minutes to come again.

        And what starts its kubelet anew comes after that.
        """
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        fixtures = getattr(item, "fixturenames", ())
        last = next((i for i, name in enumerate(("claims", "devices"), 1) if name in fixtures), 0)
        return modules.index(item.path), str(parameters.get("node", "")), last

    ours.sort(key=place_of)
    items[:] = [*others[:place], *ours, *others[place:]]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the bed after the last test of this folder."""
    if nextitem is not None and Path(__file__).parent in nextitem.path.parents:
        return
    if (stack := item.session.stash.get(_BED, None)) is not None:
        stack.close()


@pytest.fixture(scope="session")
def session_bed(request: pytest.FixtureRequest) -> Iterator[KubeBed]:
    with contextlib.ExitStack() as stack:
        request.session.stash[_BED] = stack
        try:
            bed = stack.enter_context(KubeBed(build=False))
        except TestbedUnavailable as error:
            skip_or_fail(error, "KUBE")
        yield bed


def _remove_stopped_sandboxes(cri: CRI) -> bool:
    """Remove stopped sandboxes; False if one is left, which the kubelet may be removing now."""
    for sandbox in cri.pods():
        with contextlib.suppress(CRIError):
            cri.remove_pod(sandbox.id, stop=False)
    return not cri.pods()


@pytest.fixture
def bed(request: pytest.FixtureRequest, session_bed: KubeBed) -> Iterator[KubeBed]:
    """Control plane and node, without pods."""
    logs = [*session_bed.logs()]
    begins = {file: file.stat().st_size for file in logs}
    configuration = session_bed.node.plugin.config_file.read_text()
    yield session_bed
    for file in session_bed.logs():

        def since(file: Path = file) -> str:
            return file.read_bytes()[begins.get(file, 0) :].decode(errors="replace")

        attach_if_failed(request.node, file.name, since)
    session_bed.client.delete_pods()
    # The kubelet may still be at it when the objects are gone.
    running = session_bed.node.containerd.cri.containers
    poll(lambda: not running(running=True), "end of all containers")
    # As the kubelet does within a minute: what a stopped sandbox had is its pod's for that long.
    cri = session_bed.node.containerd.cri
    poll(lambda: all(sandbox.state for sandbox in cri.pods()), "no sandbox that is ready")
    poll(lambda: _remove_stopped_sandboxes(cri), "removal of all sandboxes")
    left = session_bed.node.plugin.config_file.read_text()
    assert left == configuration, "the test left another configuration of nri-numa to the next one"


@pytest.fixture
def client(bed: KubeBed) -> Client:
    """Calls the API server of `bed`."""
    return bed.client


@pytest.fixture
def node(bed: KubeBed) -> KubeNode:
    """The node of `bed`."""
    return bed.node


@pytest.fixture(scope="session")
def image(session_bed: KubeBed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's image of this tree; the node has it."""
    archive = build_agent_image(tmp_path_factory.mktemp("image") / "image.tar")
    session_bed.node.containerd.import_image(archive)
    return archive


@pytest.fixture
def numa(bed: KubeBed, tmp_path: Path) -> Numa:
    """Runs the program as kubectl would, with a kubectl that finds the bed."""
    kubectl = bed.control.write_kubectl(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(REPOSITORY / "config/kubectl/kubectl-numa"), *arguments],
            env={**os.environ, **bed.control.environment, "KUBECTL_PATH": str(kubectl)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )

    return run
