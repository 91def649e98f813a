"""Pods that their node refuses for ever, and who of them is sent to another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from nri_numa.cluster.requests import Outcome, Request, Resource, Result
from nri_numa.controller.evictions import Ledger, Mover
from nri_numa.controller.seats import Seat, seat
from nri_numa.controller.stuck import LOOK, StuckOutput, StuckRules, refusal
from nri_numa.engine.values.settings import Settings
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.published import read

PREFIX = "numa.kubernetes.io"
SAID = "InsufficientCPUs: pod shop/{0}, container main: needs 4 exclusive CPUs; most free: 2"


def zones(node: str, *free: int) -> dict[str, Any]:
    """What a node publishes that has so many free exclusive CPUs on each NUMA node, of eight."""
    return {
        "metadata": {"name": node},
        "zones": [
            {
                "name": f"node-{i}",
                "type": "Node",
                "resources": [
                    {"name": "cpu", "capacity": "8", "allocatable": "8", "available": str(n)}
                ],
            }
            for i, n in enumerate(free)
        ],
    }


def pod(name: str, *, cpus: int = 4, on: str = "full", **keys: Any) -> dict[str, Any]:
    """A pod that `on` refuses, of a workload of its own where nothing else is said."""
    said = keys.pop("said", SAID.format(name))
    waiting = {"reason": "CreateContainerError", "message": f"failed to create: {said}"}
    owner = {"kind": "ReplicaSet", "name": "rs", "uid": keys.pop("workload", f"rs-{name}")}
    annotations = {f"{PREFIX}/policy": "single-numa-node", f"{PREFIX}/cpus": "exclusive"}
    amounts = {"cpu": str(cpus)}
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "resourceVersion": keys.pop("version", "7"),
            "annotations": {**annotations, **keys.pop("annotations", {})},
            "ownerReferences": keys.pop("owners", [{**owner, "controller": True}]),
        },
        "spec": {
            "nodeName": on,
            "containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}],
            **keys,
        },
        "status": {
            "phase": "Pending",
            "containerStatuses": [{"name": "main", "state": {"waiting": waiting}}],
        },
    }


def partly(name: str, *, helper: int = 2, phase: str = "Running", **keys: Any) -> dict[str, Any]:
    """The same, of which a container `helper` runs that has so many exclusive CPUs.

    In the phase Running, unless the other one never ran.
    """
    made = pod(name, **keys)
    amounts = {"cpu": str(helper)}
    made["spec"]["containers"].append(
        {"name": "helper", "resources": {"requests": amounts, "limits": amounts}}
    )
    made["status"]["containerStatuses"].append({"name": "helper", "state": {"running": {}}})
    made["status"]["phase"] = phase
    return made


class Cluster:
    """Nodes by what they publish, and the output that is asked once a second.

    Attributes:
        answers: result of an eviction by the pod's name; done where none is told.
        evicted: names and times.
        requests: all that were made.
    """

    def __init__(
        self,
        nodes: dict[str, tuple[int, ...]],
        *,
        most: int = 3,
        seats: Iterable[Seat] = (),
        **rules: Any,
    ) -> None:
        self.fleet, self.now = Nodes(), 0.0
        self.seats = {one: seat(one, {}, (), unschedulable=False) for one in nodes}
        self.seats |= {one.name: one for one in seats}
        for name, free in nodes.items():
            self.publish(name, *free)
        mover = Mover(
            output="stuck", prefix=PREFIX, reason="NUMAPodMoved", end="moved",
            dry_run=rules.get("dry_run", False),
        )  # fmt: skip
        settings = Settings()
        self.output = StuckOutput(
            mover,
            StuckRules(**{"after": 60.0, "per_minute": 60.0, **rules}),
            Ledger(most, 3600.0),
            self.fleet,
            CandidateIndex(self.fleet, settings.strategy),
            PodReader(settings).request,
            self.seats,
            0.0,
        )
        self.answers: dict[str, Result] = {}
        self.evicted: list[tuple[str, float]] = []
        self.requests: list[Request] = []

    def publish(self, node: str, *free: int) -> None:
        self.fleet.put(node, read(zones(node, *free), PREFIX))

    def see(self, *pods: dict[str, Any]) -> None:
        for one in pods:
            self.output.pod(one, self.now)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.output.tick(self.now, 1_795_000_000.0 + self.now)
            while (request := self.output.due(self.now)) is not None:
                assert self.output.next_due() <= self.now
                self.requests.append(request)
                result = Result.DONE
                if request.resource is Resource.EVICTIONS:
                    result = self.answers.get(request.name, Result.DONE)
                    if result is Result.DONE:
                        self.evicted.append((request.name, self.now))
                self.output.done(request, Outcome(result=result), self.now, 0.5)
            self.now += 1

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.evicted]


ROOM = {"full": (2, 2), "free": (8, 8)}


def test_who_is_refused_for_a_while_goes_where_there_is_room() -> None:
    cluster = Cluster(ROOM)
    cluster.see(pod("web"))
    assert cluster.output.waiting() == 1
    cluster.run(200)
    assert cluster.evicted == [("web", 60.0)]
    eviction, event = cluster.requests
    assert eviction.body["deleteOptions"] == {
        "preconditions": {"uid": "uid-web", "resourceVersion": "7"}
    }
    assert event.body["reason"] == "NUMAPodMoved"
    assert event.body["note"] == (
        "evicted: node full has refused it for 60 s, and free has room; "
        "InsufficientCPUs: needs 4 exclusive CPUs; most free: 2"
    )
    assert cluster.output.waiting() == 0


def test_the_watch_may_tell_of_its_end_before_the_answer_comes() -> None:
    cluster = Cluster(ROOM, most=1)
    cluster.see(pod("web", workload="web"))
    request = cluster.output.due(60.0)
    assert request is not None
    cluster.output.pod_gone("uid-web")
    cluster.output.done(request, Outcome(result=Result.DONE), 60.0, 0.5)
    cluster.now = 61.0
    cluster.run(1)
    (event,) = cluster.requests
    assert event.body["regarding"]["uid"] == "uid-web"
    cluster.see(pod("next", workload="web"))
    cluster.run(200)
    assert cluster.evicted == [], "it counts for its workload"


def test_its_time_is_counted_over_changes_of_its_status() -> None:
    cluster = Cluster(ROOM)
    cluster.see(pod("web"))
    cluster.run(40)
    cluster.see(pod("web", version="9"))
    cluster.run(40)
    assert cluster.evicted == [("web", 60.0)]
    assert cluster.requests[0].body["deleteOptions"]["preconditions"]["resourceVersion"] == "9"


def test_who_starts_meanwhile_stays() -> None:
    cluster = Cluster(ROOM)
    one, other, third = pod("one"), pod("other"), pod("third")
    cluster.see(one, other, third)
    cluster.run(30)
    cluster.output.pod_gone("uid-one")  # it is Pending no more
    other["status"]["containerStatuses"][0]["state"] = {"running": {}}
    cluster.see(other)
    cluster.output.pods_listed(frozenset({"uid-one", "uid-other"}))
    cluster.run(100)
    assert cluster.requests == []


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ({"full": (2, 2)}, "there is no other node"),
        ({"full": (2, 2), "free": (3, 3)}, "the other one is too full"),
        ({"full": (4, 0), "free": (8, 8)}, "its own has room now: the kubelet asks again"),
        ({"free": (8, 8)}, "nothing is known of its own: a successor could come back"),
    ],
)
def test_nobody_goes_in_vain(nodes: dict[str, tuple[int, ...]], why: str) -> None:
    cluster = Cluster(nodes)
    cluster.see(pod("web"))
    cluster.run(200)
    assert cluster.requests == [], why


def test_it_goes_when_another_node_gets_room() -> None:
    cluster = Cluster({"full": (2, 2), "free": (3, 3)})
    cluster.see(pod("web"))
    cluster.run(200)
    cluster.publish("free", 8, 3)
    cluster.run(20)
    ((name, at),) = cluster.evicted
    assert (name, at <= 200 + LOOK) == ("web", True)


@pytest.mark.parametrize(
    ("closed", "keys"),
    [
        (seat("free", {}, [("a", "b", "NoSchedule")], unschedulable=False), {}),
        (seat("free", {}, (), unschedulable=True), {}),
        (seat("free", {"disk": "hdd"}, (), unschedulable=False), {"nodeSelector": {"disk": "ssd"}}),
    ],
)
def test_a_node_that_it_may_not_go_to_does_not_count(closed: Seat, keys: dict[str, Any]) -> None:
    cluster = Cluster(ROOM, seats=[closed])
    cluster.see(pod("web", **keys))
    cluster.run(200)
    assert cluster.requests == []
    cluster.seats["free"] = seat("free", {"disk": "ssd"}, (), unschedulable=False)
    cluster.run(20)
    assert cluster.names == ["web"]


def test_one_vacancy_moves_one_pod() -> None:
    """The others would be refused by the extender, or by the node, again."""
    cluster = Cluster({"full": (2, 2), "free": (4, 0)})
    cluster.see(pod("a"), pod("b"), pod("c"))
    cluster.run(110)
    assert cluster.names == ["a"]
    cluster.publish("free", 0, 0)  # its successor is there
    cluster.run(200)
    assert cluster.names == ["a"]


def test_one_workload_goes_so_often_and_then_stays() -> None:
    """The successors are refused again: what nobody here sees keeps them from the other node."""
    cluster = Cluster(ROOM, most=2)
    for number in range(6):
        cluster.see(pod(f"web-{number}", workload="web"))
        cluster.run(200)
    assert cluster.names == ["web-0", "web-1"]
    cluster.run(3600)
    assert cluster.names == ["web-0", "web-1", "web-2", "web-3"]


def test_no_faster_than_configured() -> None:
    cluster = Cluster(ROOM, per_minute=2.0, most=10)
    cluster.see(*(pod(f"p{i}", cpus=1, said=SAID.format(f"p{i}")) for i in range(2)))
    cluster.publish("full", 0, 0)
    cluster.run(200)
    times = [at for _, at in cluster.evicted]
    assert len(times) == 2
    assert times[1] - times[0] >= 30


@pytest.mark.parametrize(
    "keys",
    [
        {"owners": []},
        {"owners": [{"kind": "DaemonSet", "uid": "d", "controller": True}]},
        {"owners": [{"kind": "Node", "uid": "n", "controller": True}]},
        {"annotations": {"kubernetes.io/config.mirror": "x"}},
        {"annotations": {f"{PREFIX}/policy": "nonsense"}},
        {"annotations": {f"{PREFIX}/numacpu": "3", f"{PREFIX}/policy": "none"}},
        {"said": "cannot pull the image"},
        {"said": SAID.format("another")},
    ],
)
def test_who_would_not_be_better_off_is_left_alone(keys: dict[str, Any]) -> None:
    """No successor elsewhere, a wish that no node grants, or somebody else's error."""
    cluster = Cluster(ROOM)
    cluster.see(pod("web", **keys))
    cluster.run(200)
    assert (cluster.requests, cluster.output.waiting()) == ([], 0)


