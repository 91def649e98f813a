"""Who may stay connected, and who makes room: places as plain values, on a clock of the test's."""

from dataclasses import dataclass, field

from nri_numa.web.server import RESERVE_GRACE_S, ConnectionLimiter, ConnectionSlot


@dataclass
class Door:
    """Places for four and a reserve of two; remembers whose connection was closed."""

    now: float = 100.0
    closed: list[str] = field(default_factory=list)
    places: ConnectionLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.places = ConnectionLimiter(4, 2, lambda: self.now)

    def come(self, name: str, peer: str = "a") -> ConnectionSlot:
        place = self.places.acquire_slot(peer)
        place.close_connection = lambda: self.closed.append(name)
        return place


def test_a_client_with_more_than_its_share_makes_room_for_another() -> None:
    """And nobody does for a client that has as many already."""
    door = Door()
    for n in range(3):
        door.come(f"greedy-{n}", "a")
    door.come("other-0", "b")
    assert not door.come("other-1", "b").is_reserve
    assert door.closed == ["greedy-0"]
    assert not door.places.has_reserve_connections
    assert door.come("other-2", "b").is_reserve
    assert door.come("greedy-3", "a").is_reserve
    assert door.closed == ["greedy-0"]
    assert door.places.has_reserve_connections


def test_the_reserve_is_for_the_latest_and_each_for_a_moment_at_least() -> None:
    door = Door()
    for n in range(4):
        door.come(str(n))
    first = door.come("r0")
    assert first.is_reserve
    assert door.places.accept_pause_s() == 0
    door.now += RESERVE_GRACE_S / 4
    door.come("r1")
    assert 0 < door.places.accept_pause_s() < RESERVE_GRACE_S
    door.now += RESERVE_GRACE_S
    assert door.places.accept_pause_s() == 0
    assert door.come("r2").is_reserve
    assert door.closed == ["r0"]
    door.places.close_all_connections()
    assert (len(door.places), door.closed[1:]) == (0, ["0", "1", "2", "3", "r1", "r2"])
