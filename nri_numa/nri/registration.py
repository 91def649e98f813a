"""Updates nobody asked for, by a second registration that lives for one answer.

On NRI up to 0.12.0 an UpdateContainers call can lock up the runtime's whole NRI layer: it takes two
locks in the opposite order of every event (containerd#13733). The answer to Synchronize takes them
in the right order. So a second, short-lived plugin registers, answers Synchronize with the updates,
and goes away; the main connection never notices.

It costs the runtime one complete picture of the node, and while the registration waits for a
container in its grace period no other pod operation starts (containerd#14083). It must be rare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PluginSession, SessionLimits
from nri_numa.nri.wire.versions import Event, PushPath

SETTLE_SECONDS: Final = 0.05
"""How long the one-shot stays connected after its answer, so that the runtime reads it whole."""


class PushResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a push.

    Attributes:
        ok: the runtime took the updates. It does not tell which single ones had no effect.
        path: how they were sent.
        detail: why not, when not `ok`.
        failed: the updates a runtime reported as failed; containerd and CRI-O report none.
        seconds: from the call to the result, waiting included.
    """

    ok: bool
    path: PushPath
    detail: str = ""
    failed: tuple[pb.ContainerUpdate, ...] = ()
    seconds: float = 0.0


Answer = Callable[[Sequence[pb.PodSandbox], Sequence[pb.Container]], Sequence[pb.ContainerUpdate]]
"""From the runtime's picture of the node to the updates it gets."""


class _OneShot:
    """The handler of the second registration."""

    def __init__(self, answer: Answer, limits: SessionLimits | None) -> None:
        self.session = PluginSession(limits=limits)
        self.answered = asyncio.get_running_loop().create_future()
        self._answer = answer

    def on_event(self, event: ev.PluginEvent) -> None:
        match event:
            case ev.Registered() | ev.UpdateContainersAnswered():
                pass
            case ev.RegistrationRefused():
                self._finish(f"the second registration was refused: {event.status}")
            case ev.ConfigureRequested():
                # One harmless bit: zero would mean all events, and make us a validator.
                mask = Event.REMOVE_POD_SANDBOX.bit
                self.session.reply(event.stream, pb.ConfigureResponse(events=mask))
            case ev.SynchronizeRequested():
                updates = self._answer(event.pods, event.containers)
                response = pb.SynchronizeResponse(update=updates)
                for update in response.update:
                    update.ignore_failure = True
                self.session.reply(event.stream, response)
                self._finish("")
            case _:
                self.session.reply(event.stream)

    def _finish(self, detail: str) -> None:
        if not self.answered.done():
            self.answered.set_result(detail)


async def push_one_shot(
    answer: Answer,
    *,
    socket_path: str,
    name: str,
    index: str,
    limits: SessionLimits | None = None,
) -> str:
    """Push updates through a second registration.

    Args:
        answer: gives the updates, at most one for each container; sent with `ignore_failure`.
        socket_path: the runtime's NRI socket.
        name: plugin name of the second registration.
        index: its index, two digits.
        limits: of the picture the runtime sends.

    Returns:
        Why it failed; empty when the runtime took the answer.
    """
    shot = _OneShot(answer, limits)
    connection: SessionTransport[ev.PluginEvent] = SessionTransport(shot.session, shot.on_event)
    loop = asyncio.get_running_loop()
    try:
        await loop.create_unix_connection(lambda: connection, socket_path)
        shot.session.register(name, index)
        connection.flush()
        await asyncio.wait({shot.answered, connection.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not shot.answered.done():
            return f"the second connection ended: {connection.ended.result().detail}"
        detail: str = shot.answered.result()
        if not detail:
            await asyncio.sleep(SETTLE_SECONDS)
        return detail
    except OSError as error:
        return f"{socket_path}: {error.strerror or error}"
    finally:
        await connection.aclose("pushed")
