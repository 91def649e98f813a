"""Reload of the configuration and the machine while the agent runs.

Reading a file may wait for a disk, the first YAML document imports its parser, and an error imports
the library that lists all of them: together up to a quarter of a second in which no container could
start. So a thread does all of that, including the tables that decisions need, and the loop only
applies the result. The machine is read again regularly, and after a rejection
(docs/adr/0032-read-again-what-changes.md).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec.structs import replace

from nri_numa import config as configuration
from nri_numa.agent.agent import Agent
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.handler import LinkObserver
from nri_numa.agent.links import RuntimeOwnership
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.errors import ConfigError, TopologyError
from nri_numa.machine.hotplug import changed_texts_by_field, rediscover_topology
from nri_numa.machine.sysfs import read_memory
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.observe import logs
from nri_numa.observe.notify import SystemdNotifier
from nri_numa.observe.reports import ReportOnce
from nri_numa.runtime import RuntimeInfo

if TYPE_CHECKING:
    from nri_numa.devices.counts import CountsOrReason

log = logs.get_logger("daemon")

_YIELD_INTERVAL_S: Final = 0.0005
"""Seconds after which the thread yields to the loop. A request needs a turn at each of its system
calls, and with Python's 5 ms these added up to twice the time."""


class ConfigInForce(Protocol):
    """The configuration, which a reload replaces."""

    @property
    def config(self) -> AgentConfig:
        """Configuration in force."""


ApplySettings = Callable[[], Awaitable[bool]]
"""Function that recomputes and applies settings; False: try again."""


class SettingsSource(Protocol):
    """Source of settings from a configuration and other inputs."""

    def settings_with_kubelet_config(self, config: AgentConfig, topology: Topology) -> Settings:
        """Return the settings; any thread may call this."""


class PreparedConfig(msgspec.Struct, frozen=True):
    """A configuration that can be applied.

    Attributes:
        config: the configuration to apply; keys that need a restart have their old values.
        live: paths that change at once.
        restart: paths that differ and need a restart.
        machine: the topology at that time with the new settings.
    """

    config: AgentConfig
    live: tuple[str, ...]
    restart: tuple[str, ...]
    machine: NodeModel


async def apply_when_unchanged(agent: Agent, change: Callable[[NodeModel], NodeModel]) -> bool:
    """Apply the node model that ``change`` makes in a thread.

    Returns False if the model changed for another reason meanwhile: try again.
    """
    model_before = agent.current.machine
    machine = await asyncio.to_thread(lambda: build_tables(change(model_before)))
    if machine is not model_before:
        if agent.current.machine is not model_before:
            return False
        agent.apply_node_model(machine)
    return True


async def apply_recomputed_settings(
    agent: Agent, in_force: ConfigInForce, source: SettingsSource
) -> bool:
    """Recompute and apply the settings; False: try again."""
    config = in_force.config

    def with_settings(machine: NodeModel) -> NodeModel:
        settings = source.settings_with_kubelet_config(config, machine.topology)
        return machine if settings == machine.settings else replace(machine, settings=settings)

    return await apply_when_unchanged(agent, with_settings)


def build_tables(machine: NodeModel) -> NodeModel:
    """Compute the machine's tables ahead, so no container waits for them."""
    _ = (
        machine.allocator_index,
        machine.cpu_capacity_milli,
        machine.memory_capacity,
        machine.shared_pool_milli_by_node,
    )
    return machine


