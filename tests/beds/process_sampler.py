"""Looks at the first processes of containers from outside, every 5 ms, from their start on."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nri_numa.model.cpuset import CPUSet
from tests.beds import cgroups
from tests.beds.cri import Container
from tests.checks.race_figures import Sighting

EVERY_S: Final = 0.005

_NAME = re.compile(rb"^Name:\s*(.*)$", re.MULTILINE)
_CPUS = re.compile(rb"^Cpus_allowed_list:\s*(\S*)$", re.MULTILINE)


@dataclass(slots=True)
class Watched:
    """One container under observation."""

    procs: Path
    stage: str = ""
    track: list[Sighting] = field(default_factory=list)
    descriptor: int = -1


class Sampler:
    """Looks at the processes of containers every 5 ms, in a thread; a context manager.

    A process is found by its cgroup, because no call of the runtime tells the process id before
    the program runs. What runs before the program is the runtime's own and is not counted.
    """

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._stop = threading.Event()
        # Two threads: the list of a cgroup's processes waits for whoever changes cgroups, and the
        # looks at processes shall not wait with it.
        self._threads = [
            threading.Thread(target=self._repeat, args=(each,), name="sampler", daemon=True)
            for each in (self._find, self._look)
        ]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for watched in self._watched.values():
            if watched.descriptor >= 0:
                os.close(watched.descriptor)

    def watch(self, container: Container) -> Watched:
        """Look at this container from now on."""
        base = cgroups.CGROUP_ROOT if cgroups.unified() else cgroups.CGROUP_ROOT / "cpuset"
        parent, name = container.pod.cgroup_parent.lstrip("/"), container.id
        if parent.endswith(".slice"):
            name = f"cri-containerd-{name}.scope"
        watched = Watched(base / parent / name / "cgroup.procs")
        self._watched[container.id] = watched
        return watched

    def _repeat(self, each: Callable[[Watched], None]) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            for watched in list(self._watched.values()):
                with contextlib.suppress(OSError):  # not there yet, or gone
                    each(watched)
            due = max(due + EVERY_S, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _look(self, watched: Watched) -> None:
        if watched.descriptor >= 0:
            at = time.time()
            text = os.pread(watched.descriptor, 8192, 0)
            if match := _CPUS.search(text):
                watched.track.append(Sighting(at, CPUSet.parse(match.group(1).decode())))

    def _find(self, watched: Watched) -> None:
        if watched.descriptor >= 0:
            return
        pids = watched.procs.read_text(encoding="ascii").split()
        watched.stage = watched.stage or "cgroup"
        for pid in pids:
            descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            name = _NAME.search(os.pread(descriptor, 8192, 0))
            if name is not None and not name.group(1).startswith((b"runc", b"exe")):
                watched.descriptor, watched.stage = descriptor, "program"
                return
            if name is not None and name.group(1) == b"runc:[2:INIT]":
                watched.stage = "init"
            os.close(descriptor)
