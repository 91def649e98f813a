"""Pods that started before anybody watched, and that their node's object does not count yet.

A list of pods that are on their way names nobody who started just before it, and the object of the
node may be older than that start. Such a pod is known to neither. So for a while after each list
the first binding to a node waits until the pods that run there were read, by the annotation that
their own binding wrote (docs/adr/0083-the-first-binding-reads-the-node.md).
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from nri_numa.scheduler.lean import LeanConnection
from nri_numa.scheduler.world import World


class Unseen:
    """Reads the running pods of a node, once after each list of those that are on their way.

    Args:
        connection: to the API server.
        world: told of the pods.
        seconds: from a list, after which whoever started before it is counted by its node.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        connection: LeanConnection,
        world: World,
        *,
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection, self._world = connection, world
        self._seconds, self._clock = seconds, clock
        self._until = float("-inf")
        self._read: set[str] = set()

    def listed(self) -> None:
        """The pods that are on their way were listed: somebody may have started just before."""
        self._until = self._clock() + self._seconds
        self._read = set()  # another one: a node that is being read now is read again

    async def look(self, node: str) -> None:
        """Take in who runs on a node, where that is not known for sure.

        Raises:
            httpx2.HTTPError: nothing came back, or the server says no.
            ConfigError: this is no pod, or its credentials cannot be used.
            OSError: these cannot be read.
            ValueError: what came is no list of pods.
        """
        read = self._read
        if self._clock() >= self._until or node in read:
            return
        chosen = quote(f"spec.nodeName={node},status.phase=Running", safe="")
        for document in await self._connection.objects(f"/api/v1/pods?fieldSelector={chosen}"):
            self._world.runs(document)
        read.add(node)
