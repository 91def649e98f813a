"""Nodes that are objects only, each with the real engine behind it: agents without machines.

A `Fleet` does for every node what kubelet, runtime and agent do together: it sees a pod that was
bound to the node, has the engine decide, and writes the pod's status. A refused container is tried
again every 10 to 15 seconds, as a kubelet does it, and nobody tells the scheduler.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from nri_numa.cluster.pods import container_of, pod_sandbox
from nri_numa.engine.accounting import max_exclusive_by_node
from nri_numa.engine.admit import admit, forget_pod, release_container
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.simulate.manifests import read_manifests_from_text
from tests.beds.kube.client import Client, JsonObject, waiting_reason

SECONDS = "bench.example.com/seconds"
"""Annotation: how long a pod runs."""
RETRY_S = (10.0, 15.0)
"""A kubelet's pause before it creates a refused container again."""


class Agent:
    """One node's agent: the engine and its state.

    Args:
        machine: of the node, with the settings of its agent.

    Attributes:
        away: it was killed; what runs goes on, and nothing starts or ends.
    """

    def __init__(self, machine: NodeModel) -> None:
        self.machine = machine
        self.state = NodeState()
        self.away = False
        self._held: dict[str, tuple[str, list[str]]] = {}
        self._room: tuple[NodeState, int] | None = None

    def start(self, document: JsonObject) -> str:
        """Place every container of a pod; the sentence of the refusal, or nothing."""
        (workload,) = read_manifests_from_text(json.dumps(_bare(document))).workloads
        (manifest,) = workload.pods
        manifest = replace(manifest, uid=document["metadata"]["uid"])
        sandbox, state, made = pod_sandbox(manifest), self.state, []
        total = self.machine.total_memory_bytes
        for one in manifest.containers:
            container = container_of(manifest, one, total)
            decision = admit(NodeSnapshot(self.machine, state), sandbox, container)
            if not isinstance(decision, Admitted):
                return decision.message
            state = decision.state
            made.append(container.id)
        self.state = state
        self._held[document["metadata"]["uid"]] = (sandbox.uid, made)
        return ""

    def end(self, uid: str) -> None:
        """The pod ended."""
        sandbox, made = self._held.pop(uid)
        for container in made:
            self.state = release_container(NodeSnapshot(self.machine, self.state), container).state
        self.state = forget_pod(NodeSnapshot(self.machine, self.state), sandbox).state

    def zones(self) -> list[dict[str, int]]:
        """What is left on each NUMA node: whole CPUs, and bytes of memory."""
        machine, state = self.machine, self.state
        cpus, memory = (
            NodeSnapshot(machine, state).free_cpu_milli,
            NodeSnapshot(machine, state, MeasuredFree()).free_memory,
        )
        return [{"cpu": cpus[i] // 1000, "memory": memory[i]} for i in sorted(cpus)]

    def granted(self) -> dict[str, list[int]]:
        """Exclusive CPUs of each pod that runs, by UID."""
        found: dict[str, list[int]] = {}
        for each in self.state.allocations.values():
            if each.exclusive:
                found.setdefault(each.pod_uid, []).extend(each.cpus)
        return found

    @property
    def room(self) -> int:
        """The most exclusive CPUs that one more container could have on one NUMA node."""
        if self._room is None or self._room[0] is not self.state:
            self._room = (
                self.state,
                max(max_exclusive_by_node(NodeSnapshot(self.machine, self.state)).values()),
            )
        return self._room[1]

    @property
    def holds(self) -> frozenset[str]:
        """UIDs of the pods that run."""
        return frozenset(self._held)


def _bare(document: JsonObject) -> JsonObject:
    """What the engine may know of a pod, without what the API server added."""
    metadata = document["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "annotations") if key in metadata}
    containers = [
        {key: one[key] for key in ("name", "image", "resources") if key in one}
        for one in document["spec"]["containers"]
    ]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": kept, "spec": {"containers": containers}}


@dataclass(slots=True, kw_only=True)
class Life:
    """What became of one pod; times in seconds of a clock that only grows.

    Attributes:
        cpus: it asks for.
        bound: seen with a node for the first time.
        roomy: the longest time in which it had no node although at every look some node had room
            for it, nodes to which somebody is on the way not counted.
        refusals: how often its node refused it.
        reason: why it has no node, as kube-scheduler said it last.
    """

    created: float
    cpus: int = 0
    bound: float | None = None
    roomy: float = 0.0
    room_since: float | None = None
    placed: float | None = None
    ended: float | None = None
    rejections: int = 0
    next_try: float = 0.0
    node: str = ""
    sentence: str = field(default="", repr=False)
    reason: str = field(default="", repr=False)


class Fleet:
    """Plays all nodes that are objects, and looks at the pods of others.

    Args:
        client: of the API server.
        agents: by the names of their nodes.
        changed: told the node whose room changed.
        look: told, before anything happens, of the pods that have a node and did not end.
        seed: of the pauses.
    """

    def __init__(
        self,
        client: Client,
        agents: Mapping[str, Agent],
        *,
        changed: Callable[[str], object] = lambda node: None,
        look: Callable[[list[JsonObject]], object] = lambda pods: None,
        seed: int = 0,
    ) -> None:
        self._client = client
        self._agents = agents
        self._changed, self._look = changed, look
        self._random = random.Random(seed)
        self.lives: dict[str, Life] = {}

    def create(self, document: JsonObject) -> None:
        """Hand a pod to the API server."""
        name = document["metadata"]["name"]
        self.lives[name] = Life(created=time.monotonic(), cpus=cpus_of(document))
        self._client.ask("POST", "/api/v1/namespaces/default/pods", document)

    def step(self) -> None:
        """Look at all pods once, and do what their nodes do."""
        there, without = [], []
        for document in self._client.ask("GET", "/api/v1/namespaces/default/pods")["items"]:
            life = self.lives.get(document["metadata"]["name"])
            if life is None or life.ended is not None:
                continue
            if not document["spec"].get("nodeName"):
                without.append((document, life))
                continue
            life.bound = life.bound or time.monotonic()
            there.append((document, life))
        self._look([document for document, _ in there])
        coming = {one["spec"]["nodeName"] for one, life in there if life.placed is None}
        self._wait(without, coming)
        for document, life in there:
            agent = self._agents.get(document["spec"]["nodeName"])
            if agent is None:
                _told(document, life)
            elif not agent.away:
                self._visit(agent, document, life)

    def _wait(self, without: Iterable[tuple[JsonObject, Life]], coming: Set[str]) -> None:
        """Note whether pods that have no node could have one."""
        now = time.monotonic()
        most = max(
            (a.room for name, a in self._agents.items() if not a.away and name not in coming),
            default=0,
        )
        for document, life in without:
            life.reason = _reason(document) or life.reason
            if document["spec"].get("nodeSelector") or life.cpus > most:
                life.room_since = None
                continue
            life.room_since = life.room_since or now
            life.roomy = max(life.roomy, now - life.room_since)

    def _visit(self, agent: Agent, document: JsonObject, life: Life) -> None:
        now, life.node = time.monotonic(), document["spec"]["nodeName"]
        uid = document["metadata"]["uid"]
        if life.placed is not None:
            if now - life.placed >= float(document["metadata"]["annotations"][SECONDS]):
                life.ended = now
                agent.end(uid)
                self._write(document, {"phase": "Succeeded"})
                self._changed(life.node)
            return
        if now < life.next_try:
            return
        sentence = agent.start(document)
        if not sentence:
            life.placed = now
            self._write(document, _running(document))
            self._changed(life.node)
            return
        life.rejections += 1
        life.next_try = now + self._random.uniform(*RETRY_S)
        if sentence != life.sentence:
            life.sentence = sentence
            self._write(document, _waiting(document, sentence))

    def _write(self, document: JsonObject, status: JsonObject) -> None:
        name = document["metadata"]["name"]
        self._client.ask(
            "PATCH", f"/api/v1/namespaces/default/pods/{name}/status", {"status": status},
            content_type="application/merge-patch+json",
        )  # fmt: skip


def _told(document: JsonObject, life: Life) -> None:
    """A real node has the pod: its kubelet says what became of it.

    It does not say how often it tried: a refusal is counted when its sentence is another one.
    """
    now, life.node = time.monotonic(), document["spec"]["nodeName"]
    phase = document["status"]["phase"]
    if life.placed is None and phase in ("Running", "Succeeded"):
        life.placed = now
    if phase in ("Succeeded", "Failed"):
        life.ended = now
    reason, sentence = waiting_reason(document)
    if reason == "CreateContainerError" and sentence != life.sentence:
        life.rejections += 1
        life.sentence = sentence


def cpus_of(document: JsonObject) -> int:
    """CPUs that a pod asks for, as its requests say it."""
    return sum(int(one["resources"]["requests"]["cpu"]) for one in document["spec"]["containers"])


def _reason(document: JsonObject) -> str:
    """What kube-scheduler says of a pod that it gave no node."""
    found = [c for c in document["status"].get("conditions", []) if c["type"] == "PodScheduled"]
    return next((one.get("message", "") for one in found), "")


def _running(document: JsonObject) -> JsonObject:
    ready = {"type": "Ready", "status": "True"}
    return {
        "phase": "Running",
        "conditions": [ready],
        "containerStatuses": _statuses(document, {"running": {}}, ready=True),
    }


def _statuses(document: JsonObject, state: JsonObject, *, ready: bool) -> list[JsonObject]:
    return [
        {
            "name": one["name"], "image": one["image"], "imageID": "", "ready": ready,
            "restartCount": 0, "state": state,
        }
        for one in document["spec"]["containers"]
    ]  # fmt: skip


def _waiting(document: JsonObject, sentence: str) -> JsonObject:
    """As a kubelet says it when the runtime passes on our refusal."""
    waiting = {"waiting": {"reason": "CreateContainerError", "message": sentence}}
    return {"phase": "Pending", "containerStatuses": _statuses(document, waiting, ready=False)}
