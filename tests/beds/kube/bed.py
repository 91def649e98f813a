"""The whole bed: a control plane, a node on this machine, and our processes with a token each."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.beds.kube.build import find_programs
from tests.beds.kube.client import Client
from tests.beds.kube.control_plane import ADDRESS, ControlPlane, Namespaces
from tests.beds.kube.node import NOBODY, KubeNode
from tests.beds.plugin_process import REPOSITORY, plugin_environment
from tests.beds.processes import Daemon, ProcessBed
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


MANIFESTS = REPOSITORY / "config/kubernetes"
NAMESPACE = "nri-numa"


def readable_tree(bed: KubeBed) -> Path:
    """The repository where everybody may go: a checkout is often in a folder of root alone."""
    tree = bed.directory / "tree"
    if not tree.exists():
        tree.mkdir()
        mount = ["mount", "--bind", str(REPOSITORY), str(tree)]
        subprocess.run([*bed.control.namespaces.enter(), *mount], check=True)
    return tree


def below(tree: Path, program: str) -> Path:
    """The interpreter of the repository's environment, by its way through `tree`."""
    path = Path(program)
    inside = path.is_relative_to(REPOSITORY)
    return tree / path.relative_to(REPOSITORY) if inside else path


class Service(Daemon):
    """``nri-numa COMMAND`` as another user than root in the bed's network; a context manager.

    Args:
        command: the subcommand; also the name of the log file.
        certificate: of the certificate authority; the bed's by default.
    """

    def __init__(
        self, bed: KubeBed, command: str, token: str, *, certificate: bytes | None = None
    ) -> None:
        bed.directory.chmod(0o711)  # so that somebody else gets to what is his
        tree = readable_tree(bed)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{command}-", dir=bed.directory))
        self.give("token", token.encode())
        self.give("ca.crt", certificate or bed.control.certificate.read_bytes())
        self.give("namespace", NAMESPACE.encode())
        os.chown(self.directory, NOBODY, NOBODY)
        self.enter = bed.control.namespaces.enter()
        super().__init__(
            command,
            [
                *self.enter,
                "setpriv",
                f"--reuid={NOBODY}",
                f"--regid={NOBODY}",
                "--clear-groups",
                "--no-new-privs",
                "--bounding-set=-all",
                str(below(tree, sys.executable)),
                "-m",
                "nri_numa",
                command,
                f"--config={self.directory / 'agent.yaml'}",
            ],
            self.directory,
            plugin_environment(
                {
                    "KUBERNETES_SERVICE_HOST": ADDRESS,
                    "KUBERNETES_SERVICE_PORT": "6443",
                    "PYTHONPATH": str(tree),
                    "PYTHONDONTWRITEBYTECODE": "1",
                }
            ),
        )

    def give(self, name: str, data: bytes) -> None:
        """Put a file into its directory that it alone may read."""
        file = self.directory / name
        file.write_bytes(data)
        os.chown(file, NOBODY, NOBODY)
        file.chmod(0o400)

    def configure(self, **sections: Any) -> None:
        """Its configuration: log lines as JSON, and these sections."""
        document: Mapping[str, Any] = {
            "apiVersion": "nri-numa/v1",
            "kind": "AgentConfig",
            "log": {"format": "json", "level": "debug"},
            **sections,
        }
        self.give("agent.yaml", json.dumps(document).encode())

    def records(self, message: str = "", *, since: int = 0) -> list[dict[str, Any]]:
        """As of every daemon; it must not have ended."""
        self.check()
        return super().records(message, since=since)


Numa = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs ``kubectl numa`` with these arguments."""


ACCOUNT = "nri-numa-publish"


def install(client: Client) -> None:
    """Everything of the shipped manifests that the publisher needs, without the DaemonSet."""
    files = (
        "base/namespace.yaml",
        "publish/serviceaccount.yaml",
        "publish/role.yaml",
        "publish/policies.yaml",
        "publish-pods/role.yaml",
        "publish-capacity/role.yaml",
        "publish-capacity/policies.yaml",
    )
    client.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))


def token(client: Client, node: str = "") -> str:
    return client.token(ACCOUNT, node=node)


class Publisher(Service):
    """One publisher; a context manager.

    Args:
        certificate: of the certificate authority; the bed's by default.
    """

    def __init__(
        self,
        bed: KubeBed,
        token: str,
        *,
        config: Mapping[str, Any] | None = None,
        certificate: bytes | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(bed, "publish", token, certificate=certificate)
        section = {
            "credentialsDir": str(self.directory),
            "resyncInterval": "2s",
            "apiQPS": 20,
            **(config or {}),
        }
        self.configure(
            http={"socket": str(bed.node.api_socket)},
            nodeName=bed.node.name,
            publish=section,
            **(more or {}),
        )
