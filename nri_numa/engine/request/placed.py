"""The annotation ``placed``: the NUMA nodes that the scheduler held for each container of a pod.

It is written with the binding of the pod (`nri_numa.scheduler`), as JSON: name of a container to a
list of NUMA nodes, ``{"main":"1","helper":"0-1"}``. Here it is a preference among NUMA nodes that
suit equally well and nothing more, so that a pod that carries it of its own accord gets nothing
that it could not get otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from nri_numa.machine.cpuset import NO_NUMA_NODES, ListFormatError, NUMASet

PLACED: Final = "placed"
"""The annotation's key, below the prefix."""
LONGEST: Final = 16_384
"""Characters that are read; 100 containers with the longest names take less."""


def placed_text(numa_nodes: Mapping[str, NUMASet]) -> str:
    """The annotation's value; containers in order of name, those without NUMA nodes left out."""
    known = {name: str(found) for name, found in sorted(numa_nodes.items()) if found}
    return json.dumps(known, separators=(",", ":"))


def read_placed(text: str) -> dict[str, NUMASet] | None:
    """What a value says by container; None where it is not of our form."""
    if len(text) > LONGEST:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    found: dict[str, NUMASet] = {}
    for name, listed in document.items():
        if not isinstance(listed, str):
            return None
        try:
            found[name] = NUMASet.parse(listed)
        except ListFormatError:
            return None
    return found


def placed_for(annotations: Mapping[str, str], prefix: str, container: str) -> NUMASet:
    """The NUMA nodes that were held for one container; none where nothing readable says any."""
    text = annotations.get(f"{prefix}/{PLACED}")
    if text is None:
        return NO_NUMA_NODES
    return (read_placed(text) or {}).get(container, NO_NUMA_NODES)
