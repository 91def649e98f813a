"""The NodeResourceTopology that schedulers read, on a real API server."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nri_numa.publisher.topology import EXCLUSIVE_FINGERPRINT_METHOD as METHOD
from nri_numa.publisher.topology import pods_fingerprint
from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject, is_ready
from tests.beds.kube.device_plugin import DevicePluginDaemon
from tests.beds.kube.events import Thief
from tests.beds.kube.manifests import EXCLUSIVE, PREFIX, container, definition, pod
from tests.beds.kube.topologies import NRT, TOPOLOGY_MANIFESTS, applied
from tests.beds.processes import wait_for

ON = {"nodeResourceTopology": True, "events": False}
DEVICE = "counted.example.com/device"
COUNTED = {
    "NRI_NUMA_DEVICE_PLUGIN_RESOURCE_NAME": DEVICE,
    "NRI_NUMA_DEVICE_PLUGIN_ADVERTISE_TOPOLOGY": "true",
}


@pytest.fixture
def defined(client: Client) -> Iterator[Client]:
    """The publisher's rights, and the definition of the object, which is served."""
    install(client)
    with applied(client, NRT, *TOPOLOGY_MANIFESTS):
        yield client


def wait_object(client: Client, publisher: Publisher, right: Any, what: str) -> JsonObject:
    """Wait until the object is as it should be."""

    def ask() -> JsonObject | None:
        status, found = client.request("GET", f"{NRT}/bed")
        return found if status == 200 and right(found) else None

    return wait_for([publisher], ask, what)


def attributes(of: JsonObject) -> dict[str, str]:
    return {one["name"]: one["value"] for one in of.get("attributes", [])}


def zone(found: JsonObject, name: str = "node-0") -> JsonObject:
    (one,) = [zone for zone in found["zones"] if zone["name"] == name]
    return dict(one)


def amounts(found: JsonObject, resource: str) -> tuple[int, int, int]:
    """Capacity, allocatable, available on all NUMA nodes together."""
    ones = [
        one
        for each in found["zones"]
        for one in each.get("resources", [])
        if one["name"] == resource
    ]
    capacity, allocatable, available = (
        sum(int(one[key]) for one in ones) for key in ("capacity", "allocatable", "available")
    )
    return capacity, allocatable, available


def left(found: JsonObject) -> int:
    return amounts(found, "cpu")[2]


def running(client: Client) -> list[tuple[str, str]]:
    """Guaranteed pods that run, as the scheduler's plugin counts them."""
    pods = client.ask("GET", "/api/v1/pods?fieldSelector=spec.nodeName=bed")["items"]
    return [
        (one["metadata"]["namespace"], one["metadata"]["name"])
        for one in pods
        if one["status"]["phase"] == "Running" and one["status"]["qosClass"] == "Guaranteed"
    ]


