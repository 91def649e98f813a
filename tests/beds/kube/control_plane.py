"""etcd, API server, controller manager and scheduler, for real, in a bed's namespaces.

    with Namespaces(directory) as namespaces, ControlPlane(find_programs(), namespaces) as control:
        control.client.add_node("big", cpus=64, ready=True)
        print(control.client.kubectl("get", "nodes"))

Nodes made by `Client.add_node` are objects only: pods are bound to them and never start.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tests.beds.kube.client import Client, KubeError, client_environment
from tests.beds.processes import Daemon, ProcessBed, wait_for
from tests.beds.testbed import TestbedUnavailable, cache_dir, require_root, run

ADDRESS = (
    "198.51.100.1"  # TEST-NET-2: API server and kubelet refuse loopback addresses as their own
)

# The kubelet writes these of the whole machine when they are not as it wants. It reads the files
# mounted over them and is content.
_KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
_HIDDEN = (Path("/var/lib"), Path("/var/log"))


class Namespaces(ProcessBed):
    """A network namespace and a mount namespace; a context manager.

    The network takes no port of the machine, so two beds do not meet. With mounts of its own the
    kubelet finds ``/var/lib/kubelet`` and the kernel's settings as it wants them, and changes
    nothing of the machine. Both last as long as a process that does nothing holds them.

    Inside, `address` is on the loopback interface, ``/var/lib`` and ``/var/log`` are folders of the
    bed, and ``directory/tmpfs`` is a tmpfs.

    Args:
        uplink: those with `ADDRESS`, which this network reaches, as a node reaches its cluster.
        number: of the network beside the uplink's; also in the addresses of its pods.
    """

    def __init__(
        self, directory: Path, *, uplink: Namespaces | None = None, number: int = 0
    ) -> None:
        self.directory = directory
        self.address = f"198.51.100.{number + 1}"
        self.pod_subnet = f"10.244.{number}.0/24"
        self._uplink = uplink
        self.tmpfs = directory / "tmpfs"
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._holder is not None, "the namespaces are not there"
        return self._holder.pid

    def enter(self, *, network: bool = True, mounts: bool = True) -> list[str]:
        """The words before a command that make it run inside; its process id stays the same."""
        flags = [flag for flag, wanted in (("--net", network), ("--mount", mounts)) if wanted]
        return ["nsenter", f"--target={self.pid}", *flags, "--"]

    def start(self) -> None:
        require_root("a Kubernetes of its own namespaces")
        for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("mount", "mount")):
            if shutil.which(program) is None:
                raise TestbedUnavailable(f"{program} is not here", f"apt-get install {package}")
        for wanted in (self.directory, cache_dir()):
            if any(wanted.resolve().is_relative_to(hidden) for hidden in _HIDDEN):
                raise TestbedUnavailable(
                    f"{wanted} is hidden in the bed, which has its own /var/lib and /var/log",
                    "set NRI_NUMA_CACHE and TMPDIR to another place",
                )
        self._holder = subprocess.Popen(
            # Without --fork it is unshare itself that becomes the shell, and then the sleeper.
            [
                "unshare",
                "--net",
                "--mount",
                "--propagation",
                "private",
                "--",
                "sh",
                "-euc",
                self._script(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"there\n":
            words = self._holder.stderr.read().decode(errors="replace").strip()
            raise TestbedUnavailable(
                f"no namespaces for the bed: {words}", "run as root with CAP_SYS_ADMIN"
            )
        if self._uplink is not None:
            self._connect(self._uplink)

    def _connect(self, uplink: Namespaces) -> None:
        """Two interfaces that are one cable, and the ways over them."""
        ours, theirs = self.enter(mounts=False), uplink.enter(mounts=False)
        end = f"to{self.address.rpartition('.')[2]}"
        for enter, words in (
            (theirs, f"link add {end} type veth peer name uplink netns {self.pid}"),
            (theirs, f"link set {end} up"),
            (ours, "link set uplink up"),
            (ours, f"route add default via {uplink.address} dev uplink onlink src {self.address}"),
            (theirs, f"route add {self.address} dev {end} src {uplink.address}"),
            (theirs, f"route add {self.pod_subnet} via {self.address} dev {end} onlink"),
        ):
            run(*enter, "ip", *words.split(), remedy="apt-get install iproute2")

    def _script(self) -> str:
        lines = ["ip link set lo up", f"ip address add {self.address}/32 dev lo"]
        for hidden in _HIDDEN:
            own = self.directory / hidden.relative_to("/")
            own.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(own))} {hidden}")
        # Volumes that the kubelet mounts must be seen by containerd, whose containers get copies.
        lines += [
            "mkdir -p /var/lib/kubelet",
            "mount --bind /var/lib/kubelet /var/lib/kubelet",
            "mount --make-rshared /var/lib/kubelet",
        ]
        self.tmpfs.mkdir(parents=True, exist_ok=True)
        lines.append(f"mount -t tmpfs -o mode=0700 tmpfs {shlex.quote(str(self.tmpfs))}")
        settings = self.directory / "settings"
        settings.mkdir(exist_ok=True)
        for name, value in _KERNEL_SETTINGS.items():
            if not (target := Path("/proc/sys") / name).exists():
                continue
            own = settings / name.replace("/", "-")
            own.write_text(f"{value}\n", encoding="ascii")
            lines.append(f"mount --bind {shlex.quote(str(own))} {target}")
        return "\n".join([*lines, "echo there", "exec sleep infinity"])

    def close(self) -> None:
        """Let go of them; the kernel removes them with the last process inside."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        for pipe in (holder.stdout, holder.stderr):
            if pipe is not None:
                pipe.close()


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
