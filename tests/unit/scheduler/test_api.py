"""What is asked of the API server: bindings, the Lease, lists and watches, the touch of a Node."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Scheduling
from nri_numa.kube.api import KubeAPI, Watch, WatchHandler, name_of
from nri_numa.scheduler.extender import WATCHED_KINDS, Extender, SchedulerMetrics
from nri_numa.scheduler.protocol import BindingArgs
from nri_numa.scheduler.watcher import TOPOLOGIES_PATH, PodActivator
from tests.beds.fake_api_server import Asked, FakeAPIServer, LeaseServer, Said, fake, status
from tests.beds.objects import PREFIX, container, pod, single, topology

DONE = Said(201, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAPIServer]:
    """Its answer is `DONE` unless a test says something else."""
    with fake(tmp_path, monkeypatch, lambda asked: DONE) as made:
        yield made


@pytest.fixture
async def api(server: FakeAPIServer) -> AsyncIterator[KubeAPI]:
    made = KubeAPI(str(server.directory), "test")
    yield made
    await made.close()


@pytest.fixture
async def made(server: FakeAPIServer, request: pytest.FixtureRequest) -> AsyncIterator[Extender]:
    """An extender with one node of twice four CPUs."""
    # Not the 4 s of a real one: what is shown here is not how busy the machine is.
    section = {"bind_timeout": "60s", **getattr(request, "param", {})}
    scheduling = Scheduling(credentials=str(server.directory), **section)
    made = Extender(AgentConfig(scheduler=scheduling))
    made.topologies.synced.set()
    made.pods.synced.set()
    made.node_watcher.on_update(topology(4, 4))
    yield made
    await made.api.close()
    await made.lease_api.close()


@asynccontextmanager
async def working(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While it works, with time enough on a busy machine."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        async with asyncio.timeout(180):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reads(document: dict[str, Any], otherwise: Said = DONE) -> Callable[[Asked], Said]:
    """An API server that has this pod, and says something else to whoever writes."""
    return lambda asked: Said(200, document) if asked.method == "GET" else otherwise


def binding(name: str = "p", node: str = "n1") -> BindingArgs:
    return BindingArgs("default", name, f"uid-{name}", node)


async def test_node_and_annotation_are_one_write(made: Extender, server: FakeAPIServer) -> None:
    made.reader.read_pod_request(single(3))
    assert await made.binder.bind(binding()) == ""
    assert list(made.nodes.assumed_pods) == ["uid-p"]
    (asked,) = server.asked
    assert asked.method == "POST"
    assert asked.path.startswith("/api/v1/namespaces/default/pods/p/binding")
    assert asked.body["target"]["name"] == "n1"
    assert asked.body["metadata"] == {
        "name": "p", "uid": "uid-p", "annotations": {"numa.kubernetes.io/placed": '{"main":"0"}'},
    }  # fmt: skip


async def test_its_node_learns_of_all_containers_with_the_binding(
    made: Extender, server: FakeAPIServer
) -> None:
    init = [container("prepare", cpu="2", memory="1Gi"), container("log", cpu="500m", memory="1Gi")]
    init[1]["restartPolicy"] = "Always"
    main = container(cpu="3", memory="1Gi")
    made.reader.read_pod_request(pod(main, init=init, policy="single-numa-node"))
    assert await made.binder.bind(binding()) == ""
    text = server.asked[0].body["metadata"]["annotations"][f"{PREFIX}/containers"]
    assert json.loads(text) == {
        "prepare": {"cpu": "2000m", "memory": "1073741824", "ends": True},
        "log": {"cpu": "500m", "memory": "1073741824"},
        "main": {"cpu": "3000m", "memory": "1073741824"},
    }


async def test_an_ordinary_pod_is_bound_as_it_is(made: Extender, server: FakeAPIServer) -> None:
    """Also one that was not filtered here: another replica was asked."""
    server.answer = reads(pod(container(cpu="250m", memory="1Gi")))
    assert await made.binder.bind(binding()) == ""
    assert not made.nodes.assumed_pods
    assert [asked.method for asked in server.asked] == ["GET", "POST"]
    assert "annotations" not in server.asked[1].body["metadata"]


async def test_a_second_call_waits_for_the_first(made: Extender, server: FakeAPIServer) -> None:
    made.reader.read_pod_request(single(3))
    made.node_watcher.on_update(topology(4, 4, name="n2"))
    found = await asyncio.gather(
        made.binder.bind(binding()),
        made.binder.bind(binding()),
        made.binder.bind(binding(node="n2")),
    )
    assert found == ["", "", "is on n1 already"]
    assert [hold.node for hold in made.nodes.assumed_pods.values()] == ["n1"]
    assert len(server.asked) == 1


async def test_what_is_held_is_looked_at_again_when_a_pod_is_bound(
    made: Extender, server: FakeAPIServer
) -> None:
    for name in ("a", "b", "c"):
        made.reader.read_pod_request(single(3, name=name))
    assert await made.binder.bind(binding("a")) == ""
    assert await made.binder.bind(binding("b")) == ""
    why = await made.binder.bind(binding("c"))
    assert why == "needs 3 exclusive CPUs on one NUMA node; most free for exclusive use: 1"
    assert len(made.nodes.assumed_pods) == 2
    assert len(server.asked) == 2


async def test_a_pod_on_two_numa_nodes_takes_from_both(
    made: Extender, server: FakeAPIServer
) -> None:
    made.reader.read_pod_request(single(6, name="wide", policy="best-effort"))
    for name, cpus in (("more", 3), ("rest", 2)):
        made.reader.read_pod_request(single(cpus, name=name))
    assert await made.binder.bind(binding("wide")) == ""
    why = await made.binder.bind(binding("more"))
    assert why == "needs 3 exclusive CPUs on one NUMA node; most free for exclusive use: 2"
    assert await made.binder.bind(binding("rest")) == ""
    placed = [asked.body["metadata"]["annotations"][f"{PREFIX}/placed"] for asked in server.asked]
    assert placed == ['{"main":"0-1"}', '{"main":"1"}'], "the first NUMA node is full"


async def test_a_binding_that_fails_for_sure_holds_nothing(
    made: Extender, server: FakeAPIServer
) -> None:
    server.answer = lambda asked: status(403, "not allowed")
    made.reader.read_pod_request(single(3))
    assert "403: not allowed" in await made.binder.bind(binding())
    assert not made.nodes.assumed_pods


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
    made: Extender, server: FakeAPIServer, node: str, uid: str, held: bool, bound: bool
) -> None:
    found = single(3, node=node)
    found["metadata"]["uid"] = uid
    server.answer = reads(found, status(409, "is already assigned"))
    made.reader.read_pod_request(single(3))
    problem = await made.binder.bind(binding())
    assert (problem == "") == bound
    assert bool(made.nodes.assumed_pods) == held


async def test_a_pod_whose_binding_is_in_doubt_comes_back_to_its_node(
    made: Extender, server: FakeAPIServer
) -> None:
    """It may still be written: its room is kept, and is not in the way of the pod itself."""
    server.answer = reads(single(3), status(504, "late"))
    made.node_watcher.on_update(topology(4, 4, name="n2"))
    question = json.dumps({"Pod": single(3), "NodeNames": ["n1", "n2"]}).encode()
    for _ in range(2):
        assert "504" in await made.binder.bind(binding())
        assert json.loads(await made.filter(question))["NodeNames"] == ["n1"]
    made.node_watcher.on_update(topology(1, 1))
    assert json.loads(await made.filter(question))["NodeNames"] == ["n2"]


@pytest.mark.parametrize(("code", "held"), [(409, "n1"), (403, "n1"), (404, "")])
async def test_a_pod_that_has_its_node_keeps_what_is_held_there(
    made: Extender, server: FakeAPIServer, code: int, held: str
) -> None:
    """kube-scheduler calls bind again where the first call took too long, also for another node."""
    bindings: list[str] = []

    def answer(asked: Asked) -> Said:
        if asked.method == "GET":
            return Said(200, single(3, node="n1"))
        bindings.append(asked.body["target"]["name"])
        return DONE if len(bindings) == 1 else status(code, "is assigned to node n1")

    server.answer = answer
    made.node_watcher.on_update(topology(4, 4, name="n2"))
    made.reader.read_pod_request(single(3))
    assert await made.binder.bind(binding()) == ""
    assert f"{code}" in await made.binder.bind(binding(node="n2"))
    assert [hold.node for hold in made.nodes.assumed_pods.values()] == ([held] if held else [])
    assert bindings == ["n1", "n2"]


def running(name: str, **keys: Any) -> dict[str, Any]:
    """A pod of three exclusive CPUs on NUMA node 0 of n1, whose container runs."""
    return single(3, name=name, node="n1", phase="Running", placed='{"main":"0"}', **keys)


async def test_who_started_before_anybody_watched_is_not_overlooked(
    made: Extender, server: FakeAPIServer
) -> None:
    """The kubelet says that it runs, the node's object is older than that: neither list has it."""
    chosen = "fieldSelector=spec.nodeName=n1,"

    def answer(asked: Asked) -> Said:
        if asked.method == "POST":
            return DONE
        there = [running("early")] if chosen in unquote(asked.path) else []
        watched = "watch=true" in asked.path
        return Said(200, "" if watched else {"metadata": {"resourceVersion": "1"}, "items": there})

    server.answer = answer
    made.node_watcher.on_update(topology(4))
    made.pods.synced.clear()
    async with working(made.pods.run()):
        await made.pods.synced.wait()
    assert not made.nodes.assumed_pods
    for name in ("a", "b"):
        made.reader.read_pod_request(single(3, name=name))
        why = await made.binder.bind(binding(name))
        assert why == "needs 3 exclusive CPUs on one NUMA node; most free for exclusive use: 1"
    assert list(made.nodes.assumed_pods) == ["uid-early"]
    # The agent counts it, and then it is gone.
    made.node_watcher.on_update(topology(1, charged=[("uid-early", "main")]))
    assert not made.nodes.assumed_pods
    made.node_watcher.on_update(topology(4))
    assert await made.binder.bind(binding("a")) == ""
    assert sum(chosen in unquote(asked.path) for asked in server.asked) == 1, "once for each node"