class Reloader(LinkObserver):
    """Reloads the configuration's file, with the runtime's drop-in over it.

    Args:
        load: reads the configuration, given the text of the drop-in.

    Attributes:
        config: configuration in force.
    """

    def __init__(
        self,
        config: AgentConfig,
        load: Callable[[str], AgentConfig],
        agent: Agent,
        source: SettingsSource,
        ownership: RuntimeOwnership,
        notifier: SystemdNotifier,
    ) -> None:
        self.config = config
        self._load, self._agent, self._source = load, agent, source
        self._ownership, self._notifier = ownership, notifier
        self._metrics = agent.metrics
        self._drop_in, self._is_requested = "", False
        self._task: asyncio.Task[None] | None = None

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Apply the configuration in the runtime's Configure request; it overrides the file."""
        if not info.config or info.config == self._drop_in:
            return
        self._drop_in = info.config
        try:
            # At once, since it applies to the containers that the runtime reports next.
            prepared = self._prepare_config(self._agent.current.machine)
            self._apply_config(prepared, event="drop-in key not applied")
        except ConfigError as error:
            self._report_unusable(error, "drop-in configuration not applied")

    def request_reload(self) -> asyncio.Task[None]:
        """Reload the configuration, or repeat a running reload; returns its task."""
        self._is_requested = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reload_config(), name="reload")
        return self._task

    async def _reload_config(self) -> None:
        self._notifier.notify_reloading()
        while self._is_requested:
            self._is_requested = False
            machine, usual_interval = self._agent.current.machine, sys.getswitchinterval()
            sys.setswitchinterval(_YIELD_INTERVAL_S)
            try:
                prepared = await asyncio.to_thread(self._prepare_config, machine)
            except ConfigError as error:
                self._report_unusable(error, "configuration not reloaded")
            except Exception:
                self._metrics.record_config_reload(loaded_at=None)
                self._metrics.internal_errors.inc()
                log.exception("configuration not reloaded")
            else:
                # If the machine has changed since, capacity factors may have changed, too.
                if self._agent.current.machine is machine:
                    self._apply_config(prepared)
                else:
                    self._is_requested = True
            finally:
                sys.setswitchinterval(usual_interval)
        self._notifier.notify_ready("reloaded")

    def _prepare_config(self, machine: NodeModel) -> PreparedConfig:
        """Read the configuration and prepare it; changes nothing that others use.

        Raises:
            ConfigError: with all problems.
        """
        config = self._load(self._drop_in)
        if problems := configuration.validate_config(config, machine.topology):
            raise ConfigError("configuration", problems)
        live, restart = configuration.changed_paths(self.config, config)
        # A key that needs a restart has its old value, so the next reload names it again.
        config = configuration.merge_reloadable(self.config, config) if live else self.config
        settings = self._source.settings_with_kubelet_config(config, machine.topology)
        return PreparedConfig(
            config, live, restart, build_tables(replace(machine, settings=settings))
        )

    def _report_unusable(self, error: ConfigError, event: str) -> None:
        self._metrics.record_config_reload(loaded_at=None)
        for problem in error.problems:
            log.error(event, file=error.source, problem=problem)

    def _apply_config(self, prepared: PreparedConfig, event: str = "restart required") -> None:
        self._metrics.record_config_reload(loaded_at=self._agent.current.clock.time())
        for key in prepared.restart:
            log.warning(event, key=key)
        if prepared.live:
            self.config = prepared.config
            logs.set_level(prepared.config.log.level.value)
            self._ownership.update_observe(prepared.config.observe)
            self._agent.apply_node_model(prepared.machine)
        log.info("configuration reloaded", changed=", ".join(prepared.live))


# --- The machine ---

MIN_LINE_INTERVAL_S: Final = 3600.0
"""Seconds between two lines about memory and huge pages."""
FIELDS_LOGGED_HOURLY: Final = frozenset(("memory", "hugepages"))
"""Fields of `nri_numa.machine.hotplug.changed_texts_by_field` that a balloon always changes."""

UNREADABLE_EVENT: Final = "machine unreadable"


def report_polling(error: OSError, had_events: bool) -> None:
    """Report that CPU hotplug is detected by polling only."""
    if had_events:
        log.warning("CPU hotplug events lost", problem=str(error))
    else:
        log.info("CPU hotplug events unavailable", problem=str(error))


class MachineReloader:
    """Reads the machine again, in threads."""

    def __init__(
        self,
        root: str,
        current: CurrentState,
        device_counts: Callable[[], CountsOrReason | None],
    ) -> None:
        self._root, self._current, self._device_counts = root, current, device_counts
        self._logged_topology: Topology | None = None  # as last logged
        self._logged_at = -math.inf
        self._problems = ReportOnce(log)

    async def read_memory(self) -> None:
        """Read measured free memory."""
        current = self._current
        try:
            readings = await asyncio.to_thread(read_memory, self._root, current.machine.topology)
        except (TopologyError, OSError) as error:
            if current.memory is not None:
                log.warning("measured free memory unreadable", problem=str(error))
            current.set_memory(None)
            return
        devices: Counter[int] = Counter()
        if not isinstance(counts := self._device_counts(), str):
            for device_count in counts or ():
                devices[device_count.numa_node] += device_count.available
        current.set_memory(
            MeasuredFree(
                memory={i: n.available_bytes for i, n in readings.items()},
                hugepages={i: dict(n.free_hugepages) for i, n in readings.items()},
                devices=devices,
            )
        )

    async def read_machine(self, agent: Agent) -> None:
        """Read the topology again, and apply changes."""
        topology_before = self._current.machine.topology

        def with_topology(machine: NodeModel) -> NodeModel:
            topology = rediscover_topology(self._root, machine.topology)
            return machine if topology is machine.topology else replace(machine, topology=topology)

        try:
            is_in_force = await apply_when_unchanged(agent, with_topology)
        except (TopologyError, OSError) as error:
            self._problems.report(UNREADABLE_EVENT, "unreadable", problem=str(error))
            return
        self._problems.report(UNREADABLE_EVENT, "")
        if is_in_force:
            topology = self._current.machine.topology
            self._log_changes(self._logged_topology or topology_before, topology)

    def _log_changes(self, prior: Topology, topology: Topology) -> None:
        """Log changes since the last line; of memory at most one line an hour."""
        self._logged_topology = prior
        changes = changed_texts_by_field(prior, topology) if topology is not prior else {}
        time_s = self._current.clock.monotonic()
        if prior.online != topology.online:
            log.warning("CPUs changed", **{"offline_cpus": "", "online_cpus": "", **changes})
        elif changes.keys() - FIELDS_LOGGED_HOURLY:
            log.warning("machine changed", **changes)
        elif changes and time_s >= self._logged_at + MIN_LINE_INTERVAL_S:
            log.info("machine changed", **changes)
            self._logged_at = time_s
        else:
            return
        self._logged_topology = topology
