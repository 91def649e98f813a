"""Migration of the pages of running programs to another NUMA node, in steps of move_pages(2).

The kernel migrates all pages at once when ``cpuset.mems`` is written, and on Linux up to 6.12 no
cpuset of the machine can be written meanwhile, for seconds. So most pages are migrated before,
while the cgroup has both NUMA nodes. A step has 2,048 pages if there are as many: each call makes
all CPUs of the machine drain their page lists.

Pages that no process maps are not migrated, nor pages that a device or io_uring has pinned.
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
from nri_numa.machine.usage import PAGE_BYTES, UsageUnknown, list_cgroup_processes
from nri_numa.model.cpuset import NUMASet

_SYSCALL_NUMBERS: Final = {"x86_64": 279, "aarch64": 239}
"""System call number by machine, from the kernel's tables; libc has no function for the call."""
STEP_PAGES: Final = 2048
"""Measured as a good step: 8 MiB. Small areas before a large one can double it."""
_MIGRATION_STEP_BYTES: Final = STEP_PAGES * PAGE_BYTES
_MAX_MOVE_TRIES: Final = 2
"""A page may be busy for a moment, and so is a whole huge page while its first part migrates."""
_MPOL_MF_MOVE, _MPOL_MF_MOVE_ALL = 2, 4  # MPOL_MF_MOVE, MPOL_MF_MOVE_ALL
_CAPABILITY_BITS: Final = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19}
"""Bits of a set of capabilities; without the first one root cannot read pagemap of another user's
process. CAP_SYS_NICE is checked by a call."""
_PAGE_PRESENT_BIT: Final = 63  # bit of an entry of /proc/PID/pagemap
_EFAULT_KERNEL_PREFIXES: Final = ("6.1.", "6.2.", "6.3.", "6.4.")
"""Kernels whose move_pages fails with EFAULT on pages that NUMA balancing watches (seen in 6.1)."""


class MigrationStep(NamedTuple):
    """Bytes that were migrated, bytes that remain on the sources, and the reason for those."""

    moved_bytes: int
    unmoved_bytes: int
    obstacle: str = ""


def _move_pages(
    pid: int, addresses: Sequence[int], target: int | None, flags: int = 0
) -> Sequence[int]:
    """Move pages, or only locate them without a target; return their NUMA nodes, below 0 for none.

    Raises:
        OSError: the process has ended, or permission is missing.
    """
    count = len(addresses)
    pages, status = array("Q", addresses), array("i", bytes(4 * count))
    targets = None if target is None else array("i", [target]) * count
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(_SYSCALL_NUMBERS[platform.machine()]),
        ctypes.c_int(pid),
        ctypes.c_ulong(count),
        ctypes.c_void_p(pages.buffer_info()[0]),
        ctypes.c_void_p(None if targets is None else targets.buffer_info()[0]),
        ctypes.c_void_p(status.buffer_info()[0]),
        ctypes.c_int(flags),
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return status


def find_migration_problem(reader: CgroupReader) -> str:
    """Return the reason why this process cannot migrate pages; empty if it can."""
    if platform.machine() not in _SYSCALL_NUMBERS:
        return f"how pages are moved on {platform.machine()} is not known"
    if "0" in read_text_or_empty(f"{reader.hierarchy}/cgroup.procs").split():
        return "the processes of the host cannot be seen (hostPID)"
    if read_text_or_empty("/proc/self/attr/current").startswith("nri-numa"):
        return "the AppArmor profile nri-numa forbids reading processes"
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text("/proc/self/status"), re.MULTILINE)
    capabilities = int(rights[1], 16) if rights else 0
    if missing := [name for name, bit in _CAPABILITY_BITS.items() if not capabilities >> bit & 1]:
        return f"{' and '.join(missing)} missing"
    kernel = platform.release()
    balancing = read_text_or_empty("/proc/sys/kernel/numa_balancing")
    if kernel.startswith(_EFAULT_KERNEL_PREFIXES) and balancing not in ("", "0"):
        return f"Linux {kernel} does not migrate pages under NUMA balancing (kernel.numa_balancing)"
    try:
        _move_pages(0, (), None, _MPOL_MF_MOVE_ALL)
    except OSError as error:
        return f"move_pages: {error.strerror} (CAP_SYS_NICE, or a filter of system calls)"
    return ""


