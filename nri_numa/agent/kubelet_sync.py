"""The kubelet on this node: grants of its static managers, and its configuration.

Grants are read before each decision, and every second. If the kubelet and the agent both write one
container's cpuset, this conflict is reported once, and stored for the page and the API. The
kubelet's configuration is watched, since settings are inherited from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from nri_numa.agent.agent import GrantSource
from nri_numa.agent.capacity import CapacityFactors
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.drift_table import DriftById
from nri_numa.agent.reload import ApplySettings, ConfigInForce
from nri_numa.config import AgentConfig
from nri_numa.engine.foreign_pins import parse_foreign_cpuset
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.kubelet.configuration import CONFIG_AUTO, DiscoveredConfig, read_kubelet_config
from nri_numa.kubelet.inherited_settings import (
    AdoptedSettings,
    KubeletPinningReporter,
    adopt_kubelet_settings,
)
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import KubeletGrants
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

if TYPE_CHECKING:
    from nri_numa.web.responses import KubeletConflict

log = get_logger("kubelet")


class KubeletSync(GrantSource):
    """Reads the kubelet's grants, and records conflicts with it.

    Attributes:
        conflicts: by container id; replaced as a whole, never changed.
        configuration: the kubelet's configuration.
        files: its state files.
    """

    def __init__(
        self,
        current: CurrentState,
        metrics: Metrics,
        files: KubeletStateFiles,
        configuration: KubeletConfigWatch,
    ) -> None:
        self._current, self._metrics, self.files = current, metrics, files
        self._watch = KubeletPinningReporter(metrics, files.directory)
        self._said: frozenset[str] = frozenset()
        self.configuration = configuration
        self.conflicts: Mapping[str, KubeletConflict] = MappingProxyType({})

    def check_conflicts(self, drift_by_id: DriftById) -> None:
        """Record conflicts for abandoned containers that the kubelet rewrites, and forget others.

        Called every second.
        """
        state = self._current.state
        for container_id, status in drift_by_id.items():
            allocation = state.allocations.get(container_id)
            if allocation is None or not status.repairs_abandoned:
                continue
            actual, desired = status.drift.actual.effective_cpus, status.drift.desired_cpus
            granted = state.kubelet.cpus_of(allocation.pod_uid, allocation.container, container_id)
            is_by_kubelet = actual and (actual == granted or actual in state.kubelet.shared)
            if is_by_kubelet and container_id not in self.conflicts:
                self._record_conflict(allocation, str(actual), str(desired), "kubelet", "cgroup")
        live = {i: c for i, c in self.conflicts.items() if i in state.allocations}
        if len(live) < len(self.conflicts):
            self._replace_conflicts(live)

    def refresh_kubelet_grants(self) -> KubeletGrants | None:
        """Return the kubelet's grants if they changed; costs two ``stat`` calls."""
        topology = self._current.machine.topology
        if not self.files.refresh_and_report_change(topology.possible, topology.numa_ids):
            return None
        prior, grants = self._current.state.kubelet, self.files.grants
        self._current.clock.call_soon(
            partial(self._report_grants, prior, grants, self.files.problems)
        )
        return grants if grants != prior else None

    def _report_grants(
        self, prior: KubeletGrants, grants: KubeletGrants, problems: tuple[str, ...]
    ) -> None:
        self._watch.report_policy_changes(
            {"cpu": grants.cpu_policy, "memory": grants.memory_policy}
        )
        self._metrics.kubelet_granted.set(len(grants.granted_cpus))
        self._metrics.kubelet_state_file_errors.set(len(problems))
        new_problems = frozenset(problems) - self._said
        self._said = frozenset(problems)
        for problem in sorted(new_problems):
            log.warning("kubelet state unreadable", problem=problem)
        if grants.granted_cpus != prior.granted_cpus:
            log.info(
                "kubelet grants changed",
                cpus=str(grants.granted_cpus),
                cpus_before=str(prior.granted_cpus),
                container_count=len(grants.cpus) + len(grants.pods),
            )
        owned = grants.granted_cpus & self._current.state.exclusive
        if owned and owned != prior.granted_cpus & self._current.state.exclusive:
            log.warning(
                "exclusive CPUs granted by kubelet",
                cpus=str(owned),
                remedy="let each side have its part of the CPUs: docs/kubelet.md",
            )

    def on_cpuset_rewritten(
        self, prior: Allocation, allocation: Allocation, requested: str, effective: str
    ) -> None:
        """Record a conflict if the kubelet sent this cpuset."""
        granted = self._current.state.kubelet.cpus_of(
            allocation.pod_uid, allocation.container, allocation.container_id
        )
        if not granted or not parse_foreign_cpuset(requested) <= granted:
            return  # the shared set, or not the kubelet's; logged as overridden
        if effective:
            self._record_conflict(allocation, requested, effective, "nri-numa", "UpdateContainer")
        elif prior.kind not in (ContainerKind.FOREIGN, ContainerKind.UNPINNED):
            self._record_conflict(allocation, requested, "", "kubelet", "UpdateContainer")

    def _record_conflict(
        self, allocation: Allocation, requested: str, actual: str, yields_to: str, source: str
    ) -> None:
        from nri_numa.web.responses import KubeletConflict

        prior = self.conflicts.get(allocation.container_id)
        if prior is not None and prior.yields_to == yields_to:
            self._store_conflict(
                replace(prior, count=prior.count + 1, requested_cpus=requested, actual_cpus=actual)
            )
            return
        self._store_conflict(
            KubeletConflict(
                container_id=allocation.container_id,
                namespace=allocation.namespace,
                pod=allocation.pod,
                pod_uid=allocation.pod_uid,
                container=allocation.container,
                requested_cpus=requested,
                actual_cpus=actual,
                yields_to=yields_to,
                detected_in=source,
                first_time=self._current.clock.time(),
                count=1,
            )
        )
        self._metrics.kubelet_cpuset_conflicts.labels(yields_to).inc()
        log.warning(
            "cpuset conflict with kubelet found",
            pod=f"{allocation.namespace}/{allocation.pod}",
            container=allocation.container,
            requested_cpus=requested,
            actual_cpus=actual or requested,
            yields_to=yields_to,
            detected_in=source,
            remedy="docs/kubelet.md",
        )

    def _store_conflict(self, conflict: KubeletConflict) -> None:
        self._replace_conflicts({**self.conflicts, conflict.container_id: conflict})

    def _replace_conflicts(self, conflicts: dict[str, KubeletConflict]) -> None:
        self.conflicts = MappingProxyType(conflicts)
        self._current.notify()


