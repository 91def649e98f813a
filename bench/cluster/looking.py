"""What looking at a large cluster costs: ``kubectl numa cluster``, and the controller's page.

A real API server with thousands of Nodes, each as large as a kubelet makes it (fifty images, and
what it is), their NodeResourceTopology objects, and pods that their nodes refuse. The command is
run as people run it; the controller follows the objects, and its page is asked over HTTP.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, cast

from bench import extender
from bench.beds import cpu_seconds, rss_bytes
from bench.cluster import stream
from bench.stats import quantile, table
from tests.beds.cri import poll
from tests.beds.kube import controller as controllers
from tests.beds.kube import extender as extenders
from tests.beds.kube.bed import MANIFESTS, KubeBed
from tests.beds.kube.client import PATIENCE_S, Client, JsonObject
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.controller import Controller
from tests.beds.plugin_process import REPOSITORY

COMMAND: Final = REPOSITORY / "config/kubectl/kubectl-numa"
STUCK: Final = 100
IMAGES: Final = 50
"""That a kubelet names in its Node at most."""
TIMES: Final = 3
_PORT: Final = 9893
_AT_ONCE: Final = 8
_QUESTIONS: Final[Mapping[str, str]] = {
    "no question, 200 nodes": "",
    "no question, 500 nodes": "limit=500",
    "{} CPUs on one NUMA node": "cpus={}",
    "{} CPUs, only where they fit": "cpus={}&fittingOnly=true",
    "{} CPUs, wider than one NUMA node": "cpus=2{}&policy=restricted",
}
_TIMED = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
size = len(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE).stdout)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
print(json.dumps([time.perf_counter() - begun, cpu, used.ru_maxrss, size]))
"""
"""A process of its own: a program begins with the peak of the memory of who starts it."""
_ASK = """
import json, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for url in sys.argv[1:]:
    begun = time.perf_counter()
    size = len(opener.open(url, timeout=60).read())
    print(json.dumps([time.perf_counter() - begun, size]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one way of looking took.

    Attributes:
        what: was done.
        seconds: wall time, middle and longest.
        memory: bytes of the largest process that it needed, or of the controller.
        size: bytes that came.
    """

    what: str
    seconds: tuple[float, float]
    memory: int
    size: int


def measure(nodes: int) -> list[Row]:
    """Look in all ways.

    Args:
        nodes: how many there are.
    """
    with stream.control_plane() as control:
        client = control.client
        client.kubectl("apply", f"--filename={MANIFESTS / 'base/namespace.yaml'}")
        controllers.install(client)
        extenders.install(client)
        for file in (MANIFESTS / "controller-page/role.yaml", stream.CRD):
            client.kubectl("apply", f"--filename={file}")
        poll(lambda: client.request("GET", stream.NRT)[0] == 200 or None, "the kind")
        _make(client, nodes)
        return [*_commands(control), *_extender(control), *_page(control, nodes)]


def _make(client: Client, nodes: int) -> None:
    """Nodes, what they publish, and pods that wait."""
    draw = random.Random(1)

    def objects() -> Iterator[tuple[str, JsonObject]]:
        for number in range(nodes):
            name = f"node-{number:04}"
            yield "/api/v1/nodes", _node(name)
            published = extender.topology(draw, name)
            published["metadata"] = {"name": name}
            yield stream.NRT, published
        for number in range(min(STUCK, nodes)):
            yield "/api/v1/namespaces/default/pods", _pod(number)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: client.ask("POST", *one), objects()))
        list(pool.map(lambda number: _refuse(client, number), range(min(STUCK, nodes))))


def _node(name: str) -> JsonObject:
    """As large as a real one."""
    room = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "900Gi"}
    digest = "0123456789abcdef" * 4
    images = [
        {
            "names": [
                f"registry.example.com/team-{i:02}/service@sha256:{digest}",
                f"registry.example.com/team-{i:02}/service:1.{i}.0",
            ],
            "sizeBytes": 100_000_000 + i,
        }
        for i in range(IMAGES)
    ]
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64"},
            "annotations": {f"{extender.PREFIX}/numa-ids": "0-3"},
        },
        "status": {
            "capacity": room,
            "allocatable": room,
            "images": images,
            "conditions": [
                {"type": kind, "status": str(kind == "Ready"), "reason": f"Kubelet{kind}",
                 "message": "kubelet says what it has to say of this"} for kind in kinds
            ],
        },
    }  # fmt: skip


def _pod(number: int) -> JsonObject:
    amounts = {"cpu": "12", "memory": "8Gi"}
    resources = {"requests": amounts, "limits": amounts}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"stuck-{number:03}", "annotations": stream.ANNOTATIONS},
        "spec": {
            "nodeName": f"node-{number:04}",
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "none", "resources": resources}],
        },
    }


