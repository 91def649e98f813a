"""What the kubelet gave to a pod's containers, asked of its PodResources socket.

It answers everybody on the node, a hundred calls a second and ten at once, so a pod is asked about
once, one after another, and with a `PAUSE` between two. `grpc` is imported with the first question.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from nri_numa.engine.values.workload import MOST_DEVICES

DEADLINE: Final = 0.05
"""Seconds for an answer. It is known at once or not in time: the first container comes soon."""
PAUSE: Final = 0.02
"""Seconds between two questions: half of what the kubelet admits, for others ask as well."""
BUSY_PAUSE: Final = 0.1
"""Seconds after which a kubelet that was asked too often is asked once more."""


class GivenDevice(NamedTuple):
    """A device of a resource, by the kubelet's books."""

    resource: str
    id: str
    numa_nodes: frozenset[int]


def given_devices(
    kubelet_root: str, namespace: str, pod: str, seconds: float = DEADLINE
) -> Mapping[str, tuple[GivenDevice, ...]] | str:
    """The devices of a pod by container, or why they cannot be told. Blocks.

    Without a pod's name nothing is asked, but what takes time the first time is done.
    """
    from nri_numa.cri import pod_resources

    if not pod:
        pod_resources.load()
        return {}
    answer = pod_resources.given_to(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str) and answer == pod_resources.TOO_OFTEN:
        time.sleep(BUSY_PAUSE)
        answer = pod_resources.given_to(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str):
        return answer
    found: dict[str, tuple[GivenDevice, ...]] = {}
    for one in answer:
        devices = [
            GivenDevice(devices.resource, id, frozenset(devices.by_id.get(id, ())))
            for devices in one.devices
            for id in devices.ids
        ]
        if devices:
            found[one.container] = tuple(devices[: MOST_DEVICES + 1])
    return found
