"""The verbs filter and prioritize."""

from __future__ import annotations

import pytest

from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.fleet import Fleet
from nri_numa.scheduler.panel import Panel
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.published import Unreadable
from nri_numa.scheduler.scoring import score
from nri_numa.scheduler.verdict import Fits
from tests.unit.scheduler.objects import PREFIX, container, pod, single, table

READER = Reader(Settings())


def panel(
    *, unknown_fits: bool = False, strategy: Strategy = Strategy.SPREAD, narrow: bool = False
) -> Panel:
    """Nodes a, b and c with more and more room, one that cannot be read, and one without object."""
    fleet = Fleet()
    fleet.put("a", table(2, 2))
    fleet.put("b", table(4, 6))
    fleet.put("c", table(8, 8))
    fleet.put("odd", Unreadable("zones is 3"))
    return Panel(fleet, strategy, unknown_fits=unknown_fits, narrow=narrow)


NAMES = ["a", "b", "c", "odd", "none"]


def test_a_node_whose_agent_is_away_waits_with_ours() -> None:
    fleet = Fleet()
    fleet.put("away", table(8, 8, attributes={f"{PREFIX}/agent": "not-ready"}))
    fleet.put("there", table(8, 8, attributes={f"{PREFIX}/agent": "ready"}))
    judges = Panel(fleet, Strategy.SPREAD)
    found = judges.filter(READER.wish(single(4)), ["away", "there"])
    assert (found.fits, found.failed) == (
        ["there"], {"away": "its agent does not place containers now"},
    )  # fmt: skip
    ordinary = READER.wish(pod(container(cpu="2", memory="1Gi"), name="o"))
    assert judges.filter(ordinary, ["away", "there"]).fits == ["away", "there"]


def test_ordinary_pods_pass() -> None:
    judges = panel()
    ordinary = READER.wish(pod(container(cpu="250m", memory="1Gi")))
    assert judges.filter(ordinary, NAMES).fits == NAMES
    assert judges.prioritize(ordinary, NAMES) == []
    assert judges.judged == 0
    guaranteed = READER.wish(pod(container(cpu="2", memory="1Gi"), name="g"))
    assert judges.filter(guaranteed, NAMES).fits == NAMES


def test_unknown_nodes_may_be_allowed() -> None:
    judges = panel(unknown_fits=True)
    wish = READER.wish(single(7))
    assert judges.filter(wish, NAMES).fits == ["c", "odd", "none"]
    assert dict(judges.prioritize(wish, ["c", "odd"]))["odd"] == 0
    assert judges.why("odd") == "zones is 3"
    assert judges.why("a") == ""


def test_a_pod_that_is_wrong_fits_nowhere() -> None:
    found = panel().filter(READER.wish(pod(container(cpu="2"), name="w", policy="x")), ["a", "b"])
    assert not found.fits
    assert not found.failed
    (text,) = set(found.hopeless.values())
    assert "policy is 'x'" in text


def test_fewer_numa_nodes_score_best_then_what_is_left() -> None:
    wish = READER.wish(single(4, policy="best-effort"))
    scores = dict(panel().prioritize(wish, ["a", "b", "c"]))
    assert scores["c"] > scores["b"] > scores["a"]
    packed = dict(panel(strategy=Strategy.PACK).prioritize(wish, ["a", "b", "c"]))
    assert packed["b"] > packed["c"] > packed["a"]
    half = Fits(width=1, left=500, factor=500)
    assert score(half, Strategy.SPREAD) == 8
    assert score(Fits(width=1), Strategy.SPREAD) == 10
    assert score(Fits(width=9, wider=True, left=0, factor=0), Strategy.SPREAD) == 0


def test_a_full_memory_begins_again() -> None:
    judges = panel()
    for count in range(1, 60):
        found = judges.filter(READER.wish(single(count, name=f"p{count}")), ["c"])
        assert (found.fits == ["c"]) == (count <= 8)


def test_capacity_that_is_lent_away_scores_less() -> None:
    fleet = Fleet()
    fleet.put("whole", table(8, 8))
    fleet.put("half", table(8, 8, zone={f"{PREFIX}/capacity-factor": "0.25"}))
    scores = dict(
        Panel(fleet, Strategy.SPREAD).prioritize(READER.wish(single(4)), ["whole", "half"])
    )
    assert scores["whole"] > scores["half"]


