"""``nri-numa measure``: what placement gains on this machine, measured."""

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
    help="How often each placement is measured.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 60),
    default=0.5,
    show_default=True,
    help="How long each time.",
)
@click.option(
    "--only",
    metavar="NAME",
    multiple=True,
    help="Only this comparison, such as memory-bandwidth; may be repeated.",
)
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False),
    help="Draw it into this file as well.",
)
@output_option()
def measure(
    rounds: int, seconds: float, only: tuple[str, ...], plot: str | None, output: str
) -> None:
    """Measure what placement gains on this machine.

    Local against remote memory, two cores against the siblings of one, an L3 cache each against
    one together, a CPU alone against one beside a busy program. What this machine cannot show is
    said, and the others are shown. It uses the CPUs it measures for some seconds each: what runs
    there notices. Needs numpy.
    """
    if importlib.util.find_spec("numpy") is None:
        raise Failure(
            "measure needs numpy, which is not installed here; expected it after: "
            f"{_numpy_install_command()}"
        )
    document = _measure_comparisons(rounds, seconds, only)
    write_document_or_lines(document, output, measurement_lines(document))
    if plot is not None:
        from nri_numa.measure.results import render_results_svg

        try:
            with open(plot, "w", encoding="utf-8") as file:
                file.write(render_results_svg(document))
        except OSError as error:
            raise Failure(f"cannot write {plot}: {error.strerror or error}") from error


def _numpy_install_command() -> str:
    """The command that installs numpy where this interpreter finds it; a bundle has no pip."""
    if importlib.util.find_spec("pip") is not None:
        return f"{sys.executable} -m pip install numpy"
    version = ".".join(map(str, sys.version_info[:2]))
    site = Path(__file__).parents[2]
    return (
        f"python3 -m pip install --only-binary=:all: --python-version={version} "
        f"--target={site} numpy"
    )


def _measure_comparisons(rounds: int, seconds: float, only: tuple[str, ...]) -> dict[str, Any]:
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
        available={i: one.available_bytes for i, one in memory.numa_nodes.items()},
        l3_bytes=measuring.read_last_level_cache_bytes(),
    )
    names = [one.name for one in planned]
    for name in only:
        if name not in names:
            raise click.UsageError(f"there is no comparison {name!r}; expected {', '.join(names)}")
    planned = tuple(one for one in planned if not only or one.name in only)
    cpus = CPUSet(
        worker.cpu
        for one in planned
        if isinstance(one, Comparison)
        for side in (one.good_side, one.bad)
        for worker in side.workers
    )
    load = os.getloadavg()[0]
    busy = measuring.measure_mean_cpu_utilization(cpus) if cpus else None
    before = measuring.read_steal_ticks()
    outcomes: list[MeasuredOrImpossibleComparison] = []
    for one in planned:
        if isinstance(one, Comparison):
            with show_progress(f"measuring: {one.title}"):
                outcomes.append(measuring.run_comparison(one, rounds=rounds, seconds=seconds))
        else:
            outcomes.append(one)
    after = measuring.read_steal_ticks()
    steal = None
    if before is not None and after is not None and after[1] > before[1]:
        steal = (after[0] - before[0]) / (after[1] - before[1])
    noise = noise_sentences(
        load=load, cpus=len(topology.online), steal=steal, outcomes=outcomes, usage=busy
    )
    return made(outcomes, noise, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))


def measurement_lines(document: dict[str, Any]) -> Iterator[str]:
    """The text."""
    from nri_numa.measure.results import gain_text

    for one in document["comparisons"]:
        yield one["title"]
        rows = [
            (
                f"{side['median']:g} {one['unit']}",
                f"{side['least']:g} to {side['most']:g}",
                side["placed"],
            )
            for side in (one["good"], one["bad"])
        ]
        yield from (
            f"  {line}"
            for line in render_table((Column("MEDIAN"), Column("ROUNDS"), "PLACED"), rows)
        )
        yield f"  {gain_text(one)}"
        yield ""
    for one in document["notShown"]:
        yield from wrap_text(f"Not shown here: {one['title']}, because {one['because']}.", "", "  ")
    if document["noise"]:
        yield "Noisy: measure again when it is quiet."
        for sentence in document["noise"]:
            yield from wrap_text(sentence, "  - ", "    ")
    else:
        yield "The machine was quiet meanwhile."
