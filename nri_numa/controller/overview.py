"""The NUMA nodes of all nodes, and the page that shows them: its files and its access control.

A pod's fit is evaluated as in the scheduler. Assumed pods are not counted here, except replacements
of evicted pods: the page shows the resources that the nodes publish.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
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
    HTTPRequest,
    Response,
    Route,
    bad_request_error,
    not_ready_error,
    page_routes,
)
from nri_numa.web.security import TokenFile

MAX_NODES_PER_OVERVIEW_ANSWER: Final = 500
"""Nodes of one answer; 0.25 MB with four NUMA nodes each."""
_YIELD_EVERY_NODES: Final = 100
"""Nodes that are counted before other tasks may run."""
CLUSTER_PAGE_PATH: Final = "/cluster/"
CLUSTER_DOCUMENT_PATH: Final = "/v1/cluster"
SHARED_PAGE_FILES: Final = ("page.css", "theme.js", "small.js", "icon.svg")
"""Files of the agent's page."""
DEFAULT_TOPOLOGY_MANAGER_POLICY: Final = "single-numa-node"
FULL_CAPACITY_FACTOR_MILLI: Final = 1000
"""A capacity factor of 1, in thousandths."""


class OverviewQuery(Struct, frozen=True):
    """A hypothetical pod, and the nodes to show.

    Attributes:
        cpus: exclusive CPUs; 0 for none.
        memory: bytes.
        fitting_only: omit nodes on which the pod does not fit.
        name: part of the names of nodes.
        state: show only nodes in this state.
        sort_key: order of the nodes; equal ones by the pod's score.
        grid: add a cell for every matching node.
        node: show the entry of this node alone.
        offset, limit: range of the entries.
    """

    cpus: int = 0
    memory: int = 0
    policy: str = DEFAULT_TOPOLOGY_MANAGER_POLICY
    fitting_only: bool = field(default=False, name="fittingOnly")
    name: str = ""
    state: str = ""
    sort_key: str = field(default="name", name="sort")
    grid: bool = False
    node: str = ""
    offset: int = 0
    limit: int = 200


