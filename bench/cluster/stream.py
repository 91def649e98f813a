"""The loop that the scheduler's blindness makes, counted: created, scheduled, refused, tried again.

Fifty nodes with two NUMA nodes of 16 CPUs each, a stream of pods that each want to be on one NUMA
node, a real API server and the stock kube-scheduler. The nodes are objects with the real engine
behind them (`bench.cluster.fleet`). Counted is how often a node had to refuse a pod that was sent
there, and how long pods waited from their creation until they had their CPUs.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from bench.cluster import chaos, real
from bench.cluster.checker import Checker
from bench.cluster.fleet import SECONDS, Agent, Fleet, Life
from bench.stats import quantile, table
from nri_numa.agent.view import zones_document
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.kube.requests import Resource
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.publisher import topology
from tests.beds.cri import poll
from tests.beds.kube.bed import MANIFESTS, KubeBed
from tests.beds.kube.build import find_programs
from tests.beds.kube.client import JsonObject
from tests.beds.kube.control_plane import ControlPlane, Namespaces
from tests.beds.kube.extender import Extender, install
from tests.beds.kube.manifests import PREFIX
from tests.beds.plugin_process import REPOSITORY
from tests.beds.processes import Daemon

NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
CRD = MANIFESTS / "publish-topology/crd.yaml"
CPUS = (4, 6, 8, 10, 12)
AT_ONCE = 8
"""Requests while a cluster is made."""
"""Sizes of pods, most of them more than a quarter of a NUMA node: one has 16 CPUs, and one CPU of
the node stays with those that share."""
ANNOTATIONS = {
    "numa.kubernetes.io/cpus": "exclusive",
    "numa.kubernetes.io/policy": "single-numa-node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Pods that come one after the other.

    Attributes:
        nodes: how many.
        pods: how many.
        cpus: sizes of pods, each as often as it is named.
        per_second: of them are created.
        seconds: each runs so long, from least to most.
        seed: of sizes, times and pauses.
        limit_s: after the last one was created, those that are not placed yet are given up.
        real: one of so many pods is for a real node; 0 for none, and no such node.
    """

    nodes: int = 50
    pods: int = 600
    cpus: tuple[int, ...] = CPUS
    per_second: float = 3.0
    seconds: tuple[float, float] = (30.0, 70.0)
    seed: int = 1
    limit_s: float = 120.0
    real: int = 0

    def documents(self, schedulers: Sequence[str] = ("default-scheduler",)) -> Iterator[JsonObject]:
        """The pods, for schedulers of these names in turn."""
        rng = random.Random(self.seed)
        for number in range(self.pods):
            cpus = rng.choice(self.cpus)
            annotations = {**ANNOTATIONS, SECONDS: f"{rng.uniform(*self.seconds):.1f}"}
            name, scheduler = f"pod-{number:04}", schedulers[number % len(schedulers)]
            if self.real and not number % self.real:
                yield real.document(name, scheduler, ANNOTATIONS)
                continue
            asked = {"cpu": str(cpus), "memory": f"{cpus}Gi"}
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "annotations": annotations},
                "spec": {
                    "schedulerName": scheduler,
                    "containers": [
                        {
                            "name": "main",
                            "image": "none",
                            "resources": {"requests": asked, "limits": asked},
                        }
                    ],
                },
            }


