"""The configuration: one document, read from file, environment and flags.

`load_config` returns a checked `AgentConfig` or raises `ConfigError` with every problem at once;
`derive_settings` turns it into what the engine sees. The same name after ``as`` is an export.
"""

from __future__ import annotations

from nri_numa.config.derived import derive_kubelet_rules as derive_kubelet_rules
from nri_numa.config.derived import derive_settings as derive_settings
from nri_numa.config.derived import driver_sockets as driver_sockets
from nri_numa.config.derived import slots_resource as slots_resource
from nri_numa.config.layers import changed_paths as changed_paths
from nri_numa.config.layers import effective_document as effective_document
from nri_numa.config.layers import load_config as load_config
from nri_numa.config.layers import merge_reloadable as merge_reloadable
from nri_numa.config.problems import validate_config as validate_config
from nri_numa.config.sections import HTTP as HTTP
from nri_numa.config.sections import AgentConfig as AgentConfig
from nri_numa.config.sections import DevicePluginSection as DevicePluginSection
from nri_numa.config.sections import InternalErrorAnswer as InternalErrorAnswer
from nri_numa.config.sections import RuntimeLinkKind as RuntimeLinkKind
from nri_numa.config.values import is_loopback as is_loopback
from nri_numa.config.values import parse_duration as parse_duration
from nri_numa.config.values import parse_plugin_index as parse_plugin_index
from nri_numa.config.values import split_address as split_address
