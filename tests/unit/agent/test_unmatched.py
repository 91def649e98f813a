"""Annotations that no container hears: when that is said, how often, and when no more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.agent import unmatched
from nri_numa.agent.unmatched import QUIET, UnmatchedAnnotations
from tests.beds.world import StillClock, World, pod
from tests.machines import named as machines


class Clock(StillClock):
    """A clock that is set."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> UnmatchedAnnotations:
    """One that does everything at once."""
    return UnmatchedAnnotations(World(machines.single_no_smt()).agent, clock)


TYPO = pod("db", {"numacpu.enigne": "1"})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "nri_numa.annotations"]


def quiet(watch: UnmatchedAnnotations, clock: Clock, seconds: float = QUIET) -> None:
    clock.now += seconds
    watch.look()


def test_a_name_that_does_not_come_is_said_once_and_shown(
    watch: UnmatchedAnnotations, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watch.saw([(TYPO, "engine")])
    quiet(watch, clock, QUIET - 1)
    (likely,) = watch.sentences(TYPO.uid)
    assert "which was not created so far; it has 'engine' (did you mean engine?)" in likely
    assert said(caplog) == []
    quiet(watch, clock, 1)
    quiet(watch, clock)
    assert len(said(caplog)) == 1
    (sentence,) = watch.sentences(TYPO.uid)
    assert "numacpu.enigne is ignored, because it names a container 'enigne'" in sentence
    assert "did you mean engine?" in sentence


def test_a_new_container_makes_it_wait_again_and_a_restarted_one_does_not(
    watch: UnmatchedAnnotations, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watch.saw([(TYPO, "init")])
    quiet(watch, clock, QUIET - 1)
    watch.saw([(TYPO, "engine")])
    quiet(watch, clock, QUIET - 1)
    assert said(caplog) == []
    watch.saw([(TYPO, "engine")])  # it crashed and came back
    quiet(watch, clock, 1)
    assert said(caplog)


def test_who_comes_late_takes_it_back(
    watch: UnmatchedAnnotations, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow init container is no mistake."""
    watch.saw([(TYPO, "init")])
    quiet(watch, clock)
    watch.saw([(TYPO, "enigne")])
    assert watch.sentences(TYPO.uid) == []
    quiet(watch, clock)
    watch.gone(TYPO.uid)
    assert said(caplog) == [
        "annotation for a container that the pod does not have",
        "the container that an annotation names was created",
    ]


@pytest.mark.parametrize("annotations", [{}, {"numacpu": "1"}, {"numacpu.engine": "1"}])
def test_pods_whose_names_all_come_are_no_news(
    watch: UnmatchedAnnotations,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    annotations: dict[str, str],
) -> None:
    one = pod("db", annotations)
    watch.saw([(one, "engine")])
    quiet(watch, clock)
    watch.gone(one.uid)
    assert said(caplog) == []


def test_there_is_an_end_of_pods(
    watch: UnmatchedAnnotations, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmatched, "_PODS", 3)
    pods = [pod(f"p{n}", {"numacpu.x": "1"}) for n in range(5)]
    watch.saw((one, "app") for one in pods)
    quiet(watch, clock)
    assert [bool(watch.sentences(one.uid)) for one in pods] == [False, False, True, True, True]


def test_a_misspelt_prefix_is_said_at_once_and_noticed_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    agent = World(machines.single_no_smt()).agent
    one = pod("db")
    one = replace(one, annotations={"numa.kubernets.io/policy": "restricted"})
    for _ in range(2):  # the second after a restart, with the notices of the first
        watch = UnmatchedAnnotations(agent, clock)
        watch.saw([(one, "engine")])
        assert "did you mean numa.kubernetes.io/policy?" in watch.sentences(one.uid)[0]
    assert said(caplog) == ["annotation with a misspelt prefix"] * 2
    (notice,) = agent.notices.after()
    assert (notice.what, notice.reason, notice.container) == ("ignored", "UnknownPrefix", "")
