"""Moving the pages of running programs to another NUMA node, a few at a time: move_pages(2).

The kernel moves everything at once when ``cpuset.mems`` is written, and on Linux up to 6.12 no
cpuset of the machine can be written meanwhile: for seconds. So most pages are moved before, while
the cgroup has both NUMA nodes. A step is 2,048 pages, and not fewer where there are more: each
call has all CPUs of the machine empty their lists of pages.

Pages that no process maps stay where they are, and so do those that a device or io_uring has
pinned.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, read_text, read_text_or_empty
from nri_numa.machine.usage import UsageUnknown, list_cgroup_processes
from nri_numa.model.cpuset import NUMASet

_SYSCALL_NUMBERS: Final = {"x86_64": 279, "aarch64": 239}
"""Of the system call by machine, from the kernel's tables; libc has no function for it."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
STEP_PAGES: Final = 2048
"""A good step, as measured: 8 MiB. With small areas before a large one up to twice as much."""
_MIGRATION_STEP_BYTES: Final = STEP_PAGES * _PAGE_BYTES
_MAX_MOVE_TRIES: Final = 2
"""A page may be busy for a moment: also all of a huge page while its first part is on its way."""
_MPOL_MF_MOVE, _MPOL_MF_MOVE_ALL = 2, 4  # MPOL_MF_MOVE, MPOL_MF_MOVE_ALL
_CAPABILITY_BITS: Final = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19}
"""Bits of a set of capabilities; pagemap of another user's process is closed to root without the
first. CAP_SYS_NICE is found out by a call."""
_PAGE_PRESENT_BIT: Final = 63  # bit of an entry of /proc/PID/pagemap
_EFAULT_KERNEL_PREFIXES: Final = ("6.1.", "6.2.", "6.3.", "6.4.")
"""Kernels whose move_pages answers EFAULT for pages that NUMA balancing watches (seen with 6.1)."""


class MigrationStep(NamedTuple):
    """Bytes that were moved, and that would not move, of those that were elsewhere; and why."""

    moved_bytes: int
    unmoved_bytes: int
    obstacle: str = ""


def _move_pages(
    pid: int, addresses: Sequence[int], target: int | None, flags: int = 0
) -> Sequence[int]:
    """On which NUMA node pages are afterwards, below 0 where that is none.

    Raises:
        OSError: the process is gone, or we may not.
    """
    count = len(addresses)
    pages, status = array("Q", addresses), array("i", bytes(4 * count))
    to = None if target is None else array("i", [target]) * count
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(_SYSCALL_NUMBERS[platform.machine()]),
        ctypes.c_int(pid),
        ctypes.c_ulong(count),
        ctypes.c_void_p(pages.buffer_info()[0]),
        ctypes.c_void_p(None if to is None else to.buffer_info()[0]),
        ctypes.c_void_p(status.buffer_info()[0]),
        ctypes.c_int(flags),
    )
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return status


def find_migration_problem(reader: CgroupReader) -> str:
    """Why no pages can be moved from here; empty where they can."""
    if platform.machine() not in _SYSCALL_NUMBERS:
        return f"how pages are moved on {platform.machine()} is not known"
    if "0" in read_text_or_empty(f"{reader.hierarchy}/cgroup.procs").split():
        return "the processes of the host cannot be seen (hostPID)"
    if read_text_or_empty("/proc/self/attr/current").startswith("nri-numa"):
        return "the AppArmor profile nri-numa lets no process be read"
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text("/proc/self/status"), re.MULTILINE)
    has = int(rights[1], 16) if rights else 0
    if missing := [name for name, bit in _CAPABILITY_BITS.items() if not has >> bit & 1]:
        return f"{' and '.join(missing)} missing"
    kernel, balancing = (
        platform.release(),
        read_text_or_empty("/proc/sys/kernel/numa_balancing").strip(),
    )
    if kernel.startswith(_EFAULT_KERNEL_PREFIXES) and balancing not in ("", "0"):
        return f"Linux {kernel} moves no pages that NUMA balancing watches (kernel.numa_balancing)"
    try:
        _move_pages(0, (), None, _MPOL_MF_MOVE_ALL)
    except OSError as error:
        return f"move_pages: {error.strerror} (CAP_SYS_NICE, or a filter of system calls)"
    return ""


