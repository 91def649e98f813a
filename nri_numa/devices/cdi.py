"""Files of the Container Device Interface: device files and interfaces by CDI name.

A thread reads them after their directories have changed; no container waits for it.

Source: cncf-tags/container-device-interface, SPEC.md 1.1.0.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from nri_numa.model.workload import MAX_CONTAINER_DEVICES, DeviceFile

MAX_CDI_SPEC_BYTES: Final = 1 << 20
"""Bytes of one file; the file of a node with sixteen GPUs has 100 kB."""
MAX_CDI_SPEC_FILES: Final = 256
MAX_CDI_NAMES: Final = 4096
_MAX_CDI_NAME_CHARS: Final = 256


class CDIDevice(NamedTuple):
    """Devices that a CDI name adds to a container.

    Attributes:
        nodes: device files.
        interfaces: names of network interfaces of the host.
    """

    nodes: tuple[DeviceFile, ...] = ()
    interfaces: tuple[str, ...] = ()


Stamp = tuple[tuple[str, int, int, int], ...]


class CDIRegistry:
    """Devices of all files in some directories; later directories override earlier ones.

    Attributes:
        devices: by name, ``vendor/class=device``; replaced as a whole.
        problems: sentences about files that could not be used.
    """

    def __init__(self, directories: tuple[str, ...]) -> None:
        self._directories = tuple(map(os.path.normpath, directories))
        self._stamp: Stamp | None = None
        self.devices: Mapping[str, CDIDevice] = {}
        self.problems: tuple[str, ...] = ()

    def refresh_specs(self) -> bool:
        """Read all files again if one was added, removed or changed; True if so. Blocks."""
        stamp = tuple(self._find_spec_files())
        if stamp == self._stamp:
            return False
        device_by_name: dict[str, CDIDevice] = {}
        problems: list[str] = []
        for directory in self._directories:
            directory_devices: dict[str, CDIDevice] = {}
            twice: set[str] = set()
            for path, _, size, _ in stamp:
                if os.path.dirname(path) != directory:
                    continue
                try:
                    devices = dict(_read_spec(path, size))
                except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                    problems.append(f"{path}: not used: {error}")
                    continue
                # A name defined twice in one directory is a conflict, and is ignored.
                twice |= directory_devices.keys() & devices.keys()
                directory_devices.update(devices)
            device_by_name.update(
                {name: directory_devices[name] for name in directory_devices if name not in twice}
            )
            problems += [
                f"{directory}: {name} is defined twice: not used" for name in sorted(twice)
            ]
        if len(device_by_name) > MAX_CDI_NAMES:
            problems.append(f"{len(device_by_name)} CDI devices, of which {MAX_CDI_NAMES} are used")
            device_by_name = dict(sorted(device_by_name.items())[:MAX_CDI_NAMES])
        self._stamp, self.devices, self.problems = stamp, device_by_name, tuple(problems)
        return True

    def _find_spec_files(self) -> Iterator[tuple[str, int, int, int]]:
        for directory in self._directories:
            try:
                names = sorted(os.listdir(directory))
            except OSError:
                continue
            count = 0
            for name in names:
                if not name.endswith((".json", ".yaml")) or count >= MAX_CDI_SPEC_FILES:
                    continue
                path = os.path.join(directory, name)
                try:
                    facts = os.stat(path)
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    count += 1
                    yield path, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _read_spec(path: str, size: int) -> Iterator[tuple[str, CDIDevice]]:
    """Read the devices of one file.

    Raises:
        OSError: the file cannot be read.
        ValueError, msgspec.MsgspecError: the file is not a CDI file.
    """
    if size > MAX_CDI_SPEC_BYTES:
        raise ValueError(f"{size} bytes, expected at most {MAX_CDI_SPEC_BYTES}")
    with open(path, "rb") as opened:
        text = opened.read(MAX_CDI_SPEC_BYTES + 1).decode()
    if path.endswith(".json"):
        file = msgspec.json.decode(text, type=_SpecFile)
    else:
        from nri_numa import safe_yaml

        file = msgspec.convert(safe_yaml.parse_yaml12(text), _SpecFile)
    for device in file.devices:
        edits = device.container_edits
        name = f"{file.kind}={device.name}"
        if len(name) <= _MAX_CDI_NAME_CHARS:
            nodes = filter(
                None, map(_resolve_device_node, edits.device_nodes[:MAX_CONTAINER_DEVICES])
            )
            interfaces = (
                net_device.host_interface_name
                for net_device in edits.net_devices[:MAX_CONTAINER_DEVICES]
            )
            yield name, CDIDevice(tuple(nodes), tuple(filter(None, interfaces)))


class _CDIDeviceNode(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None


class _CDINetDevice(msgspec.Struct, frozen=True, rename="camel"):
    host_interface_name: str = ""


class _CDIContainerEdits(msgspec.Struct, frozen=True, rename="camel"):
    device_nodes: tuple[_CDIDeviceNode, ...] = ()
    net_devices: tuple[_CDINetDevice, ...] = ()


class _CDISpecDevice(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    container_edits: _CDIContainerEdits = _CDIContainerEdits()


class _SpecFile(msgspec.Struct, frozen=True):
    """The part of a CDI file that the agent uses."""

    kind: str
    devices: tuple[_CDISpecDevice, ...]


def _resolve_device_node(node: _CDIDeviceNode) -> DeviceFile | None:
    if node.type and node.major is not None and node.minor is not None:
        return DeviceFile(node.type, node.major, node.minor)
    # Missing numbers are those of the host's file.
    try:
        facts = os.stat(node.host_path or node.path)
    except (OSError, ValueError):
        return None
    letter = "b" if stat.S_ISBLK(facts.st_mode) else "c" if stat.S_ISCHR(facts.st_mode) else ""
    if not letter:
        return None
    return DeviceFile(letter, os.major(facts.st_rdev), os.minor(facts.st_rdev))
