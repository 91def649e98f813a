"""The NRI link in a thread of its own, in front of a real runtime."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from nri_numa.model.workload import Container, PodSandbox
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.nri.wire.versions import AGENT_EVENTS
from nri_numa.runtime import LinkState
from tests.beds.containerd import Containerd
from tests.beds.cri import poll
from tests.beds.recording_plugin import Created, RecordingPlugin, adjusted, update

_T = TypeVar("_T")


def created(pod: PodSandbox, container: Container) -> Created:
    """Pins to the CPUs in annotation ``cpus``, with as long a note as ``note`` says."""
    wanted = pod.annotations
    return adjusted(wanted.get("cpus", ""), note="n" * int(wanted.get("note", "0")))


class LinkThread:
    """A link that runs in a thread with a loop of its own."""

    def __init__(self, containerd: Containerd) -> None:
        self.handler = RecordingPlugin(create_container=created)
        self._containerd = containerd
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.link: NRILink = self.call(self._make())
        self._run: asyncio.Task[None] = self.call(self._start())

    async def _make(self) -> NRILink:
        settings = LinkSettings(
            name="link-test",
            index="50",
            socket_path=str(self._containerd.nri_socket),
            events=AGENT_EVENTS,
            push_interval=0.05,
            # Pushes in the middle of everything: that they lock nothing is what is tried.
            quiet_seconds=0.0,
        )
        return NRILink(self.handler, settings)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.link.run())

    async def _stop(self) -> None:
        self._run.cancel()
        await asyncio.wait({self._run})

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float = 180.0) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def wait_active(self) -> None:
        poll(lambda: self.link.state is LinkState.ACTIVE, f"active, {self.handler.states}")

    def push(self, wanted: dict[str, str]) -> str:
        async def work() -> str:
            return await self.link.push_updates([update(*each) for each in wanted.items()])

        return self.call(work())

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
