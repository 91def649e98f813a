"""What is asked of the API server: bindings, the Lease, lists and watches, the touch of a Node."""

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from nri_numa.config import AgentConfig
from nri_numa.kube.api import KubeAPI, Watch, WatchHandler, name_of
from nri_numa.kube.requests import KubeClient, Resource
from nri_numa.scheduler.metrics import WATCHED_KINDS, SchedulerMetrics
from nri_numa.scheduler.watcher import TOPOLOGIES_PATH, PodActivator
from tests.beds.cluster_objects import ClusterObjects, ServedRequest
from tests.beds.extender_bed import ExtenderBed, working
from tests.beds.objects import PREFIX, container, pod, single, topology
from tests.beds.stepped_loop import step, until


@pytest.fixture
def cluster() -> ClusterObjects:
    return ClusterObjects()


@pytest.fixture
async def bed(request: pytest.FixtureRequest) -> ExtenderBed:
    """An extender with one node of twice four CPUs."""
    bed = ExtenderBed(**getattr(request, "param", {}))
    bed.publish(topology(4, 4))
    return bed


async def test_node_and_annotation_are_one_write(bed: ExtenderBed) -> None:
    bed.schedule(single(3))
    assert await bed.bind() == ""
    assert list(bed.nodes.assumed_pods) == ["uid-p"]
    (request,) = bed.cluster.requests
    assert request.path == "/api/v1/namespaces/default/pods/p/binding"
    assert request.body["target"]["name"] == "n1"
    assert request.body["metadata"] == {
        "name": "p", "uid": "uid-p",
        "annotations": {"numa.kubernetes.io/scheduled-numa-nodes": '{"main":"0"}'},
    }  # fmt: skip


async def test_its_node_learns_of_all_containers_with_the_binding(bed: ExtenderBed) -> None:
    init = [container("prepare", cpu="2", memory="1Gi"), container("log", cpu="500m", memory="1Gi")]
    init[1]["restartPolicy"] = "Always"
    bed.schedule(pod(container(cpu="3", memory="1Gi"), init=init, policy="single-numa-node"))
    assert await bed.bind() == ""
    text = bed.bindings()[0]["metadata"]["annotations"][f"{PREFIX}/container-resources"]
    assert json.loads(text) == {
        "prepare": {"cpu": "2000m", "memory": "1073741824", "ends": True},
        "log": {"cpu": "500m", "memory": "1073741824"},
        "main": {"cpu": "3000m", "memory": "1073741824"},
    }


async def test_an_ordinary_pod_is_bound_as_it_is(bed: ExtenderBed) -> None:
    """Also one that was not filtered here: another replica was asked."""
    bed.cluster.put(Resource.PODS, pod(container(cpu="250m", memory="1Gi")))
    assert await bed.bind() == ""
    assert not bed.nodes.assumed_pods
    assert [request.method for request in bed.cluster.requests] == ["GET", "POST"]
    assert "annotations" not in bed.bindings()[0]["metadata"]


async def test_a_second_call_waits_for_the_first(bed: ExtenderBed) -> None:
    bed.schedule(single(3))
    bed.publish(topology(4, 4, name="n2"))
    problems = await asyncio.gather(bed.bind(), bed.bind(), bed.bind(node="n2"))
    assert problems == ["", "", "is on n1 already"]
    assert bed.assumed_nodes == ["n1"]
    assert len(bed.cluster.requests) == 1


async def test_what_is_held_is_looked_at_again_when_a_pod_is_bound(bed: ExtenderBed) -> None:
    bed.schedule(*(single(3, name=name) for name in ("a", "b", "c")))
    assert await bed.bind("a") == ""
    assert await bed.bind("b") == ""
    why = await bed.bind("c")
    assert why == "needs 3 exclusive CPUs on one NUMA node; at most 1 free for exclusive use"
    assert len(bed.nodes.assumed_pods) == 2
    assert len(bed.cluster.requests) == 2


async def test_a_pod_on_two_numa_nodes_takes_from_both(bed: ExtenderBed) -> None:
    bed.schedule(single(6, name="wide", policy="best-effort"))
    bed.schedule(single(3, name="more"), single(2, name="rest"))
    assert await bed.bind("wide") == ""
    why = await bed.bind("more")
    assert why == "needs 3 exclusive CPUs on one NUMA node; at most 2 free for exclusive use"
    assert await bed.bind("rest") == ""
    placed = [
        sent["metadata"]["annotations"][f"{PREFIX}/scheduled-numa-nodes"] for sent in bed.bindings()
    ]
    assert placed == ['{"main":"0-1"}', '{"main":"1"}'], "the first NUMA node is full"


