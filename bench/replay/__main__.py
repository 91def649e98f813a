"""``python -m bench.replay``: density and waste on captured machines; tables and drawings.

What comes out is written to ``artifacts/density-DATE.md`` and as drawings beside it, ready for
bench/results. Nothing is measured by a clock: the same seeds give the same figures everywhere,
but for optima that were not found in time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.replay import trace
from bench.replay.optimum import Optimum, fewest_rejected
from bench.replay.placements import PLACEMENTS
from bench.replay.run import PROBE_CPUS, PROBE_MEMORY, Outcome, replay
from bench.stats import table
from nri_numa.errors import TopologyError
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.machine.sysfs import discover_topology
from nri_numa.measure.results import BAD_COLOR, GOOD_COLOR, Bar, Chart, render_charts_svg
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
CAPTURES = Path(__file__).resolve().parents[3] / "shared/machines"
CAPTURED = (
    "40intel64-2g2n4c+pcilocality.tar.bz2",
    "64amd64-4s2n4ca2co.tar.bz2",
    "96em64t-4no4pa3ca2co.tar.bz2",
)
"""Captures of hwloc's test suite: four NUMA nodes of 10 CPUs, eight of 8, four of 24."""
ABOUT = (
    "For each machine a bar for each placement: per cent, the mean over the traces; a line from "
    "the least to the most of one trace."
)
MODELLED = "modelled"
OTHER = "#4a6fa5"
"""The colour of a bar that is no placement of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Every seed of one load on one machine.

    Attributes:
        found: by placement, an outcome for each seed.
        optima: for each seed; None where none was looked for.
    """

    machine: str
    load: float
    left_out: int
    found: Mapping[str, Sequence[Outcome]]
    optima: Sequence[Optimum | None]


def withheld(topology: Topology) -> CPUSet:
    """The first core, as the kubelet reserves it and as much as it needs to reserve."""
    return CPUSet(topology.cores[min(topology.cores)].cpus)


def described(name: str, topology: Topology) -> str:
    """A machine in a phrase."""
    nodes = list(topology.numa_nodes.values())
    cpus = sorted({len(n.cpus) for n in nodes})
    memory = sorted({round(n.memory_bytes / trace.GIB) for n in nodes})
    return (
        f"{name.partition('.tar')[0]}: {len(nodes)} NUMA nodes × "
        f"{' or '.join(map(str, cpus))} CPUs, {'–'.join(map(str, memory))} GiB"
    )


def series(
    name: str, topology: Topology, *, load: float, seeds: int, hours: float, search_s: float
) -> Series:
    """Replay every seed under every placement, and look for the optimum."""
    reserved = withheld(topology)
    sizes = trace.possible_sizes(topology, len(reserved))
    usable = len(topology.online) - len(reserved)
    found: dict[str, list[Outcome]] = {key: [] for key in PLACEMENTS}
    optima: list[Optimum | None] = []
    for seed in range(seeds):
        pods = trace.generate(seed, sizes=sizes, cpus=usable, load=load, hours=hours)
        for key, placement in PLACEMENTS.items():
            found[key].append(replay(topology, reserved, placement, pods, hours))
        optima.append(
            fewest_rejected(topology, reserved, pods, seconds=search_s) if search_s else None
        )
        print(f"{name}, load {load:g}, seed {seed}: {len(pods)} pods", file=sys.stderr, flush=True)
    return Series(
        machine=described(name, topology),
        load=load,
        left_out=len(trace.SIZES) - len(sizes),
        found=found,
        optima=optima,
    )


HEAD = (
    "placed by", "refused", "least to most", "of them scattered", "on several NUMA nodes",
    "CPUs given", "CPUs stranded", "for alignment", "moves, GiB a pod",
)  # fmt: skip


def rows(one: Series) -> list[tuple[str, ...]]:
    """Of the table: means over the seeds."""
    made = []
    for key, outcomes in one.found.items():
        rejected = [o.rejected_part for o in outcomes]
        all_rejected = sum(o.rejected for o in outcomes)
        placed = sum(o.pods - o.rejected for o in outcomes)
        made.append((
            PLACEMENTS[key].title,
            f"{statistics.mean(rejected):.1%}",
            f"{min(rejected):.1%} to {max(rejected):.1%}",
            f"{sum(o.scattered for o in outcomes) / all_rejected:.0%}" if all_rejected else "-",
            f"{sum(o.crossing for o in outcomes) / placed:.1%}" if placed else "-",
            f"{statistics.mean(o.given for o in outcomes):.1%}",
            f"{statistics.mean(o.stranded for o in outcomes):.1%}",
            f"{statistics.mean(o.scattered / o.pods for o in outcomes):.1%}",
            f"{sum(o.moves for o in outcomes) / placed:.3f}, "
            f"{sum(o.migrated for o in outcomes) / placed / trace.GIB:.2f}",
        ))  # fmt: skip
    between = optimum_parts(one)
    if between:
        least, most = (statistics.mean(ends) for ends in zip(*between, strict=True))
        made.append((
            "optimum, the future known",
            f"{least:.1%}" if least == most else f"{least:.1%} to {most:.1%}",
            f"{min(low for low, _ in between):.1%} to {max(high for _, high in between):.1%}",
            "-", "0.0%", "-", "-", "-", "-",
        ))  # fmt: skip
    return made


