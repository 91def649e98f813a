"""Own calls without an answer: which waits longest, and what ends the wait."""

from __future__ import annotations

from nri_numa.nri.answer_watch import AnswerWatch


def test_the_call_that_waits_longest_is_told_with_its_seconds() -> None:
    clock = 100.0
    watch = AnswerWatch(lambda: clock)
    assert watch.waiting() == ("", 0.0)
    watch.called("registration")
    clock += 5
    watch.called("second registration")
    clock += 5
    assert watch.waiting() == ("registration", 10.0)
    watch.answered("registration")
    assert watch.waiting() == ("second registration", 5.0)
    watch.answered("second registration")
    watch.answered("second registration")
    assert watch.waiting() == ("", 0.0)


def test_dialling_again_does_not_begin_the_wait_anew() -> None:
    clock = 100.0
    watch = AnswerWatch(lambda: clock)
    watch.called("registration")
    clock += 60
    watch.called("registration")
    assert watch.waiting() == ("registration", 60.0)
