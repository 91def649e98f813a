"""``nri-numa measure``: measurements of what placement gains on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nri_numa.cli.common import Failure, output_option, show_progress, translate_errors
from nri_numa.cli.output import Column, render_table, wrap_text, write_document_or_lines


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(3, 100),
    default=5,
    show_default=True,
    help="Number of measurements of each placement.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 60),
    default=0.5,
    show_default=True,
    help="Duration of each measurement.",
)
@click.option(
    "--only",
    "comparisons",
    metavar="NAME",
    multiple=True,
    help="Make only this comparison, such as memory-bandwidth; may be repeated.",
)
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False),
    help="Also write a drawing to this file.",
)
@output_option()
def measure(
    rounds: int, seconds: float, comparisons: tuple[str, ...], plot: str | None, output: str
) -> None:
    """Measure what placement gains on this machine.

    It compares local with remote memory, two cores with the siblings of one, two L3 caches with
    one, and a CPU alone with one beside a busy program. A comparison that this machine does not
    allow is named and skipped. Each takes some seconds and slows down programs on these CPUs. It
    needs numpy.
    """
    if importlib.util.find_spec("numpy") is None:
        raise Failure(
            "measure needs numpy, which is not installed; to install it: "
            f"{_numpy_install_command()}"
        )
    document = _measure_comparisons(rounds, seconds, comparisons)
    write_document_or_lines(document, output, measurement_lines(document))
    if plot is not None:
        from nri_numa.measure.results import render_results_svg

        try:
            with open(plot, "w", encoding="utf-8") as file:
                file.write(render_results_svg(document))
        except OSError as error:
            raise Failure(f"cannot write {plot}: {error.strerror or error}") from error


def _numpy_install_command() -> str:
    """Return the command that installs numpy for this interpreter; a bundle has no pip."""
    if importlib.util.find_spec("pip") is not None:
        return f"{sys.executable} -m pip install numpy"
    version = ".".join(map(str, sys.version_info[:2]))
    site = Path(__file__).parents[2]
    return (
        f"python3 -m pip install --only-binary=:all: --python-version={version} "
        f"--target={site} numpy"
    )


def _measure_comparisons(rounds: int, seconds: float, subset: tuple[str, ...]) -> dict[str, Any]:
    from nri_numa.machine.sysfs import discover_topology, read_memory
    from nri_numa.measure import rounds as measuring
    from nri_numa.measure.plan import Comparison, plan_comparisons
    from nri_numa.measure.results import MeasuredOrImpossibleComparison, noise_sentences
    from nri_numa.measure.results import results_document as made
    from nri_numa.model.cpuset import CPUSet

    with translate_errors():
        topology = discover_topology("/")
        memory = read_memory("/", topology)
    usable = CPUSet(os.sched_getaffinity(0))
    planned = plan_comparisons(
        topology,
        usable,
        available={i: n.available_bytes for i, n in memory.items()},
        l3_bytes=measuring.read_last_level_cache_bytes(),
    )
    names = [plan.name for plan in planned]
    for name in subset:
        if name not in names:
            raise click.UsageError(f"there is no comparison {name!r}; expected {', '.join(names)}")
    planned = tuple(plan for plan in planned if not subset or plan.name in subset)
    cpus = CPUSet(
        worker.cpu
        for plan in planned
        if isinstance(plan, Comparison)
        for side in (plan.good_side, plan.bad)
        for worker in side.workers
    )
    load = os.getloadavg()[0]
    utilization = measuring.measure_mean_cpu_utilization(cpus) if cpus else None
    steal_before = measuring.read_steal_ticks()
    outcomes: list[MeasuredOrImpossibleComparison] = []
    for plan in planned:
        if isinstance(plan, Comparison):
            with show_progress(f"measuring: {plan.title}"):
                outcomes.append(measuring.run_comparison(plan, rounds=rounds, seconds=seconds))
        else:
            outcomes.append(plan)
    steal_after = measuring.read_steal_ticks()
    steal = None
    if steal_before is not None and steal_after is not None and steal_after[1] > steal_before[1]:
        steal = (steal_after[0] - steal_before[0]) / (steal_after[1] - steal_before[1])
    noise = noise_sentences(
        load=load, cpus=len(topology.online), steal=steal, outcomes=outcomes, usage=utilization
    )
    return made(outcomes, noise, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))


def measurement_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the text."""
    from nri_numa.measure.results import gain_text

    for c in document["comparisons"]:
        yield c["title"]
        rows = [
            (
                f"{side['median']:g} {c['unit']}",
                f"{side['least']:g} to {side['most']:g}",
                side["placed"],
            )
            for side in (c["good"], c["bad"])
        ]
        yield from (
            f"  {line}"
            for line in render_table((Column("MEDIAN"), Column("ROUNDS"), "PLACEMENT"), rows)
        )
        yield f"  {gain_text(c)}"
        yield ""
    for c in document["notShown"]:
        yield from wrap_text(f"Not shown here: {c['title']}, because {c['because']}.", "", "  ")
    if document["noise"]:
        yield "The machine was busy. Measure again when it is idle."
        for sentence in document["noise"]:
            yield from wrap_text(sentence, "  - ", "    ")
    else:
        yield "The machine was idle during the measurement."
