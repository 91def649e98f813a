"""The whole bed: a control plane, and a node on this machine."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.beds.kube.build import find_programs
from tests.beds.kube.client import Client
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.namespaces import Namespaces
from tests.beds.kube.node import KubeNode
from tests.beds.processes import ProcessBed
from tests.beds.testbed import require_root

OTHER_NODES = ("second", "third")
"""Nodes that a test can add."""


class KubeBed(ProcessBed):
    """Kubernetes with one node called ``bed`` that runs nri-numa; a context manager."""

    def __init__(self, *, plugin: Mapping[str, Any] | None = None, build: bool = True) -> None:
        self._plugin = plugin
        self._build = build
        self._stack = contextlib.ExitStack()
        self.directory: Path
        self.control: ControlPlane
        self.node: KubeNode

    @property
    def client(self) -> Client:
        return self.control.client

    def logs(self) -> list[Path]:
        own = sorted(self.control.log_directory.glob("*.log"))
        names = ("publish", "controller", "scheduler", "numa-scheduler")
        beside = [file for name in names for file in sorted(self.directory.glob(f"*/{name}.log"))]
        return [*own, self.node.containerd.log_file, self.node.plugin.log_file, *beside]

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            require_root("a Kubernetes")  # before anything is built in vain
            # Not pytest's own directory: socket paths must stay short.
            self.directory = Path(tempfile.mkdtemp(prefix="nri-numa-kube-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            programs = find_programs(build=self._build)
            namespaces = stack.enter_context(Namespaces(self.directory))
            control = ControlPlane(
                programs, namespaces, nodes=["bed", *OTHER_NODES], heartbeats=True
            )
            self.control = stack.enter_context(control)
            self.node = stack.enter_context(KubeNode(control, plugin=self._plugin))
            self._stack = stack.pop_all()

    @contextlib.contextmanager
    def other_node(self, name: str) -> Iterator[KubeNode]:
        """One more node beside ``bed``, of `OTHER_NODES`."""
        uplink, number = self.control.namespaces, 1 + OTHER_NODES.index(name)
        with (
            Namespaces(self.directory / name, uplink=uplink, number=number) as namespaces,
            KubeNode(self.control, name=name, namespaces=namespaces) as node,
        ):
            yield node
        self.client.ask("DELETE", f"/api/v1/nodes/{name}")

    def close(self) -> None:
        self._stack.close()
