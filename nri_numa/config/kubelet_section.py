"""The section of the configuration about the kubelet on this node."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case
from nri_numa.engine.values.kubelet import KubeletOverride


class Kubelet(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The kubelet on this node, and who may take a container away from it."""

    override: Annotated[
        KubeletOverride,
        Meta(
            description="Whether a pod may take a container away from the kubelet's static "
            "policies by listing CPUs or memory nodes itself: never, or annotated."
        ),
    ] = KubeletOverride.NEVER
    config: Annotated[
        Annotated[str, Meta(min_length=1)],
        Meta(
            description="File of the kubelet's configuration (--config): a path, auto to take it "
            "from the command line of the kubelet that runs, or off. What it reserves becomes ours "
            "where reservedCPUs, strictReserved and reservedMemory are not set."
        ),
    ] = "auto"
    config_dir: Annotated[
        str,
        Meta(
            description="Directory of drop-ins for it (--config-dir); with config: auto the "
            "command line tells."
        ),
    ] = ""
