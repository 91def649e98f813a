"""Files of the Container Device Interface: which device files and interfaces a CDI name stands for.

They are read in a thread, when their directories changed, and never while a container waits. What a
runtime would refuse is read leniently: a name that the runtime does not know fails the container by
itself.

Source: cncf-tags/container-device-interface, SPEC.md 1.1.0.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nri_numa.model.workload import MOST_DEVICES, DeviceNode

MAX_BYTES: Final = 1 << 20
"""Of one file; that of a node with sixteen GPUs is 100 kB."""
MOST_FILES: Final = 256
MOST_NAMES: Final = 4096
_LONGEST_NAME: Final = 256


class CDIDevice(NamedTuple):
    """What a CDI name gives to a container.

    Attributes:
        nodes: device files.
        interfaces: names of network interfaces of the host.
    """

    nodes: tuple[DeviceNode, ...] = ()
    interfaces: tuple[str, ...] = ()


Stamp = tuple[tuple[str, int, int, int], ...]


class CDIRegistry:
    """The devices of all files in some directories, the later directory winning.

    Attributes:
        devices: by name, ``vendor/class=device``; replaced as a whole.
        problems: sentences about files that could not be used.
    """

    def __init__(self, directories: tuple[str, ...]) -> None:
        self._directories = directories
        self._stamp: Stamp | None = None
        self.devices: Mapping[str, CDIDevice] = {}
        self.problems: tuple[str, ...] = ()

    def refresh(self) -> bool:
        """Read everything again if a file came, went or changed; says whether it did. Blocks."""
        stamp = tuple(self._files())
        if stamp == self._stamp:
            return False
        found: dict[str, CDIDevice] = {}
        problems: list[str] = []
        for directory in self._directories:
            here: dict[str, CDIDevice] = {}
            twice: set[str] = set()
            for path, _, size, _ in stamp:
                if os.path.dirname(path) != directory:
                    continue
                try:
                    devices = dict(_read(path, size))
                except (OSError, ValueError, RecursionError) as error:
                    problems.append(f"{path}: not used: {error}")
                    continue
                # The same name twice on one level is a conflict, and stands for nothing.
                twice |= here.keys() & devices.keys()
                here.update(devices)
            found.update({name: here[name] for name in here if name not in twice})
            problems += [
                f"{directory}: {name} is defined twice: not used" for name in sorted(twice)
            ]
        if len(found) > MOST_NAMES:
            problems.append(f"{len(found)} CDI devices, of which {MOST_NAMES} are used")
            found = dict(sorted(found.items())[:MOST_NAMES])
        self._stamp, self.devices, self.problems = stamp, found, tuple(problems)
        return True

    def _files(self) -> Iterator[tuple[str, int, int, int]]:
        for directory in self._directories:
            try:
                names = sorted(os.listdir(directory))
            except OSError:
                continue
            count = 0
            for name in names:
                if not name.endswith((".json", ".yaml")) or count >= MOST_FILES:
                    continue
                path = os.path.join(directory, name)
                try:
                    facts = os.stat(path)
                except OSError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    count += 1
                    yield path, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _read(path: str, size: int) -> Iterator[tuple[str, CDIDevice]]:
    """The devices of one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no CDI file.
    """
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes, expected at most {MAX_BYTES}")
    with open(path, "rb") as file:
        text = file.read(MAX_BYTES + 1).decode()
    document = json.loads(text) if path.endswith(".json") else _yaml(text)
    kind = document.get("kind") if isinstance(document, dict) else None
    devices = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(kind, str) or not isinstance(devices, list):
        raise ValueError("expected a mapping with kind (vendor/class) and a list of devices")
    for device in devices:
        name = device.get("name") if isinstance(device, dict) else None
        whole = f"{kind}={name}"
        if isinstance(name, str) and len(whole) <= _LONGEST_NAME:
            yield whole, _device(device.get("containerEdits"))


def _yaml(text: str) -> Any:
    from nri_numa import safe_yaml

    try:
        return safe_yaml.parse(text)
    except safe_yaml.YAMLProblem as problem:
        raise ValueError(str(problem)) from problem


def _device(edits: Any) -> CDIDevice:
    nodes: list[DeviceNode] = []
    interfaces: list[str] = []
    for item in _mappings(edits, "deviceNodes"):
        node = _node(item)
        if node is not None:
            nodes.append(node)
    for item in _mappings(edits, "netDevices"):
        name = item.get("hostInterfaceName")
        if isinstance(name, str):
            interfaces.append(name)
    return CDIDevice(tuple(nodes), tuple(interfaces))


def _mappings(edits: Any, key: str) -> Iterator[dict[Any, Any]]:
    items = edits.get(key) if isinstance(edits, dict) else None
    if isinstance(items, list):
        yield from (item for item in items[:MOST_DEVICES] if isinstance(item, dict))


def _node(item: dict[Any, Any]) -> DeviceNode | None:
    path, host = item.get("path"), item.get("hostPath")
    host = host if isinstance(host, str) and host else path
    type, major, minor = item.get("type"), item.get("major"), item.get("minor")
    if not isinstance(host, str):
        return None
    if isinstance(type, str) and isinstance(major, int) and isinstance(minor, int):
        return DeviceNode(type, major, minor)
    # Numbers that are left out are those of the host's file.
    try:
        facts = os.stat(host)
    except (OSError, ValueError):
        return None
    letter = "b" if stat.S_ISBLK(facts.st_mode) else "c" if stat.S_ISCHR(facts.st_mode) else ""
    if not letter:
        return None
    return DeviceNode(letter, os.major(facts.st_rdev), os.minor(facts.st_rdev))
