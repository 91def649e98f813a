"""What several sources say of a Node, over time, and what of it is written."""

from __future__ import annotations

import itertools
import math

import pytest

from nri_numa.controller.capacity import NodeCapacity, Rules
from nri_numa.model.offline_capacity import OfflineCapacity

WALL = 1_795_000_000.0


class Node:
    """One Node that is looked at once a second."""

    def __init__(self, **rules: object) -> None:
        self.capacity = NodeCapacity(Rules(**{"validity": 60.0, **rules}))  # type: ignore[arg-type]
        self.now = 0.0
        self.writes: list[tuple[float, OfflineCapacity | None]] = []

    def look(self) -> None:
        if self.capacity.due(self.now, WALL + self.now):
            wanted = self.capacity.wanted(self.now, WALL + self.now)
            self.capacity.wrote(wanted, self.now)
            self.writes.append((self.now, wanted))

    def until(self, end: float) -> None:
        while self.now < end:
            self.look()
            self.now += 1
        self.look()

    def says(self, **zones: float) -> None:
        self.capacity.report("put", {int(i[1:]): f for i, f in zones.items()}, self.now)

    @property
    def zones(self) -> dict[int, float] | None:
        written = self.capacity.written
        return None if written is None else dict(written.zones)


def test_what_is_said_is_written_once() -> None:
    node = Node()
    node.says(n0=0.5, n1=1)
    node.until(10)
    assert node.writes == [(0.0, OfflineCapacity({0: 0.5, 1: 1.0}, WALL + 60, "put"))]


def test_everything_is_there_needs_no_annotation() -> None:
    node = Node()
    node.says(n0=1, n1=1)
    node.until(10)
    assert node.writes == []


def test_a_repeated_value_is_written_again_when_half_of_its_time_is_over() -> None:
    node = Node()
    for second in range(0, 100, 5):
        node.until(second)
        node.says(n0=0.5)
    assert [at for at, _ in node.writes] == [0, 31, 61, 91]


def test_a_silent_source_is_full_again_when_its_value_expires() -> None:
    node = Node()
    node.says(n0=0.5)
    node.until(59)
    assert node.zones == {0: 0.5}
    node.until(60)
    assert node.zones is None
    assert len(node.writes) == 2


def test_the_last_value_may_count_on() -> None:
    node = Node(keep_last=True)
    node.says(n0=0.5)
    node.until(200)
    assert node.zones == {0: 0.5}
    assert node.capacity.written is not None
    assert node.capacity.written.until > WALL + 200


def test_who_has_nothing_to_say_any_more_is_not_silent() -> None:
    node = Node(keep_last=True)
    node.says(n0=0.5)
    node.until(5)
    node.capacity.withdraw("put")
    node.until(6)
    assert node.zones is None


def test_of_several_sources_the_lowest_counts() -> None:
    node = Node()
    node.says(n0=0.5, n1=0.9)
    node.capacity.report("file", {0: 0.8, 1: 0.25}, node.now)
    node.until(1)
    assert node.zones == {0: 0.5, 1: 0.25}
    assert node.capacity.written is not None
    assert node.capacity.written.source == "file,put"


def test_a_zone_that_a_source_leaves_out_is_full_again() -> None:
    node = Node()
    node.says(n0=0.5, n1=0.5)
    node.until(1)
    node.says(n1=0.5)
    node.until(3)
    assert node.zones == {1: 0.5}


def test_values_are_averaged_over_time_and_arrive() -> None:
    node = Node(smoothing=10.0)
    node.says(n0=1)
    node.until(1)
    node.says(n0=0)
    node.until(11)
    assert node.zones is not None
    assert node.zones[0] == pytest.approx(math.exp(-1), abs=0.01)
    node.until(60)
    assert node.zones == {0: 0.0}, "drained, not nearly so"


def test_flapping_every_second_moves_nobody_every_second() -> None:
    node = Node(smoothing=30.0, hysteresis=0.05, least_time=10.0)
    for second in range(300):
        node.now = float(second)
        node.says(n0=0.3 if second % 2 else 0.9)
        node.look()
    changes = [w.zones for _, w in node.writes if w is not None]
    assert len({zones[0] for zones in changes}) <= 8
    assert node.zones is not None
    assert 0.5 < node.zones[0] < 0.7


def test_two_changes_have_a_least_time_between_them() -> None:
    node = Node(least_time=10.0)
    for second in range(40):
        node.now = float(second)
        node.says(n0=0.1 if second % 2 else 0.9)
        node.look()
    times = [at for at, _ in node.writes]
    assert all(b - a >= 10 for a, b in itertools.pairwise(times))


def test_a_small_difference_is_not_written_but_its_end_is() -> None:
    node = Node(hysteresis=0.05)
    node.says(n0=0.97)
    node.until(1)
    assert node.writes == []
    node.says(n0=0.5)
    node.until(2)
    node.says(n0=0.53)
    node.until(3)
    assert node.zones == {0: 0.5}
    node.says(n0=1)
    node.until(4)
    assert node.zones is None


def test_what_an_earlier_leader_wrote_holds_to_its_end() -> None:
    node = Node()
    node.capacity.written = OfflineCapacity({0: 0.5}, WALL + 20, "put")
    node.until(19)
    assert node.zones == {0: 0.5}
    node.until(20)
    assert node.zones is None


def test_what_somebody_else_wrote_is_put_right() -> None:
    node = Node()
    node.says(n0=0.5)
    node.until(1)
    node.capacity.written = OfflineCapacity({0: 1.0}, WALL + 1e9, "me")
    node.until(2)
    assert node.zones == {0: 0.5}
