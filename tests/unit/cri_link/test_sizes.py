"""What of a container's size somebody else changed."""

from __future__ import annotations

from nri_numa.cri.client import CRIResources
from nri_numa.cri_link.connection import Change, Size, Sizes, size_of
from nri_numa.nri.wire.pb import nri_pb2 as pb


def resources(shares: int = 0, quota: int = 0, limit: int = 0) -> pb.LinuxResources:
    message = pb.LinuxResources()
    message.cpu.cpus = "0-3"
    message.cpu.shares.value, message.cpu.quota.value = shares, quota
    message.cpu.period.value, message.memory.limit.value = 100_000, limit
    return message


def change(of: Change | None) -> tuple[Size, Size]:
    assert of is not None
    return size_of(of.asked), size_of(of.before)


def test_what_differs_was_asked_for_and_what_was_before_is_told() -> None:
    sizes = Sizes()
    sizes.seen("a", resources(1024, 100_000, 5))
    assert sizes.changed("a", resources(1024, 100_000, 5)) is None
    found = sizes.changed("a", resources(2048, 200_000, 5))
    assert change(found) == (Size(2048, 200_000, 100_000), Size(1024, 100_000, 100_000, 5))
    assert found is not None
    assert found.before.cpu.cpus == "0-3"
    assert change(sizes.changed("a", resources(2048, 200_000, 7)))[0] == Size(limit=7)
    assert sizes.changed("a", resources(2048, 200_000, 7)) is None
    assert sizes.changes("a") == 2


def test_a_quota_of_ours_is_no_change_and_what_is_asked_over_it_is() -> None:
    sizes = Sizes()
    sizes.seen("a", resources(1024, 100_000))
    sizes.sent("a", CRIResources(cpus="0"))
    sizes.sent("a", CRIResources(cpu_quota=-1))
    assert sizes.changed("a", resources(1024, -1)) is None
    assert change(sizes.changed("a", resources(2048, 200_000)))[0].quota == 200_000
    # Given back to what it was: ours as well, when a container loses CPUs of its own.
    sizes.sent("a", CRIResources(cpu_quota=100_000))
    assert sizes.changed("a", resources(2048, 100_000)) is None


def test_a_lifted_quota_that_is_there_again_was_asked_for_even_if_nobody_saw_it_lifted() -> None:
    """So that it is lifted again at once, and not by the next search for drift."""
    sizes = Sizes()
    sizes.seen("a", resources(1024, 100_000, 5))
    sizes.sent("a", CRIResources(cpu_quota=-1))
    asked, before = change(sizes.changed("a", resources(1024, 100_000, 7)))
    assert asked == Size(0, 100_000, 100_000, 7)
    assert before == Size(1024, 100_000, 100_000, 5)
    # Where it stays, it is not asked for again.
    assert change(sizes.changed("a", resources(1024, 100_000, 9)))[0] == Size(limit=9)


def test_nobody_can_take_a_size_away() -> None:
    sizes = Sizes()
    sizes.seen("a", resources(1024, 100_000, 5))
    assert sizes.changed("a", resources(0, -1, -1)) is None
    assert sizes.changes("a") == 0


def test_a_container_that_was_not_seen_is_only_taken_down() -> None:
    sizes = Sizes()
    assert sizes.changed("a", resources(1024)) is None
    assert sizes.changed("a", resources(2048)) is not None
    sizes.forget("a")
    assert sizes.changed("a", resources(4096)) is None
    assert sizes.changes("a") == 0


def test_everybody_has_a_turn_and_who_is_gone_has_none() -> None:
    sizes = Sizes()
    assert sizes.turn([]) == []
    assert sizes.turn("abcdefghij") == list("abcdefgh")
    assert sizes.turn("abcdefghijk") == list("ij")
    assert sizes.turn("abcdefghijk") == list("abcdefgh")
    assert sizes.turn("ab") == []
    assert sizes.turn("ab") == ["a", "b"]
