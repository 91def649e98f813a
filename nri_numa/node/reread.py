"""What changes on a running machine is read again: regularly, and when something did not fit.

docs/adr/0032-read-again-what-changes.md tells what, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nri_numa.engine.decision import Machine, Reading
from nri_numa.errors import TopologyError
from nri_numa.machine.hotplug import differences, reread
from nri_numa.machine.model import MemoryReading, Topology
from nri_numa.machine.sysfs import read_memory
from nri_numa.node.agent import Agent
from nri_numa.node.reload import with_tables
from nri_numa.observe.logs import get_logger

if TYPE_CHECKING:
    from nri_numa.devices.counts import Counted

log = get_logger("daemon")

LOOK_AGAIN = 1.0
"""Seconds between two looks that refusals ask for."""


async def changed(root: str, before: Machine) -> Machine | None:
    """Read the machine again; None when it is as before, or cannot be read.

    Reading is done in a thread, and so are the tables that every decision needs: the next
    container must not wait for them.
    """
    try:
        topology = await asyncio.to_thread(reread, root, before.topology)
    except (TopologyError, OSError) as error:
        log.warning("machine cannot be read any more", error=str(error))
        return None
    if topology is before.topology:
        return None
    return await asyncio.to_thread(with_tables, replace(before, topology=topology))


def tell(before: Topology, now: Topology) -> None:
    """Log what is different."""
    found = differences(before, now)
    if before.online != now.online:
        log.warning("CPUs changed", **{"gone": "", "new": "", **found})
    else:
        log.warning("machine changed", **found)


async def look_after_refusals(agent: Agent, look: Callable[[], Awaitable[None]]) -> None:
    """Look again when something did not fit, for as long as the plugin runs.

    The one that was refused is not helped: reading takes longer than a request may wait for.
    The kubelet tries again, and then what was freed or added in the meantime counts.
    """
    refused = asyncio.Event()
    known = agent.refused

    def listener() -> None:
        nonlocal known
        if agent.refused != known:
            known = agent.refused
            refused.set()

    end = agent.subscribe(listener)
    try:
        while True:
            await refused.wait()
            refused.clear()
            await look()
            await asyncio.sleep(LOOK_AGAIN)
    finally:
        end()


def no_kernel_events(error: OSError, were_there: bool) -> None:
    """Say that CPUs which come and go are found by polling alone."""
    if were_there:
        log.warning("no kernel events about CPUs any more: polling only", error=str(error))
    else:
        log.info("no kernel events about CPUs: polling only", error=str(error))


class Rereading:
    """Reads again what changes on the machine, in threads.

    Args:
        root: holds ``sys/``.
        counted: how many devices the kubelet can give, from memory; None where nobody counts.

    Attributes:
        memory: what the kernel had left when last read; None while it cannot be read.
    """

    def __init__(self, root: str, counted: Callable[[], Counted | None] = lambda: None) -> None:
        self.memory: Reading | None = None
        self._root, self._counted = root, counted

    async def read_memory(self, agent: Agent) -> None:
        """Read what is left of memory."""
        try:
            reading = await asyncio.to_thread(read_memory, self._root, agent.machine.topology)
        except (TopologyError, OSError) as error:
            if self.memory is not None:
                log.warning("memory cannot be read any more", error=str(error))
            self.memory = None
            return
        self.memory = as_reading(reading, self._counted())

    async def look(self, agent: Agent) -> None:
        """Read what else may have changed, and let the agent have it."""
        before = agent.machine
        machine = await changed(self._root, before)
        if machine is not None and agent.machine is before:
            tell(before.topology, machine.topology)
            agent.retopology(machine)

    async def look_at_all(self, agent: Agent) -> None:
        """Both."""
        await self.read_memory(agent)
        await self.look(agent)


def as_reading(memory: MemoryReading, counted: Counted | None = None) -> Reading:
    """Reduce what sysfs and the kubelet say to what decisions use."""
    devices: dict[int, int] = {}
    for one in () if counted is None or isinstance(counted, str) else counted:
        devices[one.numa_node] = devices.get(one.numa_node, 0) + one.available
    return Reading(
        memory={i: n.available_bytes for i, n in memory.numa_nodes.items()},
        hugepages={i: dict(n.free_hugepages) for i, n in memory.numa_nodes.items()},
        devices=devices,
    )