def test_several_containers_find_no_more_than_the_whole_node_has() -> None:
    """Each of them has room where it goes, and the last CPU stays with those that share."""
    fleet = Fleet()
    panel = Panel(fleet, Strategy.SPREAD)
    asks = {"policy": "single-numa-node", "cpus": "exclusive"}
    two = Reader(Settings()).wish(
        pod(container("a", "4", "1Gi"), container("b", "4", "1Gi"), **asks)
    )
    for most, fits in (("8", ["n1"]), ("7", [])):
        fleet.put("n1", table(4, 4, attributes={f"{PREFIX}/free-exclusive-cpus": most}))
        found = panel.filter(two, ["n1"])
        assert found.fits == fits
    assert found.failed == {"n1": "needs 8 exclusive CPUs; most free: 7"}


def test_who_did_not_ask_for_long_forgets_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.scheduler.fleet._JOURNAL", 8)
    judges, wish = panel(), READER.wish(single(7))
    assert judges.filter(wish, NAMES).fits == ["c"]
    judges._fleet.put("c", table(6, 6))
    for count in range(1, 20):
        judges._fleet.put("a", table(count % 8, 2))
    assert judges._fleet.changed(1)[1] is None
    assert judges.filter(wish, NAMES).fits == []
    judges._fleet.put("c", table(8, 8))
    assert judges.filter(wish, NAMES).fits == ["c"]


def fits_of(judges: Panel, document: dict[str, object], names: list[str] = NAMES) -> list[str]:
    return judges.filter(READER.wish(document), names).fits


def test_a_narrow_filter_names_nodes_with_the_fewest_numa_nodes() -> None:
    """Whatever else the others have: b and c have more CPUs and memory left than a."""
    fleet = Fleet()
    fleet.put("a", table(5, 0, memory=(2, 0)))
    fleet.put("b", table(4, 4, 4, 4))
    fleet.put("c", table(3, 4, 3, 4))
    wide = single(5, policy="best-effort")
    names = ["b", "a", "c"]
    assert fits_of(Panel(fleet, Strategy.SPREAD), wide, names) == names
    narrow = Panel(fleet, Strategy.SPREAD, narrow=True)
    assert fits_of(narrow, wide, names) == ["a"]
    assert fits_of(narrow, wide, ["b", "c"]) == ["b", "c"]
    nominated = fits_of(narrow, wide, ["c"])
    assert nominated == ["c"], "a nominated node is asked about alone"


def test_a_narrow_filter_leaves_a_choice_and_keeps_ties() -> None:
    """But for nodes that it would leave nearly full; `pack` wants these, and only these."""
    fleet = Fleet()
    free = {"empty": 16, "too": 16, "half": 9, "full": 4}
    for name, count in free.items():
        fleet.put(name, table(count, 0))
    names = list(free)
    wanted = {Strategy.SPREAD: names[:3], Strategy.MOST_LEFT: names[:3], Strategy.PACK: names[3:]}
    for strategy, fits in wanted.items():
        judges = Panel(fleet, strategy, narrow=True)
        assert fits_of(judges, single(2), names) == fits
        scores = dict(judges.prioritize(READER.wish(single(2)), names))
        best = max(scores.values())
        slack = 0 if strategy is Strategy.PACK else 2
        assert [name for name in names if scores[name] >= best - slack] == fits
    fleet.put("full", table(1, 0))
    assert fits_of(Panel(fleet, Strategy.PACK, narrow=True), single(2), names) == ["half"]


def test_a_narrow_filter_gives_reasons_of_nodes_without_room_only() -> None:
    """A node that fits and is not named is no failed one: preemption and texts go by these."""
    found = panel(narrow=True, strategy=Strategy.PACK).filter(READER.wish(single(3)), NAMES)
    plain = panel(strategy=Strategy.PACK).filter(READER.wish(single(3)), NAMES)
    assert (found.fits, plain.fits) == (["b"], ["b", "c"])
    assert set(plain.failed) == {"a"}
    assert (found.failed, found.hopeless) == (plain.failed, plain.hopeless)


def test_a_narrow_filter_is_for_pods_that_ask_for_something() -> None:
    judges = panel(narrow=True)
    assert fits_of(judges, pod(container(cpu="250m", memory="1Gi"))) == NAMES
    fleet = judges._fleet
    fleet.put("aligns", table(8, 8, attributes={"topologyManagerPolicy": "single-numa-node"}))
    names = [*NAMES, "aligns"]
    whole = pod(container(cpu="2", memory="1Gi"), name="g")
    assert fits_of(judges, whole, names) == names, "the kubelet's policy asks, not the pod"


def test_nodes_of_which_nothing_is_known_come_last() -> None:
    judges = panel(narrow=True, unknown_fits=True)
    assert fits_of(judges, single(7)) == ["c"]
    assert fits_of(judges, single(7), ["a", "odd", "none"]) == ["odd", "none"]
