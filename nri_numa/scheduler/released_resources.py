"""Resources that the pods of a node give back when they end. Pure.

A pod gives back what is written down of it: the NUMA nodes that the publisher or the extender
wrote, and those that its ResourceClaims name. A pod of which nothing is known gives back nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.node_sums import (
    DisruptionBudget,
    claim_uses,
    pod_sums,
    repels_other_pods,
)
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import ContainerRequest, PodRequest
from nri_numa.dra.claims import ClaimedDevice, InvalidClaim, parse_claim
from nri_numa.kube.api import uid_of
from nri_numa.model.counted_containers import counted_container_hash
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import SMT
from nri_numa.scheduler.eviction_search import EvictablePod


class ReleaseReader:
    """Reads the pods of one node.

    Args:
        published: numbers of the node, which name the containers that they count.
        claims_by_pod: ResourceClaims by UID of a pod that they are reserved for.
        driver: DRA driver of this project.
    """

    def __init__(
        self,
        reader: PodReader,
        nodes: ClusterState,
        node: str,
        published: NodeResources,
        claims_by_pod: Mapping[str, Iterable[Mapping[str, Any]]],
        driver: str,
    ) -> None:
        self._reader, self._assumed_pods, self._published = reader, nodes.assumed_pods, published
        self._node, self._claims_by_pod, self._driver = node, claims_by_pod, driver
        hashes = published.counted_containers
        self._counted_hashes = None if hashes is None else frozenset(hashes.split())

    def read_evictable_pod(
        self, document: Mapping[str, Any], budgets: Iterable[DisruptionBudget]
    ) -> EvictablePod:
        """Read a pod as the search has it."""
        request = self._reader.read_pod_request(document)
        return EvictablePod(
            uid=uid_of(document),
            full_name=f"{request.namespace}/{request.name}",
            priority=request.priority,
            released=self.read_release(document),
            is_movable=_is_movable(request),
            sums=pod_sums(document),
            budgets=tuple(n for n, budget in enumerate(budgets) if budget.covers(document)),
            repels_others=repels_other_pods(document),
        )

    def read_release(self, document: Mapping[str, Any]) -> ResourceCounts | None:
        """Return what a pod gives back: its reservation, or what the node counts of it."""
        request, size = self._reader.read_pod_request(document), len(self._published.ids)
        assumed_pod = self._assumed_pods.get(request.uid)
        charge = None if assumed_pod is None else assumed_pod.uncounted_charge(self._published)
        if charge is not None:
            return charge if len(charge.exclusive) == size else None
        containers = list(filter(partial(self._is_counted, request.uid), request.containers))
        if placed := self._reader.assigned_numa_nodes(document):
            # The publisher names memory nodes.
            containers = [c for c in containers if c.amounts]
        elif not _is_movable(request):  # it may have left the NUMA nodes of its Binding
            placed = self._reader.scheduled_numa_nodes(document)
        if request.pod_scope_request is not None and len(containers) < len(request.containers):
            return None
        for number, device in enumerate(self._claimed_devices(document)):
            # Memory is not given back: a claim does not say on which NUMA nodes it is charged.
            name = f"claim/{number}"
            containers.append(
                ContainerRequest(container=name, exclusive_cpus=device.cpus, smt=SMT.ANY)
            )
            placed[name] = NUMASet([device.numa_node])
        request = replace(request, containers=tuple(containers))
        return self._published.min_release_of_pod(request, placed) if placed else None

    def _is_counted(self, uid: str, container: ContainerRequest) -> bool:
        hashes = self._counted_hashes
        return hashes is None or counted_container_hash(uid, container.container) in hashes

    def _claimed_devices(self, document: Mapping[str, Any]) -> list[ClaimedDevice]:
        """Return the devices of a pod's claims if the node counts all containers that use them."""
        uid, uses = uid_of(document), claim_uses(document)
        hashes = {counted_container_hash(uid, container) for container, _ in uses}
        if not (uses and self._counted_hashes and hashes <= self._counted_hashes):
            return []
        used_requests, devices = {request for _, request in uses}, list[ClaimedDevice]()
        for claim_document in self._claims_by_pod.get(uid, ()):
            with contextlib.suppress(InvalidClaim):  # not of this driver, or its pod does not start
                claim = parse_claim(claim_document, driver=self._driver, pool=self._node)
                devices += [d for d in claim.results if used_requests & {"", d.request}]
        return devices


def _is_movable(request: PodRequest) -> bool:
    return any(c.is_movable for c in request.containers)
