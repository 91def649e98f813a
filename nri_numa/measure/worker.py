"""One loop in a process of its own: ``python -m nri_numa.measure.worker JSON``.

It goes to its CPU and ties its memory to its NUMA node before it allocates anything, says
``ready``, and then runs for as many seconds as each line of its input says and answers with a
figure. A line that begins with ``!`` says why it cannot.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from nri_numa.machine.usage import add_mapped_bytes, local_bytes
from nri_numa.measure.plan import MAX_RING_BYTES, LoopWorker

_MPOL_BIND: Final = 2  # set_mempolicy(2)
_SET_MEMPOLICY_SYSCALL_NUMBERS: Final = {
    "x86_64": 238,
    "aarch64": 237,
    "riscv64": 237,
    "ppc64le": 261,
    "s390x": 270,
}
"""Number of the system call by machine, from the kernel's tables; libc has no function for it."""

_RING_LINK_OBJECT_BYTES: Final = 48
"""Bytes of an object with one slot, as the allocator rounds them up."""
_MATRIX_SIZE: Final = 192
"""Rows of a matrix that fits the caches of one core three times."""


class LoopCannotRun(Exception):
    """The loop cannot be run here; the message says why."""


def bind_memory(numa_node: int) -> None:
    """Have all memory that this thread touches first from now on on one NUMA node.

    Raises:
        CannotError: the kernel does not do it.
    """
    number = _SET_MEMPOLICY_SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise LoopCannotRun(
            f"how memory is tied to NUMA nodes on {platform.machine()} is not known here"
        )
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (numa_node // bits + 1))()
    mask[numa_node // bits] = 1 << (numa_node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is given (get_nodes in mm/mempolicy.c).
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * bits + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise LoopCannotRun(f"memory cannot be tied to NUMA node {numa_node}: {reason}")


def check_memory_on_numa_node(numa_node: int, size: int) -> None:
    """See whether what was allocated is where it should be, as far as the kernel says.

    Raises:
        CannotError: it is elsewhere; figures would be of something else.
    """
    found: dict[int, int] = {}
    try:
        with open("/proc/self/numa_maps", "rb") as file:
            add_mapped_bytes(file.read(), found)
    except OSError:
        return
    there = local_bytes(found, {numa_node})
    if there < 0.9 * size:
        raise LoopCannotRun(
            f"only {there >> 20} of {size >> 20} MiB came to be on NUMA node {numa_node}"
        )


def _import_numpy() -> Any:
    import numpy

    return numpy


def make_bandwidth_loop(size: int) -> Callable[[float], float]:
    """Copy half of the buffer to its other half; gives 10⁹ bytes read and written a second."""
    numpy = _import_numpy()
    source = numpy.ones(size // 16)
    target = numpy.zeros(size // 16)
    target[:] = source  # touched: zeros are not there before
    return _make_timed_loop(lambda: numpy.copyto(target, source), 2 * source.nbytes / 1e9)


def make_cache_loop(size: int) -> Callable[[float], float]:
    """Read the same bytes in random order of lines; gives 10⁹ bytes a second."""
    numpy = _import_numpy()
    lines = max(1, size // 64)
    data = numpy.ones((lines, 8))
    # In an order that no prefetcher guesses, so that it matters where a line is.
    order = numpy.random.default_rng(1).permutation(lines)
    part = order[: max(1, lines // 8)]
    out = numpy.empty((len(part), 8))
    parts = numpy.array_split(order, 8)

    def gather_once() -> None:
        for some in parts:
            numpy.take(data, some, axis=0, out=out[: len(some)], mode="clip")

    return _make_timed_loop(gather_once, data.nbytes / 1e9)


def make_compute_loop(size: int) -> Callable[[float], float]:
    """Multiply small matrices; gives 10⁹ operations a second."""
    numpy = _import_numpy()
    a = numpy.random.default_rng(1).random((_MATRIX_SIZE, _MATRIX_SIZE))
    b, out = a.copy(), a.copy()
    return _make_timed_loop(lambda: numpy.matmul(a, b, out=out), 2 * _MATRIX_SIZE**3 / 1e9)


class _RingLinkObject:
    __slots__ = ("next",)

    next: _RingLinkObject


def make_latency_loop(size: int) -> Callable[[float], float]:
    """Follow a ring of objects that lie in random order; gives ns for one step.

    Each step waits for the one before, so nothing is fetched ahead. The interpreter's own share is
    in it, on both sides alike.
    """
    cells = [
        _RingLinkObject()
        for _ in range(max(2, min(size, MAX_RING_BYTES) // _RING_LINK_OBJECT_BYTES))
    ]
    order = list(range(len(cells)))
    random.Random(1).shuffle(order)  # noqa: S311  # the same ring each time
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        cells[here].next = cells[there]
    at = [cells[0]]
    steps = range(100_000)

    def follow_ring(seconds: float) -> float:
        cell, count = at[0], 0
        begun = time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds or not count:
            for _ in steps:
                cell = cell.next
            count += len(steps)
        at[0] = cell
        return 1e9 * elapsed / count

    return follow_ring


def make_busy_loop(size: int) -> Callable[[float], float]:
    """Take CPU time and nothing else; its figure says nothing."""
    return _make_timed_loop(lambda: sum(range(10_000)), 0.0)


LOOPS_BY_NAME: Final[dict[str, Callable[[int], Callable[[float], float]]]] = {
    "bandwidth": make_bandwidth_loop,
    "cache": make_cache_loop,
    "compute": make_compute_loop,
    "latency": make_latency_loop,
    "busy": make_busy_loop,
}


def _make_timed_loop(once: Callable[[], object], each: float) -> Callable[[float], float]:
    """Repeat for some seconds; gives what was done a second, ``each`` a time."""

    def run_for_seconds(seconds: float) -> float:
        count = 0
        begun = time.perf_counter()
        while True:
            once()
            count += 1
            elapsed = time.perf_counter() - begun
            if elapsed >= seconds:
                return each * count / elapsed

    return run_for_seconds


def main(argument: str) -> int:
    """Make ready, and run whenever a line comes."""
    given = msgspec.json.decode(argument, type=LoopWorker)
    numa_node, size = given.numa_node, given.size
    gc.disable()  # millions of objects that all stay
    try:
        os.sched_setaffinity(0, {given.cpu})
        if numa_node is not None:
            bind_memory(numa_node)
        run = LOOPS_BY_NAME[given.loop](size)
        if numa_node is not None:
            check_memory_on_numa_node(numa_node, min(size, MAX_RING_BYTES) // 2)
        run(0.0)
    except (LoopCannotRun, OSError, MemoryError, ImportError) as error:
        print(f"!{str(error) or 'there is too little memory'}", flush=True)
        return 1
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(float(line)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
