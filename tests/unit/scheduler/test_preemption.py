"""The verb preempt: which pods are evicted from which node, and what is remembered of it."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from nri_numa.config.sections import DRA
from nri_numa.kube.requests import Resource
from nri_numa.scheduler.preemption import MAX_LISTED_NODES
from nri_numa.scheduler.protocol import BadRequest
from tests.beds.cluster_objects import Document
from tests.beds.extender_bed import ExtenderBed
from tests.beds.objects import PREFIX, container, pod, single, topology
from tests.beds.stepped_loop import step

LOW = tuple(f"low-{n}" for n in range(15))


def low(name: str, numa_node: int, cpus: int = 2, *, node: str = "n1", **more: Any) -> Document:
    """A running pod of low priority on one NUMA node, as the extender bound it."""
    priority, labels = more.pop("priority", 0), more.pop("labels", {})
    keys = {"scheduled_numa_nodes": json.dumps({"main": str(numa_node)}), **more}
    document = single(cpus, name=name, node=node, phase="Running", **keys)
    document["metadata"]["labels"] = labels
    document["spec"]["priority"] = priority
    return document


def high(cpus: int = 8, name: str = "high", priority: int = 1000) -> Document:
    document = single(cpus, name=name)
    document["spec"]["priority"] = priority
    return document


def node_object(name: str = "n1", cpus: int = 32) -> Document:
    allocatable = {"cpu": str(cpus), "memory": "64Gi", "pods": "110"}
    return {"metadata": {"name": name}, "status": {"allocatable": allocatable}}


def with_priority(document: Document, priority: int = 0) -> Document:
    document["spec"]["priority"] = priority
    return document


def claiming(name: str, uses: list[Document]) -> Document:
    """A running pod whose container has the CPUs of a claim."""
    document = low(name, 1, 10)
    del document["metadata"]["annotations"][f"{PREFIX}/scheduled-numa-nodes"]
    document["spec"]["resourceClaims"] = [{"name": "numa", "resourceClaimName": f"of-{name}"}]
    document["spec"]["containers"][0]["resources"]["claims"] = uses
    return document


def claim(name: str, pod_uid: str, **changes: str) -> Document:
    """A claim of ten CPUs of NUMA node 1, and of one of NUMA node 0."""
    results = [
        {"request": request, "driver": "dra.numa.example.com", "pool": "n1", "device": device,
         "consumedCapacity": {"dra.numa.example.com/cpu": cpus}} | changes
        for request, device, cpus in (("big", "numa1", "10"), ("small", "numa0", "1"))
    ]  # fmt: skip
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": "0b1dfc2a-3a5e-4d6f-8a4b-2f6f5f0a7c11",
        },
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": pod_uid}],
        },
    }


def budget(allowed: int, **labels: str) -> Document:
    return {
        "metadata": {"name": "budget", "namespace": "default"},
        "spec": {"selector": {"matchLabels": labels}},
        "status": {"disruptionsAllowed": allowed},
    }


class PreemptionBed(ExtenderBed):
    """Nodes of 2 x 16 CPUs: pods of two CPUs by turns on both NUMA nodes, and two CPUs free."""

    def fill(self, *documents: Document, node: str = "n1") -> None:
        """These pods run on a node, and its object counts them."""
        self.cluster.put(Resource.NODES, node_object(node))
        self.cluster.put(Resource.PODS, *documents)
        self.count(node)

    def count(self, node: str = "n1") -> None:
        """Its object counts the pods that exist."""
        free, charged = [16, 16], []
        for document in self.cluster.all(Resource.PODS):
            metadata, spec = document["metadata"], document["spec"]
            text = metadata["annotations"].get(f"{PREFIX}/scheduled-numa-nodes", '{"main":"0"}')
            if spec.get("nodeName") == node:
                cpus = spec["containers"][0]["resources"]["requests"]["cpu"]
                free[int(json.loads(text)["main"])] -= int(cpus)
                charged.append((metadata["uid"], "main"))
        self.publish(topology(*free, name=node, charged=charged))

    def kill(self, *names: str, node: str = "n1") -> None:
        """Their node's object counts them a while longer."""
        for name in names:
            self.cluster.remove(Resource.PODS, name, "default")


