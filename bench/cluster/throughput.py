"""How many pods a kube-scheduler binds in a second, with the extender and without it.

Two stock kube-schedulers with the same settings on one control plane, one after the other, several
times: with one of them stopped (SIGSTOP) all pods are created, and the clock runs from when it
goes on until the last pod has its node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

from bench.cluster import chaos, stream
from bench.stats import quantile, table
from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import PATIENCE_S, Client
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.daemon import Daemon
from tests.beds.kube.extender import Extender, install

ROUNDS: Final = 3
QPS: Final = 2000
"""Both may ask so often; kube-scheduler's own 50 would be what is measured."""
_PODS: Final = "/api/v1/namespaces/default/pods"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen.

    Attributes:
        rates: pods in a second, of each round.
        extender: milliseconds of CPU that the extender took for a pod.
        scheduler: likewise the kube-scheduler that asked it, and the one without.
    """

    rates: dict[str, list[float]]
    extender: float
    scheduler: dict[str, float]


def measure(nodes: int, pods: int) -> Measured:
    """Pods in a second, of each round.

    Args:
        nodes: how many there are, empty ones.
        pods: of each round, for four exclusive CPUs each.
    """
    with stream.control_plane() as control:
        client = control.client
        install(client)
        client.kubectl("apply", f"--filename={stream.CRD}")
        made = stream.agents(control, nodes)
        stream.Published(control, made)
        bed = SimpleNamespace(
            control=control, client=client, directory=control.namespaces.directory
        )
        found: dict[str, list[float]] = {"without": [], "with": []}
        with Extender(cast(KubeBed, bed)) as extender:
            both = _schedulers(extender, control)
            used = 1000 / pods / ROUNDS
            try:
                before = {name: _cpu(daemon.pid) for name, daemon in both.items()}
                own = _cpu(extender.process.pid)
                for number in range(ROUNDS):
                    for name, daemon in both.items():
                        found[name].append(_round(client, daemon, name, pods, number))
                return Measured(
                    found,
                    extender=used * (_cpu(extender.process.pid) - own),
                    scheduler={
                        name: used * (_cpu(daemon.pid) - before[name])
                        for name, daemon in both.items()
                    },
                )
            finally:
                for daemon in both.values():
                    daemon.end(signal.SIGKILL)


def _schedulers(extender: Extender, control: ControlPlane) -> dict[str, Daemon]:
    made = {
        "without": chaos.scheduler(extender, control, "without", port=10270, asks=False, qps=QPS),
        "with": chaos.scheduler(extender, control, "with", port=10271, qps=QPS),
    }
    for daemon in made.values():
        daemon.start()
    return made


def _round(client: Client, daemon: Daemon, name: str, pods: int, number: int) -> float:
    asked = stream.Stream(pods=pods, cpus=(4,), seed=number)
    # The first one is bound before the clock runs: the scheduler has read everything by then.
    first, *others = asked.documents((name,))
    client.ask("POST", _PODS, first)
    poll(lambda: not _left(client) or None, "the first pod", timeout_s=PATIENCE_S, every_s=0.1)
    os.kill(daemon.pid, signal.SIGSTOP)
    for document in others:
        client.ask("POST", _PODS, document)
    begun = time.monotonic()
    os.kill(daemon.pid, signal.SIGCONT)
    poll(lambda: not _left(client) or None, "all pods", timeout_s=PATIENCE_S, every_s=0.2)
    seconds = time.monotonic() - begun
    client.delete_pods()
    return (pods - 1) / seconds


def _left(client: Client) -> int:
    """Pods without a node: less and less to read, for the machine is busy with what is measured."""
    return len(
        client.ask("GET", f"{_PODS}?fieldSelector=spec.nodeName=&resourceVersion=0")["items"]
    )


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used (proc(5), ``stat``, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(measured: Measured) -> str:
    """The table, and the share that is left."""
    found = measured.rates
    rows: list[Sequence[object]] = [
        [name, *(f"{rate:.0f}" for rate in rates), f"{quantile(sorted(rates), 0.5):.0f}"]
        for name, rates in found.items()
    ]
    head = ("extender", *(f"round {n + 1}" for n in range(ROUNDS)), "median, pods/s")
    share = quantile(sorted(found["with"]), 0.5) / quantile(sorted(found["without"]), 0.5)
    schedulers = ", ".join(f"{name} {cpu:.1f} ms" for name, cpu in measured.scheduler.items())
    return (
        f"{table(head, rows)}\n\nwith the extender {share:.2f} of the pods in a second\n"
        f"CPU for a pod: extender {measured.extender:.1f} ms; kube-scheduler {schedulers}"
    )
