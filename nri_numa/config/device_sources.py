"""The section of the configuration about the devices that containers have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case

_MOST_DIRECTORIES: Final = 8


class Devices(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Where containers' CPUs and memory are placed by the devices they have."""

    enabled: Annotated[
        bool,
        Meta(
            description="Find out which devices a container has before it starts, and place its "
            "CPUs and memory beside them. Off, none of the rest is looked at."
        ),
    ] = False
    nodes: Annotated[
        bool,
        Meta(
            description="Device files that the runtime puts into the container: VFIO, RDMA, disks, "
            "NVMe, GPUs and any other that sysfs knows by number."
        ),
    ] = True
    variables: Annotated[
        bool,
        Meta(description="PCIDEVICE_* variables of the SR-IOV network device plugin."),
    ] = True
    nvidia: Annotated[
        bool,
        Meta(
            description="NVIDIA_VISIBLE_DEVICES and NVIDIA's device files, by what its driver says "
            "below /proc/driver/nvidia."
        ),
    ] = True
    cdi: Annotated[
        bool,
        Meta(description="Names of the Container Device Interface, with its files."),
    ] = True
    cdi_directories: Annotated[
        tuple[str, ...],
        Meta(description="Where those files are; a later directory wins over an earlier one."),
    ] = ("/etc/cdi", "/var/run/cdi")
    network: Annotated[
        bool,
        Meta(
            description="Network interfaces in the pod's namespace; needs CAP_SYS_ADMIN and the "
            "host's /run/netns, and 10 MiB of memory for pyroute2."
        ),
    ] = True
    pod_resources: Annotated[
        bool,
        Meta(
            description="The kubelet's PodResources socket, asked once for each pod, for 50 ms; "
            "8 MiB of memory for grpc."
        ),
    ] = True
    count: Annotated[
        bool,
        Meta(
            description="Ask the kubelet how many devices of each extended resource it can give on "
            "each NUMA node, whatever enabled says, for /v1/zones and so for "
            "publish.nodeResourceTopology; twice in four seconds at most, by its PodResources "
            "socket, and only while somebody reads."
        ),
    ] = False


def device_problems(section: Devices) -> Iterator[str]:
    """Every mistake of the section, each ``path: what is wrong, what was expected``."""
    if len(section.cdi_directories) > _MOST_DIRECTORIES:
        yield (
            f"devices.cdiDirectories: {len(section.cdi_directories)} directories, expected at most "
            f"{_MOST_DIRECTORIES}"
        )
    for number, directory in enumerate(section.cdi_directories[:_MOST_DIRECTORIES]):
        if not directory.startswith("/") or "\0" in directory or len(directory) > 4096:
            yield (
                f"devices.cdiDirectories[{number}]: {directory[:120]!r}, expected an absolute path"
            )
