"""Capacity from outside on a real cluster: from a PUT to what a container gets."""

import json
import signal
from collections.abc import Iterator

import pytest

from tests.beds.cri import poll
from tests.beds.kube import controller as controllers
from tests.beds.kube.bed import KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject, is_ready
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.kube.controller import Controller
from tests.beds.kube.events import Thief
from tests.beds.kube.manifests import PREFIX, asks, container, pod, template, workload

NODE = "/v1/nodes/bed/offline-capacity"


@pytest.fixture
def installed(client: Client) -> Client:
    install(client)
    controllers.install(client)
    return client


@pytest.fixture
def way(bed: KubeBed, installed: Client) -> Iterator[None]:
    """The agent and a publisher with the file between them; afterwards they are as before."""
    section = controllers.offline_capacity(bed)
    credentials = token(installed, "bed")
    try:
        with (
            bed.node.configured(**section),
            Publisher(bed, credentials, config={"podAnnotation": True}, more=section),
        ):
            yield
    finally:
        for key in ("offline-capacity", "drained", "numa-ids"):
            installed.kubectl("annotate", "node", "bed", f"{PREFIX}/{key}-")


def annotation(client: Client, key: str) -> str | None:
    found = client.ask("GET", "/api/v1/nodes/bed")["metadata"].get("annotations") or {}
    text: str | None = found.get(f"{PREFIX}/{key}")
    return text


def factors(bed: KubeBed) -> dict[int, tuple[float, int]]:
    """By NUMA node, the factor that counts and thousandths of a CPU that it leaves."""
    nodes = bed.node.plugin.json("/v1/assignments")["numaNodes"]
    return {n["id"]: (n["capacityFactor"], n["cpuCapacityMilli"]) for n in nodes}


def takes(replica: Controller, method: str, zones: dict[str, float] | None = None) -> bool | None:
    body = None if zones is None else {"zones": zones, "validity": 600}
    status, text = replica.ask(method, NODE, body)
    assert status in (0, 200, 204, 503), text
    return True if status in (200, 204) else None


def wait_factor(bed: KubeBed, factor: float) -> None:
    poll(lambda: factors(bed)[0][0] == factor, f"factor {factor} at the agent")


def test_new_containers_get_what_is_measured(bed: KubeBed, installed: Client, way: None) -> None:
    """Half, nothing, and everything again; then the same by the operator's own key."""
    poll(lambda: annotation(installed, "numa-ids"), "the NUMA nodes of the Node")
    whole = factors(bed)[0][1]
    running = installed.run(pod("capacity-before", annotations=asks(policy="single-numa-node")))
    had = bed.node.cpus(running)
    with Controller(bed, 9893) as replica:
        poll(lambda: takes(replica, "PUT", {"0": 0.5}), "a PUT that is taken")
        wait_factor(bed, 0.5)
        assert factors(bed)[0] == (0.5, whole // 2)
        text = annotation(installed, "offline-capacity")
        assert text is not None
        assert json.loads(text)["zones"] == {"0": 0.5}
        for path, zones, wrong in (
            (NODE, {"1023": 0.5}, "has no NUMA node 1023"),
            (NODE.replace("bed", "nobody"), {"0": 1}, "there is no Node"),
        ):
            body = {"zones": zones}
            poll(lambda p=path, b=body, w=wrong: w in replica.ask("PUT", p, b)[1], wrong)

        poll(lambda: takes(replica, "PUT", {"0": 0}), "another PUT")
        wait_factor(bed, 0)
        installed.apply(pod("capacity-later", annotations=asks(policy="single-numa-node")))
        installed.wait_rejected("capacity-later")
        assert bed.node.cpus(running) == had, "nothing that runs moves"
        poll(lambda: takes(replica, "DELETE"), "a DELETE")
        poll(lambda: annotation(installed, "offline-capacity") is None, "no annotation")
        installed.wait_ready("capacity-later")

    installed.kubectl("annotate", "node", "bed", f"{PREFIX}/drained=0")
    wait_factor(bed, 0)
    installed.kubectl("annotate", "node", "bed", f"{PREFIX}/drained-")
    wait_factor(bed, 1)


def test_two_replicas_have_one_leader(bed: KubeBed, installed: Client) -> None:
    """The other one hands on what it is asked, takes over, and lets stand what is written."""

    def wait_written(factor: float) -> None:
        poll(
            lambda: f'"0":{factor}' in (annotation(installed, "offline-capacity") or ""),
            f"factor {factor} written",
        )

    try:
        with Controller(bed, 9893, host=ADDRESS) as first:
            poll(lambda: takes(first, "PUT", {"0": 0.25}), "a PUT that is taken")
            with Controller(bed, 9894, host=ADDRESS) as second:
                poll(lambda: second.ask("GET", "/readyz")[0] == 200, "one that can take over")
                poll(lambda: takes(second, "PUT", {"0": 0.5}), "a PUT that is handed on")
                wait_written(0.5)
                first.end(number=signal.SIGKILL)
                poll(lambda: second.ask("GET", NODE)[0] != 503, "another leader")
                wait_written(0.5)
                poll(lambda: takes(second, "PUT", {"0": 0.75}), "a PUT at the other one")
                wait_written(0.75)
    finally:
        installed.kubectl("annotate", "node", "bed", f"{PREFIX}/offline-capacity-")


def test_its_token_writes_one_annotation(bed: KubeBed, installed: Client) -> None:
    thief = Thief(bed, installed.token(controllers.ACCOUNT))
    thief.writes_one_annotation("bed", "offline-capacity")

    def evicts(namespace: str) -> str:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "any"}}
        path = f"/api/v1/namespaces/{namespace}/pods/any/eviction?dryRun=All"
        return thief.does("POST", path, body)

    assert "no pod of kube-system" in evicts("kube-system")
    assert "not found" in evicts("default")


