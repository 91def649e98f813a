"""The scheduler's extender on a large cluster: filter and prioritize, bind, start and memory.

The nodes are objects with as much taken as twenty pods take. Pods ask for exclusive CPUs and memory
on one NUMA node, for a share of one, or for more than one has; each is bound to the best node, so
that what was found about that node is found anew.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.beds import cpu_seconds, rss_bytes
from bench.stats import ms, summary, table
from nri_numa.config import AgentConfig
from nri_numa.config.sections import Scheduling
from nri_numa.kube.api import KubeAPI
from nri_numa.scheduler.extender import Extender
from nri_numa.scheduler.protocol import BindingArgs

PREFIX = "numa.kubernetes.io"
NODES, ZONES, PODS = 5000, 4, 20
NAMES = 500
"""What kube-scheduler asks about of 5,000 nodes (its own sample of 10 %)."""
_CPUS = 16
_GIB = 1 << 30


def topology(draw: random.Random, name: str, zones: int = ZONES) -> dict[str, Any]:
    """A node's object after its pods took what they take."""
    left = [[_CPUS * 1000, 64 * _GIB] for _ in range(zones)]
    exclusive = [_CPUS] * zones
    for _ in range(PODS):
        i, cpus = draw.randrange(zones), draw.choice((0, 0, 1, 2, 4))
        milli = cpus * 1000 or 250
        if exclusive[i] > cpus and left[i][0] > milli:
            left[i][0] -= milli
            left[i][1] -= draw.randrange(1, 4) * _GIB // 2
            exclusive[i] = min(exclusive[i] - cpus, left[i][0] // 1000)
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"},
        "attributes": [
            {"name": "topologyManagerPolicy", "value": "none"},
            {"name": f"{PREFIX}/agent-state", "value": "ready"},
        ],
        "zones": [
            {
                "name": f"node-{i}",
                "type": "Node",
                "parent": f"socket-{i // 2}",
                "costs": [
                    {"name": f"node-{j}", "value": 10 if i == j else 12 if i // 2 == j // 2 else 21}
                    for j in range(zones)
                ],
                "resources": [
                    _resource("cpu", _CPUS, exclusive[i]),
                    _resource("memory", 64 * _GIB, left[i][1]),
                    _resource("hugepages-2Mi", 0, 0),
                ],
                "attributes": [
                    {"name": f"{PREFIX}/{key}", "value": str(value)}
                    for key, value in (
                        ("free-cpu-milli", left[i][0]),
                        ("free-exclusive-cpus", exclusive[i]),
                        ("threads-per-core", 2),
                        ("capacity-factor", 1),
                    )
                ],
            }
            for i in range(zones)
        ],
    }


def _resource(name: str, whole: int, left: int) -> dict[str, str]:
    return {
        "name": name,
        "capacity": str(whole),
        "allocatable": str(whole),
        "available": str(left),
    }


def pod(draw: random.Random, number: int, kind: str = "") -> dict[str, Any]:
    """One that asks for something; another shape nearly each time."""
    kind = kind or draw.choice(("single", "single", "shared"))
    asks = {"policy": "single-numa-node", "cpus": "exclusive"}
    cpus, memory = str(draw.randrange(1, 9)), f"{draw.randrange(256, 8192)}Mi"
    if kind == "shared":
        asks, cpus = {"policy": "best-effort"}, f"{draw.randrange(100, 3000)}m"
    elif kind == "wide":
        asks, cpus = {"policy": "restricted", "cpus": "exclusive"}, str(draw.randrange(17, 24))
    amounts = {"cpu": cpus, "memory": memory}
    return {
        "metadata": {
            "name": f"p{number}", "namespace": "default", "uid": f"uid-{number}",
            "resourceVersion": "1",
            "annotations": {f"{PREFIX}/{key}": value for key, value in asks.items()},
        },
        "spec": {
            "containers": [
                {
                    "name": "main", "image": "registry.example/app:1",
                    "resources": {"requests": amounts, "limits": amounts},
                }
            ]
        },
        "status": {"phase": "Pending"},
    }  # fmt: skip


def _question(document: dict[str, Any], names: list[str]) -> bytes:
    return json.dumps({"Pod": document, "Nodes": None, "NodeNames": names}).encode()


class _Instant(KubeAPI):
    """An API server that takes no time: what is left is what binding costs here."""

    async def refresh_credentials(self) -> None:
        """There are none to renew."""

    async def request_json(
        self, method: str, path: str, document: object = None, **how: Any
    ) -> dict[str, Any]:
        return {}


class Samples:
    """Wall and CPU time of calls."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def text(self) -> tuple[str, str]:
        found = []
        for samples in (self.wall, self.cpu):
            s = summary(samples)
            found.append(f"{ms(s.p50, 2)} / {ms(s.p99, 2)}")
        return found[0], found[1]


def extender(
    nodes: int = NODES, seed: int = 1, *, narrow: bool = False, zones: int = ZONES
) -> tuple[Extender, list[str]]:
    """One in this process that has read all nodes."""
    api = _Instant("", "bench")
    made = Extender(AgentConfig(scheduler=Scheduling(filter_to_best=narrow)), api, api)
    made.topologies.synced.set()
    made.pods.synced.set()
    draw = random.Random(seed)
    names = [f"node-{n:05d}.example.internal" for n in range(nodes)]
    for name in names:
        made.node_watcher.on_update(topology(draw, name, zones))
    return made, names


async def calls(
    rounds: int,
    shape: Callable[[random.Random, int], dict[str, Any]] = pod,
    *,
    every: bool = False,
    narrow: bool = False,
    nodes: int = NODES,
) -> tuple[Samples, Samples]:
    """Filter and prioritize together, and bind; the first fifty are left out.

    Args:
        rounds: pods.
        shape: makes one.
        every: all nodes are asked about.
        narrow: `filter` alone, as it is shipped; the first node that it names gets the pod.
        nodes: of the cluster.
    """
    made, names = extender(nodes, narrow=narrow)
    draw = random.Random(2)
    both, binding = Samples(), Samples()
    for number in range(rounds + 50):
        document = shape(draw, number)
        asked = names if every else draw.sample(names, NAMES)
        body = _question(document, asked)
        with both.one():
            fits = json.loads(await made.filter(body))["NodeNames"]
            scores = []
            if not narrow:
                scores = json.loads(await made.prioritize(_question(document, fits)))
        if not fits:
            continue
        best = max(scores, key=lambda one: one["Score"])["Host"] if scores else fits[0]
        metadata = document["metadata"]
        with binding.one():
            problem = await made.binder.bind(
                BindingArgs("default", metadata["name"], metadata["uid"], best)
            )
        assert not problem, problem
    for samples in (both, binding):
        del samples.wall[:50], samples.cpu[:50]
    return both, binding


def _replica(draw: random.Random, number: int) -> dict[str, Any]:
    del draw
    return pod(random.Random(number % 5), number)


def _wide(draw: random.Random, number: int) -> dict[str, Any]:
    return pod(draw, number, "wide")


def _nowhere(draw: random.Random, number: int) -> dict[str, Any]:
    document = pod(draw, number, "wide")
    resources = document["spec"]["containers"][0]["resources"]
    resources["requests"]["memory"] = resources["limits"]["memory"] = f"{500 + number}Gi"
    return document


def _eleven(number: int) -> dict[str, Any]:
    """Containers whose limits are wider than a NUMA node; the last one fits nowhere."""
    document = pod(random.Random(number), number, "shared")
    (one,) = document["spec"]["containers"]
    least = {"cpu": "10m", "memory": "1Mi"}
    document["spec"]["containers"] = [
        {
            **one,
            "name": f"c{n}",
            "resources": {"requests": least, "limits": {"memory": f"{200 + n + 9000 * (n > 9)}Gi"}},
        }
        for n in range(11)
    ]
    return document


async def bounds(rounds: int) -> list[tuple[str, str, str, str]]:
    """What one question may cost, and the longest time for which others wait meanwhile."""
    made, names = extender(2000, narrow=True, zones=8)
    question, pieces, last = Samples(), [0.0], time.process_time()

    async def tick() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            pieces.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    for number in range(rounds):
        body = _question(_eleven(number), names)
        await asyncio.sleep(0)
        with question.one():
            await made.filter(body)
    ticking.cancel()
    scores, draw = Samples(), random.Random(3)
    made, names = extender()
    for number in range(rounds):
        body = _question(_wide(draw, number), names)
        with scores.one():
            await made.prioritize(body)
    what = "filter of 2,000 nodes with 8 NUMA nodes, 11 containers"
    longest = ms(max(pieces), 2)
    return [
        (what, *question.text(), "≤ 1000"),
        (f"{what}: longest piece", "", longest, "≤ 50"),
        ("prioritize alone of 5,000 names, each wider", *scores.text(), "≤ 100"),
    ]


def process(rounds: int) -> list[tuple[str, str, str, str]]:
    """The real process: start with 5,000 objects, memory, and the same calls over HTTP."""
    import http.client
    import os
    import signal
    import subprocess
    import sys

    from tests.beds.fake_api_server import Asked, FakeAPIServer, Said

    draw = random.Random(1)
    names = [f"node-{n:05d}.example.internal" for n in range(NODES)]
    objects = [topology(draw, name) for name in names]

    def answer(asked: Asked) -> Said:
        if "watch=true" in asked.path:
            time.sleep(5)
            return Said(200, "")
        if "noderesourcetopologies" in asked.path:
            begin = 0
            if "continue=" in asked.path:
                begin = int(asked.path.partition("continue=")[2].partition("&")[0])
            page = objects[begin : begin + 500]
            metadata = {"resourceVersion": "1"}
            if begin + 500 < len(objects):
                metadata["continue"] = str(begin + 500)
            return Said(200, {"metadata": metadata, "items": page})
        return Said(200, {"metadata": {"resourceVersion": "1"}, "items": []})

    with (
        tempfile.TemporaryDirectory() as directory,
        FakeAPIServer(Path(directory), answer) as server,
    ):
        file = Path(directory) / "agent.yaml"
        section = {"address": "127.0.0.1:19895", "credentialsDir": directory, "filterToBest": False}
        document = {"apiVersion": "nri-numa/v1", "kind": "AgentConfig", "scheduler": section}
        file.write_text(json.dumps(document))
        begun = time.perf_counter()
        running = subprocess.Popen(
            [sys.executable, "-m", "nri_numa", "scheduler", f"--config={file}"],
            env={**os.environ, **server.environment()},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            while not _ready(19895):
                if running.poll() is not None or time.perf_counter() - begun > 120:
                    raise RuntimeError("the extender does not get ready")
                time.sleep(0.05)
            start, start_cpu = time.perf_counter() - begun, cpu_seconds(running.pid)
            connection = http.client.HTTPConnection("127.0.0.1", 19895)
            draw, wall = random.Random(2), []
            before = cpu_seconds(running.pid)
            for number in range(rounds):
                document = pod(draw, number)
                asked = _question(document, draw.sample(names, NAMES))
                at = time.perf_counter()
                connection.request("POST", "/filter", asked)
                fits = json.loads(connection.getresponse().read())["NodeNames"]
                connection.request("POST", "/prioritize", _question(document, fits))
                connection.getresponse().read()
                wall.append(time.perf_counter() - at)
            spent = (cpu_seconds(running.pid) - before) / rounds
            memory = rss_bytes(running.pid)
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(30)
    s = summary(wall)
    return [
        ("cold start to ready", f"{start:.1f} s", f"{start_cpu:.1f} s", "≤ 10 s"),
        ("resident memory after the calls", f"{memory / 2**20:.0f} MiB", "", "≤ 400 MiB"),
        (
            "the same over HTTP, with the client's share",
            f"{ms(s.p50, 2)} / {ms(s.p99, 2)} ms",
            f"{ms(spent, 2)} ms (mean)",
            "",
        ),
    ]


def _ready(port: int) -> bool:
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def of_all(nodes: int, rounds: int) -> list[tuple[str, str, str, str]]:
    """Filter as shipped, asked about all nodes of a cluster of so many."""
    rows = []
    for what, shape in (
        ("each pod another shape", pod), ("each wider than one NUMA node", _wide),
        ("each fits nowhere", _nowhere),
    ):  # fmt: skip
        both, _ = asyncio.run(calls(rounds, shape, every=True, narrow=True, nodes=nodes))
        limit = "≤ 50" if nodes > NAMES else "≤ 5"
        rows.append((f"filter alone, as shipped, of all {nodes:,}: {what}", *both.text(), limit))
    return rows


def measure(*, quick: bool = False) -> str:
    """All of it as a table."""
    rounds = 150 if quick else 600
    rows: list[tuple[str, str, str, str]] = []
    both, binding = asyncio.run(calls(rounds))
    limit = "≤ 3 / ≤ 15"
    rows.append(("filter + prioritize of 500 names, each pod another shape", *both.text(), limit))
    alone, _ = asyncio.run(calls(rounds, narrow=True))
    rows.append(("filter alone that narrows, as shipped, of the same", *alone.text(), limit))
    rows.append(("bind without the API server", *binding.text(), "≤ 2"))
    both, _ = asyncio.run(calls(rounds, _replica))
    rows.append(("filter + prioritize of 500 names, replicas of five", *both.text(), limit))
    both, _ = asyncio.run(calls(rounds // 4, _wide))
    rows.append(
        ("the same, each pod wider than one NUMA node, each another shape", *both.text(), "")
    )
    both, _ = asyncio.run(calls(rounds // 4, _wide, narrow=True))
    rows.append(("filter alone, as shipped, of 500 names: each wider", *both.text(), "≤ 5"))
    both, _ = asyncio.run(calls(rounds // 10, every=True))
    rows.append(("filter + prioritize of all 5,000 names", *both.text(), ""))
    rows += of_all(NODES, rounds // 10)
    rows += asyncio.run(bounds(5))
    rows = [(what, f"{wall} ms", f"{cpu} ms", goal) for what, wall, cpu, goal in rows]
    rows += process(rounds // 2)
    return table(("what (p50 / p99)", "wall", "CPU", "goal"), rows)
