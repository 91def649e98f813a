"""Finds what a well-formed configuration still gets wrong.

Every check adds to one list, so that an operator sees all mistakes of a file at once. With a
`Topology`, ids are also checked against the machine.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

from nri_numa.config.model import AgentConfig
from nri_numa.config.values import (
    is_loopback,
    parse_duration,
    parse_quantity,
    plugin_index,
    split_address,
)
from nri_numa.topology.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.topology.model import Topology

_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_SOCKET_PATH = 107  # sun_path of unix(7) without its terminating zero


def problems(config: AgentConfig, topology: Topology | None = None) -> list[str]:
    """Every semantic mistake, each ``path: what is wrong, what was expected``."""
    found = [
        *_runtime(config),
        *_http(config),
        *_annotations(config),
        *_numbers(config),
        *_ids(config),
    ]
    if topology is not None:
        found += _against_machine(config, topology)
    return found


def _runtime(config: AgentConfig) -> Iterator[str]:
    index = plugin_index(config)
    if not re.fullmatch(r"[0-9]{2}", index, re.ASCII):
        yield f"runtime.pluginIndex: {index[:20]!r}, expected two digits from 00 to 99"
    if len(config.runtime.nri_socket.encode()) > _MAX_SOCKET_PATH:
        yield (
            f"runtime.nriSocket: is longer than the {_MAX_SOCKET_PATH} bytes a unix socket's "
            "path may have"
        )


def _http(config: AgentConfig) -> Iterator[str]:
    http = config.http
    if bool(http.tls_cert) != bool(http.tls_key):
        missing, given = ("tlsKey", "tlsCert") if http.tls_cert else ("tlsCert", "tlsKey")
        yield f"http.{missing}: is not set, but http.{given} is; TLS needs both"
    try:
        address = split_address(http.address)
    except ValueError as error:
        yield f"http.address: {error}"
        return
    if address is None or http.token_file or http.allow_anonymous:
        return
    if not is_loopback(address[0]):
        yield (
            f"http.address: {http.address} can be reached from other machines; set "
            "http.tokenFile, or http.allowAnonymous: true, or listen on 127.0.0.1"
        )


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
    from nri_numa.engine.wishes import check_level

    for problem in check_level({key: str(value) for key, value in values.items()}):
        yield f"{path}.{problem}"


def _numbers(config: AgentConfig) -> Iterator[str]:
    if not math.isfinite(config.oversale):
        yield f"oversale: {config.oversale}, expected a number from 1 to 100"
    for numa_node, factor in config.capacity_factor.items():
        if math.isnan(factor):
            yield f"capacityFactor.{numa_node}: {factor}, expected a number from 0 to 1"
    for numa_node, quantity in config.reserved_memory.items():
        yield from _try(f"reservedMemory.{numa_node}", functools.partial(parse_quantity, quantity))
    yield from _try("reconcile.interval", lambda: parse_duration(config.reconcile.interval))
    yield from _try(
        "reconcile.repairWindow", lambda: parse_duration(config.reconcile.repair_window)
    )


def _ids(config: AgentConfig) -> Iterator[str]:
    yield from _try("reservedCPUs", lambda: CPUSet.parse(str(config.reserved_cpus)))
    yield from _try("memoryOnlyNodes", lambda: NUMASet.parse(str(config.memory_only_nodes)))
    for section, mapping in (
        ("capacityFactor", config.capacity_factor),
        ("reservedMemory", config.reserved_memory),
    ):
        for numa_node in mapping:
            if not 0 <= numa_node < NUMASet.LIMIT:
                yield f"{section}.{numa_node}: expected a NUMA node from 0 to {NUMASet.LIMIT - 1}"
    if config.strict_reserved and config.reserved_cpus == "":
        yield "strictReserved: is true, but reservedCPUs names no CPU to keep out"


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
    reserved = _parsed(CPUSet, str(config.reserved_cpus))
    if isinstance(reserved, CPUSet):
        absent = reserved - topology.present
        if absent:
            yield f"reservedCPUs: this machine has no CPU {absent}; it has {topology.present}"
        if reserved and topology.online <= reserved:
            yield f"reservedCPUs: {reserved} is the whole machine; nothing is left for containers"
    has = f"this machine has {topology.numa_ids}"
    for section, mapping in (
        ("capacityFactor", config.capacity_factor),
        ("reservedMemory", config.reserved_memory),
    ):
        for numa_node in mapping:
            if numa_node not in topology.numa_nodes:
                yield f"{section}.{numa_node}: there is no NUMA node {numa_node}; {has}"
    for numa_node, quantity in config.reserved_memory.items():
        known = topology.numa_nodes.get(numa_node)
        try:
            wanted = parse_quantity(quantity)
        except ValueError:
            continue  # said by `_numbers`
        if known is not None and wanted > known.memory_bytes:
            yield (
                f"reservedMemory.{numa_node}: {quantity} is more than the {known.memory_bytes} "
                f"bytes of NUMA node {numa_node}"
            )
    memory_only = _parsed(NUMASet, str(config.memory_only_nodes))
    for numa_node in memory_only or ():
        known = topology.numa_nodes.get(numa_node)
        if known is None:
            yield f"memoryOnlyNodes: there is no NUMA node {numa_node}; {has}"
        elif known.cpus:
            yield f"memoryOnlyNodes: NUMA node {numa_node} has CPUs {known.cpus}"
