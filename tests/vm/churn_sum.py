"""Adds up what several runs of the churn came to: ``python -m tests.vm churn-sum FILE…``.

Long runs are taken in parts, each with a seed of its own, on whatever machine has time. Seconds,
episodes, pods and kills add up; what is said of the samples is the worst of all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tests.checks.churn_figures import KINDS, WRONG_CPU, Figure
from tests.vm.churn_report import Report


class Sum(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs together; seconds unless said otherwise.

    Attributes:
        runs: how many.
        unfinished: of them, those that were ended before their time.
        machines: those they ran on.
        runtimes: likewise.
        seconds: of churn, boots left out.
        pods: whose sandbox was created.
        containers: that were started.
        kills: of the plugin, by SIGKILL.
        restarts: of the runtime, those after a hang among them.
        hangs: of the runtime.
        refused: containers that the plugin refused.
        away_seconds: the plugin was not in charge.
        container_seconds: that containers lived.
        owners_seconds: two owners of CPUs or more lived at the same time.
        owners_most: owners that lived at the same time, at most.
        figures: one for each kind of finding.
        ways: how often each way of removing was taken.
        problems: of all runs.
    """

    runs: int
    unfinished: int
    machines: list[str]
    runtimes: list[str]
    seconds: float
    pods: int
    containers: int
    kills: int
    restarts: int
    hangs: int
    refused: int
    away_seconds: float
    container_seconds: float
    owners_seconds: float
    owners_most: int
    figures: list[Figure]
    ways: dict[str, int]
    problems: list[str]

    def per_thousand(self, kind: str) -> tuple[float, float]:
        """Seconds of a finding for each 1,000 pods: proven, and at most (0, 0 without pods)."""
        found = next(each for each in self.figures if each.kind == kind)
        share = 1000 / self.pods if self.pods else 0.0
        # Down and up are proven; the time to the samples around is known for up alone.
        return (found.down + found.up) * share, (found.down + found.up_at_most) * share

    def lines(self) -> Iterator[str]:
        """A table in Markdown, and what stands around it."""
        yield (
            f"{self.runs} runs ({self.unfinished} ended before their time) on "
            f"{', '.join(self.machines)}, {', '.join(self.runtimes)}: "
            f"{self.pods} pods with {self.containers} containers in {self.seconds:.0f} s "
            f"({self.pods * 60 / self.seconds if self.seconds else 0:.1f} pods per minute), "
            f"{self.kills} kill -9 of the plugin, {self.restarts} restarts of containerd "
            f"({self.hangs} of them after it hung), {self.refused} containers refused"
        )
        yield (
            f"containers lived {self.container_seconds:.0f} s in all; two owners or more lived "
            f"together for {self.owners_seconds:.0f} s, at most {self.owners_most} of them; "
            f"the plugin was not in charge for {self.away_seconds:.0f} s"
        )
        yield "| what | episodes | began while up | s while down | s while up | at most | longest |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        for each in self.figures:
            yield (
                f"| {each.kind} | {each.episodes} | {each.began_up} | {each.down:.2f} "
                f"| {each.up:.2f} | {each.up_at_most:.2f} | {each.longest_up:.2f} |"
            )
        yield "removed: " + ", ".join(f"{name} {n}" for name, n in sorted(self.ways.items()))
        proven, most = self.per_thousand(WRONG_CPU)
        yield f"wrong-CPU seconds per 1,000 pods: {proven:.2f}, at most {most:.2f}"
        yield from (f"PROBLEM: {text}" for text in self.problems)


def add(reports: Sequence[Report]) -> Sum:
    """Add up; without a report everything is 0."""
    ways: Counter[str] = Counter()
    for report in reports:
        ways.update(report.ways)
    return Sum(
        runs=len(reports),
        unfinished=sum(not report.ended for report in reports),
        machines=sorted({report.machine for report in reports}),
        runtimes=sorted({report.runtime for report in reports}),
        seconds=round(sum(report.seconds for report in reports), 1),
        pods=sum(report.pods for report in reports),
        containers=sum(report.containers for report in reports),
        kills=sum(report.kills for report in reports),
        restarts=sum(report.restarts for report in reports),
        hangs=sum(report.hangs for report in reports),
        refused=sum(report.refused for report in reports),
        away_seconds=round(sum(report.away_seconds for report in reports), 1),
        container_seconds=round(sum(report.container_seconds for report in reports), 1),
        owners_seconds=round(sum(report.owners_seconds for report in reports), 1),
        owners_most=max((report.owners_most for report in reports), default=0),
        figures=[_together(kind, reports) for kind in KINDS],
        ways=dict(ways),
        problems=[
            f"seed {report.options.seed}: {text}" for report in reports for text in report.problems
        ],
    )


def _together(kind: str, reports: Sequence[Report]) -> Figure:
    found = [each for report in reports for each in report.figures if each.kind == kind]
    return Figure(
        kind=kind,
        episodes=sum(each.episodes for each in found),
        began_up=sum(each.began_up for each in found),
        down=round(sum(each.down for each in found), 3),
        up=round(sum(each.up for each in found), 3),
        up_at_most=round(sum(each.up_at_most for each in found), 3),
        longest_up=max((each.longest_up for each in found), default=0.0),
    )


def read(files: Sequence[Path]) -> list[Report]:
    """The runs' reports, in the order of the files.

    Raises:
        ValueError: a file cannot be read, or is no report; names it.
    """
    reports = []
    for file in files:
        try:
            reports.append(msgspec.json.decode(file.read_bytes(), type=Report))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}, expected a churn.json") from error
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file}: {error}, expected a churn.json") from error
    return reports