BUDGET = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "keep-moved"},
    "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "capacity-moved"}}},
}


def drained(client: Client) -> list[str]:
    """Names of pods that Events say were moved away."""
    return [e["regarding"]["name"] for e in client.events("NUMANodeDrained")]


def test_a_drained_numa_node_empties_by_budgets(bed: KubeBed, installed: Client, way: None) -> None:
    """One with an owner goes when it may, one without stays."""
    alone = installed.run(pod("capacity-alone", annotations=asks(policy="single-numa-node")))
    pods = template(container(), annotations=asks(policy="single-numa-node"))
    installed.apply(BUDGET, workload("Deployment", "capacity-moved", pods))

    def moved(but: str = "") -> JsonObject | None:
        found = installed.pods("app=capacity-moved")
        return next((p for p in found if is_ready(p) and p["metadata"]["name"] != but), None)

    first = poll(moved, "a pod of the Deployment")["metadata"]["name"]

    def told() -> bool | None:
        metadata = (installed.pod(first) or {}).get("metadata", {})
        return f"{PREFIX}/assigned" in metadata.get("annotations", {}) or None

    drain = {"drainedNUMANodes": {"evict": True, "delay": "1s"}, "maxPerMinute": 600}
    try:
        poll(told, "its pins on the pod")
        with Controller(bed, 9893, evictions=drain) as replica:
            installed.kubectl("annotate", "node", "bed", f"{PREFIX}/drained=0")
            poll(
                lambda: 'result="blocked",verb="create"' in replica.ask("GET", "/metrics")[1],
                "an eviction that the budget forbids",
            )
            assert installed.pod(first) is not None
            wait_factor(bed, 0)  # or the successor might land in the same place, and go too
            installed.kubectl("delete", "poddisruptionbudget", "keep-moved")
            # The pod is gone at once, the Event is told after that: who ends it waits for both.
            poll(lambda: installed.pod(first) is None, "the end of the first pod")
            poll(lambda: drained(installed), "an Event about it")
        # Its successor was refused here; it starts where there is room again.
        installed.kubectl("annotate", "node", "bed", f"{PREFIX}/drained-")
        poll(lambda: moved(but=first), "a successor")
    finally:
        installed.kubectl("delete", "poddisruptionbudget", "keep-moved", "--ignore-not-found")
    again = installed.pod("capacity-alone")
    assert again is not None
    assert again["metadata"]["uid"] == alone["metadata"]["uid"]
    assert drained(installed) == [first]
