"""How the decisions about live containers came about: as made at first, packed soon after."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nri_numa.engine.decision import Trace
from nri_numa.engine.explain.explanation import Grounds, grounds
from nri_numa.engine.state import Allocation, Kind
from nri_numa.machine.model import Topology
from nri_numa.node.afterwards import Afterwards
from nri_numa.node.refused import unpacked
from nri_numa.observe.traces import KeptTrace, TraceKeeper


class TracesOf(dict[str, Trace | KeptTrace]):
    """Traces by container id.

    Args:
        keeper: packs them.
        soon: does so when the reply has left.
    """

    def __init__(self, keeper: TraceKeeper, soon: Afterwards) -> None:
        super().__init__()
        self._keeper = keeper
        self._soon = soon

    def hold(self, allocation: Allocation, trace: Trace) -> None:
        """Hold the trace of a decision, if it says more than one clause."""
        # Containers nobody asked anything for would cost memory for an explanation of one clause.
        plain = allocation.kind in (Kind.UNBOUND, Kind.FOREIGN) and not allocation.mems
        if not plain or not allocation.preferred:
            self[allocation.container_id] = trace
            self._soon.do(partial(self._pack, allocation.container_id))

    def _pack(self, container_id: str) -> None:
        trace = self.get(container_id)
        if isinstance(trace, Trace):
            self[container_id] = self._keeper.keep(trace)

    def grounds_of(self, allocation: Allocation | None, topology: Topology) -> Grounds | None:
        """How the decision about a container came about; None for an adopted one."""
        if allocation is None:
            return None
        kept = self.get(allocation.container_id)
        if isinstance(kept, KeptTrace):
            return unpacked(kept, allocation, topology)
        return grounds(kept) if kept is not None else None

    def kept(self, container_id: str) -> KeptTrace | None:
        """Stands for a trace: the same object as long as the decision is the same."""
        kept = self.get(container_id)
        return kept if isinstance(kept, KeptTrace) else None

    def packed(self) -> dict[str, KeptTrace]:
        """Those that are packed."""
        return {i: kept for i, kept in self.items() if isinstance(kept, KeptTrace)}

    def recall(self, traces: Mapping[str, KeptTrace]) -> None:
        """Know again what an earlier run kept."""
        self.update((i, self._keeper.again(kept)) for i, kept in traces.items())
