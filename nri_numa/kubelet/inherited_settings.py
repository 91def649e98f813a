"""Settings that the agent inherits from the kubelet's configuration, and their differences.

``reservedSystemCPUs``, ``systemReserved`` and ``kubeReserved`` reserve resources that are not for
containers. The agent inherits them where its own configuration sets nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from nri_numa.config import AgentConfig, derive_kubelet_rules, derive_settings
from nri_numa.engine.cpus.index import build_allocator_index
from nri_numa.engine.cpus.orders import take_packed
from nri_numa.kubelet.configuration import KubeletFacts
from nri_numa.kubelet.state_files import STATE_FILE_NAMES, STATIC_POLICIES
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology, cpus_text, numa_text
from nri_numa.model.settings import Settings
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.text import hugepages_resource_name

# --- Report of the kubelet's own pinning ----------------------------------------------------------
# With ``cpuManagerPolicy: static`` the kubelet sends a cpuset for every container, at its creation
# and whenever its assignment changes; it never reads a cgroup. Its exclusive grants are read from
# its state files (`nri_numa.kubelet.state_files`); here its pinning is reported, once per change.


log = get_logger("kubelet")


class KubeletPinningReporter:
    """Reporter of the kubelet with this root directory: it starts or stops to pin containers."""

    def __init__(self, metrics: Metrics, directory: str) -> None:
        self._metrics = metrics
        self._directory = directory
        self._static: dict[str, bool] = {}
        for manager in STATE_FILE_NAMES:  # dashboards expect each series from the start
            metrics.kubelet_static_policy.labels(manager).set(False)

    def report_policy_changes(self, policies: Mapping[str, str]) -> None:
        """Compare with the last policies, set the gauge, and log changes."""
        for manager, static in STATIC_POLICIES.items():
            pins = policies.get(manager) == static
            self._metrics.kubelet_static_policy.labels(manager).set(pins)
            if pins == self._static.get(manager, False):
                continue
            self._static[manager] = pins
            if pins:
                log.warning(
                    "kubelet static policy detected",
                    manager=manager,
                    manager_policy=static,
                    file=os.path.join(self._directory, STATE_FILE_NAMES[manager]),
                    remedy=f"for full control set {manager}ManagerPolicy: "
                    f"{'none' if manager == 'cpu' else 'None'}, delete that file, and restart the "
                    "kubelet",
                )
            else:
                log.info("kubelet static policy ended", manager=manager)


class AdoptedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with those inherited from the kubelet's configuration.

    Attributes:
        settings: in force.
        adopted: inherited settings, as sentences.
        differences: between both configurations, as sentences.
    """

    settings: Settings
    adopted: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def adopt_kubelet_settings(
    config: AgentConfig, facts: KubeletFacts | None, topology: Topology
) -> AdoptedSettings:
    """Derive settings, inherited from the kubelet's configuration where ``config`` has none.

    None is inherited without ``facts``.
    """
    settings = derive_settings(config)
    if facts is None:
        return AdoptedSettings(settings=settings)
    inherited: list[str] = []
    differences: list[str] = list(_double_pinning_problems(config, facts))
    reserved_cpus, source = _kubelet_reserved_cpus(facts, topology)
    missing = reserved_cpus - topology.possible
    if missing:
        differences.append(
            f"{source} names {cpus_text(missing)}, which this machine does not have; ignored"
        )
        reserved_cpus = reserved_cpus & topology.possible
    if reserved_cpus and not str(config.reserved_cpus):
        inherited.append(f"reservedCPUs {reserved_cpus} (the kubelet's {source})")
        settings = replace(settings, reserved_cpus=reserved_cpus)
        # Values that Go's strconv.ParseBool accepts.
        strict = facts.cpu_options.get("strict-cpu-reservation", "").lower() in ("true", "t", "1")
        if strict and not config.strict_cpu_reservation and topology.allowed - reserved_cpus:
            inherited.append("strictCPUReservation true (the kubelet's strict-cpu-reservation)")
            settings = replace(settings, strict_cpu_reservation=True)
    elif reserved_cpus and reserved_cpus != settings.reserved_cpus:
        differences.append(
            f"reservedCPUs is {settings.reserved_cpus}, and the kubelet's {source} reserves "
            f"{reserved_cpus}; expected the same, or a reason in docs/kubelet.md"
        )
    if facts.cpu_policy == "static":
        settings = replace(settings, kubelet_reserved=reserved_cpus)
    by_node = {i: dict(t) for i, t in facts.reserved_memory.items() if i in topology.numa_nodes}
    missing_ids = facts.reserved_memory.keys() - topology.numa_nodes.keys()
    if missing_ids:
        differences.append(
            f"reservedMemory names {numa_text(','.join(map(str, sorted(missing_ids))))}, which "
            f"this machine does not have; ignored"
        )
    source = "reservedMemory"
    if not by_node and facts.reserved_bytes:
        source = "systemReserved and kubeReserved, by the NUMA nodes' size"
        total = sum(n.memory_bytes for n in topology.numa_nodes.values()) or 1
        by_node = {
            i: {0: facts.reserved_bytes * n.memory_bytes // total}
            for i, n in topology.numa_nodes.items()
        }
    memory = {i: t[0] for i, t in sorted(by_node.items()) if t.get(0)}
    pages = {i: {s: b for s, b in t.items() if s and b} for i, t in sorted(by_node.items())}
    pages = {i: table for i, table in pages.items() if table}
    if (memory or pages) and not config.reserved_memory:
        amounts = ", ".join(f"{i}: {amount} bytes" for i, amount in memory.items())
        inherited.append(f"reservedMemory {amounts or 'of huge pages'} (the kubelet's {source})")
        settings = replace(settings, reserved_memory=memory, reserved_hugepages=pages)
    elif memory and memory != dict(settings.reserved_memory):
        reserved_bytes = sum(settings.reserved_memory.values())
        differences.append(
            f"reservedMemory is {reserved_bytes} bytes in all, and the kubelet reserves "
            f"{sum(memory.values())} ({source}); expected the same on each NUMA node"
        )
    return AdoptedSettings(
        settings=settings, adopted=tuple(inherited), differences=tuple(differences)
    )


def with_inherited_settings(config: AgentConfig, settings: Settings) -> AgentConfig:
    """Return a configuration that results in the same settings without the kubelet's."""
    memory, pages = settings.reserved_memory, settings.reserved_hugepages
    reserved: dict[int, str | int | dict[str, str | int]] = {}
    for i in sorted(memory.keys() | pages.keys()):
        sizes = {hugepages_resource_name(size): n for size, n in pages.get(i, {}).items()}
        reserved[i] = {"memory": memory.get(i, 0), **sizes}
    return replace(
        config,
        reserved_cpus=str(config.reserved_cpus) or str(settings.reserved_cpus),
        strict_cpu_reservation=settings.strict_cpu_reservation,
        reserved_memory=config.reserved_memory or reserved,
    )


def _kubelet_reserved_cpus(facts: KubeletFacts, topology: Topology) -> tuple[CPUSet, str]:
    """Return the CPUs that the kubelet reserves, and the keys that reserve them.

    Without a list the kubelet takes the reserved number of CPUs, packed, out of the whole machine.
    """
    if facts.reserved_cpus is not None:
        return facts.reserved_cpus, "reservedSystemCPUs"
    count = -(-facts.reserved_milli // 1000)
    source = "systemReserved and kubeReserved"
    if not count:
        return CPUSet(), source
    online = topology.online.bits
    if count >= online.bit_count():
        return topology.online, source
    packed = take_packed(build_allocator_index(topology), online, count)
    return CPUSet.from_bits(packed), source


def _double_pinning_problems(config: AgentConfig, facts: KubeletFacts) -> list[str]:
    """List managers of the kubelet that do the same as the agent, as sentences."""
    problems: list[str] = []
    rules = derive_kubelet_rules(config)
    if facts.cpu_policy == "static" and rules.static_cpus:
        problems.append(
            "kubeletCompatibility has staticCPUs beside the kubelet's cpuManagerPolicy static: "
            "both give exclusive CPUs to Guaranteed pods; expected one of them"
        )
    if facts.memory_policy == "Static" and rules.memory:
        problems.append(
            "kubeletCompatibility has memory beside the kubelet's memoryManagerPolicy Static: both "
            "place the memory of Guaranteed pods; expected one of them"
        )
    if facts.topology_policy in ("restricted", "single-numa-node"):
        problems.append(
            f"the kubelet's topologyManagerPolicy is {facts.topology_policy}: it rejects pods at "
            f"their admission, before nri-numa and whatever their annotations say"
        )
    return problems
