"""What a container has, for tests to which only some of its fields matter."""

from typing import Any

from nri_numa.engine.state import Allocation, ContainerKind


def allocation(
    container_id: str = "c", kind: ContainerKind = ContainerKind.UNPINNED, **fields: Any
) -> Allocation:
    """Of container ``app`` in pod ``shop/web``.

    `fields`: others of `Allocation` that are not as for a container without a request.
    """
    names = {"pod_id": "p", "pod_uid": "u", "namespace": "shop", "pod": "web", "container": "app"}
    return Allocation(container_id=container_id, kind=kind, **{**names, **fields})
