"""The NUMA nodes of all nodes, and the page that shows them: its files, and who may read it.

Whether a pod fits is judged as the scheduler judges it. Pods on their way to a node are not counted
here, but for successors of pods that were evicted: the page shows what the nodes publish.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct, field

from nri_numa import service
from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import POLICY_NAMES, PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.config import AgentConfig
from nri_numa.kube.api import Watch
from nri_numa.scheduler.candidates import NO_TOPOLOGY_TEXT, VerdictCache
from nri_numa.scheduler.fit import Fit
from nri_numa.text import BadQuantity, whole_bytes
from nri_numa.web.protocol import (
    TEXT_CONTENT_TYPE,
    APIError,
    HTTPRequest,
    Response,
    Route,
    page_routes,
)
from nri_numa.web.security import TokenFile

MAX_NODES_PER_OVERVIEW_ANSWER: Final = 500
"""Nodes of one answer; with four NUMA nodes each it has a quarter of a megabyte."""
_YIELD_EVERY_NODES: Final = 100
"""Nodes that are counted before other tasks have a turn."""
CLUSTER_PAGE_PATH: Final = "/cluster/"
CLUSTER_DOCUMENT_PATH: Final = "/v1/cluster"
SHARED_PAGE_FILES: Final = ("page.css", "theme.js", "small.js", "icon.svg")
"""Files of the agent's page."""
DEFAULT_QUERY_POLICY: Final = "single-numa-node"
FULL_CAPACITY_FACTOR_MILLI: Final = 1000
"""A capacity factor of 1, in thousandths."""


class BadQuery(Exception):
    """What cannot be asked; the text names the key, the value and what was expected."""


class OverviewQuery(Struct, frozen=True):
    """A pod that should fit, and which nodes are shown.

    Attributes:
        cpus: exclusive CPUs; 0 for none.
        memory: bytes.
        fitting_only: nodes on which it does not fit are left out.
        name: part of the names of nodes.
        state: only nodes that are in it.
        sort_key: which nodes come first; among equal ones those where the pod fits best.
        grid: give all nodes in short, too.
        node: of all that are shown, this one alone in full.
        offset, limit: which of them.
    """

    cpus: int = 0
    memory: int = 0
    policy: str = DEFAULT_QUERY_POLICY
    fitting_only: bool = field(default=False, name="only")
    name: str = ""
    state: str = ""
    sort_key: str = field(default="name", name="sort")
    grid: bool = False
    node: str = ""
    offset: int = 0
    limit: int = 200


class NodeCell(Struct, frozen=True, omit_defaults=True):
    """One node in short, its exclusive CPUs; ``state`` is empty where all is well."""

    name: str
    cpus: int = 0
    free_exclusive_cpus: int = field(default=0, name="free")
    max_exclusive_request: int = field(default=0, name="largest")
    fragmentation: float = 0.0
    state: str = ""
    is_feasible: bool | None = field(default=None, name="fits")


NODE_PROBLEM_STATES: Final = ("unknown", "not-ready", "drained", "lowered")
"""What is not well about a node, the worst first: nothing is published, its agent does not place
containers, NUMA nodes are drained, or their capacity factor is below 1."""
CELL_SORT_KEYS: Final[Mapping[str, Callable[[NodeCell], float]]] = {
    "name": lambda _: 0,
    "free": lambda cell: -cell.free_exclusive_cpus,
    "fragmented": lambda cell: -cell.fragmentation,
    "problems": lambda cell: (
        NODE_PROBLEM_STATES.index(cell.state) if cell.state else len(NODE_PROBLEM_STATES)
    ),
}
"""By what nodes are sorted, the smallest first; equal ones by fit, then by name."""


class NUMANodeEntry(Struct, frozen=True, rename="camel"):
    """One NUMA node."""

    id: int
    exclusive_cpus: int
    free_exclusive_cpus: int
    memory_bytes: int
    free_memory_bytes: int
    capacity_factor: float
    drained: bool


