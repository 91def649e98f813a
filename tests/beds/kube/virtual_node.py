"""A node in an emulated machine with several NUMA nodes; its control plane stays on this one.

    with one_machine_at_a_time() as lock, VirtualNode(control, parts, machine, lock) as node:
        placed = control.client.run(pod("web", annotations=asks(numacpu="3", numamem="1")))
        print(node.look()[container_id(placed)])

The machine's network is QEMU's own, inside the bed's namespace: from the guest the API server is
where it is for everybody, and the guest's only address is one of the namespace, too, where QEMU
passes the kubelet's port on. What a node keeps over a reboot is on a disk; ``tests.vm.kube_guest``
is the program in there.
"""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.beds.containerd import find_binaries
from tests.beds.cri import poll
from tests.beds.debs import CNI_PLUGINS, DebCache
from tests.beds.kube.client import JsonObject, takes_pods
from tests.beds.kube.control_plane import ADDRESS, ControlPlane
from tests.beds.kube.numa_devices import REGISTERED, RESOURCES
from tests.beds.processes import ProcessBed
from tests.beds.testbed import TestbedUnavailable, run
from tests.beds.vm_bed import ARTIFACTS, GUEST_SHARED, Parts, booted, guest_variables, start_script
from tests.machines.vm_machine import Machine

GUEST_ADDRESS = "10.0.2.15"  # what QEMU's network gives its first guest
KUBELET_PORT = 10250
PROGRAMS = "programs"  # folder of the disk
GUEST_BED = Path("/run/bed")  # a tmpfs of the guest: containerd's own files
HANDOVER = GUEST_BED / "claims"
CDI_DIRECTORY = GUEST_BED / "cdi"
AGENT_SOCKET = GUEST_BED / "agent.sock"
PUBLISHER = GUEST_SHARED / "publisher"
# Emulated, on a machine that does other things as well: four minutes are usual for all of it.
_READY_LIMIT_S = 1200.0
_ANSWER_LIMIT_S = 300.0
_DISK_BYTES = 3 << 30  # sparse


class Wanted(msgspec.Struct, frozen=True):
    """What the guest is told about its node."""

    name: str
    agent: dict[str, object]


class Ask(msgspec.Struct, frozen=True):
    """What the guest is to do: one of these.

    * ``look`` at all running containers;
    * ``agree``: insist that systemd, the kernel and nri-numa say the same of each;
    * ``publish``: have ``nri-numa publish`` run, with what `VirtualNode.publish` wrote;
    * ``kill`` nri-numa by SIGKILL and start it again;
    * ``kubelet``: start it anew with keys of its configuration, and the device plugins of
      ``tests.beds.kube.numa_devices`` beside it;
    * ``devices``: say which of their devices the kubelet gave to whom;
    * ``end`` all programs in order.
    """

    what: str
    kubelet: dict[str, object] = {}


class Look(msgspec.Struct, frozen=True):
    """What a container's first process may use, in the kernel's form: its status, its cgroup."""

    cpus: str
    mems: str
    cgroup_cpus: str
    cgroup_mems: str


class Answer(msgspec.Struct, frozen=True):
    """The guest's answer; looks by container id, ids of devices by POD-UID/CONTAINER."""

    looks: dict[str, Look] = {}
    devices: dict[str, list[str]] = {}
    error: str = ""


def container_id(pod: JsonObject) -> str:
    (status, *_) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).removeprefix("containerd://")