def _refuse(client: Client, number: int) -> None:
    name = f"stuck-{number:03}"
    message = (
        f"failed to create container: rpc error: InsufficientCPU: pod default/{name}, "
        "container main: needs 12 exclusive CPUs on one NUMA node; at most 8 free for exclusive use"
    )
    waiting = {"reason": "CreateContainerError", "message": message}
    one = {
        "name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"waiting": waiting},
    }  # fmt: skip
    client.ask(
        "PATCH", f"/api/v1/namespaces/default/pods/{name}/status",
        {"status": {"phase": "Pending", "containerStatuses": [one]}},
        content_type="application/merge-patch+json",
    )  # fmt: skip


# --- the command ----------------------------------------------------------------------------------


def _commands(control: ControlPlane) -> Iterator[Row]:
    kubectl = str(control.programs / "kubectl")
    environment = {**control.environment, "KUBECTL_PATH": kubectl}
    enter = control.namespaces.enter(mounts=False)
    for words in ([], ["-o", "json"]):
        command = [*enter, sys.executable, str(COMMAND), "cluster", *words]
        yield _run(f"kubectl numa {' '.join(['cluster', *words])}", command, environment)
    for words in (["get", stream.NRT.rpartition("/")[2]], ["get", "nodes"]):
        what = f"of it kubectl {' '.join(words)} -o json"
        yield _run(what, [*enter, kubectl, *words, "-o", "json"], environment)


def _run(what: str, command: list[str], environment: Mapping[str, str]) -> Row:
    taken, memory, size, cpu = [], 0, 0, 0.0
    for _ in range(TIMES):
        done = subprocess.run(
            [sys.executable, "-c", _TIMED, *command],
            env=dict(environment), stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        seconds, cpu, kib, size = json.loads(done.stdout)
        taken.append(seconds)
        memory = max(memory, kib << 10)  # of the larger of the command and kubectl
    what = f"{what} ({cpu:.1f} s of CPU)"
    return Row(what=what, seconds=_middle(taken), memory=memory, size=size)


# --- what follows ---------------------------------------------------------------------------------


def _extender(control: ControlPlane) -> Iterator[Row]:
    begun = time.perf_counter()
    with extenders.Extender(_bed(control), config={"leaseName": ""}, level="info") as extender:
        ready, pid = time.perf_counter() - begun, extender.process.pid
        yield Row(what=f"start of the extender until it is ready ({cpu_seconds(pid):.1f} s of CPU)",
                  seconds=(ready, ready), memory=rss_bytes(pid), size=0)  # fmt: skip


def _bed(control: ControlPlane) -> KubeBed:
    bed = SimpleNamespace(
        control=control, client=control.client, directory=control.namespaces.directory
    )
    return cast(KubeBed, bed)


def _page(control: ControlPlane, nodes: int) -> Iterator[Row]:
    with Controller(_bed(control), _PORT, page={"enabled": True}) as replica:
        begun = time.perf_counter()

        def there() -> bool | None:
            status, text = replica.ask("GET", "/v1/cluster?limit=1")
            return (status == 200 and json.loads(text)["total"]["nodes"] == nodes) or None

        poll(there, "all nodes on the page", timeout_s=PATIENCE_S, every_s=0.1)
        ready = time.perf_counter() - begun
        used = cpu_seconds(replica.pid)
        memory = rss_bytes(replica.pid)
        yield Row(what=f"start of the controller until its page shows all ({used:.1f} s of CPU)",
                  seconds=(ready, ready), memory=memory, size=0)  # fmt: skip
        for what, query in _QUESTIONS.items():
            asked = [query.format(n) for n in range(1, 8)]
            url = f"http://127.0.0.1:{_PORT}/v1/cluster?"
            command = [*replica.enter, sys.executable, "-c", _ASK, *(url + one for one in asked)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = [json.loads(line) for line in done.stdout.splitlines()]
            yield Row(
                what=f"page, {what.format('n')}",
                seconds=_middle([seconds for seconds, _ in found]),
                memory=rss_bytes(replica.pid),
                size=max(size for _, size in found),
            )


def _middle(taken: list[float]) -> tuple[float, float]:
    ordered = sorted(taken)
    return quantile(ordered, 0.5), ordered[-1]


def report(nodes: int, rows: list[Row]) -> str:
    """The table."""
    head = (f"{nodes} nodes", "p50 s", "longest s", "MiB", "kB")
    return table(
        head,
        [
            [one.what, f"{one.seconds[0]:.2f}", f"{one.seconds[1]:.2f}",
             f"{one.memory / (1 << 20):.0f}", f"{one.size / 1000:.0f}"]
            for one in rows
        ],
    )  # fmt: skip
