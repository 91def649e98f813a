"""What is read again while the agent runs: its configuration, and the machine.

Reading a file may wait for a disk, the first YAML document imports its parser, and a mistake
imports the library that lists all of them: together up to a quarter of a second in which no
container could start. So all of that happens in a thread, down to the tables that decisions need;
what is left for the loop is to put the result in. The machine is read again regularly, and when
something did not fit (docs/adr/0032-read-again-what-changes.md).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec.structs import replace

from nri_numa import config as configuration
from nri_numa.agent.agent import Agent
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import Clock
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.errors import ConfigError, TopologyError
from nri_numa.machine.hotplug import changed_texts_by_field, rediscover_topology
from nri_numa.machine.sysfs import read_memory
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.observe.logs import get_logger

if TYPE_CHECKING:
    from nri_numa.devices.counts import CountsOrReason

_YIELD_INTERVAL_S: Final = 0.0005
"""Seconds after which the thread lets the loop go on. A request asks for its turn at each of its
system calls, and with Python's 5 ms these added up to twice as long a wait."""


class ConfigInForce(Protocol):
    """The agent and its configuration, which a reload replaces."""

    config: AgentConfig
    agent: Agent


class SettingsSource(Protocol):
    """Makes settings of a configuration and of what else they follow from."""

    def settings_with_kubelet_config(self, config: AgentConfig, topology: Topology) -> Settings:
        """The settings; any thread may ask."""


class PreparedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that can be put in force.

    Attributes:
        config: what is in force then; keys that need a restart have the values of before.
        live: paths that change at once.
        restart: paths that differ and need a restart.
        machine: the topology of then with the new settings.
    """

    config: AgentConfig
    live: tuple[str, ...]
    restart: tuple[str, ...]
    machine: NodeModel


def prepare_config(
    load: Callable[[], AgentConfig],
    base: AgentConfig,
    machine: NodeModel,
    source: SettingsSource,
) -> PreparedConfig:
    """Read a configuration and make everything ready; touches nothing that others use.

    Raises:
        ConfigError: with every mistake.
    """
    new = load()
    problems = configuration.validate_config(new, machine.topology)
    if problems:
        raise ConfigError("configuration", problems)
    live, restart = configuration.changed_paths(base, new)
    # What waits for a restart keeps its old value, so that the next reload names it again.
    config = configuration.merge_reloadable(base, new) if live else base
    return PreparedConfig(
        config=config,
        live=live,
        restart=restart,
        machine=build_tables(
            replace(machine, settings=source.settings_with_kubelet_config(config, machine.topology))
        ),
    )


async def prepare_in_thread(
    load: Callable[[], AgentConfig],
    base: AgentConfig,
    machine: NodeModel,
    source: SettingsSource,
) -> PreparedConfig:
    """`prepare_config` in a thread that gives way to the loop."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_YIELD_INTERVAL_S)
    try:
        return await asyncio.to_thread(prepare_config, load, base, machine, source)
    finally:
        sys.setswitchinterval(usual)


async def apply_recomputed_settings(daemon: ConfigInForce, source: SettingsSource) -> bool:
    """Have the agent decide by settings that are made anew; False: try again.

    They are made in a thread, during which the machine may have changed for another reason.
    """
    agent, before = daemon.agent, daemon.agent.current.machine
    made = await asyncio.to_thread(
        source.settings_with_kubelet_config, daemon.config, before.topology
    )
    if made != before.settings:
        machine = await asyncio.to_thread(build_tables, replace(before, settings=made))
        if agent.current.machine is not before:
            return False
        agent.apply_node_model(machine)
    return True


def build_tables(machine: NodeModel) -> NodeModel:
    """The machine with its tables made, so that no container waits for those that all need."""
    _ = (
        machine.allocator_index,
        machine.cpu_capacity_milli,
        machine.memory_capacity,
        machine.shared_pool_milli_by_node,
    )
    return machine


# --- The machine ---

log = get_logger("daemon")

MIN_LINE_INTERVAL_S: Final = 3600.0
"""Seconds between two lines about memory and huge pages."""
FIELDS_LOGGED_HOURLY: Final = frozenset(("memory", "hugepages"))
"""Of what `nri_numa.machine.hotplug.changed_texts_by_field` finds; a balloon moves them always."""


def report_polling(error: OSError, were_there: bool) -> None:
    """Say that CPUs which come and go are found by polling alone."""
    if were_there:
        log.warning("no kernel events about CPUs any more: polling only", error=str(error))
    else:
        log.info("no kernel events about CPUs: polling only", error=str(error))


class MachineReloader:
    """Reads again what changes on the machine, in threads."""

    def __init__(
        self,
        root: str,
        current: CurrentState,
        device_counts: Callable[[], CountsOrReason | None],
        clock: Clock,
    ) -> None:
        self._root, self._current = root, current
        self._device_counts, self._clock = device_counts, clock
        self._logged_topology: Topology | None = None  # as the log has it
        self._logged_at = -math.inf
        self._is_readable = True

    async def read_memory(self) -> None:
        """Read what is left of memory."""
        current = self._current
        try:
            reading = await asyncio.to_thread(read_memory, self._root, current.machine.topology)
        except (TopologyError, OSError) as error:
            if current.memory is not None:
                log.warning("memory cannot be read any more", error=str(error))
            current.set_memory(None)
            return
        devices: Counter[int] = Counter()
        if not isinstance(counted := self._device_counts(), str):
            for one in counted or ():
                devices[one.numa_node] += one.available
        current.set_memory(
            MeasuredFree(
                memory={i: n.available_bytes for i, n in reading.numa_nodes.items()},
                hugepages={i: dict(n.free_hugepages) for i, n in reading.numa_nodes.items()},
                devices=devices,
            )
        )

    async def read_machine(self, agent: Agent) -> None:
        """Read what else may have changed, and let the agent have it."""
        before = agent.current.machine
        known = before.topology
        try:
            topology = await asyncio.to_thread(rediscover_topology, self._root, known)
        except (TopologyError, OSError) as error:
            if self._is_readable:
                log.warning("machine cannot be read any more", error=str(error))
            self._is_readable = False
            return
        self._is_readable = True
        if topology is not known:
            machine = await asyncio.to_thread(build_tables, replace(before, topology=topology))
            if agent.current.machine is not before:
                return
            agent.apply_node_model(machine)
        self._log_changes(self._logged_topology or known, topology)

    def _log_changes(self, before: Topology, now: Topology) -> None:
        """Say what changed since the last line, of memory no more than a line an hour."""
        self._logged_topology = before
        found = changed_texts_by_field(before, now) if now is not before else {}
        at = self._clock.monotonic()
        if before.online != now.online:
            log.warning("CPUs changed", **{"gone": "", "new": "", **found})
        elif found.keys() - FIELDS_LOGGED_HOURLY:
            log.warning("machine changed", **found)
        elif found and at >= self._logged_at + MIN_LINE_INTERVAL_S:
            log.info("machine changed", **found)
            self._logged_at = at
        else:
            return
        self._logged_topology = now
