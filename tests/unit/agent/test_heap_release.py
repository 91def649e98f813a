"""Memory goes back once it was needed for a moment, and not all the time."""

from __future__ import annotations

from nri_numa.agent.loop import GROWN, RELEASE_REST, HeapRelease, release_heap, resident

MIB = 1 << 20


class Process:
    """Holds some memory, and some that it does not need."""

    def __init__(self, used: int, free: int = 0) -> None:
        self.used, self.free, self.given = used, free, 0
        self.trim = HeapRelease(lambda: self.used + self.free, self.give_back)

    def give_back(self) -> None:
        self.given += 1
        self.free = 0

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.trim.release_if_grown()


def test_a_quiet_process_and_a_little_growth_are_left_alone() -> None:
    node = Process(40 * MIB)
    node.rounds(1)
    node.free = GROWN - 1
    node.rounds(100)
    assert node.given == 1


def test_growth_counts_from_the_least_that_was_seen() -> None:
    node = Process(40 * MIB, free=3 * MIB)
    node.rounds(RELEASE_REST + 1)
    node.used = 30 * MIB  # containers are gone
    node.rounds(1)
    node.free = GROWN
    node.rounds(1)
    assert node.given == 2


def test_the_real_thing_works_on_this_machine() -> None:
    before = resident()
    assert before > MIB
    release_heap()
    assert resident() > MIB