def test_it_follows_what_pods_take_and_give_back(bed: KubeBed, defined: Client) -> None:
    with Publisher(bed, token(defined, "bed"), config=ON) as process:
        first = wait_object(
            defined, process,
            lambda it: amounts(it, "cpu")[1] == left(it)
            and attributes(it)[f"{PREFIX}/agent-state"] == "ready",
            "the object",
        )  # fmt: skip
        node = defined.ask("GET", "/api/v1/nodes/bed")
        (owner,) = first["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])
        assert {one["manager"] for one in first["metadata"]["managedFields"]} == {
            "nri-numa-publish"
        }
        capacity, allocatable, available = amounts(first, "cpu")
        assert 0 < available == allocatable <= capacity
        free = f"{PREFIX}/free-exclusive-cpus"
        nodes = [one for one in first["zones"] if one["type"] == "Node"]
        assert sum(int(attributes(one).get(free, 0)) for one in nodes) == available
        assert attributes(first)["nodeTopologyPodsFingerprintMethod"] == METHOD
        old = defined.request("GET", NRT.replace("v1alpha2", "v1alpha1"))
        assert old[0] == 404

        bed_pod = pod("nrt-exclusive", container(cpus="1", memory="64Mi"), annotations=EXCLUSIVE)
        defined.apply(bed_pod)
        taken = wait_object(defined, process, lambda it: left(it) < available, "it to fall")
        seen = time.time()
        (one,) = bed.node.plugin.json("/v1/assignments?pod=nrt-exclusive")["containers"]
        # For docs/kubernetes-objects.md; seen with -s.
        print(f"\nfrom the decision on the node to the object: {seen - one['assignedAt']:.2f} s")
        assert amounts(taken, "memory")[2] < amounts(first, "memory")[1]
        # In the same write as the charge.
        defined.wait_pod("nrt-exclusive", is_ready, "Ready")
        assert ("default", "nrt-exclusive") in running(defined)
        assert attributes(taken)["nodeTopologyPodsFingerprint"] == pods_fingerprint(
            running(defined)
        )

        freed = int(taken["metadata"]["annotations"][f"{PREFIX}/release-counter"])
        defined.kubectl("delete", "pod", "nrt-exclusive", "--wait=false")
        wait_object(defined, process, lambda it: left(it) == available, "it to rise")
        again = wait_object(
            defined, process,
            lambda it: int(it["metadata"]["annotations"][f"{PREFIX}/release-counter"]) > freed,
            "another change, for who looked too early",
        )  # fmt: skip
        poll(lambda: defined.pod("nrt-exclusive") is None, "its end for the API server too")
        assert attributes(again)["nodeTopologyPodsFingerprint"] == pods_fingerprint(
            running(defined)
        )


def test_a_pod_without_its_image_is_named_and_not_charged(bed: KubeBed, defined: Client) -> None:
    """The scheduler's plugin counts no Pending pod: it keeps what it set aside for this one."""

    def names(*more: tuple[str, str]) -> Callable[[JsonObject], bool]:
        def right(it: JsonObject) -> bool:
            pods = [*running(defined), *more]
            return attributes(it)["nodeTopologyPodsFingerprint"] == pods_fingerprint(pods)

        return right

    with (
        # As the chart has it: agent and publisher read one file.
        bed.node.configured(publish=ON),
        Publisher(bed, token(defined, "bed"), config=ON) as process,
    ):
        first = wait_object(defined, process, names(), "the object")
        absent = {**container(cpus="1", memory="64Mi"), "image": "localhost/absent:1"}
        defined.apply(pod("nrt-absent", absent, annotations=EXCLUSIVE))
        name = ("default", "nrt-absent")
        named = wait_object(defined, process, names(name), "it to name a pod without containers")
        found = defined.pod("nrt-absent")
        assert found is not None
        assert (found["spec"]["nodeName"], found["status"]["phase"]) == ("bed", "Pending")
        assert left(named) == left(first)
        defined.delete_pods()
        wait_object(defined, process, names(), "it to name the pod no more")


def test_a_token_is_worth_nothing_for_another_node(bed: KubeBed, defined: Client) -> None:
    thief = Thief(bed, token(defined, "bed"))

    def object_of(name: str, **metadata: Any) -> JsonObject:
        return {
            "apiVersion": "topology.node.k8s.io/v1alpha2", "kind": "NodeResourceTopology",
            "metadata": {"name": name, **metadata}, "zones": [],
        }  # fmt: skip

    # With another UID the garbage collector takes the object at once.
    uid = defined.ask("GET", "/api/v1/nodes/bed")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "bed", "uid": uid}
    # The API server compiles new policies in a moment of its own.
    poll(lambda: "token names" in thief.does("POST", NRT, object_of("other")), "the policy")
    said = thief.does("POST", NRT, object_of("bed", finalizers=["example.com/stay"]))
    assert "finalizers nothing" in said
    said = thief.does("POST", NRT, object_of("bed", ownerReferences=[{**owner, "name": "other"}]))
    assert "only name the Node of the token" in said
    assert thief.does("POST", NRT, object_of("bed", ownerReferences=[owner])) == ""
    assert thief.does("PATCH", f"{NRT}/bed", {"zones": []}) == ""
    defined.apply(object_of("other"))
    assert "token names" in thief.does(
        "PATCH", f"{NRT}/other", {"metadata": {"labels": {"a": "b"}}}
    )
    assert thief.does("DELETE", f"{NRT}/bed").startswith("403 ")
    assert thief.does("GET", NRT).startswith("403 ")


def test_another_publisher_is_named_and_not_fought(bed: KubeBed, defined: Client) -> None:
    """Unless that is asked for."""
    theirs = {
        "apiVersion": "topology.node.k8s.io/v1alpha2", "kind": "NodeResourceTopology",
        "metadata": {"name": "bed"}, "zones": [{"name": "node-9", "type": "Node"}],
    }  # fmt: skip
    defined.kubectl(
        "apply", "--server-side", "--field-manager=nfd-topology-updater", "--filename=-",
        documents=[theirs],
    )  # fmt: skip
    before = defined.ask("GET", f"{NRT}/bed")
    credentials = token(defined, "bed")
    with Publisher(bed, credentials, config=ON) as process:
        (line,) = poll(lambda: process.records("NodeResourceTopology not written"), "its complaint")
        assert "belong to nfd-topology-updater" in line["problem"]
        assert defined.ask("GET", f"{NRT}/bed") == before
    force = {**ON, "nodeResourceTopologyForce": True}
    with Publisher(bed, credentials, config=force) as process:
        taken = wait_object(defined, process, lambda it: zone_names(it)[:1] == ["node-0"], "ours")
        assert "node-9" not in zone_names(taken)


def zone_names(found: JsonObject) -> list[str]:
    return [one["name"] for one in found["zones"]]


