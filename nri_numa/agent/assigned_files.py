"""Files with a container's CPUs and memory nodes; a variable has only the values at its start.

The names are those of KEP-6369 (Pod Assigned Resource Exposure). A container gets a directory as a
mount, not its files: a file is replaced as a whole, and a mount of it would stay with the old one.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from nri_numa.model.workload import Container, ContainerAdjustment
from nri_numa.observe.logs import get_logger
from nri_numa.store.files import remove_flat_directory

if TYPE_CHECKING:
    from nri_numa.agent.current_state import CurrentState
    from nri_numa.agent.loop import Clock
    from nri_numa.engine.state import Allocation

log = get_logger("assigned")

ASSIGNED_DIRECTORY: Final = "assigned"
CONTAINER_MOUNT_PATH: Final = "/run/numa"
"""Directory of the files in a container."""
ASSIGNED_FILE_NAMES: Final = ("assigned.cpuset", "assigned.memset")
_CONTAINER_ID_PATTERN: Final = re.compile(r"\w[\w.-]*")


class AssignedFiles:
    """The files of each container that was created with them, in the state directory."""

    def __init__(self, state_dir: str, current: CurrentState, clock: Clock) -> None:
        self._root = os.path.join(state_dir, ASSIGNED_DIRECTORY)
        self._current, self._clock = current, clock
        self._due = False
        # By container id; the texts that an earlier process wrote are not known.
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        self._written: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        current.subscribe(self._schedule_refresh)

    def extend(
        self, allocation: Allocation, container: Container, adjustment: ContainerAdjustment
    ) -> ContainerAdjustment:
        """Add the mount of a pinned container's files."""
        if not allocation.is_pinned or not _CONTAINER_ID_PATTERN.fullmatch(allocation.container_id):
            return adjustment
        path = os.path.join(self._root, allocation.container_id)
        try:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o755)  # noqa: S103  # any user of the container may read
            self._write_container_files(allocation)
        except OSError as error:
            log.warning("assigned files not mounted", directory=path, problem=str(error))
            return adjustment
        return replace(adjustment, mounts=(*adjustment.mounts, (CONTAINER_MOUNT_PATH, path)))

    def _schedule_refresh(self) -> None:
        if not self._due:
            self._due = True
            self._clock.call_soon(self.refresh)

    def refresh(self) -> None:
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

    def _write_container_files(self, allocation: Allocation) -> None:
        texts = (
            self._current.cpus_of(allocation) or str(allocation.foreign_cpus),
            str(allocation.mems),
        )
        if self._written.get(allocation.container_id) == texts:
            return
        for name, text in zip(ASSIGNED_FILE_NAMES, texts, strict=True):
            path = os.path.join(self._root, allocation.container_id, name)
            new_path = f"{path}.new"
            with open(new_path, "w", encoding="ascii") as file:
                file.write(f"{text}\n")
            os.chmod(new_path, 0o644)
            os.replace(new_path, path)
        self._written[allocation.container_id] = texts


def remove_assigned_files(state_dir: str) -> None:
    """Remove the files; the directories stay, since running containers have them mounted."""
    for folder, _, names in os.walk(os.path.join(state_dir, ASSIGNED_DIRECTORY)):
        for name in names:
            os.unlink(os.path.join(folder, name))
