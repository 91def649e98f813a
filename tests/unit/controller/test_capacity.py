"""What several sources say of Nodes, over time, and which patches follow from it."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller
from nri_numa.controller.capacity import (
    CapacityReport,
    CapacityRules,
    OfflineCapacityAnnotationOutput,
    UnknownNode,
)
from nri_numa.controller.service import ControllerService
from nri_numa.kube.requests import Outcome, OutcomeKind
from nri_numa.model.offline_capacity import BadCapacity, OfflineCapacity, encode_offline_capacity
from tests.beds.cluster_objects import ClusterObjects

WALL = 1_795_000_000.0
KEY, IDS = "numa.kubernetes.io/offline-capacity", "numa.kubernetes.io/numa-ids"


class Cluster:
    """Nodes of two NUMA nodes, whose annotations are looked at once a second.

    Attributes:
        writes: the time, name and text of each patch; None where the annotation is taken away.
    """

    def __init__(self, *names: str, **rules: Any) -> None:
        self.output = OfflineCapacityAnnotationOutput(
            "numa.kubernetes.io", CapacityRules(**{"validity": 60.0, **rules})
        )
        self.now, self.result = 0.0, OutcomeKind.SUCCEEDED
        self.writes: list[tuple[float, str, str | None]] = []
        for name in names or ("a",):
            self.see(name)

    def see(self, name: str = "a", ids: str = "0-1", text: str = "") -> None:
        there = {key: value for key, value in ((IDS, ids), (KEY, text)) if value}
        self.output.on_node_updated(name, {"metadata": {"annotations": there}}, self.now)

    def says(self, name: str = "a", source: str = "put", **zones: float) -> str:
        given = {int(zone[1:]): factor for zone, factor in zones.items()}
        return self.output.record_report(source, CapacityReport(name, given), self.now)

    def at(self, now: float) -> None:
        """Look, without the seconds before."""
        self.now = now
        self.output.update_due_nodes(now, WALL + now)
        while (request := self.output.next_request(now)) is not None:
            text = request.body["metadata"]["annotations"][KEY]
            self.writes.append((now, request.name, text))
            self.output.on_outcome(request, Outcome(result=self.result), now, 0.5)

    def until(self, end: float) -> None:
        while self.now < end:
            self.at(self.now)
            self.now += 1
        self.at(self.now)

    @property
    def times(self) -> list[float]:
        return [at for at, _, _ in self.writes]

    @property
    def documents(self) -> list[Any]:
        return [None if text is None else json.loads(text) for _, _, text in self.writes]

    @property
    def zones(self) -> Any:
        """What was written last."""
        return self.documents[-1] and self.documents[-1]["zones"]


def test_one_patch_for_each_node_that_has_less_and_then_quiet() -> None:
    cluster = Cluster("a", "b", "c")
    for name, zones in (("b", {"n0": 0.5, "n1": 1}), ("a", {"n1": 0}), ("c", {"n0": 1, "n1": 1})):
        assert cluster.says(name, **zones) == ""
    cluster.until(20)
    assert [name for _, name, _ in cluster.writes] == ["a", "b"]
    assert cluster.documents[1] == {
        "zones": {"0": 0.5, "1": 1.0}, "until": "2026-11-18T11:07:40Z", "source": "put"
    }  # fmt: skip
    assert cluster.output.pending_count() == 0


def test_a_repeated_value_is_written_again_when_half_of_its_time_is_over() -> None:
    cluster = Cluster()
    for second in range(0, 100, 5):
        cluster.until(second)
        cluster.says(n0=0.5)
    assert cluster.times == [0, 31, 61, 91]


def test_a_silent_source_is_full_again_when_its_value_expires() -> None:
    cluster = Cluster()
    cluster.says(n0=0.5)
    cluster.until(59)
    assert cluster.zones == {"0": 0.5}
    cluster.until(60)
    assert cluster.zones is None
    cluster.see()
    cluster.until(70)
    assert len(cluster.writes) == 2


def test_the_last_value_may_count_on_unless_it_is_withdrawn() -> None:
    cluster = Cluster(keep_last_value=True)
    assert cluster.output.effective_capacity("a", 0.0) is None
    cluster.says(n0=0.5)
    cluster.until(200)
    assert cluster.zones == {"0": 0.5}
    assert cluster.documents[-1]["until"] > "2026-11-18T11:10:00Z"
    cluster.says(n0=0.25)
    assert cluster.output.effective_capacity("a", 201.0) == OfflineCapacity({0: 0.25}, 260.0, "put")
    for name in ("a", "b"):
        cluster.output.withdraw_source("put", name)
    assert cluster.output.effective_capacity("a", 201.0) is None
    cluster.until(201)
    assert cluster.zones is None


@pytest.mark.parametrize(("silent", "zones"), [("full", None), ("last", {"0": 0.5})])
async def test_without_a_source_config_counts(tmp_path: Path, silent: str, zones: object) -> None:
    cluster, section = Cluster(), Controller(credentials_dir=str(tmp_path), on_stale_source=silent)
    cluster.output = ControllerService(AgentConfig(controller=section), ClusterObjects()).capacity
    cluster.see()
    cluster.says(n0=0.5)
    cluster.until(600)
    assert cluster.zones == zones


def test_of_several_sources_the_lowest_counts() -> None:
    cluster = Cluster()
    cluster.says(n0=0.5, n1=0.9)
    cluster.says(source="file", n0=0.8, n1=0.25)
    cluster.until(1)
    assert cluster.zones == {"0": 0.5, "1": 0.25}
    assert cluster.documents[-1]["source"] == "file,put"


def test_a_zone_that_a_source_leaves_out_is_full_again() -> None:
    cluster = Cluster()
    cluster.says(n0=0.5, n1=0.5)
    cluster.until(1)
    cluster.says(n1=0.5)
    cluster.until(3)
    assert cluster.zones == {"1": 0.5}


def test_values_are_averaged_over_time_and_arrive() -> None:
    cluster = Cluster(smoothing=10.0)
    cluster.says(n0=1)
    cluster.until(1)
    cluster.says(n0=0)
    cluster.until(11)
    assert cluster.zones["0"] == pytest.approx(math.exp(-1), abs=0.01)
    cluster.until(60)
    assert cluster.zones == {"0": 0.0}, "drained, not nearly so"


def test_flapping_every_second_moves_nobody_every_second() -> None:
    cluster = Cluster(smoothing=30.0, hysteresis=0.05, min_update_interval=10.0)
    for second in range(300):
        cluster.says(n0=0.3 if second % 2 else 0.9)
        cluster.at(second)
    assert len({str(one["zones"]) for one in cluster.documents}) <= 8
    assert 0.5 < cluster.zones["0"] < 0.7


def test_two_changes_have_a_least_time_between_them() -> None:
    cluster = Cluster(min_update_interval=10.0)
    for second in range(40):
        cluster.says(n0=0.1 if second % 2 else 0.9)
        cluster.at(second)
    assert all(b - a >= 10 for a, b in itertools.pairwise(cluster.times))


def test_a_small_difference_is_not_written_but_its_end_is() -> None:
    cluster = Cluster(hysteresis=0.05)
    cluster.says(n0=0.97)
    cluster.until(1)
    assert cluster.writes == []
    for second, (factor, written) in enumerate(((0.5, {"0": 0.5}), (0.53, {"0": 0.5}), (1, None))):
        cluster.says(n0=factor)
        cluster.until(second + 2)
        assert cluster.zones == written


def test_what_an_earlier_leader_wrote_holds_to_its_end() -> None:
    cluster = Cluster()
    cluster.see(text=encode_offline_capacity(OfflineCapacity({0: 0.5}, WALL + 20, "put")))
    cluster.until(30)
    assert cluster.writes == [(20.0, "a", None)]


def test_what_somebody_else_wrote_or_removed_is_put_right() -> None:
    cluster = Cluster()
    cluster.says(n0=0.5)
    cluster.until(1)
    for text in ("", encode_offline_capacity(OfflineCapacity({0: 1.0}, WALL + 1e9, "me"))):
        cluster.see(text=text)
        cluster.until(cluster.now + 1)
    assert [one["zones"] for one in cluster.documents] == [{"0": 0.5}] * 3


def test_an_annotation_that_nobody_can_read_goes() -> None:
    cluster = Cluster()
    cluster.see(text="nonsense")
    cluster.until(0)
    assert cluster.zones is None


def test_unknown_nodes_and_numa_nodes_are_rejected_with_what_there_is() -> None:
    cluster = Cluster()
    for name, ids in (("a", "0-1,4"), ("old", ""), ("odd", "x")):
        cluster.see(name, ids)
    with pytest.raises(UnknownNode, match="there is no Node 'z'"):
        cluster.says("z", n0=1)
    with pytest.raises(BadCapacity, match="Node a has no NUMA node 2-3; it has 0-1,4"):
        cluster.says(n2=1, n3=1)
    for name in ("old", "odd"):
        assert "does not publish its NUMA nodes" in cluster.says(name, n0=0.5)


def test_a_node_that_is_gone_is_forgotten() -> None:
    cluster = Cluster("a", "b")
    cluster.says(n0=0.5)
    cluster.output.update_due_nodes(0.0, WALL)
    cluster.output.on_node_removed("a")
    assert cluster.output.next_request(0.0) is None
    cluster.until(5)
    assert cluster.writes == []
    cluster.says("b", n0=0.5)
    cluster.result = OutcomeKind.MISSING
    cluster.until(10)
    assert len(cluster.writes) == 1
    assert cluster.output.node_names() == frozenset()


def test_failures_are_tried_again_ever_more_seldom() -> None:
    cluster = Cluster()
    cluster.says(n0=0.5)
    cluster.result = OutcomeKind.FAILED
    cluster.until(30)
    assert 4 <= len(cluster.writes) <= 8
    cluster.result = OutcomeKind.SUCCEEDED
    cluster.until(200)
    assert [one and one["zones"] for one in cluster.documents[-2:]] == [{"0": 0.5}, None]


def test_without_the_right_everybody_waits() -> None:
    cluster = Cluster("a", "b")
    for name in "ab":
        cluster.says(name, n0=0.5)
    cluster.result = OutcomeKind.FORBIDDEN
    cluster.until(30)
    assert len(cluster.writes) == 1
    assert cluster.output.next_due_at() == 60.0
