"""Why a Pending pod fits nowhere: what an answer says, who gets one, and what it may cost."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.config.sections import VerdictsSection
from nri_numa.controller import verdicts
from nri_numa.controller.service import LEASE_NAME
from nri_numa.controller.verdicts import PodVerdicts
from nri_numa.kube.requests import Resource
from nri_numa.scheduler import candidates
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Verdict, evaluate_fit
from nri_numa.web.protocol import APIError, HTTPRequest
from tests.beds.controller_bed import ControllerBed
from tests.beds.objects import PREFIX, container, pod, single, topology
from tests.beds.stepped_loop import step, until


def node(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"zone": "secret-label"}}, "spec": spec}


TAINT = {"key": "team", "value": "secret-value", "effect": "NoSchedule"}
NOT_READY = {f"{PREFIX}/agent-state": "not-ready"}
NODES: Mapping[str, tuple[Any, Any]] = {
    "a": (node("a"), topology(4, 8, name="a")),
    "b": (node("b"), topology(2, 2, name="b")),
    "c": (node("c"), topology(1, 6, name="c")),
    "cordoned": (node("cordoned", unschedulable=True), topology(16, name="cordoned")),
    "mute": (node("mute"), None),
    "resting": (node("resting"), topology(16, name="resting", attributes=NOT_READY)),
    "tainted": (node("tainted", taints=[TAINT]), topology(16, name="tainted")),
    "unreadable": (node("unreadable"), topology(16, name="unreadable") | {"zones": [17]}),
}


class Questions:
    """Questions about one cluster, with a clock that tests move at each reading."""

    def __init__(self, nodes: Mapping[str, tuple[Any, Any]] = NODES) -> None:
        config, self.now, self.tick = AgentConfig(), 0.0, 0.0
        self.cluster = ClusterState(PREFIX)
        for name, (document, published) in nodes.items():
            self.cluster.update_node(name, document)
            if published is not None:
                self.cluster.update_topology(name, published, 0.0)
        cache = VerdictCache(self.cluster, config.strategy)
        self.pods = PodVerdicts(self.cluster, cache, PodReader(config), (), self.clock)
        (self.route,) = self.pods.http_routes()

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    async def ask(self, name: str = "p", *, uid: str = "", target: str = "") -> Any:
        target = target or f"default/{name}?uid={uid or 'uid-' + name}"
        return await self.route.answer(  # type: ignore[misc]
            HTTPRequest.from_method_and_target("GET", f"/v1/verdicts/{target}".encode())
        )

    async def document(self, asked: dict[str, Any]) -> Any:
        self.now += 1
        self.pods.on_pod(asked)
        body = (await self.ask(asked["metadata"]["name"])).body
        assert len(body) <= verdicts.MAX_ANSWER_BYTES
        return json.loads(body)

    async def rejected(self, name: str = "p", **more: str) -> APIError:
        with pytest.raises(APIError) as caught:
            await self.ask(name, **more)
        return caught.value


async def test_an_answer_has_the_best_node_and_why_not_the_others() -> None:
    found = await Questions().document(single(6))
    assert found == {
        "namespace": "default", "pod": "p", "uid": "uid-p", "phase": "Pending", "node": "",
        "requests": [{"container": "main", "exclusiveCpus": 6, "sharedMilli": 0,
                      "amounts": {"memory": 1 << 30}, "policy": "single-numa-node"}],
        "verdict": "feasible", "invalidReason": "", "feasibleNodes": 2, "evaluatedNodes": 3,
        "bestNode": "a", "numaNodes": {"main": "1"}, "afterMoves": False,
        "reasons": [{
            "message": "needs 6 exclusive CPUs on one NUMA node; at most 2 free for exclusive use",
            "retryCondition": "room", "nodes": 1, "examples": ["b"],
        }],
        "excluded": [
            {"reason": "agent-not-ready", "nodes": 1, "examples": ["resting"]},
            {"reason": "cordoned", "nodes": 1, "examples": ["cordoned"]},
            {"reason": "no-topology", "nodes": 1, "examples": ["mute"]},
            {"reason": "taint", "nodes": 1, "examples": ["tainted"]},
            {"reason": "unreadable-topology", "nodes": 1, "examples": ["unreadable"]},
        ],
        "notEvaluated": ["sums of requests", "volumes", "pod affinity"], "stale": "",
    }  # fmt: skip
    assert "secret" not in json.dumps(found)


def rejected(**keys: str) -> dict[str, Any]:
    made = pod(container(cpu="6"), node="b", policy="single-numa-node", cpus="exclusive", **keys)
    said = "NotEnoughCPUs: pod default/p, container main: needs 6 exclusive CPUs"
    waiting = {"reason": "CreateContainerError", "message": said}
    made["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
    return made


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            single(12),
            {"verdict": "infeasible", "feasibleNodes": 0, "evaluatedNodes": 3, "bestNode": ""},
        ),
        (single(17), {"verdict": "infeasible", "feasibleNodes": 0, "evaluatedNodes": 3}),
        (pod(container()), {"verdict": "unconstrained", "evaluatedNodes": 0, "excluded": []}),
        (
            pod(container(), policy="often"),
            {"verdict": "invalid", "evaluatedNodes": 0, "reasons": []},
        ),
        (
            rejected(),
            {
                "verdict": "rejected-by-node",
                "node": "b",
                "feasibleNodes": 2,
                "evaluatedNodes": 2,
                "bestNode": "a",
            },
        ),
    ],
)
async def test_each_kind_of_verdict(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    found = await Questions().document(asked)
    assert expected.items() <= found.items()
    assert ("policy" in found["invalidReason"]) == (found["verdict"] == "invalid")
    never = {one["retryCondition"] for one in found["reasons"]} == {"never"}
    assert never == (asked == single(17))


async def test_a_pod_goes_where_its_spec_allows() -> None:
    tolerant = single(12)
    tolerant["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    questions = Questions()
    assert (await questions.document(tolerant))["bestNode"] == "tainted"
    picky = single(2, name="picky")
    picky["spec"]["nodeSelector"] = {"zone": "elsewhere"}
    found = await questions.document(picky)
    assert (found["evaluatedNodes"], found["verdict"]) == (0, "infeasible")
    assert {"reason": "affinity", "nodes": 6, "examples": ["a", "b", "c", "mute", "resting"]} in (
        found["excluded"]
    )


async def test_only_who_knows_the_uid_gets_an_answer() -> None:
    """A pod that does not exist and one with another UID are told apart by no word."""
    questions = Questions()
    questions.pods.on_pod(single(6))
    questions.pods.on_pod(single(6, name="other"))
    wrong, missing, others = (
        await questions.rejected(uid="x"),
        await questions.rejected("none", uid="x"),
        await questions.rejected(uid="uid-other"),
    )
    assert {one.status for one in (wrong, missing, others)} == {404}
    assert wrong.message.replace("/p ", "/none ") == missing.message
    assert others.message.replace("uid-other", "x") == wrong.message
    questions.pods.on_pod_removed("uid-p")
    assert (await questions.rejected()).status == 404


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("default/p", "uid is '', expected the pod's metadata.uid"),
        ("default/p?uid=" + "u" * 129, "of at most 128 characters"),
        ("Default/p?uid=u", "namespace is 'Default', expected a name of Kubernetes"),
        ("default/%1b%5b?uid=u", "pod is '\\x1b[', expected a name of Kubernetes"),
    ],
)
async def test_what_is_no_question_is_said(target: str, problem: str) -> None:
    error = await Questions().rejected(target=target)
    assert (error.status, error.reason) == (400, "BadQuery")
    assert problem in error.message


async def test_one_question_at_a_time_and_five_a_second() -> None:
    questions = Questions()
    questions.pods.on_pod(single(6))
    begun = asyncio.create_task(questions.ask())
    await asyncio.sleep(0)
    busy = await questions.rejected()
    assert (busy.status, busy.headers) == (429, [("Retry-After", "1")])
    assert (await begun).status == 200
    for _ in range(verdicts.MAX_QUESTIONS_PER_S - 1):
        assert (await questions.ask()).status == 200
    assert (await questions.rejected()).status == 429
    questions.now += 1
    assert (await questions.ask()).status == 200


async def test_after_its_time_no_further_node_is_judged() -> None:
    questions = Questions({f"n{i}": (node(f"n{i}"), topology(2, name=f"n{i}")) for i in range(400)})
    questions.tick = verdicts.MAX_ANSWER_S / 2
    found = await questions.document(single(6))
    assert (found["evaluatedNodes"], found["verdict"]) == (100, "infeasible")
    assert found["stale"] == "300 nodes were not evaluated within 0.8 s"


async def test_five_thousand_nodes_are_judged_by_room(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[NodeResources] = []

    def evaluate(room: NodeResources, *more: Any) -> Verdict:
        judged.append(room)
        return evaluate_fit(room, *more)

    monkeypatch.setattr(candidates, "evaluate_fit", evaluate)
    questions = Questions(
        {f"n{i:04}": (node(f"n{i:04}"), topology(i % 5, 3, name=f"n{i:04}")) for i in range(5000)}
    )
    found = await questions.document(single(6))
    assert (found["evaluatedNodes"], found["feasibleNodes"], found["stale"]) == (5000, 0, "")
    (reason,) = found["reasons"]
    assert (reason["nodes"], len(reason["examples"])) == (5000, verdicts.MAX_EXAMPLE_NODES)
    assert len(judged) == 5


async def test_the_largest_answer_stays_below_its_limit() -> None:
    names = [f"example.com/{'d' * 50}-{i}" for i in range(60)]
    large = single(1)
    large["spec"]["containers"] = [
        container(f"main-{i:02}" + "c" * 50, cpu="2", memory="1Gi") for i in range(60)
    ]
    for one in large["spec"]["containers"]:
        one["resources"]["limits"] |= dict.fromkeys(names, "1")
    found = await Questions().document(large)
    assert (found["verdict"], found["requests"]) == ("infeasible", [])


async def test_pods_beyond_the_limit_have_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "MAX_PENDING_PODS", 1)
    questions = Questions()
    questions.pods.on_pod(single(6))
    questions.pods.on_pod(single(6, name="second"))
    assert (await questions.rejected("second")).status == 404
    assert (await questions.ask()).status == 200


async def test_every_replica_answers_once_it_has_read_the_cluster(tmp_path: Path) -> None:
    bed = ControllerBed(tmp_path, verdicts=VerdictsSection(enabled=True))
    bed.cluster.put(Resource.TOPOLOGIES, topology(8, 4, name="n1"))
    bed.cluster.put(Resource.PODS, single(6))
    path = "/v1/verdicts/default/p?uid=uid-p"
    async with bed.running():
        await until(lambda: bed.service.lease.is_leader)

        async def answers() -> None:
            while (answer := await bed.get(path))[0] == 503:
                await step()
            assert (answer[0], json.loads(answer[1])["bestNode"]) == (200, "n1"), answer

        await answers()
        assert (await bed.get(f"{path}&x=1"))[0] == 400
        holder = {"spec": {"holderIdentity": "other"}}
        bed.cluster.patch(Resource.LEASES, LEASE_NAME, holder, "default")
        await until(lambda: not bed.service.lease.is_leader)
        await answers()
