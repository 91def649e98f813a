"""The current node: input of every decision.

Only the agent replaces the state, within one event and without an ``await``. Other threads may read
every attribute, since each is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from nri_numa.agent.loop import Clock
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import Allocation, NodeState, step_invariant_violations
from nri_numa.model.workload import ChangedStateIds, MemoryPolicies
from nri_numa.store.checkpoint import CheckpointStore

SYNCHRONIZE_BUDGET_S: Final = 1.0
"""Time for decisions in a Synchronize; the runtime waits two seconds for all of it unless it says
less (``plugin_request_timeout``), and then drops the plugin."""


class CurrentState:
    """Node state, topology and settings in force.

    Args:
        observe: decide and report, but change nothing.

    Attributes:
        machine: topology and settings in force.
        state: the node state.
        memory: measured free memory when last read; None while it cannot be read.
        narrowed_at: Unix time when the shared pool was last narrower than now, if known.
        observe: as in Args, or another agent works on the runtime.
        synchronized: True once the runtime has reported its containers.
        soft_ids: container ids of soft reservations; updated every few seconds.
        synchronize_budget_s: seconds for the decisions of a Synchronize.
        reports_failed_creations: the runtime reports the end of a container whose creation failed.
        store: the checkpoint.
        clock: the agent's clock.
    """

    def __init__(
        self, machine: NodeModel, store: CheckpointStore, clock: Clock, *, observe: bool = False
    ) -> None:
        self.machine = machine
        self.state = NodeState()
        self.memory: MeasuredFree | None = None
        self.narrowed_at: float | None = None
        self.observe = observe
        self.synchronized = False
        self.soft_ids: frozenset[str] = frozenset()
        self.synchronize_budget_s = SYNCHRONIZE_BUDGET_S
        self.reports_failed_creations = True
        self.store = store
        self.clock = clock
        self._listeners: list[Callable[[], None]] = []

    # --- reading ----------------------------------------------------------------------------------

    def snapshot(self) -> NodeSnapshot:
        """Return the input of a decision, with measured free memory and the time."""
        return NodeSnapshot(
            self.machine, self.state, self.memory, self.clock.time(), self.narrowed_at
        )

    @property
    def desired(self) -> NodeSnapshot:
        """Snapshot from which the desired cpusets of containers follow."""
        return NodeSnapshot(self.machine, self.state, narrowed_at=self.narrowed_at)

    @property
    def schedulable(self) -> NodeSnapshot:
        """Snapshot of the node as schedulers count it: soft reservations are free."""
        desired, state = self.desired, self.state
        soft_ids = [i for i in sorted(self.soft_ids) if i in state.allocations]
        released = state.without_allocation(*soft_ids)
        return desired.with_state(replace(released, serial=state.serial)) if soft_ids else desired

    def cpus_of(self, allocation: Allocation) -> str:
        """Return the CPU list a container should have; empty if it is not pinned."""
        return str(self.desired.cpuset_of(allocation))

    # --- changes ----------------------------------------------------------------------------------

    def restore_state(self, state: NodeState) -> None:
        """Start from the checkpoint, before the runtime reports anything."""
        self.state = state

    def replace_state(self, state: NodeState, change: ChangedStateIds) -> tuple[list[str], bool]:
        """Write a decision to disk, then apply it.

        Listeners are not called: the agent does that after correcting starting containers.

        Returns:
            Violated invariants, and True if other CPUs are unavailable now.
        """
        prior, machine = self.state, self.machine
        violations = step_invariant_violations(prior, state, machine.topology, machine.settings)
        self.store.write_change(prior, state, change)
        self.state = state
        if unavailable := prior.unavailable_bits:
            self.narrowed_at = self.clock.time()
        return violations, unavailable != state.unavailable_bits

    def replace_machine(self, machine: NodeModel) -> None:
        """Replace topology and settings; memory policies stay."""
        self.machine = machine.with_memory_policies(self.machine.memory_policies)

    def record_narrower_pool(self) -> None:
        """Record that the shared pool may have been narrower until now."""
        self.narrowed_at = self.clock.time()

    def set_memory(self, memory: MeasuredFree | None) -> None:
        """Record measured free memory; None while it cannot be read."""
        self.memory = memory

    def set_soft_ids(self, soft_ids: frozenset[str]) -> None:
        """Record the soft reservations, in a state with another serial."""
        self.soft_ids = soft_ids
        self.state = replace(self.state, serial=self.state.serial + 1)

    def set_observe(self, observe: bool) -> None:
        """Turn observe mode on or off."""
        self.observe = observe

    def set_synchronized(self) -> None:
        """Record that the runtime has reported its containers."""
        self.synchronized = True

    def set_runtime(
        self,
        policies: MemoryPolicies,
        request_timeout: float,
        *,
        reports_failed_creations: bool = True,
    ) -> None:
        """Record the runtime's abilities and its request timeout; 0 s if it reports none."""
        self.machine = self.machine.with_memory_policies(policies)
        self.reports_failed_creations = reports_failed_creations
        self.synchronize_budget_s = min(
            SYNCHRONIZE_BUDGET_S, request_timeout / 2 or SYNCHRONIZE_BUDGET_S
        )

    # --- listeners --------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns a function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self) -> None:
        """Call all listeners."""
        for listener in self._listeners:
            listener()