class VirtualNode(ProcessBed):
    """One node in a virtual machine; a context manager. Boots it; returns when it takes pods."""

    def __init__(
        self,
        control: ControlPlane,
        parts: Parts,
        machine: Machine,
        lock: int,
        *,
        agent: Mapping[str, object],
    ) -> None:
        self.control = control
        self.name = "virtual"
        self.machine = machine
        self.directory = ARTIFACTS / machine.name
        self.disk = control.namespaces.directory / "disk.img"
        self._parts = parts
        self._lock = lock
        self._agent = dict(agent)
        self._asked = 0
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._make_disk()
        self._make_network()
        self._write_start()
        self.boot()

    def close(self) -> None:
        """Switch it off, as a power cut does."""
        self._process = None
        self._running.close()

    # -- life ------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switch it on; returns when the node is Ready and takes pods."""
        before = self._boot_id()
        more = [
            "-netdev",
            f"user,id=net,hostfwd=tcp:{GUEST_ADDRESS}:{KUBELET_PORT}-:{KUBELET_PORT}",
            "-device",
            "virtio-net-pci,netdev=net,bus=pcie.0,romfile=",
            "-drive",
            f"file={self.disk},if=virtio,format=raw,cache=unsafe",
        ]
        enter = self.control.namespaces.enter(mounts=False)
        self._process = self._running.enter_context(
            booted(self._parts, self.machine, self.directory, self._lock, more=more, enter=enter)
        )

        client = self.control.client

        def ready() -> bool | None:
            self._insist_on_running()
            return (
                True if self._boot_id() != before and takes_pods(client.node(self.name)) else None
            )

        poll(ready, f"node {self.name} Ready", timeout_s=_READY_LIMIT_S)

    def reboot(self) -> float:
        """End its programs in order, switch it off and on again; returns the seconds it took."""
        begin = time.monotonic()
        self._ask("end")
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)  # it switches itself off; everything is on the disk anyhow
        self.close()
        self.boot()
        return time.monotonic() - begin

    def _insist_on_running(self) -> None:
        failed = self.directory / "failed"
        if failed.exists():
            raise TestbedUnavailable(
                f"the node in the virtual machine did not start: {failed.read_text()[-2000:]}",
                f"read guest.log and containerd.log in {self.directory}",
            )
        if self._process is None or self._process.poll() is not None:
            raise TestbedUnavailable(
                f"machine {self.machine.name} ended", f"read {self.directory}/console.log"
            )

    def _boot_id(self) -> str:
        node = self.control.client.node(self.name)
        return str(node["status"].get("nodeInfo", {}).get("bootID", ""))

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Have ``nri-numa publish`` run in the guest, until the machine ends."""
        directory = self.directory / PUBLISHER.name
        directory.mkdir(exist_ok=True)
        for name, data in files.items():
            (directory / name).write_bytes(data)
        self._ask("publish")

    def kill_agent(self) -> None:
        """End nri-numa by SIGKILL; returns when another is connected."""
        self._ask("kill")

    def restart_kubelet(self, keys: Mapping[str, object]) -> None:
        """Start the kubelet anew with these keys of its configuration, and device plugins.

        Returns when it has their devices, which the Node has kept from its last life.
        """
        begin = self._registered()
        self._ask("kubelet", keys)
        kinds = len(RESOURCES)
        poll(
            lambda: self._registered() - begin >= kinds or None,
            "device plugins registered",
            timeout_s=_READY_LIMIT_S,
        )

        def allocatable() -> bool:
            self._insist_on_running()
            found = self.control.client.node(self.name)["status"]["allocatable"]
            return all(int(found.get(resource, 0)) for resource in RESOURCES)

        poll(lambda: allocatable() or None, "devices on the Node", timeout_s=_READY_LIMIT_S)

    def _registered(self) -> int:
        log = self.directory / "devices.log"
        return log.read_text("utf-8").count(REGISTERED) if log.exists() else 0

    # -- looking ---------------------------------------------------------------------------

    def look(self) -> dict[str, Look]:
        """What each running container may use now, by its id; read in the guest's ``/proc``."""
        return self._ask("look").looks

    def agree(self) -> None:
        """Insist on `tests.vm.scopes.systemd_agrees`; only with systemd as the first process."""
        self._ask("agree")

    def log(self) -> str:
        """Everything nri-numa wrote so far, over all boots."""
        return (self.directory / "plugin.log").read_text(encoding="utf-8", errors="replace")

    def devices(self, pod: JsonObject, name: str = "main") -> list[str]:
        """Ids of the devices that the kubelet gave to a container, sorted."""
        given = self._ask("devices").devices
        return given.get(f"{pod['metadata']['uid']}/{name}", [])

    def _ask(self, what: str, kubelet: Mapping[str, object] | None = None) -> Answer:
        self._asked += 1
        scratch = self.directory / "ask.tmp"
        scratch.write_bytes(msgspec.json.encode(Ask(what=what, kubelet=dict(kubelet or {}))))
        scratch.replace(self.directory / f"ask-{self._asked:03}.json")
        file = self.directory / f"answer-{self._asked:03}.json"

        def answered() -> bool | None:
            if not file.exists():
                self._insist_on_running()
            return file.exists() or None

        poll(answered, f"answer of the guest to {what}", timeout_s=_ANSWER_LIMIT_S)
        answer = msgspec.json.decode(file.read_bytes(), type=Answer)
        if answer.error:
            raise RuntimeError(f"the guest failed to {what}: {answer.error}")
        return answer

    # -- what it is made of ----------------------------------------------------------------

    def _make_disk(self) -> None:
        """A disk with the programs on it: much faster than the host's files over 9p."""
        binaries = find_binaries(self.machine.containerd)
        (network,) = DebCache().fetch(CNI_PLUGINS)
        tree = self.control.namespaces.directory / "disk"
        programs = tree / PROGRAMS
        programs.mkdir(parents=True)
        for source in (
            *(binaries.directory / name for name in ("containerd", "containerd-shim-runc-v2")),
            binaries.directory / "ctr",
            binaries.runc,
            binaries.busybox,
        ):
            shutil.copy(source, programs / source.name)
        shutil.copy((self.control.programs / "kubelet").resolve(), programs / "kubelet")
        shutil.copytree(network.root / "usr/lib/cni", programs / "cni")
        with self.disk.open("wb") as file:
            file.truncate(_DISK_BYTES)
        remedy = f"apt-get install e2fsprogs, or free some space at {self.disk}"
        run("mkfs.ext4", "-q", "-F", "-d", tree, self.disk, remedy=remedy)
        shutil.rmtree(tree)

    def _make_network(self) -> None:
        """The guest's address in the bed's network, so that the API server finds the kubelet.

        Connections to it must not come from it: the guest drops what comes from its own address.
        """
        enter = self.control.namespaces.enter(mounts=False)
        route = f"route replace local {GUEST_ADDRESS} dev lo src {ADDRESS} table local"
        for words in (f"address add {GUEST_ADDRESS}/32 dev lo", route):
            run(*enter, "ip", *words.split(), remedy="apt-get install iproute2")

    def _write_start(self) -> None:
        document = json.loads(self.control.kubeconfig(f"system:node:{self.name}").read_text())
        for each in document["clusters"]:
            certificate = Path(each["cluster"].pop("certificate-authority")).read_bytes()
            each["cluster"]["certificate-authority-data"] = base64.b64encode(certificate).decode()
        (self.directory / "kubeconfig").write_text(json.dumps(document))
        wanted = Wanted(name=self.name, agent=self._agent)
        (self.directory / "node.json").write_bytes(msgspec.json.encode(wanted))
        script = start_script(
            self.machine, guest_variables(), [str(GUEST_SHARED)], "tests.vm.kube_guest"
        )
        (self.directory / "start").write_text(script, encoding="utf-8")
