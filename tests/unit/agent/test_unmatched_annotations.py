"""Annotations that no container hears: when that is said, how often, and when no more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.agent import unmatched_annotations
from nri_numa.agent.unmatched_annotations import SETTLED_AFTER_S, UnmatchedAnnotations
from tests.beds.world import StillClock, World, pod
from tests.machines import named as machines

TYPO = pod("db", {"numacpu.enigne": "1"})


class Bed:
    """A watch, the time, and the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._log = caplog
        self.now = 0.0
        self.agent = World(machines.single_no_smt()).agent
        self.start()

    def start(self) -> None:
        self.watch = UnmatchedAnnotations(self.agent, StillClock(seconds=lambda: self.now))

    def said(self) -> list[str]:
        return [r.getMessage() for r in self._log.records if r.name == "nri_numa.annotations"]

    def quiet(self, seconds: float = SETTLED_AFTER_S) -> None:
        self.now += seconds
        self.watch.report_settled()


@pytest.fixture
def bed(caplog: pytest.LogCaptureFixture) -> Bed:
    return Bed(caplog)


def test_a_name_that_does_not_come_is_said_once_and_shown(bed: Bed) -> None:
    bed.watch.on_container(TYPO, "engine")
    bed.quiet(SETTLED_AFTER_S - 1)
    (likely,) = bed.watch.problem_sentences(TYPO.uid)
    assert "which was not created so far; it has 'engine' (did you mean engine?)" in likely
    assert bed.said() == []
    bed.quiet(1)
    bed.quiet()
    assert len(bed.said()) == 1
    (sentence,) = bed.watch.problem_sentences(TYPO.uid)
    assert "numacpu.enigne is ignored, because it names a container 'enigne'" in sentence
    assert "did you mean engine?" in sentence


def test_a_new_container_makes_it_wait_again_and_a_restarted_one_does_not(bed: Bed) -> None:
    bed.watch.on_container(TYPO, "init")
    bed.quiet(SETTLED_AFTER_S - 1)
    bed.watch.on_container(TYPO, "engine")
    bed.quiet(SETTLED_AFTER_S - 1)
    assert bed.said() == []
    bed.watch.on_container(TYPO, "engine")  # it crashed and came back
    bed.quiet(1)
    assert bed.said()


def test_who_comes_late_takes_it_back(bed: Bed) -> None:
    """A slow init container is no mistake."""
    bed.watch.on_container(TYPO, "init")
    bed.quiet()
    bed.watch.on_container(TYPO, "enigne")
    assert bed.watch.problem_sentences(TYPO.uid) == []
    bed.quiet()
    bed.watch.on_remove_pod("", TYPO.uid)
    assert bed.said() == [
        "annotation for a container that the pod does not have",
        "the container that an annotation names was created",
    ]


@pytest.mark.parametrize("annotations", [{}, {"numacpu": "1"}, {"numacpu.engine": "1"}])
def test_pods_whose_names_all_come_are_no_news(bed: Bed, annotations: dict[str, str]) -> None:
    one = pod("db", annotations)
    bed.watch.on_container(one, "engine")
    bed.quiet()
    bed.watch.on_remove_pod("", one.uid)
    assert bed.said() == []


def test_there_is_an_end_of_pods(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmatched_annotations, "_MAX_PODS_WITH_PENDING_NAMES", 3)
    pods = [pod(f"p{n}", {"numacpu.x": "1"}) for n in range(5)]
    for one in pods:
        bed.watch.on_container(one, "app")
    bed.quiet()
    assert [bool(bed.watch.problem_sentences(one.uid)) for one in pods] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_misspelt_prefix_is_said_at_once_and_noticed_once(bed: Bed) -> None:
    one = pod("db")
    one = replace(one, annotations={"numa.kubernets.io/policy": "restricted"})
    for _ in range(2):  # the second after a restart, with the notices of the first
        bed.start()
        bed.watch.on_container(one, "engine")
        assert "did you mean numa.kubernetes.io/policy?" in bed.watch.problem_sentences(one.uid)[0]
    assert bed.said() == ["annotation with a misspelt prefix"] * 2
    (notice,) = bed.agent.history.notices.notices_after()
    assert (notice.notice_kind, notice.reason, notice.container) == ("ignored", "UnknownPrefix", "")
