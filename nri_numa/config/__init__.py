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
    merge_text,
    reloaded,
)
from nri_numa.config.model import (
    API_VERSION,
    HTTP,
    KIND,
    AgentConfig,
    History,
    InternalErrorAnswer,
    Log,
    LogFormat,
    LogLevel,
    Reconcile,
    RuleDocument,
    RuleMatch,
    Runtime,
)
from nri_numa.config.problems import problems
from nri_numa.config.values import parse_duration, parse_quantity, settings, split_address

__all__ = [
    "API_VERSION",
    "ENVIRONMENT_PREFIX",
    "HTTP",
    "KIND",
    "AgentConfig",
    "History",
    "InternalErrorAnswer",
    "Log",
    "LogFormat",
    "LogLevel",
    "Reconcile",
    "RuleDocument",
    "RuleMatch",
    "Runtime",
    "changes",
    "effective",
    "load",
    "merge_text",
    "parse_duration",
    "parse_quantity",
    "problems",
    "reloaded",
    "settings",
    "split_address",
]