@pytest.fixture
async def bed() -> PreemptionBed:
    bed = PreemptionBed()
    bed.fill(*(low(name, n % 2) for n, name in enumerate(LOW)))
    return bed


async def test_victims_of_one_numa_node_replace_those_of_the_sum(bed: PreemptionBed) -> None:
    """Three of seven on the NUMA node with two free CPUs; the proposed ones are on both."""
    answer = await bed.preempt(high(), n1=["low-0", "low-1", "low-2"])
    assert answer == {"n1": ["low-1", "low-11", "low-13"]}
    assert "nri_numa_scheduler_preemption_victims_changed_total 1.0" in bed.metrics()


async def test_proposed_victims_that_suffice_are_kept(bed: PreemptionBed) -> None:
    names = ["low-3", "low-5", "low-9"]
    assert await bed.preempt(high(), n1=names) == {"n1": sorted(names)}
    assert "nri_numa_scheduler_preemption_victims_changed_total 0.0" in bed.metrics()


async def test_an_empty_proposal_is_completed(bed: PreemptionBed) -> None:
    """The sum suffices, and no NUMA node does; Kubernetes then proposes nobody."""
    bed.cluster.put(Resource.NODES, node_object(cpus=64))
    assert await bed.preempt(high(), n1=[]) == {"n1": ["low-1", "low-11", "low-13"]}


async def test_lower_priorities_go_first_and_equal_ones_never(bed: PreemptionBed) -> None:
    bed.cluster.patch(Resource.PODS, "low-1", {"spec": {"priority": 1000}}, "default")
    for number in range(3, 15, 2):
        changed = {"spec": {"priority": 100}} if number < 11 else {"spec": {"priority": -1}}
        bed.cluster.patch(Resource.PODS, f"low-{number}", changed, "default")
    first_numa_node = set(LOW[::2])
    (victims,) = (await bed.preempt(high(), n1=["low-0"])).values()
    assert len(victims) == 4, "two of priority -1 on the other NUMA node need one of 100"
    assert first_numa_node.issuperset(victims)
    bed.fill(low("large", 1, 16, priority=1000, node="n2"), low("small", 0, node="n2"), node="n2")
    assert await bed.preempt(high(16, "h"), n1=["low-0"], n2=["small"]) == {"n2": ["small"]}


async def test_budgets_are_kept_where_other_pods_suffice(bed: PreemptionBed) -> None:
    bed.cluster.put(Resource.DISRUPTION_BUDGETS, budget(1, app="db"))
    for number in (1, 3, 5, 7):
        labels = {"metadata": {"labels": {"app": "db"}}}
        bed.cluster.patch(Resource.PODS, f"low-{number}", labels, "default")
    names = ["low-1", "low-3", "low-5"]
    (victims,) = (await bed.preempt(high(), n1=names)).values()
    assert len(set(victims) & set(names)) <= 1
    assert len(victims) == 3


async def test_without_the_right_to_read_budgets_victims_stay(bed: PreemptionBed) -> None:
    bed.cluster.fail(403, "forbidden", on="poddisruptionbudgets")
    assert await bed.preempt(high(), n1=["low-0", "low-1", "low-2"]) == {}
    assert await bed.preempt(high(), n1=["low-1", "low-3", "low-5"]) != {}


async def test_pods_of_which_nothing_is_known_give_nothing_back(bed: PreemptionBed) -> None:
    """A movable pod may have moved since its annotation was written; the publisher follows."""
    bed.cluster.remove(Resource.PODS, "low-14", "default")
    for number in range(14):
        changed: dict[str, str | None] = {f"{PREFIX}/movable": "true"}
        if number % 2:
            changed = {f"{PREFIX}/scheduled-numa-nodes": None}
        annotations = {"metadata": {"annotations": changed}}
        bed.cluster.patch(Resource.PODS, f"low-{number}", annotations, "default")
    assert await bed.preempt(high(), n1=["low-0", "low-1"]) == {}
    for number in (0, 2, 4, 6):
        text = json.dumps({"main": {"cpus": "0-1", "mems": "0"}})
        annotations = {"metadata": {"annotations": {f"{PREFIX}/assigned": text}}}
        bed.cluster.patch(Resource.PODS, f"low-{number}", annotations, "default")
    assert await bed.preempt(high(), n1=["low-0"]) == {"n1": ["low-0", "low-2", "low-4", "low-6"]}


