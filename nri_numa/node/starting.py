"""Containers on their way from creation to the end of their start.

A runtime takes down an update of such a container and applies it to nobody: containerd writes its
own record, and the OCI runtime goes on with the record of before (container_start.go and
container_update_resources.go, the same in 1.7 and 2.1). Its events leave two moments at which the
cgroup can still be put right before the first instruction: at StartContainer the cgroup exists and
the program does not run yet; from then to PostStartContainer every change is written at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nri_numa.engine.values.workload import Container, ContainerAdjustment
from nri_numa.machine.cgroups import CgroupPlace, Written

Write = Callable[[CgroupPlace, str, str], Written]
"""Gives the cgroup of a container kernel lists of CPUs and memory nodes; empty leaves one."""


@dataclass(slots=True)
class _Start:
    """One container.

    Attributes:
        cpus: kernel list that its cgroup was made with, or was given since; empty for all.
        mems: the same of its memory nodes.
    """

    cpus: str
    mems: str


class Starts:
    """Who is being started, and with which CPUs.

    Args:
        write: writes a cgroup; None where that is somebody else's business (tests, `observe`).

    Attributes:
        begun: ids of those whose cgroup exists, as far as events tell.
    """

    def __init__(self, write: Write | None = None) -> None:
        self._write = write
        self._starts: dict[str, _Start] = {}
        self.begun: dict[str, None] = {}

    def __len__(self) -> int:
        """How many are being started."""
        return len(self._starts)

    def __contains__(self, container_id: object) -> bool:
        """Whether this one is being started."""
        return container_id in self._starts

    def created(self, container: Container, answer: ContainerAdjustment) -> None:
        """A container is created with what we answered; its cgroup is made later."""
        mems = answer.mems or container.resources.mems
        self._starts[container.id] = _Start(answer.cpus, mems)

    def found(self, container: Container) -> None:
        """One that was created before we were told of it; it may be anywhere in its start."""
        has = container.resources
        self._starts[container.id] = _Start(has.cpus, has.mems)
        self.begun[container.id] = None

    def begin(self, container_id: str) -> None:
        """Its cgroup is there, its program does not run yet."""
        if container_id in self._starts:
            self.begun[container_id] = None

    def end(self, container_id: str) -> None:
        """It runs, stopped or is gone."""
        self._starts.pop(container_id, None)
        self.begun.pop(container_id, None)

    def ids(self) -> Iterator[str]:
        """Who is being started."""
        return iter(self._starts)

    def clear(self) -> None:
        """Forget all."""
        self._starts.clear()
        self.begun.clear()

    def settle(
        self, container_id: str, place: CgroupPlace, cpus: str, every: str, mems: str = ""
    ) -> Written:
        """Make the cgroup as it is meant, if that is not what it was made with.

        Args:
            container_id: of a container whose start has begun; others are passed over.
            place: of its cgroup.
            cpus: kernel list that is meant; empty for as many as there are.
            every: kernel list to write for *as many as there are*.
            mems: kernel list of memory nodes that is meant; empty leaves them.
        """
        start = self._starts.get(container_id)
        if start is None or container_id not in self.begun:
            return Written()
        new_cpus = "" if start.cpus == cpus else cpus or every
        new_mems = "" if start.mems == mems else mems
        if not (new_cpus or new_mems):
            return Written()
        if self._write is None:
            return Written()
        written = self._write(place, new_cpus, new_mems)
        if not (written.problem or written.missing):
            start.cpus, start.mems = cpus, mems or start.mems
        return written