def migrate_pages(
    reader: CgroupReader, cgroup: CgroupPlace, sources: NUMASet, target: int
) -> Iterator[MigrationStep]:
    """Migrate a container's mapped pages from some NUMA nodes to another, one step per ``next``.

    Raises:
        OSError: permission is missing, or the container's processes are unknown.
    """
    try:
        pids = list_cgroup_processes(reader.directory_of(cgroup))
    except UsageUnknown as unknown:
        raise OSError(str(unknown)) from unknown
    for pid in sorted(pids):
        try:
            yield from _migrate_process_pages(pid, sources, target)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process ended
        except OSError as error:
            # A process without memory, or a target outside of this process's cpuset.
            if error.errno != errno.EINVAL or not _has_process_ended(pid):
                raise


def _has_process_ended(pid: int) -> bool:
    """True if a process has ended, is a zombie, or is freeing its memory: proc_pid_statm(5)."""
    return read_text_or_empty(f"/proc/{pid}/statm").partition(" ")[0] in ("", "0")


def _migrate_process_pages(pid: int, sources: NUMASet, target: int) -> Iterator[MigrationStep]:
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        batches: dict[int, list[int]] = {_MPOL_MF_MOVE: [], _MPOL_MF_MOVE_ALL: []}
        for start, stop, flags in _read_mapped_areas(pid):
            batch = batches[flags]
            # Aligned, so that no huge page is in two steps.
            first_address = start // _MIGRATION_STEP_BYTES * _MIGRATION_STEP_BYTES
            for aligned in range(first_address, stop, _MIGRATION_STEP_BYTES):
                base = max(start, aligned)
                count = (min(stop, aligned + _MIGRATION_STEP_BYTES) - base) // PAGE_BYTES
                data = os.pread(pagemap, 8 * count, base // PAGE_BYTES * 8)
                if data.count(0) == len(data):
                    continue  # no page present, as in most of a large reservation
                entries = array("Q", data[: len(data) // 8 * 8])
                batch += [
                    base + i * PAGE_BYTES for i, e in enumerate(entries) if e >> _PAGE_PRESENT_BIT
                ]
                if len(batch) >= STEP_PAGES:
                    yield _move_step(pid, batch, flags, sources, target)
                    batch.clear()
        for flags, batch in batches.items():
            yield _move_step(pid, batch, flags, sources, target)
    finally:
        os.close(pagemap)


def _read_mapped_areas(pid: int) -> Iterator[tuple[int, int, int]]:
    """Read start, end and flags of areas; file pages move only if mapped by no other process."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            area, rights = line.split(" ", 2)[:2]
            start, _, stop = area.partition("-")
            of_a_file = "/" in line and rights[3] == "p"
            yield int(start, 16), int(stop, 16), _MPOL_MF_MOVE if of_a_file else _MPOL_MF_MOVE_ALL


def _move_step(
    pid: int, addresses: Sequence[int], flags: int, sources: NUMASet, target: int
) -> MigrationStep:
    def pages_on_sources(candidates: Sequence[int]) -> list[int]:
        nodes = _move_pages(pid, candidates, None) if candidates else ()
        return [a for a, node in zip(candidates, nodes, strict=True) if node in sources]

    unmoved = pages = pages_on_sources(addresses)
    error = 0
    for _ in range(_MAX_MOVE_TRIES):
        if unmoved:
            status = _move_pages(pid, unmoved, target, flags)
            error = next((-code for code in status if code < 0), 0)
            unmoved = pages_on_sources(unmoved)
    reason = os.strerror(error) if unmoved and error else ""
    return MigrationStep(
        (len(pages) - len(unmoved)) * PAGE_BYTES, len(unmoved) * PAGE_BYTES, reason
    )
