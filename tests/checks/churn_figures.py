"""What a churn's samples come to: who could run on somebody else's CPUs, how long, and when.

A watcher reads every container's process over and over and keeps *spans*: the same words in all
samples from the first to the last one. What holds in both ends of a span is taken to have held in
between; nothing is said about the time between two spans. So an *episode* (a neighbour's span and
an owner's span that overlap in time and in CPUs) is proven, and its length is a lower bound; the
time to the samples around it makes the upper bound. Pure.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

Interval = tuple[float, float]


class Memory(enum.Enum):
    """What a container's memory nodes have to be."""

    ANY = "any"
    ALL = "all"
    LOCAL = "local"
    LISTED = "listed"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver knows about one container before it creates it.

    Attributes:
        owns: how many CPUs it will own; 0: none.
        listed: exactly these CPUs; None: whatever is decided.
    """

    serial: int
    pod: str
    kind: str
    owns: int = 0
    listed: frozenset[int] | None = None
    isolate: bool = False
    memory: Memory = Memory.ALL
    memory_nodes: frozenset[int] = frozenset()
    unpinned: tuple[Interval, ...] = ()


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A container's program had the same words in all samples of a stretch of time.

    Attributes:
        serial: of the container; 0: no container's program (a sandbox, or a runtime's own process
            that has not become the program yet).
        before: the sample before the first one, in seconds; `start` if there is none.
    """

    serial: int
    cpus: frozenset[int]
    mems: frozenset[int]
    group: frozenset[int]
    before: float
    start: float
    end: float
    after: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Something that must not be, for a while."""

    kind: str
    who: int
    owner: int
    cpus: frozenset[int]
    at: Interval
    at_most: Interval


WRONG_CPU = "wrong CPU"
TWICE = "allocated twice"
SIBLING = "idle sibling used"
UNOWNED = "exclusive CPUs missing"
LIST = "not its list"
MEMORY = "wrong memory"
GROUP = "cgroup and process differ"
KINDS = {
    WRONG_CPU: "a container could run on an exclusive CPU of a live container",
    TWICE: "two live containers had the same exclusive CPU",
    SIBLING: "a container could run on a sibling that smt: isolate keeps idle",
    UNOWNED: "a container that asked for exclusive CPUs had another number of them",
    LIST: "a container with a list had other CPUs",
    MEMORY: "a container had other memory nodes than it was to have",
    GROUP: "a process had other CPUs than its cgroup",
}


def owned(fact: Fact, span: Span) -> frozenset[int]:
    """The CPUs that a container owns in a span, in its own words; none before it has them.

    One that started without the plugin and cannot have exclusive CPUs any more owns none, even
    where the shared ones it runs on are by chance as many as it asked for.
    """
    if not fact.owns or len(span.cpus) != fact.owns:
        return frozenset()
    if fact.listed is not None and span.cpus != fact.listed:
        return frozenset()
    if any(start <= (span.start + span.end) / 2 <= end for start, end in fact.unpinned):
        return frozenset()
    return span.cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The machine."""

    siblings: Mapping[int, frozenset[int]]
    numa_node: Mapping[int, int]
    memory_nodes: frozenset[int]


def _met(one: Span, other: Span) -> tuple[Interval, Interval] | None:
    start, end = max(one.start, other.start), min(one.end, other.end)
    if start > end:
        return None
    return (start, end), (max(one.before, other.before), min(one.after, other.after))


def _memory_right(ground: Ground, fact: Fact, span: Span) -> bool:
    if fact.memory is Memory.ALL:
        return span.mems == ground.memory_nodes
    if fact.memory is Memory.LISTED:
        return span.mems == fact.memory_nodes
    if fact.memory is Memory.LOCAL:
        return span.mems == frozenset(ground.numa_node[cpu] for cpu in span.cpus)
    return True


def _by_itself(ground: Ground, fact: Fact, span: Span) -> Iterable[Episode]:
    at, at_most = (span.start, span.end), (span.before, span.after)

    def episode(kind: str, what: frozenset[int]) -> Episode:
        return Episode(kind=kind, who=fact.serial, owner=0, cpus=what, at=at, at_most=at_most)

    if fact.owns and not owned(fact, span):
        yield episode(UNOWNED, span.cpus)
    elif fact.listed is not None and span.cpus != fact.listed:
        yield episode(LIST, span.cpus)
    elif not _memory_right(ground, fact, span):
        yield episode(MEMORY, span.mems)
    if span.cpus != span.group:
        yield episode(GROUP, span.cpus ^ span.group)


