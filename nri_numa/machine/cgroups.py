"""Actual cpusets of containers, read from and written to their cgroups.

A runtime starts a process for each update, one after the other; a write takes some tens of
microseconds (docs/adr/0012). If systemd created a container's cgroup, its own properties of that
scope are set too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from nri_numa.model.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import NO_CFS_QUOTA, ActualCgroup

_READ_BYTES: Final = 65_536
"""More than any list that the kernel writes for 8,192 CPUs."""


def read_text(path: str) -> str:
    """Read the text of a small file, stripped of white space."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def read_text_or_empty(path: str) -> str:
    """Read the text of a small file; empty if it is unreadable."""
    try:
        return read_text(path)
    except OSError:
        return ""


def unwritable_file_reason(path: str) -> str:
    """Return the reason why a file is not writable; empty if it is, or is missing.

    The file is opened and nothing is written. Permissions of the directory do not show it: nobody
    may write the root of cgroups, and root without capabilities may write the files below it.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:
        return "" if error.errno in _MISSING_ERRNOS else f"{path}: {error.strerror}"
    return ""


def _read_cpus_or_none(path: str) -> CPUSet | None:
    """Read the CPU list of a file; None if it is unreadable."""
    try:
        return CPUSet.parse(read_text(path))
    except (OSError, ListFormatError):
        return None


CRUN_INNER_CGROUP_NAME: Final = "container"
"""Name of crun's cgroup in the scope, unless the container's annotation sets another.

