"""The bed itself: a control plane alone, and what is left when it ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.beds import processes
from tests.beds.kube.build import find_programs
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.manifests import container, pod
from tests.beds.kube.namespaces import Namespaces
from tests.beds.testbed import TestbedUnavailable
from tests.kube.conftest import unavailable

pytestmark = pytest.mark.kube


def test_nodes_without_a_kubelet_and_nothing_left_behind() -> None:
    """The stock scheduler takes them for nodes: it looks at their room."""
    with tempfile.TemporaryDirectory(prefix="nri-numa-kube-") as scratch:
        try:
            programs = find_programs(build=False)
            with Namespaces(Path(scratch)) as namespaces, ControlPlane(programs, namespaces) as it:
                it.add_node("small", cpus=2)
                it.add_node("big", cpus=64)
                it.client.apply(pod("hungry", container(cpus="32")))
                it.client.wait_pod("hungry", lambda p: "nodeName" in p["spec"], "bound to a node")
                assert "big" in it.client.kubectl("get", "pods", "--output=wide")
                assert _running(scratch)
        except TestbedUnavailable as error:
            unavailable(error)
    assert not _running(scratch)
    assert not Path(scratch).exists()
    assert processes.mounts_below(Path(scratch)) == []


def _running(scratch: str) -> list[bytes]:
    return [command for _, command in processes.commands() if scratch.encode() in command]
