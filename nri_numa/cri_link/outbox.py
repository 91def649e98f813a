"""Updates on their way to the runtime, each a call of its own.

CRI has no call for several containers, and the runtime starts a process for each (runc, crun), so
that one takes tens of milliseconds. For each container at most one call is under way, so the newest
values arrive last; what comes meanwhile is put together and sent after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec.structs import replace

from nri_numa.cri.client import CRIResources, UpdateFailed
from nri_numa.errors import RuntimeUnavailable

AT_ONCE: Final = 4
"""Calls for neighbours under way; each is a process of the runtime's, on a node that works."""


class Updates(Protocol):
    """The call that is made; see `nri_numa.cri.client.CRIClient`."""

    async def update_resources(
        self, container_id: str, resources: CRIResources
    ) -> UpdateFailed | None:
        """Change resources of a container; None when it was applied."""
        ...


@dataclass(slots=True)
class _Waiting:
    resources: CRIResources
    outcome: asyncio.Future[UpdateFailed | None]


class Outbox:
    """Sends updates over one connection.

    Args:
        runtime: is called.
        at_once: how many calls for neighbours may be under way.
    """

    def __init__(self, runtime: Updates, at_once: int = AT_ONCE) -> None:
        self._runtime = runtime
        self._lane = asyncio.Semaphore(at_once)
        self._waiting: dict[str, _Waiting] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    def put(
        self, container_id: str, resources: CRIResources, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailed | None]:
        """Send an update soon.

        Args:
            container_id: whose.
            resources: what changes; laid over what waits for this container already.
            urgent: it starts right now, and does not wait behind updates of others.

        Returns:
            What became of it: None when it was applied.
        """
        waiting = self._waiting.get(container_id)
        if waiting is not None:
            waiting.resources = over(waiting.resources, resources)
        else:
            outcome = asyncio.get_running_loop().create_future()
            waiting = self._waiting[container_id] = _Waiting(resources, outcome)
        if container_id not in self._workers:
            work = self._send(container_id) if urgent else self._send_in_turn(container_id)
            self._workers[container_id] = asyncio.create_task(work, name="update")
        return waiting.outcome

    async def close(self) -> None:
        """Give up what was not sent; a call under way is not waited for."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for container_id, waiting in self._waiting.items():
            _settle(waiting.outcome, _closed(container_id))
        self._waiting.clear()

    async def _send_in_turn(self, container_id: str) -> None:
        async with self._lane:
            await self._send(container_id)

    async def _send(self, container_id: str) -> None:
        try:
            while (waiting := self._waiting.pop(container_id, None)) is not None:
                failed: UpdateFailed | None = _closed(container_id)
                try:
                    failed = await self._runtime.update_resources(container_id, waiting.resources)
                except RuntimeUnavailable as error:
                    failed = UpdateFailed(container_id=container_id, gone=False, message=str(error))
                finally:
                    _settle(waiting.outcome, failed)
        finally:
            self._workers.pop(container_id, None)


def _settle(outcome: asyncio.Future[UpdateFailed | None], failed: UpdateFailed | None) -> None:
    if not outcome.done():  # whoever waited may have been cancelled
        outcome.set_result(failed)


def over(earlier: CRIResources, later: CRIResources) -> CRIResources:
    """Both in one; where both change something, the later one."""
    return replace(
        earlier,
        cpu_shares=later.cpu_shares or earlier.cpu_shares,
        cpu_quota=later.cpu_quota or earlier.cpu_quota,
        cpu_period=later.cpu_period or earlier.cpu_period,
        memory_limit_bytes=later.memory_limit_bytes or earlier.memory_limit_bytes,
        oom_score_adj=later.oom_score_adj or earlier.oom_score_adj,
        cpus=later.cpus or earlier.cpus,
        mems=later.mems or earlier.mems,
        hugepage_limits=later.hugepage_limits or earlier.hugepage_limits,
    )


def _closed(container_id: str) -> UpdateFailed:
    return UpdateFailed(container_id=container_id, gone=False, message="the connection was closed")
