"""The real cpusets of containers, read and written.

A runtime starts a process for each update, one after the other; a write takes some tens of
microseconds (docs/adr/0012). Where systemd made a container's cgroup, it has properties of its own
of it, which are set too.
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
"""Longer than any list the kernel writes for 8,192 CPUs."""


def read_text(path: str) -> str:
    """Text of a small file, without white space at its ends."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def read_text_or_empty(path: str) -> str:
    """Text of a small file; empty where it cannot be read."""
    try:
        return read_text(path)
    except OSError:
        return ""


def unwritable_file_reason(path: str) -> str:
    """Why a file cannot be written; empty where it can be, or is not there.

    It is opened, and nothing is written. The permissions of a directory do not say it: the root of
    cgroups may be written by nobody, and root without capabilities may write the files below.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:
        return "" if error.errno in _MISSING_ERRNOS else f"{path}: {error.strerror}"
    return ""


def _read_cpus_or_none(path: str) -> CPUSet | None:
    """The list in a file; None where none can be read."""
    try:
        return CPUSet.parse(read_text(path))
    except (OSError, ListFormatError):
        return None


CRUN_INNER_CGROUP_NAME: Final = "container"
"""What crun calls its cgroup in the scope, unless the container's annotation says otherwise.

OCI runtimes differ: with the systemd driver on version 2, crun makes one more cgroup in the
container's scope and puts the programs there (crun(1), ``run.oci.systemd.subgroup``).
"""


def inner_cgroup(directory: str) -> str:
    """The cgroup that crun made in a container's scope, of version 2; empty when there is none."""
    if not directory.endswith(".scope"):
        return ""
    child = f"{directory}/{CRUN_INNER_CGROUP_NAME}"
    return child if os.path.exists(f"{child}/cpuset.cpus.effective") else ""


def narrowing_cgroup_text(hierarchy: str, directory: str, missing: CPUSet) -> str:
    """Which cgroup above keeps CPUs from one of version 2, in words; empty when none does.

    ``missing`` are CPUs that it is given and cannot use. Where none keeps them they are offline, or
    the container's own cgroup is no usable partition.
    """
    culprit, leaves, above = "", NO_CPUS, os.path.dirname(directory)
    while len(above) > len(hierarchy):
        effective = _read_cpus_or_none(f"{above}/cpuset.cpus.effective")
        if effective is None or not missing - effective:
            break
        culprit, leaves, above = above, effective, os.path.dirname(above)
    else:
        machine = _read_cpus_or_none(f"{hierarchy}/cpuset.cpus.effective")
        if culprit and machine is not None and missing - machine:
            return ""
    if not culprit:
        return _partition_sentence(directory, "it")
    name = os.path.relpath(culprit, hierarchy)
    said = f"{name} has {leaves or 'none'}"
    given = _read_cpus_or_none(f"{culprit}/cpuset.cpus")
    if given and not missing - given:
        said += f" of its {given}; the rest belongs to a partition"
    own = _partition_sentence(culprit, name)
    return f"{said}, {own}" if own else said


def _partition_sentence(directory: str, name: str) -> str:
    state = read_text_or_empty(f"{directory}/cpuset.cpus.partition")
    return "" if state in ("member", "") else f"{name} is a partition: {state}"


def blocking_cgroup_text(hierarchy: str, directory: str, name: str, wanted: str) -> str:
    """Which cgroup keeps the kernel from taking a list on version 1, in words; empty: none does.

    A list must be part of the one above and have all of those below (cpuset(7), ERRORS).
    """
    meant = CPUSet.parse(wanted)
    culprit, above = "", os.path.dirname(directory)
    try:
        while len(above) > len(hierarchy) and meant - _read_cpu_list(above, name):
            culprit, above = above, os.path.dirname(above)
        if culprit:
            return _cgroup_list_text("above", culprit, hierarchy, name)
        with os.scandir(directory) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir())
        for child in below:
            if _read_cpu_list(child, name) - meant:
                return _cgroup_list_text("below", child, hierarchy, name)
    except (OSError, ListFormatError):
        pass  # gone meanwhile, or no cpusets
    return ""


