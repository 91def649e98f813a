"""The Helm chart installed in a bed, as an operator installs it; its processes run beside it.

Nothing here can pull the images. So all objects are those of the chart, its namespace has a quota
of no pods unless the node has the image, and each process runs as it would there: with the token of
the chart's service account and the configuration of the chart's ConfigMap.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import yaml

from tests.beds.install_manifests import program
from tests.beds.kube.bed import KubeBed, Service
from tests.beds.kube.client import PATIENCE_S, KubeError
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.plugin_process import REPOSITORY
from tests.beds.processes import Daemon, ProcessBed

_FORWARD: Final = """
import socketserver, socket, threading

def copy(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

class Both(socketserver.BaseRequestHandler):
    def handle(self):
        with socket.create_connection((SERVER, PORT)) as server:
            threading.Thread(target=copy, args=(server, self.request), daemon=True).start()
            copy(self.request, server)

class Forward(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True

Forward((SERVICE, 443), Both).serve_forever()
"""


class ServiceAddress(Daemon):
    """The API server at the address of its Service, which a kube-proxy would make."""

    def __init__(self, bed: KubeBed) -> None:
        enter = bed.control.namespaces.enter(mounts=False)
        spec = bed.client.ask("GET", "/api/v1/namespaces/default/services/kubernetes")["spec"]
        names = f"SERVER, PORT, SERVICE = {ADDRESS!r}, 6443, {spec['clusterIP']!r}\n"
        self._address = [*enter, "ip", "address", "replace", f"{spec['clusterIP']}/32", "dev", "lo"]
        command = [*enter, sys.executable, "-c", names + _FORWARD]
        super().__init__("service-address", command, bed.directory, {"PATH": os.environ["PATH"]})

    def start(self) -> None:
        subprocess.run(self._address, check=True)
        super().start()

    def close(self) -> None:
        self.end()


CHART: Final = REPOSITORY / "config/helm/nri-numa"


class Release(ProcessBed):
    """One installation; a context manager.

    Args:
        values: as in a values file.
        pods: how many may run; the node has the image then.
    """

    def __init__(
        self, bed: KubeBed, name: str, values: Mapping[str, Any], *, pods: int = 0
    ) -> None:
        self._bed, self.name, self.values, self._pods = bed, name, dict(values), pods
        self.fullname = name if "nri-numa" in name else f"{name}-nri-numa"
        self._helm = [*bed.control.namespaces.enter(mounts=False), program("helm")]

    def helm(self, *arguments: str) -> str:
        """What Helm printed.

        Raises:
            KubeError: it failed.
        """
        done = subprocess.run(
            [*self._helm, *arguments, f"--namespace={self.name}"],
            env=self._bed.control.environment,
            input=json.dumps(self.values),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise KubeError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def start(self) -> None:
        metadata = {"name": self.name}
        self._bed.client.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "pods", "namespace": self.name},
                "spec": {"hard": {"pods": str(self._pods)}},
            },
        )
        # Other tests leave the accounts and policies of the manifests.
        own = ("--create-namespace", "--take-ownership")
        self.said = self.helm("install", self.name, str(CHART), *own, "-f-")

    def upgrade(self, **values: object) -> None:
        """Give it other values, as the next revision."""
        self.values |= values
        self.said = self.helm("upgrade", self.name, str(CHART), "-f-")

    def close(self) -> None:
        self.helm("uninstall", self.name, "--ignore-not-found", "--wait")
        # Its end takes seconds, and nobody uses the name again.
        self._bed.client.request("DELETE", f"/api/v1/namespaces/{self.name}")

    def data(self, name: str, key: str) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{self.name}/configmaps/{name}"
        document: dict[str, Any] = yaml.safe_load(self._bed.client.ask("GET", path)["data"][key])
        return document

    def token(self, account: str, *, node: str = "") -> str:
        """A token of one of its service accounts; one that names a node, or none."""
        return self._bed.client.token(account, self.name, node=node)

    def service(self, command: str, token: str, **sections: Mapping[str, Any]) -> Service:
        """``nri-numa COMMAND`` with the configuration of the release."""
        process = Service(self._bed, command, token)
        process.give("namespace", self.name.encode())
        document = self.data(self.fullname, "agent.yaml")
        credentials = {"credentialsDir": str(process.directory)}
        own = {**sections, command: {**credentials, **sections.get(command, {})}}
        merged = {k: {**document.get(k, {}), **v} for k, v in own.items()}
        process.configure(**{**document, **merged, "nodeName": self._bed.node.name})
        return process

    def scheduler(self, port: int) -> Daemon:
        """The kube-scheduler beside the extender, with the account and the file of the release."""
        name = f"{self.fullname}-scheduler"
        directory = self._bed.directory / name
        directory.mkdir(exist_ok=True)
        admin = json.loads(self._bed.control.kubeconfig("admin").read_text())
        admin["users"][0]["user"] = {"token": self.token(name)}
        kubeconfig = directory / "kubeconfig.json"
        kubeconfig.write_text(json.dumps(admin))
        kubeconfig.chmod(0o600)
        document = self.data(name, "scheduler.yaml")
        document["clientConnection"] = {"kubeconfig": str(kubeconfig)}
        file = directory / "scheduler.json"
        file.write_text(json.dumps(document))
        return self._bed.control.scheduler("kube-scheduler", file, port)
