"""What a pod asks for, as values: `nri_numa.cluster.pod_reader` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.model.workload import SMT, OnFailure, Policy

AmountByResource = tuple[tuple[str, int], ...]
"""Bytes by resource: ``memory``, ``hugepages-…``; then numbers of devices by extended resource."""

EXTENDED_RESOURCE_MARK: Final = "/"
"""In the name of every extended resource, and of no other."""


class ContainerRequest(Struct, frozen=True, kw_only=True, gc=False, cache_hash=True):
    """What one container needs of NUMA nodes.

    Attributes:
        container: empty for a whole pod.
        is_init: it is an init container that ends before the others start.
        shared_milli: thousandths of a CPU that it shares.
        charged_milli: of these, what is allocated to it.
        amounts: what must be in its NUMA nodes.
        charged_amounts: of these, what is allocated to it.
        on_failure: what happens on the node when it does not fit.
    """

    container: str
    is_init: bool = False
    policy: Policy = Policy.NONE
    exclusive_cpus: int = 0
    shared_milli: int = 0
    charged_milli: int = 0
    amounts: AmountByResource = ()
    charged_amounts: AmountByResource = ()
    smt: SMT = SMT.SPREAD
    on_failure: OnFailure = OnFailure.REJECT


class PodRequest(Struct, frozen=True, kw_only=True):
    """What a pod asks for.

    Attributes:
        containers: those that ask us for something, in the order in which they start.
        pod_scope_request: one request for the whole pod, under scope ``pod``.
        kubelet_aligned: what the kubelet aligns where it has a policy: whole CPUs of a Guaranteed
            pod's containers, by itself.
        invalid_reason: why every node of ours would refuse it.
        has_placement_request: an annotation, a rule or a default asks for something.
    """

    uid: str
    namespace: str
    name: str
    containers: tuple[ContainerRequest, ...] = ()
    pod_scope_request: ContainerRequest | None = None
    kubelet_aligned: tuple[ContainerRequest, ...] = ()
    invalid_reason: str = ""
    has_placement_request: bool = False

    @property
    def plugin_aligned_requests(self) -> tuple[ContainerRequest, ...]:
        """What we place, one after another."""
        return self.containers if self.pod_scope_request is None else (self.pod_scope_request,)

    @property
    def verdict_key(self) -> tuple[object, ...]:
        """What replicas share: a room has one verdict for all pods with equal keys."""
        return self.containers, self.pod_scope_request, self.kubelet_aligned

    def without_duplicate_containers(self, peak_amount: int) -> PodRequest:
        """The same with one of all containers that ask alike, and so many of these at most."""

        def some(containers: Sequence[ContainerRequest]) -> tuple[ContainerRequest, ...]:
            kinds = {replace(one, container=""): one for one in containers}
            return tuple(kinds.values())[:peak_amount]

        return replace(
            self, containers=some(self.containers), kubelet_aligned=some(self.kubelet_aligned)
        )

    @property
    def is_unconstrained(self) -> bool:
        """Every node will do."""
        return not (
            self.containers or self.pod_scope_request or self.kubelet_aligned or self.invalid_reason
        )


def peak_request(requests: Sequence[ContainerRequest]) -> ContainerRequest:
    """Containers as one: what runs at the same time, or an init container if that is more."""

    def most(amounts: Sequence[int]) -> int:
        staying = sum(n for n, one in zip(amounts, requests, strict=True) if not one.is_init)
        return max(
            staying, *(n for n, one in zip(amounts, requests, strict=True) if one.is_init), 0
        )

    def by_name(columns: Sequence[AmountByResource]) -> AmountByResource:
        found = [dict(column) for column in columns]
        names = {name for column in found for name in column}
        return tuple(
            (name, most([column.get(name, 0) for column in found]))
            for name in sorted(names, key=lambda name: (EXTENDED_RESOURCE_MARK in name, name))
        )

    return replace(
        requests[0],
        container="",
        is_init=False,
        exclusive_cpus=most([one.exclusive_cpus for one in requests]),
        shared_milli=most([one.shared_milli for one in requests]),
        charged_milli=most([one.charged_milli for one in requests]),
        amounts=by_name([one.amounts for one in requests]),
        charged_amounts=by_name([one.charged_amounts for one in requests]),
    )
