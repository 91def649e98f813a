"""Fuzz targets of what works for the whole cluster: the extender, and capacity from outside."""

import json
from typing import Any

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.config import AgentConfig
from nri_numa.controller.capacity import (
    CapacityReport,
    parse_capacity_file,
    parse_capacity_put,
    parse_query_answer,
)
from nri_numa.model.offline_capacity import (
    MAX_CAPACITY_VALIDITY_S,
    BadCapacity,
    encode_offline_capacity,
    format_id_list,
    parse_id_list,
    parse_offline_capacity,
)
from nri_numa.model.workload import Strategy
from nri_numa.scheduler import protocol
from nri_numa.scheduler.candidates import VerdictCache, run_to_end
from nri_numa.scheduler.fit import MAX_SCORE
from tests.beds.objects import PREFIX, topology
from tests.fuzz.targets import Target


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def short(*sentences: str) -> None:
    for one in sentences:
        assert one
        assert len(one) < 3000


class Extender(Target):
    """A NodeResourceTopology that anybody may have edited, and what kube-scheduler asks of it."""

    name = "extender"

    def __init__(self) -> None:
        super().__init__()
        self.reader = PodReader(AgentConfig())

    def feed(self, data: bytes) -> str:
        """Parts end at ``%%``: the object, a body of filter, a body of bind."""
        parts = [*data.split(b"%%", 2), b"", b""][:3]
        nodes = ClusterState(PREFIX)
        document = _json(parts[0].decode(errors="replace"))
        known = decode_topology(document, PREFIX) if isinstance(document, dict) else None
        if known is not None:
            nodes.update_resources("edited", known)
        nodes.update_resources("good", decode_topology(topology(8, 8), PREFIX))
        said = "no question"
        try:
            asked = protocol.parse_extender_args(parts[1])
        except protocol.BadRequest as error:
            short(str(error))
        else:
            said = self.judged(
                nodes, asked.pod, [*dict.fromkeys(asked.node_names), "edited", "good"]
            )
        try:
            protocol.parse_binding_args(parts[2])
        except protocol.BadRequest as error:
            short(str(error))
        return f"{type(known).__name__} {said}"

    def judged(self, nodes: ClusterState, pod: Any, names: list[str]) -> str:
        """Every node has one answer, in one line."""
        request, candidates = (
            self.reader.read_pod_request(pod),
            VerdictCache(nodes, Strategy.SPREAD),
        )
        self.reader.drop_pod(request.uid)  # the next one may say something else in its name
        names = list(dict.fromkeys(names))
        found = candidates.filter_nodes(request, names)
        assert sorted([*found.feasible, *found.failed, *found.unresolvable]) == sorted(names)
        for why in (*found.failed.values(), *found.unresolvable.values()):
            short(why)
            assert "\n" not in why
        protocol.encode_filter_result(found.feasible, found.failed, found.unresolvable)
        scores = run_to_end(candidates.prioritize_steps(request, found.feasible))
        assert all(0 <= score <= MAX_SCORE for _, score in scores)
        return (
            f"{request.is_unconstrained} {bool(request.invalid_reason)} {len(found.feasible) > 0}"
        )


class Capacity(Target):
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
            capacity = parse_offline_capacity(text)
            assert parse_offline_capacity(encode_offline_capacity(capacity)) == capacity
            taken += 1
        except BadCapacity as error:
            short(str(error))
        try:
            ids = parse_id_list(text)
            assert parse_id_list(format_id_list(ids)) == ids
        except BadCapacity as error:
            short(str(error))
        return f"{min(taken, 3)}"

    def put(self, document: object) -> list[CapacityReport]:
        return [parse_capacity_put("n1", document, limit_s=MAX_CAPACITY_VALIDITY_S)]

    def file(self, document: object) -> list[CapacityReport]:
        offers, problems = parse_capacity_file(document)
        short(*problems)
        return offers

    def query(self, document: object) -> list[CapacityReport]:
        offers, problems = parse_query_answer(
            document, node_label="node", numa_node_label="numa_node"
        )
        short(*problems)
        return offers
