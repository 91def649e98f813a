"""Pods that their node refuses for ever, and which of them may go to another one."""

from typing import Any

import pytest

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.config import AgentConfig
from nri_numa.config.sections import EvictionSection
from nri_numa.controller.evictor import EvictionBudget
from nri_numa.controller.stuck_pods import (
    DEVICE_REST_S,
    MAX_RUNNING_PODS,
    STUCK_POD_CHECK_INTERVAL_S,
    SUSPECT_TIMEOUT_S,
    TARGET_SEARCH_STEP_WORK,
    DeviceTries,
    StuckPodEvictor,
    plugin_rejection,
)
from nri_numa.kube.requests import Outcome, OutcomeKind, Resource
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import MAX_NODE_WORK, Verdict, WorkBudget, evaluate_fit
from tests.beds.controller_bed import EvictorBed
from tests.beds.evicted_pods import SAID
from tests.beds.evicted_pods import partly_stuck_pod as partly
from tests.beds.evicted_pods import rejection_event as event
from tests.beds.evicted_pods import stuck_pod as pod
from tests.beds.objects import PREFIX, container, single, topology


def node(name: str, *taints: tuple[str, str, str], cordoned: bool = False, **labels: str) -> Any:
    keys = ("key", "value", "effect")
    listed = [dict(zip(keys, one, strict=True)) for one in taints]
    spec = {"taints": listed, "unschedulable": cordoned}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


class StuckPodBed(EvictorBed):
    """The output among nodes that are known by what they publish."""

    def __init__(
        self, nodes: dict[str, tuple[int, ...]], *others: Any, most: int = 3, **rules: Any
    ) -> None:
        super().__init__()
        self.nodes, config = ClusterState(PREFIX), AgentConfig()
        settled = EvictionSection(max_per_minute=60.0, max_per_workload_per_hour=most, **rules)
        self.output = StuckPodEvictor(
            PREFIX,
            EvictionBudget(settled, 0.0),
            60.0,
            self.nodes,
            VerdictCache(self.nodes, config.strategy),
            PodReader(config),
            0.0,
        )
        for name, free in nodes.items():
            self.publish(name, *free)
            self.node(node(name))
        for one in others:
            self.node(one)

    def node(self, document: Any) -> None:
        self.nodes.update_node(document["metadata"]["name"], document)

    def publish(self, name: str, *free: int, agent: str = "ready", **keys: Any) -> None:
        attributes = {f"{PREFIX}/agent-state": agent}
        told = topology(*free, of=8, name=name, attributes=attributes, **keys)
        self.nodes.update_topology(name, told, self.now)

    def see(self, *pods: dict[str, Any]) -> None:
        """These are there, and the watch brings them."""
        self.put_pods(*pods)
        for one in pods:
            self.output.on_pod(one, self.now)

    def run(self, seconds: int, *seen: dict[str, Any]) -> list[str]:
        self.see(*seen)
        return super().run(seconds)


ROOM = {"full": (2, 2), "free": (8, 8)}


def test_who_is_rejected_for_a_while_goes_where_there_is_room() -> None:
    bed = StuckPodBed(ROOM)
    bed.see(pod("web"))
    assert bed.output.pending_count() == 1
    bed.run(200)
    assert bed.evicted == [("web", 60.0)]
    eviction, event = bed.requests
    assert eviction.body["deleteOptions"] == {
        "preconditions": {"uid": "uid-web", "resourceVersion": "7"}
    }
    assert event.body["reason"] == "NUMAPodMoved"
    assert event.body["note"] == (
        "evicted: node full has rejected it for 60 s, and free has room; "
        "InsufficientCPUs: needs 4 exclusive CPUs; at most 2 free for exclusive use"
    )
    assert bed.output.pending_count() == 0