async def test_a_binding_that_fails_for_sure_holds_nothing(bed: ExtenderBed) -> None:
    bed.cluster.fail(403, "not allowed")
    bed.schedule(single(3))
    assert "403: not allowed" in await bed.bind()
    assert not bed.nodes.assumed_pods


@pytest.mark.parametrize(
    ("node", "uid", "held", "bound"),
    [
        ("n1", "uid-p", True, True),  # it was written after all
        ("n2", "uid-p", False, False),  # somebody else was first
        ("", "uid-p", False, False),
        ("n1", "another", False, False),
    ],
)
async def test_after_a_conflict_the_pod_is_read(
    bed: ExtenderBed, node: str, uid: str, held: bool, bound: bool
) -> None:
    bed.schedule(single(3))
    there = single(3, node=node)
    there["metadata"]["uid"] = uid
    bed.cluster.put(Resource.PODS, there)
    bed.cluster.fail(409, "is already assigned", on="/binding")
    problem = await bed.bind()
    assert (problem == "") == bound
    assert bool(bed.nodes.assumed_pods) == held


async def test_a_pod_whose_binding_is_in_doubt_comes_back_to_its_node(bed: ExtenderBed) -> None:
    """It may still be written: its room is kept, and is not in the way of the pod itself."""
    bed.cluster.put(Resource.PODS, single(3))
    bed.cluster.fail(504, "late", on="/binding")
    bed.publish(topology(4, 4, name="n2"))
    for _ in range(2):
        assert "504" in await bed.bind()
        assert (await bed.filter(single(3), "n1", "n2"))["NodeNames"] == ["n1"]
    bed.publish(topology(1, 1))
    assert (await bed.filter(single(3), "n1", "n2"))["NodeNames"] == ["n2"]
    bed.publish(topology(4, 4))
    assert "504" in await bed.bind()
    bed.cluster.remove(Resource.PODS, "p", "default")
    assert "504" in await bed.bind()
    assert not bed.nodes.assumed_pods, "it cannot be written any more"


@pytest.mark.parametrize(("code", "held"), [(409, "n1"), (403, "n1"), (404, "")])
async def test_a_bound_pod_keeps_what_is_held_there(bed: ExtenderBed, code: int, held: str) -> None:
    """kube-scheduler calls bind again where the first call took too long, also for another node."""
    bed.publish(topology(4, 4, name="n2"))
    bed.schedule(single(3))
    assert await bed.bind() == ""
    bed.cluster.fail(code, "is assigned to node n1", on="/binding")
    assert f"{code}" in await bed.bind(node="n2")
    assert bed.assumed_nodes == ([held] if held else [])
    assert [sent["target"]["name"] for sent in bed.bindings()] == ["n1", "n2"]


def running(name: str, **keys: Any) -> dict[str, Any]:
    """A pod of three exclusive CPUs on NUMA node 0 of n1, whose container runs."""
    return single(
        3, name=name, node="n1", phase="Running", scheduled_numa_nodes='{"main":"0"}', **keys
    )


def lists_of(cluster: ClusterObjects, selector: str) -> int:
    """How often pods of a field selector were listed."""
    return sum(
        request.method == "GET" and selector in request.query.get("fieldSelector", "")
        for request in cluster.requests
    )


async def test_who_started_before_anybody_watched_is_not_overlooked(bed: ExtenderBed) -> None:
    """The kubelet says that it runs, the node's object is older than that: neither list has it."""
    bed.cluster.put(Resource.PODS, running("early"))
    bed.publish(topology(4))
    watch = bed.extender.pods
    watch.synced.clear()
    async with working(watch.run()):
        await watch.synced.wait()
    assert not bed.nodes.assumed_pods
    for name in ("a", "b"):
        bed.schedule(single(3, name=name))
        why = await bed.bind(name)
        assert why == "needs 3 exclusive CPUs on one NUMA node; at most 1 free for exclusive use"
    assert list(bed.nodes.assumed_pods) == ["uid-early"]
    # The agent counts it, and then it is gone.
    bed.publish(topology(1, charged=[("uid-early", "main")]))
    assert not bed.nodes.assumed_pods
    bed.publish(topology(4))
    assert await bed.bind("a") == ""
    assert lists_of(bed.cluster, "spec.nodeName=n1,") == 1, "once for each node"