async def test_a_pod_that_no_object_counts_gives_back_its_reservation() -> None:
    bed = PreemptionBed()
    bed.cluster.put(Resource.NODES, node_object())
    bed.publish(topology(12, 2, charged=[]))
    assert await bed.filter_and_bind(with_priority(single(12, name="bound"))) == ""
    assert await bed.preempt(high(14), n1=["bound"]) == {}
    assert await bed.preempt(high(12, "h"), n1=["bound"]) == {"n1": ["bound"]}
    bed.publish(topology(2, 2, 2, charged=[]))
    answer = await bed.preempt(high(12, "i", 1001), n1=["bound"])
    assert answer == {}, "its charge is of two NUMA nodes, and the node has three by now"


async def test_a_pod_of_one_scope_gives_back_all_or_nothing() -> None:
    bed = PreemptionBed()
    document = pod(
        *(container(name, "4", "1Gi") for name in "ab"),
        name="both", node="n1", phase="Running", scheduled_numa_nodes='{"a":"0","b":"0"}',
        scope="pod", policy="single-numa-node", cpus="exclusive",
    )  # fmt: skip
    bed.cluster.put(Resource.NODES, node_object(cpus=12))
    bed.cluster.put(Resource.PODS, with_priority(document))
    bed.publish(topology(2, 2, charged=[("uid-both", "a")]))
    assert await bed.preempt(high(), n1=["both"]) == {}
    bed.publish(topology(2, 2, charged=[("uid-both", "a"), ("uid-both", "b")]))
    assert await bed.preempt(high(), n1=["both"]) == {"n1": ["both"]}


@pytest.mark.parametrize(("movable_cpus", "victim_count"), [(0, 4), (4, 2)])
async def test_moves_count_with_victims(movable_cpus: int, victim_count: int) -> None:
    """Movable CPUs leave the NUMA node where the victims end."""
    bed = PreemptionBed()
    bed.fill(*(low(f"low-{n}", n % 2) for n in range(14)))
    bed.cluster.put(Resource.NODES, node_object(cpus=64))
    moves = {f"{PREFIX}/exclusive-cpus-after-moves": str(2 + movable_cpus)}
    charged = [(f"uid-low-{n}", "main") for n in range(14)]
    bed.publish(topology(2, 2, zone=moves, charged=charged))
    assert len((await bed.preempt(high(10), n1=[]))["n1"]) == victim_count


async def test_pods_that_end_anyway_are_not_victims(bed: PreemptionBed) -> None:
    ending = {"metadata": {"deletionTimestamp": "2026-11-30T00:00:00Z"}}
    for name in ("low-1", "low-3", "low-5"):
        bed.cluster.patch(Resource.PODS, name, ending, "default")
    assert await bed.preempt(high(), n1=["low-1", "low-3", "low-5"]) == {}, "it fits without them"
    assert await bed.preempt(high(10), n1=["low-1", "low-7"]) == {"n1": ["low-7"]}


