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

from bench.beds import EXCLUSIVE
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    Resources,
)
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.runtime import LinkState, RuntimeInfo

Created = tuple[ContainerAdjustment, Sequence[ContainerUpdate]]


class Empty:
    """Answers every request with nothing."""

    reads_mentions = False

    def on_runtime_configured(self, info: RuntimeInfo) -> None: ...

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        return ()

    def create_container(self, pod: PodSandbox, container: Container) -> Created:
        return NO_ADJUSTMENT, ()

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        return ()

    def post_update_container(self, container_id: str) -> None: ...

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        return ()

    def remove_container(self, container_id: str) -> None: ...

    def start_container(self, pod: PodSandbox, container: Container) -> None: ...

    def post_start_container(self, pod: PodSandbox, container: Container) -> None: ...

    def run_pod(self, pod: PodSandbox) -> None: ...

    def update_pod(self, pod: PodSandbox, total: Resources) -> None: ...

    def stop_pod(self, pod: PodSandbox) -> None: ...

    def remove_pod(self, pod: PodSandbox) -> None: ...

    def on_request_answered(self, event_name: str, seconds: float) -> None: ...

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        print(state.value, flush=True)

    def on_protocol_broken(self) -> None: ...

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        raise error


class Naming(Empty):
    """Decides nothing either, and names every container it knows where ours would.

    That is at the creation and at the stop of a container that asks for exclusive CPUs.
    """

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._exclusive: set[str] = set()

    def create_container(self, pod: PodSandbox, container: Container) -> Created:
        if not any(key.endswith("/policy") for key in pod.annotations):
            return NO_ADJUSTMENT, ()
        if (container.resources.cpu_quota or 0) >= EXCLUSIVE.milli * 100:
            self._exclusive.add(container.id)
            return NO_ADJUSTMENT, _named(self._known)
        self._known[container.id] = None
        return NO_ADJUSTMENT, ()

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        self._known.pop(container_id, None)
        if container_id not in self._exclusive:
            return ()
        self._exclusive.remove(container_id)
        return _named(self._known)


def _named(ids: Iterable[str]) -> tuple[ContainerUpdate, ...]:
    return tuple(ContainerUpdate(i, "0-27,32-59") for i in ids)


async def main(socket_path: str, *, naming: bool = False) -> None:
    loop = asyncio.get_running_loop()
    handler = Naming() if naming else Empty()
    settings = LinkSettings(name="empty", index="10", socket_path=socket_path)
    link = asyncio.create_task(NRILink(handler, settings).run())
    loop.add_signal_handler(signal.SIGTERM, link.cancel)
    gc.collect()
    gc.freeze()
    await asyncio.wait({link})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], naming="naming" in sys.argv[2:]))
