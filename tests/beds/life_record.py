"""A life as values, one JSON object a line, its texts beside them, and how two records differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from nri_numa.model.cpuset import NUMASet

Values = Mapping[str, Any]

MAX_EXAMPLES: Final = 3
"""Lines of each class that a difference shows."""
_END: Final = 1 << 30
"""Number of what is recorded after the last event."""


class ChangeClass(StrEnum):
    """What differs in a line; of several, the first one counts."""

    VERDICT = "verdict"
    KIND = "kind"
    WIDTH = "width"
    PLACE = "place"
    REASON = "reason"
    RESERVATION = "reservation"
    OTHER = "other"
    COURSE = "course"
    TEXT = "text"


_MEANING: Final = {
    ChangeClass.VERDICT: "{more} rejected that were admitted, {less} admitted that were not",
    ChangeClass.KIND: "containers of another kind",
    ChangeClass.WIDTH: "{more} containers on more NUMA nodes, {less} on fewer",
    ChangeClass.PLACE: "other CPUs or memory nodes",
    ChangeClass.REASON: "another reason",
    ChangeClass.RESERVATION: "other reservations of pods",
    ChangeClass.OTHER: "other amounts, options, environment, documents or counters",
    ChangeClass.COURSE: "lives in which other events follow, compared up to there",
    ChangeClass.TEXT: "texts alone",
}
_CLASS_OF_FIELD: Final = {
    "verdict": ChangeClass.VERDICT,
    "kind": ChangeClass.KIND,
    **dict.fromkeys(
        ("cpus", "mems", "numa_nodes", "idle_siblings", "moved", "runs_on", "pool", "aligned"),
        ChangeClass.PLACE,
    ),
    "reason": ChangeClass.REASON,
    "reserved": ChangeClass.RESERVATION,
}


@dataclass
class LifeRecord:
    """Lines by what they are about: number of the event and subject, or a subject of the end.

    Attributes:
        lines: values of each; what is empty or None is left out.
        texts: of the same or other subjects; no values are in them alone.
    """

    lines: dict[str, Values] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, about: str, *texts: str, **values: object) -> None:
        """Record a line with its texts; a subject that is there already gets a number."""
        name, number = about, 1
        while name in self.lines:
            number += 1
            name = f"{about} #{number}"
        given = {key: one for key, one in values.items() if one not in (None, "", {}, [], ())}
        self.lines[name] = json.loads(json.dumps(given))
        told = [text for text in texts if text]
        if told:
            self.texts[name] = "\n".join(told)

    def value_lines(self) -> list[str]:
        return [json.dumps({"at": name, **one}) for name, one in self.lines.items()]

    def text_lines(self) -> list[str]:
        """A heading for each text, and below it the text."""
        lines = []
        for name, text in self.texts.items():
            lines += [name, *(f"    {line}".rstrip() for line in text.split("\n"))]
        return lines

    def write(self, path: Path) -> None:
        """Write both files: `path` with ``.jsonl`` and with ``.txt``."""
        for suffix, lines in ((".jsonl", self.value_lines()), (".txt", self.text_lines())):
            path.with_suffix(suffix).write_text("\n".join([*lines, ""]), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> LifeRecord:
        """Read what `write` wrote; empty where nothing is recorded yet."""
        record, name = cls(), ""
        if not path.with_suffix(".jsonl").exists():
            return record
        for line in path.with_suffix(".jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            values = json.loads(line)
            record.lines[values.pop("at")] = values
        texts: dict[str, list[str]] = {}
        for line in path.with_suffix(".txt").read_text(encoding="utf-8").split("\n")[:-1]:
            if line and not line.startswith(" "):
                name = line
                texts[name] = []
            else:
                texts[name].append(line[4:])
        record.texts = {one: "\n".join(lines) for one, lines in texts.items()}
        return record


@dataclass(frozen=True)
class Difference:
    """One line that differs.

    Attributes:
        trend: above 0 for a rejection or a wider container, below for the reverse.
    """

    life: str
    about: str
    change: ChangeClass
    text: str
    trend: int = 0


def compare_lives(life: str, before: LifeRecord, after: LifeRecord) -> Iterator[Difference]:
    """Compare line by line, up to the event from which another one follows."""
    end = _first_other_event(before, after)
    had: dict[str, Values] = {}
    has: dict[str, Values] = {}
    differing = set()
    for name in sorted(dict.fromkeys([*before.lines, *after.lines]), key=_number):
        # A container that has no line at an event is where its last line says.
        subject = name.partition(" ")[2] if _number(name) < _END else name
        had[subject] = before.lines.get(name, had.get(subject, {}))
        has[subject] = after.lines.get(name, has.get(subject, {}))
        if _number(name) < end and had[subject] != has[subject]:
            differing.add(name)
            yield _difference(life, name, had[subject], has[subject])
    if end <= _END:
        yield Difference(life, f"event {end}", ChangeClass.COURSE, "other events follow")
    for name in dict.fromkeys([*before.texts, *after.texts]):
        then, now = before.texts.get(name, ""), after.texts.get(name, "")
        if _number(name) < end and name not in differing and then != now:
            yield Difference(life, name, ChangeClass.TEXT, f"{then!r} → {now!r}")


def _number(name: str) -> int:
    head = name.partition(" ")[0]
    return int(head) if head.isdecimal() else _END


def _first_other_event(before: LifeRecord, after: LifeRecord) -> int:
    """Number of the first event that is not the same in both; above `_END` if all are."""
    events = [
        {_number(name): (name, one.get("asked")) for name, one in record.lines.items()
         if "event" in one}
        for record in (before, after)
    ]  # fmt: skip
    then, now = events
    return min((i for i in then.keys() | now.keys() if then.get(i) != now.get(i)), default=_END + 1)


def _difference(life: str, name: str, had: Values, has: Values) -> Difference:
    changed = {key for key in had.keys() | has.keys() if had.get(key) != has.get(key)}
    classes = {_CLASS_OF_FIELD.get(key, ChangeClass.OTHER) for key in changed}
    nodes = [(one.get("numa_nodes", ""), one.get("mems", "")) for one in (had, has)]
    (cpus_then, mems_then), (cpus_now, mems_now) = nodes
    width = _more(cpus_then, cpus_now) or _more(mems_then, mems_now)
    if width:
        classes.add(ChangeClass.WIDTH)
    trends = {ChangeClass.VERDICT: 1 if has.get("verdict") == "rejected" else -1}
    trends[ChangeClass.WIDTH] = width
    text = ", ".join(f"{key} {had.get(key)} → {has.get(key)}" for key in sorted(changed))
    change = next(one for one in ChangeClass if one in classes)
    return Difference(life, name, change, text, trends.get(change, 0))


def _more(then: str, now: str) -> int:
    return len(NUMASet.parse(now)) - len(NUMASet.parse(then)) if then and now else 0


def report(differences: Sequence[Difference]) -> Iterator[str]:
    """Say by class and life how many lines differ, what that means, and the first ones."""
    for change in ChangeClass:
        of_class = [one for one in differences if one.change is change]
        if not of_class:
            continue
        more = sum(one.trend > 0 for one in of_class)
        meaning = _MEANING[change].format(more=more, less=len(of_class) - more)
        yield f"{change}: {len(of_class)} lines: {meaning}"
        lives = Counter(one.life for one in of_class)
        yield f"    {', '.join(f'{life}: {count}' for life, count in lives.items())}"
        for one in of_class[:MAX_EXAMPLES]:
            yield f"    {one.life}, {one.about}: {one.text}"


def unintended(differences: Sequence[Difference], meant: Collection[str]) -> set[ChangeClass]:
    """Classes that nobody named; other events are what another decision in that life leads to."""
    no_decision = (ChangeClass.COURSE, ChangeClass.TEXT)
    changed = {one.life for one in differences if one.change not in no_decision}
    return {
        one.change
        for one in differences
        if one.change is not ChangeClass.TEXT and one.change not in meant
        if one.change is not ChangeClass.COURSE or one.life not in changed
    }
