"""Files with a container's CPUs and memory nodes; a variable has only the values at its start.

The names are those of KEP-6369 (Pod Assigned Resource Exposure). ``assigned.json`` has CPUs and
devices by NUMA node, so that each process of a job can run beside its own device. A container gets
a directory as a mount, not its files: a file is replaced as a whole, and a mount of it would stay
with the old one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import Container, ContainerAdjustment, DeviceRequest
from nri_numa.observe.logs import get_logger
from nri_numa.store.files import remove_flat_directory

if TYPE_CHECKING:
    from nri_numa.agent.current_state import CurrentState
    from nri_numa.engine.state import Allocation

log = get_logger("assigned")

ASSIGNED_DIRECTORY: Final = "assigned"
CONTAINER_MOUNT_PATH: Final = "/run/numa"
"""Directory of the files in a container."""
ASSIGNED_FILE_NAMES: Final = ("assigned.cpuset", "assigned.memset", "assigned.json")
_CONTAINER_ID_PATTERN: Final = re.compile(r"\w[\w.-]*")


class AssignedNode(msgspec.Struct):
    """CPUs of a container on one NUMA node, as a kernel list, and the ids of its devices there."""

    cpus: str = ""
    devices: dict[str, list[str]] = {}


_decode_nodes: Final = msgspec.json.Decoder(dict[int, AssignedNode]).decode


class AssignedFiles:
    """The files of each container that was created with them, in the state directory."""

    def __init__(self, state_dir: str, current: CurrentState) -> None:
        self._root = os.path.join(state_dir, ASSIGNED_DIRECTORY)
        self._current = current
        self._due = False
        # By container id; the texts that an earlier process wrote are not known.
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        self._written: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        self._nodes: dict[str, Mapping[int, AssignedNode]] = {}
        current.subscribe(self._schedule_refresh)

    def extend_adjustment(
        self, allocation: Allocation, container: Container, adjustment: ContainerAdjustment
    ) -> ContainerAdjustment:
        """Add the mount of a pinned container's files."""
        if not allocation.is_pinned or not _CONTAINER_ID_PATTERN.fullmatch(allocation.container_id):
            return adjustment
        path = os.path.join(self._root, allocation.container_id)
        try:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o755)  # noqa: S103  # any user of the container may read
            self._nodes[allocation.container_id] = _nodes_with_devices(container.devices)
            self._write_container_files(allocation)
        except OSError as error:
            log.warning("assigned files not mounted", directory=path, problem=str(error))
            return adjustment
        return replace(adjustment, mounts=(*adjustment.mounts, (CONTAINER_MOUNT_PATH, path)))

    def _schedule_refresh(self) -> None:
        if not self._due:
            self._due = True
            self._current.clock.call_soon(self.refresh_files)

    def refresh_files(self) -> None:
        """Update all files, and remove those of ended containers."""
        self._due = False
        if not self._current.synchronized:
            return  # containers unknown to the checkpoint may run
        allocations = self._current.state.allocations
        for container_id in tuple(self._written):
            allocation = allocations.get(container_id)
            try:
                if allocation is not None and not allocation.reserved_at:
                    self._write_container_files(allocation)
                    continue
                remove_flat_directory(os.path.join(self._root, container_id))
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("assigned files not updated", problem=str(error))
                continue
            del self._written[container_id]
            self._nodes.pop(container_id, None)

    def _write_container_files(self, allocation: Allocation) -> None:
        directory = os.path.join(self._root, allocation.container_id)
        nodes = self._nodes.get(allocation.container_id)
        if nodes is None:
            nodes = self._nodes[allocation.container_id] = _read_nodes(directory)
        cpus = self._current.cpus_of(allocation) or str(allocation.foreign_cpus)
        cpus_by_node = self._current.machine.topology.cpus_by_node(CPUSet.parse(cpus))
        document = {
            i: replace(nodes.get(i, AssignedNode()), cpus=str(cpus_by_node.get(i, "")))
            for i in sorted({*cpus_by_node, *nodes})
        }
        texts = (cpus, str(allocation.mems), msgspec.json.encode(document).decode())
        if self._written.get(allocation.container_id) == texts:
            return
        for name, text in zip(ASSIGNED_FILE_NAMES, texts, strict=True):
            path = os.path.join(directory, name)
            new_path = f"{path}.new"
            with open(new_path, "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
            os.chmod(new_path, 0o644)
            os.replace(new_path, path)
        self._written[allocation.container_id] = texts


def _nodes_with_devices(requests: Iterable[DeviceRequest]) -> Mapping[int, AssignedNode]:
    """List device ids by NUMA node and resource; a device of several NUMA nodes is on each."""
    nodes: dict[int, AssignedNode] = {}
    for request in requests:
        for device in request.devices:
            for i in device.numa_nodes:
                devices = nodes.setdefault(i, AssignedNode()).devices
                devices.setdefault(request.resource, []).append(device.id)
    return nodes


def _read_nodes(directory: str) -> Mapping[int, AssignedNode]:
    """Read the devices that an earlier process wrote; none without a readable file."""
    try:
        with open(os.path.join(directory, ASSIGNED_FILE_NAMES[2]), "rb") as file:
            return {i: node for i, node in _decode_nodes(file.read()).items() if node.devices}
    except (OSError, msgspec.MsgspecError):
        return {}


def remove_assigned_files(state_dir: str) -> None:
    """Remove the files; the directories stay, since running containers have them mounted."""
    for folder, _, names in os.walk(os.path.join(state_dir, ASSIGNED_DIRECTORY)):
        for name in names:
            os.unlink(os.path.join(folder, name))
