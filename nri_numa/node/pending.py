"""Updates that no reply could carry yet."""

from __future__ import annotations

from collections.abc import Iterable

from nri_numa.engine.values.workload import ContainerUpdate


class Pending:
    """Updates that wait for a reply to ride on, the newest for each container.

    Some of them *only ride*: the cgroup has been written already, and nothing but the runtime's own
    record is behind. Nobody needs to hurry for those.
    """

    def __init__(self) -> None:
        self._updates: dict[str, ContainerUpdate] = {}
        self._riding: set[str] = set()

    @property
    def urgent(self) -> bool:
        """Whether some container does not have what it should."""
        return len(self._updates) > len(self._riding)

    def is_urgent(self, container_id: str) -> bool:
        """Whether this container does not have what it should, and will be told."""
        return container_id in self._updates and container_id not in self._riding

    def remember(self, updates: Iterable[ContainerUpdate]) -> None:
        """These have to reach their containers; they take the place of older ones."""
        for update in updates:
            self._updates[update.container_id] = update
            self._riding.discard(update.container_id)

    def ride(self, updates: Iterable[ContainerUpdate]) -> None:
        """The cgroups are written; the runtime is told with the next reply."""
        for update in updates:
            self._updates[update.container_id] = update
            self._riding.add(update.container_id)

    def put_back(self, update: ContainerUpdate) -> None:
        """It could not be sent; a newer one for the same container wins."""
        self._updates.setdefault(update.container_id, update)

    def get(self, container_id: str) -> ContainerUpdate | None:
        """What waits for one container."""
        return self._updates.get(container_id)

    def take(self, container_id: str) -> ContainerUpdate | None:
        """What waits for one container; it waits no more."""
        update = self._updates.pop(container_id, None)
        if update is not None:
            self._riding.discard(container_id)
        return update

    def take_urgent(self) -> tuple[ContainerUpdate, ...]:
        """All that cannot wait; whoever takes them must send them."""
        urgent = tuple(u for i, u in self._updates.items() if i not in self._riding)
        self._updates = {i: u for i, u in self._updates.items() if i in self._riding}
        return urgent

    def clear(self) -> None:
        """The runtime has been told everything."""
        self._updates.clear()
        self._riding.clear()

    def merged(self, updates: tuple[ContainerUpdate, ...]) -> tuple[ContainerUpdate, ...]:
        """The updates of a reply, with all that waited; those of the reply are newer."""
        if not self._updates:
            return updates
        merged = self._updates | {u.container_id: u for u in updates}
        self.clear()
        return tuple(merged.values())
