"""The cheap look at all nodes: sums and comparisons where they say what the engine would say.

A pod whose containers are placed as one (it has one that asks, or scope ``pod``) and that one NUMA
node has room for goes to one NUMA node under every policy; one that none has room for is refused
under ``single-numa-node``. Whatever else may be is left to `nri_numa.scheduler.judge`, which says
the same of these at thirty times the cost.
"""

from __future__ import annotations

from typing import cast

from nri_numa.engine.align.hints import Amounts
from nri_numa.engine.place.strategy import WHOLE, measures
from nri_numa.engine.values.workload import SMT, OnFailure, Policy, Strategy
from nri_numa.scheduler.published import Column, Stock, Table
from nri_numa.scheduler.room import kept_of
from nri_numa.scheduler.scoring import points
from nri_numa.scheduler.shortage import ONE, words
from nri_numa.scheduler.verdict import Short
from nri_numa.scheduler.wish import Need, Wish

_Row = tuple[int, Column, Column, str]
"""What is asked of one resource, what there is and what is left of it, and its unit."""


def glance_of(wish: Wish, strategy: Strategy) -> Glance | None:
    """What to look with; None for a pod whose containers are placed one after another."""
    need = wish.together
    if need is None:
        if len(wish.needs) != 1 or wish.needs[0].ends:
            return None
        (need,) = wish.needs
    return Glance(need, strategy, kubelets=bool(wish.kubelets))


class Glance:
    """Looks at nodes for pods of one kind.

    Args:
        need: of all that is placed.
        strategy: which of several NUMA nodes with room.
        kubelets: a kubelet with a policy would judge it too.
    """

    def __init__(self, need: Need, strategy: Strategy, *, kubelets: bool) -> None:
        self._need, self._strategy, self._kubelets = need, strategy, kubelets
        self._final = need.policy is Policy.SINGLE_NUMA_NODE and need.on_failure is OnFailure.REJECT
        self._paid_memory = dict(need.paid).get("memory", 0)
        self._paid_milli = need.paid_milli + 1000 * need.exclusive
        # CPUs and memory and nothing else, as nearly every pod asks.
        self._memory = need.amounts[0][1] if [n for n, _ in need.amounts] == ["memory"] else None
        self._words: dict[tuple[int, str, int], str] = {}

    def look(self, table: Table) -> Short | int | None:
        """A score where the pod fits, what is short where it does not, None where it is not said.

        Args:
            table: of a node, with everything taken away that is held.
        """
        need = self._need
        if not table.alike or (self._kubelets and table.policy is not Policy.NONE):
            return None
        if need.smt is SMT.FULL_CORE and need.exclusive % table.threads:
            return None
        memory = table.memory
        if self._memory is not None and memory is not None:
            place = self._of_two(table, self._memory, memory)
        else:
            place = self._of_many(self._rows(table))
        if place < 0:
            return self._short(table, self._rows(table)) if self._final else None
        cpu, left = table.cpu, 1000
        if whole := cpu.there[place]:
            left = 1000 * (cpu.left[place] - self._paid_milli) // whole
        if memory is not None and (there := memory.there[place]):
            rest = 1000 * (memory.left[place] - self._paid_memory) // there
            if rest < left or not whole:
                left = rest
        elif not whole:
            left = 0
        # As `nri_numa.scheduler.room.Room.scarcest` after the pod was counted.
        return points(1, False, max(0, left), table.factor[place], self._strategy)

    def _of_two(self, table: Table, bytes_: int, memory: Stock) -> int:
        """The NUMA node that is tried first for CPUs and memory; -1 where none has room.

        What `measures` says of two columns, written out: it is asked for each node and each kind of
        pod.
        """
        need = self._need
        if cpus := need.exclusive:
            if need.smt is SMT.ISOLATE:
                cpus = kept_of(need, table)
            left, there = table.whole, table.exclusive.there
        else:
            cpus = max(1, need.milli)
            left, there = table.cpu.left, table.cpu.there
        bytes_left, bytes_there = memory.left, memory.there
        pack = self._strategy is Strategy.PACK
        found, best, second = -1, 0, 0
        for place, free in enumerate(left):
            if free < cpus or (more := bytes_left[place]) < bytes_:
                continue
            if found < 0 and place + 1 == len(left):
                return place  # the only one
            if self._strategy is Strategy.MOST_LEFT:
                one, other = -more, -free
            else:
                all_, most = there[place], bytes_there[place]
                one = (all_ - free + cpus) * WHOLE // all_ if all_ > 0 else WHOLE
                other = (most - more + bytes_) * WHOLE // most if most > 0 else WHOLE
                if one < other:
                    one, other = other, one
                if pack:
                    one, other = -one, -other
            # Of equal ones the first.
            if found < 0 or one < best or (one == best and other < second):
                found, best, second = place, one, other
        return found

    def _of_many(self, rows: list[_Row]) -> int:
        """The same for any number of resources."""
        least, _, left, _ = rows[0]
        fit = [place for place, n in enumerate(left) if n >= least]
        for least, _, left, _ in rows[1:]:
            fit = [place for place in fit if left[place] >= least]
        if len(fit) < 2:
            return fit[0] if fit else -1
        return self._best(fit, rows)

    def _rows(self, table: Table) -> list[_Row]:
        need = self._need
        if need.exclusive:
            kept = need.exclusive if need.smt is not SMT.ISOLATE else kept_of(need, table)
            rows: list[_Row] = [(kept, table.exclusive.there, table.whole, "cpus")]
        else:
            rows = [(max(1, need.milli), table.cpu.there, table.cpu.left, "millicpu")]
        for name, amount in need.amounts:
            for stock in table.others:
                if stock.name == name:
                    rows.append((amount, stock.there, stock.left, name))
                    break
            else:
                none = (0,) * len(table.ids)
                rows.append((amount, none, none, name))
        return rows

    def _best(self, fit: list[int], rows: list[_Row]) -> int:
        """Of those with room the first by strategy, then by id, as the engine ranks them."""
        # A column is read by place as a mapping is by NUMA node.
        asked = [
            (least, cast(Amounts, left), cast(Amounts, there)) for least, there, left, _ in rows
        ]
        found = measures(asked, tuple(fit), self._strategy)
        return min(zip(found, fit, strict=True))[1]

    def _short(self, table: Table, rows: list[_Row]) -> Short:
        """As `nri_numa.scheduler.shortage.short` says it of one NUMA node."""
        need, worst, texts = self._need, None, []
        for least, there, left, name in rows:
            if name == "millicpu" and not need.milli:
                continue
            what = self._what(table, name, need.milli if name == "millicpu" else least)
            texts.append(what)
            unit = name if name in ("cpus", "millicpu") else "bytes"
            most = max(0, *there)
            if most < max(1, least):
                return Short(what, ONE, unit, most, never=True)
            free = max(0, *left)
            if free < max(1, least) and worst is None:
                worst = Short(what, ONE, unit, free)
        return worst or Short(" and ".join(texts) or "a place to run", ONE, apart=True)

    def _what(self, table: Table, name: str, amount: int) -> str:
        key = (table.threads, name, amount)
        found = self._words.get(key)
        if found is None:
            found = self._words[key] = words(self._need, kept_of(self._need, table), name, amount)
        return found
