"""Builds parts of the agent, in the order in which they need each other.

`nri_numa.agent.daemon` puts them together with what talks to the outside.
"""

from __future__ import annotations

from nri_numa.agent.agent import Agent, GrantSource
from nri_numa.agent.cgroup_updates import CgroupUpdates
from nri_numa.agent.containers import LiveContainers
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.drift_table import DriftTable
from nri_numa.agent.history import DecisionHistory
from nri_numa.agent.loop import Clock, DeferredTasks
from nri_numa.agent.starts import ContainerStarts
from nri_numa.machine.cgroups import CgroupWriter
from nri_numa.observe.metrics import Metrics


def build_agent(
    current: CurrentState,
    drift: DriftTable,
    writer: CgroupWriter,
    metrics: Metrics,
    clock: Clock,
    *,
    kubelet: GrantSource | None = None,
    moves_memory: bool = False,
    sees_starts: bool = True,
    max_decided_requests: int = 0,
) -> Agent:
    """The agent over a node's state, with the parts that only it and what stands above it use.

    ``drift`` and ``kubelet`` stand below it; the other arguments are those of its parts.
    """
    tasks = DeferredTasks(clock)
    containers = LiveContainers(moves_memory=moves_memory)
    cgroups = CgroupUpdates(current, containers, writer, tasks, metrics, clock)
    history = DecisionHistory(
        current, tasks, metrics, clock, max_decided_requests=max_decided_requests
    )
    starts = ContainerStarts(current, cgroups, history, tasks, metrics, sees_starts=sees_starts)
    return Agent(
        current,
        cgroups=cgroups,
        starts=starts,
        history=history,
        drift=drift,
        tasks=tasks,
        clock=clock,
        kubelet=kubelet,
    )
