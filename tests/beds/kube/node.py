"""A real node on this machine: kubelet, containerd with NRI, nri-numa, in a bed's namespaces."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nri_numa.model.cpuset import CPUSet
from tests.beds import cgroups
from tests.beds.containerd import Containerd, find_binaries
from tests.beds.cri import Seen, allowed
from tests.beds.debs import CNI_PLUGINS, DebCache
from tests.beds.kube.client import PATIENCE_S, JsonObject, takes_pods
from tests.beds.kube.control_plane import ControlPlane, Namespaces
from tests.beds.plugin_process import PluginProcess
from tests.beds.processes import Daemon, ProcessBed, wait_for

NOBODY = 65534
"""User and group of whoever needs no rights."""

SERVICES = "10.96.0.0/24"  # where a test makes one


def pod_network(subnet: str) -> dict[str, Any]:
    """One pair of interfaces for each pod, and a way to Services; a node without is never Ready."""
    routes = [{"dst": SERVICES}]
    ipam = {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": routes}
    plugins = [{"type": "ptp", "ipam": ipam}]
    return {"cniVersion": "1.0.0", "name": "bed", "plugins": plugins}


def kubelet_configuration(
    runtime: Path, directory: Path, *, cgroup_root: str, address: str
) -> dict[str, Any]:
    """A KubeletConfiguration for a bed.

    `cgroup_root`: of all pods; must be there.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,  # else 1.35 and newer refuse cgroup v1
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "containerRuntimeEndpoint": f"unix://{runtime}",
        "address": address,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "oomScoreAdj": 0,  # a negative one needs CAP_SYS_RESOURCE
        "makeIPTablesUtilChains": False,
        "failSwapOn": False,
        # A full disk of this machine is not what the tests are about.
        "evictionHard": {
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",  # new resources show at once
        "clusterDNS": ["198.51.100.53"],  # nobody is there; without one each pod gets an Event
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "staticPodPath": str(directory / "static"),
        "volumePluginDir": str(directory / "volume-plugins"),  # default below /usr
    }


