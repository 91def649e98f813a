"""A second, stock kube-scheduler with our extender: nodes as objects, zones written by hand."""

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nri_numa.model.counted_containers import encode_counted_container_hashes
from tests.beds.cri import poll
from tests.beds.kube.bed import MANIFESTS, NAMESPACE, KubeBed, Numa
from tests.beds.kube.caller import Caller
from tests.beds.kube.client import Client, JsonObject, unscheduled
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.kube.controller import Controller
from tests.beds.kube.controller import install as install_controller
from tests.beds.kube.events import Thief, answers
from tests.beds.kube.extender import ACCOUNT, SCHEDULER, Extender, install, make_certificate
from tests.beds.kube.manifests import PREFIX, asks, container, pod
from tests.beds.kube.topologies import NRT, applied, publish_topology
from tests.beds.processes import wait_for

LEASE = "/apis/coordination.k8s.io/v1/namespaces/nri-numa/leases/numa-scheduler"
NODES = ("numa-fake-a", "numa-fake-b")
SCHEDULED_NUMA_NODES = f"{PREFIX}/scheduled-numa-nodes"
SINGLE = asks(policy="single-numa-node", cpus="exclusive")


def wanting(name: str, cpus: int, *, scheduler: str = SCHEDULER, **keys: Any) -> JsonObject:
    return pod(
        name,
        container(cpus=str(cpus), memory="1Gi"),
        schedulerName=scheduler,
        nodeSelector={"numa-fake": "yes"},
        tolerations=[{"operator": "Exists"}],
        **keys,
    )


@pytest.fixture(scope="module")
def fleet(session_bed: KubeBed) -> Iterator[Client]:
    """Two nodes as objects, and the kind of their zones."""
    client = session_bed.client
    install(client)
    with applied(client, NRT, "publish-topology/crd.yaml"):
        try:
            for name in NODES:
                client.add_node(name, labels={"numa-fake": "yes"})
                publish_topology(client, name, 4, 4)
            yield client
        finally:
            client.delete_pods()
            for name in NODES:
                for path in (f"/api/v1/nodes/{name}", f"{NRT}/{name}"):
                    client.request("DELETE", path)


@pytest.fixture(scope="module")
def extender(session_bed: KubeBed, fleet: Client) -> Iterator[Extender]:
    with Extender(session_bed) as running:
        yield running


@pytest.fixture
def there(extender: Extender, fleet: Client, bed: KubeBed) -> Iterator[Client]:
    """Both nodes with four free exclusive CPUs on each NUMA node."""
    for name in NODES:
        publish_topology(fleet, name, 4, 4)
    wait_room(extender, 4, *NODES)
    wait_room(extender, 5)
    yield fleet
    print(extender.log()[-6000:])  # shown where the test failed


def wait_room(extender: Extender, cpus: int, *nodes: str) -> None:
    """Until the extender finds so many CPUs on one NUMA node of these nodes, and of no others."""
    question = {"Pod": wanting("nobody", cpus, annotations=SINGLE), "NodeNames": list(NODES)}

    def ask() -> bool:
        with contextlib.suppress(ValueError):
            return bool(json.loads(extender.get("/filter", question))["NodeNames"] == list(nodes))
        return False

    poll(ask, f"{cpus} CPUs on {nodes}")


def bound(it: JsonObject) -> bool:
    return bool(it["spec"].get("nodeName"))


def placed(it: JsonObject) -> Any:
    return json.loads(it["metadata"]["annotations"][SCHEDULED_NUMA_NODES])


def no_room(client: Client, name: str, cpus: int, most: int) -> None:
    """Until the scheduler says that this is why a pod has no node."""
    why = f"needs {cpus} exclusive CPUs on one NUMA node; at most {most} free for exclusive use"
    assert not bound(client.wait_pod(name, lambda it: why in unscheduled(it), "refused"))


def test_a_pod_goes_where_one_numa_node_has_room(there: Client, extender: Extender) -> None:
    """Both nodes have eight CPUs left, and only one of them has six on one NUMA node."""
    publish_topology(there, NODES[1], 2, 6)
    wait_room(extender, 6, NODES[1])
    there.apply(wanting("extender-fits", 6, annotations=SINGLE))
    found = there.wait_pod("extender-fits", bound, "bound")
    assert found["spec"]["nodeName"] == NODES[1]
    assert placed(found) == {"main": "1"}


def test_a_rejected_pod_says_why_and_is_woken(there: Client, extender: Extender) -> None:
    there.apply(wanting("extender-waits", 12, annotations=SINGLE))
    no_room(there, "extender-waits", 12, 4)
    # A change of the object wakes nobody; our touch of the Node does.
    publish_topology(there, NODES[0], 12, 4)
    found = there.wait_pod("extender-waits", bound, "bound")
    assert placed(found) == {"main": "0"}


