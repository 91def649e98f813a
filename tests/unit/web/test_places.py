"""Who may stay connected, and who makes room: places as plain values, on a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

from nri_numa.web.server import GRACE, Place, Places


@dataclass
class Door:
    """Places for four and a reserve of two; remembers whose connection was closed."""

    now: float = 100.0
    closed: list[str] = field(default_factory=list)
    places: Places = field(init=False)

    def __post_init__(self) -> None:
        self.places = Places(4, 2, lambda: self.now)

    def come(self, name: str, peer: str = "a") -> Place:
        place = self.places.take(peer)
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
    assert not door.places.crowded
    assert door.come("other-2", "b").reserve
    assert door.come("greedy-3", "a").reserve
    assert door.closed == ["greedy-0"]
    assert door.places.crowded


def test_the_reserve_is_for_the_latest_and_each_for_a_moment_at_least() -> None:
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
