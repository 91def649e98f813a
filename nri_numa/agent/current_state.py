"""The node at this moment: what decisions are made on.

The agent alone replaces the state, within one event and without an ``await``. Other threads read
what is here: every attribute is replaced as a whole.
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
        memory: what the kernel had left when last read; None while it cannot be read.
        narrowed_at: Unix time when the shared pool was last narrower than now, as far as known.
        observe: as in Args, or another agent works on the runtime.
        synchronized: True once the runtime has said what runs.
        soft_ids: reservations that give way, by container id; seen every few seconds.
        synchronize_budget_s: seconds for the decisions of a Synchronize.
        store: the checkpoint.
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
        self.store = store
        self._now = clock.time
        self._listeners: list[Callable[[], None]] = []

    # --- reading ----------------------------------------------------------------------------------

    def snapshot(self) -> NodeSnapshot:
        """What a decision looks at: also measured free memory and the time."""
        return NodeSnapshot(self.machine, self.state, self.memory, self._now(), self.narrowed_at)

    @property
    def desired(self) -> NodeSnapshot:
        """What containers should have at this moment."""
        return NodeSnapshot(self.machine, self.state, narrowed_at=self.narrowed_at)

    @property
    def schedulable(self) -> NodeSnapshot:
        """The node as schedulers count it: what gives way to their pods is free."""
        desired, state = self.desired, self.state
        soft_ids = [i for i in sorted(self.soft_ids) if i in state.allocations]
        released = state.without_allocation(*soft_ids)
        return desired.with_state(replace(released, serial=state.serial)) if soft_ids else desired

    def cpus_of(self, allocation: Allocation) -> str:
        """Kernel list of the CPUs a container should have; empty if it is left alone."""
        return str(self.desired.cpuset_of(allocation))

    # --- changes ----------------------------------------------------------------------------------

    def restore_state(self, state: NodeState) -> None:
        """Start from the checkpoint, before the runtime has said anything."""
        self.state = state

    def replace_state(self, state: NodeState, change: ChangedStateIds) -> tuple[list[str], bool]:
        """Put a decision on disk, then in force.

        Listeners are not called: the agent does that once cgroups of starting containers follow.

        Returns:
            The invariants that it violates, and whether other CPUs are unavailable now.
        """
        prior, machine = self.state, self.machine
        violations = step_invariant_violations(prior, state, machine.topology, machine.settings)
        self.store.write_change(prior, state, change)
        self.state = state
        if unavailable := prior.unavailable_bits:
            self.narrowed_at = self._now()
        return violations, unavailable != state.unavailable_bits

    def replace_machine(self, machine: NodeModel) -> None:
        """CPUs went on- or offline, or settings changed; memory policies stay."""
        self.machine = machine.with_memory_policies(self.machine.memory_policies)

    def record_narrower_pool(self) -> None:
        """Record that the shared pool may have been narrower until now."""
        self.narrowed_at = self._now()

    def set_memory(self, memory: MeasuredFree | None) -> None:
        """Record what is free by the kernel; None while it cannot be read."""
        self.memory = memory

    def set_soft_ids(self, soft_ids: frozenset[str]) -> None:
        """Record which reservations give way by now, in a state of another serial."""
        self.soft_ids = soft_ids
        self.state = replace(self.state, serial=self.state.serial + 1)

    def set_observe(self, observe: bool) -> None:
        """Only decide and report from now on, or write again."""
        self.observe = observe

    def set_synchronized(self) -> None:
        """Record that the runtime has said what runs."""
        self.synchronized = True

    def set_runtime(self, policies: MemoryPolicies, request_timeout: float) -> None:
        """Record what the runtime can set, and how long it waits; 0 seconds if it does not say."""
        self.machine = self.machine.with_memory_policies(policies)
        self.synchronize_budget_s = min(
            SYNCHRONIZE_BUDGET_S, request_timeout / 2 or SYNCHRONIZE_BUDGET_S
        )

    # --- listeners --------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self) -> None:
        """Call listeners: something that they show changed."""
        for listener in self._listeners:
            listener()