def test_the_watch_may_tell_of_its_end_before_the_answer_comes() -> None:
    bed = StuckPodBed(ROOM, most=1)
    bed.see(pod("web", workload="web"))
    request = bed.output.next_request(60.0)
    assert request is not None
    bed.output.on_pod_removed("uid-web")
    bed.output.on_outcome(request, Outcome(result=OutcomeKind.SUCCEEDED), 60.0, 0.5)
    bed.now = 61.0
    bed.run(1)
    (event,) = bed.requests
    assert event.body["regarding"]["uid"] == "uid-web"
    bed.run(200, pod("next", workload="web"))
    assert bed.evicted == [], "it counts for its workload"


def test_its_time_is_counted_over_changes_of_its_status() -> None:
    bed = StuckPodBed(ROOM)
    bed.run(40, pod("web"))
    # It was resized in place, to more than any node has, and back.
    bed.run(40, pod("web", version="8", containers=single(9)["spec"]["containers"]))
    assert bed.evicted == []
    bed.run(40, pod("web", version="9"))
    assert bed.evicted == [("web", 80.0)]
    assert bed.requests[0].body["deleteOptions"]["preconditions"]["resourceVersion"] == "9"


def test_who_starts_meanwhile_stays() -> None:
    bed = StuckPodBed(ROOM)
    one, other, third = pod("one"), pod("other"), pod("third")
    bed.run(30, one, other, third)
    for uid in ("uid-one", "uid-third", "uid-nobody"):
        bed.output.on_pod_removed(uid)  # it is Pending no more
    other["status"]["containerStatuses"][0]["state"] = {"running": {}}
    bed.run(100, other)
    assert bed.requests == []


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
    bed = StuckPodBed(nodes)
    bed.run(200, pod("web"))
    assert bed.requests == [], why


def test_it_goes_when_another_node_gets_room() -> None:
    bed = StuckPodBed({"full": (2, 2), "free": (3, 3)})
    bed.run(200, pod("web"))
    bed.publish("free", 8, 3)
    bed.run(20)
    ((name, at),) = bed.evicted
    assert (name, at <= 200 + STUCK_POD_CHECK_INTERVAL_S) == ("web", True)


@pytest.mark.parametrize(
    ("closed", "keys"),
    [
        (node("free", ("a", "b", "NoSchedule")), {}),
        (node("free", cordoned=True), {}),
        (node("free", disk="hdd"), {"nodeSelector": {"disk": "ssd"}}),
    ],
)
def test_a_node_that_it_may_not_go_to_does_not_count(closed: Any, keys: dict[str, Any]) -> None:
    bed = StuckPodBed(ROOM, closed)
    bed.run(200, pod("web", **keys))
    assert bed.requests == []
    bed.node(node("free", disk="ssd"))
    assert bed.run(20) == ["web"]
    bed.nodes.remove_node("free")
    assert bed.run(100, pod("next")) == ["web"]