async def test_where_it_cannot_be_told_who_runs_nothing_is_bound(
    made: Extender, server: FakeAPIServer
) -> None:
    """But ordinary pods are, and the next try asks again."""
    said: list[Said] = [
        status(403, 'User "u" cannot list pods'), Said(200, "{"), Said(200, {"items": 3}),
        Said(200, {"items": []}),
    ]  # fmt: skip

    def answer(asked: Asked) -> Said:
        return DONE if asked.method == "POST" else said.pop(0)

    server.answer = answer
    made.pod_watcher.on_list(frozenset())
    made.reader.read_pod_request(pod(container(cpu="250m", memory="1Gi"), name="ordinary"))
    assert await made.binder.bind(binding("ordinary")) == ""
    made.reader.read_pod_request(single(3))
    assert "cannot list pods" in await made.binder.bind(binding())
    assert await made.binder.bind(binding()) != ""
    assert await made.binder.bind(binding()) != ""
    assert not made.nodes.assumed_pods
    assert await made.binder.bind(binding()) == ""
    assert said == []


def posted(server: FakeAPIServer) -> list[str]:
    """Names of the pods that were bound."""
    return [asked.body["metadata"]["name"] for asked in server.asked
            if asked.path.partition("?")[0].endswith("/binding")]  # fmt: skip


