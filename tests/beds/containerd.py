"""A private containerd: own root, state, sockets and NRI directories; leaves nothing behind.

Works beside an installed containerd and beside other beds, on cgroup v1 and v2, and inside a
virtual machine (on a tmpfs below /run there). Free of pytest.

    binaries = find_binaries()
    with Containerd(binaries, Path("/tmp/bed")) as containerd:
        pod = containerd.cri.run_pod("demo")
        print(containerd.cri.first_line(containerd.cri.run(pod)))
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.beds import cgroups, processes
from tests.beds.cri import CRI, CRIError, poll
from tests.beds.debs import BUSYBOX, CONTAINERD_1_7, CRUN, RUNC, YAJL, DebCache
from tests.beds.images import IMAGE, build_image
from tests.beds.kube.build import CONTAINERD, find_containerd
from tests.beds.processes import wait_for
from tests.beds.testbed import TestbedUnavailable, require_root

SERIES = ("1.7", "2.3", "2.4")
"""Of containerd: the packaged one, the long-term one that docs recommend, and the newest."""
MAIN_SERIES = "2.3"
_SHIM_SOCKETS = Path("/run/containerd/s")  # fixed in containerd's shim library


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """Where the programs are.

    Attributes:
        version: upstream version, ``2.1.9``.
    """

    series: str
    version: str
    directory: Path
    runc: Path
    busybox: Path


def find_binaries(series: str = MAIN_SERIES, cache: DebCache | None = None) -> Binaries:
    """The programs for a containerd of one of `SERIES`, downloaded or built where needed."""
    cache = cache or DebCache()
    if series == "1.7":
        containerd, packaged, busybox = cache.fetch(CONTAINERD_1_7, RUNC, BUSYBOX)
        directory, version = containerd.root / "usr/bin", containerd.upstream_version
        runc = _first(packaged.root, ("usr/sbin/runc", "usr/bin/runc"))
    else:
        (busybox,) = cache.fetch(BUSYBOX)
        directory, runc = find_containerd(series)
        version = CONTAINERD[series].release().lstrip("v")
    return Binaries(
        series=series,
        version=version,
        directory=directory,
        runc=runc,
        busybox=_first(busybox.root, ("bin/busybox", "usr/bin/busybox")),
    )


def find_crun(cache: DebCache | None = None) -> tuple[Path, Path]:
    """The OCI runtime crun, which starts in a fraction of runc's time, and its library libyajl."""
    crun, yajl = (cache or DebCache()).fetch(CRUN, YAJL)
    library = next(iter(sorted(yajl.root.glob("usr/lib/*/libyajl.so.2"))), None)
    if library is None:
        raise TestbedUnavailable(
            f"libyajl.so.2 is not in {yajl.root}",
            "remove that directory from the cache and start again",
        )
    return _first(crun.root, ("usr/bin/crun",)), library


def copy_crun(directory: Path) -> Path:
    """Copy crun with its library into a directory, ready for containerd; returns the program.

    crun 1.8 refuses every specification whose version has no "1.0" in it, and containerd says
    1.2.0; nothing else stands in the way. The text it looks for is shortened to "1.".
    """
    crun, library = find_crun()
    shutil.copy(library, directory / library.name)
    program = directory / "crun"
    code = crun.read_bytes()
    if code.count(b"\x001.0\x00") == 1:
        code = code.replace(b"\x001.0\x00", b"\x001.\x00\x00")
    program.write_bytes(code)
    program.chmod(0o755)
    return program


def _first(root: Path, candidates: Sequence[str]) -> Path:
    for candidate in candidates:
        if (root / candidate).is_file():
            return root / candidate
    raise TestbedUnavailable(
        f"none of {', '.join(candidates)} is in {root}",
        "remove that directory from the cache and start again",
    )