@pytest.mark.parametrize(
    ("uses", "changes", "victims"),
    [
        ([{"name": "numa"}], {}, ["claimed"]),
        ([{"name": "numa", "request": "big"}], {}, ["claimed"]),
        ([{"name": "numa", "request": "small"}], {}, None),
        ([], {}, None),
        ([{"name": "numa"}], {"driver": "gpu.example.com"}, None),
        ([{"name": "numa"}], {"pool": "n2"}, None),
        ([{"name": "numa"}], {"device": "card0"}, None),
    ],
)
async def test_a_victim_gives_back_the_cpus_of_its_claims(
    uses: list[Document], changes: Document, victims: list[str] | None
) -> None:
    """Its container is on the NUMA node that the claim names; others have too few CPUs there."""
    bed = PreemptionBed(dra=DRA(enabled=True))
    bed.fill(*(low(f"low-{n}", n % 2, 1) for n in range(4)), low("large", 0, 12, priority=1000))
    document = claiming("claimed", uses)
    bed.cluster.put(Resource.PODS, document)
    bed.cluster.put(Resource.CLAIMS, claim("of-claimed", document["metadata"]["uid"], **changes))
    charged = [("uid-low-1", "main"), (document["metadata"]["uid"], "main")]
    bed.publish(topology(2, 2, charged=charged))
    answer = await bed.preempt(high(12), n1=["claimed"])
    assert answer == ({"n1": victims} if victims else {})
    bed.publish(topology(2, 2, charged=charged[:1]))
    assert await bed.preempt(high(12, "later"), n1=["claimed"]) == {}, "its CPUs are free already"


async def test_claims_are_listed_for_pods_that_use_them_and_nothing_is_known_without() -> None:
    bed = PreemptionBed(dra=DRA(enabled=True))
    bed.fill(*(low(f"low-{n}", n % 2) for n in range(14)))
    assert await bed.preempt(high(), n1=["low-0"]) != {}
    assert not [r for r in bed.cluster.requests if "resourceclaims" in r.text]
    bed.cluster.put(Resource.PODS, claiming("claimed", [{"name": "numa"}]))
    bed.cluster.fail(404, "the server could not find the requested resource", on="resourceclaims")
    assert await bed.preempt(high(name="h"), n1=["low-0"]) != {}, "others make room"
    requests = [r.path for r in bed.cluster.requests if "resourceclaims" in r.text]
    assert requests == ["/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"]


async def test_a_publisher_that_lists_no_containers() -> None:
    """Its numbers may count the victims until they change."""
    bed = PreemptionBed()
    bed.fill(*(low(name, n % 2) for n, name in enumerate(LOW)))
    bed.publish(topology(0, 2))
    victims = ["low-1", "low-11", "low-13"]
    assert await bed.preempt(high(), n1=["low-1"]) == {"n1": victims}
    bed.kill(*victims)
    assert await bed.preempt(high(), n1=["low-0"]) == {}
    bed.publish(topology(0, 8))
    assert (await bed.filter(high(2, "other", 0), "n1"))["NodeNames"] == []
    assert (await bed.filter(high(), "n1"))["NodeNames"] == ["n1"]


async def test_a_victim_that_another_filter_needs_stays(bed: PreemptionBed) -> None:
    """Sums explain three of the four; the other one has a port that the pod needs, say."""
    names = ["low-0", "low-1", "low-3", "low-5"]
    (victims,) = (await bed.preempt(high(), n1=names)).values()
    assert victims == sorted(names), "each of them may be the one"


# --- what is remembered ---------------------------------------------------------------------------


async def test_nobody_is_evicted_twice_for_one_pod(bed: PreemptionBed) -> None:
    names = ["low-1", "low-11", "low-13"]
    assert await bed.preempt(high(), n1=["low-0", "low-1", "low-2"]) == {"n1": names}
    bed.kill(*names)
    assert await bed.preempt(high(), n1=["low-0"]) == {}, "the object is old"
    answer = await bed.filter(high(), "n1")
    waits = "waits for the eviction of default/low-1, default/low-11 and 1 more"
    assert answer["FailedNodes"] == {"n1": waits}
    bed.count()
    assert (await bed.filter(high(), "n1"))["NodeNames"] == ["n1"]
    assert await bed.filter_and_bind(high()) == ""
    await tick(bed, 120)
    assert "nri_numa_scheduler_pods_evicted_in_vain_total 0.0" in bed.metrics()


