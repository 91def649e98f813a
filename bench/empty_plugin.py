"""The floor: our own link with a handler that decides nothing and answers empty.

The same socket code, the same protocol, the same protobuf classes, the same event mask, and the
collector frozen as in the real plugin. What the real plugin takes longer is what deciding costs.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from bench.beds import EXCLUSIVE
from nri_numa.engine.values.workload import NO_ADJUSTMENT, ContainerUpdate
from nri_numa.nri import conversion
from nri_numa.nri.handler import LinkState
from nri_numa.nri.link import NRILink
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import Answer
from nri_numa.nri.wire.versions import RuntimeInfo


class Empty:
    """Answers every request with nothing."""

    def configured(self, info: RuntimeInfo) -> None: ...

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        return []

    def create_container(self, request: pb.CreateContainerRequest, data: bytes = b"") -> Answer:
        return pb.CreateContainerResponse()

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        return pb.UpdateContainerResponse()

    def stop_container(self, request: pb.StopContainerRequest) -> Answer:
        return pb.StopContainerResponse()

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None: ...

    def start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None: ...

    def post_start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None: ...

    def run_pod(self, pod: pb.PodSandbox) -> None: ...

    def stop_pod(self, pod: pb.PodSandbox) -> None: ...

    def remove_pod(self, pod: pb.PodSandbox) -> None: ...

    def replied(self, event_name: str, seconds: float) -> None: ...

    def link_changed(self, state: LinkState, detail: str) -> None: ...

    def internal_error(self, event_name: str, error: Exception) -> Message | None:
        raise error


class Naming(Empty):
    """Decides nothing either, and names every container it knows where ours would.

    That is at the creation and at the stop of a container that asks for exclusive CPUs. The answer
    is made in the quickest way we have.
    """

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._exclusive: set[str] = set()

    def create_container(self, request: pb.CreateContainerRequest, data: bytes = b"") -> Answer:
        mine = request.container.id
        if not any(key.endswith("/policy") for key in request.pod.annotations):
            return pb.CreateContainerResponse()
        told = ()
        if request.container.linux.resources.cpu.quota.value >= EXCLUSIVE.milli * 100:
            self._exclusive.add(mine)
            told = _named(self._known)
        else:
            self._known[mine] = None
        return conversion.create_answer(NO_ADJUSTMENT, told)

    def stop_container(self, request: pb.StopContainerRequest) -> Answer:
        mine = request.container.id
        self._known.pop(mine, None)
        if mine not in self._exclusive:
            return pb.StopContainerResponse()
        self._exclusive.remove(mine)
        return conversion.stop_answer(_named(self._known))


def _named(ids: Iterable[str]) -> tuple[ContainerUpdate, ...]:
    return tuple(ContainerUpdate(i, "0-27,32-59", ignore_failure=True) for i in ids)


async def main(socket_path: str, *, naming: bool = False) -> None:
    loop = asyncio.get_running_loop()
    handler = Naming() if naming else Empty()
    link = asyncio.create_task(
        NRILink(handler, name="empty", index="10", socket_path=socket_path).run()
    )
    loop.add_signal_handler(signal.SIGTERM, link.cancel)
    gc.collect()
    gc.freeze()
    await asyncio.wait({link})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], naming="naming" in sys.argv[2:]))