class NodeOverviewEntry(Struct, frozen=True, rename="camel"):
    """One node; ``fits`` is null where nothing was asked."""

    name: str
    page: str
    problem: str
    agent_ready: bool
    drained_nodes: str = field(name="drained")
    zones: list[NUMANodeEntry]
    largest_exclusive_request: int
    fragmentation: Annotated[float, Meta(description="0 to 1")]
    fits: bool | None
    numa_nodes: str
    reason: str


def parse_query(given: Mapping[str, str]) -> OverviewQuery:
    """Read a query string.

    Raises:
        BadQuery: something in it is no such thing.
    """
    known = sorted(OverviewQuery.__struct_encode_fields__)
    for key in given:
        if key not in known:
            raise BadQuery(f"{ascii(key)[:40]}: unknown, expected one of {', '.join(known)}")

    def parse_integer(key: str, default: int, most: int) -> int:
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

    def parse_choice(key: str, default: str, expected: Sequence[str]) -> str:
        text = given.get(key) or default
        if text and text not in expected:
            raise BadQuery(f"{key} is {ascii(text)[:40]}, expected one of {', '.join(expected)}")
        return text

    def parse_name(key: str) -> str:
        if len(text := given.get(key, "")) > 253:
            raise BadQuery(f"{key} has {len(text)} characters, expected at most 253")
        return text

    def parse_switch(key: str) -> bool:
        return given.get(key, "") not in ("", "false", "0")

    return OverviewQuery(
        cpus=parse_integer("cpus", 0, 4096),
        memory=memory,
        policy=parse_choice("policy", DEFAULT_QUERY_POLICY, POLICY_NAMES),
        fitting_only=parse_switch("only"),
        name=parse_name("name"),
        state=parse_choice("state", "", NODE_PROBLEM_STATES),
        sort_key=parse_choice("sort", "name", tuple(CELL_SORT_KEYS)),
        grid=parse_switch("grid"),
        node=parse_name("node"),
        offset=parse_integer("offset", 0, 1_000_000),
        limit=max(1, parse_integer("limit", 200, MAX_NODES_PER_OVERVIEW_ANSWER)),
    )


