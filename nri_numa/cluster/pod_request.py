"""Requests of pods, as values; `nri_numa.cluster.pod_reader` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.model.workload import SMT, OnFailure, Policy

AmountByResource = tuple[tuple[str, int], ...]
"""Bytes by resource: ``memory``, ``hugepages-…``; then numbers of devices by extended resource."""

EXTENDED_RESOURCE_MARK: Final = "/"
"""Part of the name of every extended resource, and of no other."""


class ContainerRequest(Struct, frozen=True, kw_only=True, gc=False, cache_hash=True):
    """Demand of one container on NUMA nodes.

    Attributes:
        container: empty for a whole pod.
        is_init: an init container that ends before the others start.
        shared_milli: thousandths of a shared CPU that must be free.
        charged_milli: thousandths of these that are charged.
        amounts: amounts that must be on its NUMA nodes.
        charged_amounts: amounts of these that are charged.
        on_failure: action of the node if the container does not fit.
        is_movable: the node may move it to other NUMA nodes later.
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
    is_movable: bool = False


class PodRequest(Struct, frozen=True, kw_only=True):
    """Request of a pod.

    Attributes:
        containers: those with placement options for the plugin, in the order of their start.
        pod_scope_request: one request for the whole pod, under scope ``pod``.
        kubelet_aligned: containers that the kubelet aligns itself if it has a policy: whole CPUs
            of a Guaranteed pod.
        invalid_reason: reason why every agent would reject the pod.
        has_placement_request: an annotation, a rule or a default sets a placement option.
        priority: of the pod; a node reserved by preemption is free for higher ones only.
    """

    uid: str
    namespace: str
    name: str
    containers: tuple[ContainerRequest, ...] = ()
    pod_scope_request: ContainerRequest | None = None
    kubelet_aligned: tuple[ContainerRequest, ...] = ()
    invalid_reason: str = ""
    has_placement_request: bool = False
    priority: int = 0

    @property
    def plugin_aligned_requests(self) -> tuple[ContainerRequest, ...]:
        """Requests that the plugin places, one after another."""
        return self.containers if self.pod_scope_request is None else (self.pod_scope_request,)

    @property
    def device_amounts(self) -> dict[str, int]:
        """Devices of all containers that the plugin aligns, by extended resource."""
        amounts: dict[str, int] = {}
        for container in self.containers:
            for name, count in container.amounts:
                if EXTENDED_RESOURCE_MARK in name:
                    amounts[name] = amounts.get(name, 0) + count
        return amounts

    @property
    def verdict_key(self) -> tuple[object, ...]:
        """Key that replicas share: equal keys have one verdict for equal resources."""
        return self.containers, self.pod_scope_request, self.kubelet_aligned

    def without_duplicate_containers(self, peak_amount: int) -> PodRequest:
        """Return the request with at most ``peak_amount`` containers, equal ones once."""

        def deduplicate(containers: Sequence[ContainerRequest]) -> tuple[ContainerRequest, ...]:
            requests = {replace(c, container=""): c for c in containers}
            return tuple(requests.values())[:peak_amount]

        return replace(
            self,
            containers=deduplicate(self.containers),
            kubelet_aligned=deduplicate(self.kubelet_aligned),
        )

    @property
    def is_unconstrained(self) -> bool:
        """True if the pod fits on every node."""
        return not (
            self.containers or self.pod_scope_request or self.kubelet_aligned or self.invalid_reason
        )


def peak_request(requests: Sequence[ContainerRequest]) -> ContainerRequest:
    """Merge containers into one: the sum that runs together, or a larger init container."""

    def peak_amount(amounts: Sequence[int]) -> int:
        staying = sum(n for n, c in zip(amounts, requests, strict=True) if not c.is_init)
        return max(staying, *(n for n, c in zip(amounts, requests, strict=True) if c.is_init), 0)

    def by_name(columns: Sequence[AmountByResource]) -> AmountByResource:
        tables = [dict(column) for column in columns]
        names = {name for column in tables for name in column}
        return tuple(
            (name, peak_amount([column.get(name, 0) for column in tables]))
            for name in sorted(names, key=lambda name: (EXTENDED_RESOURCE_MARK in name, name))
        )

    return replace(
        requests[0],
        container="",
        is_init=False,
        exclusive_cpus=peak_amount([c.exclusive_cpus for c in requests]),
        shared_milli=peak_amount([c.shared_milli for c in requests]),
        charged_milli=peak_amount([c.charged_milli for c in requests]),
        amounts=by_name([c.amounts for c in requests]),
        charged_amounts=by_name([c.charged_amounts for c in requests]),
    )
