"""An answer that changes many containers: serialised once and spliced, or item by item."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.stats import summary, table, us
from nri_numa.engine.values.workload import NO_ADJUSTMENT, ContainerUpdate
from nri_numa.nri import conversion
from nri_numa.nri.wire.pb import nri_pb2 as pb


def _spliced(updates: Sequence[ContainerUpdate]) -> pb.CreateContainerResponse:
    return conversion.create_answer(NO_ADJUSTMENT, updates)


def _copied(updates: Sequence[ContainerUpdate]) -> pb.CreateContainerResponse:
    """Only protobuf's public functions: equal changes are built once and appended under each id."""
    response = pb.CreateContainerResponse()
    items: dict[object, pb.ContainerUpdate] = {}
    for container_id, update in {update.container_id: update for update in updates}.items():
        item = items.get(update[1:])
        if item is None:
            item = items[update[1:]] = _item(update)
        item.container_id = container_id
        response.update.append(item)
    return response


def _built(updates: Sequence[ContainerUpdate]) -> pb.CreateContainerResponse:
    """Each item by itself."""
    response = pb.CreateContainerResponse()
    for update in {update.container_id: update for update in updates}.values():
        response.update.append(_item(update))
    return response


def _item(update: ContainerUpdate) -> pb.ContainerUpdate:
    return pb.ContainerUpdate(
        container_id=update.container_id,
        linux=conversion.linux_update(update),
        ignore_failure=update.ignore_failure,
    )


_WAYS: dict[str, Callable[[Sequence[ContainerUpdate]], pb.CreateContainerResponse]] = {
    "spliced": _spliced,
    "copied": _copied,
    "built": _built,
}


def answers(rounds: int = 300) -> str:
    """Microseconds from updates to bytes, for a shared pool that changed."""
    rows = []
    for count in (1, 10, 100, 300, 1000):
        updates = [
            ContainerUpdate(container_id=f"{n:064x}", cpus="0-31,40-63", ignore_failure=True)
            for n in range(count)
        ]
        for name, make in _WAYS.items():
            samples = []
            for _ in range(rounds):
                begun = time.perf_counter()
                make(updates).SerializeToString()
                samples.append(time.perf_counter() - begun)
            s = summary(samples)
            rows.append((count, name, us(s.least), us(s.p50)))
    return table(("containers", "how", "min µs", "p50 µs"), rows)