class Containerd(processes.Daemon):
    """One private daemon; a context manager that starts it and cleans up after it.

    Args:
        directory: for everything of this daemon; short, because socket paths end at 107 bytes.
        root: content store and snapshots; default below `directory`.
        nri_request_timeout: as in the configuration, ``2s``.
        enter: the words before the daemon's command line, ``nsenter … --``, that put it into
            namespaces of its own; they must become the daemon without a fork.
    """

    def __init__(
        self,
        binaries: Binaries,
        directory: Path,
        *,
        root: Path | None = None,
        nri: bool = True,
        nri_request_timeout: str = "2s",
        log_level: str = "debug",
        enter: Sequence[str] = (),
        cni: tuple[Mapping[str, object], Path] | None = None,
        systemd_cgroup: bool = False,
    ) -> None:
        self.configuration = directory / "config.toml"
        program = str(binaries.directory / "containerd")
        super().__init__(
            "containerd", [*enter, program, f"--config={self.configuration}"], directory, {}
        )
        self.systemd_cgroup = systemd_cgroup
        self.binaries = binaries
        self.directory = directory
        self.log_level = log_level
        self.root = root or directory / "root"
        self.state = directory / "state"
        self.nri = nri
        self.nri_request_timeout = nri_request_timeout
        self.socket = directory / "c.sock"
        self.nri_socket = directory / "nri.sock"
        self.nri_plugin_directory = directory / "nri-plugins"
        self.nri_config_directory = directory / "nri-conf"
        self.log_root = directory / "pods"
        self.cdi_directory = directory / "cdi"
        self.end_limit_s = 180.0
        self.spans_to = ""  # an OTLP receiver over HTTP
        self._cni = cni
        self._cri: CRI | None = None
        self._cgroups: set[str] = set()
        # Of this process alone, so that beds do not share cgroups with each other or a kubelet.
        self.cgroup_root = "/kubepods" if systemd_cgroup else f"/nri-numa-{os.getpid()}/kubepods"

    @property
    def cri(self) -> CRI:
        """The client; one for the life of this object."""
        if self._cri is None:
            self._cri = self.client()
        return self._cri

    def client(self, *, timeout_s: float = 240.0) -> CRI:
        """Another client, with its own limit for each call."""
        return CRI(
            self.socket,
            self.log_root,
            on_cgroup=self.note_cgroup,
            timeout_s=timeout_s,
            cgroup_root=self.cgroup_root,
            slices=self.systemd_cgroup,
        )

    def note_cgroup(self, path: str) -> None:
        """Have this cgroup removed in the end; for clients made elsewhere."""
        self._cgroups.add(path)

    # -- configuration ---------------------------------------------------------------------

    def _configuration(self) -> str:
        runtime = """
          runtime_type = 'io.containerd.runc.v2'
"""
        options = f"""
          BinaryName = '{self.binaries.runc}'
          SystemdCgroup = {str(self.systemd_cgroup).lower()}
          Root = '{self.state}/runc'
"""
        # The private, empty CNI directories keep the machine's own network out of the bed.
        cni = f"""
          conf_dir = '{self.directory}/cni/conf'
          bin_dir = '{self.directory}/cni/bin'
"""
        tracing = "'io.containerd.internal.v1.tracing', 'io.containerd.tracing.processor.v1.otlp',"
        tracing = "" if self.spans_to else tracing
        common = f"""
root = '{self.root}'
state = '{self.state}'
disabled_plugins = [
  'io.containerd.internal.v1.opt', 'io.containerd.snapshotter.v1.btrfs',
  'io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.zfs',
  'io.containerd.snapshotter.v1.aufs', 'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.erofs', {tracing} 'io.containerd.internal.v1.restart',
]
[grpc]
  address = '{self.socket}'
[ttrpc]
  address = '{self.directory}/t.sock'
[debug]
  level = '{self.log_level}'
[plugins.'io.containerd.nri.v1.nri']
  disable = {str(not self.nri).lower()}
  socket_path = '{self.nri_socket}'
  plugin_path = '{self.nri_plugin_directory}'
  plugin_config_path = '{self.nri_config_directory}'
  plugin_request_timeout = '{self.nri_request_timeout}'
"""
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE a lower score than our own cannot be
        # set, and runc dies of it. disable_apparmor: the profile loader may be missing.
        if self.binaries.series == "1.7":
            cri = "plugins.'io.containerd.grpc.v1.cri'"
            return f"""version = 2{common}
[{cri}]
  sandbox_image = '{IMAGE}'
  disable_apparmor = true
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [{cri}.cni]{cni}
  [{cri}.containerd]
    snapshotter = 'overlayfs'
    default_runtime_name = 'runc'
    [{cri}.containerd.runtimes.runc]{runtime}
      [{cri}.containerd.runtimes.runc.options]{options}
"""
        runtime_table = "plugins.'io.containerd.cri.v1.runtime'"
        return f"""version = 3{common}
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{IMAGE}'
[{runtime_table}]
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  enable_cdi = true
  cdi_spec_dirs = ['{self.cdi_directory}']
  [{runtime_table}.cni]{cni}
  [{runtime_table}.containerd]
    default_runtime_name = 'runc'
    [{runtime_table}.containerd.runtimes.runc]{runtime}
      [{runtime_table}.containerd.runtimes.runc.options]{options}
[plugins.'io.containerd.grpc.v1.cri']
  disable_tcp_service = true
"""

    # -- life ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self if self.running else super().__enter__()

    def program_environment(self) -> dict[str, str]:
        path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        tools = f"{self.binaries.directory}:{self.binaries.runc.parent}"
        # No proxies and no locale of ours: the daemon talks to nobody.
        traced = {"ENDPOINT": self.spans_to, "PROTOCOL": "http/protobuf"} if self.spans_to else {}
        exporter = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in traced.items()}
        return {"PATH": f"{tools}:{path}", "HOME": str(self.directory), "LC_ALL": "C", **exporter}

    def start(self, *, timeout_s: float = 180.0, keep_configuration: bool = False) -> None:
        """Start the daemon, wait until it serves CRI, have the image there.

        `keep_configuration`: somebody changed the file; take it as it is.
        """
        require_root("containerd")
        if not cgroups.CGROUP_ROOT.is_dir() or not cgroups.hierarchies():
            raise TestbedUnavailable(
                f"no cgroups are mounted at {cgroups.CGROUP_ROOT}", "mount cgroup v1 or v2"
            )
        if len(str(self.nri_socket)) > 107:
            raise ValueError(f"{self.nri_socket}: longer than a socket path may be (107 bytes)")
        for directory in (
            self.directory,
            self.nri_plugin_directory,
            self.nri_config_directory,
            self.log_root,
        ):
            directory.mkdir(parents=True, exist_ok=True)
        if not keep_configuration:
            self.configuration.write_text(self._configuration(), encoding="utf-8")
        if self._cni is not None:
            self._write_cni(*self._cni)
        self.environment = self.program_environment()
        super().start()
        wait_for([self], self._serves_cri, "containerd", timeout_s=timeout_s)
        if IMAGE not in self.cri.images():
            archive = build_image(self.binaries.busybox, self.directory / "image.tar")
            self.import_image(archive)
            poll(lambda: IMAGE in self.cri.images(), f"image {IMAGE} known to CRI")

    def _write_cni(self, configuration: Mapping[str, object], plugins: Path) -> None:
        directory = self.directory / "cni"
        (directory / "conf").mkdir(parents=True, exist_ok=True)
        (directory / "conf" / "bed.conflist").write_text(json.dumps(configuration, indent=1))
        if not (directory / "bin").is_symlink():
            (directory / "bin").symlink_to(plugins)

    def _serves_cri(self) -> bool:
        if not _accepts(self.socket):
            return False
        # A probe of its own: a channel that failed once waits before it tries again.
        with CRI(self.socket, self.log_root, timeout_s=5) as probe:
            try:
                return probe.ready()
            except CRIError:
                return False  # the socket is open before the CRI service is loaded

    def import_image(self, archive: Path) -> None:
        self.ctr("images", "import", "--local", "--snapshotter", "overlayfs", str(archive))

    def ctr(self, *arguments: str) -> str:
        """Run ``ctr`` in the namespace of Kubernetes; returns its output."""
        done = subprocess.run(
            [
                str(self.binaries.directory / "ctr"),
                f"--address={self.socket}",
                "--namespace=k8s.io",
                *arguments,
            ],
            env=self.program_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def paused_and_executed(self, container_id: str) -> str:
        """Pause a container and let it go on; CPUs of a program that is executed in it then."""
        for word in ("pause", "resume"):
            self.ctr("tasks", word, container_id)
        line = ("/bin/busybox", "grep", "Cpus_allowed_list", "/proc/self/status")
        return self.ctr("tasks", "exec", "--exec-id", "look", container_id, *line).split()[1]

    def stop(self) -> None:
        self.end()

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def close(self) -> None:
        """End everything this bed started and remove all it made except its directory's logs."""
        with contextlib.suppress(RuntimeError):
            self.kill()
        if self._cri is not None:
            self._cri.close()
            self._cri = None
        self._end_shims()
        self._unmount()
        for path in sorted(self._cgroups):
            cgroups.remove_tree(path)
        for below in ("/burstable", "/besteffort", "", "/.."):
            cgroups.remove_if_empty(os.path.normpath(self.cgroup_root + below))
        for directory in (self.root, self.state):
            shutil.rmtree(directory, ignore_errors=True)

    # -- cleaning up -----------------------------------------------------------------------

    def shims(self) -> list[int]:
        marker = f"-address\0{self.socket}\0".encode()
        return [pid for pid, command in processes.commands() if marker in command]

    def _end_shims(self) -> None:
        shims = self.shims()
        # A killed shim leaves its sockets in a directory that all daemons share.
        shim_sockets = {path for shim in shims for path in processes.listening(shim)}
        # Children first, and not through the daemon: it is dead by now.
        doomed = [pid for shim in shims for pid in processes.descendants(shim)] + shims
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            poll(
                lambda: not any(map(processes.alive, doomed)),
                "end of the shims",
                timeout_s=self.end_limit_s,
            )
        except TimeoutError as error:
            left = "\n".join(processes.described(pid) for pid in doomed if processes.alive(pid))
            raise TimeoutError(f"{error}; what did not end:\n{left}") from None
        for path in shim_sockets:
            if path.parent == _SHIM_SOCKETS:
                path.unlink(missing_ok=True)

    def _unmount(self) -> None:
        # The newest mount first; lazily, because nothing of ours looks at them any more.
        for target in reversed(processes.mounts_below(self.state, self.root)):
            subprocess.run(["umount", "-l", target], check=False, capture_output=True)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
