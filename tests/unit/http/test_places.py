"""Who may stay connected, and who makes room: places as plain values, on a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

from nri_numa.http.places import GRACE, LINE, ConnectionPlace, ConnectionPlaces, Line


@dataclass
class Door:
    """ConnectionPlaces for four and a reserve of two; remembers whose connection was closed."""

    now: float = 100.0
    closed: list[str] = field(default_factory=list)
    places: ConnectionPlaces = field(init=False)

    def __post_init__(self) -> None:
        self.places = ConnectionPlaces(4, 2, lambda: self.now)

    def come(self, name: str, client: str = "a") -> ConnectionPlace:
        place = self.places.take(client)
        place.close = lambda: self.closed.append(name)
        return place


def test_a_client_with_more_than_its_share_makes_room_for_another() -> None:
    """And nobody does for a client that has as many already."""
    door = Door()
    for n in range(3):
        door.come(f"greedy-{n}", "a")
    door.come("other-0", "b")
    assert not door.come("other-1", "b").reserve
    assert door.closed == ["greedy-0"]
    assert door.come("other-2", "b").reserve
    assert door.come("greedy-3", "a").reserve
    assert door.closed == ["greedy-0"]


def test_the_reserve_hears_the_latest_and_each_for_a_moment_at_least() -> None:
    door = Door()
    for n in range(4):
        door.come(str(n))
    first = door.come("r0")
    assert first.reserve
    assert door.places.pause() == 0
    door.now += GRACE / 4
    door.come("r1")
    assert 0 < door.places.pause() < GRACE
    door.now += GRACE
    assert door.places.pause() == 0
    assert door.come("r2").reserve
    assert door.closed == ["r0"]
    door.places.close()
    assert (len(door.places), door.closed[1:]) == (0, ["0", "1", "2", "3", "r1", "r2"])


def test_there_is_a_line_until_nobody_stands_at_any_socket() -> None:
    told: list[bool] = []
    line = Line(told.append)
    for _ in range(LINE - 1):
        line.came("IPv4")
    line.nobody("IPv4")  # a pause: who comes then is another one
    line.came("IPv4")
    assert told == [False]
    for _ in range(LINE):
        line.came("IPv4")
        line.came("IPv6")
    assert told == [False, True, True]
    line.nobody("IPv4")
    line.nobody("IPv4")
    assert told[-1] is True
    line.nobody("IPv6")
    assert told[-1] is False
