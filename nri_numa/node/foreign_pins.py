"""Says what is not ours and could hurt: pins that overlap with owners, and doubtful annotations.

Nothing is done about foreign pins (docs/adr/0018-foreign-containers.md), so an operator has to
hear of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nri_numa.engine.decision import Resynced
from nri_numa.engine.others import overlapping
from nri_numa.engine.state import NodeState
from nri_numa.machine.cpuset import CPUSet
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

log = get_logger("foreign")

NAMED = 5
"""Containers that one line names; a node may have hundreds."""


SAID_AT_ONCE = 10
"""Doubted annotations of one synchronisation that get a line each."""


class ForeignWatch:
    """Remembers what was said, so that each overlap is said and counted once."""

    def __init__(self, metrics: Metrics, state: Callable[[], NodeState]) -> None:
        """Make a watch that has seen nothing yet.

        Args:
            metrics: counted into.
            state: the node state at the moment of a look.
        """
        self._metrics = metrics
        self._state = state
        self._said: dict[str, CPUSet] = {}

    def look(self) -> None:
        """Look at every container once; nothing that the runtime waits for calls this."""
        state = self._state()
        found = overlapping(state)
        self._metrics.foreign_on_owned.set(len(found))
        new = [i for i, cpus in found.items() if not cpus <= self._said.get(i, CPUSet())]
        self._said = dict(found)
        if not new:
            return
        self._metrics.foreign_overlaps.inc(len(new))
        shared = CPUSet()
        for container_id in new:
            shared = shared | found[container_id]
        log.warning(
            "foreign containers may run on exclusive CPUs of others",
            containers=len(new),
            cpus=str(shared),
            names=named([state.allocations[i].full_name for i in new]),
        )

    def doubt(self, outcome: Resynced) -> None:
        """Say which annotations were not believed, and which cpusets nothing explains."""
        disbelieved, unexplained = outcome.disbelieved, outcome.unexplained
        self._metrics.claims_disbelieved.inc(len(disbelieved))
        self._metrics.unexplained_pins.inc(len(unexplained))
        for sentence in disbelieved[:SAID_AT_ONCE]:
            log.warning("annotation not believed", problem=sentence)
        if len(disbelieved) > SAID_AT_ONCE:
            log.warning("more annotations not believed", containers=len(disbelieved) - SAID_AT_ONCE)
        if unexplained:
            log.warning(
                "nothing tells who set these cpusets: they are taken for pins of somebody else, "
                "and their CPUs may become exclusive to others",
                containers=len(unexplained),
                names=named(unexplained),
            )


def named(names: Sequence[str]) -> str:
    """The first few names, in order, and how many more there are."""
    shown = sorted(names)[:NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
