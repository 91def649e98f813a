"""Annotations that no container hears: when that is said, how often, and when no more."""

import pytest
from msgspec.structs import replace

from nri_numa.agent import pod_observers
from nri_numa.agent.agent import Agent
from nri_numa.agent.pod_observers import SETTLED_AFTER_S, UnmatchedAnnotations
from nri_numa.model.workload import PodSandbox, PodTable
from tests.beds.agent_bed import AgentBed
from tests.beds.world import PREFIX, pod

TYPO = pod("db", {"numacpu.enigne": "1"})
WITHOUT_EFFECT = "annotation without effect"


class UnmatchedBed(AgentBed):
    """With the watch that finds annotations which no container reads."""

    def boot(self) -> Agent:
        agent = super().boot()
        self.watch = UnmatchedAnnotations(agent)
        return agent

    def said(self) -> list[str]:
        return [one for one in self.events() if "annotation" in one]

    def noted(self, of: PodSandbox = TYPO) -> list[str]:
        return [n.message for n in self.history.notices.ignored_annotations_of(of.uid)]

    def quiet(self, seconds: float = SETTLED_AFTER_S) -> None:
        self.pass_time(seconds)
        self.watch.report_settled()


@pytest.fixture
def bed() -> UnmatchedBed:
    return UnmatchedBed()


def test_a_name_that_does_not_come_is_said_and_noted_once(bed: UnmatchedBed) -> None:
    bed.watch.on_container(TYPO, "engine")
    bed.quiet(SETTLED_AFTER_S - 1)
    assert (bed.said(), bed.noted()) == ([], [])
    bed.quiet(1)
    bed.quiet()
    bed.watch = UnmatchedAnnotations(bed.agent)  # nor after a restart, with the notices of before
    bed.watch.on_container(TYPO, "engine")
    bed.quiet()
    bed.watch.on_remove_pod("", TYPO.uid)
    assert bed.said() == [WITHOUT_EFFECT]
    (sentence,) = bed.noted()
    assert "numacpu.enigne is ignored, because its pod has no container 'enigne'" in sentence
    assert "did you mean engine?" in sentence


def test_a_new_container_makes_it_wait_and_a_restarted_one_does_not(bed: UnmatchedBed) -> None:
    bed.watch.on_container(TYPO, "init")
    bed.quiet(SETTLED_AFTER_S - 1)
    bed.watch.on_container(TYPO, "engine")
    bed.quiet(SETTLED_AFTER_S - 1)
    assert bed.said() == []
    bed.watch.on_container(TYPO, "engine")  # it crashed and came back
    bed.quiet(1)
    assert bed.said()


def test_who_comes_late_takes_it_back(bed: UnmatchedBed) -> None:
    """A slow init container is no mistake; what is still missing is said again."""
    two = replace(TYPO, annotations={**TYPO.annotations, **pod("x", {"smt.b": "any"}).annotations})
    bed.watch.on_container(two, "init")
    bed.quiet()
    assert "'enigne'" in bed.noted()[0]
    bed.watch.on_container(two, "enigne")
    assert bed.noted() == []
    bed.quiet()
    assert "'enigne' is" not in bed.noted()[0]
    assert "has no container 'b'" in bed.noted()[0]
    bed.watch.on_container(two, "b")
    bed.quiet()
    bed.watch.on_remove_pod("", TYPO.uid)
    assert bed.noted() == []
    created = "container named by annotation created"
    assert bed.said() == [WITHOUT_EFFECT, WITHOUT_EFFECT, created, WITHOUT_EFFECT, created]


@pytest.mark.parametrize("annotations", [{}, {"numacpu": "1"}, {"numacpu.engine": "1"}])
def test_pods_whose_names_come_are_no_news(bed: UnmatchedBed, annotations: dict[str, str]) -> None:
    one = pod("db", annotations)
    bed.watch.on_container(one, "engine")
    bed.quiet()
    bed.watch.on_remove_pod("", one.uid)
    assert bed.said() == []


def test_there_is_an_end_of_pods(bed: UnmatchedBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_observers, "_MAX_PODS_WITH_PENDING_NAMES", 3)
    pods = [pod(f"p{n}", {"numacpu.x": "1"}) for n in range(5)]
    for one in pods:
        bed.watch.on_container(one, "app")
    bed.quiet()
    assert [bool(bed.noted(one)) for one in pods] == [False, False, True, True, True]


def test_an_old_value_of_a_running_pod_is_noticed_and_changes_nothing(bed: UnmatchedBed) -> None:
    bed.put("db", {"policy": "single-numa-node", "on-failure": "best-effort"}, 2, 1)
    before = bed.allocation("db-app")
    old = {f"{PREFIX}on-failure": "widen"}
    bed.pods = {i: replace(of, annotations=of.annotations | old) for i, of in bed.pods.items()}
    for _ in range(2):
        assert bed.restart() == ()
        bed.watch.on_synchronize(PodTable.from_pods(bed.pods.values()), list(bed.live.values()))
    assert bed.allocation("db-app") == before
    (notice,) = bed.agent.history.notices.notices_after()
    assert (notice.notice_kind, notice.reason, notice.container) == ("ignored", "OldValue", "")
    assert notice.message == (
        "annotation numa.kubernetes.io/on-failure is 'widen', expected best-effort, the new name "
        "of widen; running containers stay as they are, and the pod's next container is rejected"
    )
    assert bed.rejected("new", {"on-failure": "widen"}, 1).reason == "InvalidAnnotation"


def test_a_misspelt_prefix_is_said_at_once_and_noticed_once(bed: UnmatchedBed) -> None:
    one = pod("db")
    one = replace(one, annotations={"numa.kubernets.io/policy": "restricted"})
    for _ in range(2):  # the second after a restart, with the notices of the first
        bed.watch = UnmatchedAnnotations(bed.agent)
        bed.watch.on_container(one, "engine")
        assert "did you mean numa.kubernetes.io/policy?" in bed.noted(one)[0]
    assert bed.said() == [WITHOUT_EFFECT]
    (notice,) = bed.agent.history.notices.notices_after()
    assert (notice.notice_kind, notice.reason, notice.container) == ("ignored", "UnknownPrefix", "")