def test_what_is_promised_is_not_promised_again(there: Client, extender: Extender) -> None:
    """The objects say four CPUs free all the time: only our own promises tell otherwise."""
    names = [f"extender-race-{n}" for n in range(6)]
    there.apply(*(wanting(name, 3, annotations=SINGLE) for name in names))

    def done() -> list[JsonObject] | None:
        found = [it for name in names if (it := there.pod(name)) is not None]
        settled = [it for it in found if bound(it) or unscheduled(it)]
        return found if len(settled) == len(names) and sum(map(bound, found)) == 4 else None

    found = poll(done, "four bound and two refused")
    where = [(it["spec"]["nodeName"], placed(it)["main"]) for it in found if bound(it)]
    assert sorted(where) == sorted((node, i) for node in NODES for i in "01")


def test_a_restarted_extender_remembers_its_promises(there: Client, extender: Extender) -> None:
    for number in range(4):
        there.apply(wanting(f"extender-before-{number}", 3, annotations=SINGLE))
        there.wait_pod(f"extender-before-{number}", bound, "bound")
    extender.process.end()
    extender.process.start()
    extender.wait_ready()
    there.apply(wanting("extender-after", 3, annotations=SINGLE))
    no_room(there, "extender-after", 3, 1)


def test_who_started_before_the_extender_did_is_not_overlooked(there: Client, bed: KubeBed) -> None:
    """They run, and the objects of their nodes are older than that: no list names them."""
    for node in NODES:
        for i in "01":
            name = f"unseen-{node[-1]}{i}"
            marks = {**SINGLE, SCHEDULED_NUMA_NODES: json.dumps({"main": i})}
            there.apply(wanting(name, 3, scheduler="nobody", annotations=marks))
            path = f"/api/v1/namespaces/default/pods/{name}"
            # In this order, so that no extender sees them on their way.
            there.ask("PATCH", f"{path}/status", {"status": {"phase": "Running"}})
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            there.ask(
                "POST", f"{path}/binding",
                {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                 "target": target},
            )  # fmt: skip
    mine = "numa-unseen"
    patient = {"leaseName": "", "topologyReportDelay": "10m"}
    with Extender(bed, config=patient, port=19898, scheduler_port=10273, name=mine):
        there.apply(wanting("unseen-next", 3, scheduler=mine, annotations=SINGLE))
        no_room(there, "unseen-next", 3, 1)


def test_without_the_extender_ordinary_pods_go_on(there: Client, extender: Extender) -> None:
    """Ours wait, and are never bound without the annotation."""
    extender.process.end()
    try:
        there.apply(
            wanting("extender-ours", 2, annotations=SINGLE),
            wanting("extender-ordinary", 2, scheduler="default-scheduler"),
        )
        there.wait_pod("extender-ordinary", bound, "bound")
        waits = there.wait_pod("extender-ours", lambda it: bool(unscheduled(it)), "waiting")
        assert not bound(waits)
    finally:
        with contextlib.suppress(AssertionError):
            extender.process.start()
        extender.wait_ready()
    found = there.wait_pod("extender-ours", bound, "bound")
    assert SCHEDULED_NUMA_NODES in found["metadata"]["annotations"]


# --- a node with an agent -----------------------------------------------------------------------


def test_a_real_node_starts_what_it_held(there: Client, extender: Extender, bed: KubeBed) -> None:
    """From the object to the container; tests/scenarios have a choice among several NUMA nodes."""
    document = pod(
        "extender-held", container(cpus="1"), annotations=SINGLE, schedulerName=SCHEDULER,
        nodeSelector={"kubernetes.io/hostname": "bed"},
    )  # fmt: skip
    try:
        publish_topology(there, "bed", 1)
        found = there.run(document)
        assert placed(found) == {"main": "0"}
        assert len(bed.node.cpus(found)) == 1
        said = bed.node.plugin.get("/v1/explain/default/extender-held")[1]
        assert "policy single-numa-node" in said
        assert "no longer fits best" not in said
    finally:
        there.request("DELETE", f"{NRT}/bed")


# --- its account --------------------------------------------------------------------------------


def test_its_token_writes_two_annotations(there: Client, bed: KubeBed) -> None:
    """And binds pods. Whoever steals it can send pods to nodes, and cannot speak for them."""
    thief = Thief(bed, there.token(ACCOUNT))
    thief.writes_one_annotation(NODES[0], "wake-counter")
    there.apply(wanting("extender-stolen", 1, scheduler="nobody"))
    path = "/api/v1/namespaces/default/pods/extender-stolen/binding?dryRun=All"
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "extender-stolen"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODES[0]},
    }

    def binds(labels: dict[str, str] | None = None, **annotations: str) -> str:
        metadata = {"name": "extender-stolen", "annotations": annotations, "labels": labels or {}}
        return thief.does("POST", path, {**body, "metadata": metadata})

    poll(
        lambda: "may only bind pods" in binds(**{f"{PREFIX}/numacpu": "0"}),
        "the other policy in force",
    )
    scheduled = {SCHEDULED_NUMA_NODES: '{"main":"0"}'}
    assert binds(**scheduled, **{f"{PREFIX}/container-resources": "{}"}) == ""
    assert "no labels" in binds({"app": "other"}, **scheduled)
    zone = {"topology.kubernetes.io/zone": "a"}  # the API server writes it into bindings
    assert binds(zone, **scheduled) == ""
    for method, where in (("PATCH", "/api/v1/namespaces/default/pods/extender-stolen"),
                          ("DELETE", f"/api/v1/nodes/{NODES[0]}")):  # fmt: skip
        assert "forbidden" in thief.does(method, f"{where}?dryRun=All", {"metadata": {}})


