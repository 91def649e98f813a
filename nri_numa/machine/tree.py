"""Files of a machine's /sys and /proc, from a directory or from an archive of one.

An archive is untrusted (users attach them to bug reports): it is streamed once, nothing is written
to disk, only files that describe the machine are retained, and every quantity has a limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from nri_numa.errors import TopologyError

if TYPE_CHECKING:
    import gzip

CPU_DIR = "sys/devices/system/cpu"
NODE_DIR = "sys/devices/system/node"
TIER_DIR = "sys/devices/virtual/memory_tiering"
PCI_DIR = "sys/bus/pci/devices"
PCI_FILES = ("class", "device", "local_cpulist", "numa_node", "vendor")

MAX_TREE_FILE_BYTES = 2 << 20
"""Maximum bytes of one file; a cpulist of 8,192 CPUs in the worst order has 40 KiB, and
/proc/schedstat some 1.5 KiB for each CPU."""
_READ_BYTES = 64 * 1024
"""Bytes of one read."""
MAX_ARCHIVE_KEPT_BYTES = 64 << 20
"""Maximum bytes of all files retained from an archive."""
MAX_ARCHIVE_UNPACKED_BYTES = 512 << 20
"""Maximum bytes of an unpacked archive; a complete capture of a 128-CPU machine has 12 MiB."""
MAX_ARCHIVE_MEMBERS = 500_000
"""Maximum members of an archive."""

_HUGEPAGES_PATTERN = r"hugepages/hugepages-\d+kB/(nr|free)_hugepages"
CAPTURED_PATHS = re.compile(
    rf"""
      sys/devices/system/cpu/(online|present|possible|isolated|nohz_full)
    | sys/devices/system/cpu/cpu\d+/(
          online | cpu_capacity | acpi_cppc/highest_perf | cpufreq/cpuinfo_max_freq
        | topology/(physical_package_id|core_id|(book|drawer)_id)
        | topology/((thread|core|book|drawer)_siblings|(core|package|die|cluster)_cpus)(_list)?
        | cache/index\d+/(level|type|shared_cpu_(list|map))
      )
    | sys/devices/system/node/(online|possible)
    | sys/devices/system/node/node\d+/(cpulist|cpumap|distance|meminfo|{_HUGEPAGES_PATTERN})
    | sys/devices/virtual/memory_tiering/memory_tier\d+/nodelist
    | sys/devices/(cpu_core|cpu_atom)/cpus
    | sys/kernel/mm/{_HUGEPAGES_PATTERN}
    | {PCI_DIR}/[0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7]/({"|".join(PCI_FILES)})
    | proc/meminfo
    | proc/sys/vm/min_free_kbytes
    """,
    re.VERBOSE | re.ASCII,
)
"""Files that describe the machine and nothing private; `nri-numa capture` packs only these."""

LINK_PATHS = re.compile(
    r"sys/devices/system/(cpu/cpu\d+|node/node\d+/access[01]/initiators)/node(\d+)", re.ASCII
)
"""Links that show the kernel's NUMA node of a CPU, and the initiators of a NUMA node's memory."""

_CPUSET_LIMIT_PATHS = re.compile(
    r"proc/self/(status|cpuset)|proc/mounts|.*/(cpuset\.)?(cpus|mems|effective_(cpus|mems))"
    r"|.*/cpuset\.(cpus|mems)\.effective",
    re.ASCII,
)
"""Files with the CPUs and NUMA nodes that a process may use; read, never packed."""


def _decode_file(data: bytes) -> str:
    # Tools that copy sysfs by the size of stat() pad the files with NULs.
    return data.decode("utf-8", "replace").strip("\0 \t\r\n")


class DirectoryTree:
    """Files of the live machine or of an unpacked capture; names are relative, with ``/``.

    Attributes:
        source: the root, for messages.
    """

    def __init__(self, root: Path) -> None:
        self.source = str(root)
        self._prefix = self.source.rstrip("/") + "/"

    def read_file(self, name: str) -> str | None:
        """Read the text of a file, stripped of white space and NULs; None if it is missing."""
        try:
            fd = os.open(self._prefix + name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        data = b""
        try:
            # A read of proc/mounts or proc/schedstat returns the whole lines that fit into a page.
            while len(data) < MAX_TREE_FILE_BYTES and (chunk := os.read(fd, _READ_BYTES)):
                data += chunk
        except OSError:
            return None
        finally:
            os.close(fd)
        return _decode_file(data)

    def list_directory(self, name: str) -> list[str]:
        """List the names in a directory, sorted; empty if it is missing."""
        try:
            return sorted(os.listdir(self._prefix + name))
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        """Return True if a file, directory or link, even a broken one, has that name."""
        return os.path.lexists(self._prefix + name)

    def walk_files(self) -> Iterator[str]:
        """List all files and links that describe CPUs and NUMA nodes, and files of /proc."""
        for top in (CPU_DIR, NODE_DIR, TIER_DIR, "sys/kernel/mm/hugepages"):
            for directory, subdirectories, files in os.walk(self._prefix + top):
                subdirectories.sort()
                base = directory[len(self._prefix) :]
                links = [d for d in subdirectories if os.path.islink(os.path.join(directory, d))]
                for name in sorted(files + links):
                    yield f"{base}/{name}"
        names = [f"{PCI_DIR}/{pci}/{f}" for pci in self.list_directory(PCI_DIR) for f in PCI_FILES]
        names += ["sys/devices/cpu_core/cpus", "sys/devices/cpu_atom/cpus"]
        names += ["proc/meminfo", "proc/sys/vm/min_free_kbytes"]
        yield from filter(self.exists, names)


class ArchiveTree:
    """Files of a capture in one tar file, in memory; see `DirectoryTree`."""

    def __init__(
        self, source: str, files: dict[str, str], links: set[str], other_names: set[str]
    ) -> None:
        self.source = source
        self._files = files
        self._other = other_names
        self._names = links | set(files)
        self._children: dict[str, set[str]] = {}
        for name in sorted(self._names):
            while "/" in name:
                parent, _, child = name.rpartition("/")
                siblings = self._children.setdefault(parent, set())
                if child in siblings:
                    break
                siblings.add(child)
                name = parent

    def read_file(self, name: str) -> str | None:
        """Return the text of a file."""
        return self._files.get(name)

    def list_directory(self, name: str) -> list[str]:
        """List the names in a directory, sorted."""
        return sorted(self._children.get(name, ()))

    def exists(self, name: str) -> bool:
        """Return True if a file, directory or link has that name."""
        return name in self._names or name in self._children

    def walk_files(self) -> Iterator[str]:
        """List all members of the archive, retained or not."""
        yield from sorted(self._names | self._other)


Tree = DirectoryTree | ArchiveTree


def open_tree(root: Path | str) -> Tree:
    """Open what ``--sysfs-root`` names.

    Args:
        root: a directory holding ``sys/`` (``/`` is the live machine), a directory whose only
            directory with a ``sys/`` is the capture, or a tar archive (plain, gzip, bzip2, xz).

    Raises:
        TopologyError: it has no description of CPUs.
    """
    path = Path(root)
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            stat = path.stat()
            return _open_archive(str(path), stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise TopologyError(str(path), f"cannot be read: {e}") from e
    if path.exists():
        raise TopologyError(str(path), "is neither a directory nor a file")
    hint = "expected a directory holding sys/, or a captured machine's archive"
    raise TopologyError(str(path), f"does not exist; {hint}")


def _open_directory(path: Path) -> Tree:
    if (path / CPU_DIR).is_dir():
        return DirectoryTree(path)
    nested = [p for p in sorted(path.iterdir()) if (p / CPU_DIR).is_dir()]
    if len(nested) == 1:
        return DirectoryTree(nested[0])
    if len(nested) > 1:
        raise TopologyError(
            str(path), f"holds {len(nested)} machines; expected one, such as {nested[0].name}"
        )
    problem = f"there is no {CPU_DIR} in it"
    if (path / "devices/system/cpu").is_dir():
        problem += "; give the directory that holds sys/, not sys/ itself"
    raise TopologyError(str(path), problem)


class _SizeLimitedStream:
    """Decompressed stream that fails above `MAX_ARCHIVE_UNPACKED_BYTES`."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, source: str) -> None:
        self._stream = stream
        self._remaining = MAX_ARCHIVE_UNPACKED_BYTES
        self._source = source

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._remaining -= len(data)
        if self._remaining < 0:
            limit = f"{MAX_ARCHIVE_UNPACKED_BYTES >> 20} MiB"
            raise TopologyError(self._source, f"unpacks to more than {limit}")
        return data