async def bind(made: Extender, name: str, node: str = "n1") -> str:
    """Ask as kube-scheduler does; the result is why not."""
    question = {"Pod": single(3, name=name), "NodeNames": [node]}
    await made.filter(json.dumps(question).encode())
    body = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": node}
    return str(json.loads(await made.bind(json.dumps(body).encode()))["Error"])


@pytest.mark.parametrize("late", [0.0, 13.0, 61.0, 3600.0])
async def test_room_is_promised_once_however_late_an_object_is(
    server: FakeAPIServer, late: float
) -> None:
    """The pod runs, and the object of its node is from before that."""
    now = 0.0
    made = Extender(
        AgentConfig(scheduler=Scheduling(credentials=str(server.directory))), clock=lambda: now
    )
    server.answer = lambda asked: (
        Said(200, {"items": []}) if "fieldSelector" in asked.path else DONE
    )
    made.node_watcher.on_update(topology(4, charged=[]))
    made.topologies.synced.set()
    made.pods.synced.set()
    assert await bind(made, "a") == ""
    pending = single(3, name="a", node="n1", placed='{"main":"0"}')
    made.pod_watcher.on_update(pending)
    made.pod_watcher.on_delete(pending)
    now = late
    made.pod_watcher.expire_assumed_pods()
    assert "most free for exclusive use: 1" in await bind(made, "b")
    made.node_watcher.on_update(topology(4, charged=[("uid-a", "main")]))  # of seven
    assert await bind(made, "b") == ""
    await made.api.close()


