"""A made-up kubelet's books of devices: who has which, and what that means for a place.

A kubelet gives all containers of a pod their devices when it admits the pod, before nri-numa is
asked about the first of them. Which ones it takes is left to its topology manager and the device
plugin; here it is the first that are free, in the order of the inventory, so that whoever wonders
about another choice writes another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from nri_numa.engine.decision import Trace
from nri_numa.engine.values.workload import (
    MOST_DEVICES,
    Container,
    Device,
    DeviceRequest,
    PodSandbox,
)
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import numa_text
from nri_numa.simulate.inventory import Inventory
from nri_numa.simulate.manifests.pods import PodManifest, Role

REASON: Final = "UnexpectedAdmissionError"
"""By which a kubelet says that it has too few devices (``pkg/kubelet/lifecycle/predicate.go``)."""

Given = Mapping[str, tuple[Device, ...]]
"""Devices of one container, by resource."""


class TooFew(msgspec.Struct, frozen=True):
    """A container asks for more devices than are free."""

    container: str
    resource: str
    asked: int
    free: int
    known: int

    @property
    def message(self) -> str:
        """In a sentence."""
        return (
            f"container {self.container}: {self.asked} {self.resource} needed, {self.free} of the "
            f"inventory's {self.known} are free"
        )


class DeviceBooks:
    """Which devices are given to whom.

    Args:
        inventory: what there is.
        places: the NUMA nodes where containers can be placed.
    """

    def __init__(self, inventory: Inventory, places: NUMASet) -> None:
        self._inventory = inventory
        self._places = places
        self._by_pod: dict[str, dict[str, Given]] = {}

    def give(self, pod: PodManifest) -> TooFew | None:
        """Give a pod's containers their devices, or none of them any.

        What an init container had is taken first for those after it, as it has ended by then.
        """
        free = self._free()
        ended: dict[str, list[Device]] = {}
        given: dict[str, Given] = {}
        for container in pod.containers:
            own: dict[str, tuple[Device, ...]] = {}
            for resource, count in sorted(container.devices.items()):
                pool = [*ended.get(resource, ()), *free[resource]]
                if len(pool) < count:
                    known = len(self._inventory[resource])
                    return TooFew(container.name, resource, count, len(pool), known)
                own[resource] = taken = tuple(pool[:count])
                had = ended.get(resource, [])
                free[resource] = [one for one in free[resource] if one not in taken]
                if container.role is Role.INIT:
                    ended[resource] = [*had, *(one for one in taken if one not in had)]
                else:
                    ended[resource] = [one for one in had if one not in taken]
            if own:
                given[container.name] = own
        if given:
            self._by_pod[pod.uid] = given
        return None

    def take_back(self, pod: PodManifest) -> None:
        """The pod is gone."""
        self._by_pod.pop(pod.uid, None)

    def of(self, pod: PodManifest, container: str) -> Given:
        """What a container was given."""
        return self._by_pod.get(pod.uid, {}).get(container, {})

    def hints(
        self, pod: PodManifest, container: str
    ) -> tuple[tuple[DeviceRequest, ...], tuple[DeviceRequest, ...], tuple[str, ...]]:
        """Hints of a container, those of its whole pod, and sentences about what gives none."""
        own, notes = self._hints([self.of(pod, container)])
        together, _ = self._hints(list(self._by_pod.get(pod.uid, {}).values()))
        return own, together, notes

    def _hints(self, of: list[Given]) -> tuple[tuple[DeviceRequest, ...], tuple[str, ...]]:
        by_resource: dict[str, dict[str, Device]] = {}
        for given in of:
            for resource, had in given.items():
                by_resource.setdefault(resource, {}).update((one.id, one) for one in had)
        if sum(map(len, by_resource.values())) > MOST_DEVICES:
            return (), (f"it has more than {MOST_DEVICES} devices: no hint",)
        requests: list[DeviceRequest] = []
        notes: list[str] = []
        for resource, devices in sorted(by_resource.items()):
            placed: list[Device] = []
            for one in devices.values():
                usable = frozenset(i for i in one.numa_nodes if i in self._places)
                if usable:
                    placed.append(Device(id=one.id, numa_nodes=usable))
                elif one.numa_nodes:
                    where = numa_text(NUMASet(sorted(one.numa_nodes)))
                    notes.append(
                        f"its {resource} {one.id} is on {where}, where no CPUs are: no hint"
                    )
                else:
                    notes.append(f"its {resource} {one.id} tells no NUMA node: no hint")
            if placed:
                requests.append(
                    DeviceRequest(resource=resource, count=len(placed), devices=tuple(placed))
                )
        return tuple(requests), tuple(notes)

    def free_by_node(self) -> dict[int, int]:
        """By NUMA node, how many devices of all kinds nobody has."""
        found: dict[int, int] = {}
        for devices in self._free().values():
            for one in devices:
                for i in one.numa_nodes:
                    found[i] = found.get(i, 0) + 1
        return found

    def _free(self) -> dict[str, list[Device]]:
        used = {
            (resource, one.id)
            for pod in self._by_pod.values()
            for given in pod.values()
            for resource, devices in given.items()
            for one in devices
        }
        return {
            resource: [one for one in devices if (resource, one.id) not in used]
            for resource, devices in self._inventory.items()
        }


def too_few_trace(sandbox: PodSandbox, container: Container) -> Trace:
    """How that refusal came about: nothing of the node was looked at."""
    return Trace(pod=sandbox, container=container, rule="the kubelet gives devices before it asks")
