"""What is left of a node while pods are counted on it, one after another.

Counts only: which CPUs they are is known on the node alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nri_numa.engine.values.workload import SMT
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.scheduler.published import Column, Stock, Table
from nri_numa.scheduler.verdict import Charge
from nri_numa.scheduler.wish import Need, Wish


class Room:
    """What is left of a table while the containers of one pod are placed."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.exclusive = list(table.whole)
        self.milli = list(table.cpu.left)
        self.others = {stock.name: list(stock.left) for stock in table.others}
        self.there = {stock.name: stock.there for stock in table.others}

    def copy(self) -> Room:
        """Another one, for what ends again."""
        made = object.__new__(Room)
        made.table, made.there = self.table, self.there
        made.exclusive, made.milli = list(self.exclusive), list(self.milli)
        made.others = {name: list(column) for name, column in self.others.items()}
        return made

    def by_id(self, column: Sequence[int]) -> dict[int, int]:
        """A column as the engine reads it."""
        return dict(zip(self.table.ids, column, strict=True))

    def take(self, places: Sequence[int], need: Need, kept: int) -> None:
        """Take what a need is paid for, NUMA node by NUMA node."""
        for place, count in _fill(places, kept, self.exclusive):
            self.exclusive[place] -= count
        owned = _fill(places, need.exclusive, [m // 1000 for m in self.milli])
        for place, count in owned:
            self.milli[place] -= 1000 * count
        for place, count in _fill(places, need.paid_milli, self.milli):
            self.milli[place] -= count
        self.exclusive = [
            min(n, max(0, m) // 1000) for n, m in zip(self.exclusive, self.milli, strict=True)
        ]
        for name, amount in need.paid:
            column = self.others.get(name)
            if column is not None:
                for place, count in _fill(places, amount, column):
                    column[place] -= count

    def columns(self, need: Need, kept: int) -> list[tuple[str, int, Sequence[int]]]:
        """What a need asks for: resource, how much of it, and what is left by NUMA node."""
        nothing = [0] * len(self.table.ids)
        cpu: list[tuple[str, int, Sequence[int]]] = (
            [("cpus", kept, self.exclusive)]
            if need.exclusive
            else [("millicpu", need.milli, self.milli)]
        )
        return cpu + [(n, amount, self.others.get(n, nothing)) for n, amount in need.amounts]

    def charge(self) -> Charge | None:
        """What was taken; None where it is nothing that is counted."""
        start = Room(self.table)
        others = tuple(
            (name, column)
            for name in start.others
            if any(column := _taken(start.others[name], self.others[name]))
        )
        charge = Charge(
            _taken(start.exclusive, self.exclusive), _taken(start.milli, self.milli), others
        )
        return charge if others or any(charge.exclusive) or any(charge.milli) else None

    def scarcest(self, place: int) -> int:
        """Thousandths of the scarcest resource that are left on one NUMA node."""
        table = self.table
        there = [(self.milli[place], table.cpu.there[place])]
        there += [
            (self.others[s.name][place], s.there[place]) for s in table.others if s.name == "memory"
        ]
        return max(0, min((1000 * left // whole for left, whole in there if whole > 0), default=0))


def _fill(places: Sequence[int], amount: int, left: Sequence[int]) -> list[tuple[int, int]]:
    """Share an amount out; what fits nowhere is on the first place, so that it is counted."""
    found: list[tuple[int, int]] = []
    for place in places:
        part = min(amount, max(0, left[place]))
        if part:
            found.append((place, part))
            amount -= part
    if amount and places:
        found.append((places[0], amount))
    return found


def _taken(before: Sequence[int], after: Sequence[int]) -> Column:
    return tuple(b - a for b, a in zip(before, after, strict=True))


def kept_of(need: Need, table: Table) -> int:
    """CPUs that a need keeps to itself, with siblings that stay idle."""
    return need.exclusive * (table.threads if need.smt is SMT.ISOLATE else 1)


def places_of(table: Table, numa_nodes: NUMASet) -> list[int]:
    """Where NUMA nodes stand in the columns of a table; others than it has are passed over."""
    bits = numa_nodes.bits
    return [place for place, i in enumerate(table.ids) if bits >> i & 1]


def without(table: Table, charges: Sequence[Charge]) -> Table:
    """A table with promises taken away; nothing goes below zero."""
    return _changed(table, charges, -1, lambda _, n: max(0, n)) if charges else table


def with_back(table: Table, charges: Sequence[Charge]) -> Table:
    """A table with what pods take given back; nothing goes above what there is."""
    found = _changed(table, charges, 1, min)
    if table.together is None:
        return found
    back = sum(sum(charge.exclusive) for charge in charges)
    return replace(found, together=table.together + back)


def _changed(
    table: Table, charges: Sequence[Charge], sign: int, limit: Callable[[int, int], int]
) -> Table:
    exclusive, milli = list(table.exclusive.left), list(table.cpu.left)
    others = {stock.name: list(stock.left) for stock in table.others}
    for charge in charges:
        _add(exclusive, charge.exclusive, sign)
        _add(milli, charge.milli, sign)
        for name, column in charge.others:
            if name in others:
                _add(others[name], column, sign)

    def left(stock: Stock, column: Sequence[int]) -> Stock:
        return Stock(stock.name, stock.there, tuple(map(limit, stock.there, column)))

    return replace(
        table,
        cpu=left(table.cpu, milli),
        exclusive=left(table.exclusive, exclusive),
        others=tuple(left(stock, others[stock.name]) for stock in table.others),
    )


def charge_of(table: Table, wish: Wish, places: Mapping[str, NUMASet]) -> Charge | None:
    """What a pod takes that was placed before, by somebody whose room nobody remembers.

    Args:
        table: of the node, with nothing taken away.
        wish: of the pod.
        places: NUMA nodes by container; others than the node has are passed over.
    """
    room = Room(table)
    for need in (wish.together,) if wish.together is not None else wish.needs:
        if need.ends:
            continue
        if need.container:
            numa_nodes = places.get(need.container, NO_NUMA_NODES)
        else:
            numa_nodes = next(iter(places.values()), NO_NUMA_NODES)
        room.take(places_of(table, numa_nodes), need, kept_of(need, table))
    return room.charge()


def _add(column: list[int], amounts: Column, sign: int) -> None:
    # The node's NUMA nodes may have changed since: then the charge is of another machine.
    if len(amounts) == len(column):
        for place, amount in enumerate(amounts):
            column[place] += sign * amount
