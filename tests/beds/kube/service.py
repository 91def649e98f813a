"""One of our processes that speak to the API server, as in its container: no rights, a token."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.beds.kube.bed import KubeBed
from tests.beds.kube.namespaces import ADDRESS
from tests.beds.kube.node import NOBODY
from tests.beds.plugin_process import REPOSITORY, plugin_environment
from tests.beds.processes import Daemon
from tests.beds.reports import attach_if_failed, pytest_runtest_makereport  # noqa: F401  # the hook

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
