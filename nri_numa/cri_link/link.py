"""The link to a container runtime over CRI: connect, list, watch, update, connect again.

CRI asks nobody before a container starts. So each container is met when the runtime tells that it
was created, or when a listing shows it, and gets what was decided by an update: before its start
where that is quick enough, after it otherwise. A refusal cannot stop a start.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from nri_numa.cri.client import CRIClient
from nri_numa.cri_link.connection import Connection, Ears
from nri_numa.errors import RuntimeUnavailable
from nri_numa.nri.answer_watch import AnswerWatch
from nri_numa.nri.handler import LinkState, PluginHandler
from nri_numa.nri.link import STABLE_SECONDS, backoff_delays
from nri_numa.nri.registration import PushResult
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import PushPath, RuntimeInfo


class CRILink:
    """Watches one runtime, and tells the handler what NRI would have told.

    Attributes:
        runtime: what the runtime said of itself; None before.
        watch: calls that were not answered; none here, each has a limit of its own.
    """

    def __init__(
        self,
        handler: PluginHandler,
        *,
        socket_path: str,
        listing: float = 1.0,
        ears: Ears | None = None,
        rng: random.Random | None = None,
        delays: Callable[[], Iterator[float]] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Make a link; nothing happens before `run`.

        Args:
            handler: is told.
            socket_path: where the runtime serves CRI.
            listing: seconds between two listings where no events come.
            ears: are told what no handler of NRI is.
            rng: for the jitter of the pauses.
            delays: makes the sequence of pauses; `backoff_delays` over `rng` if None.
            now: Unix time.
        """
        self._handler = handler
        self._socket_path = socket_path.removeprefix("unix://")
        self._listing = listing
        self._ears = ears if ears is not None else Ears()
        jitter = rng if rng is not None else random.Random()  # noqa: S311 - no secret
        self._delays = delays if delays is not None else lambda: backoff_delays(jitter)
        self._now = now
        self.runtime: RuntimeInfo | None = None
        self.watch = AnswerWatch(time.monotonic)
        self._state = LinkState.DISCONNECTED
        self._told: tuple[LinkState, str] | None = None
        self._connection: Connection | None = None

    @property
    def state(self) -> LinkState:
        """Where the link stands."""
        return self._state

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        loop = asyncio.get_running_loop()
        delays = self._delays()
        try:
            while True:
                began = loop.time()
                detail = await self._serve()
                if loop.time() - began >= STABLE_SECONDS:
                    delays = self._delays()
                self._change(LinkState.DISCONNECTED, detail)
                await asyncio.sleep(next(delays))
        finally:
            self._change(LinkState.STOPPED, "")

    def push(self, updates: Sequence[pb.ContainerUpdate]) -> Coroutine[Any, Any, PushResult]:
        """Send updates that no event asked for; await the result."""
        return self._push(tuple(updates))

    async def look(self) -> str:
        """Nothing to do: listings tell what runs."""
        return ""

    async def _push(self, updates: Sequence[pb.ContainerUpdate]) -> PushResult:
        connection = self._connection
        if connection is None or self._state is not LinkState.ACTIVE:
            detail = f"the link is {self._state.value}"
            return PushResult(ok=not updates, path=PushPath.NONE, detail=detail)
        began = time.monotonic()
        failed = await asyncio.gather(*connection.send(updates))
        broken = [one.message for one in failed if one is not None and not one.gone]
        return PushResult(
            ok=not broken,
            path=PushPath.UPDATE_CONTAINERS,
            detail="; ".join(broken[:3]),
            seconds=time.monotonic() - began,
        )

    async def _serve(self) -> str:
        """Serve one connection until it ends; why it did."""
        try:
            async with CRIClient(self._socket_path) as client:
                version = await client.version()
                self._change(LinkState.REGISTERING, self._socket_path)
                self.runtime = RuntimeInfo(
                    name=version.name,
                    version=version.version,
                    nri_version="",
                    registration_timeout=0.0,
                    request_timeout=0.0,
                    config="",
                )
                self._handler.configured(self.runtime)
                connection = Connection(
                    client, self._handler, self._ears, listing=self._listing, now=self._now
                )
                try:
                    pods, containers = await connection.begin()
                    self._connection = connection
                    self._change(
                        LinkState.ACTIVE, f"{pods} pods, {containers} containers, over CRI"
                    )
                    await connection.go_on()
                finally:
                    self._connection = None
                    await connection.close()
        except RuntimeUnavailable as error:
            return str(error)
        return "the connection ended"

    def _change(self, state: LinkState, detail: str) -> None:
        if (state, detail) == self._told:
            return  # the same failure again: said once
        self._told = (state, detail)
        self._state = state
        self._handler.link_changed(state, detail)
