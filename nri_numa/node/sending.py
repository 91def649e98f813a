"""How an update that no request asked for reaches its container.

From NRI 0.12.1 on the runtime is called. Before that the only safe call is a second registration,
which is dear, and can hang containerd 2.1 for good when a sandbox is removed in the same moment. So
there the cgroup is written, and the runtime, whose record is behind until then, is told with the
next reply. Only where cgroups cannot be written a registration is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from nri_numa.engine.values.workload import ContainerUpdate
from nri_numa.machine.cgroups import CgroupPlace, CgroupWriter
from nri_numa.node.agent import Agent
from nri_numa.observe.logs import get_logger

log = get_logger("daemon")

AT_ONCE: Final = 25
"""Cgroups written in one go, each some tens of microseconds."""
PENDING_WAIT: Final = 2
"""Rounds of housekeeping that an update waits for a reply before it is pushed by itself."""


class Pushed(Protocol):
    """What became of a push; see `nri_numa.nri.registration.PushResult`."""

    @property
    def ok(self) -> bool:
        """The runtime took it."""
        ...

    @property
    def detail(self) -> str:
        """Why not."""
        ...


Push = Callable[[Sequence[ContainerUpdate]], Awaitable[Pushed]]


class Sent(msgspec.Struct, frozen=True):
    """All cgroups are written."""

    ok: bool = True
    detail: str = ""


class Sender:
    """Sends updates by the way that is safe.

    Args:
        agent: knows what is meant and where cgroups are; carries what rides on replies.
        writer: writes cgroups.
        push: asks the runtime.
        callable_at_will: whether the runtime can be called at any moment.
    """

    def __init__(
        self,
        agent: Agent,
        writer: CgroupWriter,
        push: Push,
        callable_at_will: Callable[[], bool],
    ) -> None:
        self._agent = agent
        self._writer = writer
        self._push = push
        self._callable = callable_at_will

    async def send(self, updates: Sequence[ContainerUpdate]) -> Pushed:
        """Send updates, at most one for each container; what changed meanwhile is left out."""
        if self._callable():
            return await self._push(updates)
        left: list[ContainerUpdate] = []
        for number, update in enumerate(updates):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            if self._agent.is_overtaken(update):
                continue
            if self._written(update):
                self._agent.ride(update)
            else:
                left.append(update)
        return await self._push(left) if left else Sent()

    async def alone(self, updates: Sequence[ContainerUpdate]) -> Pushed:
        """Write cgroups while the runtime cannot be asked.

        Its own record is right: somebody else changed the cgroup. What only it can write (CPU
        limits, memory limits) fails.
        """
        failed: list[str] = []
        for number, update in enumerate(updates):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            if not self._agent.is_overtaken(update) and not self._written(update):
                failed.append(update.container_id[:12])
        if not failed:
            return Sent()
        return Sent(ok=False, detail=f"not written, and no runtime to ask: {', '.join(failed[:8])}")

    def _written(self, update: ContainerUpdate) -> bool:
        if update.cpu_quota is not None or update.cpu_shares is not None:
            return False
        if update.memory_limit is not None:
            return False
        place = self._agent.places.get(update.container_id, CgroupPlace())
        return not self._writer.write(place, update.cpus, update.mems).problem


class PendingPush:
    """Pushes what has waited long enough for a reply to ride on.

    Args:
        agent: holds what waits.
        sender: sends it.
    """

    def __init__(self, agent: Agent, sender: Sender) -> None:
        self._agent = agent
        self._sender = sender
        self._rounds = 0
        self._pushing: asyncio.Task[None] | None = None

    def round(self, *, active: bool) -> None:
        """Start a push of what has waited long enough; it may wait for a quiet moment itself."""
        if self._pushing is not None:
            if not self._pushing.done():
                return
            self._pushing = None
        if not self._agent.has_pending or not active:
            self._rounds = 0
            return
        self._rounds += 1
        if self._rounds < PENDING_WAIT:
            return
        self._rounds = 0
        self._pushing = asyncio.create_task(self._push(), name="push")

    async def _push(self) -> None:
        updates = self._agent.take_pending()
        result = await self._sender.send(updates)
        if result.ok:
            self._agent.overtaken(updates)
            self._agent.concern([u.container_id for u in updates], 0)
        else:
            log.warning("updates not pushed", count=len(updates), detail=result.detail)
            self._agent.put_back(updates)