def _decompress_stream(raw: IO[bytes], magic: bytes) -> IO[bytes] | gzip.GzipFile:
    # Imported here: an agent on a real machine opens no archive.
    import bz2
    import gzip
    import lzma

    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if magic.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(raw)
    return raw


# The key has time and size, so that a replaced archive is read again; read_memory() and
# read_online() open the same archive every second.
@lru_cache(maxsize=4)
def _open_archive(source: str, mtime_ns: int, size: int) -> Tree:
    import lzma
    import tarfile
    import zlib

    files: dict[str, str] = {}
    links: set[str] = set()
    other_names: set[str] = set()
    kept_bytes = 0
    try:
        with open(source, "rb") as raw:
            magic = raw.read(6)
            raw.seek(0)
            # Any: a stream needs only read(), which typeshed does not express.
            stream: Any = _SizeLimitedStream(_decompress_stream(raw, magic), source)
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for count, member in enumerate(archive, 1):
                    if count > MAX_ARCHIVE_MEMBERS:
                        raise TopologyError(source, f"has more than {MAX_ARCHIVE_MEMBERS} members")
                    name = _safe_name(member.name)
                    if name is None or member.isdir():
                        continue
                    inner = _strip_capture_directory(name)
                    if member.issym() or member.islnk():
                        (links if LINK_PATHS.fullmatch(inner) else other_names).add(name)
                    elif member.isreg() and (
                        CAPTURED_PATHS.fullmatch(inner) or _CPUSET_LIMIT_PATHS.fullmatch(inner)
                    ):
                        data = archive.extractfile(member)
                        text = b"" if data is None else data.read(MAX_TREE_FILE_BYTES)
                        kept_bytes += len(text)
                        if kept_bytes > MAX_ARCHIVE_KEPT_BYTES:
                            limit = f"{MAX_ARCHIVE_KEPT_BYTES >> 20} MiB"
                            raise TopologyError(source, f"describes a machine in more than {limit}")
                        files[name] = _decode_file(text)
                    else:
                        other_names.add(name)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as e:
        raise TopologyError(source, f"is not a tar archive, or is damaged: {e}") from e
    cpu_files = [n for n in files if _strip_capture_directory(n).startswith(CPU_DIR)]
    prefixes = sorted({n[: n.index(CPU_DIR)] for n in cpu_files}, key=lambda p: (p.count("/"), p))
    if not prefixes:
        raise TopologyError(source, f"there is no {CPU_DIR} in the archive")
    if len(prefixes) > 1 and prefixes[0] != "":
        names = ", ".join(p.rstrip("/") for p in prefixes[:3])
        raise TopologyError(source, f"holds {len(prefixes)} machines ({names}); expected one")
    cut = len(prefixes[0])
    return ArchiveTree(
        source,
        {n[cut:]: t for n, t in files.items() if n.startswith(prefixes[0])},
        {n[cut:] for n in links if n.startswith(prefixes[0])},
        {n[cut:] for n in other_names if n.startswith(prefixes[0])},
    )


def _safe_name(name: str) -> str | None:
    """Normalize a member's name; None if it points outside of the archive."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        return None
    return "/".join(parts)


def _strip_capture_directory(name: str) -> str:
    """Remove the capture's own directory from a name; captures have at most one."""
    if name.startswith(("sys/", "proc/", "dev/", "cgroup/")):
        return name
    return name.partition("/")[2]