OCI runtimes differ: with the systemd driver on version 2, crun creates one more cgroup in the
container's scope and puts the processes there (crun(1), ``run.oci.systemd.subgroup``).
"""


def inner_cgroup(directory: str) -> str:
    """Return crun's cgroup in a container's scope of version 2; empty if there is none."""
    if not directory.endswith(".scope"):
        return ""
    child = f"{directory}/{CRUN_INNER_CGROUP_NAME}"
    return child if os.path.exists(f"{child}/cpuset.cpus.effective") else ""


def _parse_cpu_max(text: str) -> tuple[int, int] | None:
    """Parse ``max 100000``, or quota and period; None if it is neither."""
    quota, _, period = text.partition(" ")
    try:
        return (NO_CFS_QUOTA if quota == "max" else int(quota)), int(period)
    except ValueError:
        return None


def narrowing_cgroup_text(hierarchy: str, directory: str, missing: CPUSet) -> str:
    """Name the ancestor that withholds CPUs from a cgroup of version 2, in words; empty if none.

    ``missing`` are CPUs in the cgroup's list that it cannot use. If no ancestor withholds them they
    are offline, or the container's own cgroup is an invalid partition.
    """
    culprit, culprit_cpus, parent = "", NO_CPUS, os.path.dirname(directory)
    while len(parent) > len(hierarchy):
        effective = _read_cpus_or_none(f"{parent}/cpuset.cpus.effective")
        if effective is None or not missing - effective:
            break
        culprit, culprit_cpus, parent = parent, effective, os.path.dirname(parent)
    else:
        machine = _read_cpus_or_none(f"{hierarchy}/cpuset.cpus.effective")
        if culprit and machine is not None and missing - machine:
            return ""
    if not culprit:
        return _partition_sentence(directory, "it")
    name = os.path.relpath(culprit, hierarchy)
    text = f"{name} has {culprit_cpus or 'none'}"
    cpus = _read_cpus_or_none(f"{culprit}/cpuset.cpus")
    if cpus and not missing - cpus:
        text += f" of its {cpus}; the rest belongs to a partition"
    partition_text = _partition_sentence(culprit, name)
    return f"{text}, {partition_text}" if partition_text else text


def _partition_sentence(directory: str, name: str) -> str:
    state = read_text_or_empty(f"{directory}/cpuset.cpus.partition")
    return "" if state in ("member", "") else f"{name} is a partition: {state}"


def blocking_cgroup_text(hierarchy: str, directory: str, name: str, list_text: str) -> str:
    """Name the cgroup for which the kernel refuses a list on version 1, in words; empty if none.

    A list must be a subset of its parent's and a superset of its children's (cpuset(7), ERRORS).
    """
    desired = CPUSet.parse(list_text)
    culprit, parent = "", os.path.dirname(directory)
    try:
        while len(parent) > len(hierarchy) and desired - _read_cpu_list(parent, name):
            culprit, parent = parent, os.path.dirname(parent)
        if culprit:
            return _cgroup_list_text("above", culprit, hierarchy, name)
        with os.scandir(directory) as entries:
            children = sorted(entry.path for entry in entries if entry.is_dir())
        for child in children:
            if _read_cpu_list(child, name) - desired:
                return _cgroup_list_text("below", child, hierarchy, name)
    except (OSError, ListFormatError):
        pass  # removed meanwhile, or no cpusets
    return ""


def _read_cpu_list(directory: str, name: str) -> CPUSet:
    return CPUSet.parse(read_text(f"{directory}/{name}"))


def _cgroup_list_text(relation: str, directory: str, hierarchy: str, name: str) -> str:
    path = os.path.relpath(directory, hierarchy)
    return f"the cgroup {relation}, {path}, has {name} {_read_cpu_list(directory, name) or 'empty'}"


# The container was removed between two reads, or its cgroup while a file was open.
_MISSING_ERRNOS: Final = frozenset((errno.ENOENT, errno.ENODEV, errno.ENOTDIR))


class CgroupPlace(msgspec.Struct, frozen=True):
    """Path of a container's cgroup, as the runtime reports it.

    Attributes:
        cgroups_path: the OCI cgroupsPath, in the form of the cgroupfs or of the systemd driver.
        pid: the container's init process; 0 if unknown.
    """

    cgroups_path: str = ""
    pid: int = 0

    @property
    def is_systemd_managed(self) -> bool:
        """True if systemd created the cgroup and has properties of its own for it."""
        return ":" in self.cgroups_path


# Every start and end of a holder writes hundreds of containers.
@functools.lru_cache(maxsize=4096)
def cgroup_relative_path(cgroups_path: str) -> str:
    """Turn an OCI cgroupsPath into a path below the hierarchy's root, without a leading slash.

    It is ``/kubepods/pod1/abc``, or ``slice:prefix:name`` of the systemd driver, in which each dash
    of a slice's name is one more level (systemd.slice(5)). The result is empty for an invalid path,
    or one relative to a cgroup that only the runtime knows.
    """
    if "\0" in cgroups_path or ".." in cgroups_path.split("/"):
        return ""
    if cgroups_path.startswith("/"):
        return cgroups_path.strip("/")
    parts = cgroups_path.split(":")
    if len(parts) != 3 or not parts[2]:
        return ""
    slice_name, prefix, name = parts
    if name.endswith(".slice"):
        unit = name
    else:
        unit = f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    if "/" in unit:
        return ""
    slices = _slice_and_parents(slice_name or "system.slice")
    return "" if slices is None else "/".join((*slices, unit))


def _slice_and_parents(name: str) -> list[str] | None:
    """Return a slice and its parents: ``a-b.slice`` is in ``a.slice``; None if it is no slice."""
    if not name.endswith(".slice") or "/" in name:
        return None
    stem = name.removesuffix(".slice")
    if stem == "-":
        return []
    parts = stem.split("-")
    if not all(parts):
        return None
    return ["-".join(parts[: n + 1]) + ".slice" for n in range(len(parts))]


class CgroupReader:
    """Reader of cpusets.

    Hosts mount cgroups in three ways (cgroups(7), systemd's hierarchies): version 1, with a
    directory for each controller or for several together; version 2 alone; or both, with the cpuset
    controller in one of them.

    Attributes:
        root: directory at which the cgroup file systems are mounted.
        proc: directory at which proc is mounted.
        unified: True if cpusets are in a version 2 hierarchy.
        hierarchy: root directory of cgroup paths.
    """

    def __init__(self, root: str = "/sys/fs/cgroup", *, proc: str = "/proc") -> None:
        self.root, self.proc = root, proc
        self.detect_hierarchy()

    def detect_hierarchy(self) -> bool:
        """Detect the version and directory of the cpuset hierarchy; return True if it exists.

        Without cpusets, the hierarchy is the directory that they would have on version 1.
        """
        root, v1 = self.root, self._v1_cpuset_mount()
        self.unified, self.hierarchy = False, v1
        if os.path.exists(f"{root}/cgroup.controllers"):
            self.unified, self.hierarchy = True, root
        elif not os.path.isdir(v1) and "cpuset" in read_text_or_empty(
            f"{root}/unified/cgroup.controllers"
        ):
            self.unified, self.hierarchy = True, f"{root}/unified"
        # The files with the effective lists; version 1 mostly has none.
        self._effective: tuple[str, str] | None = None
        if self.unified:
            self._effective = "cpuset.cpus.effective", "cpuset.mems.effective"
        elif self._has_cpuset_v2_mode(v1):
            self._effective = "cpuset.effective_cpus", "cpuset.effective_mems"
        return os.path.isdir(self.hierarchy)

    def _v1_cpuset_mount(self) -> str:
        usual = os.path.join(self.root, "cpuset")
        if os.path.isdir(usual) or not os.path.isdir(self.root):
            return usual
        names = [n for n in sorted(os.listdir(self.root)) if "cpuset" in n.split(",")]
        return os.path.join(self.root, *names[:1] or ["cpuset"])

    def _has_cpuset_v2_mode(self, mount: str) -> bool:
        """True if version 1 is mounted with ``cpuset_v2_mode``."""
        with (
            contextlib.suppress(OSError),
            open(f"{self.proc}/self/mounts", encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                fields = line.split()
                if len(fields) > 3 and fields[1] == mount:
                    return "cpuset_v2_mode" in fields[3].split(",")
        return False

    def read_actual_cgroup(self, cgroup: CgroupPlace) -> ActualCgroup | None:
        """Read the cgroup of one container; None if it has none, not yet or no longer.

        Raises:
            OSError: the file system is unreadable.
        """
        directory = self.directory_of(cgroup)
        try:
            return self._read_directory(directory) if directory else None
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return None
            raise
        except ListFormatError:
            return None  # not a list of the kernel: this is another file system

    def directory_of(self, cgroup: CgroupPlace) -> str:
        """Find the directory of a container's cpuset; empty if there is none (any longer)."""
        path = cgroup_relative_path(cgroup.cgroups_path)
        if path and os.path.isdir(directory := os.path.join(self.hierarchy, path)):
            return directory
        # The runtime may have another root (a cgroup namespace): ask the kernel.
        path = self._find_process_cgroup(cgroup.pid) if cgroup.pid > 0 else ""
        return os.path.join(self.hierarchy, path) if path else ""

    def read_mark(self, cgroup: CgroupPlace, name: str) -> str:
        """Read the text that `CgroupWriter.write_mark` wrote on a cgroup, or an empty text."""
        try:
            return os.getxattr(self.directory_of(cgroup), f"user.{name}").decode()
        except (OSError, ValueError):
            return ""

    def is_removed(self, cgroup: CgroupPlace) -> bool:
        """True if a cgroup does not exist although its topmost ancestor does."""
        path = cgroup_relative_path(cgroup.cgroups_path)
        top = os.path.join(self.hierarchy, path.partition("/")[0])
        return bool(path) and os.path.isdir(top) and not self.directory_of(cgroup)

    def blocking_cgroup_text(self, cgroup: CgroupPlace, name: str, list_text: str) -> str:
        """Name the cgroup for which the kernel refuses a list, in words; empty if none.

        Version 2 accepts every list.
        """
        if self._effective or not list_text:
            return ""
        directory = self.directory_of(cgroup)
        return blocking_cgroup_text(self.hierarchy, directory, name, list_text) if directory else ""

    def read_cfs_limit(self, cgroup: CgroupPlace) -> tuple[int | None, int | None]:
        """Read CFS quota and period of a container in microseconds; `NO_CFS_QUOTA` for no quota.

        Of a scope and crun's cgroup in it, the lower limit counts. None if there is no file to read
        it from, such as without the cpu controller.
        """
        directory = self.directory_of(cgroup)
        if not directory:
            return None, None
        if not self.unified:
            return self._read_v1_cfs_limit(os.path.relpath(directory, self.hierarchy))
        limits = [
            limit
            for target in (inner_cgroup(directory), directory)
            if target and (limit := _parse_cpu_max(read_text_or_empty(f"{target}/cpu.max")))
        ]
        # Order: the lowest share of a CPU first, no quota last.
        limits.sort(key=lambda limit: (limit[0] < 0, max(limit[0], 0) / limit[1]))
        return limits[0] if limits else (None, None)

    def _read_v1_cfs_limit(self, path: str) -> tuple[int | None, int | None]:
        for name in ("cpu", "cpu,cpuacct"):
            directory = os.path.join(self.root, name, path)
            with contextlib.suppress(OSError, ValueError):
                quota = int(read_text(f"{directory}/cpu.cfs_quota_us"))
                period = read_text_or_empty(f"{directory}/cpu.cfs_period_us")
                return quota, int(period) if period else None
        return None, None

    def _read_directory(self, directory: str) -> ActualCgroup:
        cpus = _parse_cpus(read_text(f"{directory}/cpuset.cpus"))
        mems = _parse_mems(read_text(f"{directory}/cpuset.mems"))
        process_dir = directory
        if self.unified and (child := inner_cgroup(directory)):
            # The processes are in the child: its lists count, or the scope's if they are empty.
            process_dir = child
            cpus = _parse_cpus(read_text(f"{child}/cpuset.cpus")) or cpus
            mems = _parse_mems(read_text(f"{child}/cpuset.mems")) or mems
        effective_cpus, effective_mems = cpus, mems
        if self._effective is not None:
            cpus_file, mems_file = self._effective
            effective_cpus = _parse_cpus(read_text(f"{process_dir}/{cpus_file}"))
            effective_mems = _parse_mems(read_text(f"{process_dir}/{mems_file}"))
        missing = cpus - effective_cpus
        return ActualCgroup(
            cpus=cpus,
            mems=mems,
            effective_cpus=effective_cpus,
            effective_mems=effective_mems,
            above=narrowing_cgroup_text(self.hierarchy, directory, missing)
            if missing and self.unified
            else "",
        )

    def _find_process_cgroup(self, pid: int) -> str:
        """Find the cgroup of a process, see cgroups(7); empty if unknown."""
        for line in read_text_or_empty(f"{self.proc}/{pid}/cgroup").splitlines():
            number, _, remainder = line.partition(":")
            controllers, _, path = remainder.partition(":")
            if self.unified:
                is_cpuset = number == "0" and not controllers
            else:
                is_cpuset = "cpuset" in controllers.split(",")
            # A cgroup outside of this namespace begins with /.. and is unreachable; the root is no
            # container's.
            if is_cpuset and ".." not in path.split("/"):
                return path.strip("/")
        return ""


def _sandbox_places(cgroups_path: str) -> tuple[CgroupPlace, ...]:
    """Return the possible places of a pod's sandbox.

    With the systemd driver it is a scope if the sandbox has a container of its own. If it has none,
    the runtime creates a directory in place of the scope and reports the same path (CRI-O's
    default, ``drop_infra_ctr``).
    """
    place = CgroupPlace(cgroups_path)
    if not place.is_systemd_managed:
        return (place,)
    directory = cgroup_relative_path(cgroups_path).removesuffix(".scope")
    return place, CgroupPlace(f"/{directory}")


def has_sandbox_cgroup(reader: CgroupReader, cgroups_path: str) -> bool:
    """True if a pod's sandbox has a cgroup, under either name."""
    return any(reader.directory_of(place) for place in _sandbox_places(cgroups_path))


def is_sandbox_removed(reader: CgroupReader, cgroups_path: str) -> bool:
    """True if a pod's sandbox has no cgroup under either name, although their ancestor exists."""
    return all(reader.is_removed(place) for place in _sandbox_places(cgroups_path))


class WriteOutcome(msgspec.Struct, frozen=True):
    """Outcome of a write.

    Attributes:
        changed: True if the kernel has another cpuset than before.
        missing: True if there is no cgroup, not yet or no longer.
        problem: reason of a failure; empty if the cpuset is as desired.
        is_held_up: True if writes are slow; the first of them may still succeed.
    """

    changed: bool = False
    missing: bool = False
    problem: str = ""
    is_held_up: bool = False


NO_CGROUP_OUTCOME: Final = WriteOutcome(missing=True)
MAX_WRITE_WAIT_S: Final = 0.5
"""Maximum seconds to wait for writes; the runtime waits two for the whole answer."""
_SLOW_WRITE: Final = f"a write of cpusets takes longer than {MAX_WRITE_WAIT_S} s"


class CgroupWrite(NamedTuple):
    """Cgroup of a container, and the lists to write; an empty list is not written."""

    cgroup: CgroupPlace
    cpus: str
    mems: str = ""


class CgroupWriter:
    """Writer of cpusets, also within a request: a write mostly takes some tens of microseconds.

    Up to Linux 6.12 a write waits while another write of ``cpuset.mems`` migrates memory, anywhere
    on the machine: for seconds. So a thread writes, no caller waits longer than `MAX_WRITE_WAIT_S`
    for it, and nothing else is written until it is done.
    """

    def __init__(self, reader: CgroupReader) -> None:
        self.reader = reader
        self._thread = ThreadPoolExecutor(1, "cgroups")
        self._last: Future[object] | None = None
        self._thread_id = 0
        self._write_file = _write_text if reader.unified else _new_v1_cpuset_writer()

    @property
    def is_write_held_up(self) -> bool:
        """True if the last write is not done."""
        return self._last is not None and not self._last.done()

    def unwritable_cpuset_reason(self, cgroup: CgroupPlace | None = None) -> str:
        """Return the reason why a container's lists are not writable; empty if they are, or gone.

        Without a cgroup, the reason why no lists are: a file of the root stands for all of them.
        """
        if cgroup is None:
            return unwritable_file_reason(f"{self.reader.hierarchy}/cgroup.procs")
        directory = self.reader.directory_of(cgroup)
        return unwritable_file_reason(f"{directory}/cpuset.cpus") if directory else ""

    def write_cpusets(self, writes: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        """Write the cpusets of containers where they differ; returns outcomes by container id."""
        if not writes:
            return {}
        outcomes: dict[str, WriteOutcome] = {}
        timeouts: list[bool] = []

        def write_all() -> None:
            self._thread_id = threading.get_native_id()
            for container_id, write in writes.items():
                if timeouts:
                    return  # the desired lists may have changed
                outcomes[container_id] = self.write_cgroup(write)

        if not self.is_write_held_up:
            self._last = self._thread.submit(write_all)
            with contextlib.suppress(TimeoutError):
                self._last.result(MAX_WRITE_WAIT_S)
                return outcomes
            timeouts.append(True)
        snapshot = dict(outcomes)
        slow = WriteOutcome(problem=_SLOW_WRITE, is_held_up=True)
        return dict.fromkeys(writes, slow) | snapshot

    def is_blocked_in_kernel(self) -> bool:
        """True if the thread waits for the kernel and not for a CPU, see proc_pid_stat(5)."""
        stat = read_text_or_empty(f"/proc/self/task/{self._thread_id}/stat")
        return stat.rpartition(")")[2].split()[:1] == ["D"]

    def write_mark(self, cgroup: CgroupPlace, name: str, text: str) -> None:
        """Write an extended attribute on a container's cgroup, which is as old as the container.

        It needs write access to the cgroup and no capability. Linux before 5.7 and read-only mounts
        have no such attributes.
        """
        with contextlib.suppress(OSError, ValueError):
            os.setxattr(self.reader.directory_of(cgroup), f"user.{name}", text.encode())

    def write_cgroup(self, write: CgroupWrite) -> WriteOutcome:
        """Write the lists of one cgroup in this thread, however long the kernel takes.

        CPUs come first: pages would follow a program that still runs on its old NUMA node.
        """
        cgroup, cpus, mems = write
        changed, path, list_text, name = False, "", "", ""
        try:
            directory = self.reader.directory_of(cgroup)
            if not directory:
                return NO_CGROUP_OUTCOME
            # crun's own cgroup in a scope as well, or its lists would stay.
            child = inner_cgroup(directory) if self.reader.unified else ""
            for target in (directory, child) if child else (directory,):
                for name, list_text in (("cpuset.cpus", cpus), ("cpuset.mems", mems)):
                    path = f"{target}/{name}"
                    if list_text and self._write_list(path, list_text):
                        changed = True
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return NO_CGROUP_OUTCOME
            reason = self.reader.blocking_cgroup_text(cgroup, name, list_text)
            suffix = f" ({reason})" if reason else ""
            return WriteOutcome(problem=f"{path}: {error.strerror}{suffix}")
        return WriteOutcome(changed=changed)

    def _write_list(self, path: str, list_text: str) -> bool:
        """Write one file if its list differs, both in the kernel's own form; read it back.

        Raises:
            OSError: the file has another list afterwards.
        """
        if read_text(path) == list_text:
            return False
        if not self.reader.unified and path.endswith("/cpuset.cpus"):
            self._disable_load_balance(os.path.dirname(path))
        self._write_file(path, list_text)
        if (actual := read_text(path)) != list_text:
            raise OSError(errno.EIO, f"was written, and has {actual or 'nothing'}")
        return True

    def _disable_load_balance(self, directory: str) -> None:
        """Clear ``cpuset.sched_load_balance`` of a cgroup of version 1, if that changes nothing.

        If it is set, the kernel rebuilds its scheduling domains at each write of ``cpuset.cpus``:
        half a millisecond, several on a busy machine, instead of ten microseconds. As long as the
        root's is set there is one domain of all CPUs in any case (cpusets.rst, 1.7).
        """
        name = "cpuset.sched_load_balance"
        with contextlib.suppress(OSError):
            switches = (read_text(f"{d}/{name}") for d in (directory, self.reader.hierarchy))
            if all(switch == "1" for switch in switches):
                _write_text(f"{directory}/{name}", "0")


class _CgroupspyNode(msgspec.Struct, frozen=True):
    """Minimal node of cgroupspy for its controllers; the library's node walks the whole tree."""

    full_path: str


def _new_v1_cpuset_writer() -> Callable[[str, str], object]:
    from cgroupspy.controllers import CpuSetController  # it knows no other version

    def write_cpuset_property(path: str, value: str) -> None:
        directory, name = os.path.split(path)
        CpuSetController(_CgroupspyNode(directory)).set_property(name, value)

    return write_cpuset_property


def _write_text(path: str, value: str) -> None:
    """Write a file in one write(2), as the kernel requires."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


# Hundreds of containers share a handful of lists.
@functools.lru_cache(maxsize=512)
def _parse_cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


@functools.lru_cache(maxsize=128)
def _parse_mems(text: str) -> NUMASet:
    return NUMASet.parse(text)


def read_actual_cgroups(
    reader: CgroupReader, cgroups: Iterable[tuple[str, CgroupPlace]]
) -> dict[str, ActualCgroup]:
    """Read the cgroups of many containers; those without a cgroup are left out.

    Raises:
        OSError: the file system is unreadable.
    """
    return {
        container_id: actual
        for container_id, cgroup in cgroups
        if (actual := reader.read_actual_cgroup(cgroup)) is not None
    }


# --- systemd's properties of containers' scopes ---------------------------------------------------
# systemd writes all properties of a scope again whenever one of them is set, by the OCI runtime's
# memory update or by an administrator: a cpuset that only the cgroup has is then lost. systemd
# stores the properties of a scope in files (systemd.unit(5)) and accepts new ones over D-Bus.


SYSTEMD_ANSWER_TIMEOUT_S: Final = 5.0
"""Maximum seconds for one answer of systemd."""
_QUOTA_PROPERTY: Final = "CPUQuotaPerSecUSec"
"""Stored as the setting ``CPUQuota``, such as ``150%``; see systemd.resource-control(5)."""
_NO_QUOTA_USEC: Final = (1 << 64) - 1
"""USEC_INFINITY of systemd."""
_SYSTEMD_MANAGER_ADDRESS: Final = (
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1",
    "org.freedesktop.systemd1.Manager",
)


class SystemdScopes:
    """Scopes of containers in systemd; every method blocks, and may be called in any thread."""

    def __init__(
        self, transient: str = "/run/systemd/transient", bus: str = "/run/dbus/system_bus_socket"
    ) -> None:
        self._transient = transient
        self._bus = bus

    def sync_scope(
        self,
        cgroup: CgroupPlace,
        cpus: CPUSet,
        mems: NUMASet,
        is_current: Callable[[], bool] = lambda: True,
        *,
        lift_quota: bool = False,
    ) -> str:
        """Set a scope's properties to the lists of its cgroup, if they are still current.

        With ``lift_quota`` its CPU quota is removed too; else that stays as it is.

        Returns:
            Reason why systemd has other lists; empty if it has the same, or no such scope.

        Raises:
            OSError: systemd does not answer.
        """
        unit = os.path.basename(cgroup_relative_path(cgroup.cgroups_path))
        if not (unit and os.path.exists(os.path.join(self._transient, unit))):
            return ""
        desired = {"AllowedCPUs": cpus.bits, "AllowedMemoryNodes": mems.bits}
        desired = {name: bits for name, bits in desired.items() if bits}
        if lift_quota:
            desired[_QUOTA_PROPERTY] = _NO_QUOTA_USEC
        if not self._changed_properties(unit, desired):
            return ""
        if not is_current():
            return "its desired value has changed"
        if error := self._set_properties(unit, desired):
            return f"{unit}: {error}"
        names = self._changed_properties(unit, desired)
        return f"{unit}: systemd took {', '.join(names)} and has another one" if names else ""

    def _changed_properties(self, unit: str, desired: dict[str, int]) -> list[str]:
        return [name for name, value in desired.items() if self._read_property(unit, name) != value]

    def _read_property(self, unit: str, name: str) -> int:
        """Read a property: the bits of a list, or the quota, of which only its absence counts."""
        if name == _QUOTA_PROPERTY:
            return 0 if self._read_setting(unit, "CPUQuota") else _NO_QUOTA_USEC
        with contextlib.suppress(ListFormatError):
            return CPUSet.parse(",".join(self._read_setting(unit, name).split())).bits
        return 0

    def _read_setting(self, unit: str, name: str) -> str:
        """Read a setting, such as ``AllowedCPUs=0-2 5``, of the drop-in or else of the unit."""
        for file in (f"{unit}.d/50-{name}.conf", unit):
            with contextlib.suppress(OSError):
                for line in reversed(read_text(os.path.join(self._transient, file)).splitlines()):
                    key, _, value = line.partition("=")
                    if key == name:
                        return value
        return ""

    def _set_properties(self, unit: str, desired: dict[str, int]) -> str:
        """Call SetUnitProperties(unit, runtime, properties); CPU 0 is the lowest bit of a mask.

        Returns the reason of a refusal; empty on success.
        """
        # Imported here: few agents ever need it.
        from jeepney import DBusAddress, MessageType, new_method_call
        from jeepney.io.blocking import open_dbus_connection

        values = [
            (name, ("t", value))
            if name == _QUOTA_PROPERTY
            else (name, ("ay", value.to_bytes(-(-value.bit_length() // 8), "little")))
            for name, value in desired.items()
        ]
        manager = DBusAddress(*_SYSTEMD_MANAGER_ADDRESS)
        body = (unit, True, values)
        call = new_method_call(manager, "SetUnitProperties", "sba(sv)", body)
        with open_dbus_connection(
            f"unix:path={self._bus}", auth_timeout=SYSTEMD_ANSWER_TIMEOUT_S
        ) as connection:
            answer = connection.send_and_get_reply(call, timeout=SYSTEMD_ANSWER_TIMEOUT_S)
        if answer.header.message_type is MessageType.error:
            return str(answer.body[0]) if answer.body else "refused"
        return ""
