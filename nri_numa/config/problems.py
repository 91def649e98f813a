"""Semantic checks of a well-formed configuration.

All problems of a file are collected. Rules for one value are declared with the key
(`nri_numa.config.sections`). The rules here concern several keys, items of lists and mappings, and
with a `Topology` the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from nri_numa.config.derived import (
    annotation_values_as_text,
    derive_kubelet_rules,
    driver_sockets,
    is_aligned_to_l3,
    reserved_memory_by_type,
)
from nri_numa.config.sections import (
    AgentConfig,
    PodMatch,
    RuntimeLinkKind,
    UsageReadMode,
    config_keys,
)
from nri_numa.config.values import (
    DAY_S,
    MAX_SOCKET_PATH_BYTES,
    is_loopback,
    page_bytes_of_type,
    parse_cpu_count_or_percent,
    parse_cpus,
    parse_duration,
    parse_memory_bytes,
    parse_numa_nodes,
    parse_pool_floor,
    split_address,
)
from nri_numa.engine.request import options
from nri_numa.engine.request.annotations import check_option_level, check_value
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology, cpus_text
from nri_numa.model.settings import ANY_ANNOTATION_KEY
from nri_numa.text import whole_pages_text

_T = TypeVar("_T")
_R = TypeVar("_R")


def validate_config(config: AgentConfig, topology: Topology | None = None) -> list[str]:
    """Return every semantic problem as ``path: problem, expectation``."""
    problems = [
        *_check_single_values(config),
        *_check_servers(config),
        *_check_topology_validity_period(config),
        *_check_prometheus_query(config),
        *_check_measurement_results_reachable(config),
        *_check_dra(config),
        *_check_annotation_values(config),
        *_check_annotation_permissions(config),
        *_check_namespace_quotas(config),
        *_check_reserved_resource_syntax(config),
        *_check_kubelet_forbidden_combinations(config),
    ]
    return (
        problems if topology is None else problems + list(_check_against_machine(config, topology))
    )


def _check_single_values(config: AgentConfig) -> Iterator[str]:
    for leaf in config_keys().values():
        if leaf.check is not None:
            yield from _check_value(leaf.path, leaf.check, leaf.value_in(config))


def _check_value(path: str, check: Callable[[_T], object], value: _T) -> Iterator[str]:
    try:
        check(value)
    except ValueError as error:
        yield f"{path}: {error}"


# --- Access to servers ----------------------------------------------------------------------------


def _check_servers(config: AgentConfig) -> Iterator[str]:
    http, controller, scheduler = config.http, config.controller, config.scheduler
    for name, server in (("http", http), ("controller", controller), ("scheduler", scheduler)):
        if bool(server.tls_cert) != bool(server.tls_key):
            missing, set_key = ("tlsKey", "tlsCert") if server.tls_cert else ("tlsCert", "tlsKey")
            yield f"{name}.{missing}: is not set, but {name}.{set_key} is; TLS needs both"
    if scheduler.client_ca and not scheduler.tls_cert:
        yield "scheduler.clientCA: needs scheduler.tlsCert and scheduler.tlsKey"
    page = controller.page
    if page.enabled and page.token_file and page.token_file == controller.token_file:
        yield (
            f"controller.page.tokenFile: {page.token_file[:120]!r} is controller.tokenFile too, "
            "expected another token: read access and PUT are separate rights"
        )
    yield from _check_exposed_servers(config)


def _check_exposed_servers(config: AgentConfig) -> Iterator[str]:
    """Require TLS and a token for servers that other machines reach, or an explicit opt-out."""
    http, controller, scheduler = config.http, config.controller, config.scheduler
    if _is_exposed(http.address):
        if http.token_file:
            if not (http.tls_cert or http.tls_key or http.allow_plaintext_token):
                yield _plaintext_token_text("http", "tokenFile", http.address)
        elif not http.allow_anonymous:
            yield _exposed_server_text("http", http.address, "tokenFile")
    if _is_exposed(config.publish.address):
        yield f"publish.address: {config.publish.address}, expected one on loopback, or off"
    page = controller.page
    if _is_exposed(controller.address):
        if page.enabled and not (page.token_file or page.allow_anonymous):
            yield (
                f"controller.page.tokenFile: is not set, but {controller.address} is reached from "
                "other machines; expected a file with a token, or controller.page.allowAnonymous: "
                "true"
            )
        tokens = controller.token_file or (page.enabled and page.token_file)
        if tokens and not (controller.tls_cert or controller.allow_plaintext_token):
            key = "tokenFile" if controller.token_file else "page.tokenFile"
            yield _plaintext_token_text("controller", key, controller.address)
    elif controller.verdicts.enabled:
        yield (
            f"controller.verdicts.enabled: is on, but the API server cannot reach "
            f"{controller.address}; expected a controller.address such as 0.0.0.0:9893"
        )
    if scheduler.address == "off":
        yield "scheduler.address: 'off', expected host:port, where kube-scheduler can reach it"
    if _is_exposed(scheduler.address) and not (scheduler.client_ca or scheduler.allow_anonymous):
        yield _exposed_server_text("scheduler", scheduler.address, "clientCA")


def _is_exposed(address: str) -> bool:
    """True if other machines can reach the address."""
    host_port = _parse_or_none(split_address, address)
    return host_port is not None and not is_loopback(host_port[0])


def _plaintext_token_text(section: str, key: str, address: str) -> str:
    return (
        f"{section}.{key}: clients would send the token to {address} unencrypted; set "
        f"{section}.tlsCert and {section}.tlsKey, or listen on 127.0.0.1, or set "
        f"{section}.allowPlaintextToken: true where the network itself encrypts"
    )


def _exposed_server_text(section: str, address: str, key: str) -> str:
    return (
        f"{section}.address: {address} can be reached from other machines; set {section}.{key}, or "
        f"{section}.allowAnonymous: true, or listen on 127.0.0.1"
    )


# --- Keys that depend on each other -------------------------------------------------------------


def _check_topology_validity_period(config: AgentConfig) -> Iterator[str]:
    text = config.publish.node_resource_topology_validity
    validity = _parse_or_none(parse_duration, text)
    interval_s = _parse_or_none(parse_duration, config.publish.resync_interval)
    if validity and interval_s is not None and not 3 * interval_s <= validity <= DAY_S:
        yield (
            f"publish.nodeResourceTopologyValidity: {text}, expected 0, or three times "
            "publish.resyncInterval to 24h"
        )


def _check_prometheus_query(config: AgentConfig) -> Iterator[str]:
    query = config.controller.prometheus
    if bool(query.url) != bool(query.query):
        missing, set_key = ("query", "url") if query.url else ("url", "query")
        yield f"controller.prometheus.{missing}: is empty, but {set_key} is set; it takes both"


def _check_measurement_results_reachable(config: AgentConfig) -> Iterator[str]:
    """Reject container measurements whose results no client could read."""
    usage = config.container_usage
    for name, mode in (("memory", usage.memory), ("cpuPressure", usage.cpu_pressure)):
        is_read = mode is not UsageReadMode.OFF
        if is_read and config.http.address == "off" and not config.http.socket:
            yield (
                f"containerUsage.{name}: is {mode}, but http.address is off and http.socket is "
                "empty; no client could read it"
            )


def _check_dra(config: AgentConfig) -> Iterator[str]:
    if not config.dra.enabled:
        return
    if config.runtime.link is RuntimeLinkKind.CRI:
        yield (
            "dra.enabled: is on, and runtime.link is cri, which does not show a container's "
            "claims; expected link nri"
        )
    if not config.devices.cdi_spec_dirs:
        yield "devices.cdiSpecDirs: is empty, expected the directory that dra writes CDI specs into"
    driver = config.dra.driver
    path_bytes = max(len(path.encode()) for path in driver_sockets(config.kubelet_root, driver))
    if path_bytes > MAX_SOCKET_PATH_BYTES:
        yield (
            f"dra.driver: {driver[:120]!r} makes a socket's path of {path_bytes} bytes below "
            f"kubeletRoot, expected at most {MAX_SOCKET_PATH_BYTES}"
        )


# --- Annotations: defaults, rules, permissions, quotas ------------------------------------------


def _check_annotation_values(config: AgentConfig) -> Iterator[str]:
    for number, rule in enumerate(config.rules):
        if not rule.keys:
            yield f"rules[{number}].set: is empty, expected at least one annotation key"
    for path, values in _annotation_levels(config):
        for problem in check_option_level(annotation_values_as_text(values)):
            yield f"{path}.{problem}"


def _annotation_levels(config: AgentConfig) -> Iterator[tuple[str, Mapping[str, str | int]]]:
    yield "defaults", config.defaults
    for number, rule in enumerate(config.rules):
        yield f"rules[{number}].set", rule.keys


def _check_annotation_permissions(config: AgentConfig) -> Iterator[str]:
    last_number = len(config.permissions) - 1
    for number, permission in enumerate(config.permissions):
        path = f"permissions[{number}]"
        for key in permission.allowed_keys:
            if key != ANY_ANNOTATION_KEY and key not in options.TABLE.by_key:
                yield f"{path}.allowedKeys: {check_value(key, '')}"
        for key, values in permission.allowed_values.items():
            values_path = f"{path}.allowedValues"
            if key not in options.TABLE.by_key:
                yield f"{values_path}: {check_value(key, '')}"
                continue
            if not {key, ANY_ANNOTATION_KEY} & set(permission.allowed_keys):
                yield f"{values_path}.{key}: has values, but {path}.allowedKeys does not allow it"
            if not values:
                yield f"{values_path}.{key}: is empty, expected at least one value"
            for value in values:
                if problem := check_value(key, str(value)):
                    yield f"{values_path}.{key}: {problem}"
        if number < last_number and permission.match == PodMatch():
            yield f"{path}.match: matches every pod, so that the entries after it never count"


def _check_namespace_quotas(config: AgentConfig) -> Iterator[str]:
    for number, quota in enumerate(config.quotas.namespaces):
        path = f"quotas.namespaces[{number}]"
        if not quota.namespaces:
            yield f"{path}.namespaces: is empty, expected at least one namespace"
        yield from _check_value(
            f"{path}.exclusiveCPUs", parse_cpu_count_or_percent, quota.exclusive_cpus
        )
        yield from _check_value(f"{path}.listedCPUs", parse_cpu_count_or_percent, quota.listed_cpus)


# --- Reserved resources ---------------------------------------------------------------------------


def _check_reserved_resource_syntax(config: AgentConfig) -> Iterator[str]:
    for section, mapping in _sections_by_numa_node(config).items():
        for numa_node in mapping:
            if not 0 <= numa_node < NUMASet.LIMIT:
                yield f"{section}.{numa_node}: expected a NUMA node from 0 to {NUMASet.LIMIT - 1}"
    for path, _, resource, quantity in _reserved_memory_entries(config):
        if resource != "memory":
            yield from _check_value(path, page_bytes_of_type, resource)
        yield from _check_value(path, parse_memory_bytes, quantity)
        size = _parse_or_none(page_bytes_of_type, resource)
        if size and (_parse_or_none(parse_memory_bytes, quantity) or 0) % size:
            yield f"{path}: {quantity} is no number of pages, expected {whole_pages_text(size)}"
    if config.strict_cpu_reservation and config.reserved_cpus == "":
        yield "strictCPUReservation: is true, but reservedCPUs names no CPU to keep out"


def _sections_by_numa_node(config: AgentConfig) -> dict[str, Mapping[int, object]]:
    return {"capacityFactor": config.capacity_factor, "reservedMemory": config.reserved_memory}


def _reserved_memory_entries(config: AgentConfig) -> Iterator[tuple[str, int, str, str | int]]:
    """Yield path, NUMA node, type and quantity of each entry of ``reservedMemory``."""
    for numa_node, value in config.reserved_memory.items():
        path = f"reservedMemory.{numa_node}"
        for resource, quantity in reserved_memory_by_type(value).items():
            entry_path = f"{path}.{resource}" if isinstance(value, Mapping) else path
            yield entry_path, numa_node, resource, quantity


# --- Combinations that the kubelet forbids ------------------------------------------------------
# Source: kubernetes ``pkg/kubelet/cm/cpumanager/policy_options.go``: the kubelet does not start.


def _check_kubelet_forbidden_combinations(config: AgentConfig) -> Iterator[str]:
    rules, path_of_rules = derive_kubelet_rules(config), "kubeletCompatibility.except"
    if rules.align_by_socket:
        for path in _paths_that_set_annotation(config, "policy", "single-numa-node"):
            yield (
                f"{path_of_rules}.alignBySocket: true takes CPUs from all NUMA nodes of a "
                f"socket, and {path} is single-numa-node; expected only one of them, as the "
                "kubelet does"
            )
    if not rules.distribute_cpus_across_cores:
        return
    key = f"{path_of_rules}.distributeCPUsAcrossCores"
    if not rules.cpu_order:
        yield (
            f"{key}: true is of the kubelet's order, expected cpuOrder: true beside it; without it "
            "smt: spread takes one thread of each core"
        )
    for other_key, is_enabled in (
        ("distributeCPUsAcrossNUMA", rules.distribute_cpus_across_numa),
        ("alignL3", is_aligned_to_l3(config)),
    ):
        if is_enabled:
            yield f"{key}: true, expected {other_key}: false beside it, as the kubelet does"
    for path in _paths_that_set_annotation(config, "smt", "full-core"):
        yield f"{key}: true splits cores, and {path} is full-core; expected only one of them"


def _paths_that_set_annotation(config: AgentConfig, key: str, value: str) -> Iterator[str]:
    """Paths at which defaults and rules set a key to a value."""
    return (
        f"{path}.{key}" for path, values in _annotation_levels(config) if values.get(key) == value
    )


# --- The machine --------------------------------------------------------------------------------


def _check_against_machine(config: AgentConfig, topology: Topology) -> Iterator[str]:
    """Report CPUs, NUMA nodes and amounts that the machine lacks; bad values are skipped."""
    floor = _parse_or_none(parse_pool_floor, config.shared_pool.min_cpus)
    cpus = len(topology.allowed)
    if floor is not None and floor.cpus_of_total(cpus) >= cpus:
        yield (
            f"sharedPool.minCPUs: {floor} is the whole machine, which has {cpus} CPUs; no CPU "
            "could be exclusive"
        )
    reserved = _parse_or_none(parse_cpus, config.reserved_cpus) or CPUSet()
    if absent := reserved - topology.present:
        yield (f"reservedCPUs: this machine has no {cpus_text(absent)}; it has {topology.present}")
    if reserved and topology.online <= reserved:
        yield f"reservedCPUs: {reserved} is the whole machine; nothing is left for containers"
    numa_ids = f"this machine has {topology.numa_ids}"
    for section, mapping in _sections_by_numa_node(config).items():
        for numa_node in mapping:
            if numa_node not in topology.numa_nodes:
                yield f"{section}.{numa_node}: there is no NUMA node {numa_node}; {numa_ids}"
    yield from _check_reserved_memory(config, topology)
    sockets, numa_nodes = len(topology.sockets), len(topology.cpu_nodes)
    if derive_kubelet_rules(config).align_by_socket and sockets > numa_nodes:
        yield (
            f"kubeletCompatibility.except.alignBySocket: this machine has {sockets} sockets and "
            f"{numa_nodes} NUMA nodes with CPUs, expected no more sockets than NUMA nodes"
        )
    yield from _check_cpuless_nodes_and_tiers(config, topology)


def _check_reserved_memory(config: AgentConfig, topology: Topology) -> Iterator[str]:
    for path, i, resource, quantity in _reserved_memory_entries(config):
        numa_node = topology.numa_nodes.get(i)
        bytes_ = _parse_or_none(parse_memory_bytes, quantity)
        size = _parse_or_none(page_bytes_of_type, resource)
        if numa_node is None or bytes_ is None or (size is None and resource != "memory"):
            continue
        capacity = numa_node.memory_bytes if size is None else numa_node.hugepages.get(size, 0)
        if bytes_ > capacity:
            kind = "" if size is None else f" in {resource}"
            yield f"{path}: {quantity} is more than the {capacity} bytes of NUMA node {i}{kind}"


def _check_cpuless_nodes_and_tiers(config: AgentConfig, topology: Topology) -> Iterator[str]:
    """Check memory-only NUMA nodes and their memory tiers."""
    section, path = config.memory_only_numa_nodes, "memoryOnlyNUMANodes"
    for numa_node in _parse_or_none(parse_numa_nodes, section.ids) or ():
        topology_node = topology.numa_nodes.get(numa_node)
        if topology_node is None:
            yield (
                f"{path}.ids: there is no NUMA node {numa_node}; this machine has "
                f"{topology.numa_ids}"
            )
        elif topology_node.cpus:
            yield f"{path}.ids: NUMA node {numa_node} has {cpus_text(topology_node.cpus)}"
    tiers = {n.tier for n in topology.numa_nodes.values() if n.tier is not None and not n.cpus}
    for tier in _parse_or_none(parse_numa_nodes, section.memory_tiers) or ():
        if tier not in tiers:
            known_tiers = ", ".join(map(str, sorted(tiers))) or "none"
            yield (
                f"{path}.memoryTiers: no NUMA node without CPUs is of memory tier {tier}; the "
                f"kernel has {known_tiers}"
            )


def _parse_or_none(parse: Callable[[_T], _R], value: _T) -> _R | None:
    try:
        return parse(value)
    except ValueError:
        return None