# --- two replicas -------------------------------------------------------------------------------


def test_a_leader_dies_in_the_middle_of_a_bind(there: Client, bed: KubeBed, tmp_path: Path) -> None:
    """Its binding is written and nobody was told. We are kube-scheduler here, and call again.

    The pod has one node and its annotation, and the other replica holds the NUMA node for it.
    """
    certificate = make_certificate(tmp_path)
    there.request("DELETE", LEASE)
    config = {"leaseName": "numa-scheduler"}
    there.apply(wanting("extender-dies", 3, scheduler="nobody", annotations=SINGLE))
    document = there.pod("extender-dies")
    assert document is not None
    question = {"Pod": document, "NodeNames": list(NODES)}
    asked = {
        "PodName": "extender-dies", "PodNamespace": "default",
        "PodUID": document["metadata"]["uid"], "Node": NODES[0],
    }  # fmt: skip
    with (
        Extender(bed, config=config, port=19896, certificate=certificate) as first,
        Extender(bed, config=config, port=19897, certificate=certificate) as second,
    ):

        def leads(*replicas: Extender) -> Extender | None:
            for one in replicas:
                one.process.check()
            return next((one for one in replicas if one.get("/readyz") == "ok"), None)

        def fits(one: Extender) -> bool:
            with contextlib.suppress(ValueError, KeyError):
                return NODES[0] in json.loads(one.get("/filter", question))["NodeNames"]
            return False

        def binds(one: Extender, node: str) -> str | None:
            """What it says; None for no answer."""
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(one.get("/bind", {**asked, "Node": node}))["Error"])
            return None

        leader = poll(lambda: leads(first, second), "a leader")
        other = second if leader is first else first
        poll(  # it may not listen yet
            lambda: "another replica leads" in (binds(other, NODES[0]) or ""),
            "what the other one says",
        )
        poll(lambda: fits(leader), "nodes")
        call = leader.asking("/bind", asked)
        try:
            written = there.wait_pod("extender-dies", bound, "bound")
            leader.process.end(signal.SIGKILL)
        finally:
            call.kill()
            call.communicate()
        poll(lambda: leads(other), "the other one to lead")
        poll(lambda: binds(other, NODES[0]) == "", "the second call of bind")
        poll(lambda: binds(other, NODES[1]), "a refusal: it is on another node")
        found = there.pod("extender-dies")
        assert found is not None
        assert found["spec"]["nodeName"] == NODES[0]
        assert placed(found) == placed(written)
        poll(lambda: "nri_numa_scheduler_assumed_pods 1.0" in other.get("/metrics"), "what is held")
    there.request("DELETE", LEASE)


def test_kube_scheduler_follows_to_the_leader(there: Client, bed: KubeBed, tmp_path: Path) -> None:
    """A stock one that asks a replica which does not lead, with TLS and its own certificate."""
    certificate = make_certificate(tmp_path)
    there.request("DELETE", LEASE)
    replicas = [
        Extender(
            bed, config={"leaseName": "numa-scheduler", "address": f"0.0.0.0:{port}"}, port=port,
            certificate=certificate,
        )
        for port in (19896, 19897)
    ]  # fmt: skip

    def calls(one: Extender, result: str) -> set[str]:
        found = rf'calls_total{{result="{result}",verb="(\w+)"}} [1-9]'
        return set(re.findall(found, one.get("/metrics")))

    with contextlib.ExitStack() as stack:
        for one in replicas:
            stack.enter_context(one)
            # Both are ready, so a rollout would be complete.
            wait_for([one.process], lambda one=one: one.get("/readyz") == "ok", "a replica")
        leads = [one for one in replicas if "scheduler_leader 1.0" in one.get("/metrics")]
        (leader,), (follower,) = leads, [one for one in replicas if one not in leads]
        port = 19896 + replicas.index(follower)
        own = str(certificate)
        asked = {
            "urlPrefix": f"https://127.0.0.1:{port}", "filterVerb": "filter", "bindVerb": "bind",
            "httpTimeout": "5s", "nodeCacheCapable": True, "enableHTTPS": True,
            # The name in the certificate, whatever address the leader has.
            "tlsConfig": {
                "certFile": own, "keyFile": own, "caFile": own, "serverName": "127.0.0.1",
            },
        }  # fmt: skip
        profiles = [{"schedulerName": "numa-follows"}]
        file = bed.control.write_scheduler(tmp_path, profiles=profiles, extenders=[asked])
        scheduler = bed.control.scheduler("follows-scheduler", file, 10276)
        stack.callback(scheduler.end)
        scheduler.start()
        there.apply(wanting("extender-follows", 3, scheduler="numa-follows", annotations=SINGLE))
        found = there.wait_pod("extender-follows", bound, "bound")
        assert placed(found)
        assert calls(follower, "307") == calls(leader, "answered") == {"filter", "bind"}
        assert not calls(follower, "answered")
    there.request("DELETE", LEASE)


