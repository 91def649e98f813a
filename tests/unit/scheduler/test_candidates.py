"""The verbs filter and prioritize."""

from collections.abc import Iterator, Mapping

import pytest

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources, UnreadableTopology
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.candidates import VerdictCache, run_to_end
from nri_numa.scheduler.fit import compute_score_key
from tests.beds.objects import PREFIX, container, pod, single, table

READER = PodReader(AgentConfig())


def judging(
    rooms: Mapping[str, NodeResources | UnreadableTopology],
    strategy: Strategy = Strategy.SPREAD,
    **keys: bool,
) -> VerdictCache:
    """With these nodes."""
    nodes = ClusterState(PREFIX)
    for name, room in rooms.items():
        nodes.update_resources(name, room)
    return VerdictCache(nodes, strategy, **keys)


def index(strategy: Strategy = Strategy.SPREAD, **keys: bool) -> VerdictCache:
    """Nodes a, b and c with more and more room, one that cannot be read, and one without object."""
    rooms = {"a": table(2, 2), "b": table(4, 6), "c": table(8, 8)}
    return judging({**rooms, "odd": UnreadableTopology("zones is 3")}, strategy, **keys)


NAMES = ["a", "b", "c", "odd", "none"]


def test_a_node_whose_agent_is_away_waits_with_ours() -> None:
    said = {"away": "not-ready", "there": "ready"}
    judges = judging(
        {
            name: table(8, 8, attributes={f"{PREFIX}/agent-state": text})
            for name, text in said.items()
        }
    )
    found = judges.filter_nodes(READER.read_pod_request(single(4)), ["away", "there"])
    assert (found.feasible, found.failed) == (
        ["there"], {"away": "its agent does not place containers now"},
    )  # fmt: skip
    ordinary = READER.read_pod_request(pod(container(cpu="2", memory="1Gi"), name="o"))
    assert judges.filter_nodes(ordinary, ["away", "there"]).feasible == ["away", "there"]


def test_ordinary_pods_pass() -> None:
    judges = index()
    ordinary = READER.read_pod_request(pod(container(cpu="250m", memory="1Gi")))
    assert judges.filter_nodes(ordinary, NAMES).feasible == NAMES
    assert run_to_end(judges.prioritize_steps(ordinary, NAMES)) == []
    guaranteed = READER.read_pod_request(pod(container(cpu="2", memory="1Gi"), name="g"))
    assert judges.filter_nodes(guaranteed, NAMES).feasible == NAMES


def test_unknown_nodes_may_be_allowed() -> None:
    judges = index(unknown_fits=True)
    wish = READER.read_pod_request(single(7))
    assert judges.filter_nodes(wish, NAMES).feasible == ["c", "odd", "none"]
    assert dict(run_to_end(judges.prioritize_steps(wish, ["c", "odd"])))["odd"] == 0
    assert judges.unreadable_reason("odd") == "zones is 3"
    assert judges.unreadable_reason("a") == ""


def test_a_pod_that_is_wrong_fits_nowhere() -> None:
    found = index().filter_nodes(
        READER.read_pod_request(pod(container(cpu="2"), name="w", policy="x")), ["a", "b"]
    )
    assert not found.feasible
    assert not found.failed
    (text,) = set(found.unresolvable.values())
    assert "policy is 'x'" in text


def test_fewer_numa_nodes_score_best_then_what_is_left() -> None:
    wish = READER.read_pod_request(single(4, policy="best-effort"))
    scores = dict(run_to_end(index().prioritize_steps(wish, ["a", "b", "c"])))
    assert scores["c"] > scores["b"] > scores["a"]
    packed = dict(run_to_end(index(Strategy.PACK).prioritize_steps(wish, ["a", "b", "c"])))
    assert packed["b"] > packed["c"] > packed["a"]
    assert compute_score_key(1, False, 500, 500, Strategy.SPREAD) & 15 == 8
    assert compute_score_key(1, False, 1000, 1000, Strategy.SPREAD) & 15 == 10
    assert compute_score_key(9, True, 0, 0, Strategy.SPREAD) & 15 == 0


def test_capacity_that_is_lent_away_scores_less() -> None:
    lent = table(8, 8, zone={f"{PREFIX}/capacity-factor": "0.25"})
    judges = judging({"whole": table(8, 8), "half": lent})
    scores = dict(
        run_to_end(judges.prioritize_steps(READER.read_pod_request(single(4)), ["whole", "half"]))
    )
    assert scores["whole"] > scores["half"]


