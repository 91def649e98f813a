"""Pods that started before anybody watched, and that their node's object does not count yet.

A list of pods that are on their way names nobody who started just before it, and the object of the
node may be older than that start. Such a pod is known to neither. So for a while after each list
the first binding to a node waits until the pods that run there were read, by the annotation that
their own binding wrote (docs/adr/0049-held-until-the-node-counts-it.md). Bindings that come
while they are being read wait for the same answer (docs/adr/0049-held-until-the-node-counts-it.md).
"""

from __future__ import annotations

import asyncio
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
        timeout: seconds for one reading: who waits for somebody else's does so for no longer.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        connection: LeanConnection,
        world: World,
        *,
        seconds: float,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection, self._world = connection, world
        self._seconds, self._timeout, self._clock = seconds, timeout, clock
        self._until = float("-inf")
        self._read: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}

    def listed(self) -> None:
        """The pods that are on their way were listed: somebody may have started just before."""
        self._until = self._clock() + self._seconds
        # Others: what was asked before this list may lack who started until it.
        self._read, self._reading = set(), {}

    async def look(self, node: str) -> None:
        """Take in who runs on a node, where that is not known for sure.

        Raises:
            TimeoutError: no answer within the seconds of one reading.
            httpx2.HTTPError: nothing came back, or the server says no.
            ConfigError: this is no pod, or its credentials cannot be used.
            OSError: these cannot be read.
            ValueError: what came is no list of pods.
        """
        # Again where another list came meanwhile: then the answer was to an older question.
        while self._clock() < self._until and node not in self._read:
            # Whoever is cancelled takes the answer from nobody else.
            await asyncio.shield(self._reading.get(node) or self._begin(node))

    def _begin(self, node: str) -> asyncio.Task[None]:
        """Begin to read a node.

        Any answer to a question that was sent after the list will do for all: who started before
        the list is in it, and who starts after it is told by the watch.
        """
        read, reading = self._read, self._reading

        def over(task: asyncio.Task[None]) -> None:
            del reading[node]  # after a failure the next one asks anew
            if not task.cancelled():
                task.exception()  # all who waited may be gone

        task = reading[node] = asyncio.create_task(
            self._take_in(node, read), name=f"who runs on {node}"
        )
        task.add_done_callback(over)
        return task

    async def _take_in(self, node: str, read: set[str]) -> None:
        chosen = quote(f"spec.nodeName={node},status.phase=Running", safe="")
        async with asyncio.timeout(self._timeout):
            found = await self._connection.objects(f"/api/v1/pods?fieldSelector={chosen}")
        for document in found:
            self._world.runs(document)
        read.add(node)