# --- Settings that follow from the kubelet's configuration ---

CONFIG_CHECK_INTERVAL_S: Final = 5.0
"""Seconds between two reads of the kubelet's command line and files."""


class KubeletConfigWatch:
    """The kubelet's configuration, and the settings inherited from it.

    Attributes:
        discovered: the kubelet's configuration when it was last read.
        adopted: settings inherited from it.
    """

    def __init__(
        self,
        kubelet_root: str,
        capacity: CapacityFactors | None = None,
        *,
        read: Callable[[str, str, str], DiscoveredConfig] = read_kubelet_config,
    ) -> None:
        self._root, self._read, self._capacity = kubelet_root, read, capacity
        self._said: frozenset[str] = frozenset()
        self.discovered = DiscoveredConfig()
        self.adopted = AdoptedSettings(settings=Settings())

    def read_config(self, config: AgentConfig) -> bool:
        """Read the kubelet's configuration; True if it changed.

        A kubelet that is being restarted, and a file that cannot be read, change nothing.
        """
        section, prior = config.kubelet, self.discovered
        discovered = self._read(section.config, section.config_dir, self._root)
        if prior.running and not discovered.running and section.config == CONFIG_AUTO:
            return False
        if discovered.facts is None and discovered.problems:
            discovered = replace(discovered, facts=prior.facts)
        self.discovered = discovered
        return discovered.signature != prior.signature

    def settings_with_kubelet_config(self, config: AgentConfig, topology: Topology) -> Settings:
        """Return the settings with the inherited ones; any thread may call this."""
        self.adopted = adopted = adopt_kubelet_settings(config, self.discovered.facts, topology)
        if self._capacity is None:
            return adopted.settings
        return self._capacity.apply_to_settings(adopted.settings, topology)

    def report_config(self) -> None:
        """Log inherited settings, differences and problems, each once."""
        adopted, file = self.adopted, self.discovered.path
        problems = (*adopted.differences, *self.discovered.problems)
        for sentence in dict.fromkeys(adopted.adopted):
            if sentence not in self._said:
                log.info("kubelet setting inherited", setting=sentence, file=file)
        for problem in dict.fromkeys(problems):
            if problem not in self._said:
                log.warning("kubelet configuration problem found", problem=problem, file=file)
        self._said = frozenset((*adopted.adopted, *problems))

    async def watch_config(self, in_force: ConfigInForce, apply_settings: ApplySettings) -> None:
        """Read it every few seconds and apply changes, until cancelled."""
        while True:
            await asyncio.sleep(CONFIG_CHECK_INTERVAL_S)
            await self.refresh_config(in_force.config, apply_settings)

    async def refresh_config(self, config: AgentConfig, apply_settings: ApplySettings) -> None:
        """Read it in a thread, and apply settings if it changed."""
        if await asyncio.to_thread(self.read_config, config):
            if not await apply_settings():
                self.discovered = DiscoveredConfig()  # tried again
            self.report_config()
