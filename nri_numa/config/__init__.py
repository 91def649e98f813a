"""The configuration: one document, read from file, environment and flags.

`load` returns a checked `AgentConfig` or raises `ConfigError` with every problem at once;
`settings` turns it into what the engine sees.
"""

from __future__ import annotations

from nri_numa.config.layers import (
    ENVIRONMENT_PREFIX,
    changes,
    effective,
    load,
    reloaded,
)
from nri_numa.config.problems import problems
from nri_numa.config.sections import (
    API_VERSION,
    HTTP,
    KIND,
    AgentConfig,
    DevicePlugin,
    History,
    InternalErrorAnswer,
    LinkKind,
    Log,
    LogFormat,
    LogLevel,
    Reconcile,
    RuleDocument,
    RuleMatch,
    Runtime,
)
from nri_numa.config.values import (
    is_loopback,
    parse_duration,
    parse_quantity,
    plugin_index,
    settings,
    split_address,
)

__all__ = [
    "API_VERSION",
    "ENVIRONMENT_PREFIX",
    "HTTP",
    "KIND",
    "AgentConfig",
    "DevicePlugin",
    "History",
    "InternalErrorAnswer",
    "LinkKind",
    "Log",
    "LogFormat",
    "LogLevel",
    "Reconcile",
    "RuleDocument",
    "RuleMatch",
    "Runtime",
    "changes",
    "effective",
    "is_loopback",
    "load",
    "parse_duration",
    "parse_quantity",
    "plugin_index",
    "problems",
    "reloaded",
    "settings",
    "split_address",
]
