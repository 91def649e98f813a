"""A pod that the node refuses for ever, on a real cluster: moved when another node has room."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.beds.cri import poll
from tests.beds.kube import controller as controllers
from tests.beds.kube.bed import KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject, waiting_reason
from tests.beds.kube.controller import Controller
from tests.beds.kube.manifests import PREFIX, asks, container, template, workload
from tests.beds.kube.topologies import NRT, TOPOLOGY_MANIFESTS, applied, publish_topology

OTHER = "stuck-other"
ASKING = asks(policy__main="single-numa-node")
TOLERANT = [{"operator": "Exists"}]  # the other Node never reports
STUCK = {"evict": True, "delay": "1s"}
RULES = {"maxPerMinute": 600, "maxPerWorkloadPerHour": 1}


@pytest.fixture
def full(bed: KubeBed, client: Client) -> Iterator[Client]:
    """A node without any room for new containers, which says so; afterwards it is as before."""
    install(client)
    controllers.install(client)
    section = controllers.offline_capacity(bed)
    published = {"nodeResourceTopology": True}
    with applied(client, NRT, *TOPOLOGY_MANIFESTS):
        try:
            with (
                bed.node.configured(**section),
                Publisher(bed, token(client, "bed"), config=published, more=section),
            ):
                client.kubectl("annotate", "node", "bed", f"{PREFIX}/drained=0")
                poll(lambda: factor(client) == "0", "a NodeResourceTopology that says so")
                yield client
                client.delete_pods()
        finally:
            for path in (f"/api/v1/nodes/{OTHER}", f"{NRT}/{OTHER}"):
                client.request("DELETE", path)
            for key in ("drained", "numa-ids"):
                client.kubectl("annotate", "node", "bed", f"{PREFIX}/{key}-")


def factor(client: Client) -> str:
    """What the node publishes as the capacity factor of its first NUMA node."""
    found = client.get(f"{NRT}/bed")
    zones = [z for z in (found or {}).get("zones", []) if z["name"] == "node-0"]
    attributes = {a["name"]: a["value"] for z in zones for a in z.get("attributes", [])}
    return attributes.get(f"{PREFIX}/capacity-factor", "")


def add_other(client: Client) -> None:
    """A Node without a kubelet, and what it publishes: all of it is free."""
    client.add_node(OTHER)
    publish_topology(client, OTHER, 8)


def told(client: Client, uid: str) -> list[JsonObject]:
    return [e for e in client.events("NUMAPodMoved") if e["regarding"]["uid"] == uid]


def with_waiting(client: Client, name: str, count: int) -> JsonObject | None:
    """A pod of a workload of which all containers run but so many."""
    for found in client.pods(f"app={name}"):
        states = [one["state"] for one in found["status"].get("containerStatuses", [])]
        if states and sum("running" not in one for one in states) == count:
            return found
    return None


def rejected(client: Client, name: str) -> JsonObject | None:
    """A pod of a workload of which a container is refused; all others run."""
    found = with_waiting(client, name, 1)
    return found if found and waiting_reason(found)[0] == "CreateContainerError" else None


def ready(client: Client, name: str) -> JsonObject | None:
    """A pod of a workload whose containers run, all of them."""
    return with_waiting(client, name, 0)


def ended(client: Client, name: str) -> JsonObject | None:
    """A pod in the phase Running, of which a container ran, ended and is refused since."""
    found = rejected(client, name)
    return found if found and found["status"]["phase"] == "Running" else None


def gone(client: Client, pod: JsonObject) -> JsonObject:
    """Waits until a pod went; the Event about it."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    poll(lambda: client.pod(name) is None, f"the eviction of {name}")
    (event,) = poll(lambda: told(client, uid), f"an Event about {name}")
    return event


def test_who_is_rejected_for_ever_goes_where_there_is_room(bed: KubeBed, full: Client) -> None:
    """Also one of which a container runs: as long as another one never ran it is Pending, too."""
    names, helper = ("stuck-moved", "stuck-half"), container("helper")
    for name, more in zip(names, ((), (helper,)), strict=True):
        pods = template(*more, container(), annotations=ASKING, tolerations=TOLERANT)
        full.apply(workload("Deployment", name, pods))
    found = [poll(lambda n=n: rejected(full, n), f"a refused pod of {n}") for n in names]
    assert [one["status"]["phase"] for one in found] == ["Pending", "Pending"]
    with Controller(bed, 9893, evictions={**RULES, "stuckPods": STUCK}) as replica:

        def counts() -> bool | None:
            text = replica.ask("GET", "/metrics")[1]
            return "nri_numa_controller_stuck_pods 2.0" in text or None

        poll(counts, "a controller that sees them")
        # Nobody else had room so far.
        for one in (each["metadata"] for each in found):
            there = full.pod(one["name"])
            assert there is not None
            assert there["metadata"]["uid"] == one["uid"]
        add_other(full)
        for one in found:
            assert f"{OTHER} has room" in gone(full, one)["note"]
    for name in names:
        assert poll(lambda n=name: full.pods(f"app={n}"), "a successor")


def test_who_runs_in_part_goes_only_where_that_is_switched_on(bed: KubeBed, full: Client) -> None:
    """The kubelet's own phase, Events and pauses: a container ended, and its CPUs are no more."""
    full.kubectl("annotate", "node", "bed", f"{PREFIX}/drained-")
    poll(lambda: factor(full) == "", "room on the node")  # it tells none of 1
    parts = (container("helper"), container())
    half = template(*parts, annotations=ASKING, tolerations=TOLERANT)
    full.apply(workload("Deployment", "stuck-ended", half))
    run = poll(lambda: ready(full, "stuck-ended"), "a pod that runs")
    full.kubectl("annotate", "node", "bed", f"{PREFIX}/drained=0")
    poll(lambda: factor(full) == "0", "a NodeResourceTopology that says so")
    os.kill(bed.node.pid(run, "main"), signal.SIGKILL)
    found = poll(lambda: ended(full, "stuck-ended"), "a container that is refused")
    assert found["metadata"]["uid"] == run["metadata"]["uid"]
    pending = template(annotations=ASKING, tolerations=TOLERANT)
    full.apply(workload("Deployment", "stuck-never", pending))
    other = poll(lambda: rejected(full, "stuck-never"), "a pod that never ran")
    add_other(full)
    with Controller(bed, 9893, evictions={**RULES, "stuckPods": STUCK}):
        assert f"{OTHER} has room" in gone(full, other)["note"]
    left = full.pod(run["metadata"]["name"])
    assert left is not None
    assert left["metadata"]["uid"] == run["metadata"]["uid"]
    assert "deletionTimestamp" not in left["metadata"]
    with Controller(bed, 9893, evictions={**RULES, "stuckPods": {**STUCK, "includeRunning": True}}):
        assert f"{OTHER} has room" in gone(full, found)["note"]