@pytest.mark.parametrize("since", [1.0, 61.0, 3600.0])
async def test_each_node_is_read_once_after_a_list_however_long_ago(
    server: FakeAPIServer, since: float
) -> None:
    """Its publisher may be late by any time; where no Lease says who leads, after silence too."""
    now, there = 0.0, [running("early")]
    section = Scheduling(credentials=str(server.directory))
    made = Extender(AgentConfig(scheduler=section), clock=lambda: now)
    server.answer = lambda asked: (
        DONE if asked.method == "POST" else Said(200, {"items": list(there)})
    )
    made.node_watcher.on_update(topology(4, charged=[]))
    made.node_watcher.on_update(topology(4, 4, name="n2", charged=[]))
    made.topologies.synced.set()
    made.pods.synced.set()
    made.pod_watcher.on_list(frozenset())
    now = since
    for _ in range(2):
        assert "most free for exclusive use: 1" in await bind(made, "a")
    assert len(server.asked) == 1
    # Another kube-scheduler led for a moment, and asked the extender beside it.
    for name, at, why in (("b", 0.9, ""), ("c", 2.1, "most free for exclusive use: 1")):
        there[:] = [single(3, name=f"other-{name}", node="n2", placed='{"main":"0"}')]
        now = since + at
        assert why in await bind(made, name, "n2")
    assert posted(server) == ["b"]
    await made.api.close()


class LedServer:
    """One node, its pods, and the Lease; `bound` is what another replica bound.

    A binding takes a second where nobody waits for it, or gives its Lease back before.
    """

    def __init__(self, server: FakeAPIServer) -> None:
        self.leases, self.bound = LeaseServer(), list[dict[str, Any]]()
        self.written: list[str] = []
        self.wait = threading.Event()
        self.begun = threading.Event()
        server.answer = self.answer

    def answer(self, asked: Asked) -> Said:
        path = asked.path.partition("?")[0]
        if "/leases" in path:
            self.written.append(asked.body.get("spec", {}).get("holderIdentity", "-"))
            if self.written[-1] == "":
                self.wait.set()
            return self.leases.answer(asked)
        if asked.method == "POST":
            self.begun.set()
            self.wait.wait(1)
            self.written.append("binding")
            return DONE
        if "watch=true" in asked.path:
            time.sleep(0.05)
            return Said(200, "")
        items = [topology(4, charged=[])] if "noderesource" in path else list(self.bound)
        if "phase=Running" in unquote(asked.path):
            items = []  # those that were bound are on their way
        return Said(200, {"metadata": {"resourceVersion": "1"}, "items": items})

    def give_lease(self, holder: str) -> None:
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
        self.leases.write({"metadata": {"name": "nri-numa-scheduler"}, "spec": spec})


async def test_who_begins_to_lead_lists_again_before_it_answers(server: FakeAPIServer) -> None:
    """What it knew as a standby is older than the Lease, be it by a second or an hour."""
    there = LedServer(server)
    there.give_lease("other")
    there.wait.set()
    section = Scheduling(
        address="127.0.0.1:0", credentials=str(server.directory), lease="nri-numa-scheduler"
    )
    made = Extender(AgentConfig(scheduler=section))
    async with working(made.run()):
        await made.pods.synced.wait()
        while "another replica leads: other" not in (why := await bind(made, "a")):
            await asyncio.sleep(0.01)
        # The leader binds a pod and is gone; no watch of this one has heard of either.
        there.bound.append(single(3, name="early", node="n1", placed='{"main":"0"}'))
        there.give_lease("")
        while "leads" in why or "still being read" in why:
            await asyncio.sleep(0.01)
            why = await bind(made, "a")
    assert "most free for exclusive use: 1" in why


async def test_bindings_end_before_the_lease_is_given_back(server: FakeAPIServer) -> None:
    """Who leads next lists what is written, and nothing may be written after that."""
    there = LedServer(server)
    section = Scheduling(
        address="127.0.0.1:0", credentials=str(server.directory), lease="nri-numa-scheduler"
    )
    made = Extender(AgentConfig(scheduler=section))
    async with working(made.run()):
        while made.unready_reason():
            await asyncio.sleep(0.01)
        asking = asyncio.create_task(bind(made, "a"))
        await asyncio.to_thread(there.begun.wait)
        asking.cancel()
    assert there.written[-2:] == ["binding", ""]


