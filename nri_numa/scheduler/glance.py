"""The cheap look at all nodes: sums and comparisons where they say what the engine would say.

A pod whose containers are placed as one (it has one that asks, or scope ``pod``) and that one NUMA
node has room for goes to one NUMA node under every policy; one that none has room for is refused
under ``single-numa-node``. Whatever else may be is left to `nri_numa.scheduler.judge`, which says
the same of these at thirty times the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from nri_numa.engine.align.hints import Amounts
from nri_numa.engine.place.computed import measures
from nri_numa.engine.values.workload import SMT, OnFailure, Policy, Strategy
from nri_numa.scheduler.front import Front, Place, first_of, front_index, front_of
from nri_numa.scheduler.published import Column, Table
from nri_numa.scheduler.room import kept_of
from nri_numa.scheduler.scoring import ONE_NUMA_NODE, grade
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
        self._cpus = need.exclusive or max(1, need.milli)
        self._isolates = bool(need.exclusive) and need.smt is SMT.ISOLATE
        self._picky = self._kubelets or need.smt is SMT.FULL_CORE
        self._of = front_index(bool(need.exclusive), strategy)
        self._words: dict[tuple[int, str, int], str] = {}

    def look(self, table: Table) -> Short | int | None:
        """A grade where the pod fits, what is short where it does not, None where it is not said.

        Args:
            table: of a node, with everything taken away that is held.
        """
        if not self._says(table):
            return None
        place = self._first(self._rows(table))
        if place < 0:
            return self._short(table, self._rows(table)) if self._final else None
        memory = table.memory
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
        return grade(1, False, max(0, left), table.factor[place], self._strategy)

    def grades(self, tables: Sequence[Table]) -> list[int | None]:
        """The same of many, where what is prepared of a table says it at once.

        One loop without a call for each table: with the next pod of another shape it runs again.

        Returns:
            For each table a grade, or None: `look` may say more.
        """
        bytes_ = self._memory
        if not bytes_:
            return [None] * len(tables)
        asked, of, strategy = self._cpus, self._of, self._strategy
        cpus, isolates, pack = asked, self._isolates, strategy is Strategy.PACK
        paid_milli, paid_memory = self._paid_milli, self._paid_memory
        says = self._says if self._picky else None
        found: list[int | None] = []
        for table in tables:
            if says is not None and not says(table):
                found.append(None)
                continue
            front = table.fronts[of]
            if front is None:
                front = self._prepare(table)
            if isolates:
                cpus = asked * table.threads
            best: Place | None = None
            for one in front:
                if one[0] >= cpus and one[1] >= bytes_:
                    if best is not None:
                        fit = [p for p in front if p[0] >= cpus and p[1] >= bytes_]
                        best = first_of(fit, cpus, bytes_, strategy)
                        break
                    best = one
            if best is None:
                found.append(None)
                continue
            _, memory, _, _, _, _, milli, milli_there, memory_there, factor = best
            left = 1000 * (milli - paid_milli) // milli_there
            rest = 1000 * (memory - paid_memory) // memory_there
            if rest < left:
                left = rest
            if left < 0:
                left = 0
            # `grade`, written out.
            room = 1000 - left if pack else left
            found.append(ONE_NUMA_NODE + (6500 + 3 * room + factor) // 1000)
        return found

    def _says(self, table: Table) -> bool:
        """Whether the sums of a table decide."""
        need = self._need
        if not table.alike or (self._kubelets and table.policy is not Policy.NONE):
            return False
        return need.smt is not SMT.FULL_CORE or not need.exclusive % table.threads

    def _prepare(self, table: Table) -> Front:
        """What is said of a table without knowing the pod; empty where that is nothing."""
        found: Front | None = None
        cpu, memory = table.cpu, table.memory
        if memory is not None and table.alike:
            milli = cpu.left, cpu.there
            cpus = (table.whole, table.exclusive.there) if self._need.exclusive else milli
            found = front_of(cpus, milli, (memory.left, memory.there), table.factor, self._strategy)
        table.fronts[self._of] = found or ()
        return found or ()

    def _first(self, rows: list[_Row]) -> int:
        """Place of the NUMA node that is tried first; -1 where none has room."""
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
