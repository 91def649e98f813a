"""How many pods a kube-scheduler binds in a second, with the extender and without it.

Two stock kube-schedulers with the same settings on one control plane, one after the other, several
times: with one of them stopped (SIGSTOP) all pods are created, and the clock runs from when it
goes on until the last pod has its node.

A third one may be a kube-scheduler with the plugin NodeResourceTopologyMatch, over the same
objects, which then say that the nodes have the policy ``single-numa-node``: that plugin knows no
other place for it. It keeps what it reserved in its own cache, and asks nobody.

The first time lies at the start of the extender, which reads who runs on a node before it binds the
first pod there (docs/adr/0049-held-until-the-node-counts-it.md); it is told apart. Before the
others each node gets a pod, as nearly always in the life of a cluster. The extender logs what it
logs for users (level info).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

from msgspec.structs import replace

from bench.cluster import chaos, stream
from bench.stats import quantile, table
from nri_numa.kube.requests import Resource
from nri_numa.model.settings import Settings
from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import PATIENCE_S, Client
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.extender import Extender, install
from tests.beds.processes import Daemon

ROUNDS: Final = 5
QPS: Final = 2000
"""Both may ask so often; kube-scheduler's own 50 would be what is measured."""
_PODS: Final = "/api/v1/namespaces/default/pods"
_HELD: Final = "nri_numa_scheduler_assumed_pods"
_BOTH: Final = ("without", "with")
PLUGIN: Final = "stock-plugin"
_ROLE: Final = "stock-plugin"
_MATCH: Final = "NodeResourceTopologyMatch"
_MATCHING: Final = {
    "plugins": {"multiPoint": {"enabled": [{"name": _MATCH}]}},
    "pluginConfig": [
        {
            "name": _MATCH,
            "args": {
                "cacheResyncPeriodSeconds": 5,
                "cache": {"foreignPodsDetect": "None"},
            },
        }
    ],
}
"""Its cache that reserves: without it the plugin gets each object for each pod. Pods of the other
schedulers here would close their nodes to it, and are gone when its turn comes."""
_LOOK_S: Final = 0.02
"""Between two looks at whether the last pod has its node: a round takes a second."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was seen of one scheduler and all pods.

    Attributes:
        rate: pods in a second.
        cpu: milliseconds of CPU for a pod, by process, while the clock ran.
    """

    rate: float
    cpu: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds of the scheduler that asks the extender (``with``) and of the others (``without``).

    Attributes:
        early: after the start of the extender, which has read no node.
        later: when it has read each of them.
    """

    early: Mapping[str, Sequence[Round]]
    later: Mapping[str, Sequence[Round]]


def measure(nodes: int, pods: int, *, plugin: str = "") -> Measured:
    """Let the schedulers bind in turn.

    Args:
        nodes: how many there are, empty ones.
        pods: of each round, for four exclusive CPUs each.
        plugin: the program of a kube-scheduler with the stock plugin, which is one of them then.
    """
    with stream.control_plane() as control:
        client = control.client
        install(client)
        client.kubectl("apply", f"--filename={stream.CRD}")
        made = stream.agents(control, nodes)
        if plugin:
            one_policy = Settings(defaults={"policy": "single-numa-node"})
            for agent in made.values():
                agent.machine = replace(agent.machine, settings=one_policy)
        stream.Published(control, made)
        bed = SimpleNamespace(
            control=control, client=client, directory=control.namespaces.directory
        )
        with (
            Extender(cast(KubeBed, bed), level="info") as extender,
            _schedulers(extender, control, plugin=plugin) as all_of_them,
        ):
            bench = _Bench(control, extender, all_of_them, pods)
            early = {name: [bench.round(name, 0)] for name in _BOTH}
            bench.visit("with", made)
            later: dict[str, list[Round]] = {name: [] for name in all_of_them}
            for number in range(ROUNDS):
                for name in all_of_them:
                    later[name].append(bench.round(name, number + 1))
            return Measured(early, later)


@contextmanager
def _schedulers(
    extender: Extender, control: ControlPlane, *, plugin: str
) -> Iterator[dict[str, Daemon]]:
    made = {
        "without": chaos.scheduler(extender, control, "without", port=10270, asks=False, qps=QPS),
        "with": chaos.scheduler(extender, control, "with", port=10271, qps=QPS),
    }
    if plugin:
        made[PLUGIN] = _with_plugin(extender, control, plugin)
    try:
        for daemon in made.values():
            daemon.start()
        yield made
    finally:
        for daemon in made.values():
            daemon.end(signal.SIGKILL)


def _with_plugin(extender: Extender, control: ControlPlane, program: str) -> Daemon:
    """A kube-scheduler that has the plugin in its program."""
    kind = f"{Resource.TOPOLOGIES.plural_name}.{Resource.TOPOLOGIES.api_group}"
    role = ("--verb=get,list,watch", f"--resource={kind}")
    control.client.kubectl("create", "clusterrole", _ROLE, *role)
    user = ("--user=system:kube-scheduler", f"--clusterrole={_ROLE}")
    control.client.kubectl("create", "clusterrolebinding", _ROLE, *user)
    daemon = chaos.scheduler(extender, control, PLUGIN, port=10272, asks=False, qps=QPS)
    file = extender.directory / f"{PLUGIN}.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["profiles"][0] |= _MATCHING
    file.write_text(json.dumps(document), encoding="utf-8")
    stock = str(control.programs / "kube-scheduler")
    daemon.command = [program if word == stock else word for word in daemon.command]
    return daemon


class _Bench:
    """Rounds on one control plane."""

    def __init__(
        self, control: ControlPlane, extender: Extender, both: Mapping[str, Daemon], pods: int
    ) -> None:
        self._client, self._extender = control.client, extender
        self._both, self._pods = both, pods
        daemons = control.daemons
        self._pids = {
            "extender": extender.process.pid,
            "API server": daemons["kube-apiserver"].pid,
            "etcd": daemons["etcd"].pid,
        }

    def round(self, name: str, number: int) -> Round:
        """Have one of the schedulers bind all pods of one number, and remove them."""
        client, daemon = self._client, self._both[name]
        # What the round before was promised is given back some seconds after its pods are gone.
        poll(self._free, "room", timeout_s=PATIENCE_S, every_s=0.5)
        first, *others = stream.Stream(pods=self._pods, cpus=(4,), seed=number).documents((name,))
        # The first one is bound before the clock runs: the scheduler has read everything by then.
        client.ask("POST", _PODS, first)
        poll(lambda: not _left(client) or None, "the first pod", timeout_s=PATIENCE_S, every_s=0.1)
        os.kill(daemon.pid, signal.SIGSTOP)
        for document in others:
            client.ask("POST", _PODS, document)
        pids = {"kube-scheduler": daemon.pid, **self._pids}
        before = {what: _cpu(pid) for what, pid in pids.items()}
        begun = time.monotonic()
        os.kill(daemon.pid, signal.SIGCONT)
        _until_bound(client, others[-1]["metadata"]["name"])
        seconds = time.monotonic() - begun
        cpu = {what: 1000 * (_cpu(pid) - before[what]) / len(others) for what, pid in pids.items()}
        client.delete_pods()
        return Round(len(others) / seconds, cpu)

    def visit(self, name: str, nodes: Iterable[str]) -> None:
        """Have one of the schedulers bind a pod to each node, and remove them."""
        poll(self._free, "room", timeout_s=PATIENCE_S, every_s=0.5)
        document = next(stream.Stream(pods=1, cpus=(4,)).documents((name,)))
        for number, node in enumerate(nodes, 1):
            document["metadata"]["name"] = f"visit-{node}"
            document["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
            self._client.ask("POST", _PODS, document)
            if not number % self._pods:
                _until_bound(self._client, document["metadata"]["name"])
        _until_bound(self._client, document["metadata"]["name"])
        self._client.delete_pods()

    def _free(self) -> bool | None:
        lines = self._extender.get("/metrics").splitlines()
        held = [line.split()[-1] for line in lines if line.startswith(f"{_HELD} ")]
        return [float(one) for one in held] == [0] or None


def _until_bound(client: Client, last: str) -> None:
    """Until no pod is without a node.

    A list of who has none would be most of what the API server does meanwhile, and more of it the
    longer the round takes. So only the pod that was created last is looked at until it has its
    node; the others nearly always have theirs then.
    """
    limit = time.monotonic() + PATIENCE_S
    path = f"{_PODS}/{last}?resourceVersion=0"
    # The API server's memory of a busy machine may not have it yet.
    while "nodeName" not in client.request("GET", path)[1].get("spec", {}) or _left(client):
        if time.monotonic() > limit:
            raise TimeoutError(f"{_left(client)} pods have no node after {PATIENCE_S:.0f} s")
        time.sleep(_LOOK_S)


def _left(client: Client) -> int:
    """Pods without a node, from the API server's memory."""
    return len(
        client.ask("GET", f"{_PODS}?fieldSelector=spec.nodeName=&resourceVersion=0")["items"]
    )


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used (proc(5), ``stat``, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(measured: Measured) -> str:
    """The tables, and the share that is left."""
    parts = []
    for when, found in (
        ("after the start of the extender", measured.early),
        ("when it has read each node", measured.later),
    ):
        head = ("extender", *(f"round {n + 1}" for n in range(len(found["with"]))), "median/s")
        rows: list[Sequence[object]] = [
            [name, *(f"{one.rate:.0f}" for one in found[name]), f"{_rate(found[name]):.0f}"]
            for name in found
        ]
        shares = ", ".join(
            f"{name} {_rate(found[name]) / _rate(found['without']):.2f}"
            for name in found
            if name != "without"
        )
        parts.append(
            f"{when}\n\n{table(head, rows)}\n\nshare of the pods in a second without: {shares}"
            f"\n{_processes(found)}"
        )
    return "\n\n".join(parts)


def _rate(rounds: Sequence[Round]) -> float:
    return quantile(sorted(one.rate for one in rounds), 0.5)


def _processes(found: Mapping[str, Sequence[Round]]) -> str:
    """CPU for a pod, the mean of the rounds."""
    lines = []
    for name, rounds in found.items():
        means = {what: sum(one.cpu[what] for one in rounds) / len(rounds) for what in rounds[0].cpu}
        said = ", ".join(f"{what} {cpu:.1f}" for what, cpu in means.items())
        lines.append(f"ms of CPU for a pod, {name}: {said}")
    return "\n".join(lines)
