"""What /proc tells of the processes, sockets and mounts that a bed has to clean up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


def commands() -> Iterator[tuple[int, bytes]]:
    """(process id, command line with NUL bytes) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes()


def state_and_parent(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command name in parentheses may hold anything, also blanks and parentheses.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def described(pid: int) -> str:
    """What a process that does not end is, and where the kernel holds it."""
    facts = [f"process {pid}"]
    for name in ("comm", "stat", "cgroup", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
            facts.append(f"{name}: {text.strip()}")
    return "\n  ".join(facts)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = state_and_parent(pid)
    return stat is not None and stat[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """Process ids of its children, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := state_and_parent(int(entry.name))) is not None:
            children.setdefault(stat[1], []).append(int(entry.name))
    found: list[int] = []
    wait = [pid]
    while wait:
        below = children.get(wait.pop(), [])
        found += below
        wait += below
    return found


def listening(pid: int) -> set[Path]:
    """Paths of the unix sockets that a process has bound."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    inodes.add(match.group(1))
    found = set()
    with contextlib.suppress(OSError):
        # Its own list: the process may have a network namespace of its own.
        text = Path(f"/proc/{pid}/net/unix").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            fields = line.split(maxsplit=7)  # …, inode, path
            if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
                found.add(Path(fields[7]))
    return found


def mounts_below(*directories: Path) -> list[str]:
    """Mount points below these directories, oldest first."""
    prefixes = tuple(f"{directory.resolve()}/" for directory in directories)
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # Blanks and the like are octal escapes, \040.
        target = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), line.split(" ")[4])
        if target.startswith(prefixes):
            found.append(target)
    return found