class KubeNode(ProcessBed):
    """One node; a context manager. The kubelet starts when nri-numa is ready.

    Args:
        namespaces: where it is; those of the control plane by default.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        name: str = "bed",
        plugin: Mapping[str, Any] | None = None,
        namespaces: Namespaces | None = None,
    ) -> None:
        self.control = control
        self.name = name
        namespaces = namespaces or control.namespaces
        self.directory = namespaces.directory / "node"
        # What is /var/lib/kubelet inside: its state files, for whoever looks from outside.
        self.kubelet_root = namespaces.directory / "var/lib/kubelet"
        # As the DaemonSet's volume: for the group of whoever publishes.
        self.api_socket = namespaces.directory / "api" / "agent.sock"
        # A kubelet ends what runs below its root and is not its own.
        self.cgroup_root = f"/nri-numa-kube-{namespaces.pid}"
        (plugins,) = DebCache().fetch(CNI_PLUGINS)
        self.containerd = Containerd(
            find_binaries(),
            namespaces.directory / "c",
            enter=namespaces.enter(),
            cni=(pod_network(namespaces.pod_subnet), plugins.root / "usr/lib/cni"),
        )
        self.plugin = _PluginInside(
            namespaces.directory / "plugin",
            self.containerd.nri_socket,
            namespaces=namespaces,
            api_socket=self.api_socket,
            config=plugin,
        )
        self.configuration = kubelet_configuration(
            self.containerd.socket,
            self.directory,
            cgroup_root=self.cgroup_root,
            address=namespaces.address,
        )
        # The same path on each node, as the chart wants it.
        self._nri_link = namespaces.directory / "var/lib/nri"
        self.kubelet = Daemon(
            "kubelet",
            [
                *namespaces.enter(),
                str(control.programs / "kubelet"),
                f"--config={self.directory / 'kubelet.json'}",
                f"--kubeconfig={control.kubeconfig(f'system:node:{name}')}",
                f"--hostname-override={name}",
                f"--node-ip={namespaces.address}",
            ],
            namespaces.directory / "logs",
            control.environment,
        )

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all three; returns when the node is Ready and takes pods."""
        (self.directory / "static").mkdir(parents=True, exist_ok=True)
        self.kubelet.log_file.parent.mkdir(exist_ok=True)
        self._nri_link.symlink_to(self.containerd.nri_socket.parent)
        self.api_socket.parent.mkdir(exist_ok=True)
        os.chown(self.api_socket.parent, 0, NOBODY)
        self.api_socket.parent.chmod(0o2750)
        _make_cgroup(self.cgroup_root)
        self.containerd.note_cgroup(self.cgroup_root)
        self.containerd.start(timeout_s=PATIENCE_S)
        # Before the kubelet: what starts before the plugin is there is not pinned.
        self.plugin.start(timeout_s=PATIENCE_S)
        self._start_kubelet()

    def _start_kubelet(self, *, wait: bool = True) -> None:
        before = self._last_heartbeat()
        (self.directory / "kubelet.json").write_text(json.dumps(self.configuration, indent=1))
        self.kubelet.start()
        if wait:
            wait_for(
                [self.kubelet],
                # Its old word that it is Ready is still there.
                lambda: (
                    self._last_heartbeat() != before
                    and takes_pods(self.control.client.node(self.name))
                ),
                f"node {self.name} Ready",
            )

    def restart_kubelet(
        self, configuration: Mapping[str, Any] | None = None, *, wait: bool = True
    ) -> None:
        self.kubelet.end()
        if configuration is not None:
            self.configuration.update(configuration)
            for name in ("cpu_manager_state", "memory_manager_state"):
                (self.kubelet_root / name).unlink(missing_ok=True)
        self._start_kubelet(wait=wait)

    @contextlib.contextmanager
    def configured(self, **sections: object) -> Iterator[None]:
        """nri-numa with these sections, which takes a start; afterwards it is as it was."""
        before = json.loads(self.plugin.config_file.read_text())
        try:
            self.plugin.write_config({**before, **sections})
            self.plugin.restart()
            yield
        finally:
            self.plugin.write_config(before)
            self.plugin.restart()

    def _last_heartbeat(self) -> str:
        conditions = self.control.client.node(self.name)["status"].get("conditions", [])
        return next((str(c["lastHeartbeatTime"]) for c in conditions if c["type"] == "Ready"), "")

    def close(self) -> None:
        self.kubelet.end(signal.SIGKILL)
        self.plugin.close()
        self.containerd.close()
        cgroups.remove_tree(self.cgroup_root)

    # -- what became of a container --------------------------------------------------------

    def pid(self, pod: JsonObject, container: str = "") -> int:
        """Process id of the first process of a pod's container; the first one by default."""
        for status in _statuses(pod):
            if container in ("", status["name"]) and (name := status.get("containerID")):
                return self.containerd.cri.pid(str(name).removeprefix("containerd://"))
        raise LookupError(f"no container {container or 'at all'} in {pod['status']}")

    def allowed(self, pod: JsonObject, container: str = "") -> Seen:
        return allowed(self.pid(pod, container))

    def cpus(self, pod: JsonObject, container: str = "") -> CPUSet:
        return CPUSet.parse(self.allowed(pod, container).cpus)

    def cgroup_file(self, pod: JsonObject, controller: str, v1: str, v2: str) -> str:
        """Text of a file in the cgroup of a pod's first container.

        `controller`: whose hierarchy on cgroup v1.
        `v2`: its name on cgroup v2.
        """
        for line in Path(f"/proc/{self.pid(pod)}/cgroup").read_text(encoding="ascii").splitlines():
            _, names, path = line.split(":", 2)
            if names == ("" if cgroups.unified() else controller):
                base = cgroups.CGROUP_ROOT / names / path.lstrip("/")
                return (base / (v2 if cgroups.unified() else v1)).read_text().strip()
        raise LookupError(f"no cgroup of {controller}")


def _statuses(pod: JsonObject) -> list[JsonObject]:
    status = pod["status"]
    kinds = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
    return [each for kind in kinds for each in status.get(kind, [])]


def _make_cgroup(path: str) -> None:
    """A cgroup for the kubelet to stand on, in every hierarchy; it wants it to be there."""
    for root in cgroups.hierarchies():
        if cgroups.unified():
            for controller in ("cpuset", "cpu", "memory", "pids", "io", "hugetlb"):
                with contextlib.suppress(OSError):
                    (root / "cgroup.subtree_control").write_text(f"+{controller}")
        directory = root / path.lstrip("/")
        directory.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one of version 1
            if not cgroups.unified() and (directory / name).exists():
                (directory / name).write_text((root / name).read_text())


class _PluginInside(PluginProcess):
    """nri-numa as in its DaemonSet: the bed's ``/var/lib/kubelet``, the host's network."""

    def __init__(
        self,
        directory: Path,
        nri_socket: Path,
        *,
        namespaces: Namespaces,
        api_socket: Path,
        config: Mapping[str, Any] | None,
    ) -> None:
        # Whatever a test configures: others of the bed ask there, after a restart too.
        self._always = {"http": {"socket": str(api_socket)}}
        super().__init__(directory, nri_socket, config={**self._always, **(config or {})})
        self._namespaces, self.folder = namespaces, None

    def write_config(self, config: Mapping[str, Any] | None = None) -> None:
        super().write_config(None if config is None else {**self._always, **config})

    def words(self) -> list[str]:
        return [*self._namespaces.enter(network=False), *super().words()]
