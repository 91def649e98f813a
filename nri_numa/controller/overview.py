"""The NUMA nodes of all nodes, as the controller's page shows them.

Whether a pod fits is judged as the scheduler judges it. Pods on their way to a node are not counted
here: the page tells what the nodes publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from nri_numa.config import AgentConfig, settings
from nri_numa.kube.requests import annotations_of
from nri_numa.model.offline_capacity import DRAINED, BadCapacity, numa_nodes
from nri_numa.scheduler.candidates import NO_OBJECT, CandidateIndex
from nri_numa.scheduler.fit import Fits
from nri_numa.scheduler.node_room import NodeRoom
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_reader import POLICIES, PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.scheduler.published import read
from nri_numa.text import BadQuantity, whole_bytes

MOST: Final = 500
"""Nodes of one answer; with four NUMA nodes each it has a quarter of a megabyte."""
_CHUNK: Final = 100
"""Nodes that are judged before other tasks have a turn."""


DEFAULT: Final = "single-numa-node"


class BadQuery(Exception):
    """What cannot be asked; the text names the key, the value and what was expected."""


class Query(Struct, frozen=True):
    """A pod that should fit, and which nodes are shown.

    Attributes:
        cpus: exclusive CPUs; 0 for none.
        memory: bytes.
        only: nodes on which it does not fit are left out.
        name: part of the names of nodes.
        offset, limit: which of them.
    """

    cpus: int = 0
    memory: int = 0
    policy: str = DEFAULT
    only: bool = False
    name: str = ""
    offset: int = 0
    limit: int = 200


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
    known = {"cpus", "memory", "policy", "only", "name", "offset", "limit"}
    for key in given:
        if key not in known:
            raise BadQuery(
                f"{ascii(key)[:40]}: unknown, expected one of {', '.join(sorted(known))}"
            )

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
    policy = given.get("policy") or DEFAULT
    if policy not in POLICIES:
        raise BadQuery(f"policy is {ascii(policy)[:40]}, expected one of {', '.join(POLICIES)}")
    name = given.get("name", "")
    if len(name) > 253:
        raise BadQuery(f"name has {len(name)} characters, expected at most 253")
    return Query(
        cpus=number("cpus", 0, 4096),
        memory=memory,
        policy=policy,
        only=given.get("only", "") not in ("", "false", "0"),
        name=name,
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

    # --- what is there ----------------------------------------------------------------------------

    def node(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists, new or changed."""
        try:
            drained = numa_nodes(annotations_of(document).get(f"{self._prefix}/{DRAINED}", ""))
        except BadCapacity:
            drained = frozenset()
        if self._drained.get(name) != drained:
            self._drained[name] = drained
            self.revision += 1

    def node_removed(self, name: str) -> None:
        """A Node does not exist any more."""
        if self._drained.pop(name, None) is not None:
            self.revision += 1

    def topology(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A NodeResourceTopology exists, new or changed."""
        before = self._nodes.published(name)
        self._nodes.put(name, read(document, self._prefix))
        if self._nodes.published(name) is not before:
            self.revision += 1

    def topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._nodes.remove(name)
        self.revision += 1

    # --- what is shown ----------------------------------------------------------------------------

    async def document(self, query: Query) -> dict[str, Any]:
        """The answer to a query; gives way to others while it judges thousands of nodes."""
        revision = self.revision
        every = sorted(self._drained.keys() | self._nodes.names)
        names = [name for name in every if query.name in name]
        request = self._request(query)
        verdicts: dict[str, str] = {}  # reason by node; empty where it fits
        fits: dict[str, int] = {}
        if request is not None:
            for at in range(0, len(names), _CHUNK):
                fits.update(self._judged(request, names[at : at + _CHUNK], verdicts))
                await asyncio.sleep(0)
            names = [name for name in names if name in fits or not query.only]
            # The best first, as the scheduler takes them; then by name.
            names.sort(key=lambda name: (name not in fits, -fits.get(name, 0), name))
        chosen = names[query.offset : query.offset + query.limit]
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
            },
            "asked": request is not None,
            "problem": request.wrong if request is not None else "",
            "matching": len(names),
            "fitting": len(fits),
            "offset": query.offset,
            "nodes": [self._machine(name, request, verdicts.get(name)) for name in chosen],
        }

    def _request(self, query: Query) -> PodRequest | None:
        """What a pod of one container would ask for; None where nothing is."""
        if not query.cpus and not query.memory:
            return None
        return self._reader.plain(cpus=query.cpus, memory=query.memory, policy=query.policy)

    def _judged(
        self, request: PodRequest, names: Sequence[str], reasons: dict[str, str]
    ) -> dict[str, int]:
        """The scores of those that fit; the others' reasons are put into ``reasons``."""
        found = self._candidates.filter(request, names)
        reasons.update(found.failed)
        reasons.update(found.hopeless)
        reasons.update(dict.fromkeys(found.fits, ""))
        # What was found for the filter is remembered: nothing is judged twice.
        return dict.fromkeys(found.fits, 0) | dict(self._candidates.prioritize(request, found.fits))

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
                    capacity_factor=room.factor[place] / 1000,
                    drained=i in drained,
                )
                for place, i in enumerate(room.ids)
            ]
        return Machine(
            name=name,
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