async def test_nobody_is_evicted_after_the_node_is_free(bed: PreemptionBed) -> None:
    """The pod was filtered before the victims had ended, and is asked about after it."""
    bed.fill(*(low(f"other-{n}", n % 2, node="n2") for n in range(15)), node="n2")
    proposed = {"n1": ["low-0"], "n2": ["other-0"]}
    victims = (await bed.preempt(high(), **proposed))["n1"]
    nominated = {**high(), "status": {"nominatedNodeName": "n1"}}
    await bed.filter(nominated, "n1", "n2")
    bed.kill(*victims)
    bed.count()
    assert await bed.preempt(nominated, n2=["other-0"]) == {}
    bed.fill(low("newcomer", 1, 6), node="n1")
    assert set(await bed.preempt(nominated, n2=["other-0"])) == {"n2"}


async def test_nobody_is_evicted_while_a_victim_has_its_reservation(bed: PreemptionBed) -> None:
    """No object has counted the victim yet; its end is known when its pod is read again."""
    bed.cluster.put(Resource.NODES, node_object("n2"))
    bed.publish(topology(12, 2, name="n2", charged=[]))
    assert await bed.filter_and_bind(with_priority(single(12, name="bound")), "n2") == ""
    victims = await bed.preempt(high(), n1=["low-0"], n2=["bound"])
    assert victims["n2"] == ["bound"]
    nominated = {**high(), "status": {"nominatedNodeName": "n2"}}
    await bed.filter(nominated, "n1", "n2")
    bed.kill("bound")
    assert await bed.preempt(nominated, n1=["low-0"]) == {}


async def test_after_a_minute_it_is_tried_again(bed: PreemptionBed) -> None:
    victims = await bed.preempt(high(), n1=["low-1"])
    assert await bed.preempt(high(), n1=["low-1"]) == {}
    await tick(bed, 61)
    assert await bed.preempt(high(), n1=["low-1"]) == victims


async def test_what_victims_free_is_reserved_from_less_important_pods(bed: PreemptionBed) -> None:
    bed.kill(*(await bed.preempt(high(), n1=["low-1"]))["n1"])
    bed.count()
    for priority, names in ((0, []), (1000, []), (1001, ["n1"])):
        other = high(2, "other", priority)
        assert (await bed.filter(other, "n1"))["NodeNames"] == names
    assert (await bed.filter(high(), "n1"))["NodeNames"] == ["n1"]
    for _ in range(2):
        await tick(bed, 61)
    assert (await bed.filter(high(2, "other", 0), "n1"))["NodeNames"] == ["n1"]
    assert "nri_numa_scheduler_pods_evicted_in_vain_total 3.0" in bed.metrics()


async def test_two_pods_get_different_nodes(bed: PreemptionBed) -> None:
    """A node that may be the first pod's is not the second one's until its choice is known."""
    bed.fill(*(low(f"b{n}", n % 2, node="n2") for n in range(15)), node="n2")
    both = {"n1": ["low-1"], "n2": ["b1"]}
    assert set(await bed.preempt(high(name="a"), **both)) == {"n1", "n2"}
    assert await bed.preempt(high(name="b"), **both) == {}
    ending = {"metadata": {"deletionTimestamp": "2026-11-30T00:00:00Z"}}
    bed.cluster.patch(Resource.PODS, "low-1", ending, "default")
    answer = await bed.preempt(high(name="b"), **both)
    assert answer["n2"] == ["b1", "b11", "b13"]
    assert not set(answer.get("n1", ())) & {"low-1", "low-11", "low-13"}, "the first pod's"


async def test_why_preemption_cannot_help(bed: PreemptionBed) -> None:
    for name in LOW:
        bed.cluster.patch(Resource.PODS, name, {"spec": {"priority": 1000}}, "default")
    assert await bed.preempt(high(), n1=["low-1"]) == {}
    (text,) = (await bed.filter(high(), "n1"))["FailedNodes"].values()
    reason = "needs 8 exclusive CPUs on one NUMA node; at most 2 free for exclusive use"
    rest = f"preemption cannot help: without the pods of lower priority it {reason}"
    assert text == f"{reason}; {rest}"
    assert await bed.preempt(high(), n1=["low-1"]) == {}
    (event,) = bed.cluster.all(Resource.EVENTS)
    assert (event["reason"], event["note"]) == ("PreemptionCannotHelp", rest)
    assert (event["regarding"]["name"], event["type"]) == ("high", "Normal")