class Overview:
    """What is known of all nodes, for those who look at it."""

    def __init__(
        self,
        config: AgentConfig,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
    ) -> None:
        self._nodes, self._candidates, self._reader = nodes, candidates, reader
        self._page = config.controller.page.node_url

    @property
    def revision(self) -> int:
        """Another number after each change."""
        return self._nodes.revision

    @property
    def needs_node_addresses(self) -> bool:
        """Whether more is needed of Nodes than their metadata."""
        return "{address}" in self._page

    # --- what is shown ----------------------------------------------------------------------------

    async def overview_document(self, query: OverviewQuery) -> dict[str, Any]:
        """The answer to a query; gives way to others while it judges thousands of nodes."""
        revision = self.revision
        every = sorted(self._nodes.all_node_names)
        states = {name: self._node_state(name) for name in every}
        names = [name for name in every if query.name in name and query.state in ("", states[name])]
        request = self._hypothetical_pod_request(query)
        verdicts: dict[str, str] = {}  # reason by node; empty where it fits
        fits: dict[str, int] = {}
        if request is not None:
            fits = await self._score_nodes(request, names, verdicts)
            names = [name for name in names if name in fits or not query.fitting_only]
        asked = request is not None
        cells: dict[str, NodeCell] = {}
        for at in range(0, len(names), _YIELD_EVERY_NODES):
            for name in names[at : at + _YIELD_EVERY_NODES]:
                cells[name] = self._node_cell(name, states[name], name in fits if asked else None)
            await asyncio.sleep(0)
        # Where it fits first; then as asked, the best for the pod, and the name.
        by = CELL_SORT_KEYS[query.sort_key]
        names.sort(key=lambda n: (asked and n not in fits, by(cells[n]), -fits.get(n, 0), n))
        chosen = names[query.offset : query.offset + query.limit]
        if query.node:
            chosen = [name for name in names if name == query.node]
        shown: list[NodeOverviewEntry] = []
        for name in chosen:
            shown.append(self._node_entry(name, request, verdicts.get(name)))
            if len(shown) % _YIELD_EVERY_NODES == 0:
                await asyncio.sleep(0)
        rooms = [
            t
            for name in every
            if isinstance(t := self._nodes.published_resources(name), NodeResources)
        ]
        return {
            "revision": revision,
            "total": {
                "nodes": len(every),
                "unknownNodes": len(every) - len(rooms),
                "exclusiveCpus": sum(sum(one.exclusive.capacity) for one in rooms),
                "freeExclusiveCpus": sum(sum(one.exclusive.free) for one in rooms),
                "largestExclusiveRequest": max((max(t.exclusive.free) for t in rooms), default=0),
                "fragmentation": fragmentation_ratio(
                    sum(max(one.exclusive.free) for one in rooms),
                    sum(map(_max_unfragmented_request, rooms)),
                ),
                "drainedNumaNodes": sum(len(self._drained(name)) for name in every),
                "states": {s: n for s, n in Counter(states.values()).items() if s},
            },
            "asked": asked,
            "problem": request.invalid_reason if request is not None else "",
            "matching": len(names),
            "fitting": len(fits),
            "offset": query.offset,
            "nodes": shown,
            "grid": [cells[name] for name in names] if query.grid else [],
        }

    def _drained(self, name: str) -> frozenset[int]:
        facts = self._nodes.facts(name)
        return facts.drained if facts is not None else frozenset()

    def _node_state(self, name: str) -> str:
        room = self._nodes.published_resources(name)
        if not isinstance(room, NodeResources):
            return "unknown"
        if room.agent_not_ready:
            return "not-ready"
        if self._drained(name):
            return "drained"
        return "lowered" if min(room.factor) < FULL_CAPACITY_FACTOR_MILLI else ""

    def _node_cell(self, name: str, state: str, fits: bool | None) -> NodeCell:
        room = self._nodes.published_resources(name)
        if not isinstance(room, NodeResources):
            return NodeCell(name=name, state=state, is_feasible=fits)
        free = room.exclusive.free
        return NodeCell(
            name=name,
            cpus=sum(room.exclusive.capacity),
            free_exclusive_cpus=sum(free),
            max_exclusive_request=max(free),
            fragmentation=fragmentation_ratio(max(free), _max_unfragmented_request(room)),
            state=state,
            is_feasible=fits,
        )

    def _node_page_url(self, name: str) -> str:
        facts = self._nodes.facts(name)
        address = facts.address if facts is not None else ""
        if not self._page or ("{address}" in self._page and not address):
            return ""
        host = f"[{address}]" if ":" in address else address
        return self._page.replace("{node}", quote(name, safe="")).replace("{address}", host)

    def _hypothetical_pod_request(self, query: OverviewQuery) -> PodRequest | None:
        """What a pod of one container would ask for; None where nothing is."""
        if not query.cpus and not query.memory:
            return None
        return self._reader.single_container_request(
            cpus=query.cpus, memory=query.memory, policy=query.policy
        )

    async def _score_nodes(
        self, request: PodRequest, names: Sequence[str], reasons: dict[str, str]
    ) -> dict[str, int]:
        """The scores of those that fit; the others' reasons are put into ``reasons``."""
        found = await service.run_in_turns(self._candidates.filter_steps(request, names))
        reasons.update(found.failed)
        reasons.update(found.unresolvable)
        reasons.update(dict.fromkeys(found.feasible, ""))
        # What was found for the filter is remembered: nothing is judged twice.
        scores = await service.run_in_turns(
            self._candidates.prioritize_steps(request, found.feasible)
        )
        return dict.fromkeys(found.feasible, 0) | dict(scores)

    def _node_entry(
        self, name: str, request: PodRequest | None, reason: str | None
    ) -> NodeOverviewEntry:
        room = self._nodes.published_resources(name)
        drained = self._drained(name)
        places = ""
        if request is not None and not request.is_unconstrained and reason == "":
            verdict = self._candidates.evaluate_node(request, name)
            if isinstance(verdict, Fit) and verdict.numa_nodes:
                places = str(verdict.numa_nodes[0][1])
        if not isinstance(room, NodeResources):
            problem = self._candidates.unreadable_reason(name) or NO_TOPOLOGY_TEXT
            zones: list[NUMANodeEntry] = []
        else:
            problem = ""
            memory = next((one for one in room.other_resources if one.name == "memory"), None)
            zones = [
                NUMANodeEntry(
                    id=i,
                    exclusive_cpus=room.exclusive.capacity[place],
                    free_exclusive_cpus=room.exclusive.free[place],
                    memory_bytes=memory.capacity[place] if memory else 0,
                    free_memory_bytes=memory.free[place] if memory else 0,
                    capacity_factor=room.factor[place] / FULL_CAPACITY_FACTOR_MILLI,
                    drained=i in drained,
                )
                for place, i in enumerate(room.ids)
            ]
        return NodeOverviewEntry(
            name=name,
            page=self._node_page_url(name),
            problem=problem,
            agent_ready=isinstance(room, NodeResources) and not room.agent_not_ready,
            drained_nodes=",".join(map(str, sorted(drained))),
            zones=zones,
            largest_exclusive_request=max((z.free_exclusive_cpus for z in zones), default=0),
            fragmentation=(
                fragmentation_ratio(max(room.exclusive.free), _max_unfragmented_request(room))
                if isinstance(room, NodeResources)
                else 0.0
            ),
            fits=None if request is None else reason == "",
            numa_nodes=places,
            reason=reason or "",
        )