# --- a burst in trouble -------------------------------------------------------------------------

BURST = tuple(f"numa-burst-{n}" for n in range(6))
FULL, EACH, PODS = 8, 4, 24
"""Exclusive CPUs of a NUMA node and of a pod; so many pods fill all twelve to the last CPU, and
then nothing may be held that is not used."""
REFUSING: list[JsonObject] = [
    {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "PriorityLevelConfiguration",
        "metadata": {"name": "numa-burst"},
        "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": 0, "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"}}},
    },
    {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema",
        "metadata": {"name": "numa-burst"},
        "spec": {
            "priorityLevelConfiguration": {"name": "numa-burst"}, "matchingPrecedence": 100,
            "rules": [{
                "subjects": [{"kind": "ServiceAccount", "serviceAccount": {
                    "namespace": NAMESPACE, "name": ACCOUNT}}],
                "resourceRules": [{
                    "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"],
                    "clusterScope": True}],
            }],
        },
    },
]  # fmt: skip
"""The extender has no seat: one request at a time, and 429 for others."""


class Burst:
    """Pods that come at once, and whose bindings wait at a frozen API server when it goes wrong."""

    def __init__(self, bed: KubeBed, first: Extender) -> None:
        self.client, self.server = bed.client, bed.control.daemons["kube-apiserver"]
        self.enter, self.first = bed.control.namespaces.enter(), first

    def begin(self, trouble: str) -> None:
        """First a pod for each node: the extender read who runs there before others come."""
        self.client.apply(*(self.document(n, BURST[n]) for n in range(len(BURST))))
        poll(lambda: sum(self.promised().values()) == EACH * len(BURST), "a pod on each node")
        os.kill(self.first.scheduler.pid, signal.SIGSTOP)
        self.client.apply(*(self.document(n) for n in range(len(BURST), PODS)))
        if trouble == "429":
            self.client.apply(*REFUSING)
            seats = 'nominal_limit_seats{priority_level="numa-burst"}'
            poll(lambda: seats in str(self.client.request("GET", "/metrics")[1]), "no seats")
        if trouble != "charged":
            os.kill(self.server.pid, signal.SIGSTOP)
        os.kill(self.first.scheduler.pid, signal.SIGCONT)

    def document(self, number: int, node: str = "") -> JsonObject:
        found = wanting(f"burst-{number}", EACH, scheduler="burst", annotations=SINGLE)
        found["metadata"]["labels"] = {"app": "burst"}
        chosen = {"kubernetes.io/hostname": node} if node else {"numa-burst": "yes"}
        found["spec"]["nodeSelector"] = chosen
        return found

    def promised(self) -> Counter[tuple[str, str]]:
        """CPUs by node and NUMA node, which never are more than there are."""
        found: Counter[tuple[str, str]] = Counter()
        for it in self.client.pods("app=burst"):
            if bound(it):
                found[it["spec"]["nodeName"], placed(it)["main"]] += EACH
        assert max(found.values(), default=0) <= FULL, found
        return found

    def failed(self) -> int:
        return len(self.first.process.records("pod not bound"))

    def slow(self) -> None:
        """Bindings are not answered in time, and then written all the same."""
        poll(lambda: self.failed() >= PODS - len(BURST), "the end of bindTimeout")
        os.kill(self.server.pid, signal.SIGCONT)

    def rejected(self) -> None:
        """All bindings come at the same time, for one seat."""
        poll(lambda: self.filtered() >= PODS, "all bindings under way")
        os.kill(self.server.pid, signal.SIGCONT)
        poll(self.failed, "429")

    def compacted(self) -> None:
        """The API server begins anew and etcd knows no history: 410 for every watch and page."""
        poll(lambda: self.filtered() >= PODS, "all bindings under way")
        self.server.end(signal.SIGKILL)
        etcd = Caller(self.enter, "http://127.0.0.1:2379")
        revision = json.loads(etcd.ask("POST", "/v3/kv/range", {"key": "AA=="})[1])["header"]
        status, said = etcd.ask("POST", "/v3/kv/compaction", {"revision": revision["revision"]})
        assert status == 200, said
        self.server.start()
        wait_for([self.server], lambda: answers(self.client), "the API server")

    def leaderless(self) -> None:
        """The one that leads dies with its scheduler, and nobody knows what it has written."""
        poll(lambda: self.filtered() >= PODS, "all bindings under way")
        for one in (self.first.process, self.first.scheduler):
            one.end(signal.SIGKILL)
        os.kill(self.server.pid, signal.SIGCONT)

    def charged(self) -> None:
        """Agents start what is bound; their objects say so before or after its status does."""
        path, seen = "/api/v1/namespaces/default/pods", Counter[str]()

        def start() -> bool:
            found = self.client.pods("app=burst")
            for number, it in enumerate(found):
                node = it["spec"].get("nodeName", "")
                if not node or it["status"]["phase"] == "Running":
                    continue
                running = {"status": {"phase": "Running"}}
                if number % 2:
                    self.client.ask("PATCH", f"{path}/{it['metadata']['name']}/status", running)
                there = [p for p in found if p["spec"].get("nodeName") == node]
                free = [FULL - EACH * sum(placed(p)["main"] == i for p in there) for i in "01"]
                names = encode_counted_container_hashes(
                    (p["metadata"]["uid"], "main") for p in there
                )
                publish_topology(self.client, node, *free, charged=names)
                self.client.ask("PATCH", f"{path}/{it['metadata']['name']}/status", running)
                seen[node] += 1
            self.promised()
            return sum(seen.values()) == PODS

        poll(start, "all pods running")
        poll(
            lambda: "nri_numa_scheduler_assumed_pods 0.0" in self.first.get("/metrics"), "handover"
        )

    def filtered(self) -> float:
        text = self.first.get("/metrics")
        name = 'nri_numa_scheduler_calls_total{result="answered",verb="filter"} '
        return sum(float(one.split()[-1]) for one in text.splitlines() if one.startswith(name))