def _read_cpu_list(directory: str, name: str) -> CPUSet:
    return CPUSet.parse(read_text(f"{directory}/{name}"))


def _cgroup_list_text(where: str, directory: str, hierarchy: str, name: str) -> str:
    path = os.path.relpath(directory, hierarchy)
    return f"the cgroup {where}, {path}, has {name} {_read_cpu_list(directory, name) or 'empty'}"


# The container went away between two reads, or its cgroup did while we had a file open.
_MISSING_ERRNOS: Final = frozenset((errno.ENOENT, errno.ENODEV, errno.ENOTDIR))


class CgroupPlace(msgspec.Struct, frozen=True):
    """Where a container's cgroup is, as the runtime reports.

    Attributes:
        cgroups_path: the OCI cgroupsPath, in the form of the cgroupfs or of the systemd driver.
        pid: its init process, 0 when it is not known.
    """

    cgroups_path: str = ""
    pid: int = 0

    @property
    def is_systemd_managed(self) -> bool:
        """Whether systemd made the cgroup, and has properties of its own of it."""
        return ":" in self.cgroups_path


# Hundreds of containers are written at every owner that comes or goes.
@functools.lru_cache(maxsize=4096)
def cgroup_relative_path(cgroups_path: str) -> str:
    """Turn an OCI cgroupsPath into a path below the hierarchy's root, without a leading slash.

    It is ``/kubepods/pod1/abc``, or ``slice:prefix:name`` of the systemd driver, where each dash of
    a slice's name is one more level (systemd.slice(5)). Empty when there is none: it is relative to
    a cgroup that only the runtime knows, or no such path at all.
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


def sandbox_cgroup_paths(cgroups_path: str) -> tuple[str, ...]:
    """Return the cgroupsPaths at which the cgroup of a pod's sandbox may be.

    With the systemd driver it is a scope if a container of the sandbox's own runs. If none does,
    the runtime makes a folder in the scope's place and reports the same path (CRI-O's default,
    ``drop_infra_ctr``).
    """
    if not CgroupPlace(cgroups_path).is_systemd_managed:
        return (cgroups_path,)
    return cgroups_path, f"/{cgroup_relative_path(cgroups_path).removesuffix('.scope')}"


def _slice_and_parents(name: str) -> list[str] | None:
    """``a-b.slice`` lies in ``a.slice``; None when it is no slice."""
    if not name.endswith(".slice") or "/" in name:
        return None
    stem = name.removesuffix(".slice")
    if stem == "-":
        return []
    steps = stem.split("-")
    if not all(steps):
        return None
    return ["-".join(steps[: n + 1]) + ".slice" for n in range(len(steps))]


class CgroupReader:
    """Reads cpusets below the root where the cgroup file systems are mounted.

    Hosts mount cgroups in three ways (cgroups(7), systemd's hierarchies): version 1, one directory
    for each controller or for several that go together; version 2 alone; or both, where the cpuset
    controller is in one of them.

    Attributes:
        unified: whether cpusets are in a version 2 hierarchy.
        hierarchy: directory that cgroup paths start from.
    """

    def __init__(self, root: str = "/sys/fs/cgroup", *, proc: str = "/proc") -> None:
        self._root = root
        self._proc = proc
        self.detect_hierarchy()

    def detect_hierarchy(self) -> bool:
        """Whether there are cpusets to read; also looks anew which version they are of.

        Where there are none, the hierarchy is the place where they would be on version 1.
        """
        root, v1 = self._root, self._v1_cpuset_mount()
        self.unified, self.hierarchy = False, v1
        if os.path.exists(f"{root}/cgroup.controllers"):
            self.unified, self.hierarchy = True, root
        elif not os.path.isdir(v1) and "cpuset" in read_text_or_empty(
            f"{root}/unified/cgroup.controllers"
        ):
            self.unified, self.hierarchy = True, f"{root}/unified"
        # The files with what comes of the lists; version 1 mostly has none.
        self._effective: tuple[str, str] | None = None
        if self.unified:
            self._effective = "cpuset.cpus.effective", "cpuset.mems.effective"
        elif self._has_cpuset_v2_mode(v1):
            self._effective = "cpuset.effective_cpus", "cpuset.effective_mems"
        return os.path.isdir(self.hierarchy)

    def _v1_cpuset_mount(self) -> str:
        usual = os.path.join(self._root, "cpuset")
        if os.path.isdir(usual) or not os.path.isdir(self._root):
            return usual
        together = [n for n in sorted(os.listdir(self._root)) if "cpuset" in n.split(",")]
        return os.path.join(self._root, *together[:1] or ["cpuset"])

    def _has_cpuset_v2_mode(self, mount: str) -> bool:
        """Whether version 1 is mounted with ``cpuset_v2_mode``."""
        with (
            contextlib.suppress(OSError),
            open(f"{self._proc}/self/mounts", encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                words = line.split()
                if len(words) > 3 and words[1] == mount:
                    return "cpuset_v2_mode" in words[3].split(",")
        return False

    def read_actual_cgroup(self, place: CgroupPlace) -> ActualCgroup | None:
        """Look at one container; None when it has no cgroup (not yet, or not any more).

        Raises:
            OSError: the file system cannot be read at all.
        """
        directory = self.directory_of(place)
        try:
            return self._read_directory(directory) if directory else None
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return None
            raise
        except ListFormatError:
            return None  # the kernel writes only lists: this is another file system

    def directory_of(self, place: CgroupPlace) -> str:
        """Directory of a container's cpuset; empty when there is none (yet, or any more)."""
        path = cgroup_relative_path(place.cgroups_path)
        if path and os.path.isdir(directory := os.path.join(self.hierarchy, path)):
            return directory
        # The runtime's root may be another than ours (a cgroup namespace): ask the kernel.
        path = self._find_process_cgroup(place.pid) if place.pid > 0 else ""
        return os.path.join(self.hierarchy, path) if path else ""

    def read_mark(self, place: CgroupPlace, name: str) -> str:
        """Read what `CgroupWriter.write_mark` wrote on a container's cgroup; empty if nothing."""
        try:
            return os.getxattr(self.directory_of(place), f"user.{name}").decode()
        except (OSError, ValueError):
            return ""

    def is_removed(self, place: CgroupPlace) -> bool:
        """Whether a cgroup is not there, though what it was below can be seen from here."""
        path = cgroup_relative_path(place.cgroups_path)
        top = os.path.join(self.hierarchy, path.partition("/")[0])
        return bool(path) and os.path.isdir(top) and not self.directory_of(place)

    def blocking_cgroup_text(self, place: CgroupPlace, name: str, wanted: str) -> str:
        """Which cgroup keeps the kernel from taking a list, in words; empty where none does.

        Version 2 takes every list.
        """
        if self._effective or not wanted:
            return ""
        directory = self.directory_of(place)
        return blocking_cgroup_text(self.hierarchy, directory, name, wanted) if directory else ""

    def read_cfs_quota(self, place: CgroupPlace) -> int | None:
        """CFS quota of a container in microseconds per period, `NO_CFS_QUOTA` for none.

        None when there is nothing to read it from, such as without the cpu controller.
        """
        directory = self.directory_of(place)
        if not directory:
            return None
        files = [f"{directory}/cpu.max"]  # "max 100000", or quota and period
        if not self.unified:
            below = os.path.relpath(directory, self.hierarchy)
            mounts = (os.path.join(self._root, name) for name in ("cpu", "cpu,cpuacct"))
            files = [os.path.join(mount, below, "cpu.cfs_quota_us") for mount in mounts]
        for file in files:
            try:
                word = read_text(file).partition(" ")[0]
                return NO_CFS_QUOTA if word == "max" else int(word)
            except (OSError, ValueError):
                continue
        return None

    def _read_directory(self, directory: str) -> ActualCgroup:
        cpus = _parse_cpus(read_text(f"{directory}/cpuset.cpus"))
        mems = _parse_mems(read_text(f"{directory}/cpuset.mems"))
        programs = directory
        if self.unified and (child := inner_cgroup(directory)):
            # The programs are in there: its own lists count, and where it has none, the scope's.
            programs = child
            cpus = _parse_cpus(read_text(f"{child}/cpuset.cpus")) or cpus
            mems = _parse_mems(read_text(f"{child}/cpuset.mems")) or mems
        effective_cpus, effective_mems = cpus, mems
        if self._effective is not None:
            of_cpus, of_mems = self._effective
            effective_cpus = _parse_cpus(read_text(f"{programs}/{of_cpus}"))
            effective_mems = _parse_mems(read_text(f"{programs}/{of_mems}"))
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
        """Look up the cgroup of a process, see cgroups(7); empty when it is not known."""
        for line in read_text_or_empty(f"{self._proc}/{pid}/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if self.unified:
                mine = number == "0" and not controllers
            else:
                mine = "cpuset" in controllers.split(",")
            # Outside of our cgroup namespace it begins with /.. and cannot be reached by us; the
            # root is not a container's.
            if mine and ".." not in path.split("/"):
                return path.strip("/")
        return ""


class WriteOutcome(msgspec.Struct, frozen=True):
    """What became of a write.

    Attributes:
        changed: the kernel has another cpuset than before.
        missing: there is no cgroup (not yet, or not any more).
        problem: why it could not be written; empty when it is as wanted.
        is_held_up: the writes take long; the first of those may still come to pass.
    """

    changed: bool = False
    missing: bool = False
    problem: str = ""
    is_held_up: bool = False


NO_CGROUP_OUTCOME: Final = WriteOutcome(missing=True)
MAX_WRITE_WAIT_S: Final = 0.5
"""Seconds that writes are waited for; the runtime waits two for the whole answer."""
_SLOW_WRITE: Final = f"a write of cpusets takes longer than {MAX_WRITE_WAIT_S} s"


class CgroupWrite(NamedTuple):
    """Where a container's cgroup is, and its lists; an empty one leaves that file alone."""

    cgroup: CgroupPlace
    cpus: str
    mems: str = ""


class CgroupWriter:
    """Writes cpusets of containers, also within a request: mostly some tens of microseconds each.

    Up to Linux 6.12 a write waits for as long as another write of ``cpuset.mems`` moves memory,
    anywhere on the machine: for seconds. So a thread writes, no caller waits longer than
    `MAX_WRITE_WAIT_S` for it, and until it is through nothing else is written.
    """

    def __init__(self, reader: CgroupReader) -> None:
        self.reader = reader
        self._thread = ThreadPoolExecutor(1, "cgroups")
        self._last: Future[object] | None = None
        self._thread_id = 0
        self._write_file = _write_text if reader.unified else _new_v1_cpuset_writer()

    @property
    def is_write_held_up(self) -> bool:
        """Whether the kernel still holds up the last write."""
        return self._last is not None and not self._last.done()

    def unwritable_cpuset_reason(self, place: CgroupPlace | None = None) -> str:
        """Why the lists of a container cannot be written; empty where they can be, or are gone.

        Without a place: why none can be. The root has a file like those that are written.
        """
        if place is None:
            return unwritable_file_reason(f"{self.reader.hierarchy}/cgroup.procs")
        directory = self.reader.directory_of(place)
        return unwritable_file_reason(f"{directory}/cpuset.cpus") if directory else ""

    def write_cpusets(self, wanted: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        """Give containers cpusets, unless they have them, by container id."""
        if not wanted:
            return {}
        done: dict[str, WriteOutcome] = {}
        late: list[bool] = []

        def write_all() -> None:
            self._thread_id = threading.get_native_id()
            for container_id, one in wanted.items():
                if late:
                    return  # something else may be meant by now
                done[container_id] = self.write_cgroup(one)

        if not self.is_write_held_up:
            self._last = self._thread.submit(write_all)
            with contextlib.suppress(TimeoutError):
                self._last.result(MAX_WRITE_WAIT_S)
                return done
            late.append(True)
        now = dict(done)
        slow = WriteOutcome(problem=_SLOW_WRITE, is_held_up=True)
        return dict.fromkeys(wanted, slow) | now

    def is_blocked_in_kernel(self) -> bool:
        """Whether the thread waits for the kernel, and not for a CPU: proc_pid_stat(5)."""
        stat = read_text_or_empty(f"/proc/self/task/{self._thread_id}/stat")
        return stat.rpartition(")")[2].split()[:1] == ["D"]

    def write_mark(self, place: CgroupPlace, name: str, text: str) -> None:
        """Write an extended attribute on a container's cgroup, which is as old as the container.

        Only who may write the cgroup can, without any capability. Linux before 5.7 and cgroups that
        are mounted read-only have none.
        """
        with contextlib.suppress(OSError, ValueError):
            os.setxattr(self.reader.directory_of(place), f"user.{name}", text.encode())

    def write_cgroup(self, one: CgroupWrite) -> WriteOutcome:
        """Write one, in this thread, however long the kernel takes.

        CPUs first: pages would follow a program that still runs on its former NUMA node.
        """
        place, cpus, mems = one
        changed, path, wanted, name = False, "", "", ""
        try:
            directory = self.reader.directory_of(place)
            if not directory:
                return NO_CGROUP_OUTCOME
            # crun's own cgroup in a scope as well, or it would keep what it has.
            child = inner_cgroup(directory) if self.reader.unified else ""
            for each in (directory, child) if child else (directory,):
                for name, wanted in (("cpuset.cpus", cpus), ("cpuset.mems", mems)):
                    path = f"{each}/{name}"
                    if wanted and self._write_list(path, wanted):
                        changed = True
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return NO_CGROUP_OUTCOME
            why = self.reader.blocking_cgroup_text(place, name, wanted)
            because = f" ({why})" if why else ""
            return WriteOutcome(problem=f"{path}: {error.strerror}{because}")
        return WriteOutcome(changed=changed)

    def _write_list(self, path: str, wanted: str) -> bool:
        """Write one file whose list is another one, both in the kernel's own form; read it back.

        Raises:
            OSError: it has another list afterwards.
        """
        if read_text(path) == wanted:
            return False
        if not self.reader.unified and path.endswith("/cpuset.cpus"):
            self._disable_load_balance(os.path.dirname(path))
        self._write_file(path, wanted)
        if (has := read_text(path)) != wanted:
            raise OSError(errno.EIO, f"was written, and has {has or 'nothing'}")
        return True

    def _disable_load_balance(self, directory: str) -> None:
        """Clear ``cpuset.sched_load_balance`` of a cgroup of version 1, where that changes nothing.

        With it the kernel builds its scheduling domains anew at each write of ``cpuset.cpus``: half
        a millisecond, several on a busy machine, instead of ten microseconds. While the root's is
        set there is one domain of all CPUs, whatever others have (cpusets.rst, 1.7).
        """
        name = "cpuset.sched_load_balance"
        with contextlib.suppress(OSError):
            if (
                read_text(f"{directory}/{name}")
                == "1"
                == read_text(f"{self.reader.hierarchy}/{name}")
            ):
                _write_text(f"{directory}/{name}", "0")


class _CgroupspyNode(msgspec.Struct, frozen=True):
    """What a controller of cgroupspy needs to know; its own node walks the whole tree."""

    full_path: str


def _new_v1_cpuset_writer() -> Callable[[str, str], object]:
    from cgroupspy.controllers import CpuSetController  # it knows no other version

    def write_cpuset_property(path: str, value: str) -> None:
        directory, name = os.path.split(path)
        CpuSetController(_CgroupspyNode(directory)).set_property(name, value)

    return write_cpuset_property


def _write_text(path: str, value: str) -> None:
    """In one write, as the kernel wants it."""
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
    reader: CgroupReader, places: Iterable[tuple[str, CgroupPlace]]
) -> dict[str, ActualCgroup]:
    """Look at many containers; those without a cgroup are left out.

    Raises:
        OSError: the file system cannot be read at all.
    """
    return {
        container_id: observed
        for container_id, place in places
        if (observed := reader.read_actual_cgroup(place)) is not None
    }


# --- what systemd has for the scopes of containers ------------------------------------------------
# systemd writes all properties of a scope again whenever one of them is set, by the OCI runtime's
# memory update as well as by an administrator: a cpuset that only the cgroup has is lost then. It
# keeps the properties of a scope in files (systemd.unit(5)) and takes others over D-Bus.


SYSTEMD_ANSWER_TIMEOUT_S: Final = 5.0
"""How long systemd may take for one answer."""
_SYSTEMD_MANAGER_ADDRESS: Final = (
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1",
    "org.freedesktop.systemd1.Manager",
)


class SystemdScopes:
    """systemd's view of containers; every method blocks, and may be called in any thread."""

    def __init__(
        self,
        transient: str = "/run/systemd/transient",
        bus: str = "/run/dbus/system_bus_socket",
    ) -> None:
        self._transient = transient
        self._bus = bus

    def sync_scope(
        self,
        place: CgroupPlace,
        cpus: CPUSet,
        mems: NUMASet,
        still: Callable[[], bool] = lambda: True,
    ) -> str:
        """Give systemd the same for a scope as its cgroup has, if that is ``still`` meant.

        Returns:
            Why systemd has something else; empty where it has the same, or has no such scope.

        Raises:
            OSError: systemd does not answer.
        """
        unit = os.path.basename(cgroup_relative_path(place.cgroups_path))
        if not (unit and os.path.exists(os.path.join(self._transient, unit))):
            return ""
        wanted = {"AllowedCPUs": cpus.bits, "AllowedMemoryNodes": mems.bits}
        wanted = {name: bits for name, bits in wanted.items() if bits}
        if not self._changed_properties(unit, wanted):
            return ""
        if not still():
            return "something else is meant by now"
        if refused := self._set_properties(unit, wanted):
            return f"{unit}: {refused}"
        other = self._changed_properties(unit, wanted)
        return f"{unit}: systemd took {', '.join(other)} and has another one" if other else ""

    def _changed_properties(self, unit: str, wanted: dict[str, int]) -> list[str]:
        return [
            name for name, bits in wanted.items() if self._read_property_bits(unit, name) != bits
        ]

    def _read_property_bits(self, unit: str, name: str) -> int:
        """A property, ``AllowedCPUs=0-2 5``: of the drop-in where there is one, or of the unit."""
        for file in (f"{unit}.d/50-{name}.conf", unit):
            with contextlib.suppress(OSError):
                for line in reversed(read_text(os.path.join(self._transient, file)).splitlines()):
                    key, _, value = line.partition("=")
                    if key == name:
                        with contextlib.suppress(ListFormatError):
                            return CPUSet.parse(",".join(value.split())).bits
                        return 0
        return 0

    def _set_properties(self, unit: str, wanted: dict[str, int]) -> str:
        """SetUnitProperties(unit, runtime, properties), with CPU 0 as the lowest bit of a mask.

        Returns why it was refused; empty where it was not.
        """
        # Imported here: few agents ever need it.
        from jeepney import DBusAddress, MessageType, new_method_call
        from jeepney.io.blocking import open_dbus_connection

        masks = [
            (name, ("ay", bits.to_bytes(-(-bits.bit_length() // 8), "little")))
            for name, bits in wanted.items()
        ]
        call = new_method_call(
            DBusAddress(*_SYSTEMD_MANAGER_ADDRESS),
            "SetUnitProperties",
            "sba(sv)",
            (unit, True, masks),
        )
        with open_dbus_connection(
            f"unix:path={self._bus}", auth_timeout=SYSTEMD_ANSWER_TIMEOUT_S
        ) as connection:
            answer = connection.send_and_get_reply(call, timeout=SYSTEMD_ANSWER_TIMEOUT_S)
        if answer.header.message_type is MessageType.error:
            return str(answer.body[0]) if answer.body else "refused"
        return ""