def episodes(ground: Ground, facts: Mapping[int, Fact], spans: Iterable[Span]) -> list[Episode]:
    """Everything that must not be, in the order of its beginning."""
    found: list[Episode] = []
    ours = sorted((s for s in spans if s.serial in facts), key=lambda s: (s.start, s.serial))
    live: list[Span] = []
    for span in ours:
        fact = facts[span.serial]
        found += _by_itself(ground, fact, span)
        live = [other for other in live if other.end >= span.start]
        for other in live:
            if other.serial != span.serial:
                found += _between(ground, facts, other, span)
        live.append(span)
    return sorted(found, key=lambda e: (e.at, e.kind, e.who, e.owner))


def _between(
    ground: Ground, facts: Mapping[int, Fact], one: Span, other: Span
) -> Iterable[Episode]:
    met = _met(one, other)
    if met is None:
        return
    at, at_most = met
    mine, theirs = owned(facts[one.serial], one), owned(facts[other.serial], other)
    if both := mine & theirs:
        yield Episode(
            kind=TWICE, who=other.serial, owner=one.serial, cpus=both, at=at, at_most=at_most
        )
        return
    for owner, cpus, guest in ((one, mine, other), (other, theirs, one)):
        if not cpus:
            continue
        idle: frozenset[int] = frozenset()
        if facts[owner.serial].isolate:
            idle = frozenset().union(*(ground.siblings[cpu] for cpu in cpus)) - cpus
        for kind, forbidden in ((WRONG_CPU, cpus), (SIBLING, idle)):
            if where := guest.cpus & forbidden:
                yield Episode(
                    kind=kind,
                    who=guest.serial,
                    owner=owner.serial,
                    cpus=where,
                    at=at,
                    at_most=at_most,
                )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, each moment once, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of episode in numbers; times in seconds, each moment counted once.

    Attributes:
        began_up: how many of them began while the plugin was in charge.
        down: seconds while the plugin was not in charge (killed, or not yet synchronised).
        up: seconds while it was.
    """

    kind: str
    episodes: int
    began_up: int
    down: float
    up: float
    up_at_most: float
    longest_up: float


def away(moments: Iterable[tuple[float, bool]], end: float) -> list[Interval]:
    """When the plugin was not in charge: it or its runtime was killed, until it is in use.

    `moments`: times with whether it is in charge from then on.
    """
    found: list[Interval] = []
    since: float | None = None
    for when, up in sorted(moments):
        if not up and since is None:
            since = when
        elif up and since is not None:
            found.append((since, when))
            since = None
    return union(found if since is None else [*found, (since, max(end, since))])


def _inside(when: float, intervals: Sequence[Interval]) -> bool:
    return any(start <= when <= end for start, end in intervals)


def figure(kind: str, found: Sequence[Episode], away: Sequence[Interval]) -> Figure:
    """The numbers of one kind.

    `found`: from `episodes`; other kinds are passed over.
    """
    mine = [episode for episode in found if episode.kind == kind]
    proven = union(episode.at for episode in mine)
    most = union(episode.at_most for episode in mine)
    up = _without(proven, away)
    return Figure(
        kind=kind,
        episodes=len(mine),
        began_up=sum(1 for episode in mine if not _inside(episode.at_most[0], away)),
        down=round(seconds(proven) - seconds(up), 3),
        up=round(seconds(up), 3),
        up_at_most=round(seconds(_without(most, away)), 3),
        longest_up=round(max((end - start for start, end in up), default=0.0), 3),
    )


def _without(intervals: Sequence[Interval], away: Sequence[Interval]) -> list[Interval]:
    """`intervals` less the time in `away`."""
    left: list[Interval] = []
    for start, end in intervals:
        at = start
        for gone_from, gone_to in away:
            if gone_to < at or gone_from > end:
                continue
            if gone_from > at:
                left.append((at, gone_from))
            at = max(at, gone_to)
        if at < end or (at == end and not _inside(end, away)):
            left.append((at, end))
    return left
