"""Searches for room that exceeded a request's limit and continue between requests.

A piece takes a few milliseconds, and the next one runs after all other tasks had a turn. The result
of a search is valid for one node state: if that changed meanwhile, the search starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Final

from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.history import DecisionHistory
from nri_numa.agent.loop import DeferredTasks
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.rebalance import (
    MAX_DEFERRED_SEARCH_WORK,
    StepwiseSearch,
    continued_move_search,
    fits_after_moves_text,
)

SEARCH_UNITS_PER_PIECE: Final = 2_000
"""Units of work of one piece, unless a single try is more."""
MAX_SEARCH_RESTARTS: Final = 3
"""Limit for a node that keeps changing; the kubelet retries anyway."""
MAX_WAITING_SEARCHES: Final = 32
"""Rejected containers whose search continues; beyond that the oldest is dropped."""


class DeferredRoomSearches:
    """Continues the searches for rejected containers, one after the other.

    Args:
        move: moves containers; returns the problem, or an empty text.
    """

    def __init__(
        self,
        current: CurrentState,
        cgroups: CgroupUpdates,
        history: DecisionHistory,
        tasks: DeferredTasks,
        move: Callable[[Admitted], str],
    ) -> None:
        self._current, self._cgroups, self._history = current, cgroups, history
        self._tasks, self._move = tasks, move
        self._waiting: dict[tuple[str, str], Rejected] = {}
        self._search: StepwiseSearch[Admitted | Rejected] | None = None
        self._about: tuple[object, ...] = ()
        self._beginnings = 0

    def add_rejected(self, rejected: Rejected) -> None:
        """Continue the search for a rejected container, once for all its rejections."""
        was_empty = not self._waiting
        self._waiting[rejected.trace.pod.uid, rejected.trace.container.name] = rejected
        if len(self._waiting) > MAX_WAITING_SEARCHES:
            self._drop_current_search()
        if was_empty:
            self._tasks.add(self._run_search_piece)

    def _drop_current_search(self) -> None:
        del self._waiting[next(iter(self._waiting))]
        self._search, self._beginnings = None, 0

    def _run_search_piece(self) -> None:
        """Run one piece of the current search, and schedule the next one."""
        rejected = next(iter(self._waiting.values()))
        search = self._current_search(rejected) if self._is_retry_expected(rejected) else None
        result = None if search is None else search.run_steps(SEARCH_UNITS_PER_PIECE)
        if search is None or result is not None or search.used >= MAX_DEFERRED_SEARCH_WORK:
            self._drop_current_search()
        if self._waiting:
            self._tasks.add(self._run_search_piece)
        if result is not None:
            self._apply_result(rejected, result)

    def _current_search(self, rejected: Rejected) -> StepwiseSearch[Admitted | Rejected] | None:
        """Return the search on the current state; None if it was restarted too often."""
        about = self._current.machine, self._current.state
        if any(map(is_not, about, self._about)) or self._search is None:
            if self._beginnings == MAX_SEARCH_RESTARTS:
                return None
            self._beginnings, self._about = self._beginnings + 1, about
            self._search = continued_move_search(
                self._current.snapshot(), rejected, self._cgroups.immovable_ids(), is_deferred=True
            )
        return self._search

    def _is_retry_expected(self, rejected: Rejected) -> bool:
        """True if a rejected container may be created again: its pod exists without it."""
        uid, name = rejected.trace.pod.uid, rejected.trace.container.name
        container_names = [a.container for a in self._current.state.allocations_of_pod(uid)]
        return self._history.has_rejection(rejected) and name not in container_names

    def _apply_result(self, rejected: Rejected, outcome: Admitted | Rejected) -> None:
        """Move containers if the search found moves, and update the rejection's message."""
        immovable = self._cgroups.immovable_ids()
        if isinstance(outcome, Rejected):
            text = outcome.room_text
        elif immovable.isdisjoint(m.after.container_id for m in outcome.moves):
            text = fits_after_moves_text(outcome.moves)
            if problem := self._move(outcome):
                text = f"no container could be moved: {problem}"
        else:
            text = ""
        if text:
            self._history.record_room_found(rejected, text)
