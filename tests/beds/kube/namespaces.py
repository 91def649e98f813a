"""Network and mount namespaces for one bed: what happens in them stays in them.

The bed has a network of its own, so it takes no port of the machine and two beds do not meet, and
mounts of its own, so the kubelet finds ``/var/lib/kubelet`` and the kernel's settings as it wants
them and changes nothing of the machine. Both last as long as a process that does nothing holds
them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from tests.beds.processes import ProcessBed
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
