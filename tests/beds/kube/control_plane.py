"""etcd, API server, controller manager and scheduler, for real, in a bed's namespaces.

    with Namespaces(directory) as namespaces, ControlPlane(find_programs(), namespaces) as control:
        control.client.add_node("big", cpus=64, ready=True)
        print(control.client.kubectl("get", "nodes"))

Nodes made by `Client.add_node` are objects only: pods are bound to them and never start.
"""

import contextlib
import json
import os
import secrets
import shlex
import signal
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tests.beds.kube.client import Client, KubeError, client_environment
from tests.beds.kube.namespaces import ADDRESS, Namespaces
from tests.beds.processes import Daemon, ProcessBed, wait_for
from tests.beds.testbed import run

_SERVER = f"https://{ADDRESS}:6443"


class ControlPlane(ProcessBed):
    """One control plane; a context manager.

    Args:
        heartbeats: whether a node that does not report is tainted; not where nodes are objects.
        gates: feature gates that are on in API server, controller manager and scheduler.
    """

    def __init__(
        self,
        programs: Path,
        namespaces: Namespaces,
        *,
        nodes: Sequence[str] = (),
        heartbeats: bool = False,
        scheduler: Mapping[str, object] | None = None,
        gates: Sequence[str] = (),
    ) -> None:
        self.programs = programs
        self.namespaces = namespaces
        self.directory = namespaces.directory / "control"
        self.certificate = self.directory / "tls" / "apiserver.crt"
        self.log_directory = namespaces.directory / "logs"
        self._heartbeats = heartbeats
        self._scheduler = dict(scheduler or {})
        self._gates = [f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"] * bool(
            gates
        )
        self._tokens = {
            user: secrets.token_hex(16)
            for user in (
                "admin",
                "system:kube-controller-manager",
                "system:kube-scheduler",
                *(f"system:node:{node}" for node in nodes),
            )
        }
        self.daemons: dict[str, Daemon] = {}  # by the names of their programs
        self.environment = client_environment(self.directory, self.kubeconfig("admin"))
        self._proxy_socket = self.directory / "proxy.sock"

    @cached_property
    def client(self) -> Client:
        kubectl = [*self.namespaces.enter(mounts=False), str(self.programs / "kubectl")]
        return Client(kubectl, self.environment, self._proxy_socket)

    def write_kubectl(self, directory: Path) -> Path:
        """A ``kubectl`` in a folder, for who is not inside."""
        enter = shlex.join(self.namespaces.enter(mounts=False))
        file = directory / "kubectl"
        file.write_text(f'#!/bin/sh\nexec {enter} {self.programs}/kubectl "$@"\n')
        file.chmod(0o755)
        return file

    def kubeconfig(self, user: str) -> Path:
        """The configuration file for ``admin``, ``system:node:NAME``, …."""
        return self.directory / f"{user.replace(':', '-')}.kubeconfig"

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all of it; returns when pods can be created."""
        for directory in (self.directory, self.log_directory):
            directory.mkdir(parents=True, exist_ok=True)
        key = self._service_account_key()
        self._write_users()
        data = f"--data-dir={self.namespaces.tmpfs / 'etcd'}"
        self._start("etcd", data, "--unsafe-no-fsync", "--logger=zap", "--log-level=warn")
        server = self._start("kube-apiserver", *self._api_server(key), *self._gates)
        both = list(self.daemons.values())
        wait_for(both, self.certificate.exists, "certificate")
        self._start("proxy", f"--unix-socket={self._proxy_socket}", program=("kubectl", "proxy"))
        wait_for([*both, self.daemons["proxy"]], self._ready, "API server")
        assert server.running
        controllers = "*" if self._heartbeats else "*,-node-lifecycle-controller"
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('system:kube-controller-manager')}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.certificate}",
            f"--controllers={controllers}",
            "--use-service-account-credentials",
            f"--flex-volume-plugin-dir={self.directory / 'flex'}",  # default below /usr
            "--leader-elect=false",
            *self._gates,
        )
        config = self.write_scheduler(self.directory, **self._scheduler)
        self._start("kube-scheduler", f"--config={config}", *self._gates)
        wait_for(
            list(self.daemons.values()),
            # Without it the API server refuses every pod.
            lambda: self._there("/api/v1/namespaces/default/serviceaccounts/default"),
            "first service account",
        )

    def close(self) -> None:
        """End all of it. Nothing of theirs is worth a good end: the data was in a tmpfs."""
        for daemon in reversed(list(self.daemons.values())):
            daemon.end(signal.SIGKILL)
        self.daemons.clear()

    def _start(self, name: str, *arguments: str, program: Sequence[str] = ()) -> Daemon:
        first, *words = program or (name,)
        daemon = Daemon(
            name,
            [*self.namespaces.enter(), str(self.programs / first), *words, *arguments],
            self.log_directory,
            self.environment,
        )
        self.daemons[name] = daemon
        daemon.start()
        return daemon

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.client.request("GET", "/readyz")[0] == 200
        return False

    def _there(self, path: str) -> bool:
        with contextlib.suppress(OSError, KubeError):
            return self.client.get(path) is not None
        return False

    # -- what they are told ----------------------------------------------------------------

    def _service_account_key(self) -> Path:
        key = self.directory / "service-accounts.key"
        run("openssl", "genrsa", "-out", key, "2048", remedy="apt-get install openssl")
        return key

    def _write_users(self) -> None:
        lines = []
        for user, token in self._tokens.items():
            group = {"admin": "system:masters"}.get(user, "")
            if user.startswith("system:node:"):
                group = "system:nodes"
            lines.append(f'{token},{user},{user},"{group}"')
            document = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {
                        "name": "bed",
                        "cluster": {
                            "server": _SERVER,
                            "certificate-authority": str(self.certificate),
                        },
                    }
                ],
                "users": [{"name": user, "user": {"token": token}}],
                "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user}}],
                "current-context": "bed",
            }
            _write_private(self.kubeconfig(user), json.dumps(document, indent=1))
        _write_private(self.directory / "tokens.csv", "\n".join(lines) + "\n")

    def _api_server(self, key: Path) -> list[str]:
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--cert-dir={self.certificate.parent}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={ADDRESS}",
            "--service-cluster-ip-range=10.96.0.0/24",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--endpoint-reconciler-type=none",
            # Else "kubectl logs" asks a name server for the node's name.
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def scheduler(self, name: str, file: Path, port: int) -> Daemon:
        """One more kube-scheduler, with the configuration in a file."""
        program = [*self.namespaces.enter(), str(self.programs / "kube-scheduler")]
        command = [*program, f"--config={file}", f"--secure-port={port}"]
        return Daemon(name, command, file.parent, self.environment)

    def write_scheduler(self, directory: Path, **sections: object) -> Path:
        """The configuration of a kube-scheduler of this control plane."""
        document = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig("system:kube-scheduler"))},
            **sections,
        }
        target = directory / "scheduler.json"
        target.write_text(json.dumps(document, indent=1), encoding="utf-8")
        return target


def _write_private(target: Path, text: str) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
