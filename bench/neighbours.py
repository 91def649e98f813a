"""What a user waits for on a full node: CRI create, start and stop through a real containerd.

No plugin, an empty one and ours take turns on one daemon, round by round, beside the same running
neighbours, so that all see the same machine. ``BENCH_FORMER=CHECKOUT`` adds the plugin of another
checkout, with the Python of this one. Without arguments the numbers of neighbours are 0 to 300.

With ``--machine`` the same happens in an emulated machine with cgroup v2, whose clock counts
instructions: only ratios mean something there, and one of its seconds takes ten or more of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from bench.beds import PREFIX
from bench.stats import ms, summary, table
from tests.beds.containerd import MAIN_SERIES, Containerd, find_binaries
from tests.beds.cri import CRI, Pod, burstable, guaranteed
from tests.beds.plugin_process import PluginProcess, plugin_environment
from tests.beds.processes import Daemon, wait_for
from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import ARTIFACTS, REPOSITORY, Run, prepare
from tests.machines.vm_machine import CPUs, MiB, NumaNode, load_machines

COUNTS = (0, 6, 25, 100, 300)
ROUNDS = 4
EXCLUSIVE = {f"{PREFIX}policy": "best-effort"}

P = ParamSpec("P")
T = TypeVar("T")
HEAD = (
    *("neighbours", "plugin", "create exclusive ms", "× plain", "stop ms", "× plain"),
    *("pod beside it ms", "× beside plain", "plain create ms"),
)
Samples = dict[tuple[str, str], list[float]]
"""Seconds, by plugin and by what was done."""


class _Empty(Daemon):
    """A plugin that registers for the same events and answers nothing."""

    def start(self) -> None:
        """Start it; returns when the runtime has registered it."""
        before = self.log().count("active")
        super().start()
        wait_for([self], lambda: self.log().count("active") > before, "the empty plugin")


def _plugins(bed: Containerd, directory: Path) -> dict[str, Daemon | None]:
    """What takes turns, by name; None is no plugin."""
    quiet = {"log": {"level": "info", "format": "json"}}
    words = [sys.executable, "-m", "bench.empty_plugin", str(bed.nri_socket)]
    found: dict[str, Daemon | None] = {
        "none": None,
        "empty": _Empty("empty", words, directory, plugin_environment()),
    }
    if former := os.environ.get("BENCH_FORMER"):
        found["former"] = PluginProcess(
            directory / "former", bed.nri_socket, config=quiet, environment={"PYTHONPATH": former}
        )
    found["ours"] = PluginProcess(directory / "ours", bed.nri_socket, config=quiet)
    return found


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    begun = time.perf_counter()
    result = work(*args, **kwargs)
    return result, time.perf_counter() - begun


def _round(cri: CRI, other: CRI, pool: ThreadPoolExecutor) -> Iterator[tuple[str, float]]:
    """What was done, and the seconds it took: a container alone, and a plain pod beside one."""

    def plain() -> Pod:
        pod = other.run_pod("beside")
        other.start(other.create(pod, resources=burstable(0.1)))
        return pod

    for kind, wanted, resources in (
        ("plain", {}, burstable(0.1)),
        ("exclusive", EXCLUSIVE, guaranteed(1)),
    ):
        pod = cri.run_pod("alone", annotations=wanted)
        container, seconds = _timed(cri.create, pod, resources=resources)
        yield f"create {kind}", seconds
        cri.start(container)
        yield f"stop {kind}", _timed(cri.stop, container)[1]
        cri.remove_pod(pod)

        pod = cri.run_pod("first", annotations=wanted)
        waiting = pool.submit(_timed, plain)
        cri.start(cri.create(pod, resources=resources))
        second, seconds = waiting.result()
        yield f"pod beside {kind}", seconds
        cri.remove_pod(pod)
        cri.remove_pod(second)


def measure(*, counts: Sequence[int] = COUNTS, passes: int = 3, series: str = MAIN_SERIES) -> str:
    """The table, or a sentence that says why there is none."""
    try:
        with tempfile.TemporaryDirectory(prefix="nnb-") as scratch:
            directory = Path(scratch)
            with Containerd(find_binaries(series), directory / "c") as bed:
                return measured(bed, directory, counts=counts, passes=passes)
    except TestbedUnavailable as error:
        return f"Not measured: {error}."


def measured(bed: Containerd, directory: Path, *, counts: Sequence[int], passes: int) -> str:
    """The table of one daemon."""
    rows: list[Sequence[str]] = []
    plugins = _plugins(bed, directory)
    there = 0
    for count in counts:
        for number in range(there, count):
            pod = bed.cri.run_pod(f"neighbour-{number}")
            bed.cri.start(bed.cri.create(pod, resources=burstable(0.01)))
        there = count
        some = list(_rows(count, _samples(bed, plugins, passes)))
        print(table(HEAD, some), flush=True)  # the next number of them may take an hour
        rows += some
    return table(HEAD, rows)


MACHINE = "no-smt"
"""Four CPUs: each more is a turn that the emulator gives to nobody."""
ASKED = "BENCH_NEIGHBOURS"
"""The variable with the numbers of neighbours and of passes, for `tests.vm.cases.neighbours`."""


def in_machine(*, counts: Sequence[int], passes: int) -> str:
    """The table of an emulated machine with cgroup v2, with memory for all of them."""
    memory = MiB(1536 + 16 * max(counts))
    machine = load_machines(REPOSITORY / "tests/vm/machines")[MACHINE]
    machine = replace(machine, numa=[NumaNode(CPUs(range(4)), memory)], nohz_full=CPUs())
    environment = {ASKED: json.dumps([list(counts), passes])}
    if former := os.environ.get("BENCH_FORMER"):
        environment["BENCH_FORMER"] = former
    try:
        run = Run(
            prepare(containerd=[machine.containerd]),
            machine,
            ["neighbours"],
            directory=ARTIFACTS / "neighbours",
            case_limit_s=24 * 3600,
            environment=environment,
            counted=True,
        )
        (result,) = run
    except TestbedUnavailable as error:
        return f"Not measured: {error}."
    return "\n".join([result.detail, *result.notes])


def _samples(bed: Containerd, plugins: Mapping[str, Daemon | None], passes: int) -> Samples:
    found: Samples = {}
    with bed.client() as other, ThreadPoolExecutor(1) as pool:
        for _ in range(passes):
            for name, plugin in plugins.items():
                if plugin is not None:
                    plugin.start()
                try:
                    for _ in range(ROUNDS):
                        for what, seconds in _round(bed.cri, other, pool):
                            found.setdefault((name, what), []).append(seconds)
                finally:
                    if plugin is not None:
                        plugin.end()
    return found


def _rows(count: int, found: Samples) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(name for name, _ in found):
        row = [str(count), name]
        for what, beside in (
            ("create exclusive", "create plain"),
            ("stop exclusive", "stop plain"),
            ("pod beside exclusive", "pod beside plain"),
        ):
            one, other = (summary(found[name, each]).p50 for each in (what, beside))
            row += [ms(one), f"{one / other:.2f}"]
        yield (*row, ms(summary(found[name, "create plain"]).p50))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.neighbours", description=__doc__)
    parser.add_argument("counts", nargs="*", type=int, help="how many neighbours, ascending")
    parser.add_argument("--passes", type=int, default=3, help="turns of each plugin: %(default)s")
    parser.add_argument("--machine", action="store_true", help="in an emulated one, cgroup v2")
    options = parser.parse_args()
    run = in_machine if options.machine else measure
    print(run(counts=options.counts or COUNTS, passes=options.passes))


if __name__ == "__main__":
    main()
