"""Bursts at the brim, while objects are late and extenders are killed or replaced.

Each burst is of more pods than the nodes have room for: some at once, the others while the first
ones run. A NUMA node that was promised to more than fit is what must not happen; it is counted
from outside (`bench.cluster.checker`), and so are containers that an agent refused.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, cast

from bench.cluster import stream
from bench.cluster.checker import Checker
from bench.cluster.fleet import Agent, Fleet
from bench.stats import table
from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.extender import SCHEDULER, Extender, install

KINDS: Final = ("kill", "rollout", "leader", "rush", "late")
EACH: Final = 2
"""Pods of a wave for each node."""
FIRST_CPUS: Final = 10
SECOND_CPUS: Final = 8
"""Two of the first leave a node of twice 16 CPUs eleven, enough for one of the second by its sum,
and six on each NUMA node: only who knows of the first ones does not bind it."""
SECOND_AT_S: Final = 14.0
"""What started first is not on its way any more for longer than `scheduler.topologyReportDelay`."""
SECONDS: Final = 30.0
"""Each pod runs so long."""
LIMIT_S: Final = 240.0
LATE_S: Final = 60.0
AWAY_S: Final = 1.0
_THREADS: Final = 8
_LEASE: Final = "numa-scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """What is asked for.

    Attributes:
        nodes: how many.
        bursts: one after the other.
        others: objects of other nodes, all written anew at each wave of a rush.
    """

    nodes: int = 16
    bursts: int = 3
    others: int = 4000


class Late:
    """Publishers that write what was so a minute ago."""

    def __init__(self, published: stream.Published) -> None:
        self._published = published
        self._waiting: list[tuple[float, str, JsonObject]] = []

    def publish(self, node: str) -> None:
        """Write a node's object later."""
        now = time.monotonic()
        self._waiting.append((now + LATE_S, node, self._published.document(node)))

    def tick(self) -> None:
        """Write what is due."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, node, written = self._waiting.pop(0)
            self._published.write(node, written)


class Rush:
    """Objects of other nodes, which are all written when the bursts' own are to be read."""

    def __init__(self, client: Client, count: int, like: JsonObject) -> None:
        self._client, self._like = client, like
        self._names = [f"other-{number:04}" for number in range(count)]
        self._serial = 0
        self._thread: threading.Thread | None = None
        self.write()

    def write(self) -> None:
        """Write all of them, and wait for it."""
        self._serial += 1

        def one(name: str) -> None:
            metadata = {
                "name": name,
                "annotations": {"bench.example.com/serial": f"{self._serial}"},
            }
            self._client.ask(
                "PATCH", f"{stream.NRT}/{name}?fieldManager=bench&force=true",
                {**self._like, "metadata": metadata}, content_type="application/apply-patch+yaml",
            )  # fmt: skip

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, self._names))

    def begin(self) -> None:
        """Write all of them meanwhile; where that goes on still, it will do."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.write)
            self._thread.start()

    def end(self) -> None:
        """Wait until they are written."""
        if self._thread is not None:
            self._thread.join()


class Replicas:
    """One extender or two, with a kube-scheduler each."""

    def __init__(self, control: ControlPlane, kind: str) -> None:
        bed = cast(
            KubeBed,
            SimpleNamespace(
                control=control, client=control.client, directory=control.namespaces.directory
            ),
        )
        self._kind, self._stack = kind, ExitStack()
        lease = _LEASE if kind == "rollout" else ""
        count = 2 if kind in ("rollout", "leader") else 1
        self._all = [
            Extender(
                bed, config={"leaseName": lease}, port=19898 + n, scheduler_port=10273 + n,
                standby=n > 0, level="info",
            )
            for n in range(count)
        ]  # fmt: skip
        self._turn = 0
        if kind == "leader":
            _let_elect(control.client, self._all)
        for one in self._all:
            self._stack.enter_context(one)

    def close(self) -> None:
        self._stack.close()

    def trouble(self, later: Callable[[float, Callable[[], object]], object]) -> None:
        """Kill or replace the one whose turn it is."""
        one = self._all[self._turn % len(self._all)]
        self._turn += 1
        if self._kind == "kill":
            one.process.end(signal.SIGKILL)
            later(AWAY_S, one.process.start)
        elif self._kind == "rollout":
            one.process.end(signal.SIGTERM)
            later(AWAY_S, one.process.start)
        elif self._kind == "leader":
            one.scheduler.end(signal.SIGKILL)
            one.process.end(signal.SIGKILL)
            later(AWAY_S, one.process.start)
            later(2 * AWAY_S, one.scheduler.start)


def _let_elect(client: Client, extenders: list[Extender]) -> None:
    """Have the kube-schedulers elect their leader, whose extender does not learn of it."""
    client.kubectl(
        "create", "clusterrole", _LEASE, "--verb=create,get,list,watch,update,patch",
        "--resource=leases.coordination.k8s.io",
    )  # fmt: skip
    client.kubectl(
        "create", "clusterrolebinding", _LEASE, f"--clusterrole={_LEASE}",
        "--user=system:kube-scheduler",
    )  # fmt: skip
    for one in extenders:
        file = one.directory / "scheduler.json"
        document = json.loads(file.read_text(encoding="utf-8"))
        document["leaderElection"] = {
            "leaderElect": True, "resourceName": _LEASE, "resourceNamespace": "kube-system",
        }  # fmt: skip
        file.write_text(json.dumps(document), encoding="utf-8")


@contextmanager
def _cluster(nodes: int) -> Iterator[tuple[ControlPlane, dict[str, Agent], stream.Published]]:
    with stream.control_plane() as control:
        install(control.client)
        control.client.kubectl("apply", f"--filename={stream.CRD}")
        made = stream.agents(control, nodes)
        yield control, made, stream.Published(control, made)


def measure(kind: str, asked: Bursts) -> list[object]:
    """Let the bursts come; a row of the table."""
    begun = time.monotonic()
    with _cluster(asked.nodes) as (control, made, published):
        client, late = control.client, Late(published)
        machine = stream.topology_settings().topology
        checker = Checker(
            zone_cpus={i: len(node.cpus) for i, node in machine.numa_nodes.items()},
            numa_of=lambda cpu: machine.cpus[cpu].numa_node,
        )
        rush = None
        if kind == "rush":
            rush = Rush(client, asked.others, published.document(next(iter(made))))
        changed = late.publish if kind == "late" else published.publish
        fleet = Fleet(
            client, made, changed=changed,
            look=lambda pods: checker.look(pods, {n: a.granted() for n, a in made.items()}),
        )  # fmt: skip
        replicas = Replicas(control, kind)
        try:
            for number in range(asked.bursts):
                _burst(fleet, replicas, rush, late, number, asked.nodes)
                client.delete_pods()
        finally:
            replicas.close()
            if rush is not None:
                rush.end()
    lives = fleet.lives.values()
    twice = {(node, place) for node, place, _ in checker.promised_twice}
    return [
        kind, len(lives), sum(life.placed is not None for life in lives), len(twice),
        len(checker.granted_twice), sum(life.rejections for life in lives), checker.looks,
        f"{time.monotonic() - begun:.0f}",
    ]  # fmt: skip


def _burst(
    fleet: Fleet, replicas: Replicas, rush: Rush | None, late: Late, number: int, nodes: int
) -> None:
    begun = time.monotonic()
    waiting: list[tuple[float, Callable[[], object]]] = []

    def later(seconds: float, do: Callable[[], object]) -> None:
        waiting.append((time.monotonic() - begun + seconds, do))

    mine: set[str] = set()

    def create(cpus: int) -> None:
        if rush is not None:
            rush.begin()
        documents = list(
            stream.Stream(pods=EACH * nodes, cpus=(cpus,), seconds=(SECONDS, SECONDS)).documents(
                (SCHEDULER,)
            )
        )
        for document in documents:
            document["metadata"]["name"] = f"burst-{number}-{cpus}-{document['metadata']['name']}"
            mine.add(document["metadata"]["name"])
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fleet.create, documents))

    create(FIRST_CPUS)
    later(0.5, lambda: replicas.trouble(later))
    later(SECOND_AT_S, lambda: create(SECOND_CPUS))
    later(SECOND_AT_S + 0.5, lambda: replicas.trouble(later))
    while time.monotonic() - begun < LIMIT_S:
        fleet.step()
        late.tick()
        now = time.monotonic() - begun
        for one in [one for one in waiting if one[0] <= now]:
            waiting.remove(one)
            one[1]()
        ended = [life.ended for name, life in fleet.lives.items() if name in mine]
        if len(ended) == 2 * EACH * nodes and None not in ended:
            break
        time.sleep(0.1)


HEAD: Final = (
    "what", "pods", "placed", "NUMA nodes promised to more than fit", "CPUs of two pods",
    "refused on a node", "looks", "s",
)  # fmt: skip


def report(rows: list[list[object]]) -> str:
    """The table."""
    return table(HEAD, rows)
