"""Finds what a well-formed configuration still gets wrong.

Every check adds to one list, so that an operator sees all mistakes of a file at once. With a
`Topology`, ids are also checked against the machine.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

from nri_numa.config import tenants
from nri_numa.config.controlling import controlling_problems
from nri_numa.config.device_sources import device_problems
from nri_numa.config.dra import dra_problems
from nri_numa.config.extended_resource import resource_problems
from nri_numa.config.scheduling import scheduling_problems
from nri_numa.config.sections import AgentConfig, LinkKind
from nri_numa.config.values import (
    is_loopback,
    page_size,
    parse_duration,
    parse_quantity,
    plugin_index,
    reserved_types,
    split_address,
)
from nri_numa.engine.values.settings import CPUOrder
from nri_numa.machine.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.machine.model import Topology, cpus_text

# --- Options of the kubelet's that do not go together here either ---------------------------------
# Source: kubernetes ``pkg/kubelet/cm/cpumanager/policy_options.go``, whose checks end the start of
# the kubelet.


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


_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SHORTEST_RESYNC = 1.0  # a cluster has many nodes; the default is minutes
_SHORTEST_ROUND = 1.0  # what containers do to their memory within less says nothing
_MAX_SOCKET_PATH = 107  # sun_path of unix(7) without its terminating zero


def problems(config: AgentConfig, topology: Topology | None = None) -> list[str]:
    """Every semantic mistake, each ``path: what is wrong, what was expected``."""
    found = [
        *_node_name(config),
        *_runtime(config),
        *_http(config),
        *_publish(config),
        *controlling_problems(config),
        *scheduling_problems(config.scheduler),
        *_rounds(config),
        *_measured(config),
        *_annotations(config),
        *_numbers(config),
        *_ids(config),
        *tenants.permission_problems(config.permissions),
        *tenants.limit_problems(config.quotas, config.shared_pool),
        *resource_problems(config.device_plugin),
        *device_problems(config.devices),
        *dra_problems(
            config.dra, config.kubelet_root, over_cri=config.runtime.link is LinkKind.CRI
        ),
        *conflicts(config),
    ]
    if topology is not None:
        found += _against_machine(config, topology)
    return found


def _runtime(config: AgentConfig) -> Iterator[str]:
    index = plugin_index(config)
    if not re.fullmatch(r"[0-9]{2}", index, re.ASCII):
        yield f"runtime.pluginIndex: {index[:20]!r}, expected two digits from 00 to 99"
    for key, path in (
        ("nriSocket", config.runtime.nri_socket),
        ("criSocket", config.runtime.cri_socket.removeprefix("unix://")),
    ):
        if len(path.encode()) > _MAX_SOCKET_PATH:
            yield (
                f"runtime.{key}: is longer than the {_MAX_SOCKET_PATH} bytes a unix socket's "
                "path may have"
            )
    if not config.runtime.cri_socket.removeprefix("unix://").startswith("/"):
        yield (
            f"runtime.criSocket: {config.runtime.cri_socket[:120]!r}, expected an absolute path, "
            "with or without unix:// in front"
        )


def _node_name(config: AgentConfig) -> Iterator[str]:
    name = config.node_name
    if name and (len(name) > 253 or not _DNS_SUBDOMAIN.fullmatch(name)):
        yield (
            f"nodeName: {name[:80]!r}, expected a node's name as Kubernetes has it: a DNS name in "
            "lower case such as worker-7.example.org"
        )


def _http(config: AgentConfig) -> Iterator[str]:
    http = config.http
    if len(http.socket.encode()) > _MAX_SOCKET_PATH or (http.socket and http.socket[0] != "/"):
        yield (
            f"http.socket: {http.socket[:120]!r}, expected an absolute path of at most "
            f"{_MAX_SOCKET_PATH} bytes"
        )
    if bool(http.tls_cert) != bool(http.tls_key):
        missing, given = ("tlsKey", "tlsCert") if http.tls_cert else ("tlsCert", "tlsKey")
        yield f"http.{missing}: is not set, but http.{given} is; TLS needs both"
    try:
        address = split_address(http.address)
    except ValueError as error:
        yield f"http.address: {error}"
        return
    if address is None or is_loopback(address[0]):
        return
    if http.token_file:
        if not (http.tls_cert or http.tls_key or http.allow_plaintext_token):
            yield (
                f"http.tokenFile: clients would send the token to {http.address} unencrypted; set "
                "http.tlsCert and http.tlsKey, or listen on 127.0.0.1, or set "
                "http.allowPlaintextToken: true where the network itself encrypts"
            )
    elif not http.allow_anonymous:
        yield (
            f"http.address: {http.address} can be reached from other machines; set "
            "http.tokenFile, or http.allowAnonymous: true, or listen on 127.0.0.1"
        )


def _publish(config: AgentConfig) -> Iterator[str]:
    publish = config.publish
    try:
        address = split_address(publish.address)
    except ValueError as error:
        yield f"publish.address: {error}"
    else:
        if address is not None and not is_loopback(address[0]):
            yield f"publish.address: {publish.address}, expected one on loopback, or off"
    try:
        if parse_duration(publish.resync) < _SHORTEST_RESYNC:
            yield f"publish.resync: {publish.resync}, expected 1s or more"
        validity = parse_duration(publish.node_resource_topology_validity)
        if validity and not 3 * parse_duration(publish.resync) <= validity <= 86400:
            yield (
                f"publish.nodeResourceTopologyValidity: {publish.node_resource_topology_validity}, "
                "expected 0, or three times publish.resync to 24h"
            )
    except ValueError as error:
        yield f"publish.resync: {error}"


def _rounds(config: AgentConfig) -> Iterator[str]:
    for name, rounds in (
        ("memoryLocality", config.memory_locality),
        ("cpuWaiting", config.cpu_waiting),
    ):
        try:
            if parse_duration(rounds.interval) < _SHORTEST_ROUND:
                yield f"{name}.interval: {rounds.interval}, expected 1s or more"
        except ValueError as error:
            yield f"{name}.interval: {error}"
        if math.isnan(rounds.budget):
            yield f"{name}.budget: {rounds.budget}, expected per cent above 0, at most 100"
        if rounds.metric and not rounds.enabled:
            yield f"{name}.metric: is true, but {name}.enabled is not; nothing is read"
        if rounds.enabled and config.http.address == "off" and not config.http.socket:
            yield (
                f"{name}.enabled: is true, but http.address is off and http.socket is empty; "
                "there is nobody to tell"
            )


def _measured(config: AgentConfig) -> Iterator[str]:
    measured = config.measured_capacity
    for key, value in (("interval", measured.interval), ("halfLife", measured.half_life)):
        try:
            if parse_duration(value) < _SHORTEST_ROUND:
                yield f"measuredCapacity.{key}: {value}, expected 1s or more"
        except ValueError as error:
            yield f"measuredCapacity.{key}: {error}"
    for key, number in (("step", measured.step), ("floor", measured.floor)):
        if math.isnan(number):
            yield f"measuredCapacity.{key}: {number}, expected a number from 0 to 1"


def _annotations(config: AgentConfig) -> Iterator[str]:
    prefix = config.annotation_prefix
    if len(prefix) > 253 or not _DNS_SUBDOMAIN.fullmatch(prefix):
        yield (
            f"annotationPrefix: {prefix[:80]!r}, expected a DNS name such as numa.kubernetes.io "
            "(lower case, no slash)"
        )
    yield from _values("defaults", config.defaults)
    for number, rule in enumerate(config.rules):
        if not rule.set:
            yield f"rules[{number}].set: is empty, expected at least one annotation key"
        yield from _values(f"rules[{number}].set", rule.set)


def _values(path: str, values: Mapping[str, str | int]) -> Iterator[str]:
    from nri_numa.engine.request.annotations import check_level

    for problem in check_level({key: str(value) for key, value in values.items()}):
        yield f"{path}.{problem}"


def _numbers(config: AgentConfig) -> Iterator[str]:
    if not math.isfinite(config.oversale):
        yield f"oversale: {config.oversale}, expected a number from 1 to 100"
    for numa_node, factor in config.capacity_factor.items():
        if math.isnan(factor):
            yield f"capacityFactor.{numa_node}: {factor}, expected a number from 0 to 1"
    for path, resource, quantity in _reserved(config):
        if resource != "memory":
            yield from _try(path, functools.partial(page_size, resource))
        yield from _try(path, functools.partial(parse_quantity, quantity))
    yield from _try("runtime.hungAfter", lambda: parse_duration(config.runtime.hung_after))
    yield from _try("runtime.criListing", lambda: _listing(config.runtime.cri_listing))
    yield from _try("keepExclusiveCPUs", lambda: parse_duration(config.keep_exclusive_cpus))
    yield from _try("reconcile.interval", lambda: parse_duration(config.reconcile.interval))
    yield from _try(
        "reconcile.repairWindow", lambda: parse_duration(config.reconcile.repair_window)
    )


def _reserved(config: AgentConfig) -> Iterator[tuple[str, str, str | int]]:
    """Path, type and quantity of everything that ``reservedMemory`` says."""
    for numa_node, value in config.reserved_memory.items():
        for resource, quantity in reserved_types(value).items():
            path = f"reservedMemory.{numa_node}"
            yield (f"{path}.{resource}" if isinstance(value, Mapping) else path), resource, quantity


def _ids(config: AgentConfig) -> Iterator[str]:
    yield from _try("reservedCPUs", lambda: CPUSet.parse(str(config.reserved_cpus)))
    yield from _try("memoryOnlyNodes", lambda: NUMASet.parse(str(config.memory_only_nodes)))
    yield from _try("memoryTiers", lambda: NUMASet.parse(str(config.memory_tiers)))
    for section, mapping in (
        ("capacityFactor", config.capacity_factor),
        ("reservedMemory", config.reserved_memory),
    ):
        for numa_node in mapping:
            if not 0 <= numa_node < NUMASet.LIMIT:
                yield f"{section}.{numa_node}: expected a NUMA node from 0 to {NUMASet.LIMIT - 1}"
    if config.strict_reserved and config.reserved_cpus == "":
        yield "strictReserved: is true, but reservedCPUs names no CPU to keep out"


def _listing(text: str | float) -> None:
    if parse_duration(text) < 0.1:
        raise ValueError(f"{text!r}, expected 100ms or more")


def _try(path: str, parse: Callable[[], object]) -> Iterator[str]:
    try:
        parse()
    except ListFormatError as error:
        yield f"{path}: {error}, expected a kernel list such as 0-3,8"
    except ValueError as error:
        yield f"{path}: {error}"


def _parsed(kind: type[CPUSet] | type[NUMASet], text: str) -> CPUSet | NUMASet | None:
    try:
        return kind.parse(text)
    except ListFormatError:
        return None  # said by `_ids`


def _against_machine(config: AgentConfig, topology: Topology) -> Iterator[str]:
    try:
        floor = tenants.limits(config.quotas, config.shared_pool).pool
    except ValueError:
        floor = None  # said by `tenants.limit_problems`
    if floor is not None and floor.of(len(topology.allowed)) >= len(topology.allowed):
        yield (
            f"sharedPool.cpus: {floor} is the whole machine, which has {len(topology.allowed)} "
            "CPUs; no CPU could be exclusive"
        )
    reserved = _parsed(CPUSet, str(config.reserved_cpus))
    if isinstance(reserved, CPUSet):
        absent = reserved - topology.present
        if absent:
            text = f"this machine has no {cpus_text(absent)}; it has {topology.present}"
            yield f"reservedCPUs: {text}"
        if reserved and topology.online <= reserved:
            yield f"reservedCPUs: {reserved} is the whole machine; nothing is left for containers"
    numa_ids = f"this machine has {topology.numa_ids}"
    for section, mapping in (
        ("capacityFactor", config.capacity_factor),
        ("reservedMemory", config.reserved_memory),
    ):
        for numa_node in mapping:
            if numa_node not in topology.numa_nodes:
                yield f"{section}.{numa_node}: there is no NUMA node {numa_node}; {numa_ids}"
    for path, resource, quantity in _reserved(config):
        numa_node = int(path.split(".")[1])
        known = topology.numa_nodes.get(numa_node)
        try:
            wanted = parse_quantity(quantity)
            size = 0 if resource == "memory" else page_size(resource)
        except ValueError:
            continue  # said by `_numbers`
        if known is None:
            continue
        has = known.hugepages.get(size, 0) if size else known.memory_bytes
        if wanted > has:
            kind = f" in {resource}" if size else ""
            yield f"{path}: {quantity} is more than the {has} bytes of NUMA node {numa_node}{kind}"
    yield from conflicts_on(config, topology)
    memory_only = _parsed(NUMASet, str(config.memory_only_nodes))
    for numa_node in memory_only or ():
        known = topology.numa_nodes.get(numa_node)
        if known is None:
            yield f"memoryOnlyNodes: there is no NUMA node {numa_node}; {numa_ids}"
        elif known.cpus:
            yield f"memoryOnlyNodes: NUMA node {numa_node} has {cpus_text(known.cpus)}"
    there = {n.tier for n in topology.numa_nodes.values() if n.tier is not None and not n.cpus}
    for tier in _parsed(NUMASet, str(config.memory_tiers)) or ():
        if tier not in there:
            told = ", ".join(map(str, sorted(there))) or "none"
            yield (
                f"memoryTiers: no NUMA node without CPUs is of memory tier {tier}; "
                f"the kernel tells {told}"
            )