@pytest.mark.parametrize("trouble", ["slow", "429", "410", "failover", "charged"])
def test_a_burst_in_trouble(trouble: str, fleet: Client, bed: KubeBed) -> None:
    """Nothing is promised twice, every pod has its node in the end, and the log stays short."""
    for name in BURST:
        fleet.add_node(name, labels={"numa-burst": "yes"})
        publish_topology(fleet, name, FULL, FULL)
    lease = "numa-scheduler" if trouble == "failover" else ""
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [fleet.request("DELETE", f"{path}/{name}") for name in BURST
                                for path in ("/api/v1/nodes", NRT)])  # fmt: skip
        stack.callback(fleet.delete_pods)
        fleet.request("DELETE", LEASE)
        replicas = [
            stack.enter_context(
                Extender(
                    bed, config={"leaseName": lease}, port=19898 + n, scheduler_port=10273 + n,
                    name="burst", standby=n > 0, level="info",
                )
            )
            for n in range(2 if lease else 1)
        ]  # fmt: skip
        last, burst = replicas[-1], Burst(bed, replicas[0])
        stack.callback(lambda: print(last.log()[-6000:]))  # shown where the test failed
        stack.callback(fleet.kubectl, "delete", "--ignore-not-found", "--filename=-",
                       documents=REFUSING)  # fmt: skip
        stack.callback(lambda: os.kill(burst.server.pid, signal.SIGCONT))
        burst.begin(trouble)
        happens, said = {
            "slow": (burst.slow, "did not answer in time"),
            "429": (burst.rejected, "Too many requests"),
            "410": (burst.compacted, "list repeated"),
            "failover": (burst.leaderless, ""),
            "charged": (burst.charged, ""),
        }[trouble]
        happens()
        poll(lambda: sum(burst.promised().values()) == EACH * PODS, "a node for every pod")
        poll(lambda: said in last.log(), said)  # 410 comes with the next try of a watch
        last.wait_ready()
        records = last.process.records()
        assert len(records) < 10 * PODS, Counter(one["msg"] for one in records)


# --- preemption ---------------------------------------------------------------------------------

CROWDED = tuple(f"numa-crowded-{n}" for n in range(3))
"""Nodes of 2 x 16 CPUs."""
FILLS = int(os.environ.get("NRI_NUMA_PREEMPTION_FILLS", "0"))
"""Random fills of the nodes, each with pods of three priorities; a fill takes 15 s."""
PRIORITIES = {"numa-low": 10, "numa-middle": 500, "numa-high": 1000}


Fill = list[tuple[str, int, int]]
"""Pods of a node: the name of a priority, the NUMA node and the CPUs of each."""