def test_a_look_for_another_node_has_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pods that are alike: the second goes on from what the first one found out."""
    seen: list[int] = []

    def counted(
        room: NodeResources, request: PodRequest, strategy: Strategy, work: WorkBudget
    ) -> Verdict:
        before = work.done
        found = evaluate_fit(room, request, strategy, work)
        seen[-1] += work.done - before
        return found

    monkeypatch.setattr("nri_numa.scheduler.candidates.evaluate_fit", counted)
    bed = StuckPodBed({"full": (2,) * 8})
    for n in range(256):
        bed.publish(f"n{n:03}", *(3 + n // 4**i % 4 for i in range(4)), 1, 1, 1, 1)
        bed.node(node(f"n{n:03}"))
    wide = {f"{PREFIX}/policy": "best-effort", f"{PREFIX}/on-failure": "reject"}
    parts = [container(f"c{n}", cpu="15", memory="1Gi") for n in range(2)]
    for name in ("one", "two"):
        bed.see(pod(name, annotations=wide, containers=parts))
    now = bed.now = 60.0
    while (bed.output.next_due_at() <= now) and len(seen) < 99:
        seen.append(0)
        assert bed.output.next_request(now) is None
    assert max(seen) <= TARGET_SEARCH_STEP_WORK + MAX_NODE_WORK
    assert len(seen) >= 5
    assert sum(seen) < 257 * 30, "the second one's verdicts are remembered"
    bed.publish("n255", *(8,) * 8)
    bed.run(60)
    assert [name for name, _ in bed.evicted] == ["one", "two"]


def test_a_node_whose_object_nobody_renews_is_no_way_out() -> None:
    bed = StuckPodBed(ROOM)
    told = topology(8, 8, of=8, name="free")
    told["metadata"]["annotations"] = {
        f"{PREFIX}/renewed-at": "1",
        f"{PREFIX}/validity-seconds": "9",
    }
    bed.nodes.update_topology("free", told, 0.0)
    assert bed.nodes.expire_topologies(9.0) == ["free"]
    bed.run(200, pod("web"))
    assert bed.requests == []
    bed.publish("free", 8, 8)
    assert bed.run(20) == ["web"]
    bed.publish("full", 2, 2, agent="not-ready")  # nothing says that it has no room
    assert bed.run(100, pod("next")) == ["web"]
    bed.nodes.remove_topology("full")
    assert bed.run(100, pod("next")) == ["web"]


def test_one_vacancy_moves_one_pod() -> None:
    """The others would be refused by the extender, or by the node, again."""
    bed = StuckPodBed({"full": (2, 2), "free": (4, 0)})
    assert bed.run(115, pod("a"), pod("b"), pod("c")) == ["a"]
    assert bed.run(20) == ["a", "b"], "no successor came for a minute"
    bed.publish("free", 0, 0)  # its successor is there
    assert bed.run(200) == ["a", "b"]


def test_one_workload_goes_so_often_and_then_stays() -> None:
    """The successors are refused again: what nobody here sees keeps them from the other node."""
    bed = StuckPodBed(ROOM, most=2)
    for number in range(6):
        bed.see(pod(f"web-{number}", workload="web"))
        bed.run(200)
    assert bed.names == ["web-0", "web-1"]
    assert bed.run(3600) == ["web-0", "web-1", "web-2", "web-3"]


def test_what_is_remembered_of_evicted_pods_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.controller.evictor.MAX_EVICTION_RECORDS", 3)
    monkeypatch.setattr("nri_numa.controller.stuck_pods.MAX_STUCK_PODS", 2)
    monkeypatch.setattr("nri_numa.controller.evictor.WORKLOAD_WINDOW_S", 300.0)
    bed = StuckPodBed(ROOM)
    bed.see(pod("a"), pod("b"), pod("c"))
    assert bed.output.pending_count() == 2
    bed.output.pods.clear()
    for number in range(9):
        bed.run(100, pod(f"web-{number}"))
    assert len(bed.names) == 9
    assert (len(bed.output._evicted), len(bed.output._budget._evictions) <= 5) == (3, True)


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
    bed = StuckPodBed(ROOM)
    bed.run(200, pod("web", **keys))
    assert (bed.requests, bed.output.pending_count()) == ([], 0)


def test_a_pod_that_changed_meanwhile_is_looked_at_again() -> None:
    bed = StuckPodBed(ROOM)
    bed.answers["web"] = OutcomeKind.EXISTS  # 409: another resourceVersion
    bed.run(150, pod("web"))
    assert 2 <= len(bed.requests) <= 8
    bed.answers.clear()
    assert bed.run(100) == ["web"]


def test_a_dry_run_asks_once_and_says_so() -> None:
    bed = StuckPodBed(ROOM, dry_run=True)
    bed.run(100, pod("web"))
    bed.run(300, pod("web", version="8"))
    eviction, event = bed.requests
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
def test_a_status_of_something_else_is_no_rejection(status: dict[str, Any]) -> None:
    assert plugin_rejection({**pod("web"), "status": status}) is None


def test_init_containers_are_rejected_too() -> None:
    found = pod("web")
    waits = found["status"].pop("containerStatuses")
    found["status"]["initContainerStatuses"] = [{"name": "first"}, *waits]
    assert (plugin_rejection(found) or ())[0] == "InsufficientCPUs"


# --- one container runs, and another is refused ---------------------------------------------------


def test_a_pod_of_which_one_container_runs_goes_as_well() -> None:
    bed = StuckPodBed(ROOM)
    bed.run(30, partly("web"))
    bed.output.on_pod_removed("uid-web")  # it is Pending no more
    bed.run(100, partly("web", version="8"))
    assert bed.evicted == [("web", 60.0)]
    eviction, event = bed.requests
    assert eviction.body["deleteOptions"]["preconditions"]["resourceVersion"] == "8"
    assert "node full has rejected it for 60 s, and free" in event.body["note"]


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
    bed = StuckPodBed(nodes)
    bed.run(200, partly("web", phase=phase))
    assert bed.requests == [], why
    bed.publish("full", 2, 2)
    bed.publish("free", 8, 8)
    assert bed.run(20) == ["web"]


def test_containers_that_belong_together_are_not_asked_for_twice() -> None:
    """Its node counts the one that runs: it need not have room for both."""
    together = {f"{PREFIX}/scope": "pod"}
    bed = StuckPodBed({"full": (4, 0), "free": (8, 8)})
    bed.run(200, partly("web", annotations=together))
    assert bed.requests == []
    bed.publish("full", 3, 0)
    assert bed.run(20) == ["web"]


def test_from_when_on_one_of_its_containers_runs_its_time_begins_again() -> None:
    """Another container waits, or for another reason."""
    bed = StuckPodBed(ROOM)
    bed.run(40, pod("web"))
    bed.run(100, partly("web"))
    assert bed.evicted == [("web", 100.0)]


# --- pods in the phase Running, found by Events ---------------------------------------------------


class SuspectBed(StuckPodBed):
    """The same, where no other node has room, so that nothing but looks is asked for."""

    def __init__(self) -> None:
        super().__init__({"full": (2, 2)})

    def at(self, now: float) -> int:
        before, self.now = len(self.requests), now
        self.run(1)
        return len(self.requests) - before


def test_a_pod_that_an_event_names_is_read_until_it_runs_as_a_whole() -> None:
    bed = SuspectBed()
    bed.put_pods(partly("web"))
    assert bed.at(0.0) == 0
    bed.output.on_rejection_event(event("web"), 1.0)
    assert bed.at(1.0) == 1
    assert bed.output.pending_count() == 1
    assert bed.at(STUCK_POD_CHECK_INTERVAL_S) == 0
    assert bed.at(1.0 + STUCK_POD_CHECK_INTERVAL_S) == 1
    assert bed.at(10 * SUSPECT_TIMEOUT_S) == 1, "as long as it waits"
    there = bed.cluster.get(Resource.PODS, "web", "shop")
    there["status"]["containerStatuses"][0]["state"] = {"running": {}}
    assert bed.at(11 * SUSPECT_TIMEOUT_S) == 1
    assert bed.output.pending_count() == 0
    assert bed.at(12 * SUSPECT_TIMEOUT_S) == 0, "nothing was told of it since"


def test_a_status_may_come_after_the_event() -> None:
    bed = SuspectBed()
    bed.put_pods(pod("web"))  # Pending: it comes by the watch
    bed.output.on_rejection_event(event("web"), 0.0)
    bed.at(0.0)
    assert bed.output.pending_count() == 0
    bed.put_pods(partly("web"))
    bed.output.on_rejection_event(event("web"), 1.0)
    bed.at(STUCK_POD_CHECK_INTERVAL_S)
    assert bed.output.pending_count() == 1
    bed.cluster.remove(Resource.PODS, "web", "shop")
    bed.at(2 * STUCK_POD_CHECK_INTERVAL_S)
    assert bed.output.pending_count() == 0
    assert bed.at(3 * STUCK_POD_CHECK_INTERVAL_S) == 0


def test_another_pod_of_that_name_is_another_pod() -> None:
    bed = SuspectBed()
    bed.put_pods(partly("web"))
    bed.output.on_rejection_event(event("web"), 0.0)
    bed.at(0.0)
    following = partly("web")
    following["metadata"]["uid"] = "uid-next"
    bed.put_pods(following)
    bed.at(STUCK_POD_CHECK_INTERVAL_S)
    assert list(bed.output.pods) == ["uid-next"]


def test_events_of_other_things_are_passed_over() -> None:
    bed = SuspectBed()
    for one in (
        {}, {"involvedObject": 3}, event("web", "Error: ErrImagePull"),
        event("web", SAID.format("another")),
    ):  # fmt: skip
        bed.output.on_rejection_event(one, 0.0)
    assert bed.at(0.0) == 0


def test_no_more_than_so_many_are_read_and_a_failed_look_comes_again() -> None:
    bed = SuspectBed()
    bed.answers["pods"] = OutcomeKind.FAILED
    for number in range(MAX_RUNNING_PODS + 10):
        bed.output.on_rejection_event(event(f"web-{number}"), 0.0)
    assert bed.at(0.0) == MAX_RUNNING_PODS
    bed.answers.clear()
    bed.put_pods(partly("web-0"))
    assert bed.at(STUCK_POD_CHECK_INTERVAL_S) == MAX_RUNNING_PODS
    assert bed.output.pending_count() == 1
    assert bed.at(2 * STUCK_POD_CHECK_INTERVAL_S) == 1


# --- devices that cannot be aligned ---------------------------------------------------------------

GPU, NIC = "example.com/gpu", "example.com/nic"
GIVEN = {GPU: ((0, 1), (1, 1)), NIC: ((1, 1), (0, 1))}
"""One of each on both NUMA nodes; the kubelet gave the GPU of 0 and the NIC of 1."""
DEVICES_SAID = (
    "{reason}: pod shop/{name}, container main: the kubelet gave gpu-0 (NUMA node 0) and nic-1 "
    "(NUMA node 1)"
)


def device_pod(
    name: str = "train",
    *,
    reason: str = "DeviceAffinityError",
    wants: Any = (GPU, NIC),
    **more: Any,
) -> dict[str, Any]:
    made = pod(name, said=DEVICES_SAID.format(reason=reason, name=name), **more)
    for amounts in made["spec"]["containers"][0]["resources"].values():
        amounts |= dict.fromkeys(wants, "1")
    return made


def device_bed(devices: Any = GIVEN, free: tuple[int, ...] = (8, 8), most: int = 60) -> StuckPodBed:
    bed = StuckPodBed({}, node("full"), most=most)
    bed.publish("full", *free, devices=devices)
    return bed


def test_a_pod_with_misaligned_devices_goes_although_its_node_has_room() -> None:
    """For its successor the kubelet chooses anew; the devices that it holds count as free."""
    bed = device_bed()
    bed.run(200, device_pod())
    assert bed.evicted == [("train", 60.0)]
    event = bed.requests[1].body
    assert event["reason"] == "NUMADevicesReleased"
    assert event["note"] == (
        "evicted: the kubelet chose misaligned devices on full, and chooses anew for its successor "
        "(try 1 of 3); full has room; DeviceAffinityError: the kubelet gave gpu-0 (NUMA node 0) "
        "and nic-1 (NUMA node 1)"
    )


NEVER_ALIGNED = {GPU: ((0, 1), (0, 0)), NIC: ((0, 0), (0, 1))}


@pytest.mark.parametrize(
    ("devices", "free", "made", "why"),
    [
        (GIVEN, (0, 0), device_pod(), "no CPUs are free beside any choice"),
        ({GPU: GIVEN[GPU]}, (8, 8), device_pod(), "NICs are not counted, so nothing is known"),
        ({}, (8, 8), device_pod(), "devices are not counted at all"),
        (NEVER_ALIGNED, (8, 8), device_pod(), "there is no aligned choice, whatever is free"),
        (GIVEN, (8, 8), device_pod(owners=[]), "nobody makes another"),
        (GIVEN, (8, 8), device_pod(wants=()), "it requests no devices"),
    ],
)
def test_a_pod_keeps_its_devices_where_another_choice_is_no_better(
    devices: Any, free: tuple[int, ...], made: dict[str, Any], why: str
) -> None:
    bed = device_bed(devices, free)
    bed.run(300, made)
    assert bed.requests == [], why


def test_the_reason_counts_and_not_the_words() -> None:
    bed = device_bed()
    bed.run(300, device_pod(reason="TopologyAffinityError"))
    bed.publish("full", 8, 8, devices={})
    bed.run(300)
    assert bed.requests == [], "its node has room"
    bed.publish("full", 8, 8, devices=GIVEN)
    assert bed.run(300, device_pod()) == ["train"]


def test_its_node_must_take_it_again_and_be_ready() -> None:
    bed = device_bed()
    bed.node(node("full", cordoned=True))
    bed.run(200, device_pod())
    bed.node(node("full"))
    bed.publish("full", 8, 8, devices=GIVEN, agent="not-ready")
    bed.run(200)
    bed.nodes.remove_node("full")
    bed.publish("full", 8, 8, devices=GIVEN)
    bed.run(200)
    assert bed.requests == []
    bed.node(node("full"))
    assert bed.run(20) == ["train"]


def test_another_node_with_aligned_devices_will_do() -> None:
    bed = device_bed(NEVER_ALIGNED)
    bed.node(node("free"))
    bed.publish("free", 8, 8, devices={GPU: ((1, 1), (0, 0)), NIC: ((1, 1), (0, 0))})
    assert bed.run(200, device_pod()) == ["train"]
    assert "; free has room; " in bed.requests[1].body["note"]


@pytest.mark.parametrize(("most", "minutes"), [(60, 27), (3, 50)])
def test_after_three_tries_the_workload_rests_and_an_event_says_so(most: int, minutes: int) -> None:
    bed = device_bed(most=most)
    for n in range(5):
        bed.run(200, device_pod(f"train-{n}", workload="train"))
    assert bed.names == ["train-0", "train-1", "train-2"]
    assert bed.output.resting_count() == 2
    rests = [b for b in bed.bodies(Resource.EVENTS) if b["reason"] == "NUMADevicesMisaligned"]
    assert [b["regarding"]["name"] for b in rests] == ["train-3", "train-4"]
    assert rests[0]["note"] == (
        f"not evicted for {minutes} min: its devices are misaligned after all evictions that its "
        "workload may have; the kubelet aligns devices with topologyManagerPolicy: best-effort"
    )
    bed.run(200, device_pod("other"))
    assert bed.names[3:] == ["other"], "another workload has its own tries"
    bed.run(3600)
    assert bed.names[4:] == ["train-3", "train-4"]
    assert bed.output.resting_count() == 0


def test_a_pod_that_waits_for_other_reasons_meanwhile_does_not_rest() -> None:
    bed = device_bed()
    for n in range(4):
        bed.run(200, device_pod(f"train-{n}", workload="train"))
    assert bed.output.resting_count() == 1
    bed.publish("full", 8, 8)
    bed.see(device_pod("train-3", workload="train", reason="TopologyAffinityError", version="9"))
    assert bed.output.resting_count() == 0
    bed.run(4000)
    assert len(bed.names) == 3


def test_tries_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.controller.stuck_pods.MAX_EVICTION_RECORDS", 2)
    tries = DeviceTries()
    for n in range(4):
        tries.record_try(f"w{n}", n * DEVICE_REST_S)
    assert [tries.count_tries(f"w{n}", 3 * DEVICE_REST_S) for n in range(4)] == [0, 0, 0, 1]
