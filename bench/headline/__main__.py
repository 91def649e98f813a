"""``python -m bench.headline``: measure the headline, print it, write it down. Needs root.

A machine of two NUMA nodes is modelled on this machine's CPUs, one half each. Processes that
Kubernetes knows nothing of burn the CPUs of one of them, turn by turn the first and the second. A
training job is started in a real container through containerd, placed in four ways. What comes
out is written to ``artifacts/headline-DATE.md``, ready for bench/results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.headline.cotenant import cotenants, share
from bench.stats import table
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.measure.rounds import measure_mean_cpu_utilization
from nri_numa.model.cpuset import CPUSet
from tests.beds.containerd import MAIN_SERIES, SERIES, Containerd, find_binaries
from tests.beds.cri import MIB, guaranteed, poll
from tests.beds.plugin_process import PluginProcess
from tests.beds.testbed import TestbedUnavailable
from tests.machines.named import write_sysfs

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
JOB = Path(__file__).with_name("job.py")
PREFIX = "numa.kubernetes.io/"
EVICTED_ABOVE = 0.3
"""Part of the time waited for a CPU from which an evictor driven by steal would evict the job."""
IGNORED = 0.15
"""Part of a NUMA node's CPUs whose loss changes no capacity factor."""
NOISY = 0.1
"""Part of the CPUs' time for others from which a run says little."""
_PROBE_S = 1.0


@dataclass(frozen=True)
class Way:
    """One way of placing the job.

    Attributes:
        title: for the table.
        plugin: whether nri-numa runs.
        config: more keys of its configuration.
        measured: the capacity factors are measured just before, and handed to it.
    """

    title: str
    plugin: bool = True
    config: Mapping[str, Any] | None = None
    measured: bool = False


WAYS = {
    "kernel": Way("not placed: any CPU, as the kernel's scheduler likes", plugin=False),
    "blind": Way("(a) blind: pinned, every NUMA node taken for whole"),
    "kubelet": Way(
        "(b) the kubelet's rules: static CPU manager, its order",
        config={
            "kubeletCompatibility": {
                "except": {"staticCPUs": True, "cpuOrder": True, "ties": True}
            },
            "alignL3": False,
        },
    ),
    "measured": Way("(c) pinned, capacity factor measured", measured=True),
}


@dataclass(frozen=True)
class Run:
    """What one job did.

    Attributes:
        rate: epochs a second.
        waited: part of the time that it was ready and had no CPU.
        cpus: that it could run on.
        learned: its loss fell.
        met: it could run on burned CPUs only.
    """

    rate: float
    waited: float
    cpus: tuple[int, ...]
    learned: bool
    met: bool


