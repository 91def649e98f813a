"""What containers really have, for documents: the kernel's word beside the decision."""

from __future__ import annotations

from datetime import UTC, datetime

from nri_numa.engine.explain.sentences import actual_text
from nri_numa.engine.others import granted_names
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.http.responses import Actual
from nri_numa.machine.cpuset import NO_CPUS, CPUSet
from nri_numa.machine.model import cpus_text
from nri_numa.node.differences import Difference, Known


class Reality:
    """Differences of one moment.

    Args:
        state: what was decided.
        known: who differs from it.
    """

    def __init__(self, state: NodeState, known: Known) -> None:
        self._state = state
        self._known = known
        self._owners: dict[int, str] | None = None

    def of(self, container_id: str) -> Actual | None:
        """What this one has; None while it is as meant, and on no exclusive CPUs of others."""
        one = self._known.get(container_id) or self._foreign(container_id)
        if one is None:
            return None
        return Actual(
            cpus=one.cpus,
            mems=one.mems,
            meant_cpus=one.meant_cpus,
            meant_mems=one.meant_mems,
            since=one.since,
            text=one.text,
            found=one.found,
            intruder=one.intruder,
            owners=self._disturbed(container_id, one) if one.intruder else (),
            given_up=one.given_up,
        )

    def _foreign(self, container_id: str) -> Difference | None:
        """One that somebody else pinned to CPUs that are exclusive to others."""
        allocation = self._state.allocations.get(container_id)
        if allocation is None or not allocation.pinned & (self._state.owned | self._state.idle):
            return None
        return Difference(
            cpus=str(allocation.pinned),
            mems=str(allocation.mems),
            since=allocation.since,
            intruder=True,
            found=allocation.reason,
        )

    def gave_way(self, allocation: Allocation, cpus: CPUSet) -> str:
        """Where a container stands whose soft list gave way, and to whom; empty when it did not.

        Args:
            allocation: of the container.
            cpus: what it should have now.
        """
        lost = allocation.cpus & self._state.withheld if allocation.soft else NO_CPUS
        if not lost:
            return ""
        names = list(self._owning(lost, allocation.container_id))
        names += [f"{name} (by the kubelet)" for name in granted_names(self._state, lost)]
        where = str(cpus) if cpus <= allocation.cpus else f"the shared pool {cpus}"
        return f"stands on {where}: {cpus_text(lost, 'is', 'are')} exclusive to {', '.join(names)}"

    def _disturbed(self, container_id: str, one: Difference) -> tuple[str, ...]:
        return self._owning(CPUSet.parse(one.cpus), container_id)

    def _owning(self, cpus: CPUSet, but: str) -> tuple[str, ...]:
        """The names of those who own some of these CPUs."""
        allocations = self._state.allocations
        if self._owners is None:
            # Once for all of them: there may be as many intruders as owners.
            self._owners = {
                cpu: a.container_id
                for a in allocations.values()
                if a.owned
                for cpu in a.cpus | a.idle
            }
        found = {self._owners.get(cpu) for cpu in cpus} - {None, but}
        return tuple(sorted(allocations[i].full_name for i in found if i))


def sentence(actual: Actual) -> str:
    """Both sides in one sentence; the time in it does not grow old."""
    since = datetime.fromtimestamp(actual.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return actual_text(actual.text, since, actual.owners, given_up=actual.given_up)
