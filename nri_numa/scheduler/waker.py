"""Wakes pods that were refused, when room appears.

kube-scheduler tries a pod that an extender refused again at events of its own kinds, among them a
changed annotation of a Node, and not at those of a custom resource. One touch wakes all of them, so
one at a time is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httpx2
from lightkube.core.exceptions import ConfigError
from lightkube.types import PatchType

from nri_numa.kube_client import Connection
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.kinds import RawNode

log = get_logger("scheduler")

ROOM: Final = "room"
"""The annotation's key, below the prefix; its value is a number that is another one each time."""
REMEMBERED: Final = 600.0
"""Seconds in which a pod that was refused is thought to wait; it is asked about every 5 minutes."""
_MOST: Final = 10_000


class Waker:
    """Touches Nodes.

    Args:
        connection: to the API server.
        prefix: of the annotation.
        interval: least seconds between two touches; 0 switches it off.
        clock: seconds that only grow.
        wall: Unix time in seconds.
        woken: told of each touch.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        prefix: str,
        interval: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
        woken: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection = connection
        self._prefix, self._interval = prefix, interval
        self._clock, self._wall, self._woken = clock, wall, woken
        self._waiting: dict[str, float] = {}
        self._node = ""
        self._wake = asyncio.Event()

    def refused(self, uid: str) -> None:
        """A pod found no node."""
        self._waiting.pop(uid, None)
        if len(self._waiting) >= _MOST:
            self._waiting.pop(next(iter(self._waiting)))
        self._waiting[uid] = self._clock()

    def settled(self, uid: str) -> None:
        """A pod is bound or gone."""
        self._waiting.pop(uid, None)

    def grown(self, node: str) -> None:
        """A node has more room than before."""
        if self._interval and self._waits():
            self._node = node
            self._wake.set()

    def anew(self, node: str) -> None:
        """We answer from now on: others may have refused pods before, and they told us nothing."""
        if self._interval and node:
            self._node = node
            self._wake.set()

    def _waits(self) -> bool:
        now = self._clock()
        while self._waiting:
            uid, at = next(iter(self._waiting.items()))
            if now - at <= REMEMBERED:
                return True
            del self._waiting[uid]
        return False

    async def run(self, leads: Callable[[], bool]) -> None:
        """Touch Nodes until cancelled, while we lead."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if leads():
                await self._touch(self._node)
            await asyncio.sleep(self._interval)

    async def _touch(self, node: str) -> None:
        value = str(int(self._wall() * 1000))
        body = {"metadata": {"annotations": {f"{self._prefix}/{ROOM}": value}}}
        try:
            client: Any = await self._connection.client()
            await client.patch(RawNode, node, body, patch_type=PatchType.MERGE)
        except (httpx2.HTTPError, ConfigError, OSError, ValueError) as error:
            log.warning("refused pods are not woken", node=node, problem=str(error)[:300])
            return
        self._woken()
        log.debug("refused pods are woken", node=node)