def optimum_parts(one: Series) -> list[tuple[float, float]]:
    """For each trace, between which parts of its pods the fewest refusals are; none not looked for.

    The upper end is the best that anybody found: the search, or a placement on one NUMA node.
    """
    made = []
    for seed, optimum in enumerate(one.optima):
        if optimum is None:
            return []
        found = [
            outcomes[seed].rejected
            for key, outcomes in one.found.items()
            if PLACEMENTS[key].one_node
        ]
        pods = one.found[next(iter(one.found))][seed].pods
        made.append((optimum.at_least / pods, min(optimum.rejected, *found) / pods))
    return made


def report(every: Sequence[Series]) -> str:
    """The tables, in Markdown."""
    parts = []
    for one in every:
        pods = [o.pods for o in next(iter(one.found.values()))]
        without = f"; {one.left_out} of the sizes fit on no NUMA node" if one.left_out else ""
        lines = [
            f"#### {one.machine}, load {one.load:g}",
            "",
            table(HEAD, rows(one)),
            "",
            f"{len(pods)} traces, of {min(pods)} to {max(pods)} pods{without}.",
        ]
        if between := optimum_parts(one):
            proven = sum(low == high for low, high in between)
            lines.append(f"The optimum is proven for {proven} of {len(between)} traces.")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _colour(key: str) -> str:
    return BAD_COLOR if key.startswith("kubelet") else GOOD_COLOR


def draw(
    every: Sequence[Series],
    what: str,
    figure: Callable[[Outcome], float],
    foot: str,
    *,
    with_optimum: bool = False,
) -> str:
    """Bars by placement, a panel for each series; the mean, and from least to most over seeds."""
    panels = []
    for one in every:
        bars = []
        for key, outcomes in one.found.items():
            values = [100 * figure(o) for o in outcomes]
            bars.append(_bar(PLACEMENTS[key].title, values, _colour(key)))
        if with_optimum and (between := optimum_parts(one)):
            least, most = (100 * statistics.mean(ends) for ends in zip(*between, strict=True))
            exact = f"{most:.1f} %" if least == most else f"{least:.1f} to {most:.1f} %"
            bars.append(Bar(f"{exact}: optimum, the future known", most, least, most, OTHER))
        panels.append(Chart(f"{what}; {one.machine}, load {one.load:g}", bars))
    return render_charts_svg(panels, (), title=what, about=ABOUT, foot=foot)


def _bar(title: str, values: Sequence[float], colour: str) -> Bar:
    mean = statistics.mean(values)
    return Bar(f"{mean:.1f} %: {title}", mean, min(values), max(values), colour)


def machines(paths: Sequence[Path]) -> dict[str, Topology]:
    """The machines to replay on; without any path the captured ones, and a modelled one."""
    made: dict[str, Topology] = {}
    for path in paths or [CAPTURES / name for name in CAPTURED]:
        if not paths and not path.exists():
            print(f"left out: there is no capture {path.name} in {path.parent}", file=sys.stderr)
            continue
        made[path.name] = discover_topology(path)
    if not paths:
        made[MODELLED] = build_synthetic_topology(
            sockets=2, numa_per_socket=1, cores_per_numa=16, memory_gib=128
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("machine", nargs="*", type=Path, help="captures or trees with sys/ [three]")
    parser.add_argument("--seeds", type=int, default=6, help="traces of each, from seed 0 on  [6]")
    parser.add_argument("--load", type=float, action="append", help="CPUs asked for [1 and 1.3]")
    parser.add_argument("--days", type=float, default=20, help="of arrivals  [20]")
    parser.add_argument(
        "--search", type=float, default=20, help="seconds for an optimum, or 0 [20]"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.days <= 0 or options.search < 0:
        parser.error("expected a seed, some days and no negative search at least")
    if any(load <= 0 for load in options.load or ()):
        parser.error("expected a load above 0")
    try:
        every = [
            series(
                name, topology, load=load, seeds=options.seeds, hours=24 * options.days,
                search_s=options.search,
            )
            for name, topology in machines(options.machine).items()
            for load in options.load or (1.0, 1.3)
        ]  # fmt: skip
    except TopologyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    date = time.strftime("%Y-%m-%d", time.gmtime())
    text = (
        f"Replayed on {date}, seeds 0 to {options.seeds - 1}, {options.days:g} days of arrivals. "
        f"Stranded: for pods of {PROBE_CPUS} CPUs and {PROBE_MEMORY // trace.GIB} GiB.\n\n"
        f"{machine.describe()}\n\n{report(every)}\n"
    )
    print(text)
    ARTIFACTS.mkdir(exist_ok=True)
    foot = f"make density, {date}, seeds 0 to {options.seeds - 1}; the line is from least to most"
    # One load in a drawing is enough to look at; the tables have every one.
    shown = [one for one in every if one.load == every[0].load]
    (ARTIFACTS / f"density-{date}.md").write_text(text, encoding="utf-8")
    rejected = draw(shown, "Pods refused", lambda o: o.rejected_part, foot, with_optimum=True)
    (ARTIFACTS / "density-refused.svg").write_text(rejected, encoding="utf-8")
    stranded = draw(shown, "CPUs stranded", lambda o: o.stranded, foot)
    (ARTIFACTS / "density-stranded.svg").write_text(stranded, encoding="utf-8")
    crossing = draw(
        shown,
        "Containers on several NUMA nodes",
        lambda o: o.crossing / max(1, o.pods - o.rejected),
        foot,
    )
    (ARTIFACTS / "density-crossing.svg").write_text(crossing, encoding="utf-8")
    print(f"written to {ARTIFACTS.name}/density-{date}.md and three drawings beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
