"""NVIDIA's GPUs: what ``NVIDIA_VISIBLE_DEVICES`` and device files of major 195 mean.

The driver makes its device files by mknod, so sysfs does not know their numbers
(opencontainers/runc #3708); its own directory in /proc joins them with PCI addresses. Reading that
may wake a GPU, so it is done in a thread, at start and when somebody names a GPU that is not known.

Source: NVIDIA/open-gpu-kernel-modules, ``nv-procfs.c``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from nri_numa.machine.pci import PCI_ADDRESS

MAJOR: Final = 195
_CONTROL_MINORS: Final = (254, 255)
"""nvidia-modeset and nvidiactl, which belong to all GPUs."""
NOTHING: Final = frozenset(("", "void", "none"))
ALL: Final = "all"
"""Images set it for themselves; it says nothing about the pod."""

_MOST_GPUS: Final = 64


class GPUs(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a machine, by what they are called.

    Attributes:
        addresses: PCI addresses in ascending order, which is the order of indices.
        by_uuid: ``GPU-…``, in lower case, to PCI address.
        by_minor: minor number of the device file to PCI address.
    """

    addresses: tuple[str, ...] = ()
    by_uuid: Mapping[str, str] = msgspec.field(default_factory=dict)
    by_minor: Mapping[int, str] = msgspec.field(default_factory=dict)

    def of_minor(self, minor: int) -> str | None:
        """The GPU of a device file; None for control devices and unknown ones."""
        return None if minor in _CONTROL_MINORS else self.by_minor.get(minor)

    def of_name(self, name: str) -> str | None:
        """The GPU that a UUID or an index names; None where it is not known.

        ``MIG-GPU-<uuid>/<instance>/…`` and ``<index>:<instance>`` are parts of the GPU they name.
        The newer ``MIG-<uuid>`` does not say whose part it is. ``::N`` is a replica (time slicing).
        """
        name = name.strip().lower().partition("::")[0]
        name = name.removeprefix("mig-") if name.startswith("mig-gpu-") else name
        name = name.partition("/")[0]
        if name.startswith("gpu-"):
            return self.by_uuid.get(name)
        index = name.partition(":")[0]
        if index.isascii() and index.isdigit() and len(index) <= 3:
            return self.addresses[int(index)] if int(index) < len(self.addresses) else None
        return None


def read_gpus(root: str) -> GPUs:
    """Read what the driver says below ``proc/driver/nvidia``; without the driver there is none."""
    directory = os.path.join(root, "proc", "driver", "nvidia", "gpus")
    try:
        names = sorted(name.lower() for name in os.listdir(directory))[:_MOST_GPUS]
    except OSError:
        return GPUs()
    addresses = tuple(name for name in names if PCI_ADDRESS.fullmatch(name))
    by_uuid: dict[str, str] = {}
    by_minor: dict[int, str] = {}
    for address in addresses:
        facts = _information(os.path.join(directory, address, "information"))
        uuid, minor = facts.get("gpu uuid", "").lower(), facts.get("device minor", "")
        if uuid.startswith("gpu-") and "?" not in uuid:  # unknown before the first use
            by_uuid[uuid] = address
        if minor.isascii() and minor.isdigit() and len(minor) <= 3:
            by_minor[int(minor)] = address
    return GPUs(addresses=addresses, by_uuid=by_uuid, by_minor=by_minor)


def _information(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            text = file.read(8192).decode("utf-8", "replace")
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            facts[key.strip().lower()] = value.strip()
    return facts
