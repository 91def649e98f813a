"""What is missing on a node, in words: one class of reasons, and how near the node comes."""

from __future__ import annotations

from collections.abc import Sequence

from nri_numa.engine.align.policies import amount_text, nodes_text
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.model import counted
from nri_numa.scheduler.room import Room
from nri_numa.scheduler.verdict import Short
from nri_numa.scheduler.wish import Need

STRICT = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
ONE = "one NUMA node"


def words(need: Need, kept: int, name: str, amount: int) -> str:
    """What is asked for of one resource: ``12 exclusive CPUs``."""
    if name == "millicpu":
        return amount_text(amount, name)
    if name != "cpus":
        return f"{amount_text(amount, 'bytes')} of {name}"
    idle = f" with idle siblings ({kept} CPUs)" if kept != need.exclusive else ""
    return counted(need.exclusive, "exclusive CPU") + idle


def part_of_a_core(need: Need, threads: int) -> Short:
    """Whole cores cannot make up the CPUs that are asked for."""
    each = counted(threads, "thread")
    return Short(f"{counted(need.exclusive, 'exclusive CPU')} in whole cores of {each}", never=True)


def short(room: Room, need: Need, kept: int) -> Short:
    """What is missing: the first resource that is short by itself, else that none fit together."""
    table = room.table
    worst: Short | None = None
    texts: list[str] = []
    limit = ONE
    for name, amount, column in room.columns(need, kept):
        if name == "millicpu" and not amount:
            continue
        there: Sequence[int]
        if name == "cpus":
            there, unit = table.exclusive.there, name
        elif name == "millicpu":
            there, unit = table.cpu.there, name
        else:
            there, unit = room.there.get(name, [0] * len(table.ids)), "bytes"
        what = words(need, kept, name, amount)
        texts.append(what)
        width = _width(there, amount)
        if need.policy is Policy.SINGLE_NUMA_NODE:
            width = 1
        elif need.policy not in STRICT or width is None:
            width = len(table.ids)
        where = "" if width == len(table.ids) and width > 1 else _where(width)
        limit = where or limit
        least = max(1, amount)
        if _most(there, width) < least:
            return Short(what, where, unit, _most(there, width), never=True)
        free = _most(column, width)
        if free < least and worst is None:
            worst = Short(what, where, unit, free)
    what = " and ".join(texts) or "a place to run"
    return worst or Short(what, limit, apart=True)


def _where(width: int) -> str:
    return ONE if width == 1 else nodes_text(width)


def _width(there: Sequence[int], amount: int) -> int | None:
    """How many NUMA nodes an empty machine would need; None where it has too few."""
    for width in range(1, len(there) + 1):
        if _most(there, width) >= amount:
            return width
    return None


def _most(column: Sequence[int], width: int) -> int:
    return sum(sorted((max(0, n) for n in column), reverse=True)[:width])