class NodeCell(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Exclusive CPUs of one node; ``state`` is empty if the node has no problem."""

    name: str
    cpus: int = 0
    free_exclusive_cpus: int = 0
    max_exclusive_request: int = 0
    fragmentation: float = 0.0
    state: str = ""
    feasible: bool | None = None


NODE_PROBLEM_STATES: Final = ("unknown", "not-ready", "drained", "reduced-capacity")
"""Problems of a node, the worst first: no readable topology, its agent does not place containers,
NUMA nodes are drained, or their capacity factor is below 1."""
CELL_SORT_KEYS: Final[Mapping[str, Callable[[NodeCell], float]]] = {
    "name": lambda _: 0,
    "free": lambda cell: -cell.free_exclusive_cpus,
    "fragmentation": lambda cell: -cell.fragmentation,
    "problems": lambda cell: (
        NODE_PROBLEM_STATES.index(cell.state) if cell.state else len(NODE_PROBLEM_STATES)
    ),
}
"""Sort values of nodes, the smallest first; equal ones by score, then by name."""


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
    """One node; ``feasible`` is null without a hypothetical pod."""

    name: str
    page: str
    problem: str
    agent_ready: bool
    drained_numa_nodes: str
    zones: list[NUMANodeEntry]
    max_exclusive_request: int
    fragmentation: Annotated[float, Meta(description="0 to 1")]
    feasible: bool | None
    numa_nodes: str
    reason: str


def parse_query(parameters: Mapping[str, str]) -> OverviewQuery:
    """Parse a query string.

    Raises:
        APIError: a key is unknown or its value is invalid.
    """
    keys = sorted(OverviewQuery.__struct_encode_fields__)
    for key in parameters:
        if key not in keys:
            raise bad_request_error(
                f"{ascii(key)[:40]}: unknown, expected one of {', '.join(keys)}"
            )

    def parse_integer(key: str, default: int, maximum: int) -> int:
        text = parameters.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) > maximum:
            raise bad_request_error(
                f"{key} is {ascii(text)[:40]}, expected a whole number up to {maximum}"
            )
        return int(text)

    try:
        memory = whole_bytes(parameters.get("memory") or "0")
    except BadQuantity as error:
        text = ascii(parameters["memory"])[:40]
        raise bad_request_error(f"memory is {text}, expected {error}, such as 8Gi") from None

    def parse_choice(key: str, default: str, choices: Sequence[str]) -> str:
        text = parameters.get(key) or default
        if text and text not in choices:
            raise bad_request_error(
                f"{key} is {ascii(text)[:40]}, expected one of {', '.join(choices)}"
            )
        return text

    def parse_name(key: str) -> str:
        if len(text := parameters.get(key, "")) > 253:
            raise bad_request_error(f"{key} has {len(text)} characters, expected at most 253")
        return text

    def parse_switch(key: str) -> bool:
        return parameters.get(key, "") not in ("", "false", "0")

    return OverviewQuery(
        cpus=parse_integer("cpus", 0, 4096),
        memory=memory,
        policy=parse_choice("policy", DEFAULT_TOPOLOGY_MANAGER_POLICY, POLICY_NAMES),
        fitting_only=parse_switch("fittingOnly"),
        name=parse_name("name"),
        state=parse_choice("state", "", NODE_PROBLEM_STATES),
        sort_key=parse_choice("sort", "name", tuple(CELL_SORT_KEYS)),
        grid=parse_switch("grid"),
        node=parse_name("node"),
        offset=parse_integer("offset", 0, 1_000_000),
        limit=max(1, parse_integer("limit", 200, MAX_NODES_PER_OVERVIEW_ANSWER)),
    )


class Overview:
    """The published resources of all nodes, as documents for the page."""

    def __init__(
        self, config: AgentConfig, nodes: ClusterState, candidates: VerdictCache, reader: PodReader
    ) -> None:
        self._nodes, self._candidates, self._reader = nodes, candidates, reader
        self._page = config.controller.page.node_url

    @property
    def revision(self) -> int:
        """Number that differs after each change."""
        return self._nodes.revision

    @property
    def needs_node_addresses(self) -> bool:
        """True if the address of a Node is needed, beside its metadata."""
        return "{address}" in self._page

    async def overview_document(self, query: OverviewQuery) -> dict[str, Any]:
        """Answer a query; other tasks may run while it evaluates thousands of nodes."""
        revision = self.revision
        nodes = sorted(self._nodes.all_node_names)
        states = {name: self._node_state(name) for name in nodes}
        names = [name for name in nodes if query.name in name and query.state in ("", states[name])]
        request = self._hypothetical_pod_request(query)
        verdicts: dict[str, str] = {}  # reason by node; empty if it fits
        fits: dict[str, int] = {}
        if request is not None:
            fits = await self._score_nodes(request, names, verdicts)
            names = [name for name in names if name in fits or not query.fitting_only]
        by_fit = request is not None
        cells = {
            name: self._node_cell(name, states[name], name in fits if by_fit else None)
            async for name in _yield_in_turns(names)
        }
        # Nodes that fit first; then by sort key, the highest score and the name.
        rank = CELL_SORT_KEYS[query.sort_key]
        names.sort(key=lambda n: (by_fit and n not in fits, rank(cells[n]), -fits.get(n, 0), n))
        page_names = names[query.offset : query.offset + query.limit]
        if query.node:
            page_names = [name for name in names if name == query.node]
        entries = [
            self._node_entry(name, request, verdicts.get(name))
            async for name in _yield_in_turns(page_names)
        ]
        published = map(self._nodes.published_resources, nodes)
        rooms = [room for room in published if isinstance(room, NodeResources)]
        return {
            "revision": revision,
            "total": {
                "nodes": len(nodes),
                "unknownNodes": len(nodes) - len(rooms),
                "exclusiveCpus": sum(sum(r.exclusive.capacity) for r in rooms),
                "freeExclusiveCpus": sum(sum(r.exclusive.free) for r in rooms),
                "maxExclusiveRequest": max((max(r.exclusive.free) for r in rooms), default=0),
                "fragmentation": fragmentation_ratio(
                    sum(max(r.exclusive.free) for r in rooms),
                    sum(map(_max_unfragmented_request, rooms)),
                ),
                "drainedNumaNodes": sum(len(self._drained_numa_nodes(name)) for name in nodes),
                "states": {s: n for s, n in Counter(states.values()).items() if s},
            },
            "hasPodRequest": by_fit,
            "problem": request.invalid_reason if request is not None else "",
            "matchingNodes": len(names),
            "feasibleNodes": len(fits),
            "offset": query.offset,
            "nodes": entries,
            "grid": [cells[name] for name in names] if query.grid else [],
        }

    def _drained_numa_nodes(self, name: str) -> frozenset[int]:
        facts = self._nodes.node_facts(name)
        return facts.drained if facts is not None else frozenset()

    def _node_state(self, name: str) -> str:
        room = self._nodes.published_resources(name)
        if not isinstance(room, NodeResources):
            return "unknown"
        if room.agent_not_ready:
            return "not-ready"
        if self._drained_numa_nodes(name):
            return "drained"
        return "reduced-capacity" if min(room.factor) < FULL_CAPACITY_FACTOR_MILLI else ""

    def _node_cell(self, name: str, state: str, fits: bool | None) -> NodeCell:
        room = self._nodes.published_resources(name)
        if not isinstance(room, NodeResources):
            return NodeCell(name=name, state=state, feasible=fits)
        free_cpus = room.exclusive.free
        return NodeCell(
            name=name,
            cpus=sum(room.exclusive.capacity),
            free_exclusive_cpus=sum(free_cpus),
            max_exclusive_request=max(free_cpus),
            fragmentation=fragmentation_ratio(max(free_cpus), _max_unfragmented_request(room)),
            state=state,
            feasible=fits,
        )

    def _node_page_url(self, name: str) -> str:
        facts = self._nodes.node_facts(name)
        address = facts.address if facts is not None else ""
        if not self._page or ("{address}" in self._page and not address):
            return ""
        host = f"[{address}]" if ":" in address else address
        return self._page.replace("{node}", quote(name, safe="")).replace("{address}", host)

    def _hypothetical_pod_request(self, query: OverviewQuery) -> PodRequest | None:
        """Return the request of a pod with one container; None if the query has no amounts."""
        if not query.cpus and not query.memory:
            return None
        return self._reader.single_container_request(
            cpus=query.cpus, memory=query.memory, policy=query.policy
        )

    async def _score_nodes(
        self, request: PodRequest, names: Sequence[str], reasons: dict[str, str]
    ) -> dict[str, int]:
        """Return the scores of feasible nodes; the reasons of all are added to ``reasons``."""
        result = await service.run_in_turns(self._candidates.filter_steps(request, names))
        reasons.update(result.failed)
        reasons.update(result.unresolvable)
        reasons.update(dict.fromkeys(result.feasible, ""))
        # The verdicts of the filter are cached: no node is evaluated twice.
        scores = await service.run_in_turns(
            self._candidates.prioritize_steps(request, result.feasible)
        )
        return dict.fromkeys(result.feasible, 0) | dict(scores)

    def _node_entry(
        self, name: str, request: PodRequest | None, reason: str | None
    ) -> NodeOverviewEntry:
        room = self._nodes.published_resources(name)
        cell = self._node_cell(name, "", None if request is None else reason == "")
        drained_numa_nodes = self._drained_numa_nodes(name)
        numa_nodes = problem = ""
        if request is not None and not request.is_unconstrained and reason == "":
            verdict = self._candidates.evaluate_node(request, name)
            if isinstance(verdict, Fit) and verdict.numa_nodes:
                numa_nodes = str(verdict.numa_nodes[0][1])
        zones: list[NUMANodeEntry] = []
        if not isinstance(room, NodeResources):
            problem = self._candidates.unreadable_reason(name) or NO_TOPOLOGY_TEXT
        else:
            memory = next((r for r in room.other_resources if r.name == "memory"), None)
            zones = [
                NUMANodeEntry(
                    id=i,
                    exclusive_cpus=room.exclusive.capacity[position],
                    free_exclusive_cpus=room.exclusive.free[position],
                    memory_bytes=memory.capacity[position] if memory else 0,
                    free_memory_bytes=memory.free[position] if memory else 0,
                    capacity_factor=room.factor[position] / FULL_CAPACITY_FACTOR_MILLI,
                    drained=i in drained_numa_nodes,
                )
                for position, i in enumerate(room.ids)
            ]
        return NodeOverviewEntry(
            name=name,
            page=self._node_page_url(name),
            problem=problem,
            agent_ready=isinstance(room, NodeResources) and not room.agent_not_ready,
            drained_numa_nodes=",".join(map(str, sorted(drained_numa_nodes))),
            zones=zones,
            max_exclusive_request=cell.max_exclusive_request,
            fragmentation=cell.fragmentation,
            feasible=cell.feasible,
            numa_nodes=numa_nodes,
            reason=reason or "",
        )


async def _yield_in_turns(names: Iterable[str]) -> AsyncIterator[str]:
    """Yield names; other tasks may run after each `_YIELD_EVERY_NODES`."""
    for number, name in enumerate(names, 1):
        yield name
        if number % _YIELD_EVERY_NODES == 0:
            await asyncio.sleep(0)


def fragmentation_ratio(max_request: int, max_unfragmented: int) -> float:
    """Return the part of the largest exclusive request that scattered free CPUs prevent.

    `max_unfragmented` would fit if all free CPUs were on the largest NUMA nodes.
    """
    return round(1 - max_request / max_unfragmented, 3) if max_unfragmented > 0 else 0.0


def _max_unfragmented_request(room: NodeResources) -> int:
    return min(sum(room.exclusive.free), max(room.exclusive.capacity))


class ClusterPage:
    """Serves the page and its document.

    Raises:
        ConfigError: the token cannot be read.
    """

    def __init__(self, config: AgentConfig, overview: Overview, topologies: Watch) -> None:
        self._overview, self._topologies = overview, topologies
        file = config.controller.page.token_file
        self._token = TokenFile(file, setting="controller.page") if file else None
        # A revision belongs to one process of one replica.
        self._life = uuid.uuid4().hex[:12]

    def http_routes(self) -> Iterable[Route]:
        """Return the routes for the controller's server."""
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
            raise not_ready_error(problem or "the nodes are not known yet")
        query_text = repr((sorted(request.query.items()), problem))
        query_hash = hashlib.sha256(query_text.encode()).hexdigest()[:12]
        tag = f'"{self._life}-{self._overview.revision}-{query_hash}"'
        if request.header_value(b"if-none-match") == tag.encode():
            return Response(304, b"", headers=[("ETag", tag)])
        document = await self._overview.overview_document(parse_query(request.query))
        if problem:
            document["stale"] = problem
        return Response(200, msgspec.json.encode(document), headers=[("ETag", tag)])
