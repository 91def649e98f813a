"""Turns the file's texts into values, and the configuration into the engine's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from nri_numa import text
from nri_numa.config import tenants
from nri_numa.config.sections import AgentConfig, Quantity
from nri_numa.engine.values.settings import Rule, Settings
from nri_numa.machine.cpuset import CPUSet, NUMASet

_SIZE = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[kMGTPE]|[KMGTPE]i)?", re.ASCII)
"""How people write memory: no sign, no exponent, no thousandths of a byte."""
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}


def parse_quantity(value: str | int) -> int:
    """Bytes of a memory quantity in Kubernetes' notation (``1536Mi``, ``2G``, ``1073741824``).

    Raises:
        ValueError: with what was expected.
    """
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative, expected bytes")
        return value
    if len(value) > 40 or not _SIZE.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is no quantity, expected bytes or a text such as 512Mi")
    return int(text.quantity(value))


def reserved_types(value: Quantity | Mapping[str, Quantity]) -> Mapping[str, Quantity]:
    """What ``reservedMemory`` says of one NUMA node, by type; one quantity is of ``memory``."""
    return value if isinstance(value, Mapping) else {"memory": value}


def page_size(resource: str) -> int:
    """Bytes of one page of ``hugepages-2Mi`` and the like.

    Raises:
        ValueError: with what was expected.
    """
    try:
        return text.page_size(resource)
    except text.BadQuantity as error:
        raise ValueError(
            "unknown type, expected memory or huge pages such as hugepages-1Gi"
        ) from error


def parse_duration(value: str | float) -> float:
    """Seconds of a number, or of a text such as ``1m30s`` or ``250ms``.

    Raises:
        ValueError: with what was expected.
    """
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) <= 10:
            return float(value)
        if len(value) > 40 or not _DURATION.fullmatch(value):
            raise ValueError(
                f"{value[:40]!r} is no duration, expected seconds or a text such as 30s"
            )
        total = Fraction(0)
        for number, unit in _DURATION_PART.findall(value):
            total += Fraction(number) * _SECONDS[unit]
        return float(total)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value} is no duration, expected 0 or more seconds")
    return float(value)


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or ``[IPv6]:port``; None when the address is ``off``.

    An empty host means every interface.

    Raises:
        ValueError: with what was expected.
    """
    if address == "off":
        return None
    host, colon, port_text = address.rpartition(":")
    wanted = f"{address!r} is no address, expected host:port, [IPv6]:port or off"
    if not colon or not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5:
        raise ValueError(wanted)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(wanted)
    port = int(port_text)
    if port > 65535:
        raise ValueError(f"port {port} is above 65535")
    if any(c.isspace() or c in "[]/" for c in host):
        raise ValueError(wanted)
    return host, port


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a listener on ``host``."""
    return (
        host == "localhost"
        or host == "::1"
        or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None
    )


def plugin_index(config: AgentConfig) -> str:
    """The plugin index as the protocol wants it: two digits."""
    index = config.runtime.plugin_index
    return f"{index:02d}" if isinstance(index, int) else index


def settings(config: AgentConfig) -> Settings:
    """What the engine sees of a configuration that has no `problems`."""
    reserved = {i: reserved_types(value) for i, value in config.reserved_memory.items()}
    return Settings(
        prefix=config.annotation_prefix,
        defaults={key: str(value) for key, value in config.defaults.items()},
        rules=tuple(
            Rule(
                namespaces=rule.match.namespaces,
                labels=rule.match.labels,
                qos=rule.match.qos,
                runtime_handlers=rule.match.runtime_handlers,
                containers=rule.match.containers,
                values={key: str(value) for key, value in rule.set.items()},
            )
            for rule in config.rules
        ),
        strategy=config.strategy,
        oversale=config.oversale,
        capacity_factor=config.capacity_factor,
        reserved_cpus=CPUSet.parse(str(config.reserved_cpus)),
        strict_reserved=config.strict_reserved,
        reserved_memory={i: parse_quantity(q.get("memory", 0)) for i, q in reserved.items()},
        reserved_hugepages={
            i: {page_size(t): parse_quantity(q) for t, q in types.items() if t != "memory"}
            for i, types in reserved.items()
            if types.keys() - {"memory"}
        },
        static_cpus=config.static_cpus,
        prefer_closest=config.prefer_closest,
        kubelet_ties=config.kubelet_ties,
        kubelet_memory=config.kubelet_memory,
        kubelet_cpus=config.kubelet_cpus,
        cpu_order=config.cpu_order,
        distribute_across_numa=config.distribute_across_numa,
        distribute_across_cores=config.distribute_across_cores,
        align_l3=config.align_l3,
        align_by_socket=config.align_by_socket,
        isolated=config.isolated_cpus,
        nohz_full=config.nohz_full_cpus,
        cores=config.cores,
        memory_only_nodes=NUMASet.parse(str(config.memory_only_nodes)),
        memory_tiers=frozenset(NUMASet.parse(str(config.memory_tiers))),
        lift_quota=config.lift_quota,
        set_environment=config.environment,
        permissions=tenants.permissions(config.permissions),
        limits=tenants.limits(config.quotas, config.shared_pool),
        kept_seconds=parse_duration(config.keep_exclusive_cpus),
        kubelet_override=config.kubelet.override,
    )