class Crowd:
    """Running pods that fill nodes, and the agents that count them."""

    def __init__(self, client: Client) -> None:
        self.client, self.placed = client, dict[str, dict[str, tuple[int, int]]]()

    def fill(self, pods: Mapping[str, Fill], *, grace_s: int = 0) -> None:
        """These pods run, by node."""
        self.client.delete_pods()
        documents: list[JsonObject] = []
        for node, listed in pods.items():
            self.placed[node] = {}
            for number, (priority, numa_node, cpus) in enumerate(listed):
                name = f"{node}-{number}"
                marks = {**SINGLE, SCHEDULED_NUMA_NODES: json.dumps({"main": str(numa_node)})}
                document = wanting(name, cpus, scheduler="nobody", annotations=marks)
                document["spec"] |= {"nodeSelector": {"numa-crowded": "yes"}, "nodeName": node,
                                     "priorityClassName": priority,
                                     "terminationGracePeriodSeconds": grace_s}  # fmt: skip
                documents.append(document)
                self.placed[node][name] = numa_node, cpus
        self.client.apply(*documents)
        for document in documents:
            path = f"/api/v1/namespaces/default/pods/{document['metadata']['name']}/status"
            self.client.ask("PATCH", path, {"status": {"phase": "Running"}})
        self.count()

    def count(self) -> set[str]:
        """Objects of the nodes follow the pods that are there; the result is who was evicted."""
        found = {it["metadata"]["name"]: it for it in self.client.pods()}
        gone: set[str] = set()
        for node, placed in self.placed.items():
            left = {name: where for name, where in placed.items() if name in found}
            gone |= placed.keys() - left.keys()
            free = [16 - sum(n for i, n in left.values() if i == numa_node) for numa_node in (0, 1)]
            names = encode_counted_container_hashes(
                (found[name]["metadata"]["uid"], "main") for name in left
            )
            publish_topology(self.client, node, *free, charged=names)
        return gone

    def apply_important(
        self, cpus: int, priority: str = "numa-high", scheduler: str = SCHEDULER
    ) -> None:
        """Create a strict pod that may be put on these nodes."""
        document = wanting(
            "important", cpus, scheduler=scheduler, annotations=SINGLE, priorityClassName=priority
        )
        document["spec"]["nodeSelector"] = {"numa-crowded": "yes"}
        self.client.apply(document)

    def preempts(self, cpus: int, priority: str, *, starts: bool) -> None:
        """A strict pod starts by evicting pods of its NUMA node alone, or evicts nobody."""
        self.apply_important(cpus, priority)

        def has_node() -> JsonObject | None:
            self.count()
            found = self.client.pod("important")
            assert found is not None
            settled = bound(found) if starts else bool(unscheduled(found))
            return found if settled else None

        found = poll(has_node, f"{cpus} CPUs, {priority}: the decision")
        evicted = self.count()
        if not starts:
            assert (bound(found), evicted) == (False, set())
            return
        node, numa_node = found["spec"]["nodeName"], int(placed(found)["main"])
        where = {name: (node, i) for node, there in self.placed.items()
                 for name, (i, _) in there.items()}  # fmt: skip
        assert {where[name] for name in evicted} <= {(node, numa_node)}
        freed = [self.placed[node][name][1] for name in evicted]
        free = 16 - sum(n for i, n in self.placed[node].values() if i == numa_node)
        assert free + sum(freed) >= cpus, "room"
        assert not freed or free + sum(freed) - min(freed) < cpus, "one was evicted in vain"


@pytest.fixture
def crowd(there: Client, extender: Extender) -> Iterator[Crowd]:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    for name, value in PRIORITIES.items():
        there.ask("POST", classes, {"metadata": {"name": name}, "value": value})
    for node in CROWDED:
        there.add_node(node, labels={"numa-crowded": "yes"})
        publish_topology(there, node, 16, 16)
    try:
        yield Crowd(there)
    finally:
        there.delete_pods()
        paths = [f"{classes}/{name}" for name in PRIORITIES]
        paths += [f"{path}/{node}" for node in CROWDED for path in ("/api/v1/nodes", NRT)]
        for path in paths:
            there.request("DELETE", path)


FIFTEEN_PODS: Fill = [("numa-low", n % 2, 2) for n in range(15)]
"""Two CPUs are free: a pod of eight lacks six by the sum, and those of three pods of one node."""


def test_without_the_verb_pods_are_evicted_in_vain(crowd: Crowd, bed: KubeBed) -> None:
    """kube-scheduler evicts the least important three of each node: the sum suffices then."""
    pods = [("numa-low" if n < 3 else "numa-middle", n % 2, 2) for n in range(15)]
    crowd.fill(dict.fromkeys(CROWDED, pods))
    name, config = "numa-by-sums", {"leaseName": ""}
    with Extender(
        bed, config=config, port=19898, scheduler_port=10273, name=name, preempts=False
    ) as running:
        crowd.apply_important(8, scheduler=name)
        poll(lambda: len(crowd.count()) == 9, "three pods of each node evicted")
        found = crowd.client.pod("important")
        assert found is not None
        assert not bound(found), "four CPUs are free on each NUMA node"
        assert "victims selected" not in running.log()


def test_preemption_frees_one_numa_node(crowd: Crowd) -> None:
    crowd.fill(dict.fromkeys(CROWDED, FIFTEEN_PODS))
    crowd.preempts(8, "numa-high", starts=True)
    assert len(crowd.count()) == 3


def test_victims_are_found_where_kube_scheduler_has_none(crowd: Crowd, extender: Extender) -> None:
    """Four CPUs are free, two on each NUMA node: the sum suffices for four, no NUMA node does.

    Kubernetes 1.36 does not ask then. Later ones ask without victims (kubernetes#135486).
    """
    crowd.fill(dict.fromkeys(CROWDED, FIFTEEN_PODS[:14]))
    crowd.preempts(4, "numa-high", starts=False)
    asked = {node: {"Pods": [], "NumPDBViolations": 0} for node in CROWDED}
    question = {"Pod": crowd.client.pod("important"), "NodeNameToMetaVictims": asked}
    answer = json.loads(extender.get("/preempt", question))["NodeNameToMetaVictims"]
    names = {it["metadata"]["uid"]: it["metadata"]["name"] for it in crowd.client.pods()}
    victims = {node: [names[pod["UID"]] for pod in found["Pods"]] for node, found in answer.items()}
    assert {node: len(found) for node, found in victims.items()} == dict.fromkeys(CROWDED, 1)
    assert all(found[0].startswith(node) for node, found in victims.items())


