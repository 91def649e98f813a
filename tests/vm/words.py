"""The kernel's own words about a machine and its processes, read from /sys and /proc."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.machines.vm_machine import parse_list

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


def run(*command: str) -> None:
    """Run a program of the guest that has to work."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()


def online_cpus() -> frozenset[int]:
    return parse_list(_text(_CPUS / "online"))


def present_cpus() -> frozenset[int]:
    """CPUs that are in their sockets now."""
    return parse_list(_text(_CPUS / "present"))


def nohz_full_cpus() -> frozenset[int]:
    """CPUs whose timer tick stops while one thread runs; the file says ``(null)`` for none."""
    text = _text(_CPUS / "nohz_full")
    return frozenset() if text == "(null)" else parse_list(text)


def numa_nodes() -> frozenset[int]:
    return parse_list(_text(_NODES / "online"))


def numa_cpus(numa_node: int) -> frozenset[int]:
    return parse_list(_text(_NODES / f"node{numa_node}" / "cpulist"))


def numa_distances(numa_node: int) -> tuple[int, ...]:
    return tuple(int(value) for value in _text(_NODES / f"node{numa_node}" / "distance").split())


def numa_memory(numa_node: int, field: str = "MemTotal") -> int:
    """A field of the NUMA node's ``meminfo``, in bytes."""
    text = _text(_NODES / f"node{numa_node}" / "meminfo")
    match = re.search(rf"\b{field}:\s+([0-9]+) kB", text)
    assert match is not None, f"{field} is not in {text}"
    return int(match.group(1)) * 1024


def siblings(cpu: int) -> frozenset[int]:
    """Online CPUs of the core that `cpu` belongs to."""
    return parse_list(_text(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"))


def package(cpu: int) -> int:
    return int(_text(_CPUS / f"cpu{cpu}" / "topology" / "physical_package_id"))


def set_online(cpu: int, online: bool) -> None:
    """Switch a CPU on or off, as an operator does."""
    (_CPUS / f"cpu{cpu}" / "online").write_text("1" if online else "0", encoding="ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a process may use."""

    cpus: frozenset[int]
    mems: frozenset[int]


def allowed(pid: int) -> Allowed:
    """``Cpus_allowed_list`` and ``Mems_allowed_list`` of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = dict(re.findall(r"^(Cpus|Mems)_allowed_list:[ \t]*(\S*)$", text, re.MULTILINE))
    return Allowed(cpus=parse_list(found["Cpus"]), mems=parse_list(found["Mems"]))


def cgroup(pid: int) -> Path:
    """Directory of the process's cgroup (version 2)."""
    text = _text(Path(f"/proc/{pid}/cgroup"))
    match = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    assert match is not None, f"no cgroup v2 path in {text!r}"
    return Path("/sys/fs/cgroup") / match.group(1).lstrip("/")


def cgroup_allowed(pid: int) -> Allowed:
    """``cpuset.cpus.effective`` and ``cpuset.mems.effective`` of the process's cgroup."""
    directory = cgroup(pid)
    return Allowed(
        cpus=parse_list(_text(directory / "cpuset.cpus.effective")),
        mems=parse_list(_text(directory / "cpuset.mems.effective")),
    )


def cgroup_pids(pid: int) -> list[int]:
    """All processes in the cgroup of `pid`."""
    return [int(word) for word in _text(cgroup(pid) / "cgroup.procs").split()]


def pages(text: str) -> Iterator[tuple[int, int]]:
    """``(numa_node, bytes)`` of every anonymous mapping in a ``numa_maps`` text.

    Private mappings of files are left out, though some of their pages may be the process's own:
    the others lie wherever the file's first reader was, and the text does not tell them apart.
    """
    for line in text.splitlines():
        if " anon=" not in line or " file=" in line:
            continue
        size = re.search(r"\bkernelpagesize_kB=([0-9]+)", line)
        kib = int(size.group(1)) if size else 4
        for numa_node, count in re.findall(r"\bN([0-9]+)=([0-9]+)", line):
            yield int(numa_node), int(count) * kib * 1024


def anonymous_memory(pid: int) -> dict[int, int]:
    """Bytes of anonymous memory of a process on each NUMA node that has some."""
    total: dict[int, int] = {}
    text = Path(f"/proc/{pid}/numa_maps").read_text(encoding="ascii", errors="replace")
    for numa_node, size in pages(text):
        total[numa_node] = total.get(numa_node, 0) + size
    return total


def pci_devices() -> dict[str, tuple[int, str]]:
    """Address to ``(numa_node, class)`` of each PCI device."""
    return {
        device.name: (int(_text(device / "numa_node")), _text(device / "class"))
        for device in sorted(Path("/sys/bus/pci/devices").iterdir())
    }
