"""What Kubernetes cannot see: processes that burn CPUs, and a probe of what a newcomer would get.

Each process is in a cgroup of its own at the top, with the weight that every cgroup has: it
competes with all pods together as another virtual machine on the host competes with this one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.beds import cgroups

# It ends by itself when whoever started it does, however that ends.
_BURN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
_PROBE = """
import sys, time
seconds = float(sys.argv[1])
begun, cpu = time.perf_counter(), time.process_time()
while (taken := time.perf_counter() - begun) < seconds:
    pass
print((time.process_time() - cpu) / taken)
"""


def _directories(name: str) -> list[Path]:
    if cgroups.unified():
        return [cgroups.CGROUP_ROOT / name]
    return [cgroups.CGROUP_ROOT / "cpu" / name]


class _OwnCgroup:
    """A process on one CPU, in a cgroup of its own."""

    def __init__(self, name: str, cpu: int, arguments: Sequence[str]) -> None:
        self._name = name
        for directory in _directories(name):
            directory.mkdir(exist_ok=True)
        # It goes there itself before it becomes the program: nothing runs elsewhere first.
        enter = "; ".join(f"echo $$ > {d}/cgroup.procs" for d in _directories(name))
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'{enter}; exec "$@"', "sh", *arguments],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for directory in _directories(self._name):
            for _ in range(100):  # the kernel lets go of a process a moment later
                with contextlib.suppress(OSError):
                    directory.rmdir()
                    break
                time.sleep(0.02)


@contextlib.contextmanager
def cotenants(cpus: Iterable[int], each: int) -> Iterator[None]:
    """Burn CPUs, with so many processes on each of them."""
    with contextlib.ExitStack() as stack:
        for cpu in cpus:
            for n in range(each):
                one = _OwnCgroup(f"nri-numa-cotenant-{cpu}-{n}", cpu, [sys.executable, "-c", _BURN])
                stack.callback(one.end)
        time.sleep(0.5)  # they are loaded and burn
        yield


def share(cpu: int, seconds: float) -> float:
    """The part of a CPU that a newcomer gets there now, from 0 to 1, by trying."""
    one = _OwnCgroup(f"nri-numa-probe-{cpu}", cpu, [sys.executable, "-c", _PROBE, str(seconds)])
    try:
        assert one.process.stdout is not None
        return min(1.0, float(one.process.stdout.readline()))
    finally:
        one.end()
