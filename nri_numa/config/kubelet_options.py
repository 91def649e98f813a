"""Options of the kubelet's that do not go together here either.

Source: kubernetes ``pkg/kubelet/cm/cpumanager/policy_options.go``, whose checks end the start of
the kubelet.
"""

from __future__ import annotations

from collections.abc import Iterator

from nri_numa.config.sections import AgentConfig
from nri_numa.engine.values.settings import CPUOrder
from nri_numa.machine.model import Topology


def conflicts(config: AgentConfig) -> Iterator[str]:
    """Options that exclude each other, each ``path: what is wrong, what was expected``."""
    if config.align_by_socket:
        for path in _asking(config, "policy", "single-numa-node"):
            yield (
                f"alignBySocket: true takes CPUs from all NUMA nodes of a socket, and {path} is "
                "single-numa-node; expected only one of them, as the kubelet does"
            )
    if config.distribute_across_cores:
        yield from _across_cores(config)


def _across_cores(config: AgentConfig) -> Iterator[str]:
    key = "distributeAcrossCores"
    if config.cpu_order is not CPUOrder.KUBELET:
        yield (
            f"{key}: true is of the kubelet's order, expected cpuOrder: kubelet beside it; with "
            "cpuOrder: default, smt: spread takes one thread of each core"
        )
    for other, is_set in (
        ("distributeAcrossNUMA", config.distribute_across_numa),
        ("alignL3", config.align_l3),
    ):
        if is_set:
            yield f"{key}: true, expected {other}: false beside it, as the kubelet does"
    for path in _asking(config, "smt", "full-core"):
        yield f"{key}: true splits cores, and {path} is full-core; expected only one of them"


def _asking(config: AgentConfig, key: str, value: str) -> Iterator[str]:
    """Where defaults and rules give a key a value."""
    if config.defaults.get(key) == value:
        yield f"defaults.{key}"
    for number, rule in enumerate(config.rules):
        if rule.set.get(key) == value:
            yield f"rules[{number}].set.{key}"


def conflicts_on(config: AgentConfig, topology: Topology) -> Iterator[str]:
    """The same for options that do not suit the machine."""
    sockets, numa_nodes = len(topology.sockets), len(topology.cpu_nodes)
    if config.align_by_socket and sockets > numa_nodes:
        yield (
            f"alignBySocket: this machine has {sockets} sockets and {numa_nodes} NUMA nodes with "
            "CPUs, expected no more sockets than NUMA nodes"
        )
