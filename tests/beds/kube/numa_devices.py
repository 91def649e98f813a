"""Two device plugins, with two devices each on either of two NUMA nodes.

Run as ``python -m tests.beds.kube.numa_devices DIRECTORY`` beside a kubelet, in its directory of
device plugins. Asked by GetPreferredAllocation, the GPUs begin with NUMA node 0 and the cards with
NUMA node 1: a kubelet that leaves the choice to them takes one of each apart.
"""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from nri_numa.device_plugin.plugin import SlotService, register_with_kubelet
from nri_numa.device_plugin.slots import Slot, SlotList
from nri_numa.errors import RuntimeUnavailable

GPU = "bed.example.com/gpu"
CARD = "bed.example.com/nic"
NUMA_NODE_BY_DEVICE = {
    f"{kind}-{number}": number // 2 for kind in ("gpu", "nic") for number in range(4)
}
RESOURCES = (GPU, CARD)
REGISTERED = "has its devices"  # in the log, once for each registration
_KUBELET_SOCKET = "kubelet.sock"
_RETRY_S = 0.5


class _Devices(SlotList):
    """Devices that are always there and healthy, where the preferred ones come first."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self._ids = list(ids)
        self.slots = tuple(Slot(id, numa_node=NUMA_NODE_BY_DEVICE[id]) for id in sorted(ids))

    @property
    def annotation_key(self) -> str:
        return "bed.example.com/devices"

    def allocate_slots(self, ids: Sequence[str], allocated_at: float) -> str:
        return ",".join(sorted(ids))

    def preferred_ids(self, ids: Iterable[str], required: Sequence[str], size: int) -> list[str]:
        available = set(ids) - set(required)
        return [*required, *(id for id in self._ids if id in available)][:size]


async def _serve(directory: Path) -> None:
    """Serve both; registered with the kubelet as soon as it is there."""
    ids = sorted(NUMA_NODE_BY_DEVICE)
    gpus = [id for id in ids if id.startswith("gpu")]
    cards = [id for id in reversed(ids) if id.startswith("nic")]
    kubelet = directory / _KUBELET_SOCKET
    while not kubelet.exists():
        await asyncio.sleep(_RETRY_S)
    async with AsyncExitStack() as services:
        for resource, preferred in ((GPU, gpus), (CARD, cards)):
            endpoint = f"{resource.rpartition('/')[2]}.sock"
            service = await services.enter_async_context(
                SlotService(str(directory / endpoint), _Devices(preferred))
            )
            await _register(kubelet, endpoint, resource)
            while not service.streams:  # only then they are healthy for the kubelet
                await asyncio.sleep(_RETRY_S)
            print(f"{resource}: the kubelet {REGISTERED}", flush=True)
        await asyncio.Event().wait()


async def _register(kubelet: Path, endpoint: str, resource: str) -> None:
    while True:
        try:
            return await register_with_kubelet(str(kubelet), endpoint, resource)
        except RuntimeUnavailable as error:  # its file is there before it serves
            print(error, flush=True)
            await asyncio.sleep(_RETRY_S)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
