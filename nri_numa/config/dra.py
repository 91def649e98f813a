"""The section ``dra``: NUMA nodes as devices that ResourceClaims allocate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case

_DRIVER: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+")
_LONGEST_DRIVER: Final = 63
"""Source: kubernetes ``pkg/apis/resource/validation`` (DriverNameMaxLength)."""
_LONGEST_PATH: Final = 107
"""Bytes of a unix socket's path."""


class DRA(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The driver of dynamic resource allocation: the agent prepares, the publisher publishes."""

    enabled: Annotated[
        bool,
        Meta(
            description="Serve the kubelet as a DRA driver, and publish each NUMA node as a device "
            "with consumable capacity. Needs nri-numa publish, Kubernetes 1.36 or newer, and a "
            "runtime with CDI."
        ),
    ] = False
    driver: Annotated[
        str,
        Meta(
            description="Name of the driver, in ResourceSlices and DeviceClasses; best below a "
            "domain of yours."
        ),
    ] = "dra.numa.example.com"
    list_attributes: Annotated[
        bool,
        Meta(
            description="Publish attributes that have several values as lists. Only where API "
            "server and scheduler have the feature gate DRAListTypeAttributes: others refuse the "
            "ResourceSlice."
        ),
    ] = False
    handover: Annotated[
        str,
        Meta(
            description="Directory in which the agent asks nri-numa publish for claims, and gets "
            "them; both write there, and nobody else."
        ),
    ] = "/run/nri-numa-claims"
    cdi_directory: Annotated[
        str, Meta(description="Where the runtime looks for CDI files; the agent writes there.")
    ] = "/var/run/cdi"


def sockets(kubelet_root: str, driver: str) -> tuple[str, str]:
    """The sockets that the kubelet finds the driver by, and calls it on.

    Source: kubernetes ``pkg/kubelet/config`` (plugins_registry) and KEP-4381.
    """
    return (
        f"{kubelet_root}/plugins_registry/{driver}-reg.sock",
        f"{kubelet_root}/plugins/{driver}/dra.sock",
    )


def dra_problems(section: DRA, kubelet_root: str, *, over_cri: bool = False) -> Iterator[str]:
    """Every mistake of the section, each ``path: what is wrong, what was expected``.

    Args:
        section: of the configuration.
        kubelet_root: the kubelet's directory.
        over_cri: containers are not seen before they start.
    """
    driver = section.driver
    if len(driver) > _LONGEST_DRIVER or not _DRIVER.fullmatch(driver):
        yield (
            f"dra.driver: {driver[:120]!r}, expected a DNS name in lower case with a dot, of at "
            f"most {_LONGEST_DRIVER} characters, such as dra.example.com"
        )
    for name, path in (("handover", section.handover), ("cdiDirectory", section.cdi_directory)):
        if not path.startswith("/"):
            yield f"dra.{name}: {path[:120]!r}, expected an absolute path"
    if not section.enabled:
        return
    if over_cri:
        yield (
            "dra.enabled: is on, and runtime.link is cri, which does not tell of a container's "
            "claims; expected link nri"
        )
    longest = max(len(path.encode()) for path in sockets(kubelet_root, driver))
    if longest > _LONGEST_PATH:
        yield (
            f"dra.driver: {driver[:120]!r} makes a socket's path of {longest} bytes below "
            f"kubeletRoot, expected at most {_LONGEST_PATH}"
        )