async def test_where_it_cannot_be_told_who_runs_nothing_is_bound(bed: ExtenderBed) -> None:
    """But ordinary pods are, and the next try asks again."""
    for code, text in ((403, 'User "u" cannot list pods'), (200, "cannot read"), (0, "no answer")):
        bed.cluster.fail(code, text, on="GET /api/v1/pods ", times=1)
    bed.extender.pod_watcher.on_list(frozenset())
    bed.schedule(pod(container(cpu="250m", memory="1Gi"), name="ordinary"))
    assert await bed.bind("ordinary") == ""
    bed.schedule(single(3))
    assert "cannot list pods" in await bed.bind()
    assert await bed.bind() == "cannot read"
    assert await bed.bind() == "no answer"
    assert not bed.nodes.assumed_pods
    assert await bed.bind() == ""


@pytest.mark.parametrize("late", [0.0, 13.0, 61.0, 3600.0])
async def test_room_is_promised_once_however_late_an_object_is(late: float) -> None:
    """The pod runs, and the object of its node is from before that."""
    bed = ExtenderBed()
    bed.publish(topology(4, charged=[]))
    assert await bed.filter_and_bind(single(3, name="a")) == ""
    pending = single(3, name="a", node="n1", scheduled_numa_nodes='{"main":"0"}')
    bed.extender.pod_watcher.on_update(pending)
    bed.extender.pod_watcher.on_delete(pending)
    bed.cluster.remove(Resource.PODS, "a", "default")  # nor does a list name it
    await step(late)
    bed.extender.pod_watcher.expire_assumed_pods()
    assert "at most 1 free for exclusive use" in await bed.filter_and_bind(single(3, name="b"))
    bed.publish(topology(4, charged=[("uid-a", "main")]))  # of seven
    assert await bed.filter_and_bind(single(3, name="b")) == ""


@pytest.mark.parametrize("since", [1.0, 61.0, 3600.0])
async def test_each_node_is_read_once_after_a_list_however_long_ago(since: float) -> None:
    """Its publisher may be late by any time; where no Lease says who leads, after silence too."""
    bed = ExtenderBed()
    bed.cluster.put(Resource.PODS, running("early"))
    bed.publish(topology(4, charged=[]), topology(4, 4, name="n2", charged=[]))
    bed.extender.pod_watcher.on_list(frozenset())
    await step(since)
    for _ in range(2):
        assert "at most 1 free for exclusive use" in await bed.filter_and_bind(single(3, name="a"))
    assert len(bed.cluster.requests) == 1
    # Another kube-scheduler led for a moment, and asked the extender beside it.
    for name, pause, why in (("b", 0.9, ""), ("c", 1.2, "at most 1 free for exclusive use")):
        other = single(3, name=f"other-{name}", node="n2", scheduled_numa_nodes='{"main":"0"}')
        bed.cluster.put(Resource.PODS, other)
        await step(pause)
        assert why in await bed.filter_and_bind(single(3, name=name), "n2")
    assert [sent["metadata"]["name"] for sent in bed.bindings()] == ["b"]


LEASE = "nri-numa-scheduler"


def give_lease(cluster: ClusterObjects, holder: str) -> None:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
    cluster.put(
        Resource.LEASES, {"metadata": {"name": LEASE, "namespace": "default"}, "spec": spec}
    )


async def test_who_begins_to_lead_lists_again_before_it_answers() -> None:
    """What it knew as a standby is older than the Lease, be it by a second or an hour."""
    bed = ExtenderBed(synced=False, lease_name=LEASE)
    bed.cluster.put(Resource.TOPOLOGIES, topology(4, charged=[]))
    give_lease(bed.cluster, "other")
    bed.cluster.hold("^WATCH")  # none brings anything
    async with working(bed.extender.run()):
        await bed.extender.pods.synced.wait()
        why = ""
        while "another replica leads: other" not in why:
            await step(0.25)
            why = await bed.filter_and_bind(single(3, name="a"))
        # The leader binds a pod and is gone; no watch of this one has heard of either.
        early = single(3, name="early", node="n1", scheduled_numa_nodes='{"main":"0"}')
        bed.cluster.put(Resource.PODS, early)
        give_lease(bed.cluster, "")
        while "leads" in why or "still being read" in why:
            await step(0.25)
            why = await bed.filter_and_bind(single(3, name="a"))
    assert "at most 1 free for exclusive use" in why


