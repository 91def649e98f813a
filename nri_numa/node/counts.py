"""How many containers there are of each sort, and each of them for a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from nri_numa.engine.others import KUBELETS, shown_kind
from nri_numa.engine.state import Kind, NodeState
from nri_numa.observe.metrics import ContainerSample

_FOREIGN = frozenset((Kind.FOREIGN, preferred) for preferred in (False, True))


class Counts(msgspec.Struct, frozen=True):
    """How many containers there are.

    Attributes:
        by_kind: by kind, and by whether they have what is ideal (True) or a wider set.
    """

    by_kind: dict[tuple[str, bool], int]

    @classmethod
    def of(cls, state: NodeState) -> Counts:
        """Count them."""
        live = [a for a in state.allocations.values() if not a.ended]
        counted = Counter((a.kind, a.preferred) for a in live)
        by_kind = {(k.value, p): counted[k, p] for k in Kind for p in (False, True)}
        by_kind |= {(KUBELETS, p): 0 for p in (False, True)}
        for a in live if counted.keys() & _FOREIGN else ():
            if shown_kind(state, a) == KUBELETS:
                by_kind[a.kind.value, a.preferred] -= 1
                by_kind[KUBELETS, a.preferred] += 1
        return cls(by_kind)

    @property
    def kinds(self) -> dict[str, int]:
        """By kind alone."""
        return {k: count + self.by_kind[k, True] for (k, p), count in self.by_kind.items() if not p}

    @property
    def wider(self) -> int:
        """Those that have a wider set than ideal."""
        return sum(count for (_, preferred), count in self.by_kind.items() if not preferred)


def container_samples(state: NodeState) -> Iterator[ContainerSample]:
    """Every container, made one by one while the answer is written."""
    return (
        ContainerSample(
            namespace=a.namespace,
            pod=a.pod,
            container=a.container,
            kind=shown_kind(state, a),
            policy=a.policy.value,
            numa_nodes=str(a.numa_nodes),
            preferred=a.preferred,
        )
        for a in state.allocations.values()
        if not a.ended
    )
