"""List of slots: the ids that are offered, those that containers hold, and their order.

An id does not name a CPU. ``slot-7`` stands for any exclusive CPU of the machine, ``numa1-slot-7``
for any of a NUMA node; the agent chooses the CPU when the container is created. So only the number
of ids matters, and that no id of a container is removed: the kubelet does not restart a container
whose id is missing or unhealthy.

Pure: times are parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

import msgspec

from nri_numa.errors import UnknownSlots
from nri_numa.web.responses import ExclusiveCPUSlotsDocument

PENDING_SLOT_TIMEOUT_S: Final = 600.0
"""Seconds in which an allocated id counts as taken although no container has it yet: its image may
have to be pulled first."""

_SLOT_NUMA_PREFIX_PATTERN: Final = re.compile(r"numa([0-9]{1,4})-")


class Slot(msgspec.Struct, frozen=True):
    """One id as the kubelet knows it.

    Attributes:
        id: its name.
        healthy: True if new containers may get it. An id that a container holds is always healthy.
        numa_node: the NUMA node that is announced with it, or None.
    """

    id: str
    healthy: bool = True
    numa_node: int | None = None


def numa_node_of_slot(id: str) -> int | None:
    """Return the NUMA node that an id names, or None."""
    match = _SLOT_NUMA_PREFIX_PATTERN.match(id)
    return int(match[1]) if match else None


class SlotList:
    """Advertised slots, from the agent's counts and the kubelet's allocations.

    Args:
        topology: announce the NUMA node of each slot, which the agent must then use.
        pack: prefer the NUMA node with the fewest sufficient slots, not the one with the most.
    """

    def __init__(self, *, topology: bool = False, pack: bool = False) -> None:
        self._topology = topology
        self._pack = pack
        self._counts: ExclusiveCPUSlotsDocument | None = None
        self._ready = False
        self._pending_slots: dict[str, float] = {}
        self._node_by_slot: dict[str, int | None] = {}
        self.slots: tuple[Slot, ...] = ()

    @property
    def annotation_key(self) -> str:
        """Key of the annotation in an answer to Allocate."""
        return "" if self._counts is None else self._counts.annotation

    def record_allocated(self, ids: Iterable[str], allocated_at: float) -> None:
        """Record the ids that the kubelet reports as allocated at the start."""
        self._pending_slots.update(dict.fromkeys(ids, allocated_at))
        self._node_by_slot.update({id: numa_node_of_slot(id) for id in self._pending_slots})

    def apply_counts(self, counts: ExclusiveCPUSlotsDocument, queried_at: float) -> bool:
        """Apply the counts of a ready agent; True if the list changed."""
        self._counts, self._ready = counts, True
        return self._rebuild_slots(queried_at)

    def stop_offering(self, queried_at: float) -> bool:
        """Stop offering free slots, because the agent is not ready; True if the list changed."""
        self._ready = False
        return self._rebuild_slots(queried_at)

    def _rebuild_slots(self, queried_at: float) -> bool:
        if self._counts is None:
            return False
        held_ids = set(self._counts.ids)
        self._pending_slots = {
            id: allocated_at
            for id, allocated_at in self._pending_slots.items()
            if id not in held_ids and queried_at - allocated_at < PENDING_SLOT_TIMEOUT_S
        }
        ids = held_ids | self._pending_slots.keys()
        slots = {
            id: Slot(id, numa_node=numa_node_of_slot(id) if self._topology else None) for id in ids
        }
        counts = {item.id: max(0, item.free) for item in self._counts.numa_nodes}
        if not self._topology:
            counts = {-1: sum(counts.values())}
        for id in self._pending_slots:
            # The agent still counts its CPU as free.
            node = numa_node_of_slot(id)
            if node is None or node not in counts:
                node = max(counts, key=lambda i: counts[i])
            counts[node] -= 1
        for i, free_count in sorted(counts.items()):
            prefix, numbers = (f"numa{i}-slot-" if self._topology else "slot-"), count()
            for _ in range(free_count):
                id = next(f"{prefix}{n}" for n in numbers if f"{prefix}{n}" not in slots)
                slots[id] = Slot(id, self._ready, i if self._topology else None)
        prior, self.slots = self.slots, tuple(slots[id] for id in sorted(slots, key=_slot_sort_key))
        self._node_by_slot.update((slot.id, slot.numa_node) for slot in self.slots)
        return prior != self.slots

    def allocate_slots(self, ids: Sequence[str], allocated_at: float) -> str:
        """Record the kubelet's allocation for one container; return the annotation's text.

        Raises:
            UnknownSlots: one of the ids was never offered.
        """
        unknown_ids = [id for id in ids if id not in self._node_by_slot]
        if unknown_ids or not ids:
            offered = f"{len(self.slots)} ids such as {self.slots[0].id}" if self.slots else "none"
            ids_text = ", ".join(repr(id[:64]) for id in unknown_ids[:3]) or "no ids"
            raise UnknownSlots(f"Allocate of {ids_text}, expected ids that were offered: {offered}")
        # Also an id that a container held at the last count: the kubelet knows first of its end.
        self._pending_slots.update(dict.fromkeys(ids, allocated_at))
        return ",".join(sorted(ids, key=_slot_sort_key))

    def preferred_ids(self, ids: Iterable[str], required: Sequence[str], size: int) -> list[str]:
        """Return the ids that a container should get: on few NUMA nodes, with low numbers."""
        chosen_ids = list(required)
        by_node: dict[int | None, list[str]] = {}
        for id in sorted(set(ids) - set(required), key=_slot_sort_key):
            by_node.setdefault(self._node_by_slot.get(id, numa_node_of_slot(id)), []).append(id)
        required_nodes = {self._node_by_slot.get(id, numa_node_of_slot(id)) for id in required}
        while len(chosen_ids) < size and by_node:
            need = size - len(chosen_ids)
            # On a node of the required ids; with enough slots, by the strategy; then the lowest.
            node = min(
                by_node,
                key=lambda i: (
                    i not in required_nodes,
                    len(by_node[i]) < need,
                    len(by_node[i]) if self._pack and len(by_node[i]) >= need else -len(by_node[i]),
                    -1 if i is None else i,
                ),
            )
            chosen_ids += by_node.pop(node)[:need]
        return chosen_ids


def _slot_sort_key(id: str) -> tuple[int, int, str]:
    """Return the key that sorts by NUMA node, then by number, then by text."""
    node, number = numa_node_of_slot(id), id.rpartition("-")[2]
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    return -1 if node is None else node, int(number) if is_number else 0, id