async def test_bindings_end_before_the_lease_is_given_back() -> None:
    """Who leads next lists what is written, and nothing may be written after that."""
    bed = ExtenderBed(synced=False, lease_name=LEASE)
    bed.cluster.put(Resource.TOPOLOGIES, topology(4, charged=[]))
    gate = bed.cluster.hold("/binding")
    running = asyncio.create_task(bed.extender.run())
    await until(lambda: not bed.extender.unready_reason())
    asking = asyncio.create_task(bed.filter_and_bind(single(3, name="a")))
    await until(bed.bindings)
    asking.cancel()
    running.cancel()
    await step(1)
    assert bed.cluster.get(Resource.LEASES, LEASE, "default")["spec"]["holderIdentity"]
    gate.set()
    await asyncio.wait([running])
    assert bed.cluster.get(Resource.PODS, "a", "default")["spec"]["nodeName"] == "n1"
    assert bed.cluster.get(Resource.LEASES, LEASE, "default")["spec"]["holderIdentity"] == ""


async def test_without_an_api_server_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    bed = ExtenderBed(api=KubeAPI("/nonexistent", "test"))
    bed.schedule(single(3))
    assert "no credentials" in await bed.bind()


@pytest.mark.parametrize("bed", [{"lease_name": LEASE}], indirect=True)
async def test_who_does_not_lead_binds_nothing(bed: ExtenderBed) -> None:
    assert "another replica leads" in await bed.filter_and_bind(single(3))
    assert "another replica leads" in bed.extender.unready_reason()
    assert not bed.cluster.requests


# --- the Lease --------------------------------------------------------------------------------


@pytest.mark.parametrize("bed", [{"lease_name": LEASE}], indirect=True)
async def test_a_lease_that_may_not_be_read_is_why_nothing_is_bound(bed: ExtenderBed) -> None:
    """The sentence names the rule that is missing."""
    bed.cluster.fail(403, "leases is forbidden")
    assert bed.extender.election is not None
    await bed.extender.election.run_step()
    why = bed.extender.unready_reason()
    assert "the Lease cannot be used" in why
    assert "lacks apiGroups ['coordination.k8s.io'], resources [leases], verbs [get]" in why


# --- lists and watches ------------------------------------------------------------------------


class Recorder(WatchHandler):
    """What a watch says."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, Any]] = []

    def on_update(self, document: Mapping[str, Any]) -> None:
        self.changes.append(("put", name_of(document)))

    def on_delete(self, document: Mapping[str, Any]) -> None:
        self.changes.append(("removed", name_of(document)))

    def on_every_deleted_key(self, key: str) -> None:
        self.changes.append(("gone", key))

    def on_list(self, keys: frozenset[str]) -> None:
        self.changes.append(("all", sorted(keys)))


def put_topologies(cluster: ClusterObjects, *names: str) -> None:
    cluster.put(Resource.TOPOLOGIES, *(topology(1, name=name) for name in names))


def asked_for(cluster: ClusterObjects, method: str, key: str) -> list[str]:
    """A parameter of each list (GET) or watch (WATCH)."""
    return [one.query.get(key, "") for one in cluster.requests if one.method == method]


async def test_pages_changes_and_a_second_list_after_410(
    cluster: ClusterObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nri_numa.kube.requests.LIST_PAGE_SIZE", 1)
    put_topologies(cluster, "a", "b")
    listed = str(cluster.version)
    objects = Recorder()
    async with working(Watch(cluster, TOPOLOGIES_PATH, objects).run()):
        await until(lambda: len(objects.changes) == 3)
        put_topologies(cluster, "c")
        cluster.remove(Resource.TOPOLOGIES, "a")
        seen = str(cluster.version)
        await until(lambda: len(objects.changes) == 6)
        cluster.end_watches()
        for name in ("b", "c"):
            cluster.remove(Resource.TOPOLOGIES, name)
        cluster.compact()
        await until(lambda: ("all", []) in objects.changes)
    assert objects.changes == [
        ("put", "a"), ("put", "b"), ("all", ["a", "b"]), ("put", "c"), ("removed", "a"),
        ("gone", "a"), ("gone", "b"), ("gone", "c"), ("all", []),
    ]  # fmt: skip
    assert asked_for(cluster, "WATCH", "resourceVersion")[:2] == [listed, seen]


async def test_a_list_goes_on_at_the_page_that_failed(
    cluster: ClusterObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server's pages are not thrown away; a place that it does not know any more is."""
    monkeypatch.setattr("nri_numa.kube.requests.LIST_PAGE_SIZE", 1)
    put_topologies(cluster, "a", "b", "d")
    cluster.fail(500, "the request timed out", on="continue=1", times=1)
    cluster.fail(410, "the continue token is too old", on="continue=2", times=1)

    def forget(request: ServedRequest) -> None:
        if "continue=2" in request.text:
            for name in ("a", "b", "d"):
                cluster.remove(Resource.TOPOLOGIES, name)
            put_topologies(cluster, "c")

    cluster.on_request = forget
    objects = Recorder()
    follower = Watch(cluster, TOPOLOGIES_PATH, objects, jitter=lambda: 0.0)
    async with working(follower.run()):
        await until(lambda: asked_for(cluster, "WATCH", "resourceVersion"))
        bookmark = cluster.bookmark()
        await step()
        cluster.end_watches()
        await until(lambda: len(asked_for(cluster, "WATCH", "resourceVersion")) == 2)
    assert objects.changes == [
        ("put", "a"), ("put", "b"), ("put", "c"), ("gone", "a"), ("gone", "b"), ("all", ["c"]),
    ]  # fmt: skip
    assert asked_for(cluster, "GET", "continue") == ["", "1", "1", "2", ""]
    assert asked_for(cluster, "WATCH", "allowWatchBookmarks") == ["true", "true"]
    versions = asked_for(cluster, "WATCH", "resourceVersion")
    assert versions[1] == bookmark, "it goes on from the bookmark"


