"""A node state that takes in many containers in a row, without a copy for each of them.

A thousand strangers make a thousand states, each of which is looked at once: by the decision about
the next one. Copying what grows with the node for each of them would cost its square.
"""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    PodRecord,
    charged,
    counted,
    group_of,
    without_cpus,
)
from nri_numa.machine.cpuset import CPUSet


class Growing:
    """Does what `NodeState.with_allocation` does, in the mappings of the state it made last.

    Only that one is still true after the next: each state that comes out of here is gone with the
    call after it, unless `keep` is called between the two. States from elsewhere are never changed.
    What a decision works out late, the charges, is copied all the same.
    """

    def __init__(self) -> None:
        self._allocations: dict[str, Allocation] = {}
        self._pods: dict[str, PodRecord] = {}
        self._listed: dict[str, CPUSet] = {}
        self._groups: dict[int, dict[str, None]] = {}

    def keep(self) -> None:
        """Somebody keeps the state that was made last: it is not changed any more."""
        self._allocations, self._pods, self._listed, self._groups = {}, {}, {}, {}

    def add(self, state: NodeState, allocation: Allocation) -> NodeState:
        """Add one allocation; its container must not have one.

        Args:
            state: as it is; where it is the one that was made last, it must not be used afterwards.
            allocation: of the container.
        """
        container_id = allocation.container_id
        if state.allocations is not self._allocations:
            self._allocations = dict(state.allocations)
        if state.pods is not self._pods:
            self._pods = dict(state.pods)
        if state.groups is not self._groups:
            self._groups = {key: dict(members) for key, members in state.groups.items()}
        charges = allocation.charges
        if allocation.kind is Kind.EXPLICIT and state.owned_beside(allocation):
            charges = without_cpus(charges)
        self._allocations[container_id] = allocation
        record = self._pods.get(allocation.pod_uid)
        containers = frozenset((container_id,))
        self._pods[allocation.pod_uid] = (
            PodRecord(uid=allocation.pod_uid, pod_id=allocation.pod_id, containers=containers)
            if record is None
            else replace(record, containers=record.containers | containers)
        )
        key = group_of(allocation)
        if key is not None:
            self._groups.setdefault(key, {})[container_id] = None
        listed, listed_cpus, owned = state.listed, state.listed_cpus, state.owned
        if allocation.owned:
            owned = owned | allocation.cpus
        elif allocation.keeps_list:
            if listed is not self._listed:
                self._listed = dict(listed)
            self._listed[container_id] = allocation.cpus
            listed, listed_cpus = self._listed, listed_cpus | allocation.cpus
        return NodeState(
            serial=state.serial + 1,
            allocations=self._allocations,
            pods=self._pods,
            owned=owned,
            idle=state.idle | allocation.idle if allocation.idle else state.idle,
            listed=listed,
            listed_cpus=listed_cpus,
            foreign=counted(state.foreign, allocation, 1)
            if allocation.kind is Kind.FOREIGN
            else state.foreign,
            charges=charged(state.charges, charges, 1),
            groups=self._groups,
            kubelet=state.kubelet,
        )