def test_what_was_written_through_the_old_version_is_cured(bed: KubeBed, defined: Client) -> None:
    """Applying fails for good after that, until the entry of the old version is taken away."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + (
        "noderesourcetopologies.topology.node.k8s.io"
    )
    definition = defined.ask("GET", path)
    (new,) = definition["spec"]["versions"]
    old = json.loads(json.dumps(new)) | {"name": "v1alpha1", "storage": False}
    del old["schema"]["openAPIV3Schema"]["properties"]["attributes"]
    versions = {"spec": {"versions": [new, old]}}
    credentials = token(defined, "bed")
    with Publisher(bed, credentials, config=ON) as process:
        wait_object(defined, process, lambda it: it["zones"], "the object")
    defined.ask("PATCH", path, versions)
    former = f"{NRT.replace('v1alpha2', 'v1alpha1')}/bed"
    found = poll(lambda: defined.get(former), "the old version")
    found["zones"][0]["type"] = "Other"
    status, said = defined.request("PUT", f"{former}?fieldManager=koordlet", found)
    assert status == 200, said
    with Publisher(bed, credentials, config={**ON, "nodeResourceTopologyForce": True}) as process:
        wait_object(
            defined, process, lambda it: attributes(it) and zone(it)["type"] == "Node", "the cure"
        )
        assert any("prune" in one["problem"] for one in process.records("object not written"))


@pytest.fixture
def counting(bed: KubeBed, defined: Client) -> Iterator[DevicePluginDaemon]:
    """The agent counts devices, and somebody offers some whose NUMA node is known."""
    with (
        bed.node.configured(devices={"countFree": True}),
        # It asks where the agent listens now, which is another port after each start.
        DevicePluginDaemon(bed.node, "counted-devices", environment=COUNTED) as devices,
    ):
        yield devices


def test_devices_are_counted_as_the_kubelet_counts_them(
    bed: KubeBed, defined: Client, counting: DevicePluginDaemon
) -> None:
    """And are unknown, not none, where it does not say."""

    def device(found: JsonObject) -> tuple[int, int, int]:
        return amounts(found, DEVICE)

    with Publisher(bed, token(defined, "bed"), config=ON) as process:
        free = wait_object(defined, process, lambda it: device(it)[2] > 0, "devices in the zones")
        assert attributes(free)[f"{PREFIX}/device-counts"] == "counted"
        capacity, allocatable, available = device(free)
        assert capacity == allocatable == available
        one = {DEVICE: "1"}
        document = pod("nrt-device", container(cpus="1"))
        resources = document["spec"]["containers"][0]["resources"]
        for part in ("requests", "limits"):
            resources[part] = {**resources[part], **one}
        defined.run(document)
        wait_object(
            defined, process, lambda it: device(it) == (capacity, capacity, capacity - 1),
            "one less",
        )  # fmt: skip
        socket = bed.node.kubelet_root / "pod-resources/kubelet.sock"
        hidden = socket.with_name("hidden.sock")
        socket.rename(hidden)
        try:
            gone = wait_object(
                defined, process,
                lambda it: attributes(it)[f"{PREFIX}/device-counts"] == "unknown", "unknown",
            )  # fmt: skip
            assert device(gone) == (0, 0, 0)
        finally:
            hidden.rename(socket)


NUMATOPOLOGY = definition("Numatopology", "nodeinfo.volcano.sh", "v1alpha1")


def test_volcanos_object_has_the_same_cpus(bed: KubeBed, client: Client) -> None:
    """With the shipped rights."""
    install(client)
    api = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies"
    config = {"numatopology": True, "events": False}
    files = ("publish-volcano/role.yaml", "publish-volcano/policies.yaml")
    try:
        client.apply(NUMATOPOLOGY)
        with (
            applied(client, api, *files),
            Publisher(bed, token(client, "bed"), config=config) as process,
        ):

            def spec(right: Any) -> JsonObject:
                def ask() -> JsonObject | None:
                    status, found = client.request("GET", f"{api}/bed")
                    return found["spec"] if status == 200 and right(found["spec"]) else None

                return wait_for([process], ask, "the object")

            before = spec(lambda it: it["numares"]["cpu"]["allocatable"])
            assert before["policies"]["CPUManagerPolicy"] == "static"
            assert str(before["numares"]["cpu"]["capacity"]) == str(len(before["cpuDetail"]))
            document = pod("volcano-exclusive", container(cpus="1"), annotations=EXCLUSIVE)
            running = client.run(document)
            theirs = str(bed.node.cpus(running))

            def taken(it: JsonObject) -> bool:
                pods = {one["name"]: one["containerAllocations"] for one in it["podAllocations"]}
                return pods.get("volcano-exclusive") == [
                    {"name": "main", "allocations": {"cpu": theirs}}
                ]

            after = spec(taken)
            assert theirs not in after["numares"]["cpu"].get("allocatable", "").split(",")
    finally:
        client.kubectl("delete", "--ignore-not-found", "crd", NUMATOPOLOGY["metadata"]["name"])