def fragmentation_ratio(largest: int, at_best: int) -> float:
    """Part of the largest possible exclusive request that is lost because free CPUs lie apart.

    `at_best` would fit if all free CPUs were together: no more than the largest NUMA node has.
    """
    return round(1 - largest / at_best, 3) if at_best > 0 else 0.0


def _max_unfragmented_request(room: NodeResources) -> int:
    return min(sum(room.exclusive.free), max(room.exclusive.capacity))


class ClusterPage:
    """Serves the page.

    Raises:
        ConfigError: the token cannot be read.
    """

    def __init__(self, config: AgentConfig, overview: Overview, topologies: Watch) -> None:
        section = config.controller
        self._overview = overview
        self._topologies = topologies
        file = section.page.token_file
        self._token = TokenFile(file, setting="controller.page") if file else None
        # A revision belongs to one life of one replica.
        self._life = uuid.uuid4().hex[:12]

    def http_routes(self) -> Iterable[Route]:
        """What is added to the controller's server."""
        return [
            Route("GET", CLUSTER_DOCUMENT_PATH, self._get_overview),
            Route(
                "GET",
                CLUSTER_PAGE_PATH.rstrip("/"),
                lambda _: Response(308, b"", TEXT_CONTENT_TYPE, [("Location", CLUSTER_PAGE_PATH)]),
            ),
            *page_routes("nri_numa.web", *SHARED_PAGE_FILES, prefix=CLUSTER_PAGE_PATH),
            *page_routes("nri_numa.controller", prefix=CLUSTER_PAGE_PATH),
        ]

    async def _get_overview(self, request: HTTPRequest) -> Response:
        if self._token is not None:
            self._token.check_request_token(request)
        problem = self._topologies.problem
        if not self._topologies.synced.is_set():
            raise APIError(
                503, "NotReady", problem or "the nodes are not known yet", [("Retry-After", "2")]
            )
        said = repr((sorted(request.query.items()), problem))
        asked = hashlib.sha256(said.encode()).hexdigest()[:12]
        tag = f'"{self._life}-{self._overview.revision}-{asked}"'
        if request.header_value(b"if-none-match") == tag.encode():
            return Response(304, b"", headers=[("ETag", tag)])
        try:
            query = parse_query(request.query)
        except BadQuery as error:
            raise APIError(400, "BadRequest", str(error)) from error
        document: dict[str, Any] = await self._overview.overview_document(query)
        if problem:
            document["stale"] = problem
        return Response(200, msgspec.json.encode(document), headers=[("ETag", tag)])
