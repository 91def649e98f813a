"""Settings of the engine and names, derived from a configuration without `problems`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import asdict, replace

from nri_numa.config.sections import (
    KUBELET_RULE_NAMES,
    AgentConfig,
    CPUWithholdingLimits,
    KubeletCompatibilityMode,
    NamespaceQuotaDocument,
    Quantity,
)
from nri_numa.config.values import (
    AUTO,
    page_bytes_of_type,
    parse_cpu_count_or_percent,
    parse_cpus,
    parse_duration,
    parse_memory_bytes,
    parse_numa_nodes,
    parse_pool_floor,
)
from nri_numa.model.settings import (
    AnnotationPermission,
    CPUWithholdingQuota,
    KubeletRules,
    NamespacePatternQuota,
    QuotasAndPoolFloor,
    Rule,
    Settings,
)


def slots_resource(config: AgentConfig) -> str:
    """Resource whose slots make a container's CPUs exclusive.

    Empty if the publisher writes the count (``publish.nodeCapacity``): the kubelet then hands over
    no slot ids, and pods also request exclusive CPUs by annotation.
    """
    return "" if config.publish.node_capacity else config.device_plugin.resource_name


def driver_sockets(kubelet_root: str, driver: str) -> tuple[str, str]:
    """Registration socket and service socket of a DRA driver.

    Source: kubernetes ``pkg/kubelet/config`` (plugins_registry) and KEP-4381.
    """
    return (
        f"{kubelet_root}/plugins_registry/{driver}-reg.sock",
        f"{kubelet_root}/plugins/{driver}/dra.sock",
    )


def reserved_memory_by_type(value: Quantity | Mapping[str, Quantity]) -> Mapping[str, Quantity]:
    """Reserved quantities of one NUMA node by type; a bare quantity is of ``memory``."""
    return value if isinstance(value, Mapping) else {"memory": value}


_POLICY_RULES: Final = KubeletRules(ties=True, cpus=True, memory=True)
_RULES_BY_MODE: Final = {
    KubeletCompatibilityMode.OFF: KubeletRules(),
    KubeletCompatibilityMode.POLICIES: _POLICY_RULES,
    KubeletCompatibilityMode.FULL: replace(_POLICY_RULES, static_cpus=True, cpu_order=True),
}


def derive_kubelet_rules(config: AgentConfig) -> KubeletRules:
    """Rules of the mode, with the exceptions of ``except`` applied."""
    section = config.kubelet_compatibility
    # Validation derives settings of wrong names, too, which it reports.
    exceptions = {
        KUBELET_RULE_NAMES[key]: value
        for key, value in section.exceptions.items()
        if key in KUBELET_RULE_NAMES
    }
    return replace(_RULES_BY_MODE[section.mode], **exceptions)


def has_full_compatibility(config: AgentConfig) -> bool:
    """True if keys that are not set have the kubelet's defaults."""
    return config.kubelet_compatibility.mode is KubeletCompatibilityMode.FULL


def is_aligned_to_l3(config: AgentConfig) -> bool:
    """Value of ``alignL3``, or its default if it is not set."""
    return not has_full_compatibility(config) if config.align_l3 is None else config.align_l3


def derive_settings(config: AgentConfig) -> Settings:
    """Build the engine's settings from a configuration."""
    reserved = {i: reserved_memory_by_type(value) for i, value in config.reserved_memory.items()}
    parsed = {
        "prefix": config.annotation_prefix,
        "defaults": annotation_values_as_text(config.defaults),
        "rules": tuple(
            Rule(**asdict(entry.match), values=annotation_values_as_text(entry.keys))
            for entry in config.rules
        ),
        "reserved_cpus": parse_cpus(config.reserved_cpus),
        "reserved_memory": {i: parse_memory_bytes(q.get("memory", 0)) for i, q in reserved.items()},
        "reserved_hugepages": {
            i: {
                page_bytes_of_type(t): parse_memory_bytes(q)
                for t, q in types.items()
                if t != "memory"
            }
            for i, types in reserved.items()
            if types.keys() - {"memory"}
        },
        "kubelet": derive_kubelet_rules(config),
        "prefer_closest_numa_nodes": not has_full_compatibility(config)
        if config.prefer_closest_numa_nodes is None
        else config.prefer_closest_numa_nodes,
        "align_l3": is_aligned_to_l3(config),
        "isolated": config.isolated_cpus,
        "nohz_full": config.nohz_full_cpus,
        "memory_only_numa_nodes": parse_numa_nodes(config.memory_only_numa_nodes.ids),
        "memory_tiers": frozenset(parse_numa_nodes(config.memory_only_numa_nodes.memory_tiers)),
        "permissions": tuple(
            AnnotationPermission(
                name=f"permissions[{number}]",
                **asdict(entry.match),
                allowed_keys=entry.allowed_keys,
                allowed_values={
                    key: tuple(map(str, values)) for key, values in entry.allowed_values.items()
                },
                allow_unrequested_cpus=entry.allow_unrequested_cpus,
                allow_reserved_cpus=entry.allow_reserved_cpus,
                on_denied=entry.on_denied,
            )
            for number, entry in enumerate(config.permissions)
        ),
        "limits": _derive_quota_and_pool_limits(config),
        "reservation_seconds": parse_duration(config.pod_reservation_timeout),
        "kubelet_override": config.kubelet.override_grants,
        "rebalance_moves": config.rebalance.max_moves,
    }
    # Fields of the same name have the same meaning in both.
    common_fields = set(Settings.__struct_fields__) & set(AgentConfig.__struct_fields__)
    return Settings(**{name: getattr(config, name) for name in common_fields} | parsed)


def annotation_values_as_text(values: Mapping[str, str | int]) -> dict[str, str]:
    """Annotation values as a pod would write them."""
    return {key: str(value).removesuffix("\n") for key, value in values.items()}


def _derive_quota_and_pool_limits(config: AgentConfig) -> QuotasAndPoolFloor:
    quotas, pool = config.quotas, config.shared_pool
    return QuotasAndPoolFloor(
        quota=_derive_quota(quotas),
        idle_siblings=parse_cpu_count_or_percent(quotas.idle_siblings),
        namespaces=tuple(
            NamespacePatternQuota(
                name=f"quotas.namespaces[{number}]",
                namespaces=entry.namespaces,
                quota=_derive_quota(entry),
            )
            for number, entry in enumerate(quotas.namespaces)
        ),
        pool=parse_pool_floor(
            1 if has_full_compatibility(config) and pool.min_cpus == AUTO else pool.min_cpus
        ),
        numa_pool=parse_cpu_count_or_percent(pool.min_cpus_per_numa_node),
    )


def _derive_quota(limits: CPUWithholdingLimits | NamespaceQuotaDocument) -> CPUWithholdingQuota:
    return CPUWithholdingQuota(
        exclusive=parse_cpu_count_or_percent(limits.exclusive_cpus),
        listed=parse_cpu_count_or_percent(limits.listed_cpus),
    )
