"""The floor: our own link with a handler that decides nothing and answers empty.

The same socket code, the same protocol, the same protobuf classes, the same event mask, and the
collector frozen as in the real plugin. What the real plugin takes longer is what deciding costs.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Sequence

from google.protobuf.message import Message

from nri_numa.protocol.pb import nri_pb2 as pb
from nri_numa.protocol.versions import RuntimeInfo
from nri_numa.runtime.handler import LinkState
from nri_numa.runtime.nri import NRILink


class Empty:
    """Answers every request with nothing."""

    def configured(self, info: RuntimeInfo) -> None: ...

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        return []

    def create_container(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse:
        return pb.CreateContainerResponse()

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        return pb.UpdateContainerResponse()

    def stop_container(self, request: pb.StopContainerRequest) -> pb.StopContainerResponse:
        return pb.StopContainerResponse()

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None: ...

    def post_update_container(self, pod: pb.PodSandbox, container: pb.Container) -> None: ...

    def run_pod(self, pod: pb.PodSandbox) -> None: ...

    def update_pod(self, request: pb.UpdatePodSandboxRequest) -> None: ...

    def stop_pod(self, pod: pb.PodSandbox) -> None: ...

    def remove_pod(self, pod: pb.PodSandbox) -> None: ...

    def replied(self, event_name: str, seconds: float) -> None: ...

    def link_changed(self, state: LinkState, detail: str) -> None: ...

    def internal_error(self, event_name: str, error: Exception) -> Message | None:
        raise error


async def main(socket_path: str) -> None:
    loop = asyncio.get_running_loop()
    link = asyncio.create_task(
        NRILink(Empty(), name="empty", index="10", socket_path=socket_path).run()
    )
    loop.add_signal_handler(signal.SIGTERM, link.cancel)
    gc.collect()
    gc.freeze()
    await asyncio.wait({link})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
