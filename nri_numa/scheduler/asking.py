"""A pod that somebody thinks of: some exclusive CPUs, memory, a policy, and no manifest."""

from __future__ import annotations

from typing import Final

from nri_numa.engine.values.workload import Policy
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.wish import Wish

POLICIES: Final = tuple(str(policy) for policy in Policy)


def wish_for(reader: Reader, prefix: str, *, cpus: int, memory: int, policy: str) -> Wish:
    """What a pod of one container would ask for whose limits are its requests.

    Args:
        reader: with the settings of the nodes.
        prefix: of annotations.
        cpus: exclusive ones; 0 for a pod that shares one.
        memory: bytes; 0 for a pod that names none, and so is judged by its CPUs alone.
        policy: one of `POLICIES`.
    """
    amounts = {"cpu": str(cpus or 1)}
    if memory:
        amounts["memory"] = str(memory)
    asks = {f"{prefix}/policy": policy}
    if cpus:
        asks[f"{prefix}/cpus"] = "exclusive"
    resources = {"requests": amounts, "limits": amounts}
    return reader.wish(
        {
            "metadata": {"name": "asked", "namespace": "default", "annotations": asks},
            "spec": {"containers": [{"name": "main", "resources": resources}]},
        }
    )
