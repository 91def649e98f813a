"""Sends updates that no request asked for, by the way that is safe, at a moment that is.

A second registration is the only safe way on NRI before 0.12.1, and not safe at every moment:
containerd up to 2.1 takes a read lock twice while it removes a sandbox with containers in it, and a
registration that waits for the write lock in between stops it for good. So a registration waits
until nothing else is under way, and one that is not answered is not followed by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from nri_numa.nri.answer_watch import AnswerWatch
from nri_numa.nri.registration import Answer, PushResult, push_one_shot
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import SessionLimits
from nri_numa.nri.wire.versions import PushPath

QUIET_WAIT: Final = 10.0
"""Seconds to wait for a quiet moment; on a busier node the updates ride on a reply."""
QUIET_POLL: Final = 0.1
"""Seconds between two looks whether it is quiet."""
PUSH: Final = "second registration"
"""The call that `AnswerWatch` knows as this."""


class Pusher:
    """Pushes of one link: one at a time, and some time apart.

    Args:
        name: plugin name of the link; second registrations have a suffix.
        index: its index.
        socket_path: the runtime's NRI socket.
        interval: least seconds between two pushes.
        timeout: seconds one push may take.
        limits: of the picture the runtime sends.
        path: how to push now, and why not when that is impossible.
        update_containers: the plain call on the link: why it failed, and which updates.
        quiet: whether nothing else is under way in the runtime.
        watch: told of registrations that wait for an answer.
    """

    def __init__(
        self,
        *,
        name: str,
        index: str,
        socket_path: str,
        interval: float,
        timeout: float,
        limits: SessionLimits | None,
        path: Callable[[], tuple[PushPath, str]],
        update_containers: Callable[
            [Sequence[pb.ContainerUpdate]], Awaitable[tuple[str, tuple[pb.ContainerUpdate, ...]]]
        ],
        quiet: Callable[[], bool],
        watch: AnswerWatch,
    ) -> None:
        self._name = name
        self._index = index
        self._socket_path = socket_path
        self._interval = interval
        self._timeout = timeout
        self._limits = limits
        self._path = path
        self._update_containers = update_containers
        self._quiet = quiet
        self._watch = watch
        self._lock = asyncio.Lock()
        self._last = -interval
        self._unanswered: asyncio.Task[str] | None = None

    async def push(self, updates: tuple[pb.ContainerUpdate, ...]) -> PushResult:
        """Send updates, at most one for each container; see `NRILink.push`."""
        loop = asyncio.get_running_loop()
        called = loop.time()
        path, detail = self._path()
        if not updates:
            return PushResult(ok=True, path=path)
        failed: tuple[pb.ContainerUpdate, ...] = ()
        async with self._lock:
            wait = self._last + self._interval - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            # Looked at after every wait: the link may have broken, or another runtime come up.
            path, detail = self._path()
            if not detail and path is PushPath.ONE_SHOT:
                detail = await self._wait_until_quiet()
                path, gone = self._path()
                detail = detail or gone
            if not detail:
                try:
                    if path is PushPath.UPDATE_CONTAINERS:
                        detail, failed = await self._update_containers(updates)
                    else:
                        detail = await self._register("push", lambda pods, containers: updates)
                finally:
                    self._last = loop.time()
        return PushResult(
            ok=not detail, path=path, detail=detail, failed=failed, seconds=loop.time() - called
        )

    async def look(self, answer: Answer) -> str:
        """Synchronise through a second registration; see `NRILink.look`."""
        async with self._lock:
            return await self._wait_until_quiet() or await self._register("look", answer)

    async def _wait_until_quiet(self) -> str:
        loop = asyncio.get_running_loop()
        end = loop.time() + QUIET_WAIT
        while not self._quiet():
            if loop.time() >= end:
                return f"pods are started or removed all the time ({QUIET_WAIT:g} s)"
            await asyncio.sleep(QUIET_POLL)
        return ""

    async def _register(self, purpose: str, answer: Answer) -> str:
        """Register once more; why it failed, empty when the runtime took the answer."""
        if self._unanswered is not None:
            if not self._unanswered.done():
                return "an earlier registration is not answered yet"
            self._unanswered = None
        overdue = False

        def in_time(
            pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
        ) -> Sequence[pb.ContainerUpdate]:
            # What was meant a minute ago must not be written now.
            return () if overdue else answer(pods, containers)

        task = asyncio.create_task(
            push_one_shot(
                in_time,
                socket_path=self._socket_path,
                name=f"{self._name}-{purpose}",
                index=self._index,
                limits=self._limits,
            )
        )
        self._watch.called(PUSH)
        task.add_done_callback(lambda _: self._watch.answered(PUSH))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return task.result()
        # Left waiting: that it is answered, sooner or later, is how a runtime that takes long is
        # told from one that hangs.
        overdue, self._unanswered = True, task
        return f"the runtime did not synchronise the second registration within {self._timeout:g} s"

    def close(self) -> None:
        """Give up what is not answered."""
        if self._unanswered is not None:
            self._unanswered.cancel()