async def test_without_an_api_server_it_says_so(
    made: Extender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    made.reader.read_pod_request(single(3))
    assert "no credentials" in await made.binder.bind(binding())


@pytest.mark.parametrize("made", [{"lease": "nri-numa-scheduler"}], indirect=True)
async def test_who_does_not_lead_binds_nothing(made: Extender, server: FakeAPIServer) -> None:
    body = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}
    assert (
        "another replica leads" in json.loads(await made.bind(json.dumps(body).encode()))["Error"]
    )
    assert "another replica leads" in made.unready_reason()
    assert not server.asked


# --- the Lease --------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [{"lease": "nri-numa-scheduler"}], indirect=True)
async def test_a_lease_that_may_not_be_read_is_why_nothing_is_bound(
    made: Extender, server: FakeAPIServer
) -> None:
    """The sentence names the rule that is missing."""
    server.answer = lambda asked: status(403, "leases is forbidden")
    assert made.election is not None
    await made.election.run_step()
    why = made.unready_reason()
    assert "the Lease cannot be used" in why
    assert "lacks apiGroups ['coordination.k8s.io'], resources [leases], verbs [get]" in why


# --- lists and watches ------------------------------------------------------------------------


def event(kind: str, document: dict[str, Any], version: str) -> str:
    document = {**document, "metadata": {**document["metadata"], "resourceVersion": version}}
    return json.dumps({"type": kind, "object": document}) + "\n"


class Recorder(WatchHandler):
    """What a watch says."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, Any]] = []
        self.empty = asyncio.Event()

    def on_update(self, document: Mapping[str, Any]) -> None:
        self.changes.append(("put", name_of(document)))

    def on_delete(self, document: Mapping[str, Any]) -> None:
        self.changes.append(("removed", name_of(document)))

    def on_every_deleted_key(self, key: str) -> None:
        self.changes.append(("gone", key))

    def on_list(self, keys: frozenset[str]) -> None:
        self.changes.append(("all", sorted(keys)))
        if not keys:
            self.empty.set()


async def test_pages_changes_and_a_second_list_after_410(
    server: FakeAPIServer, api: KubeAPI
) -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    watched: list[str] = []

    def answer(asked: Asked) -> Said:
        if "watch=true" in asked.path:
            watched.append(asked.path)
            if len(watched) == 1:
                return Said(200, event("ADDED", topology(1, name="c"), "11")
                            + event("DELETED", topology(1, name="a"), "12"))  # fmt: skip
            return Said(200, json.dumps(gone) + "\n")
        if "continue=" in asked.path:
            return Said(200, {"metadata": {"resourceVersion": "10"},
                              "items": [topology(1, name="b")]})  # fmt: skip
        if watched:
            return Said(200, {"metadata": {"resourceVersion": "20"}, "items": []})
        return Said(200, {"metadata": {"resourceVersion": "10", "continue": "more"},
                          "items": [topology(1, name="a")]})  # fmt: skip

    server.answer = answer
    objects = Recorder()
    async with working(Watch(api, TOPOLOGIES_PATH, objects).run()):
        await objects.empty.wait()
    assert objects.changes[:9] == [
        ("put", "a"), ("put", "b"), ("all", ["a", "b"]), ("put", "c"), ("removed", "a"),
        ("gone", "a"), ("gone", "b"), ("gone", "c"), ("all", []),
    ]  # fmt: skip
    assert "resourceVersion=10" in watched[0]
    assert "resourceVersion=12" in watched[1]


async def test_a_list_goes_on_at_the_page_that_failed(server: FakeAPIServer, api: KubeAPI) -> None:
    """A busy server's pages are not thrown away; a place that it does not know any more is."""
    answers = [
        Said(200, {"metadata": {"resourceVersion": "9", "continue": "two"},
                   "items": [topology(1, name="a")]}),
        status(500, "the request timed out"),
        Said(200, {"metadata": {"resourceVersion": "9", "continue": "three"},
                   "items": [topology(1, name="b")]}),
        status(410, "the continue token is too old"),
        Said(200, {"metadata": {"resourceVersion": "20"}, "items": [topology(1, name="c")]}),
    ]  # fmt: skip
    watched = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "30"}}})
    server.answer = lambda asked: answers.pop(0) if answers else Said(200, watched + "\n")
    objects = Recorder()
    follower = Watch(api, TOPOLOGIES_PATH, objects, jitter=lambda: 0.0)
    async with working(follower.run()):
        while len(server.asked) < 7:
            await asyncio.sleep(0.01)
    assert objects.changes == [
        ("put", "a"), ("put", "b"), ("put", "c"), ("gone", "a"), ("gone", "b"), ("all", ["c"]),
    ]  # fmt: skip
    places = [asked.path.partition("continue=")[2].partition("&")[0] for asked in server.asked[:5]]
    assert places == ["", "two", "two", "three", ""]
    assert "allowWatchBookmarks=true" in server.asked[5].path
    assert "resourceVersion=30" in server.asked[6].path, "it goes on from the bookmark"


