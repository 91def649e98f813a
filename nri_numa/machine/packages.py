"""Which cores share a socket, and what stands in for caches that the kernel does not tell.

The usual file is ``physical_package_id``. It holds -1 where firmware says nothing (s390, some Arm
machines and virtual ones), and on s390 it is only unique within a book and a drawer; the lists of
siblings tell the same thing in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.tree import CPU_DIR

Numbers = Callable[[str], int | None]
"""Reads a file with a number that is not negative; None for anything else."""
Ids = Callable[[str, str], CPUSet | None]
"""Reads CPUs from a list, or from a mask."""

_SIBLINGS = ("package_cpus", "core_siblings", "book_siblings", "drawer_siblings")


@dataclass(frozen=True, slots=True)
class Packages:
    """Sockets.

    Attributes:
        socket_of: core to socket id.
        unplaced: cores that nothing tells the socket of; they are in socket 0.
        without_id: cores whose package id is missing, -1 or no number; their siblings tell.
    """

    socket_of: Mapping[int, int]
    unplaced: CPUSet
    without_id: CPUSet


def packages(cores: Mapping[int, CPUSet], online: CPUSet, number: Numbers, ids: Ids) -> Packages:
    """Put cores into sockets.

    Args:
        cores: by the lowest thread, all threads.
        online: CPUs that are there.
        number: reads a number.
        ids: reads CPUs.
    """
    books = any(
        number(f"{CPU_DIR}/cpu{i}/topology/{level}_id") is not None
        for i in list(cores)[:1]
        for level in ("book", "drawer")
    )
    key_of: dict[int, tuple[int, ...]] = {}
    unplaced: list[int] = []
    without_id: list[int] = []
    for i, threads in cores.items():
        directory = f"{CPU_DIR}/cpu{i}/topology"
        package = number(f"{directory}/physical_package_id")
        if package is not None:
            above = (number(f"{directory}/{level}_id") for level in ("drawer", "book"))
            key_of[i] = (
                (*((-1 if n is None else n) for n in above), package) if books else (package,)
            )
            continue
        for name in _SIBLINGS:
            siblings = ids(f"{directory}/{name}_list", f"{directory}/{name}")
            # A core that is all by itself says no more than that nothing is known.
            if siblings is not None and len(siblings & online) > len(threads):
                key_of[i] = ((siblings & online).bits, 0, 0, 0)
                without_id.append(i)
                break
        else:
            unplaced.append(i)
    numbers = _numbered(key_of)
    return Packages(
        socket_of={i: numbers[key_of[i]] if i in key_of else 0 for i in cores},
        unplaced=CPUSet(unplaced),
        without_id=CPUSet(without_id),
    )


def _numbered(key_of: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """A number for each key: the kernel's where that is unique, else the lowest that is free."""
    keys = list(dict.fromkeys(key_of.values()))  # in order of their lowest CPU
    told = [k[-1] for k in keys if len(k) < 4]
    numbers: dict[tuple[int, ...], int] = {}
    if len(set(told)) == len(told):
        numbers = {k: k[-1] for k in keys if len(k) < 4}
    free = (n for n in range(len(keys) + len(told) + 1) if n not in numbers.values())
    for key in keys:
        if key not in numbers:
            numbers[key] = next(free)
    return numbers


def stand_ins(
    cores: Mapping[int, CPUSet], socket_of: Mapping[int, int], online: CPUSet, ids: Ids
) -> tuple[str, dict[int, CPUSet]]:
    """What to keep together where the kernel tells no caches: dies, else clusters of cores.

    Only what is larger than a core and, somewhere, smaller than a socket says anything.

    Returns:
        What they are, for a sentence, and the groups by their lowest CPU; empty for neither.
    """
    of_socket: dict[int, int] = {}
    for i, threads in cores.items():
        of_socket[socket_of[i]] = of_socket.get(socket_of[i], 0) | threads.bits
    for noun, name in (("dies", "die_cpus"), ("clusters of cores", "cluster_cpus")):
        groups: dict[int, CPUSet] = {}
        done = 0
        telling = False
        for i, threads in cores.items():
            if done >> i & 1:
                continue
            directory = f"{CPU_DIR}/cpu{i}/topology"
            told = ids(f"{directory}/{name}_list", f"{directory}/{name}")
            bits = ((0 if told is None else told.bits) | threads.bits) & online.bits & ~done
            groups[i] = CPUSet.from_bits(bits)
            done |= bits
            socket = of_socket[socket_of[i]]
            telling = telling or (bits != threads.bits and bool(socket & ~bits))
        if telling:
            return noun, groups
    return "", {}