def test_a_pod_says_that_it_waits_for_an_eviction(crowd: Crowd, numa: Numa) -> None:
    """Victims take their time to end; nobody else is evicted meanwhile."""
    crowd.fill(dict.fromkeys(CROWDED, FIFTEEN_PODS), grace_s=600)
    crowd.apply_important(8)
    poll(lambda: "waits for the eviction of" in numa("why", "important").stdout, "the reason")
    ending = [it for it in crowd.client.pods() if "deletionTimestamp" in it["metadata"]]
    assert len(ending) == 3
    for it in ending:
        path = f"/api/v1/namespaces/default/pods/{it['metadata']['name']}"
        crowd.client.request("DELETE", f"{path}?gracePeriodSeconds=0")

    def has_node() -> bool:
        crowd.count()
        return bound(crowd.client.pod("important") or {"spec": {}})

    poll(has_node, "a node")
    assert len(crowd.count()) == 3


def test_a_pod_says_that_no_eviction_helps(crowd: Crowd, numa: Numa) -> None:
    """Those of its own priority stay."""
    pods: Fill = [("numa-low", n % 2, 2) if n < 4 else ("numa-high", n % 2, 2) for n in range(16)]
    crowd.fill(dict.fromkeys(CROWDED, pods))
    crowd.apply_important(8)
    poll(lambda: "preemption cannot help" in numa("why", "important").stdout, "the reason")
    assert crowd.count() == set()


def random_fill(random: Random) -> Fill:
    """Pods until a few CPUs are free."""
    free, pods = [16, 16], Fill()
    while sum(free) > random.choice((0, 2, 4)):
        numa_node, cpus = random.randrange(2), random.choice((1, 2, 2, 4))
        if free[numa_node] >= cpus:
            free[numa_node] -= cpus
            pods.append((random.choice(("numa-low", "numa-low", "numa-middle")), numa_node, cpus))
    return pods


def may_start(pods: Fill, cpus: int, priority: str) -> bool:
    """Whether a node has room, or Kubernetes tries preemption and one of its NUMA nodes gets it.

    Kubernetes does not try it where the sum suffices already.
    """
    free = [16 - sum(n for _, i, n in pods if i == numa_node) for numa_node in (0, 1)]
    value = PRIORITIES[priority]
    for numa_node in (0, 1):
        lower = sum(n for name, i, n in pods if i == numa_node and PRIORITIES[name] < value)
        if free[numa_node] >= cpus or (sum(free) < cpus and free[numa_node] + lower >= cpus):
            return True
    return False


@pytest.mark.skipif(not FILLS, reason="set NRI_NUMA_PREEMPTION_FILLS to a number of fills")
@pytest.mark.parametrize("seed", range(FILLS))
def test_random_preemption(crowd: Crowd, seed: int) -> None:
    random = Random(seed)
    fills = {node: random_fill(random) for node in CROWDED}
    for priority in PRIORITIES:
        cpus = random.choice((6, 8, 12))
        crowd.fill(fills)
        starts = any(may_start(pods, cpus, priority) for pods in fills.values())
        crowd.preempts(cpus, priority, starts=starts)


# --- who only looks -----------------------------------------------------------------------------


PORT = 19906