async def test_the_victims_are_named_in_an_event(bed: PreemptionBed) -> None:
    """The condition has the sums of kube-scheduler until the pod is tried again."""
    for node in ("n2", "n3", "n4", "n5"):
        bed.fill(*(low(f"{node}-{n}", n % 2, node=node) for n in range(15)), node=node)
    await bed.preempt(high(), n1=["low-1"], **{n: [f"{n}-1"] for n in ("n2", "n3", "n4", "n5")})
    (event,) = bed.cluster.all(Resource.EVENTS)
    assert event["reason"] == "WaitsForEviction"
    names = ("default/low-1, default/low-11", "default/n2-1, default/n2-11",
             "default/n3-1, default/n3-11")  # fmt: skip
    texts = [f"{name} and 1 more from node n{n}" for n, name in enumerate(names, 1)]
    note = ", or of ".join(texts)
    assert event["note"] == f"waits for the eviction of {note}, or of pods of 2 other nodes"


async def test_without_the_right_to_create_events_victims_are_answered(bed: PreemptionBed) -> None:
    bed.cluster.fail(403, "forbidden", on="events")
    assert await bed.preempt(high(), n1=[]) == {"n1": ["low-1", "low-11", "low-13"]}


# --- bad questions --------------------------------------------------------------------------------


async def test_unknown_nodes_and_victims(bed: PreemptionBed) -> None:
    answer = await bed.preempt(high(), n1=["never-seen", "low-1"], nowhere=["low-1"])
    assert answer == {"n1": ["low-1", "low-11", "low-13"]}
    ordinary = {"metadata": {"name": "o", "uid": "uid-o"}, "spec": {"containers": [{"name": "c"}]}}
    assert await bed.preempt(ordinary, nowhere=["x"], n1=[]) == {"nowhere": ["x"]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"Pod": {}}, "set nodeCacheCapable: true"),
        ({"NodeNameToMetaVictims": {}}, "Pod is not there"),
        ({"Pod": {}, "NodeNameToMetaVictims": []}, "no mapping"),
        ({"Pod": {}, "NodeNameToMetaVictims": {"n1": {"Pods": [{}]}}}, "expected Pods with UID"),
    ],
)
async def test_malformed_questions(bed: PreemptionBed, body: Mapping[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        await bed.extender.preempt(json.dumps(body).encode())


async def test_lists_that_are_late_leave_their_node_out(bed: PreemptionBed) -> None:
    bed.fill(*(low(f"b{n}", n % 2, node="n2") for n in range(15)), node="n2")
    gate = bed.cluster.hold("nodeName=n2")
    asked = asyncio.create_task(bed.preempt(high(), n1=["low-1"], n2=["b1"]))
    await step(3)
    assert set(await asked) == {"n1"}
    gate.set()


async def test_five_hundred_candidates(bed: PreemptionBed) -> None:
    """Of 500 nodes with 30 pods each those of 32 are listed, and as many read as work allows."""
    names = [f"n{n}" for n in range(500)]
    for name in names:
        pods = [low(f"{name}-{n}", n % 2, 1, node=name, labels={"app": str(n)},
                    priority=n % 7) for n in range(30)]  # fmt: skip
        bed.cluster.put(Resource.NODES, node_object(name))
        bed.cluster.put(Resource.PODS, *pods)
        bed.publish(topology(1, 1, name=name))
    victims = {name: [f"{name}-{n}" for n in range(30)] for name in names}
    await bed.filter(high(), *names)
    bed.cluster.requests.clear()
    answer = await bed.preempt(high(), **victims)
    assert 16 <= len(answer) <= MAX_LISTED_NODES
    budgets_and_event = 2
    assert len(bed.cluster.requests) == 2 * MAX_LISTED_NODES + budgets_and_event


async def tick(bed: ExtenderBed, seconds: float) -> None:
    """Time passes, and what is due happens."""
    await step(seconds)
    bed.extender.evictions.expire_evictions()
