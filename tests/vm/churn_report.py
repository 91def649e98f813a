"""How much churn there is to be, and what came of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.checks.churn_figures import KINDS, TWICE, Episode, Fact, Figure, Interval, Span
from tests.machines.vm_machine import format_list, parse_list

OPTIONS = "NRI_NUMA_CHURN"
"""Environment variable that holds `Options` as JSON, for the program in the guest."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How much of it.

    Attributes:
        minutes: the end, whatever was reached; 0: none.
        rounds: times that a pod's containers are replaced, at most; a container costs far less than
            a sandbox, which takes the start of several programs written in Go.
        keep: pods that each thread lets live while it creates the next, at most.
        processors: CPUs that the programs of the bed keep to; 0: all.
    """

    pods: int = 1000
    kills: int = 200
    restarts: int = 20
    minutes: float = 0.0
    seed: int = 1
    workers: int = 5
    runtime: str = "crun"
    rounds: int = 4
    keep: int = 1
    processors: int = 1


class Report(msgspec.Struct, kw_only=True):
    """What came of it; written as JSON beside the logs."""

    options: Options
    runtime: str
    machine: str
    seconds: float
    pods: int
    containers: int
    kills: int
    restarts: int
    rejected: int
    away_seconds: float
    watched: dict[str, float]
    figures: list[Figure]
    kinds: dict[str, int]
    calls_failed: dict[str, int]
    rejections: list[str]
    unsettled: list[str]
    ended: bool = True

    @property
    def owned_twice(self) -> bool:
        """Whether a CPU was allocated to two containers."""
        return any(each.kind == TWICE and each.episodes for each in self.figures)

    @property
    def problems(self) -> list[str]:
        """What must not be, whatever was killed.

        Who lives when a run is ended before its time (`ended`) has not been looked at.
        """
        found = [f"not settled in the end: {text}" for text in self.unsettled]
        found += [
            f"{each.kind}: {each.episodes} times, {KINDS[each.kind]}"
            for each in self.figures
            if each.kind == TWICE and each.episodes
        ]
        return found

    def lines(self) -> Iterator[str]:
        """A table in Markdown, and what stands around it."""
        yield (
            f"{self.machine}, {self.runtime}: {self.pods} pods with "
            f"{self.containers} containers in {self.seconds:.0f} s, "
            f"{self.kills} kill -9 of the plugin, "
            f"{self.restarts} restarts of containerd, "
            f"{self.rejected} containers refused"
        )
        if not self.ended:
            yield "ended before its time"
        yield (
            f"{self.watched.get('reads', 0):.0f} looks in {self.watched.get('sweeps', 0):.0f} "
            f"sweeps, one every {self.watched.get('gap_p50', 0):.3f} s "
            f"(p99 {self.watched.get('gap_p99', 0):.3f} s, longest "
            f"{self.watched.get('gap_max', 0):.3f} s); "
            f"the plugin was not in charge for {self.away_seconds:.0f} s"
        )
        yield "| what | episodes | began while up | s while down | s while up | at most | longest |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        for each in self.figures:
            yield (
                f"| {each.kind} | {each.episodes} | {each.began_up} | {each.down:.2f} "
                f"| {each.up:.2f} | {each.up_at_most:.2f} | {each.longest_up:.2f} |"
            )
        yield "kinds: " + ", ".join(f"{name} {n}" for name, n in sorted(self.kinds.items()))
        failed = ", ".join(f"{name} {n}" for name, n in sorted(self.calls_failed.items()))
        yield f"calls that failed: {failed or 'none'}"
        yield from (f"PROBLEM: {text}" for text in self.problems)


def read_spans(file: Path) -> tuple[list[Span], dict[str, float]]:
    """What a watcher wrote so far, and its summary if it has ended."""
    text = file.read_text(encoding="ascii")
    # The last line may be half written.
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    # Now and then a watcher says how it went so far, and in the end.
    summaries = [row for row in rows if isinstance(row, dict)]
    summary = summaries[-1] if summaries else {}
    spans = [
        Span(
            serial=row[0],
            cpus=parse_list(row[1]),
            mems=parse_list(row[2]),
            group=parse_list(row[3]),
            before=row[4],
            start=row[5],
            end=row[6],
            after=row[7],
            samples=row[8],
        )
        for row in rows
        if not isinstance(row, dict)
    ]
    return spans, summary


def told(episode: Episode, facts: Mapping[int, Fact], begin: float) -> str:
    owner = f" of {facts[episode.owner].pod}" if episode.owner else ""
    start, end = episode.at
    return (
        f"{episode.kind}: {facts[episode.who].pod} {format_list(episode.cpus)}{owner}, "
        f"{end - start:.2f} s from {start - begin:.1f} s on"
    )


def write_episodes(
    file: Path,
    found: Sequence[Episode],
    facts: Mapping[int, Fact],
    away: Sequence[Interval],
    begin: float,
) -> None:
    """Each finding with its time since the beginning, a JSON document per line."""
    lines = [
        json.dumps(
            {
                "kind": each.kind,
                "who": facts[each.who].pod,
                "owner": facts[each.owner].pod if each.owner else "",
                "cpus": format_list(each.cpus),
                "from": round(each.at[0] - begin, 3),
                "to": round(each.at[1] - begin, 3),
                "away": any(a <= each.at[0] <= b for a, b in away),
            }
        )
        for each in found
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