def test_several_containers_find_no_more_than_the_whole_node_has() -> None:
    """Each of them has room where it goes, and the last CPU stays with those that share."""
    asks = {"policy": "single-numa-node", "cpus": "exclusive"}
    two = PodReader(AgentConfig()).read_pod_request(
        pod(container("a", "4", "1Gi"), container("b", "4", "1Gi"), **asks)
    )
    for most, fits in (("8", ["n1"]), ("7", [])):
        room = table(4, 4, attributes={f"{PREFIX}/free-exclusive-cpus": most})
        found = judging({"n1": room}).filter_nodes(two, ["n1"])
        assert found.feasible == fits
    assert found.failed == {"n1": "needs 8 exclusive CPUs; at most 7 free for exclusive use"}


def test_a_node_that_changes_is_judged_by_what_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory of verdicts is full, and that of equal rooms."""
    monkeypatch.setattr("nri_numa.scheduler.candidates._MAX_CACHED_STALE_ROOMS", 4)
    monkeypatch.setattr("nri_numa.cluster.cluster_state._MAX_SHARED_NODES", 4)
    judges, request = index(), READER.read_pod_request(single(7))
    for _ in range(3):
        assert judges.filter_nodes(request, NAMES).feasible == ["c"]
        judges._nodes.update_resources("c", table(6, 6))
        assert judges.filter_nodes(request, NAMES).feasible == []
        for count in range(1, 20):
            judges._nodes.update_resources("a", table(count, 2))
            assert judges.filter_nodes(request, NAMES).feasible == (["a"] if count >= 7 else [])
        assert len(judges._nodes._equal) <= 4 + len(judges._nodes), "rooms that are gone go"
        assert len(judges._known[request.verdict_key]) <= 4 + len(judges._nodes)
        judges._nodes.update_resources("a", table(2, 2))
        judges._nodes.update_resources("c", table(8, 8))


def test_equal_rooms_share_one_verdict() -> None:
    """Of pods that ask alike, whatever their names are."""
    free = {"a": 4, "b": 6, "c": 4}
    judges = judging(
        {name: table(4, n, charged=[(f"uid-{name}", "main")]) for name, n in free.items()}
    )
    one, two = (
        judges.evaluate_node(READER.read_pod_request(single(3, name=name)), "a") for name in "pq"
    )
    assert one is two
    request = READER.read_pod_request(single(3, name="r"))
    assert judges.evaluate_node(request, "c") is one
    assert judges.evaluate_node(request, "b") is not one


def fits_of(
    judges: VerdictCache, document: dict[str, object], names: list[str] = NAMES
) -> list[str]:
    return judges.filter_nodes(READER.read_pod_request(document), names).feasible


def test_a_narrow_filter_names_nodes_with_the_fewest_numa_nodes() -> None:
    """Whatever else the others have: b and c have more CPUs and memory left than a."""
    rooms = {"b": table(4, 4, 4, 4), "a": table(5, 0, memory=(2, 0)), "c": table(3, 4, 3, 4)}
    wide, names = single(5, policy="best-effort"), [*rooms]
    assert fits_of(judging(rooms), wide, names) == names
    narrow = judging(rooms, filter_to_best=True)
    assert fits_of(narrow, wide, names) == ["a"]
    assert fits_of(narrow, wide, ["b", "c"]) == ["b", "c"]
    nominated = fits_of(narrow, wide, ["c"])
    assert nominated == ["c"], "a nominated node is asked about alone"


def test_a_narrow_filter_leaves_a_choice_and_keeps_ties() -> None:
    """But for nodes that it would leave nearly full; `pack` wants these, and only these."""
    free = {"empty": 16, "too": 16, "half": 9, "full": 4}
    rooms = {name: table(count, 0) for name, count in free.items()}
    names = list(free)
    wanted = {Strategy.SPREAD: names[:3], Strategy.MOST_MEMORY: names[:3], Strategy.PACK: names[3:]}
    for strategy, fits in wanted.items():
        judges = judging(rooms, strategy, filter_to_best=True)
        assert fits_of(judges, single(2), names) == fits
        scores = dict(
            run_to_end(judges.prioritize_steps(READER.read_pod_request(single(2)), names))
        )
        best = max(scores.values())
        slack = 0 if strategy is Strategy.PACK else 2
        assert [name for name in names if scores[name] >= best - slack] == fits
    rooms["full"] = table(1, 0)
    assert fits_of(judging(rooms, Strategy.PACK, filter_to_best=True), single(2), names) == ["half"]


def test_a_narrow_filter_gives_reasons_of_nodes_without_room_only() -> None:
    """A node that fits and is not named is no failed one: preemption and texts go by these."""
    found = index(Strategy.PACK, filter_to_best=True).filter_nodes(
        READER.read_pod_request(single(3)), NAMES
    )
    plain = index(Strategy.PACK).filter_nodes(READER.read_pod_request(single(3)), NAMES)
    assert (found.feasible, plain.feasible) == (["b"], ["b", "c"])
    assert set(plain.failed) == {"a"}
    assert (found.failed, found.unresolvable) == (plain.failed, plain.unresolvable)


def test_a_narrow_filter_is_for_pods_that_ask_for_something() -> None:
    judges = index(filter_to_best=True)
    assert fits_of(judges, pod(container(cpu="250m", memory="1Gi"))) == NAMES
    nodes = judges._nodes
    nodes.update_resources(
        "aligns", table(8, 8, attributes={"topologyManagerPolicy": "single-numa-node"})
    )
    names = [*NAMES, "aligns"]
    whole = pod(container(cpu="2", memory="1Gi"), name="g")
    assert fits_of(judges, whole, names) == names, "the kubelet's policy asks, not the pod"


def test_nodes_of_which_nothing_is_known_come_last() -> None:
    judges = index(filter_to_best=True, unknown_fits=True)
    assert fits_of(judges, single(7)) == ["c"]
    assert fits_of(judges, single(7), ["a", "odd", "none"]) == ["odd", "none"]


def test_a_narrow_filter_does_not_merge_for_all_nodes_of_a_large_cluster() -> None:
    """Two hundred that all differ, for a pod wider than a NUMA node: the next ones go on."""
    nodes, names = ClusterState(PREFIX), [f"n{n}" for n in range(200)]
    for number, name in enumerate(names):
        nodes.update_resources(
            name, table(20, 20, of=20, memory=(10 + number % 20, 10 + number // 20))
        )
    wide, judges = single(24, policy="restricted"), VerdictCache(nodes, Strategy.SPREAD)
    assert fits_of(judges, wide, names) == names
    narrow = VerdictCache(nodes, Strategy.SPREAD, filter_to_best=True)
    seen = [set(fits_of(narrow, {**wide, "status": {"n": n}}, names)) for n in range(8)]
    assert [len(narrow._known[key]) for key in narrow._known] == [200], "28 more each time"
    assert len(seen[0]) <= 30
    other = narrow.filter_nodes(
        READER.read_pod_request(single(25, policy="restricted", name="o")), names
    )
    assert not {*other.feasible} <= seen[0], "others are judged first for another shape"
    assert not other.failed, "what was not judged has no reason"
    for name in names[:-1]:
        nodes.update_resources(name, table(16, 7, of=20, memory=(10 + int(name[1:]) % 20, 9)))
    found = narrow.filter_nodes(
        READER.read_pod_request(single(26, policy="restricted", name="q")), names
    )
    assert found.feasible == names[-1:], "as long as none has room all are judged"
    assert len(found.failed) == 199


def test_a_narrow_filter_ends_where_a_hundred_nodes_have_room() -> None:
    """kube-scheduler scores each that is named; the next pod finds others."""
    judges = judging({f"n{n}": table(8, 8) for n in range(250)}, filter_to_best=True)
    names = list(judges._nodes.node_names)
    first, second = (fits_of(judges, single(2, name=name), names) for name in "pq")
    assert len(first) == len(second) == 100
    assert not {*first} & {*second}


def test_a_question_has_a_bound_also_where_nothing_fits() -> None:
    """And others have their turn after each node; the next question goes on from there."""
    rooms = {f"n{n}": table(*[16] * 8, memory=[20 + n % 10] * 7 + [n // 10]) for n in range(60)}
    parts = [container(f"c{n}", cpu="1", memory=f"{33 + n}Gi") for n in range(11)]
    parts.append(container("z", cpu="120", memory="1Gi"))
    for part in parts[:-1]:
        part["resources"]["requests"] = {"memory": "1Mi"}
    request = READER.read_pod_request(pod(*parts, policy="best-effort", cpus="exclusive"))
    judges, passed = judging(rooms, filter_to_best=True), []

    def asked() -> Iterator[None]:
        found = yield from judges.filter_steps(request, list(rooms), 9000)
        passed.append(found.by_sums)

    turns = [len(list(asked())) for _ in range(3)]
    assert passed == [30, 0, 0]
    assert turns[0] >= 30
