"""One loop in a process of its own: ``python -m nri_numa.measure.worker JSON``.

The process pins itself to its CPU and its memory to its NUMA node before it allocates anything, and
prints ``ready``. It then reads seconds from each line of its input, runs that long, and prints a
figure. A line that begins with ``!`` is the reason why the loop cannot run.
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
from typing import Final

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
"""System call number by machine, from the kernel's tables; libc has no function for the call."""

_RING_LINK_OBJECT_BYTES: Final = 48
"""Bytes of an object with one slot, as rounded up by the allocator."""
_MATRIX_SIZE: Final = 192
"""Rows of a matrix; three such matrices fit the caches of one core."""


class LoopCannotRun(Exception):
    """Loop that cannot run here; the message is the reason."""


def bind_memory(numa_node: int) -> None:
    """Place all memory that this thread touches first from now on on one NUMA node.

    Raises:
        LoopCannotRun: the kernel refuses.
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
    # The kernel reads one bit less than the number passed (get_nodes in mm/mempolicy.c).
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * bits + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise LoopCannotRun(f"memory cannot be tied to NUMA node {numa_node}: {reason}")


def check_memory_on_numa_node(numa_node: int, size: int) -> None:
    """Check that the allocated memory is on a NUMA node; passes if the kernel does not report it.

    Raises:
        LoopCannotRun: the memory is on another one, so the figures would be wrong.
    """
    bytes_by_node: dict[int, int] = {}
    try:
        with open("/proc/self/numa_maps", "rb") as file:
            add_mapped_bytes(file.read(), bytes_by_node)
    except OSError:
        return
    actual_bytes = local_bytes(bytes_by_node, {numa_node})
    if actual_bytes < 0.9 * size:
        raise LoopCannotRun(
            f"only {actual_bytes >> 20} of {size >> 20} MiB came to be on NUMA node {numa_node}"
        )


def make_bandwidth_loop(size: int) -> Callable[[float], float]:
    """Copy half of the buffer to its other half; in 10⁹ bytes read and written per second."""
    import numpy

    source = numpy.ones(size // 16)
    target = numpy.zeros(size // 16)
    target[:] = source  # zeros have no pages before the first write
    return _make_rate_loop(lambda: numpy.copyto(target, source), 2 * source.nbytes / 1e9)


def make_cache_loop(size: int) -> Callable[[float], float]:
    """Read the same bytes in random order of cache lines; in 10⁹ bytes per second."""
    import numpy

    lines = max(1, size // 64)
    data = numpy.ones((lines, 8))
    # In an order that no prefetcher predicts, so that the place of a line matters.
    order = numpy.random.default_rng(1).permutation(lines)
    part = order[: max(1, lines // 8)]
    buffer = numpy.empty((len(part), 8))
    parts = numpy.array_split(order, 8)

    def gather_once() -> None:
        for indices in parts:
            numpy.take(data, indices, axis=0, out=buffer[: len(indices)], mode="clip")

    return _make_rate_loop(gather_once, data.nbytes / 1e9)


def make_compute_loop(size: int) -> Callable[[float], float]:
    """Multiply small matrices; in 10⁹ operations per second."""
    import numpy

    a = numpy.random.default_rng(1).random((_MATRIX_SIZE, _MATRIX_SIZE))
    b, product = a.copy(), a.copy()
    return _make_rate_loop(lambda: numpy.matmul(a, b, out=product), 2 * _MATRIX_SIZE**3 / 1e9)


class _RingLinkObject:
    __slots__ = ("next_link",)

    next_link: _RingLinkObject


def make_latency_loop(size: int) -> Callable[[float], float]:
    """Follow a ring of objects in random order; in nanoseconds per step.

    Each step depends on the one before, so nothing is prefetched. The interpreter's own time is
    included, equally on both sides.
    """
    cells = [
        _RingLinkObject()
        for _ in range(max(2, min(size, MAX_RING_BYTES) // _RING_LINK_OBJECT_BYTES))
    ]
    order = list(range(len(cells)))
    random.Random(1).shuffle(order)  # noqa: S311  # the same ring each time
    for index, next_index in zip(order, [*order[1:], order[0]], strict=True):
        cells[index].next_link = cells[next_index]
    cursor = [cells[0]]
    step_range = range(100_000)

    def follow_ring(seconds: float) -> float:
        cell, count = cursor[0], 0
        start_time = time.perf_counter()
        while (elapsed := time.perf_counter() - start_time) < seconds or not count:
            for _ in step_range:
                cell = cell.next_link
            count += len(step_range)
        cursor[0] = cell
        return 1e9 * elapsed / count

    return follow_ring


def make_busy_loop(size: int) -> Callable[[float], float]:
    """Use CPU time and nothing else; the figure has no meaning."""
    return _make_rate_loop(lambda: sum(range(10_000)), 0.0)


LOOPS_BY_NAME: Final[dict[str, Callable[[int], Callable[[float], float]]]] = {
    "bandwidth": make_bandwidth_loop,
    "cache": make_cache_loop,
    "compute": make_compute_loop,
    "latency": make_latency_loop,
    "busy": make_busy_loop,
}


def _make_rate_loop(run_once: Callable[[], object], amount: float) -> Callable[[float], float]:
    """Build a loop that repeats ``run_once`` and returns ``amount`` times the runs per second."""

    def run_for_seconds(seconds: float) -> float:
        count = 0
        start_time = time.perf_counter()
        while True:
            run_once()
            count += 1
            elapsed = time.perf_counter() - start_time
            if elapsed >= seconds:
                return amount * count / elapsed

    return run_for_seconds


def main(argument: str) -> int:
    """Prepare the loop, and run it for each line of the input."""
    worker = msgspec.json.decode(argument, type=LoopWorker)
    numa_node, size = worker.numa_node, worker.size
    gc.disable()  # the millions of objects all stay in use
    try:
        os.sched_setaffinity(0, {worker.cpu})
        if numa_node is not None:
            bind_memory(numa_node)
        run = LOOPS_BY_NAME[worker.loop](size)
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
