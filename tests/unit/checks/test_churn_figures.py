"""The churn's accounting: what overlaps is found, what touches is not, and time is told apart."""

from __future__ import annotations

import msgspec
import pytest

from tests.checks.churn_figures import (
    GROUP,
    LIST,
    MEMORY,
    SIBLING,
    TWICE,
    UNOWNED,
    WRONG_CPU,
    Fact,
    Ground,
    Memory,
    Span,
    away,
    episodes,
    figure,
)

# Two NUMA nodes of two cores with two threads each.
GROUND = Ground(
    siblings={cpu: frozenset({cpu & ~1, cpu | 1}) for cpu in range(8)},
    numa_node={cpu: cpu // 4 for cpu in range(8)},
    memory_nodes=frozenset({0, 1}),
)
ALL = frozenset(range(8))
FACTS = {
    fact.serial: fact
    for fact in (
        Fact(serial=1, pod="plain", kind="ordinary"),
        Fact(serial=2, pod="owner", kind="exclusive", owns=2, memory=Memory.ANY),
        Fact(serial=3, pod="other", kind="exclusive", owns=2, memory=Memory.LOCAL),
        Fact(serial=4, pod="alone", kind="isolate", owns=1, isolate=True),
        Fact(
            serial=5,
            pod="listed",
            kind="listed",
            listed=frozenset({1}),
            memory=Memory.LISTED,
            memory_nodes=frozenset({0}),
        ),
    )
}


def span(
    serial: int,
    cpus: set[int] | frozenset[int],
    start: float,
    end: float,
    mems: set[int] | frozenset[int] = GROUND.memory_nodes,
    group: set[int] | None = None,
) -> Span:
    """A span whose neighbouring samples are half a second away."""
    return Span(
        serial=serial,
        cpus=frozenset(cpus),
        mems=frozenset(mems),
        group=frozenset(cpus if group is None else group),
        before=start - 0.5,
        start=start,
        end=end,
        after=end + 0.5,
        samples=9,
    )


OWN = span(2, {2, 3}, 0, 9)


def test_a_neighbour_on_owned_cpus_is_found_with_its_time() -> None:
    own, late = span(2, {2, 3}, 10, 20), span(1, ALL, 5, 12)
    (episode,) = episodes(GROUND, FACTS, [own, late, span(1, ALL - {2, 3}, 12.5, 30)])
    assert (episode.kind, episode.who, episode.owner) == (WRONG_CPU, 1, 2)
    assert episode.cpus == {2, 3}
    assert episode.at == (10, 12)
    assert episode.at_most == (9.5, 12.5)


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        # Nothing is said of the time between two samples.
        ([span(1, ALL, 5, 9.9), span(2, {2, 3}, 10, 20), span(1, {0, 1}, 10.1, 20)], []),
        # Two owners of one CPU are told from a neighbour.
        ([OWN, span(3, {3, 2}, 5, 9, {0})], [(TWICE, 3, 2, {2, 3})]),
        ([OWN, span(3, {0, 1}, 5, 9, {0})], []),
        # Who starts while the plugin is away owns nothing, and is a neighbour.
        (
            [span(2, ALL, 0, 9), span(3, {0, 1}, 0, 9, {0})],
            [(UNOWNED, 2, 0, set(ALL)), (WRONG_CPU, 2, 3, {0, 1})],
        ),
        # The idle sibling belongs to the isolated.
        ([span(4, {2}, 0, 9), span(1, {3, 4}, 0, 9)], [(SIBLING, 1, 4, {3})]),
        ([span(4, {2}, 0, 9), span(1, {4, 5}, 0, 9)], []),
        ([span(5, {1}, 0, 9, {0})], []),
        ([span(5, {1, 2}, 0, 9, {0})], [(LIST, 5, 0, {1, 2})]),
        ([span(5, {1}, 0, 9, {0, 1})], [(MEMORY, 5, 0, {0, 1})]),
        ([span(3, {4, 5}, 0, 9, {1})], []),
        ([span(3, {4, 5}, 0, 9, {0})], [(MEMORY, 3, 0, {0})]),
        ([span(1, {1}, 0, 9, group={1, 2})], [(GROUP, 1, 0, {2})]),
        # Sandboxes and unknown programs are nobody.
        ([span(0, ALL, 0, 9), OWN], []),
    ],
)
def test_what_must_not_be_is_found(
    spans: list[Span], found: list[tuple[str, int, int, set[int]]]
) -> None:
    """(kind, who, owner, CPUs) of each episode."""
    told = [(e.kind, e.who, e.owner, set(e.cpus)) for e in episodes(GROUND, FACTS, spans)]
    assert told == found


def test_who_was_refused_owns_nothing_even_with_as_many_cpus_as_it_asked_for() -> None:
    refused = {**FACTS, 2: msgspec.structs.replace(FACTS[2], unpinned=((0, 10),))}
    spans = [span(2, {2, 3}, 1, 9), span(1, ALL, 1, 9)]
    assert [(e.kind, e.who) for e in episodes(GROUND, refused, spans)] == [(UNOWNED, 2)]
    later = [span(2, {2, 3}, 11, 19), span(1, ALL, 11, 19)]
    assert [(e.kind, e.who) for e in episodes(GROUND, refused, later)] == [(WRONG_CPU, 1)]


def test_time_while_the_plugin_was_away_is_apart() -> None:
    # Killed again before it was ready.
    gone = away([(20, False), (2, False), (3, False), (6, True)], 25)
    assert gone == [(2, 6), (20, 25)]
    spans = [span(2, {2, 3}, 0, 30), span(1, ALL, 3, 7), span(1, {0}, 8, 9), span(1, ALL, 10, 11)]
    result = figure(WRONG_CPU, episodes(GROUND, FACTS, spans), gone)
    assert (result.episodes, result.began_up) == (2, 1)
    assert (result.down, result.up, result.longest_up) == (3, 2, 1)
    assert result.up_at_most == 1.5 + 2


def test_two_neighbours_at_once_count_each_moment_once() -> None:
    spans = [span(2, {2, 3}, 0, 30), span(1, ALL, 3, 7), span(5, {2, 1}, 5, 9, {0})]
    assert figure(WRONG_CPU, episodes(GROUND, FACTS, spans), []).up == 6