@pytest.mark.parametrize("code", [410, 429])
async def test_who_may_not_watch_is_told_once(
    server: FakeAPIServer, api: KubeAPI, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Also where the list before it is answered each time; not before the server wants it again."""
    gone: list[float] = []

    def answer(asked: Asked) -> Said:
        if "watch=true" not in asked.path:
            return Said(200, {"metadata": {"resourceVersion": "1"}, "items": []})
        gone.append(time.monotonic())
        after = {"Retry-After": "2"} if len(gone) == 1 else {}
        return status(code, "not now", **after) if len(gone) < 4 else Said(200, "")

    server.answer = answer
    follower = Watch(api, TOPOLOGIES_PATH, Recorder(), jitter=lambda: 0.0)
    with caplog.at_level("INFO"):
        async with working(follower.run()):
            while len(gone) < 5:
                await asyncio.sleep(0.01)
    assert (gone[1] - gone[0] >= 2, gone[3] - gone[1] >= 1.5) == (True, True), "longer each time"
    said = [
        one for one in ("cannot follow", "answers again") for _ in range(caplog.text.count(one))
    ]
    assert said == ["cannot follow", "answers again"]
    assert follower.failing is None


async def test_an_old_view_of_the_cluster_is_said(server: FakeAPIServer) -> None:
    """The API server is away, or stands still; bindings go on as far as it does."""
    now = 0.0
    made = Extender(
        AgentConfig(scheduler=Scheduling(credentials=str(server.directory))), clock=lambda: now
    )
    made.topologies.synced.set()
    made.pods.synced.set()
    server.answer = lambda asked: status(503, "not now")
    try:
        async with working(made.topologies.run(), made._probe_api_server()):
            while made.topologies.failing is None:
                await asyncio.sleep(0.01)
            assert made.health_problem() == ""
            now = 15.0
            assert (
                "noderesourcetopologies: 503: not now; what is known is 15 s old"
                in made.health_problem()
            )
            assert made.unready_reason() == ""
            known = 'nri_numa_scheduler_known_age_seconds{kind="noderesourcetopologies"} 15.0'
            assert known in made.render_metrics().decode()
        made.topologies.failing = None
        assert made.health_problem() == "the API server has not answered for 15 s"
    finally:
        await made.api.close()
        await made.lease_api.close()


@pytest.mark.parametrize("kind", WATCHED_KINDS)
async def test_how_late_an_object_is_read_is_measured(
    made: Extender, server: FakeAPIServer, kind: str
) -> None:
    """By the API server's clock, which is an hour ahead; a binding is written to a condition."""
    server.skew = 3600.0
    late = datetime.fromtimestamp(time.time() + server.skew - 66, UTC).strftime("%FT%TZ")
    watch, document = made.topologies, topology(4)
    long_ago = {"time": "2026-11-01T00:00:00Z"}
    if kind == "pods":
        watch, document = made.pods, running("p")
        document["status"]["conditions"] = [{"lastTransitionTime": late}]
    document["metadata"]["managedFields"] = [{"time": late} if kind != "pods" else {}, long_ago]
    asked: list[Asked] = []

    def answer(request: Asked) -> Said:
        if "watch=true" not in request.path:
            return Said(200, {"metadata": {"resourceVersion": "10"}, "items": []})
        asked.append(request)
        removed = topology(1, name="gone")
        removed["metadata"]["managedFields"] = [long_ago]
        text = event("DELETED", removed, "11") + event("ADDED", document, "12")
        return Said(200, text) if len(asked) == 1 else status(503, "later")

    server.answer = answer
    async with working(watch.run()):
        while len(asked) < 2:
            await asyncio.sleep(0.01)
    bucket = f'nri_numa_scheduler_event_age_seconds_bucket{{kind="{kind}",le="%s"}} %s'
    text = made.render_metrics().decode()
    assert bucket % ("60.0", "0.0") in text
    assert bucket % ("300.0", "1.0") in text
    assert bucket % ("+Inf", "1.0") in text


async def test_a_watch_that_ends_is_resumed_soon(server: FakeAPIServer, api: KubeAPI) -> None:
    """Each goes on in a quarter of a second, so that a dozen need no minutes."""
    watched: list[str] = []

    def answer(asked: Asked) -> Said:
        if "watch=true" not in asked.path:
            return Said(200, {"metadata": {"resourceVersion": "10"}, "items": []})
        watched.append(asked.path)
        name = f"n{len(watched)}"
        return Said(200, event("ADDED", topology(1, name=name), str(10 + len(watched))))

    server.answer = answer
    enough = asyncio.Event()

    class Counted(Recorder):
        def on_update(self, document: Mapping[str, Any]) -> None:
            super().on_update(document)
            if len(self.changes) == 14:  # the empty list is one
                enough.set()

    async with working(Watch(api, TOPOLOGIES_PATH, Counted(), jitter=lambda: 0.0).run()):
        await enough.wait()


async def test_a_kind_that_is_not_installed_has_no_objects(
    server: FakeAPIServer, api: KubeAPI
) -> None:
    """Ordinary pods are not kept waiting for it."""
    server.answer = lambda asked: status(404, "could not find the resource")
    follower = Watch(api, TOPOLOGIES_PATH, Recorder())
    async with working(follower.run()):
        await follower.synced.wait()
        assert "404" in follower.problem


async def test_rights_that_are_missing_are_named_and_questions_wait(
    made: Extender, server: FakeAPIServer
) -> None:
    """Ordinary pods do not: nothing has to be known for them."""
    text = 'noderesourcetopologies.topology.node.k8s.io is forbidden: User "u" cannot list'
    server.answer = lambda asked: status(403, text)
    made.topologies.synced.clear()
    async with working(made.topologies.run()):
        while not made.topologies.problem:
            await asyncio.sleep(0.01)
    asked = {"Pod": single(2), "NodeNames": ["n1"]}
    assert text in json.loads(await made.filter(json.dumps(asked).encode()))["Error"]
    assert "noderesourcetopologies: 403" in made.unready_reason()
    asked["Pod"] = pod(container(cpu="250m", memory="1Gi"))
    assert json.loads(await made.filter(json.dumps(asked).encode()))["NodeNames"] == ["n1"]


# --- waking -----------------------------------------------------------------------------------


def activator(api: KubeAPI, clock: Callable[[], float]) -> PodActivator:
    wakes = SchedulerMetrics("test").wakes
    return PodActivator(api, AgentConfig(), wakes, clock=clock, wall=lambda: 1.5)


async def test_room_wakes_who_was_refused_and_nobody_else(
    server: FakeAPIServer, api: KubeAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nri_numa.scheduler.watcher.MIN_POD_WAKE_INTERVAL_S", 0.01)
    now = 0.0
    made = activator(api, lambda: now)
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
    answers = iter([status(404, "not found"), status(429, "slow down")])
    server.answer = lambda asked: next(answers, Said(200, {}))
    async with working(made.run(lambda: True)):
        while len(server.asked) < 3:
            await asyncio.sleep(0.01)
    asked = server.asked[2]
    assert (asked.method, asked.content_type) == ("PATCH", "application/merge-patch+json")
    assert asked.path.startswith("/api/v1/nodes/n1")
    assert asked.body == {"metadata": {"annotations": {"numa.kubernetes.io/room": "1500"}}}


async def test_who_takes_over_wakes_the_pods_that_were_refused_before(
    made: Extender, server: FakeAPIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the scheduler's queue, and whoever refused them is gone."""
    monkeypatch.setattr("nri_numa.scheduler.extender.TICK_INTERVAL_S", 0.01)
    server.answer = lambda asked: Said(200, asked.body)
    async with working(made.run_ticks(), made.activator.run(made.is_leader)):
        while "wakes_total 1.0" not in made.render_metrics().decode():
            await asyncio.sleep(0.01)
    assert [asked.path.partition("?")[0] for asked in server.asked] == ["/api/v1/nodes/n1"]
