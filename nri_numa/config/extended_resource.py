"""What the API server takes for the name of an extended resource.

Source: kubernetes ``pkg/apis/core/v1/helper/helpers.go`` (IsExtendedResourceName) and
``staging/src/k8s.io/apimachinery/pkg/util/validation``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from nri_numa.config.sections import AgentConfig, DevicePlugin

_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_QUOTA: Final = "requests."
"""What a ResourceQuota puts before the name, which must be a good one with it as well."""
_LONGEST_PREFIX: Final = 253 - len(_QUOTA)
_LONGEST_NAME: Final = 63
_MAX_SOCKET_PATH: Final = 107 - len("/kubelet.sock")


def slots_resource(config: AgentConfig) -> str:
    """The resource for which containers get slots, which make their CPUs exclusive.

    Empty where the publisher writes the number (``publish.capacity``): the kubelet hands over no
    ids then, and pods ask by annotation as well.
    """
    return "" if config.publish.capacity else config.device_plugin.resource_name


def resource_problems(section: DevicePlugin) -> Iterator[str]:
    """Every mistake of the section, each ``path: what is wrong, what was expected``."""
    name = section.resource_name
    prefix, slash, rest = name.partition("/")
    shown, good = f"devicePlugin.resourceName: {name[:120]!r}", "such as example.com/exclusive-cpu"
    if not slash:
        yield f"{shown} has no prefix, expected a DNS name, a slash and a name, {good}"
    elif "kubernetes.io/" in name:
        yield (
            f"{shown} is below kubernetes.io, which the API server keeps for Kubernetes; expected "
            f"a DNS name of yours as prefix, {good}"
        )
    elif name.startswith(_QUOTA):
        yield f"{shown} begins with {_QUOTA}, which is the language of quotas; expected another"
    elif len(prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(prefix):
        yield (
            f"{shown}: the prefix is no DNS name (lower case, at most {_LONGEST_PREFIX} "
            f"characters), expected one {good}"
        )
    elif len(rest) > _LONGEST_NAME or not _NAME.fullmatch(rest):
        yield (
            f"{shown}: after the slash, expected up to {_LONGEST_NAME} letters, digits, -, _ and "
            f"., a letter or digit at both ends, {good}"
        )
    directory = section.directory
    if not directory.startswith("/") or len(directory.encode()) > _MAX_SOCKET_PATH:
        yield (
            f"devicePlugin.directory: {directory[:120]!r}, expected an absolute path of at most "
            f"{_MAX_SOCKET_PATH} bytes, because sockets in it have no longer paths"
        )
