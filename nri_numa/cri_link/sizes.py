"""How large containers are by the runtime's word, and what of a change somebody else asked for.

CRI tells nobody that a container's resources were changed, as the kubelet does for a resize in
place. So running containers are looked at again, a few at a time, and compared with what was seen
of them before; what we sent ourselves is no change that anybody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from nri_numa.cri.client import CRIResources
from nri_numa.nri.wire.pb import nri_pb2 as pb

AT_ONCE: Final = 8
"""Containers that are looked at again with each listing."""


class Size(NamedTuple):
    """CPU shares, quota and period, and bytes of memory; 0 where nothing is told."""

    shares: int = 0
    quota: int = 0
    period: int = 0
    limit: int = 0


class Change(NamedTuple):
    """A change of a container: what somebody asked for, and its resources before that."""

    asked: pb.LinuxResources
    before: pb.LinuxResources


def size_of(resources: pb.LinuxResources) -> Size:
    """The size in a message."""
    cpu = resources.cpu
    return Size(cpu.shares.value, cpu.quota.value, cpu.period.value, resources.memory.limit.value)


class Sizes:
    """What was seen of the containers that live."""

    def __init__(self) -> None:
        self._seen: dict[str, Size] = {}
        self._sent: dict[str, int] = {}
        self._changes: dict[str, int] = {}
        self._round: list[str] = []

    def seen(self, container_id: str, resources: pb.LinuxResources) -> None:
        """A container was decided about as it was."""
        self._seen[container_id] = size_of(resources)

    def sent(self, container_id: str, resources: CRIResources) -> None:
        """An update of ours was applied; of a size only the quota is ever ours."""
        if resources.cpu_quota:
            self._sent[container_id] = resources.cpu_quota

    def forget(self, container_id: str) -> None:
        """A container is gone."""
        self._seen.pop(container_id, None)
        self._sent.pop(container_id, None)
        self._changes.pop(container_id, None)

    def changes(self, container_id: str) -> int:
        """How many changes of a container there were."""
        return self._changes.get(container_id, 0)

    def turn(self, whom: Iterable[str]) -> list[str]:
        """At most `AT_ONCE` of these to look at again now, so that everybody has a turn."""
        there = list(whom)
        if not self._round:
            self._round = there
        now, self._round = self._round[:AT_ONCE], self._round[AT_ONCE:]
        known = set(there)
        return [container_id for container_id in now if container_id in known]

    def changed(self, container_id: str, resources: pb.LinuxResources) -> Change | None:
        """What somebody asked for since the container was last seen; None for nothing.

        Args:
            container_id: whose.
            resources: as the runtime has them now.
        """
        now = size_of(resources)
        before = self._seen.get(container_id)
        self._seen[container_id] = now
        if before is None or before == now:
            return None
        asked = pb.LinuxResources()
        if now.shares > 0 and now.shares != before.shares:
            asked.cpu.shares.value = now.shares
        # Nobody but us lifts a quota; one that is there again was asked for, were it the same.
        if now.quota > 0 and now.quota != self._sent.get(container_id, before.quota):
            self._sent.pop(container_id, None)
            asked.cpu.quota.value = now.quota
            asked.cpu.period.value = now.period
        if now.limit > 0 and now.limit != before.limit:
            asked.memory.limit.value = now.limit
        if not asked.ByteSize():
            return None
        self._changes[container_id] = self.changes(container_id) + 1
        was = pb.LinuxResources()
        was.CopyFrom(resources)
        was.cpu.shares.value, was.cpu.quota.value, was.cpu.period.value = before[:3]
        was.memory.limit.value = before.limit
        return Change(asked, was)