def topology_settings() -> NodeModel:
    """One node: two NUMA nodes of 16 CPUs, eight cores each."""
    topology = build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=8, memory_gib=64
    )
    return NodeModel(topology=topology, settings=Settings())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a stream came to.

    Attributes:
        lives: of every pod.
        seconds: the whole of it took.
        notes: what else was seen.
        good: no CPU was promised or given twice.
    """

    lives: tuple[Life, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    good: bool = True

    def row(self, name: str) -> list[object]:
        """Of the table."""
        waits = sorted(one.placed - one.created for one in self.lives if one.placed is not None)
        rejected = [one for one in self.lives if one.rejections]
        return [
            name,
            len(self.lives),
            len(waits),
            len(rejected),
            sum(one.rejections for one in rejected),
            f"{quantile(waits, 0.5):.1f}" if waits else "",
            f"{quantile(waits, 0.99):.1f}" if waits else "",
            f"{waits[-1]:.1f}" if waits else "",
        ]


HEAD = ("scheduler", "pods", "placed", "refused pods", "refusals", "p50 s", "p99 s", "longest s")


@contextmanager
def control_plane(
    scheduler: Mapping[str, object] | None = None, *, nodes: Sequence[str] = ()
) -> Iterator[ControlPlane]:
    """A control plane of its own, gone afterwards.

    Args:
        scheduler: keys of the KubeSchedulerConfiguration.
        nodes: names of those with a kubelet.
    """
    programs = find_programs(build=True)
    with (
        tempfile.TemporaryDirectory(
            prefix="nri-numa-stream-", ignore_cleanup_errors=True
        ) as directory,
        Namespaces(Path(directory)) as namespaces,
        ControlPlane(programs, namespaces, nodes=nodes, scheduler=scheduler) as control,
    ):
        yield control


@contextmanager
def _cluster(
    stream: Stream, scheduler: Mapping[str, object] | None = None
) -> Iterator[tuple[ControlPlane, dict[str, Agent], real.RealNode | None]]:
    """A control plane with the agents of its nodes, and the real one where it is asked for."""
    with control_plane(scheduler, nodes=(real.NAME,) if stream.real else ()) as control:
        made = agents(control, stream.nodes)
        if not stream.real:
            yield control, made, None
            return
        with real.running(control) as there:
            yield control, made, there


def agents(control: ControlPlane, nodes: int) -> dict[str, Agent]:
    """Nodes and their agents."""
    made = {f"node-{number:02}": Agent(topology_settings()) for number in range(nodes)}

    def add(name: str) -> None:
        # The node keeps a CPU for everybody else, as a kubelet's reservation does.
        cpus = len(made[name].machine.topology.cpus) - 1
        control.client.add_node(name, cpus=cpus, memory="120Gi", ready=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(add, made))
    return made


def flow(
    fleet: Fleet,
    stream: Stream,
    *,
    schedulers: Sequence[str] = ("default-scheduler",),
    tick: Callable[[], object] = lambda: None,
) -> Found:
    """Let the stream flow; ends when every pod is placed, or at the limit."""
    begun = time.monotonic()
    waiting = list(stream.documents(schedulers))
    created, last = 0, begun
    while True:
        now = time.monotonic()
        while created < len(waiting) and now - begun >= created / stream.per_second:
            fleet.create(waiting[created])
            created, last = created + 1, now
        fleet.step()
        tick()
        left = sum(life.placed is None for life in fleet.lives.values())
        if created == len(waiting) and (not left or now - last > stream.limit_s):
            return Found(lives=tuple(fleet.lives.values()), seconds=time.monotonic() - begun)
        time.sleep(0.1)


def stock(stream: Stream) -> Found:
    """The stock scheduler, which knows sums of nodes."""
    with _cluster(stream) as (control, made, _):
        return flow(Fleet(control.client, made, seed=stream.seed), stream)


PERIOD_S = 60.0
"""Of the stock publishers, NFD's topology-updater and the resource-topology-exporter."""


def stock_plugin(stream: Stream) -> Found:
    """The rules of the stock plugin, with numbers that are up to a minute old."""
    port = 9999
    extender = {
        "urlPrefix": f"http://127.0.0.1:{port}",
        "filterVerb": "filter",
        "nodeCacheCapable": True,
        "enableHTTPS": False,
        "httpTimeout": "5s",
    }
    with _cluster(stream, {"extenders": [extender]}) as (control, made, there):
        file = control.directory / "zones.json"
        published = -PERIOD_S

        def publish() -> None:
            nonlocal published
            if (now := time.monotonic()) - published < PERIOD_S:
                return
            published = now
            found = {name: agent.zones() for name, agent in made.items()}
            if there is not None:
                found[real.NAME] = there.zones()
            other = file.with_suffix(".new")
            other.write_text(json.dumps(found))
            other.replace(file)

        publish()
        words = [sys.executable, "-m", "bench.cluster.stock_rules"]
        daemon = Daemon(
            "stock-rules",
            [*control.namespaces.enter(), *words, f"--zones={file}", f"--port={port}"],
            control.log_directory,
            {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        )
        daemon.start()
        try:
            fleet = Fleet(control.client, made, seed=stream.seed)
            return flow(fleet, stream, tick=publish)
        finally:
            daemon.end()


class Published:
    """Writes what nodes have, each change at once, and counts that.

    Args:
        control: the control plane.
        made: the agents.
    """

    def __init__(self, control: ControlPlane, made: Mapping[str, Agent]) -> None:
        self._client, self._made = control.client, made
        self._uids = {one["metadata"]["name"]: one["metadata"]["uid"]
                      for one in self._client.ask("GET", "/api/v1/nodes")["items"]}  # fmt: skip
        self.writes, self.largest = 0, 0
        poll(lambda: self._client.request("GET", NRT)[0] == 200 or None, "the kind")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self.publish, made))
        self.writes, self.first = len(made), self.largest

    def publish(self, node: str, *, ready: bool = True) -> None:
        """Write a node's object."""
        if ready and self._made[node].away:
            return
        self.write(node, self.document(node, ready=ready))

    def document(self, node: str, *, ready: bool = True) -> JsonObject:
        """A node's object, as it is to be now."""
        agent = self._made[node]
        found = zones_document(NodeSnapshot(agent.machine, agent.state, MeasuredFree()))
        what = topology.build_topology_contents(PREFIX, found)
        what = what if ready else topology.contents_with_agent_not_ready(PREFIX, what)
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": self._uids[node]}
        return {
            "apiVersion": Resource.TOPOLOGIES.api_version,
            "kind": topology.TopologyOutput.kind,
            "metadata": {"name": node, "annotations": {}, "ownerReferences": [owner]},
            **what,
        }

    def write(self, node: str, written: JsonObject) -> None:
        """Write an object; a busy API server may end an answer in the middle."""
        self.writes += 1
        self.largest = max(self.largest, len(json.dumps(written, separators=(",", ":"))))
        path = f"{NRT}/{node}?fieldManager=bench&force=true"
        for last in (False, True):
            try:
                self._client.ask(
                    "PATCH", path, written, content_type="application/apply-patch+yaml"
                )
            except (OSError, HTTPException):
                if last:
                    raise
            else:
                return


