"""The list of slots: which ids are offered, which of them containers hold, which go first.

An id says nothing about a CPU. ``slot-7`` is one of so many exclusive CPUs of the machine,
``numa1-slot-7`` one of so many of a NUMA node; the agent chooses the CPU when the container is
created. So all that counts is how many ids there are, and that none is removed that a container
holds: the kubelet does not start a container again whose id has gone or is unhealthy.

Pure: times are handed in.
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
"""Seconds in which an id that was allocated counts as taken although no container shows up with it:
the image may have to be pulled first."""

_SLOT_NUMA_PREFIX_PATTERN: Final = re.compile(r"numa([0-9]{1,4})-")


class Slot(msgspec.Struct, frozen=True):
    """One id as the kubelet knows it.

    Attributes:
        id: its name.
        healthy: new containers may get it. One that is held is healthy, come what may.
        numa_node: announced with it; None where none is.
    """

    id: str
    healthy: bool = True
    numa_node: int | None = None


def numa_node_of_slot(id: str) -> int | None:
    """The NUMA node that an id names."""
    found = _SLOT_NUMA_PREFIX_PATTERN.match(id)
    return int(found[1]) if found else None


class SlotList:
    """What is advertised, from what the agent counts and what the kubelet allocated.

    Args:
        topology: announce the NUMA node of each slot, which binds the agent to it.
        pack: of several NUMA nodes with enough slots prefer the one with fewest, not with most.
    """

    def __init__(self, *, topology: bool = False, pack: bool = False) -> None:
        self._topology = topology
        self._pack = pack
        self._counted: ExclusiveCPUSlotsDocument | None = None
        self._ready = False
        self._under_way: dict[str, float] = {}
        self._known: dict[str, int | None] = {}
        self.slots: tuple[Slot, ...] = ()

    @property
    def annotation_key(self) -> str:
        """The annotation that an answer to Allocate carries."""
        return "" if self._counted is None else self._counted.annotation

    def record_allocated(self, ids: Iterable[str], now: float) -> None:
        """Ids that the kubelet has allocated, as far as it says when we start."""
        self._under_way.update(dict.fromkeys(ids, now))
        self._known.update({id: numa_node_of_slot(id) for id in self._under_way})

    def apply_counts(self, counted: ExclusiveCPUSlotsDocument, now: float) -> bool:
        """Take what the agent counts while it is ready; whether the list is another one now."""
        self._counted, self._ready = counted, True
        return self._rebuild_slots(now)

    def stop_offering(self, now: float) -> bool:
        """The agent is not ready: nothing new is offered, and what is held stays."""
        self._ready = False
        return self._rebuild_slots(now)

    def _rebuild_slots(self, now: float) -> bool:
        if self._counted is None:
            return False
        held = set(self._counted.ids)
        self._under_way = {
            id: since
            for id, since in self._under_way.items()
            if id not in held and now - since < PENDING_SLOT_TIMEOUT_S
        }
        kept = held | self._under_way.keys()
        made = {
            id: Slot(id, numa_node=self._announced_numa_node(numa_node_of_slot(id))) for id in kept
        }
        room = {one.id: max(0, one.free) for one in self._counted.numa_nodes}
        if not self._topology:
            room = {-1: sum(room.values())}
        for id in self._under_way:
            # The agent still counts its CPU as free.
            node = numa_node_of_slot(id)
            where = node if self._topology and node in room else max(room, key=lambda i: room[i])
            room[where] -= 1
        for i, free in sorted(room.items()):
            prefix, numbers = (f"numa{i}-slot-" if self._topology else "slot-"), count()
            for _ in range(free):
                id = next(f"{prefix}{n}" for n in numbers if f"{prefix}{n}" not in made)
                made[id] = Slot(
                    id, self._ready, self._announced_numa_node(i if self._topology else None)
                )
        before, self.slots = self.slots, tuple(made[id] for id in sorted(made, key=_slot_sort_key))
        self._known.update((slot.id, slot.numa_node) for slot in self.slots)
        return before != self.slots

    def _announced_numa_node(self, node: int | None) -> int | None:
        return node if self._topology else None

    def allocate_slots(self, ids: Sequence[str], now: float) -> str:
        """The kubelet gives these ids to one container; returns the annotation's text.

        Raises:
            UnknownSlots: one of them was never offered.
        """
        strange = [id for id in ids if id not in self._known]
        if strange or not ids:
            offered = f"{len(self.slots)} ids such as {self.slots[0].id}" if self.slots else "none"
            shown = ", ".join(repr(id[:64]) for id in strange[:3]) or "no ids"
            raise UnknownSlots(f"Allocate of {shown}, expected ids that were offered: {offered}")
        # Also of one that is held by the last count: the kubelet knows first that its pod ended.
        self._under_way.update(dict.fromkeys(ids, now))
        return ",".join(sorted(ids, key=_slot_sort_key))

    def preferred_ids(self, available: Iterable[str], must: Sequence[str], size: int) -> list[str]:
        """Which of the available ids a container should get: few NUMA nodes, low numbers."""
        chosen = list(must)
        by_node: dict[int | None, list[str]] = {}
        for id in sorted(set(available) - set(must), key=_slot_sort_key):
            by_node.setdefault(self._known.get(id, numa_node_of_slot(id)), []).append(id)
        near = {self._known.get(id, numa_node_of_slot(id)) for id in must}
        while len(chosen) < size and by_node:
            need = size - len(chosen)
            # Beside what it must include; where all of it fits, by the strategy; then the lowest.
            node = min(
                by_node,
                key=lambda i: (
                    i not in near,
                    len(by_node[i]) < need,
                    len(by_node[i]) if self._pack and len(by_node[i]) >= need else -len(by_node[i]),
                    -1 if i is None else i,
                ),
            )
            chosen += by_node.pop(node)[:need]
        return chosen


def _slot_sort_key(id: str) -> tuple[int, int, str]:
    """By NUMA node, then by number, then by text."""
    node, number = numa_node_of_slot(id), id.rpartition("-")[2]
    short = number.isascii() and number.isdigit() and len(number) < 10
    return -1 if node is None else node, int(number) if short else 0, id
