"""Exclusive CPUs that a ResourceClaim gives: counted by the scheduler on one NUMA node.

They are `nri_numa.engine.values.workload.Slots` whose NUMA node the scheduler has chosen, in the
same annotation of the container, which the agent derives from claims that it has prepared
(`nri_numa.node.claims`). A text is ``numa1-claim-UID-0x4``: of the first result of that claim, four
CPUs on NUMA node 1; of several results, separated by commas.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from nri_numa.engine.state import NodeState
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import Container, PodSandbox, Requested, Slots

CLAIM: Final = "-claim-"
NOT_PREPARED: Final = "no claim: "
"""How a text begins that says why a container's claim does not count."""

MOST: Final = 32
"""Results of one claim (kubernetes ``resource/v1``, AllocationResultsMaxSize)."""

UID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_RESULT: Final = re.compile(rf"numa([0-9]{{1,4}})-claim-({UID}-[0-9]{{1,2}})x([0-9]{{1,4}})")


def result_text(numa_node: int, uid: str, number: int, cpus: int) -> str:
    """One result of a claim, as `read_claims` reads it."""
    return f"numa{numa_node}{CLAIM}{uid}-{number}x{cpus}"


def read_claims(text: str) -> Slots | None:
    """Read what a container has of its claims; None where the text is something else."""
    parts = text.split(",", MOST)
    found = [_RESULT.fullmatch(part) for part in parts]
    results = [match for match in found if match is not None]
    names = {match[2] for match in results}
    if len(parts) > MOST or len(results) < len(parts) or len(names) < len(parts):
        return None
    on: Counter[int] = Counter()
    for match in results:
        on[int(match[1])] += int(match[3])
    return Slots(ids=text, count=on.total(), by_node=dict(sorted(on.items())))


def not_prepared(pod: PodSandbox, container: Container, text: str) -> Refusal | None:
    """The refusal that a text stands for; None where it is no such text."""
    if not text.startswith(NOT_PREPARED):
        return None
    return Refusal(
        reason="ClaimNotPrepared",
        message=f"pod {pod.full_name}, container {container.name}: "
        f"{text.removeprefix(NOT_PREPARED)}",
        rule="a container gets the CPUs of a claim that was prepared for its pod, and no others",
    )


def in_use(
    state: NodeState, pod: PodSandbox, container: Container, requested: Requested | Refusal
) -> Requested | Refusal:
    """Refuse what another container has already: a claim's CPUs are for one container at a time."""
    if isinstance(requested, Refusal) or requested.slots is None:
        return requested
    if CLAIM not in requested.slots.ids:
        return requested
    names = _names(requested.slots.ids.split(","))
    for _, one in sorted(state.allocations.items()):
        if CLAIM in one.slots and names & _names(one.slots.split(",")):
            return Refusal(
                reason="ClaimInUse",
                message=f"pod {pod.full_name}, container {container.name}: its ResourceClaim's "
                f"CPUs are those of pod {one.namespace}/{one.pod}, container "
                f"{one.container}; expected one container for each request of a claim",
                rule="the CPUs of a claim are for one container at a time",
            )
    return requested


def _names(parts: Iterable[str]) -> set[str]:
    return {match[2] for part in parts if (match := _RESULT.fullmatch(part)) is not None}
