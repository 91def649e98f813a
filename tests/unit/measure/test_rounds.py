"""Loops in real processes."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.measure import rounds, worker
from nri_numa.measure.plan import Comparison, ComparisonSide, ImpossibleComparison, LoopWorker
from nri_numa.measure.results import MeasuredComparison

REPOSITORY = Path(__file__).parents[3]

CPU = max(os.sched_getaffinity(0))


def comparison(*bad: LoopWorker) -> Comparison:
    return Comparison(
        name="n",
        title="t",
        unit="u",
        good_side=ComparisonSide(placed="a", workers=(LoopWorker(loop="busy", cpu=CPU),)),
        bad=ComparisonSide(placed="b", workers=bad),
    )


@pytest.mark.slow
def test_a_comparison_gives_a_figure_for_each_round() -> None:
    found = rounds.run_comparison(
        comparison(
            LoopWorker(loop="latency", cpu=CPU, size=4096), LoopWorker(loop="busy", cpu=CPU)
        ),
        rounds=3,
        seconds=0.01,
    )
    assert isinstance(found, MeasuredComparison)
    assert found.good_values == (0, 0, 0), "a busy loop has no figure"
    assert len(found.bad) == 3
    assert all(figure > 0 for figure in found.bad)


@pytest.mark.slow
def test_what_a_process_cannot_do_is_said_with_its_reason() -> None:
    found = rounds.run_comparison(
        comparison(LoopWorker(loop="latency", cpu=CPU, numa_node=1000, size=4096)),
        rounds=3,
        seconds=0.01,
    )
    assert isinstance(found, ImpossibleComparison)
    assert "memory cannot be tied to NUMA node 1000" in found.because
    missing = rounds.run_comparison(
        comparison(LoopWorker(loop="busy", cpu=8000)), rounds=3, seconds=0.01
    )
    assert isinstance(missing, ImpossibleComparison)
    assert missing.because


@pytest.mark.parametrize("loop", ["bandwidth", "cache", "compute", "latency", "busy"])
def test_every_loop_runs(loop: str) -> None:
    figure = worker.LOOPS_BY_NAME[loop](1 << 16)(0.0)
    assert figure > 0 or loop == "busy"


def test_memory_elsewhere_than_it_should_be_is_noticed() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no numa_maps")
    with pytest.raises(worker.LoopCannotRun, match="came to be on NUMA node 999"):
        worker.check_memory_on_numa_node(999, 1 << 20)


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    assert rounds.read_last_level_cache_bytes(str(tmp_path)) == 0
    for cpu, level, size in ((0, "3", "512K"), (1, "3", "32M"), (1, "2", "64M"), (2, "3", "odd")):
        index = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}"
        index.mkdir(parents=True)
        (index / "level").write_text(f"{level}\n")
        (index / "size").write_text(f"{size}\n")
    assert rounds.read_last_level_cache_bytes(str(tmp_path)) == 32 << 20


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["measure", "--only", "busy-neighbour", "--rounds", "3", "--seconds", "0.05"]
    done = CliRunner().invoke(cli, [*arguments, "-o", "json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    (one,) = document["comparisons"]
    assert one["name"] == "busy-neighbour"
    assert len(one["good"]["rounds"]) == len(one["bad"]["rounds"]) == 3
    assert plot.read_text().startswith("<svg")
    done = CliRunner().invoke(cli, [*arguments, "--plot", str(plot / "x.svg")])
    assert done.exit_code == 1
    assert "Gflop/s" in done.stdout, "what took minutes to measure is shown all the same"


def test_a_comparison_that_there_is_none_of_is_named() -> None:
    done = CliRunner().invoke(cli, ["measure", "--only", "speed"])
    assert done.exit_code == 2
    assert "there is no comparison 'speed'; expected memory-bandwidth, " in done.output


@pytest.mark.parametrize(
    ("missing", "helps"),
    [
        (["numpy"], f"{sys.executable} -m pip install numpy"),
        (["numpy", "pip"], f"--target={REPOSITORY} numpy"),  # as in the bundle
    ],
)
def test_without_numpy_the_error_has_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, missing: list[str], helps: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in missing else real(n))
    done = CliRunner().invoke(cli, ["measure"])
    assert done.exit_code == 1
    assert "numpy, which is not installed; to install it: " in done.output
    assert done.output.rstrip().endswith(helps)