def test_a_pod_that_changed_meanwhile_is_looked_at_again() -> None:
    cluster = Cluster(ROOM)
    cluster.answers["web"] = Result.EXISTS  # 409: another resourceVersion
    cluster.see(pod("web"))
    cluster.run(150)
    assert 2 <= len(cluster.requests) <= 8
    cluster.answers.clear()
    cluster.run(100)
    assert cluster.names == ["web"]


def test_without_the_right_nothing_is_asked_for_a_minute() -> None:
    cluster = Cluster(ROOM)
    cluster.answers["web"] = Result.FORBIDDEN
    cluster.see(pod("web"))
    cluster.run(110)
    assert len(cluster.requests) == 1


def test_a_dry_run_asks_once_and_says_so() -> None:
    cluster = Cluster(ROOM, dry_run=True)
    cluster.see(pod("web"))
    cluster.run(100)
    cluster.see(pod("web", version="8"))
    cluster.run(300)
    eviction, event = cluster.requests
    assert eviction.body["deleteOptions"]["dryRun"] == ["All"]
    assert event.body["note"].startswith("would be evicted (dry run)")


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"containerStatuses": None},
        {"containerStatuses": [{"name": "main"}]},
        {"containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "ImagePull"}}}]},
        {
            "containerStatuses": [
                {"name": "main", "state": {"waiting": {"reason": "CreateContainerError"}}}
            ]
        },
    ],
)
def test_a_status_of_something_else_is_no_refusal(status: dict[str, Any]) -> None:
    assert refusal({**pod("web"), "status": status}) == ""


