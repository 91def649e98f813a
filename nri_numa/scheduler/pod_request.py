"""What a pod asks for, as values: `nri_numa.scheduler.pod_reader` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.model.workload import SMT, OnFailure, Policy

Amounts = tuple[tuple[str, int], ...]
"""Bytes by resource: ``memory``, ``hugepages-…``; then numbers of devices by extended resource."""

DEVICE: Final = "/"
"""In the name of every extended resource, and of no other."""


class ContainerRequest(Struct, frozen=True, kw_only=True, gc=False, cache_hash=True):
    """What one container needs of NUMA nodes.

    Attributes:
        container: empty for a whole pod.
        ends: it is an init container that ends before the others start.
        milli: thousandths of a CPU that it shares.
        paid_milli: of these, what is allocated to it.
        amounts: what must be in its NUMA nodes.
        paid: of these, what is allocated to it.
        on_failure: what happens on the node when it does not fit.
    """

    container: str
    ends: bool = False
    policy: Policy = Policy.NONE
    exclusive: int = 0
    milli: int = 0
    paid_milli: int = 0
    amounts: Amounts = ()
    paid: Amounts = ()
    smt: SMT = SMT.SPREAD
    on_failure: OnFailure = OnFailure.REJECT


class PodRequest(Struct, frozen=True, kw_only=True):
    """What a pod asks for.

    Attributes:
        containers: those that ask us for something, in the order in which they start.
        together: one request for the whole pod, under scope ``pod``.
        kubelets: what the kubelet aligns where it has a policy: whole CPUs of a Guaranteed pod's
            containers, by itself.
        wrong: why every node of ours would refuse it.
        ours: an annotation, a rule or a default asks for something.
        movable: containers that may be elsewhere while they run.
    """

    uid: str
    namespace: str
    name: str
    containers: tuple[ContainerRequest, ...] = ()
    together: ContainerRequest | None = None
    kubelets: tuple[ContainerRequest, ...] = ()
    wrong: str = ""
    ours: bool = False
    movable: tuple[str, ...] = ()

    @property
    def aligned(self) -> tuple[ContainerRequest, ...]:
        """What we place, one after another."""
        return self.containers if self.together is None else (self.together,)

    @property
    def key(self) -> tuple[object, ...]:
        """What replicas share: a room has one verdict for all pods with equal keys."""
        return self.containers, self.together, self.kubelets

    def kinds(self, most: int) -> PodRequest:
        """The same with one of all containers that ask alike, and so many of these at most."""

        def some(containers: Sequence[ContainerRequest]) -> tuple[ContainerRequest, ...]:
            kinds = {replace(one, container=""): one for one in containers}
            return tuple(kinds.values())[:most]

        return replace(self, containers=some(self.containers), kubelets=some(self.kubelets))

    @property
    def nothing(self) -> bool:
        """Every node will do."""
        return not (self.containers or self.together or self.kubelets or self.wrong)


def peak(requests: Sequence[ContainerRequest]) -> ContainerRequest:
    """Containers as one: what runs at the same time, or an init container if that is more."""

    def most(amounts: Sequence[int]) -> int:
        staying = sum(n for n, one in zip(amounts, requests, strict=True) if not one.ends)
        return max(staying, *(n for n, one in zip(amounts, requests, strict=True) if one.ends), 0)

    def by_name(columns: Sequence[Amounts]) -> Amounts:
        found = [dict(column) for column in columns]
        names = {name for column in found for name in column}
        return tuple(
            (name, most([column.get(name, 0) for column in found]))
            for name in sorted(names, key=lambda name: (DEVICE in name, name))
        )

    return replace(
        requests[0],
        container="",
        ends=False,
        exclusive=most([one.exclusive for one in requests]),
        milli=most([one.milli for one in requests]),
        paid_milli=most([one.paid_milli for one in requests]),
        amounts=by_name([one.amounts for one in requests]),
        paid=by_name([one.paid for one in requests]),
    )
