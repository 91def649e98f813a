"""The whole picture of a runtime over CRI; and updates made from it, once."""

from __future__ import annotations

import asyncio
from typing import Final

from nri_numa.cri.client import CRIClient, CRIContainerState
from nri_numa.cri_link.messages import container_message, cri_resources, pod_message
from nri_numa.cri_link.outbox import Outbox
from nri_numa.errors import RuntimeUnavailable
from nri_numa.nri.registration import Answer
from nri_numa.nri.wire.pb import nri_pb2 as pb

LIVE: Final = frozenset((CRIContainerState.CREATED, CRIContainerState.RUNNING))
"""States of containers that have, or will have, CPUs."""


async def picture(client: CRIClient) -> tuple[dict[str, pb.PodSandbox], list[pb.Container]]:
    """Ask for everything that lives.

    Returns:
        Pods by id, and containers that were created or run, as NRI would tell them.

    Raises:
        RuntimeUnavailable: the runtime cannot be asked.
    """
    listed = [c for c in await client.list_containers() if c.state in LIVE]
    pods: dict[str, pb.PodSandbox] = {}
    for pod in await client.list_pod_sandboxes():
        if (known := await client.pod_sandbox_status(pod.id)) is not None:
            pods[pod.id] = pod_message(known)
    containers: list[pb.Container] = []
    for found in listed:
        status = await client.container_status(found.id)
        if status is not None and status.state in LIVE:
            containers.append(container_message(status, found.pod_sandbox_id))
    return pods, containers


async def update_once(answer: Answer, *, socket_path: str) -> str:
    """Show what runs to a function, and send the updates that it answers.

    Args:
        answer: gives the updates, at most one for each container.
        socket_path: where the runtime serves CRI.

    Returns:
        Why the runtime could not be asked; empty when it was, whatever became of single updates.
    """
    try:
        async with CRIClient(socket_path) as client:
            pods, containers = await picture(client)
            outbox = Outbox(client)
            updates = answer(list(pods.values()), containers)
            await asyncio.gather(*(outbox.put(u.container_id, cri_resources(u)) for u in updates))
            return ""
    except RuntimeUnavailable as error:
        return str(error)
