"""Fuzz targets of what works for the whole cluster: the extender, and capacity from outside."""

from __future__ import annotations

import json
from typing import Any

from nri_numa import config as configuration
from nri_numa.controller.capacity import Measurement, from_file, from_put, from_query
from nri_numa.model.offline_capacity import (
    LONGEST_VALIDITY,
    BadCapacity,
    list_of,
    numa_nodes,
    parsed,
    text_of,
)
from nri_numa.model.workload import Strategy
from nri_numa.scheduler import protocol
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.fit import MOST_SCORE
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.published import read
from tests.fuzz.readers import Fed
from tests.unit.scheduler.objects import PREFIX, topology


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def short(*sentences: str) -> None:
    for one in sentences:
        assert one
        assert len(one) < 3000


class Extender(Fed):
    """A NodeResourceTopology that anybody may have edited, and what kube-scheduler asks of it."""

    name = "extender"

    def __init__(self) -> None:
        super().__init__()
        self.reader = PodReader(configuration.settings(configuration.load(None, {}, {})))

    def feed(self, data: bytes) -> str:
        """Parts end at ``%%``: the object, a body of filter, a body of bind."""
        parts = [*data.split(b"%%", 2), b"", b""][:3]
        nodes = Nodes()
        document = _json(parts[0].decode(errors="replace"))
        known = read(document, PREFIX) if isinstance(document, dict) else None
        if known is not None:
            nodes.put("edited", known)
        nodes.put("good", read(topology(8, 8), PREFIX))
        said = "no question"
        try:
            asked = protocol.question(parts[1])
        except protocol.BadRequest as error:
            short(str(error))
        else:
            said = self.judged(nodes, asked.pod, [*dict.fromkeys(asked.names), "edited", "good"])
        try:
            protocol.binding(parts[2])
        except protocol.BadRequest as error:
            short(str(error))
        return f"{type(known).__name__} {said}"

    def judged(self, nodes: Nodes, pod: Any, names: list[str]) -> str:
        """Every node has one answer, in one line."""
        request, candidates = self.reader.request(pod), CandidateIndex(nodes, Strategy.SPREAD)
        self.reader.forget(request.uid)  # the next one may say something else in its name
        names = list(dict.fromkeys(names))
        found = candidates.filter(request, names)
        assert sorted([*found.fits, *found.failed, *found.hopeless]) == sorted(names)
        for why in (*found.failed.values(), *found.hopeless.values()):
            short(why)
            assert "\n" not in why
        protocol.filter_result(found.fits, found.failed, found.hopeless)
        scores = candidates.prioritize(request, found.fits)
        assert all(0 <= score <= MOST_SCORE for _, score in scores)
        return f"{request.nothing} {bool(request.wrong)} {len(found.fits) > 0}"


class Capacity(Fed):
    """What sources say of the capacity of nodes, and what the agent is handed."""

    name = "capacity"

    def feed(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        document = _json(text)
        taken = 0
        for offers in (self.put, self.file, self.query):
            try:
                found = offers(document)
            except BadCapacity as error:
                short(str(error))
                continue
            for one in found:
                assert one.zones or offers is not self.put
                assert all(0 <= factor <= 1 for factor in one.zones.values())
            taken += len(found)
        try:
            capacity = parsed(text)
            assert parsed(text_of(capacity)) == capacity
            taken += 1
        except BadCapacity as error:
            short(str(error))
        try:
            ids = numa_nodes(text)
            assert numa_nodes(list_of(ids)) == ids
        except BadCapacity as error:
            short(str(error))
        return f"{min(taken, 3)}"

    def put(self, document: object) -> list[Measurement]:
        return [from_put("n1", document, longest=LONGEST_VALIDITY)]

    def file(self, document: object) -> list[Measurement]:
        offers, problems = from_file(document)
        short(*problems)
        return offers

    def query(self, document: object) -> list[Measurement]:
        offers, problems = from_query(document, node_label="node", numa_node_label="numa_node")
        short(*problems)
        return offers
