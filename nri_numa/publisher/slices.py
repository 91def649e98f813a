"""The ResourceSlice of one Node: each NUMA node as a device with consumable capacity. Pure.

The kubelet deletes the slices of its Node when it starts, and a driver's slices half a minute after
losing its connection (kubernetes ``pkg/kubelet/cm/dra``). So the slice is applied again when the
kubelet has registered the driver, and at every resync.

One slice holds all NUMA nodes (it may have 128 devices), so the pool's generation never changes.
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
from nri_numa.publisher.outbox import AppliedObjectOutput
from nri_numa.text import HUGEPAGES_PREFIX, hugepages_resource_name
from nri_numa.web.responses import ExclusiveCPUSlotsDocument, Zone, Zones

PCIE_ROOT_ATTRIBUTE: Final = "resource.kubernetes.io/pcieRoot"
"""Standard; a list of them needs DRAListTypeAttributes (KEP-5491, alpha)."""
MAX_SLICE_DEVICES: Final = 128
MAX_SLICE_DEVICES_WITH_LISTS: Final = 64
"""Devices of a slice in which one has a list (KEP-5491)."""
MAX_LISTED_PCIE_ROOTS: Final = 16
"""PCIe roots in a list; no known NUMA node has more."""
SLICE_RECHECK_DELAYS_S: Final = (1.0, 5.0, 30.0)
"""Seconds after the driver's registration at which the slice is applied again: the order of the
kubelet's deletion and the registration is not documented."""
MIN_SLICE_WRITE_INTERVAL_S: Final = 5.0
"""Minimum seconds between two writes that differ in free amounts."""


def build_slice_devices(
    zones: Zones, slots: ExclusiveCPUSlotsDocument, driver: str, *, lists: bool = False
) -> list[dict[str, Any]]:
    """Build the devices of this Node by NUMA node; a NUMA node without CPUs has none.

    An attribute with several values is omitted unless it may be a list: with one value alone, a
    card behind another PCIe root would seem to be remote.

    An allocated claim counts against the capacity, so the capacity includes the CPUs of containers
    with claims. It excludes those of containers that request CPUs by annotation.
    """
    cpus_by_node = {n.id: n.allocated + (n.free if slots.ready else 0) for n in slots.numa_nodes}
    # Without CPUs its capacity would be below its own minimum request, which is invalid.
    offered_zones = [zone for zone in zones.zones if cpus_by_node.get(zone.id, 0) > 0]
    max_devices = MAX_SLICE_DEVICES_WITH_LISTS if lists else MAX_SLICE_DEVICES
    return [
        _build_device(zone, cpus_by_node[zone.id], zones.threads_per_core, driver, lists)
        for zone in sorted(offered_zones, key=lambda z: z.id)[:max_devices]
    ]


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
        # A request without an amount takes the whole capacity, unless a default is set.
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


def _cpu_request_policy(cpus: int) -> dict[str, Any]:
    """Return the policy for whole CPUs, 1 by default. A range must span one step (KEP-5075)."""
    if cpus < 2:
        return {"default": "1", "validValues": ["1"]}
    return {"default": "1", "validRange": {"min": "1", "step": "1"}}


def _bytes_capacity(size: int) -> dict[str, Any]:
    return {"value": str(size), "requestPolicy": {"default": "0", "validRange": {"min": "0"}}}


class SliceOutput(AppliedObjectOutput):
    """The ResourceSlice of one Node; no other process writes this driver's devices."""

    name, resource, kind = "slices", Resource.SLICES, "ResourceSlice"
    failure_text = "ResourceSlice without effect"

    def __init__(self, node: str, driver: str) -> None:
        # Applying an equal object changes nothing, so it is not read first.
        super().__init__(node, force=True)
        self._driver = driver
        self._object = f"00000-{driver}-{node}"[:253].rstrip("-.")
        self._checks: list[float] = []

    def set_desired(self, devices: list[dict[str, Any]]) -> None:
        """Set the desired devices."""
        self._wanted = devices

    def schedule_rechecks(self, now_s: float) -> None:
        """Schedule checks after the driver's registration: the kubelet may delete the slice."""
        self._checks = [now_s + delay_s for delay_s in SLICE_RECHECK_DELAYS_S]

    def _next_request(self, now_s: float) -> APIRequest | None:
        if self._checks and self._checks[0] <= now_s:
            self._checks = [check_at for check_at in self._checks if check_at > now_s]
            self._sent = None
        return super()._next_request(now_s)

    def next_due_at(self) -> float:
        """Return when the next request may be made."""
        if self._wanted is None or self.pending_count():
            return super().next_due_at()
        return max(self.hold_until, min(self._checks, default=float("inf")))

    def _build_object(self) -> dict[str, Any]:
        document = super()._build_object()
        document["metadata"]["ownerReferences"][0]["controller"] = True
        return document

    def _build_contents(self) -> dict[str, Any]:
        return {
            "spec": {
                "driver": self._driver,
                "nodeName": self._node,
                "pool": {"name": self._node, "generation": 1, "resourceSliceCount": 1},
                "devices": self._wanted,
            },
        }

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now_s: float) -> None:
        self.hold_until = now_s + MIN_SLICE_WRITE_INTERVAL_S
        devices = (document.get("spec") or {}).get("devices") or []
        if not all(device.get("allowMultipleAllocations") for device in devices):
            self.problem = (
                "the API server dropped allowMultipleAllocations: it does not know consumable "
                "capacity (feature gate DRAConsumableCapacity, on by default from Kubernetes 1.36)"
            )
