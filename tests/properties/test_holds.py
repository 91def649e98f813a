"""Binding, starting, publishing, watching and restarting in any order: no CPU is promised twice.

One node. What the node does is the engine's; what the API server has are two logs, of the node's
object and of pods on their way; the extender reads each of them as late as it likes.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.cluster.cluster_state import AssumedPod
from nri_numa.cluster.manifests import read_pod
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pods import container_of, pod_sandbox
from nri_numa.engine.admit import admit, forget_pod
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.request.annotations import format_scheduled_nodes
from nri_numa.engine.state import NodeState
from nri_numa.kube.api import uid_of
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Strategy
from nri_numa.publisher import topology
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Fit
from nri_numa.scheduler.watcher import MAX_RECHECK_PAUSE_S
from tests.beds.objects import PREFIX, Watched, container, pod
from tests.machines import named as machines

REPORT_DELAY_S, LATER_S = 10.0, 25.0
MACHINE = NodeModel(topology=machines.dual_smt_16(memory_gib=64), settings=Settings())
SIZES = ((3,), (2,), (5,), (8,), (2, 3), (4, 1))
"""CPUs of the containers of a pod."""


@dataclass
class Made:
    """A pod that has its node."""

    document: dict[str, Any]
    places: Mapping[str, NUMASet]
    started: int = 0
    left: bool = False
    ended: bool = False

    @property
    def now(self) -> dict[str, Any]:
        """As the API server has it."""
        phase = "Succeeded" if self.ended else "Running" if self.left else "Pending"
        return {**self.document, "status": {"phase": phase}}

    @property
    def names(self) -> list[str]:
        return [one["name"] for one in self.document["spec"]["containers"]]


Take: TypeAlias = Callable[[dict[str, Any]], object]


@dataclass
class Told:
    """A log of the API server, and how far it was read."""

    entries: list[tuple[Callable[[Watched], Take], dict[str, Any]]] = field(default_factory=list)
    read: int = 0

    def next(self, watched: Watched) -> None:
        if self.read < len(self.entries):
            take, document = self.entries[self.read]
            self.read += 1
            take(watched)(document)


class Cluster:
    """A node, an API server, and an extender that can be started again."""

    def __init__(self) -> None:
        self.state = NodeState()
        self.pods: list[Made] = []
        self.nodes, self.on_their_way = Told(), Told()
        self.publish()
        self.restart()

    # --- the extender -----------------------------------------------------------------------------

    def restart(self) -> None:
        """Start it, again: it reads what is there, and follows from then on."""
        self.watched = watched = Watched(report_delay=REPORT_DELAY_S, api=self)
        self.known, self.reader = watched.nodes, watched.reader
        self.candidates = VerdictCache(self.known, Strategy.SPREAD)
        last = self.nodes.entries[-1][1]
        watched.topologies.on_update(last)
        pending = [one.document for one in self.pods if not one.left]
        for document in pending:
            watched.pods.on_update(document)
        watched.pods.on_list(frozenset(map(uid_of, pending)))
        self.nodes.read, self.on_their_way.read = (
            len(self.nodes.entries),
            len(self.on_their_way.entries),
        )

    async def request_json(self, method: str, path: str) -> dict[str, Any]:
        """A pod, as the API server has it."""
        (one,) = (p for p in self.pods if path.endswith(f"/{p.document['metadata']['name']}"))
        return one.now

    async def list_objects(self, path: str, fields: str) -> list[dict[str, Any]]:
        """Pods of the node that did not end."""
        return [one.now for one in self.pods if not one.ended]

    def wait(self, number: int = 0) -> None:
        """Time passes, and who is held for too long is asked after."""
        self.watched.now += LATER_S
        self.watched.tick()
        asyncio.run(self.watched.pods.query_overdue_pods())

    def bind(self, size: int) -> None:
        """One more pod, where there is room."""
        asyncio.run(self.watched.pods.read_node("n1"))
        cpus = SIZES[size % len(SIZES)]
        name = f"p{len(self.pods)}"
        containers = [container(f"c{n}", str(c), f"{c}Mi") for n, c in enumerate(cpus)]
        document = pod(*containers, name=name, policy="single-numa-node", cpus="exclusive")
        request = self.reader.read_pod_request(document)
        found = self.candidates.evaluate_node(request, "n1")
        if not isinstance(found, Fit):
            return
        places = dict(found.numa_nodes)
        self.known.assume_pod(
            AssumedPod(request=request, node="n1", numa_nodes=places, charge=found.pod_charge,
                 assumed_at=self.watched.now, expires_at=self.watched.now + LATER_S)
        )  # fmt: skip
        document["spec"]["nodeName"] = "n1"
        document["metadata"]["annotations"][f"{PREFIX}/scheduled-numa-nodes"] = (
            format_scheduled_nodes(places)
        )
        self.pods.append(Made(document, places))
        self.on_their_way.entries.append((attrgetter("pods.on_update"), document))

    # --- the node ---------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """The next container of a pod starts: there must be room."""
        waiting = [one for one in self.pods if one.started < len(one.names)]
        if not waiting:
            return
        made = waiting[number % len(waiting)]
        manifest = read_pod(made.document)
        one = manifest.containers[made.started]
        found = admit(
            NodeSnapshot(MACHINE, self.state), pod_sandbox(manifest), container_of(manifest, one, 0)
        )
        assert isinstance(found, Admitted), found.message
        self.state = found.state
        (granted,) = (
            a
            for a in self.state.allocations.values()
            if a.pod_uid == manifest.uid and a.container == one.name
        )
        assert granted.numa_nodes == made.places[one.name]
        made.started += 1
        # The kubelet writes the pod's status, and it is still on its way.
        self.on_their_way.entries.append((attrgetter("pods.on_update"), made.document))

    def leave(self, number: int) -> None:
        """The kubelet says that a pod runs."""
        running = [o for o in self.pods if o.started == len(o.names) and not o.left]
        if running:
            self._leave(running[number % len(running)])

    def _leave(self, one: Made) -> None:
        one.left = True
        self.on_their_way.entries.append((attrgetter("pods.on_delete"), one.document))

    def end(self, number: int) -> None:
        """A pod ends; it may never have been seen running."""
        running = [o for o in self.pods if o.started == len(o.names) and not o.ended]
        if not running:
            return
        one = running[number % len(running)]
        self.state = forget_pod(NodeSnapshot(MACHINE, self.state), uid_of(one.document)).state
        one.ended = True
        if not one.left:
            self._leave(one)

    def publish(self, number: int = 0) -> None:
        """The publisher writes what the agent says."""
        del number
        found = zones_document(NodeSnapshot(MACHINE, self.state, MeasuredFree()))
        contents = topology.build_topology_contents(PREFIX, found)
        document = {"metadata": {"name": "n1"}, **contents}
        self.nodes.entries.append((attrgetter("topologies.on_update"), document))

    def step(self, what: int, number: int) -> None:
        steps: tuple[Callable[[int], object], ...] = (
            self.bind, self.bind, self.start, self.start, self.leave, self.end, self.publish,
            self.wait,
            lambda _: self.nodes.next(self.watched),
            lambda _: self.on_their_way.next(self.watched),
            lambda _: self.restart(),
        )  # fmt: skip
        steps[what % len(steps)](number)


steps = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 7)), min_size=100, max_size=200)
"""Long ones: a node has to fill up, and short lists are what is tried most of the time."""


@hypothesis_settings(deadline=None)
@given(steps)
def test_promises_are_there_and_nothing_is_counted_twice(taken: list[tuple[int, int]]) -> None:
    """Every container finds the CPUs that it was promised, on the NUMA node that was promised.

    Then the node says so, both logs are read, and who ended is asked after once no pause is left.
    """
    cluster = Cluster()
    for what, number in taken:
        cluster.step(what, number)
    for _ in cluster.pods:
        cluster.start(0)
        cluster.start(0)
    cluster.publish()
    for told in (cluster.nodes, cluster.on_their_way):
        while told.read < len(told.entries):
            told.next(cluster.watched)
    cluster.watched.now += MAX_RECHECK_PAUSE_S
    for _ in range(2):  # a binding that was not seen yet is asked after by itself
        cluster.wait()
    assert all(
        h.counted_by_node == h.non_init_containers and not h.left_pending
        for h in cluster.known.assumed_pods.values()
    )
    published = cluster.known.published_resources("n1")
    assert isinstance(published, NodeResources)
    assert cluster.known.free_resources("n1") == replace(published, counted_containers="")
