"""The NUMA nodes of all nodes, as the controller's page shows them.

Whether a pod fits is judged as the scheduler judges it. Pods on their way to a node are not counted
here: the page shows what the nodes publish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

from msgspec import Meta, Struct

from nri_numa import service
from nri_numa.config import AgentConfig, settings
from nri_numa.kube.requests import annotations_of
from nri_numa.model.offline_capacity import DRAINED, BadCapacity, numa_nodes
from nri_numa.scheduler.candidates import NO_OBJECT, CandidateIndex
from nri_numa.scheduler.fit import Fits
from nri_numa.scheduler.node_room import NodeRoom
from nri_numa.scheduler.nodes import Known, Nodes
from nri_numa.scheduler.pod_reader import POLICIES, PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.text import BadQuantity, whole_bytes

MOST: Final = 500
"""Nodes of one answer; with four NUMA nodes each it has a quarter of a megabyte."""
INTERNAL: Final = "InternalIP"
"""Type of the address of a Node by which the cluster reaches it."""
_CHUNK: Final = 100
"""Nodes that are counted before other tasks have a turn."""


DEFAULT: Final = "single-numa-node"
FULL: Final = 1000
"""A capacity factor of 1, in thousandths."""


class BadQuery(Exception):
    """What cannot be asked; the text names the key, the value and what was expected."""


class Query(Struct, frozen=True):
    """A pod that should fit, and which nodes are shown.

    Attributes:
        cpus: exclusive CPUs; 0 for none.
        memory: bytes.
        only: nodes on which it does not fit are left out.
        name: part of the names of nodes.
        state: only nodes that are in it.
        sort: which nodes come first; among equal ones those where the pod fits best.
        grid: give all nodes in short, too.
        node: of all that are shown, this one alone in full.
        offset, limit: which of them.
    """

    cpus: int = 0
    memory: int = 0
    policy: str = DEFAULT
    only: bool = False
    name: str = ""
    state: str = ""
    sort: str = "name"
    grid: bool = False
    node: str = ""
    offset: int = 0
    limit: int = 200


class Cell(Struct, frozen=True, omit_defaults=True):
    """One node in short, its exclusive CPUs; ``state`` is empty where all is well."""

    name: str
    cpus: int = 0
    free: int = 0
    largest: int = 0
    fragmentation: float = 0.0
    state: str = ""
    fits: bool | None = None


STATES: Final = ("unknown", "not-ready", "drained", "lowered")
"""What is not well about a node, the worst first: nothing is published, its agent does not place
containers, NUMA nodes are drained, or their capacity factor is below 1."""
SORTS: Final[Mapping[str, Callable[[Cell], float]]] = {
    "name": lambda _: 0,
    "free": lambda cell: -cell.free,
    "fragmented": lambda cell: -cell.fragmentation,
    "problems": lambda cell: STATES.index(cell.state) if cell.state else len(STATES),
}
"""By what nodes are sorted, the smallest first; equal ones by fit, then by name."""


class Zone(Struct, frozen=True, rename="camel"):
    """One NUMA node."""

    id: int
    exclusive_cpus: int
    free_exclusive_cpus: int
    memory_bytes: int
    free_memory_bytes: int
    capacity_factor: float
    drained: bool


class Machine(Struct, frozen=True, rename="camel"):
    """One node; ``fits`` is null where nothing was asked."""

    name: str
    page: str
    problem: str
    agent_ready: bool
    drained: str
    zones: list[Zone]
    largest_exclusive_request: int
    fragmentation: Annotated[float, Meta(description="0 to 1")]
    fits: bool | None
    numa_nodes: str
    reason: str


def query_of(given: Mapping[str, str]) -> Query:
    """Read a query string.

    Raises:
        BadQuery: something in it is no such thing.
    """
    known = sorted(Query.__struct_fields__)
    for key in given:
        if key not in known:
            raise BadQuery(f"{ascii(key)[:40]}: unknown, expected one of {', '.join(known)}")

    def number(key: str, default: int, most: int) -> int:
        text = given.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) > most:
            raise BadQuery(f"{key} is {ascii(text)[:40]}, expected a whole number up to {most}")
        return int(text)

    try:
        memory = whole_bytes(given.get("memory") or "0")
    except BadQuantity as error:
        text = ascii(given["memory"])[:40]
        raise BadQuery(f"memory is {text}, expected {error}, such as 8Gi") from None

    def one_of(key: str, default: str, expected: Sequence[str]) -> str:
        text = given.get(key) or default
        if text and text not in expected:
            raise BadQuery(f"{key} is {ascii(text)[:40]}, expected one of {', '.join(expected)}")
        return text

    def name(key: str) -> str:
        if len(text := given.get(key, "")) > 253:
            raise BadQuery(f"{key} has {len(text)} characters, expected at most 253")
        return text

    def switch(key: str) -> bool:
        return given.get(key, "") not in ("", "false", "0")

    return Query(
        cpus=number("cpus", 0, 4096),
        memory=memory,
        policy=one_of("policy", DEFAULT, POLICIES),
        only=switch("only"),
        name=name("name"),
        state=one_of("state", "", STATES),
        sort=one_of("sort", "name", tuple(SORTS)),
        grid=switch("grid"),
        node=name("node"),
        offset=number("offset", 0, 1_000_000),
        limit=max(1, number("limit", 200, MOST)),
    )


class Overview:
    """What is known of all nodes; `revision` is another one after each change."""

    def __init__(self, config: AgentConfig) -> None:
        self.revision = 0
        self._prefix = config.annotation_prefix
        found = settings(config)
        self._reader = PodReader(found)
        self._nodes = Nodes()
        self._candidates = CandidateIndex(self._nodes, found.strategy)
        self._drained: dict[str, frozenset[int]] = {}
        self._page = config.controller.page.node_url
        self._addresses: dict[str, str] = {}

    @property
    def addresses(self) -> bool:
        """Whether more is needed of Nodes than their metadata."""
        return "{address}" in self._page

    # --- what is there ----------------------------------------------------------------------------

    def node(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists, new or changed."""
        try:
            drained = numa_nodes(annotations_of(document).get(f"{self._prefix}/{DRAINED}", ""))
        except BadCapacity:
            drained = frozenset()
        addresses = (document.get("status") or {}).get("addresses") or ()
        address = next((a.get("address", "") for a in addresses if a.get("type") == INTERNAL), "")
        if (self._drained.get(name), self._addresses.get(name)) != (drained, address):
            self._drained[name], self._addresses[name] = drained, address
            self.revision += 1

    def node_removed(self, name: str) -> None:
        """A Node does not exist any more."""
        self._addresses.pop(name, None)
        if self._drained.pop(name, None) is not None:
            self.revision += 1

    def put_room(self, name: str, room: Known) -> None:
        """A NodeResourceTopology exists, new or changed."""
        before = self._nodes.published(name)
        self._nodes.put(name, room)
        if self._nodes.published(name) is not before:
            self.revision += 1

    def topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._nodes.remove(name)
        self.revision += 1

    def silence(self, name: str) -> None:
        """A NodeResourceTopology is not valid any more."""
        self.revision += self._nodes.silence(name)

    # --- what is shown ----------------------------------------------------------------------------

    async def document(self, query: Query) -> dict[str, Any]:
        """The answer to a query; gives way to others while it judges thousands of nodes."""
        revision = self.revision
        every = sorted(self._drained.keys() | self._nodes.names)
        states = {name: self._state(name) for name in every}
        names = [name for name in every if query.name in name and query.state in ("", states[name])]
        request = self._request(query)
        verdicts: dict[str, str] = {}  # reason by node; empty where it fits
        fits: dict[str, int] = {}
        if request is not None:
            fits = await self._judged(request, names, verdicts)
            names = [name for name in names if name in fits or not query.only]
        asked = request is not None
        cells: dict[str, Cell] = {}
        for at in range(0, len(names), _CHUNK):
            for name in names[at : at + _CHUNK]:
                cells[name] = self._cell(name, states[name], name in fits if asked else None)
            await asyncio.sleep(0)
        # Where it fits first; then as asked, the best for the pod, and the name.
        by = SORTS[query.sort]
        names.sort(key=lambda n: (asked and n not in fits, by(cells[n]), -fits.get(n, 0), n))
        chosen = names[query.offset : query.offset + query.limit]
        if query.node:
            chosen = [name for name in names if name == query.node]
        shown: list[Machine] = []
        for name in chosen:
            shown.append(self._machine(name, request, verdicts.get(name)))
            if len(shown) % _CHUNK == 0:
                await asyncio.sleep(0)
        rooms = [t for name in every if isinstance(t := self._nodes.published(name), NodeRoom)]
        return {
            "revision": revision,
            "total": {
                "nodes": len(every),
                "unknownNodes": len(every) - len(rooms),
                "exclusiveCpus": sum(sum(one.exclusive.capacity) for one in rooms),
                "freeExclusiveCpus": sum(sum(one.exclusive.free) for one in rooms),
                "largestExclusiveRequest": max((max(t.exclusive.free) for t in rooms), default=0),
                "fragmentation": fragmentation(
                    sum(max(one.exclusive.free) for one in rooms), sum(map(_at_best, rooms))
                ),
                "drainedNumaNodes": sum(map(len, self._drained.values())),
                "states": {s: n for s, n in Counter(states.values()).items() if s},
            },
            "asked": asked,
            "problem": request.wrong if request is not None else "",
            "matching": len(names),
            "fitting": len(fits),
            "offset": query.offset,
            "nodes": shown,
            "grid": [cells[name] for name in names] if query.grid else [],
        }

    def _state(self, name: str) -> str:
        room = self._nodes.published(name)
        if not isinstance(room, NodeRoom):
            return "unknown"
        if room.silent:
            return "not-ready"
        if self._drained.get(name):
            return "drained"
        return "lowered" if min(room.factor) < FULL else ""

    def _cell(self, name: str, state: str, fits: bool | None) -> Cell:
        room = self._nodes.published(name)
        if not isinstance(room, NodeRoom):
            return Cell(name=name, state=state, fits=fits)
        free = room.exclusive.free
        return Cell(
            name=name,
            cpus=sum(room.exclusive.capacity),
            free=sum(free),
            largest=max(free),
            fragmentation=fragmentation(max(free), _at_best(room)),
            state=state,
            fits=fits,
        )

    def _page_of(self, name: str) -> str:
        address = self._addresses.get(name, "")
        if not self._page or ("{address}" in self._page and not address):
            return ""
        host = f"[{address}]" if ":" in address else address
        return self._page.replace("{node}", quote(name, safe="")).replace("{address}", host)

    def _request(self, query: Query) -> PodRequest | None:
        """What a pod of one container would ask for; None where nothing is."""
        if not query.cpus and not query.memory:
            return None
        return self._reader.plain(cpus=query.cpus, memory=query.memory, policy=query.policy)

    async def _judged(
        self, request: PodRequest, names: Sequence[str], reasons: dict[str, str]
    ) -> dict[str, int]:
        """The scores of those that fit; the others' reasons are put into ``reasons``."""
        found = await service.in_turns(self._candidates.filtering(request, names))
        reasons.update(found.failed)
        reasons.update(found.hopeless)
        reasons.update(dict.fromkeys(found.fits, ""))
        # What was found for the filter is remembered: nothing is judged twice.
        scores = await service.in_turns(self._candidates.prioritizing(request, found.fits))
        return dict.fromkeys(found.fits, 0) | dict(scores)

    def _machine(self, name: str, request: PodRequest | None, reason: str | None) -> Machine:
        room = self._nodes.published(name)
        drained = self._drained.get(name, frozenset())
        places = ""
        if request is not None and not request.nothing and reason == "":
            verdict = self._candidates.verdict(request, name)
            if isinstance(verdict, Fits) and verdict.places:
                places = str(verdict.places[0][1])
        if not isinstance(room, NodeRoom):
            problem = self._candidates.why(name) or NO_OBJECT
            zones: list[Zone] = []
        else:
            problem = ""
            memory = next((one for one in room.others if one.name == "memory"), None)
            zones = [
                Zone(
                    id=i,
                    exclusive_cpus=room.exclusive.capacity[place],
                    free_exclusive_cpus=room.exclusive.free[place],
                    memory_bytes=memory.capacity[place] if memory else 0,
                    free_memory_bytes=memory.free[place] if memory else 0,
                    capacity_factor=room.factor[place] / FULL,
                    drained=i in drained,
                )
                for place, i in enumerate(room.ids)
            ]
        return Machine(
            name=name,
            page=self._page_of(name),
            problem=problem,
            agent_ready=isinstance(room, NodeRoom) and not room.silent,
            drained=",".join(map(str, sorted(drained))),
            zones=zones,
            largest_exclusive_request=max((z.free_exclusive_cpus for z in zones), default=0),
            fragmentation=(
                fragmentation(max(room.exclusive.free), _at_best(room))
                if isinstance(room, NodeRoom)
                else 0.0
            ),
            fits=None if request is None else reason == "",
            numa_nodes=places,
            reason=reason or "",
        )


def fragmentation(largest: int, at_best: int) -> float:
    """Part of the largest possible exclusive request that is lost because free CPUs lie apart.

    `at_best` would fit if all free CPUs were together: no more than the largest NUMA node has.
    """
    return round(1 - largest / at_best, 3) if at_best > 0 else 0.0


def _at_best(room: NodeRoom) -> int:
    return min(sum(room.exclusive.free), max(room.exclusive.capacity))