@pytest.fixture
def verdicts(there: Client, bed: KubeBed) -> Iterator[Controller]:
    """A controller behind its Service, and users `asker` with the Role and `stranger` without."""
    install_controller(there)
    files = ("controller-page/role.yaml", "controller-verdicts/role.yaml")
    there.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))
    space, version = "nri-numa", "rbac.authorization.k8s.io/v1"
    service = {"name": "nri-numa-controller", "namespace": space}
    port = {"name": "http", "port": PORT}
    users = [{"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
             for name in ("asker", "stranger")]  # fmt: skip
    # The API server's proxy goes to addresses of pods of the Service's namespace alone.
    target = {"kind": "Pod", "name": "controller", "namespace": space}
    stand_in = pod("controller", nodeName=NODES[0], tolerations=[{"operator": "Exists"}])
    stand_in["metadata"]["namespace"] = space
    there.apply(stand_in)
    path = f"/api/v1/namespaces/{space}/pods/controller"
    status = {"podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}
    there.ask("PATCH", f"{path}/status", {"status": status})
    there.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": {"ports": [port]}},
        {
            "apiVersion": "v1", "kind": "Endpoints", "metadata": service,
            "subsets": [{"addresses": [{"ip": ADDRESS, "targetRef": target}], "ports": [port]}],
        },
        {
            "apiVersion": version, "kind": "RoleBinding", "subjects": users[:1],
            "metadata": {"name": "asker", "namespace": space},
            "roleRef": {"kind": "Role", "name": "nri-numa-controller-verdicts",
                        "apiGroup": "rbac.authorization.k8s.io"},
        },
        {
            "apiVersion": version, "kind": "ClusterRoleBinding", "subjects": users,
            "metadata": {"name": "askers"},
            "roleRef": {"kind": "ClusterRole", "name": "view",
                        "apiGroup": "rbac.authorization.k8s.io"},
        },
    )  # fmt: skip
    page = {"enabled": True, "allowAnonymous": True}
    with Controller(bed, PORT, host=ADDRESS, page=page, verdicts={"enabled": True}) as running:
        poll(lambda: running.ask("GET", "/v1/cluster")[0] == 200, "what the controller watches")
        yield running
    there.kubectl("delete", "service", service["name"], f"--namespace={space}")
    there.request("DELETE", f"{path}?gracePeriodSeconds=0")


def test_kubectl_shows_the_objects_where_no_controller_answers(there: Client, numa: Numa) -> None:
    publish_topology(there, NODES[1], 2, 6)
    done = numa("cluster")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no verdict: no controller answers: ")
    assert [f"{NODES[1]}/node-1", "6", "32Gi"] in [*map(str.split, done.stdout.splitlines())]
    there.apply(wanting("unanswered", 12, annotations=SINGLE))
    no_room(there, "unanswered", 12, 6)
    done = numa("why", "unanswered")
    assert (done.returncode, "no verdict: the controller does not answer" in done.stdout) == (
        1,
        True,
    )
    assert "at most 6 free for exclusive use" in done.stdout, "the scheduler's words"


def test_kubectl_has_the_controllers_verdict_by_the_role_and_the_uid(
    there: Client, verdicts: Controller, numa: Numa
) -> None:
    publish_topology(there, NODES[1], 2, 6)
    there.apply(wanting("asked", 12, annotations=SINGLE))
    no_room(there, "asked", 12, 6)
    reason = "2 nodes (numa-fake-a, numa-fake-b): needs 12 exclusive CPUs on one NUMA node; at most"
    done = poll(
        lambda: (
            told if "evaluated" in (told := numa("why", "asked", "--as=asker")).stdout else None
        ),
        "a verdict",
    )
    assert done.returncode == 1
    assert "The controller says: it fits on 0 of 2 nodes." in done.stdout
    assert reason in done.stdout
    assert "not evaluated: affinity" in done.stdout, "the node of the bed"
    done = numa("why", "asked", "--as=stranger")
    assert (
        "no verdict: the controller does not answer: Error from server (Forbidden)" in done.stdout
    )
    rows = [line.split()[:3] for line in numa("cluster", "--as=asker").stdout.splitlines()]
    assert [NODES[1], "2", "2+6"] in rows
    uid = there.ask("GET", "/api/v1/namespaces/default/pods/asked")["metadata"]["uid"]
    question = "/v1/verdicts/default/{}?uid={}"
    assert verdicts.ask("GET", question.format("asked", uid))[0] == 200
    for name, wrong in (("asked", uid[::-1]), ("missing", uid), ("missing", "none")):
        status, text = verdicts.ask("GET", question.format(name, wrong))
        assert (status, "there is no Pending pod" in text) == (404, True)


def test_the_cluster_as_the_controllers_page_shows_it(there: Client, bed: KubeBed) -> None:
    """Live: what a node publishes is there the next time somebody looks."""
    install_controller(there)
    there.kubectl("apply", f"--filename={MANIFESTS / 'controller-page/role.yaml'}")
    with Controller(bed, 19905, page={"enabled": True}) as controller:

        def fitting() -> list[str] | None:
            """Names of nodes that have six exclusive CPUs on one NUMA node."""
            status, text = controller.ask("GET", "/v1/cluster?cpus=6&fittingOnly=true")
            return [one["name"] for one in json.loads(text)["nodes"]] if status == 200 else None

        def wait(nodes: list[str]) -> None:
            poll(lambda: fitting() == nodes, f"{nodes} on the page")

        wait([])
        publish_topology(there, NODES[1], 2, 6)
        wait([NODES[1]])
        status, text = controller.ask("GET", "/cluster/")
        assert (status, "<html" in text) == (200, True)
        status, text = controller.ask("GET", "/v1/cluster?cpus=many")
        assert (status, "cpus is 'many'" in text) == (400, True)


def test_of_six_hundred_nodes_the_one_with_room_is_found(there: Client, extender: Extender) -> None:
    """kube-scheduler tries a sample of less than half, and others at its next attempts."""
    large, room = {"numa-large": "yes"}, {"cpu": "32", "memory": "64Gi", "pods": "110"}

    def make(number: int, *free: int) -> None:
        metadata = {"name": f"numa-large-{number:04}", "labels": large}
        status = {"capacity": room, "allocatable": room}
        there.ask("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})
        publish_topology(there, f"numa-large-{number:04}", *free)

    needle = wanting("needle", 6, annotations=SINGLE)
    needle["spec"]["nodeSelector"] = large
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: make(number, 4, 4), range(599)))
        make(599, 4, 6)  # the last one, at which kube-scheduler begins last
        poll(lambda: "nri_numa_scheduler_nodes 602.0" in extender.get("/metrics"), "all objects")
        there.apply(needle)
        found = there.wait_pod("needle", bound, "bound")
        assert found["spec"]["nodeName"] == "numa-large-0599"
    finally:
        there.delete_pods()
        # The API server deletes a collection one by one, which takes longer than a request may.
        paths = [f"{at}/numa-large-{n:04}" for at in ("/api/v1/nodes", NRT) for n in range(600)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: there.request("DELETE", path), paths))
