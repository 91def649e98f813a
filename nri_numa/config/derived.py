"""What follows from a configuration that has no `problems`: the engine's settings, and names."""

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
    """The resource for which containers get slots, which make their CPUs exclusive.

    Empty where the publisher writes the number (``publish.capacity``): the kubelet hands over no
    ids then, and pods ask by annotation as well.
    """
    return "" if config.publish.capacity else config.device_plugin.resource_name


def driver_sockets(kubelet_root: str, driver: str) -> tuple[str, str]:
    """The sockets that the kubelet finds a DRA driver by, and calls it on.

    Source: kubernetes ``pkg/kubelet/config`` (plugins_registry) and KEP-4381.
    """
    return (
        f"{kubelet_root}/plugins_registry/{driver}-reg.sock",
        f"{kubelet_root}/plugins/{driver}/dra.sock",
    )


def reserved_memory_by_type(value: Quantity | Mapping[str, Quantity]) -> Mapping[str, Quantity]:
    """What ``reservedMemory`` says of one NUMA node, by type; one quantity is of ``memory``."""
    return value if isinstance(value, Mapping) else {"memory": value}


_POLICY_RULES: Final = KubeletRules(ties=True, cpus=True, memory=True)
_RULES_BY_MODE: Final = {
    KubeletCompatibilityMode.OFF: KubeletRules(),
    KubeletCompatibilityMode.POLICIES: _POLICY_RULES,
    KubeletCompatibilityMode.FULL: replace(_POLICY_RULES, static_cpus=True, cpu_order=True),
}


def derive_kubelet_rules(config: AgentConfig) -> KubeletRules:
    """The rules of the mode, changed by what ``except`` says."""
    section = config.kubelet_compatibility
    names = {KUBELET_RULE_NAMES.get(key): value for key, value in section.exceptions.items()}
    return replace(_RULES_BY_MODE[section.mode], **{n: v for n, v in names.items() if n})


def has_full_compatibility(config: AgentConfig) -> bool:
    """True if keys that say nothing have the kubelet's defaults."""
    return config.kubelet_compatibility.mode is KubeletCompatibilityMode.FULL


def is_aligned_to_l3(config: AgentConfig) -> bool:
    """What ``alignL3`` is, where it says nothing too."""
    return not has_full_compatibility(config) if config.align_l3 is None else config.align_l3


def derive_settings(config: AgentConfig) -> Settings:
    """What the engine sees of a configuration."""
    reserved = {i: reserved_memory_by_type(value) for i, value in config.reserved_memory.items()}
    parsed = {
        "prefix": config.annotation_prefix,
        "defaults": annotation_values_as_text(config.defaults),
        "rules": tuple(
            Rule(**asdict(one.match), values=annotation_values_as_text(one.keys))
            for one in config.rules
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
        "prefer_closest": not has_full_compatibility(config)
        if config.prefer_closest is None
        else config.prefer_closest,
        "align_l3": is_aligned_to_l3(config),
        "isolated": config.isolated_cpus,
        "nohz_full": config.nohz_full_cpus,
        "memory_only_nodes": parse_numa_nodes(config.memory_only_nodes),
        "memory_tiers": frozenset(parse_numa_nodes(config.memory_tiers)),
        "set_environment": config.environment,
        "permissions": tuple(
            AnnotationPermission(
                name=f"permissions[{number}]",
                **asdict(one.match),
                keys=one.keys,
                values={key: tuple(map(str, values)) for key, values in one.values.items()},
                unpaid_cpus=one.unpaid_cpus,
                reserved_cpus=one.reserved_cpus,
                on_denied=one.on_denied,
            )
            for number, one in enumerate(config.permissions)
        ),
        "limits": _derive_quota_and_pool_limits(config),
        "reservation_seconds": parse_duration(config.keep_exclusive_cpus),
        "cpu_overcommit": config.oversale,
        "disable_cfs_quota": config.lift_quota,
        "kubelet_override": config.kubelet.override,
        "rebalance_moves": config.room.max_moves,
    }
    # What has the same name in both is the same.
    same = set(Settings.__struct_fields__) & set(AgentConfig.__struct_fields__)
    return Settings(**{name: getattr(config, name) for name in same} | parsed)


def annotation_values_as_text(values: Mapping[str, str | int]) -> dict[str, str]:
    """Values of annotations as a pod would write them."""
    return {key: str(value).removesuffix("\n") for key, value in values.items()}


def _derive_quota_and_pool_limits(config: AgentConfig) -> QuotasAndPoolFloor:
    quotas, pool = config.quotas, config.shared_pool
    return QuotasAndPoolFloor(
        quota=_derive_quota(quotas),
        idle_siblings=parse_cpu_count_or_percent(quotas.idle_cpus),
        namespaces=tuple(
            NamespacePatternQuota(
                name=f"quotas.namespaces[{number}]",
                namespaces=one.namespaces,
                quota=_derive_quota(one),
            )
            for number, one in enumerate(quotas.namespaces)
        ),
        pool=parse_pool_floor(
            1 if has_full_compatibility(config) and pool.cpus == AUTO else pool.cpus
        ),
        numa_pool=parse_cpu_count_or_percent(pool.numa_node_cpus),
    )


def _derive_quota(of: CPUWithholdingLimits | NamespaceQuotaDocument) -> CPUWithholdingQuota:
    return CPUWithholdingQuota(
        exclusive=parse_cpu_count_or_percent(of.exclusive_cpus),
        listed=parse_cpu_count_or_percent(of.listed_cpus),
    )
