"""The machine's cgroup tree, both versions: finding and removing what a test bed made."""

import contextlib
import os
import signal
import time
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def unified() -> bool:
    return (CGROUP_ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Root of each mounted hierarchy: one on v2, one for each controller on v1."""
    if unified():
        return [CGROUP_ROOT]
    # Links such as cpu,cpuacct -> cpu would only be walked twice.
    return sorted(p for p in CGROUP_ROOT.iterdir() if p.is_dir() and not p.is_symlink())


def remove_tree(path: str) -> list[Path]:
    """Remove a cgroup path with everything below it in every hierarchy.

    Returns:
        What is still there.
    """
    left = []
    for root in hierarchies():
        top = root / path.strip("/")
        if top == root or not top.is_dir():
            continue
        for directory, _, _ in os.walk(top, topdown=False):
            if not _remove(Path(directory)):
                left.append(Path(directory))
    return left


def remove_if_empty(path: str) -> None:
    """Remove one cgroup where nothing uses it."""
    for root in hierarchies():
        with contextlib.suppress(OSError):
            (root / path.strip("/")).rmdir()


def _remove(directory: Path) -> bool:
    # A cgroup stays busy until the kernel has reaped its last task: a moment after the kill.
    deadline = time.monotonic() + 5
    while True:
        try:
            directory.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        with contextlib.suppress(OSError):
            for pid in (directory / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