def test_init_containers_are_refused_too() -> None:
    found = pod("web")
    found["status"]["initContainerStatuses"] = found["status"].pop("containerStatuses")
    assert refusal(found).startswith("InsufficientCPUs: needs 4")


# --- one container runs, and another is refused ---------------------------------------------------


def test_a_pod_of_which_one_container_runs_goes_as_well() -> None:
    cluster = Cluster(ROOM)
    cluster.see(partly("web"))
    cluster.run(30)
    cluster.output.pod_gone("uid-web")  # it is Pending no more
    cluster.output.pods_listed(frozenset())
    cluster.see(partly("web", version="8"))
    cluster.run(100)
    assert cluster.evicted == [("web", 60.0)]
    eviction, event = cluster.requests
    assert eviction.body["deleteOptions"]["preconditions"]["resourceVersion"] == "8"
    assert "node full has refused it for 60 s, and free" in event.body["note"]


@pytest.mark.parametrize("phase", ["Pending", "Running"])
@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ({"full": (4, 0), "free": (8, 8)}, "its own has room for what is missing"),
        ({"full": (2, 2), "free": (4, 1)}, "the other one has no room for what runs besides"),
    ],
)
def test_its_node_is_asked_for_what_is_missing_and_another_one_for_all(
    nodes: dict[str, tuple[int, ...]], why: str, phase: str
) -> None:
    cluster = Cluster(nodes)
    cluster.see(partly("web", phase=phase))
    cluster.run(200)
    assert cluster.requests == [], why
    cluster.publish("full", 2, 2)
    cluster.publish("free", 8, 8)
    cluster.run(20)
    assert cluster.names == ["web"]


def test_containers_that_belong_together_are_not_asked_for_twice() -> None:
    """Its node counts the one that runs: it need not have room for both."""
    together = {f"{PREFIX}/scope": "pod"}
    cluster = Cluster({"full": (4, 0), "free": (8, 8)})
    cluster.see(partly("web", annotations=together))
    cluster.run(200)
    assert cluster.requests == []
    cluster.publish("full", 3, 0)
    cluster.run(20)
    assert cluster.names == ["web"]


def test_who_runs_as_a_whole_after_all_stays() -> None:
    cluster = Cluster(ROOM)
    cluster.see(partly("web"))
    cluster.run(30)
    cluster.output.whole("uid-web")
    cluster.output.whole("uid-nobody")
    cluster.run(100)
    assert (cluster.requests, cluster.output.waiting()) == ([], 0)


def test_from_when_on_one_of_its_containers_runs_its_time_begins_again() -> None:
    """Another container waits, or for another reason."""
    cluster = Cluster(ROOM)
    cluster.see(pod("web"))
    cluster.run(40)
    cluster.see(partly("web"))
    cluster.run(100)
    assert cluster.evicted == [("web", 100.0)]
