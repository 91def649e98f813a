"""The configuration: one document, read from file, environment and flags.

`load` returns a checked `AgentConfig` or raises `ConfigError` with every problem at once;
`settings` turns it into what the engine sees.
"""

from __future__ import annotations

from nri_numa.config.derived import (
    derive_kubelet_rules,
    derive_settings,
    driver_sockets,
    slots_resource,
)
from nri_numa.config.layers import changed_paths, effective_document, load_config, merge_reloadable
from nri_numa.config.problems import validate_config
from nri_numa.config.sections import (
    HTTP,
    AgentConfig,
    DevicePluginSection,
    InternalErrorAnswer,
    RuntimeLinkKind,
)
from nri_numa.config.values import is_loopback, parse_duration, parse_plugin_index, split_address

__all__ = [
    "HTTP",
    "AgentConfig",
    "DevicePluginSection",
    "InternalErrorAnswer",
    "RuntimeLinkKind",
    "changed_paths",
    "derive_kubelet_rules",
    "derive_settings",
    "driver_sockets",
    "effective_document",
    "is_loopback",
    "load_config",
    "merge_reloadable",
    "parse_duration",
    "parse_plugin_index",
    "slots_resource",
    "split_address",
    "validate_config",
]
