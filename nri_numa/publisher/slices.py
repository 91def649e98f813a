"""The ResourceSlice of one Node: each NUMA node as a device with consumable capacity. Pure.

The kubelet deletes the slices of its Node when it starts, and a driver's half a minute after it
lost the connection (kubernetes ``pkg/kubelet/cm/dra``), so it is looked at again whenever the
kubelet has taken the driver, and at every resync.

One slice holds all NUMA nodes (a slice has room for 128 devices), so the pool's generation has
nothing to tell and stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nri_numa.dra.claims import (
    CPU_CAPACITY,
    HUGEPAGES_CAPACITY_PREFIX,
    MEMORY_CAPACITY,
    NUMA_NODE_ATTRIBUTE,
    numa_node_device_name,
)
from nri_numa.kube.requests import APIRequest, Resource
from nri_numa.publisher.outbox import AppliedObjectOutput, node_owner_reference
from nri_numa.publisher.topology import hugepages_resource_name
from nri_numa.text import HUGEPAGES_PREFIX
from nri_numa.web.responses import ExclusiveCPUSlotsDocument, Zone, Zones

RESOURCE_SLICE_API_VERSION: Final = "resource.k8s.io/v1"
PCIE_ROOT_ATTRIBUTE: Final = "resource.kubernetes.io/pcieRoot"
"""Standard; a list of them needs DRAListTypeAttributes (KEP-5491, alpha)."""
MAX_SLICE_DEVICES: Final = 128
MAX_SLICE_DEVICES_WITH_LISTS: Final = 64
"""Devices of a slice in which one has a list (KEP-5491)."""
MAX_LISTED_PCIE_ROOTS: Final = 16
"""Of a list here; more PCIe roots has no NUMA node that we know of."""
SLICE_RECHECK_DELAYS_S: Final = (1.0, 5.0, 30.0)
"""Seconds after the kubelet took the driver at which the slice is looked at: whether its deletion
comes before or after that is not said anywhere."""
MIN_SLICE_WRITE_INTERVAL_S: Final = 5.0
"""Seconds between two writes that differ in what is free."""


def build_slice_devices(
    zones: Zones, slots: ExclusiveCPUSlotsDocument, driver: str, *, lists: bool = False
) -> list[dict[str, Any]]:
    """The devices of this Node, ordered by NUMA node; where no CPUs can be had there is none.

    An attribute with several values is left out unless it may be a list: one of them alone would
    have a claim for a card behind another look far from here.

    A claim that is allocated goes on counting against the capacity, so the CPUs of containers with
    claims are in it. Those of containers that ask by annotation are not.
    """
    counted = {one.id: one.allocated + (one.free if slots.ready else 0) for one in slots.numa_nodes}
    return [
        _build_device(zone, counted.get(zone.id, 0), zones.threads_per_core, driver, lists)
        for zone in sorted(zones.zones, key=lambda one: one.id)
        # Without any to give away there is nothing to offer, and a capacity below its own least
        # request is invalid.
        if counted.get(zone.id, 0) > 0
    ][: MAX_SLICE_DEVICES_WITH_LISTS if lists else MAX_SLICE_DEVICES]


def _build_device(zone: Zone, cpus: int, threads: int, driver: str, lists: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        NUMA_NODE_ATTRIBUTE: {"int": zone.id},
        f"{driver}/smt": {"bool": threads > 1},
        f"{driver}/threadsPerCore": {"int": threads},
    }
    if zone.socket is not None:
        attributes[f"{driver}/socket"] = {"int": zone.socket}
    if zone.core_kind:
        attributes[f"{driver}/coreKind"] = {"string": zone.core_kind}
    if len(zone.pcie_roots) == 1:
        attributes[PCIE_ROOT_ATTRIBUTE] = {"string": zone.pcie_roots[0]}
    elif zone.pcie_roots and lists:
        attributes[PCIE_ROOT_ATTRIBUTE] = {"strings": list(zone.pcie_roots[:MAX_LISTED_PCIE_ROOTS])}
    capacity = {
        # A request that names no amount takes all there is, unless a default says otherwise.
        f"{driver}/{CPU_CAPACITY}": {
            "value": str(cpus),
            "requestPolicy": _cpu_request_policy(cpus),
        },
        f"{driver}/{MEMORY_CAPACITY}": _bytes_capacity(zone.memory_allocatable_bytes),
    }
    for pages in zone.huge_pages:
        if pages.allocatable_bytes:
            name = f"{driver}/{hugepages_resource_name(pages.size_bytes)}".replace(
                HUGEPAGES_PREFIX, HUGEPAGES_CAPACITY_PREFIX
            )
            capacity[name] = _bytes_capacity(pages.allocatable_bytes)
    return {
        "name": numa_node_device_name(zone.id),
        "attributes": attributes,
        "allowMultipleAllocations": True,
        "capacity": capacity,
    }


def _cpu_request_policy(most: int) -> dict[str, Any]:
    """Whole CPUs, one by default. A range must have room for one step (KEP-5075)."""
    if most < 2:
        return {"default": "1", "validValues": ["1"]}
    return {"default": "1", "validRange": {"min": "1", "step": "1"}}


def _bytes_capacity(size: int) -> dict[str, Any]:
    return {"value": str(size), "requestPolicy": {"default": "0", "validRange": {"min": "0"}}}


class SliceOutput(AppliedObjectOutput):
    """The ResourceSlice of one Node; no other process has business with our driver's devices."""

    resource = Resource.SLICES
    failure_text = "the ResourceSlice is without effect"

    def __init__(self, node: str, driver: str) -> None:
        # Applying what is there already changes nothing, so there is no look before.
        super().__init__("slices", node, force=True)
        self._driver = driver
        self._object = f"00000-{driver}-{node}"[:253].rstrip("-.")
        self._checks: list[float] = []

    def set_desired(self, found: list[dict[str, Any]]) -> None:
        """These are the devices."""
        self._wanted = found

    def schedule_rechecks(self, now: float) -> None:
        """The kubelet took the driver, and may have deleted the slice."""
        self._checks = [now + after for after in SLICE_RECHECK_DELAYS_S]

    def _next_request(self, now: float) -> APIRequest | None:
        if self._checks and self._checks[0] <= now:
            self._checks = [at for at in self._checks if at > now]
            self._sent = None
        return super()._next_request(now)

    def next_due_at(self) -> float:
        """When the next request may be made."""
        if self._wanted is None or self.pending_count():
            return super().next_due_at()
        return max(self.hold_until, min(self._checks, default=float("inf")))

    def _build_object(self) -> dict[str, Any]:
        return {
            "apiVersion": RESOURCE_SLICE_API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {
                "name": self._object,
                "ownerReferences": [
                    {**node_owner_reference(self._node, self._owner_uid), "controller": True}
                ],
            },
            "spec": {
                "driver": self._driver,
                "nodeName": self._node,
                "pool": {"name": self._node, "generation": 1, "resourceSliceCount": 1},
                "devices": self._wanted,
            },
        }

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now: float) -> None:
        self.hold_until = now + MIN_SLICE_WRITE_INTERVAL_S
        found = (document.get("spec") or {}).get("devices") or []
        if not all(one.get("allowMultipleAllocations") for one in found):
            self.problem = (
                "the API server dropped allowMultipleAllocations: it does not know consumable "
                "capacity (feature gate DRAConsumableCapacity, on by default from Kubernetes 1.36)"
            )