def migrate_pages(
    reader: CgroupReader, place: CgroupPlace, sources: NUMASet, target: int
) -> Iterator[MigrationStep]:
    """Move what a container maps on some NUMA nodes to another one; each ``next`` is one step.

    Raises:
        OSError: we may not, or its processes are not known.
    """
    try:
        pids = list_cgroup_processes(reader.directory_of(place))
    except UsageUnknown as unknown:
        raise OSError(str(unknown)) from unknown
    for pid in sorted(pids):
        try:
            yield from _migrate_process_pages(pid, sources, target)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended
        except OSError as error:
            # Of a process without memory, or a target outside of our own cpuset.
            if error.errno != errno.EINVAL or not _has_ended(pid):
                raise


def _has_ended(pid: int) -> bool:
    """Whether a process is gone or a zombie, or just lets go of its memory: proc_pid_statm(5)."""
    return read_text_or_empty(f"/proc/{pid}/statm").partition(" ")[0] in ("", "0")


def _migrate_process_pages(pid: int, sources: NUMASet, target: int) -> Iterator[MigrationStep]:
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        batches: dict[int, list[int]] = {_MPOL_MF_MOVE: [], _MPOL_MF_MOVE_ALL: []}
        for start, end, flags in _read_mapped_areas(pid):
            batch = batches[flags]
            first = (
                start // _MIGRATION_STEP_BYTES * _MIGRATION_STEP_BYTES
            )  # so that no huge page is in two steps
            for aligned in range(first, end, _MIGRATION_STEP_BYTES):
                at = max(start, aligned)
                count = (min(end, aligned + _MIGRATION_STEP_BYTES) - at) // _PAGE_BYTES
                data = os.pread(pagemap, 8 * count, at // _PAGE_BYTES * 8)
                if data.count(0) == len(data):
                    continue  # a large reservation, most of which was never touched
                entries = array("Q", data[: len(data) // 8 * 8])
                batch += [
                    at + i * _PAGE_BYTES for i, e in enumerate(entries) if e >> _PAGE_PRESENT_BIT
                ]
                if len(batch) >= STEP_PAGES:
                    yield _move_step(pid, batch, flags, sources, target)
                    batch.clear()
        for flags, batch in batches.items():
            yield _move_step(pid, batch, flags, sources, target)
    finally:
        os.close(pagemap)


def _read_mapped_areas(pid: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and flags: programs and libraries are moved where no other process maps them."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            where, rights = line.split(" ", 2)[:2]
            start, _, end = where.partition("-")
            of_a_file = "/" in line and rights[3] == "p"
            yield int(start, 16), int(end, 16), _MPOL_MF_MOVE if of_a_file else _MPOL_MF_MOVE_ALL


def _move_step(
    pid: int, addresses: Sequence[int], flags: int, sources: NUMASet, target: int
) -> MigrationStep:
    def pages_on_sources(among: Sequence[int]) -> list[int]:
        nodes = _move_pages(pid, among, None) if among else ()
        return [a for a, node in zip(among, nodes, strict=True) if node in sources]

    left = before = pages_on_sources(addresses)
    error = 0
    for _ in range(_MAX_MOVE_TRIES):
        if left:
            status = _move_pages(pid, left, target, flags)
            error = next((-one for one in status if one < 0), 0)
            left = pages_on_sources(left)
    why = os.strerror(error) if left and error else ""
    return MigrationStep((len(before) - len(left)) * _PAGE_BYTES, len(left) * _PAGE_BYTES, why)