@pytest.mark.parametrize("code", [410, 429])
async def test_who_may_not_watch_is_told_once(
    cluster: ClusterObjects, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Also where the list before it is answered each time; not before the server wants it again."""
    times: list[float] = []
    cluster.fail(code, on="^WATCH", times=1, retry_after=2)
    cluster.fail(code, on="^WATCH", times=2)
    loop = asyncio.get_running_loop()
    cluster.on_request = lambda request: request.method == "WATCH" and times.append(loop.time())
    follower = Watch(cluster, TOPOLOGIES_PATH, Recorder(), jitter=lambda: 0.0)
    with caplog.at_level("INFO"):
        async with working(follower.run()):
            await until(lambda: len(times) == 4)
            await step()
    assert times[1] - times[0] >= 2
    assert times[3] - times[1] > 1.4, "longer each time"
    said = [
        one for one in ("watch failed", "watch restored") for _ in range(caplog.text.count(one))
    ]
    assert said == ["watch failed", "watch restored"]
    assert follower.failing is None


async def test_an_old_view_of_the_cluster_is_said() -> None:
    """The API server is away, or stands still; bindings go on as far as it does."""
    bed = ExtenderBed()
    extender = bed.extender
    bed.cluster.fail(503, "not now")
    async with working(extender.topologies.run(), extender._probe_api_server()):
        await step()
        assert extender.topologies.failing is not None
        assert extender.health_problem() == ""
        await step(15)
        assert (
            "noderesourcetopologies: 503: not now; what is known is 15 s old"
            in extender.health_problem()
        )
        assert extender.unready_reason() == ""
        known = 'nri_numa_scheduler_cache_age_seconds{kind="noderesourcetopologies"} 15.0'
        assert known in bed.metrics()
    extender.topologies.failing = None
    assert extender.health_problem() == "the API server has not answered for 15 s"


@pytest.mark.parametrize("kind", WATCHED_KINDS)
async def test_how_late_an_object_is_read_is_measured(bed: ExtenderBed, kind: str) -> None:
    """By the API server's clock; a binding is written to a condition."""
    bed.cluster.wall = lambda: 1_800_000_000.0
    late = datetime.fromtimestamp(bed.cluster.wall() - 66, UTC).strftime("%FT%TZ")
    long_ago = {"time": "2026-11-01T00:00:00Z"}
    watch, resource, document = bed.extender.topologies, Resource.TOPOLOGIES, topology(4)
    removed = topology(1, name="gone")
    if kind == "pods":
        watch, resource = bed.extender.pods, Resource.PODS
        document, removed = (single(3, name=name, node="n1") for name in ("p", "gone"))
        document["status"]["conditions"] = [{"lastTransitionTime": late}]
    document["metadata"]["managedFields"] = [{"time": late} if kind != "pods" else {}, long_ago]
    removed["metadata"]["managedFields"] = [long_ago]
    bed.cluster.put(resource, removed)
    async with working(watch.run()):
        await until(lambda: asked_for(bed.cluster, "WATCH", "resourceVersion"))
        bed.cluster.remove(resource, "gone", removed["metadata"].get("namespace", ""))
        bed.cluster.put(resource, document)
        await step()
    bucket = f'nri_numa_scheduler_event_age_seconds_bucket{{kind="{kind}",le="%s"}} %s'
    text = bed.metrics()
    assert bucket % ("60.0", "0.0") in text
    assert bucket % ("300.0", "1.0") in text
    assert bucket % ("+Inf", "1.0") in text


async def test_a_watch_that_ends_is_resumed_soon(cluster: ClusterObjects) -> None:
    """Each goes on in a quarter of a second, so that a dozen need no minutes."""
    objects = Recorder()
    async with working(Watch(cluster, TOPOLOGIES_PATH, objects, jitter=lambda: 0.0).run()):
        for number in range(13):
            put_topologies(cluster, f"n{number}")
            await until(lambda number=number: ("put", f"n{number}") in objects.changes)
            cluster.end_watches()
    assert asyncio.get_running_loop().time() < 13 * 0.35
    assert len(asked_for(cluster, "GET", "limit")) == 1


async def test_a_kind_that_is_not_installed_has_no_objects(cluster: ClusterObjects) -> None:
    """Ordinary pods are not kept waiting for it."""
    cluster.fail(404, "could not find the resource")
    follower = Watch(cluster, TOPOLOGIES_PATH, Recorder())
    async with working(follower.run()):
        await follower.synced.wait()
        assert "404" in follower.problem


async def test_rights_that_are_missing_are_named_and_questions_wait(bed: ExtenderBed) -> None:
    """Ordinary pods do not: nothing has to be known for them."""
    text = 'noderesourcetopologies.topology.node.k8s.io is forbidden: User "u" cannot list'
    bed.cluster.fail(403, text)
    bed.extender.topologies.synced.clear()
    async with working(bed.extender.topologies.run()):
        await until(lambda: bed.extender.topologies.problem)
    assert text in (await bed.filter(single(2), "n1"))["Error"]
    assert "noderesourcetopologies: 403" in bed.extender.unready_reason()
    ordinary = pod(container(cpu="250m", memory="1Gi"))
    assert (await bed.filter(ordinary, "n1"))["NodeNames"] == ["n1"]


# --- waking -----------------------------------------------------------------------------------


def activator(api: KubeClient, clock: Callable[[], float]) -> PodActivator:
    wakeups = SchedulerMetrics("test").pod_wakeups
    return PodActivator(api, AgentConfig(), wakeups, clock=clock, wall=lambda: 1.5)


async def test_room_wakes_who_was_rejected_and_nobody_else(cluster: ClusterObjects) -> None:
    now = 0.0
    made = activator(cluster, lambda: now)
    made.on_free_increased("n0")  # no pod waits
    made.record_unschedulable("a")
    made.drop_pod("a")
    made.on_free_increased("n0")
    made.record_unschedulable("b")
    now = 601.0
    made.on_free_increased("n0")  # it was tried again since, or does not exist any more
    made.wake_pods()  # no node is known
    assert not made.is_wake_due
    made.record_unschedulable("c")
    # A pod that fits on another node than those of the sample; not for ever.
    assert [made.should_wake_again("c", 2.5) for _ in range(5)] == [True, True, True, False, False]
    made.on_free_increased("n1")
    made.on_free_increased("gone")  # its Node is, its object not yet
    assert made.should_wake_again("c", 2.5)
    cluster.put(Resource.NODES, {"metadata": {"name": "n1"}})
    cluster.fail(429, "slow down", on="nodes/n1", times=1)
    async with working(made.run(lambda: True)):
        await until(lambda: len(cluster.requests) == 3)
        await step()
    assert [one.path for one in cluster.requests] == [
        "/api/v1/nodes/gone", "/api/v1/nodes/n1", "/api/v1/nodes/n1",
    ]  # fmt: skip
    request = cluster.requests[2]
    assert (request.method, request.form) == ("PATCH", "application/merge-patch+json")
    assert request.body == {
        "metadata": {"annotations": {"numa.kubernetes.io/wake-counter": "1500"}}
    }


async def test_who_takes_over_wakes_the_pods_that_were_rejected_before(bed: ExtenderBed) -> None:
    """They are in the scheduler's queue, and whoever refused them is gone."""
    bed.cluster.put(Resource.NODES, {"metadata": {"name": "n1"}})
    extender = bed.extender
    async with working(extender.run_ticks(), extender.activator.run(extender.is_leader)):
        await until(lambda: "pod_wakeups_total 1.0" in bed.metrics())
    assert [request.path for request in bed.cluster.requests] == ["/api/v1/nodes/n1"]
