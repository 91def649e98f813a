"""Figures of several churns add up, and a file that is none is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.checks.churn_figures import KINDS, TWICE, WRONG_CPU, Figure
from tests.vm.__main__ import FAILED, USAGE, main
from tests.vm.churn_report import Options, Report
from tests.vm.churn_sum import add, read


def figure(kind: str, down: float = 0.0, up: float = 0.0, episodes: int = 0) -> Figure:
    """Samples lie a tenth of a second around what is proven."""
    return Figure(
        kind=kind,
        episodes=episodes,
        began_up=0,
        down=down,
        up=up,
        up_at_most=up + 0.1,
        longest_up=up,
    )


def report(seed: int, pods: int, *, wrong: Figure, twice: int = 0) -> Report:
    """A run of a minute for each hundred pods."""
    figures = {kind: figure(kind) for kind in KINDS}
    figures[WRONG_CPU] = wrong
    figures[TWICE] = figure(TWICE, episodes=twice)
    return Report(
        options=Options(seed=seed),
        runtime="containerd 2.1.9 with crun",
        machine="two-sockets-smt",
        seconds=pods * 0.6,
        pods=pods,
        containers=2 * pods,
        kills=pods // 5,
        restarts=pods // 50,
        refused=1,
        hangs=1,
        pods_per_minute=100,
        away_seconds=3,
        watched={},
        cpu_seconds={},
        container_seconds=10,
        owners_seconds=4,
        owners_most=seed,
        figures=list(figures.values()),
        kinds={},
        ways={"sandbox": pods},
        calls_failed={},
        refusals=[],
        worst=[],
        unsettled=[],
        ended=not twice,
    )


def test_runs_add_up() -> None:
    total = add(
        [
            report(3, 200, wrong=figure(WRONG_CPU, down=1.5, up=0.25, episodes=2)),
            report(7, 300, wrong=figure(WRONG_CPU, down=0.5, up=0.75, episodes=1)),
        ]
    )
    assert (total.runs, total.pods, total.containers) == (2, 500, 1000)
    assert (total.kills, total.restarts, total.hangs) == (100, 10, 2)
    assert (total.owners_seconds, total.owners_most) == (8, 7)
    assert total.ways == {"sandbox": 500}
    (wrong,) = (each for each in total.figures if each.kind == WRONG_CPU)
    assert (wrong.episodes, wrong.down, wrong.up, wrong.longest_up) == (3, 2.0, 1.0, 0.75)
    assert total.per_thousand(WRONG_CPU) == (pytest.approx(6.0), pytest.approx(6.4))
    assert not total.problems
    assert total.unfinished == 0
    assert "500 pods with 1000 containers in 300 s (100.0 pods per minute)" in next(total.lines())


def test_nothing_adds_up_to_nothing() -> None:
    assert add([]).per_thousand(WRONG_CPU) == (0.0, 0.0)


def test_a_problem_of_one_run_is_one_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "churn.json"
    bad = report(9, 100, wrong=figure(WRONG_CPU), twice=1)
    file.write_bytes(msgspec.json.encode(bad))
    assert read([file])[0].seconds == 60
    assert main(["churn-sum", str(file)]) == FAILED
    said = capsys.readouterr().out
    assert "1 runs (1 ended before their time)" in said
    assert "PROBLEM: seed 9: allocated twice: 1 times" in said


def test_a_file_that_is_no_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert main(["churn-sum", str(tmp_path / "other.json")]) == USAGE
    assert "other.json: Object missing required field" in capsys.readouterr().err
    assert main(["churn-sum", str(tmp_path / "none.json")]) == USAGE
    assert "none.json: No such file or directory" in capsys.readouterr().err
