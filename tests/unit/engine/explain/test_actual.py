"""What differs, in one sentence."""

from __future__ import annotations

import pytest

from nri_numa.engine.explain.sentences import actual_text, late_text


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ((), "meant 4-7, has 0-7 since 12 s"),
        (("a/b/c",), "meant 4-7, has 0-7 since 12 s, on exclusive CPUs of a/b/c"),
        (("a", "b", "c"), "meant 4-7, has 0-7 since 12 s, on exclusive CPUs of a, b and c"),
        (tuple("abcde"), "meant 4-7, has 0-7 since 12 s, on exclusive CPUs of a, b, c and 2 more"),
    ],
)
def test_owners_are_named(owners: tuple[str, ...], expected: str) -> None:
    assert actual_text("meant 4-7, has 0-7", "12 s", owners, given_up=False) == expected


def test_a_fight_that_was_given_up_is_said() -> None:
    said = actual_text("meant 4-7, has 0-7", "12 s", (), given_up=True)
    assert said.endswith("and now left as it is, because something else rewrites it")


def test_late_and_in_time_are_told_apart() -> None:
    assert (
        late_text(0.0124)
        == "late by at most 12 ms: it started before its CPUs were decided and set"
    )
    for seconds in (0.0, -0.003):  # a clock may be set back
        assert late_text(seconds) == "in time: it had its CPUs when it started"
