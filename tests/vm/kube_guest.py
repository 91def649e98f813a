"""One node of a Kubernetes inside a virtual machine: ``python -m tests.vm.kube_guest SHARED``.

Started by `tests.beds.kube.virtual_node` as root. ``/mnt`` is a disk that outlives the machine; on
it are the programs, ``/var/lib`` and ``/var/log``, what containerd keeps, and the state directory
of nri-numa, which is on a tmpfs by default: here it finds what was before the reboot.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.beds.containerd import find_binaries
from tests.beds.cri import CRIError
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.kube.node import kubelet_configuration, pod_network
from tests.beds.kube.virtual_node import (
    AGENT_SOCKET,
    GUEST_ADDRESS,
    GUEST_BED,
    HANDOVER,
    PROGRAMS,
    PUBLISHER,
    Answer,
    Ask,
    Look,
    Wanted,
)
from tests.beds.plugin_process import plugin_environment
from tests.beds.processes import Daemon
from tests.machines.vm_machine import format_list, parse_list
from tests.vm import words
from tests.vm.guest import GuestContainerd, say
from tests.vm.plugin import GuestPlugin
from tests.vm.scopes import systemd_agrees

_DISK = Path("/mnt")
SYSTEMD = Path("/run/systemd/system").is_dir()  # sd_booted(3)
_START_LIMIT_S = 300.0
_KUBELET_FILE = GUEST_BED / "kubelet.json"
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")


def _set_up() -> None:
    words.run("modprobe", "-a", "virtio_net", "virtio_blk", "ext4", "overlay", "veth")
    words.run("mount", "/dev/vdb" if SYSTEMD else "/dev/vda", str(_DISK))
    # A whole Debian has its own in there.
    below = ("lib/kubelet", "lib/cni", "log/pods") if SYSTEMD else ("lib", "log")
    for hidden in (Path("/var") / name for name in below):
        own = _DISK / hidden.relative_to("/")
        for directory in (own, hidden):
            directory.mkdir(parents=True, exist_ok=True)
        words.run("mount", "--bind", str(own), str(hidden))
    HANDOVER.mkdir(parents=True, exist_ok=True)
    (device,) = [each.name for each in Path("/sys/class/net").iterdir() if each.name != "lo"]
    words.run("ip", "link", "set", "lo", "up")
    words.run("ip", "link", "set", device, "up")
    words.run("ip", "address", "add", f"{GUEST_ADDRESS}/24", "dev", device)
    words.run("ip", "route", "add", "default", "via", "10.0.2.2")
    if SYSTEMD:
        return  # it gives each cgroup its controllers
    root = Path("/sys/fs/cgroup")
    for controller in (root / "cgroup.controllers").read_text(encoding="ascii").split():
        with contextlib.suppress(OSError):
            (root / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


class _Node:
    """The three programs of the node."""

    def __init__(self, shared: Path, wanted: Wanted) -> None:
        programs = _DISK / PROGRAMS
        there = find_binaries()
        binaries = dataclasses.replace(
            there,
            directory=programs,
            runc=programs / there.runc.name,
            busybox=programs / there.busybox.name,
        )
        self.containerd = GuestContainerd(
            binaries,
            GUEST_BED,
            root=_DISK / "containerd",
            nri_request_timeout="30s",
            cni=(pod_network("10.244.0.0/24"), programs / "cni"),
            systemd_cgroup=SYSTEMD,
        )
        self.notes: list[str] = []
        self.memory_nodes = parse_list(
            Path("/sys/devices/system/node/has_memory").read_text(encoding="ascii").strip()
        )
        self.containerd.log_file = shared / "containerd.log"
        self.plugin = GuestPlugin(
            _DISK / "plugin",
            self.containerd.nri_socket,
            shared / "plugin.log",
            config={"http": {"socket": str(AGENT_SOCKET)}, **wanted.agent},
        )
        configuration = kubelet_configuration(
            self.containerd.socket, GUEST_BED, cgroup_root="/", address=GUEST_ADDRESS
        )
        if SYSTEMD:
            configuration["cgroupDriver"] = "systemd"
        (GUEST_BED / "static").mkdir(exist_ok=True)
        self._configuration = configuration
        self._configure_kubelet({})
        self.kubelet = Daemon(
            "kubelet",
            [
                str(programs / "kubelet"),
                f"--config={_KUBELET_FILE}",
                f"--kubeconfig={shared / 'kubeconfig'}",
                f"--hostname-override={wanted.name}",
                f"--node-ip={GUEST_ADDRESS}",
            ],
            shared,
            # The Go scheduler spins on idle processors, which emulated ones have to pay for.
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/run", "GOMAXPROCS": "2"},
        )

        self.publisher = Daemon(
            "publish",
            [sys.executable, "-m", "nri_numa", "publish", f"--config={PUBLISHER / 'agent.yaml'}"],
            shared,
            plugin_environment(
                {"KUBERNETES_SERVICE_HOST": ADDRESS, "KUBERNETES_SERVICE_PORT": "6443"}
            ),
        )
        self.devices = Daemon(
            "devices",
            [sys.executable, "-m", "tests.beds.kube.numa_devices", str(_DEVICE_PLUGINS)],
            shared,
            plugin_environment({}),
        )

    @property
    def online(self) -> frozenset[int]:
        return words.online_cpus()

    def start(self) -> None:
        """Start them one after the other, so that no container comes before nri-numa."""
        self.containerd.start(timeout_s=_START_LIMIT_S)
        say("containerd serves")
        self.plugin.start(timeout_s=_START_LIMIT_S)
        say("nri-numa is ready")
        self.kubelet.start()

    def answer(self, ask: Ask) -> Answer:
        match ask.what:
            case "look":
                return Answer(looks=self._look())
            case "agree":
                systemd_agrees(self)
            case "publish":
                self.publisher.start()
            case "kubelet":
                self._restart_kubelet(ask.kubelet)
            case "devices":
                return Answer(devices=_read_devices())
            case "kill":
                self.plugin.kill()
                self.plugin.start(timeout_s=_START_LIMIT_S)
            case _:
                self._end()
        return Answer()

    def check(self) -> None:
        """Raise if one of the programs ended that nobody ended."""
        self.kubelet.check()
        self.publisher.check()
        self.devices.check()

    def _configure_kubelet(self, keys: Mapping[str, object]) -> None:
        text = json.dumps({**self._configuration, **keys})
        _KUBELET_FILE.write_text(text, encoding="utf-8")

    def _restart_kubelet(self, keys: Mapping[str, object]) -> None:
        self.devices.end(timeout_s=60)
        self.kubelet.end(timeout_s=60)
        # A kubelet takes every socket there away, also that of a plugin that was too early.
        (_DEVICE_PLUGINS / "kubelet.sock").unlink(missing_ok=True)
        self._configure_kubelet(keys)
        self.kubelet.start()
        self.devices.start()

    def _end(self) -> None:
        self.devices.end(timeout_s=60)
        self.publisher.end(timeout_s=60)
        self.kubelet.end(timeout_s=60)
        self.plugin.terminate(60)
        self.containerd.stop()
        os.sync()

    def _look(self) -> dict[str, Look]:
        found = {}
        for container in self.containerd.cri.containers(running=True):
            with contextlib.suppress(CRIError, OSError):  # it may have ended meanwhile
                pid = self.containerd.cri.pid(container.id)
                now, group = words.allowed(pid), words.cgroup_allowed(pid)
                found[container.id] = Look(
                    cpus=format_list(now.cpus),
                    mems=format_list(now.mems),
                    cgroup_cpus=format_list(group.cpus),
                    cgroup_mems=format_list(group.mems),
                )
        return found


def _read_devices() -> dict[str, list[str]]:
    """Ids of the devices that the kubelet gave, by container as POD-UID/NAME."""
    file = _DEVICE_PLUGINS / "kubelet_internal_checkpoint"
    given: dict[str, list[str]] = {}
    for entry in json.loads(file.read_text(encoding="utf-8"))["Data"]["PodDeviceEntries"] or ():
        ids = [id for each in entry["DeviceIDs"].values() for id in each]
        given.setdefault(f"{entry['PodUID']}/{entry['ContainerName']}", []).extend(ids)
    return {key: sorted(ids) for key, ids in given.items()}


def main(arguments: Sequence[str]) -> int:
    """Be a node until the host says that it is enough."""
    shared = Path(arguments[0])
    say("the program started")
    try:
        _set_up()
        say("the machine is set up")
        wanted = msgspec.json.decode((shared / "node.json").read_bytes(), type=Wanted)
        node = _Node(shared, wanted)
        node.start()
        say("the kubelet starts")
        return _serve(shared, node)
    except Exception:
        (shared / "failed").write_text(traceback.format_exc(), encoding="utf-8")
        return 1


def _serve(shared: Path, node: _Node) -> int:
    while True:
        node.check()
        for file in sorted(shared.glob("ask-*.json")):
            target = file.with_name(file.name.replace("ask-", "answer-"))
            if target.exists():
                continue
            ask = msgspec.json.decode(file.read_bytes(), type=Ask)
            say(ask.what)
            try:
                answer = node.answer(ask)
            except Exception:
                answer = Answer(error=traceback.format_exc())
            scratch = shared / "answer.tmp"
            scratch.write_bytes(msgspec.json.encode(answer))
            scratch.replace(target)
            if ask.what == "end":
                return 0
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
