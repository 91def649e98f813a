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

from nri_numa.cluster.outbox import Shelf
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Form, Outcome, Request, Resource, Result, Verb
from nri_numa.dra.claims import CPU, MEMORY, PAGES, device_name
from nri_numa.http.responses import Slots, Zone, Zones

API_VERSION: Final = "resource.k8s.io/v1"
NUMA_NODE: Final = "resource.kubernetes.io/numaNode"
"""KEP-6072; standard from Kubernetes 1.37, and an ordinary attribute before."""
PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
"""Standard; a list of them needs DRAListTypeAttributes (KEP-5491, alpha)."""
MOST_DEVICES: Final = 128
MOST_WITH_LISTS: Final = 64
"""Devices of a slice in which one has a list (KEP-5491)."""
MOST_VALUES: Final = 16
"""Of a list here; more PCIe roots has no NUMA node that we know of."""
AGAIN: Final = (1.0, 5.0, 30.0)
"""Seconds after the kubelet took the driver at which the slice is looked at: whether its deletion
comes before or after that is not said anywhere."""
MERGED: Final = 5.0
"""Seconds between two writes that differ in what is free."""


def devices(
    zones: Zones, slots: Slots, driver: str, *, lists: bool = False
) -> list[dict[str, Any]]:
    """The devices of this Node, ordered by NUMA node; where no CPUs can be had there is none.

    An attribute with several values is left out unless it may be a list: one of them alone would
    have a claim for a card behind another look far from here.

    A claim that is allocated goes on counting against the capacity, so the CPUs of containers with
    claims are in it. Those of containers that ask by annotation are not.
    """
    counted = {one.id: one.held + (one.free if slots.ready else 0) for one in slots.numa_nodes}
    return [
        _device(zone, counted.get(zone.id, 0), zones.threads_per_core, driver, lists)
        for zone in sorted(zones.zones, key=lambda one: one.id)
        # Without any to give away there is nothing to offer, and a capacity below its own least
        # request is invalid.
        if counted.get(zone.id, 0) > 0
    ][: MOST_WITH_LISTS if lists else MOST_DEVICES]


def _device(zone: Zone, cpus: int, threads: int, driver: str, lists: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        NUMA_NODE: {"int": zone.id},
        f"{driver}/smt": {"bool": threads > 1},
        f"{driver}/threadsPerCore": {"int": threads},
    }
    if zone.socket is not None:
        attributes[f"{driver}/socket"] = {"int": zone.socket}
    if zone.core_kind:
        attributes[f"{driver}/coreKind"] = {"string": zone.core_kind}
    if len(zone.pcie_roots) == 1:
        attributes[PCIE_ROOT] = {"string": zone.pcie_roots[0]}
    elif zone.pcie_roots and lists:
        attributes[PCIE_ROOT] = {"strings": list(zone.pcie_roots[:MOST_VALUES])}
    capacity = {
        # A request that names no amount takes all there is, unless a default says otherwise.
        f"{driver}/{CPU}": {"value": str(cpus), "requestPolicy": _whole(cpus)},
        f"{driver}/{MEMORY}": _amount(zone.memory_allocatable_bytes),
    }
    for pages in zone.huge_pages:
        if pages.allocatable_bytes:
            name = f"{driver}/{PAGES}{_size(pages.size_bytes)}"
            capacity[name] = _amount(pages.allocatable_bytes)
    return {
        "name": device_name(zone.id),
        "attributes": attributes,
        "allowMultipleAllocations": True,
        "capacity": capacity,
    }


def _whole(most: int) -> dict[str, Any]:
    """Whole CPUs, one by default. A range must have room for one step (KEP-5075)."""
    if most < 2:
        return {"default": "1", "validValues": ["1"]}
    return {"default": "1", "validRange": {"min": "1", "step": "1"}}


def _amount(size: int) -> dict[str, Any]:
    return {"value": str(size), "requestPolicy": {"default": "0", "validRange": {"min": "0"}}}


def _size(size: int) -> str:
    for unit, shift in (("Gi", 30), ("Mi", 20)):
        if size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size >> 10}Ki"


class SliceOutput:
    """One ResourceSlice.

    Args:
        node: name of the Node, and of the pool.
        driver: whose devices.

    Attributes:
        problem: why it is not published, as a sentence; else empty.
    """

    def __init__(self, node: str, driver: str) -> None:
        self.name = "slices"
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""
        self._node, self._driver = node, driver
        self._slice = f"00000-{driver}-{node}"[:253].rstrip("-.")
        self._wanted: list[dict[str, Any]] | None = None
        self._sent: list[dict[str, Any]] | None = None
        self._owner_uid = ""
        self._looks: list[float] = []
        self._failures: Shelf[str] = Shelf(1)

    def want(self, found: list[dict[str, Any]]) -> None:
        """These are the devices."""
        if found != self._wanted:
            self._wanted = found
            self._failures.want("slice", self)

    def look(self, now: float) -> None:
        """The kubelet took the driver, and may have deleted the slice."""
        self._looks = [now + after for after in AGAIN]

    def due(self, now: float) -> Request | None:
        """The Node's UID first, then the slice."""
        if self.next_due() > now:
            return None
        if self._looks and self._looks[0] <= now:
            self._looks = [at for at in self._looks if at > now]
            self._sent = None
        if not self._owner_uid:
            return Request(
                output=self.name, verb=Verb.GET, resource=Resource.NODES, name=self._node
            )
        # Applying what is there already changes nothing, so nobody has to look first; and nobody
        # else has any business with the devices of our driver.
        return Request(
            output=self.name,
            verb=Verb.PATCH,
            resource=Resource.SLICES,
            name=self._slice,
            form=Form.APPLY,
            body=self._body(),
            force=True,
            whole=True,
        )

    def _body(self) -> dict[str, Any]:
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._owner_uid}
        return {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": self._slice, "ownerReferences": [{**owner, "controller": True}]},
            "spec": {
                "driver": self._driver,
                "nodeName": self._node,
                "pool": {"name": self._node, "generation": 1, "resourceSliceCount": 1},
                "devices": self._wanted,
            },
        }

    def next_due(self) -> float:
        """When the next request may be made."""
        if self._wanted is None:
            return float("inf")
        if self.waiting():
            return max(self.hold_until, self._failures.next_due())
        return max(self.hold_until, min(self._looks, default=float("inf")))

    def waiting(self) -> int:
        """1 while the slice is not known to be as it should."""
        if self._wanted is None:
            return 0
        return int(not self._owner_uid or self._wanted != self._sent)

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        result = outcome.result
        if result is Result.DONE and request.resource is Resource.NODES:
            self._owner_uid = outcome.documents[0]["metadata"].get("uid") or "-"
        elif result is Result.DONE:
            self._did(request, outcome.documents[0], now)
        elif result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
        else:  # the Node is not registered yet, or the server does not know the kind
            self._owner_uid = ""
            self._failures.later("slice", now, jitter)

    def _did(self, request: Request, document: Mapping[str, Any], now: float) -> None:
        self._sent = request.body["spec"]["devices"]
        self.hold_until = now + MERGED
        found = (document.get("spec") or {}).get("devices") or []
        kept = all(one.get("allowMultipleAllocations") for one in found)
        self.problem = (
            ""
            if kept
            else "the API server dropped allowMultipleAllocations: it does not know consumable "
            "capacity (feature gate DRAConsumableCapacity, on by default from Kubernetes 1.36)"
        )
        self._failures.drop("slice")
        self._failures.want("slice", self)

    def resync(self) -> None:
        """Look at the Node again, and apply the slice once more."""
        self._owner_uid, self._sent = "", None
