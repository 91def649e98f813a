"""The configuration: one document, read from file, environment and flags.

`load` returns a checked `AgentConfig` or raises `ConfigError` with every problem at once;
`settings` turns it into what the engine sees.
"""

from __future__ import annotations

from nri_numa.config.derived import node_name, settings, slots_resource, sockets
from nri_numa.config.layers import changes, effective, load, reloaded
from nri_numa.config.problems import problems
from nri_numa.config.sections import HTTP, AgentConfig, DevicePlugin, InternalErrorAnswer, LinkKind
from nri_numa.config.values import is_loopback, parse_duration, split_address, two_digits

__all__ = [
    "HTTP",
    "AgentConfig",
    "DevicePlugin",
    "InternalErrorAnswer",
    "LinkKind",
    "changes",
    "effective",
    "is_loopback",
    "load",
    "node_name",
    "parse_duration",
    "problems",
    "reloaded",
    "settings",
    "slots_resource",
    "sockets",
    "split_address",
    "two_digits",
]