def ours(stream: Stream, kinds: Sequence[str] = ()) -> Found:
    """nri-numa scheduler beside a second kube-scheduler; nodes publish each change at once.

    Args:
        stream: of pods.
        kinds: what goes wrong meanwhile, of `bench.cluster.chaos.KINDS`.
    """
    with _cluster(stream) as (control, made, there):
        client = control.client
        install(client)
        client.kubectl("apply", f"--filename={CRD}")
        published = Published(control, made)
        topology = topology_settings().topology
        checker = Checker(
            zone_cpus={i: len(node.cpus) for i, node in topology.numa_nodes.items()},
            numa_of=lambda cpu: topology.cpus[cpu].numa_node,
            real={real.NAME: real.topology()} if there is not None else {},
        )

        def look(pods: list[JsonObject]) -> None:
            granted: dict[str, Mapping[str, Sequence[int]]] = {
                name: agent.granted() for name, agent in made.items()
            }
            if there is not None:
                granted[real.NAME] = there.granted(pods)
            checker.look(pods, granted)

        bed = SimpleNamespace(
            control=control, client=client, directory=control.namespaces.directory
        )
        # Without a Lease, as the second scheduler of the chart has it.
        alone = Extender(cast(KubeBed, bed), config={"leaseName": ""}, level="info")
        with alone as extender, ExitStack() as others:
            if "two-schedulers" in kinds:
                second = chaos.scheduler(extender, control, chaos.SECOND, port=10270)
                second.start()
                others.callback(second.end)
            wrong = chaos.Chaos(
                kinds=kinds, control=control, extender=extender, agents=made,
                silence=lambda node: published.publish(node, ready=False),
                publish=published.publish, span=stream.pods / stream.per_second,
            )  # fmt: skip
            before = published.writes
            fleet = Fleet(client, made, changed=published.publish, look=look, seed=stream.seed)
            found = flow(fleet, stream, schedulers=chaos.names(kinds), tick=wrong.tick)
        rate = (published.writes - before) / stream.nodes / found.seconds * 60
        return replace(found, good=checker.good, notes=(
            *wrong.said,
            checker.text(),
            *(f"more than there is: {one}" for one in sorted(checker.promised_twice)[:5]),
            f"{rate:.1f} writes for each node in a minute; an object has {published.first} to "
            f"{published.largest} bytes",
        ))  # fmt: skip


def longest(lives: Sequence[Life], most: int = 5) -> Iterator[str]:
    """Who waited longest and for what, and who waited longest although there was room."""

    def wait(life: Life) -> float:
        return math.inf if life.placed is None else life.placed - life.created

    begun = min(life.created for life in lives)
    for life in sorted(lives, key=wait, reverse=True)[:most]:
        if life.bound is None:
            yield f"never had a node: {life.cpus} CPUs; {life.reason}"
            continue
        past = sum(
            life.created < other.created and other.bound is not None and other.bound < life.bound
            for other in lives
        )
        yield (
            f"created at {life.created - begun:.0f} s, "
            f"waited {wait(life):.1f} s: {life.cpus} CPUs on {life.node}, of it "
            f"{life.bound - life.created:.1f} s for a node, {life.roomy:.1f} s while some node had "
            f"room; passed by {past} younger pods; refused {life.rejections} times; {life.reason}"
        )
    roomy = sorted((life.roomy for life in lives), reverse=True)
    yield (
        "longest time without a node although one had room: "
        f"{', '.join(f'{one:.1f}' for one in roomy[:most])} s"
    )


def report(found: Sequence[tuple[str, Found]]) -> str:
    """The table, and what nodes said most."""
    lines = [table(HEAD, [each.row(name) for name, each in found]), ""]
    for name, each in found:
        said = Counter(life.sentence for life in each.lives if life.rejections)
        if there := [life for life in each.lives if life.node == real.NAME]:
            placed = sum(life.placed is not None for life in there)
            rejected = sum(bool(life.rejections) for life in there)
            node = max((one.bound or math.inf) - one.created for one in there)
            cpus = max((one.placed or math.inf) - (one.bound or 0) for one in there)
            lines.append(f"{name}: pods on the real node: {len(there)}, placed {placed}, "
                         f"refused there {rejected}; longest wait {node:.1f} s for the node, "
                         f"{cpus:.1f} s from then on to run")  # fmt: skip
        lines += [f"{name}: {count} × {text}" for text, count in said.most_common(3)]
        lines += [f"{name}: {note}" for note in each.notes]
        lines += [f"{name}: {line}" for line in longest(each.lives)]
    return "\n".join(lines)