def mounts() -> dict[str, str]:
    """What Python and numpy need of this machine, as read-only mounts."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise SystemExit("numpy is not installed here; expected nri-numa[measure], or make setup")
    wanted = {"/lib", "/lib64", "/usr", sys.base_prefix, str(Path(spec.origin).parents[1])}
    wanted.add(str(JOB.parent))
    kept: list[str] = []
    for path in sorted(wanted):
        if Path(path).is_dir() and not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return {path: path for path in kept}


def factors(shares: Mapping[int, float]) -> dict[int, float]:
    """Capacity factors of NUMA nodes, from the part of a CPU that a newcomer got on each.

    The best one is whole, and so is what is nearly as good: whatever disturbs all alike is no
    reason to prefer one, and a whole CPU is not to be had of a node with 0.98.
    """
    best = max(shares.values())
    relative = {i: share / best if best else 1.0 for i, share in shares.items()}
    return {i: 1.0 if one > 1 - IGNORED else round(one, 3) for i, one in relative.items()}


def train(
    bed: Containerd, name: str, seconds: float, *, placed: bool
) -> tuple[dict[str, Any], str]:
    """Run one job in a container; gives what it printed and its pod's CPUs."""
    annotations = {f"{PREFIX}policy": "single-numa-node", f"{PREFIX}bind": "cpu"}
    pod = bed.cri.run_pod(name, annotations=annotations if placed else {})
    python = Path(sys.executable).resolve()
    numpy_spec = importlib.util.find_spec("numpy")
    assert numpy_spec is not None
    assert numpy_spec.origin is not None
    container = bed.cri.run(
        pod,
        resources=guaranteed(1, 512 * MIB),
        command=[str(python), str(JOB), str(seconds)],
        env={
            "PYTHONPATH": str(Path(numpy_spec.origin).parents[1]),
            "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        mounts=mounts(),
    )

    def said() -> dict[str, Any] | None:
        text = container.log_file.read_text() if container.log_file.exists() else ""
        for line in text.splitlines():
            stamp, _, rest = line.partition(" stdout F ")
            if stamp and rest.startswith("{"):
                return dict(json.loads(rest))
            if " stderr F " in line:
                raise RuntimeError(f"the job failed:\n{text}")
        return None

    try:
        return poll(said, f"the job {name}", timeout_s=60 + 20 * seconds, every_s=0.1), pod.name
    finally:
        bed.cri.stop(container)
        bed.cri.remove_pod(pod)


def measure(*, runs: int, seconds: float, each: int, series: str) -> dict[str, list[Run]]:
    """Every way so many times, the co-tenants on either NUMA node in turn."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or cpus != list(range(len(cpus))):
        raise SystemExit(f"two CPUs or more from 0 on are needed, this process may use {cpus}")
    half = len(cpus) // 2
    nodes = {0: cpus[:half], 1: cpus[half : 2 * half]}
    topology = build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=half, threads=1
    )
    found: dict[str, list[Run]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="nnh-") as scratch:
        directory = Path(scratch)
        sysfs = write_sysfs(directory / "machine", topology)
        with Containerd(find_binaries(series), directory / "c", log_level="info") as bed:
            train(bed, "warm", 0.2, placed=False)
            for number in range(runs):
                busy = number % 2
                with cotenants(nodes[busy], each):
                    for name, way in WAYS.items():
                        found[name].append(
                            _one(bed, directory, sysfs, nodes, name, way, number, busy, seconds)
                        )
                        print(f"{number} {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def _one(
    bed: Containerd,
    directory: Path,
    sysfs: Path,
    nodes: Mapping[int, Sequence[int]],
    name: str,
    way: Way,
    number: int,
    busy: int,
    seconds: float,
) -> Run:
    config: dict[str, Any] = dict(way.config or {})
    if way.measured:
        # A real newcomer is tried on every CPU; what it got is what a container would get.
        config["capacityFactor"] = factors(
            {i: statistics.mean(share(cpu, _PROBE_S) for cpu in cpus) for i, cpus in nodes.items()}
        )
    if way.plugin:
        plugin = PluginProcess(
            directory / f"p-{name}-{number}", bed.nri_socket, config=config, sysfs_root=sysfs
        )
        with plugin:
            document, _ = train(bed, f"{name}-{number}", seconds, placed=True)
    else:
        document, _ = train(bed, f"{name}-{number}", seconds, placed=False)
    taken = document["seconds"]
    # Who has a CPU alone uses all of its time; what is missing it waited for.
    waited = document["waitedSeconds"]
    if waited is None:
        waited = max(0.0, taken - document["cpuSeconds"])
    return Run(
        rate=document["epochs"] / taken,
        waited=waited / taken,
        cpus=tuple(document["cpus"]),
        learned=document["lossAfter"] < document["lossBefore"],
        met=set(document["cpus"]) <= set(nodes[busy]),
    )


def report(
    found: Mapping[str, Sequence[Run]],
    *,
    each: int,
    runs: int,
    seconds: float,
    busy: float | None = None,
) -> str:
    """The tables, in Markdown.

    Args:
        found: by the way of placing.
        each: co-tenants on each burned CPU.
        runs: of each way.
        seconds: of training each.
        busy: part of the CPUs' time that others used just before; None when not known.
    """
    rows = []
    base = statistics.mean(run.rate for run in found["blind"])
    for name, way in WAYS.items():
        rates = [run.rate for run in found[name]]
        evicted = sum(run.waited > EVICTED_ABOVE for run in found[name])
        rows.append(
            (
                way.title,
                f"{statistics.mean(rates):.1f}",
                f"{statistics.median(rates):.1f}",
                f"{min(rates):.1f} to {max(rates):.1f}",
                f"{statistics.mean(rates) / base:.2f}",
                f"{statistics.mean(run.waited for run in found[name]):.0%}",
                f"{evicted} of {len(rates)}",
            )
        )
    head = (
        "placement",
        "epochs/s, mean",
        "median",
        "least to most",
        "mean × blind",
        "waited",
        "evicted",
    )
    if busy is not None and busy > NOISY:
        rows_say = f"**Others used {busy:.0%} of the CPUs just before: these figures say little.**"
    else:
        rows_say = ""
    hit = [run.rate for run in found["blind"] if run.met]
    missed = [run.rate for run in found["measured"] if not run.met]
    lines = [table(head, rows), "", *([rows_say, ""] if rows_say else [])]
    if hit and missed:
        lines.append(
            f"Where the blind placement met the co-tenants ({len(hit)} of {len(found['blind'])} "
            "runs): "
            f"{statistics.mean(missed) / statistics.mean(hit):.2f} times as many epochs a second "
            f"with the capacity factor measured ({statistics.mean(missed):.1f} against "
            f"{statistics.mean(hit):.1f})."
        )
    lines += [
        "",
        f"What is possible: {each} co-tenants leave 1/({each}+1) of a CPU, so no placement can be "
        f"more than {each + 1} times better than one that meets them, and over both positions no "
        f"more than {2 / (1 + 1 / (each + 1)):.2f} times better on average than one that cannot "
        "see them.",
        "",
        f"{runs} runs of each, {seconds:g} s of training each; every job learned: "
        f"{'yes' if all(run.learned for one in found.values() for run in one) else 'NO'}.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.headline", description=__doc__)
    parser.add_argument("--runs", type=int, default=6, help="of each placement  [6]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of training each  [4]")
    parser.add_argument("--cotenants", type=int, default=2, help="on each busy CPU  [2]")
    parser.add_argument("--series", choices=SERIES, default=MAIN_SERIES, help="of containerd")
    options = parser.parse_args(arguments)
    if options.runs < 2 or options.seconds <= 0 or options.cotenants < 1:
        parser.error("expected 2 runs, some seconds and a co-tenant at least")
    # As by Ctrl-C: containers, co-tenants and containerd are ended in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    head = f"Measured on {date}.\n\n{machine.describe()}"
    busy = measure_mean_cpu_utilization(CPUSet(os.sched_getaffinity(0)))
    if busy is not None and busy > NOISY:
        print(f"others use {busy:.0%} of the CPUs: measure again when it is quiet", file=sys.stderr)
    try:
        found = measure(
            runs=options.runs,
            seconds=options.seconds,
            each=options.cotenants,
            series=options.series,
        )
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    body = report(
        found, each=options.cotenants, runs=options.runs, seconds=options.seconds, busy=busy
    )
    text = f"{head}\n- load average after: {machine.load()}\n\n{body}\n"
    print(text)
    ARTIFACTS.mkdir(exist_ok=True)
    target = ARTIFACTS / f"headline-{date}.md"
    target.write_text(text, encoding="utf-8")
    print(f"written to {target.relative_to(ARTIFACTS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
