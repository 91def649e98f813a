"""Claims of exclusive CPUs of a NUMA node, which the stock scheduler counts."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed, Publisher
from tests.beds.kube.client import Client, JsonObject, unscheduled, waiting_reason
from tests.beds.kube.dra import (
    CLAIMS,
    CLASS,
    DRIVER,
    claiming,
    delete_claims,
    driver,
    template,
    wait_slice,
)
from tests.beds.kube.managers import NONE, STATIC, granted
from tests.beds.kube.manifests import container, pod
from tests.beds.kube.node import KubeNode
from tests.machines.cpus import MACHINE

pytestmark = pytest.mark.skipif(len(MACHINE) < 2, reason="one CPU stays shared: needs two CPUs")


@pytest.fixture(scope="module")
def publisher(session_bed: KubeBed) -> Iterator[Publisher]:
    with driver(session_bed) as found:
        yield found


def end_claims(bed: KubeBed) -> None:
    """Delete all, and wait for the kubelet, which gives back within a minute after a restart."""
    bed.client.delete_pods()
    delete_claims(bed.client)
    records = bed.node.plugin.directory / "state" / "claims"
    cdi = bed.node.containerd.cdi_directory
    poll(
        lambda: not (list(records.glob("*.json")) or list(cdi.glob("*.json"))),
        "end of every prepared claim",
    )


@pytest.fixture(autouse=True)
def no_claims(publisher: Publisher, bed: KubeBed) -> Iterator[None]:
    """Each begins and ends without claims."""
    publisher.check()
    yield
    end_claims(bed)


def countable(device: JsonObject) -> int:
    """CPUs that claims of a device may have, all together."""
    return int(device["capacity"][f"{DRIVER}/cpu"]["value"])


def health(pod: JsonObject) -> list[str]:
    """Of the devices of its first container."""
    told = pod["status"]["containerStatuses"][0].get("allocatedResourcesStatus", [])
    return [str(one.get("health")) for each in told for one in each.get("resources", [])]


def call_it(client: Client, name: str | None) -> None:
    """Give the DeviceClass a name that containers can ask for as a resource, or take it away."""
    change = json.dumps({"spec": {"extendedResourceName": name}})
    client.kubectl("patch", "deviceclass", CLASS, "--type=merge", f"--patch={change}")


def test_a_claim_is_counted_and_met(client: Client, node: KubeNode, publisher: Publisher) -> None:
    """The scheduler chooses the NUMA node; what does not fit is kept back and not refused."""
    device = wait_slice(client, publisher)["spec"]["devices"][0]
    number = device["attributes"]["resource.kubernetes.io/numaNode"]["int"]
    most = countable(device)
    here = f"device.attributes['resource.kubernetes.io'].numaNode == {number}"
    client.apply(template("dra-counted", most, cel=here))
    placed = client.run(claiming("dra-first", "dra-counted", most))
    cpus = node.cpus(placed)
    assert len(cpus) == most
    assert client.said("dra-first").startswith(f"cpus={cpus} ")

    client.apply(template("dra-one", 1, cel=here))
    client.apply(claiming("dra-second", "dra-one", 1))

    client.wait_pod("dra-second", lambda it: bool(unscheduled(it)), "kept back")
    client.kubectl("delete", "pod", "dra-first")
    assert len(node.cpus(client.wait_ready("dra-second"))) == 1


# As virt-launcher: reads the CPUs of its claim, and pins to the first. A shell hands on no variable
# with dashes in its name.
LAUNCHER = r"""
cpus=$(tr '\0' '\n' </proc/1/environ | sed -n 's/^DRA_CPUSET_[^=]*=//p')
first=${cpus%%[-,]*}
taskset -c "$first" grep Cpus_allowed_list /proc/self/status
echo "cpus=$cpus"
cd /var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/*/*/
echo cpu=$(tail -n 1 *-metadata.json | sed 's/.*cpuID": {"int": \([0-9]*\).*/\1/')
exec sleep 1000000
"""


def test_a_launcher_of_virtual_machines_finds_the_cpus_of_its_claim(
    client: Client, node: KubeNode, publisher: Publisher
) -> None:
    """By the variable and the file that KubeVirt reads; a thread can be pinned to what they say."""
    wait_slice(client, publisher)
    client.apply(template("dra-vm", 1))
    machine = claiming("dra-launcher", "dra-vm", 1)
    machine["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", LAUNCHER]
    cpus = node.cpus(client.run(machine))
    assert client.said("dra-launcher").split() == [
        "Cpus_allowed_list:", f"{cpus}", f"cpus={cpus}", f"cpu={cpus}",
    ]  # fmt: skip
    client.wait_pod("dra-launcher", lambda it: health(it) == ["Healthy"], "the health of its CPU")


def test_a_pod_deleted_at_once_ends(client: Client, node: KubeNode, publisher: Publisher) -> None:
    """The scheduler gives its claim's CPUs away while its container still ends; none is refused."""
    most = countable(wait_slice(client, publisher)["spec"]["devices"][0])
    client.apply(template("dra-at-once", most))
    client.run(claiming("dra-ends", "dra-at-once", most))
    client.kubectl("delete", "pod", "dra-ends", "--grace-period=0", "--force", "--wait=false")
    placed = client.run(claiming("dra-next", "dra-at-once", most))
    assert len(node.cpus(placed)) == most
    assert [e for e in client.events("Failed") if e["regarding"]["name"] == "dra-next"] == []


def test_every_process_is_killed(bed: KubeBed, client: Client, publisher: Publisher) -> None:
    """The agent, the kubelet and the container end; the claim's CPUs are found again."""
    node = bed.node
    client.apply(template("dra-kept", 1))
    placed = client.run(claiming("dra-kept", "dra-kept", 1))
    cpus, pid = node.cpus(placed), node.pid(placed)
    before = wait_slice(client, publisher)

    node.plugin.restart(kill=True)
    # As the kubelet does when it starts, unless the driver is there again in time.
    client.kubectl("delete", "resourceslice", str(before["metadata"]["name"]))
    node.restart_kubelet()
    again = wait_slice(client, publisher, other_than=before["metadata"]["uid"])
    assert (node.cpus(placed), node.pid(placed)) == (cpus, pid)
    names = [[d["name"] for d in one["spec"]["devices"]] for one in (before, again)]
    assert names[0] == names[1]

    os.kill(pid, signal.SIGKILL)

    def restarted(it: JsonObject) -> bool:
        (status,) = it["status"]["containerStatuses"]
        return bool(status["restartCount"] >= 1 and status["ready"])

    after = client.wait_pod("dra-kept", restarted, "restarted")
    assert node.cpus(after) == cpus


def test_extended_resource_is_one_cpu(client: Client, node: KubeNode, publisher: Publisher) -> None:
    """The scheduler makes the claim itself, for a pod that knows of none."""
    resource = "numa.example.com/claimed-cpu"
    wait_slice(client, publisher)
    main = container(cpus="1")
    for amounts in main["resources"].values():
        amounts[resource] = "1"
    call_it(client, resource)
    try:
        placed = client.run(pod("dra-extended", main))
    finally:
        call_it(client, None)
    assert len(node.cpus(placed)) == 1
    (claim,) = client.ask("GET", CLAIMS)["items"]
    (seen,) = node.plugin.json("/v1/assignments?pod=dra-extended")["containers"]
    assert (seen["kind"], seen["cpus"]) == ("exclusive", str(node.cpus(placed)))
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["consumedCapacity"][f"{DRIVER}/cpu"] == "1"


def test_what_cannot_be_met_is_said(client: Client) -> None:
    client.apply(template("dra-unknown", 1, parameters={"scope": "pod"}))
    client.apply(claiming("dra-unknown", "dra-unknown", 1))
    words = "parameter 'scope' is not for claims, because each request of a claim is for one"

    def said() -> bool:
        # The first one may say that the driver is not registered yet.
        found = client.events("FailedPrepareDynamicResources")
        return any(e["regarding"]["name"] == "dra-unknown" and words in e["note"] for e in found)

    poll(said, "the kubelet's Event")
    client.kubectl("delete", "pod", "dra-unknown")

    client.apply(template("dra-other-size", 1))
    client.apply(claiming("dra-other-size", "dra-other-size", 1, cpus="500m"))
    client.wait_pod(
        "dra-other-size", lambda it: "SlotsMismatch" in waiting_reason(it)[1], "refused"
    )


def test_a_variable_of_ones_own_gives_nothing(client: Client) -> None:
    client.apply(template("dra-owner", 1))
    client.run(claiming("dra-owner", "dra-owner", 1))
    (claim,) = client.ask("GET", CLAIMS)["items"]
    uid = str(claim["metadata"]["uid"]).upper().replace("-", "_")
    variable = {"name": f"NRI_NUMA_CLAIM_0_{uid}", "value": "cpus"}
    client.apply(pod("dra-thief", container(env=[variable])))
    client.wait_pod("dra-thief", lambda it: "ClaimNotPrepared" in waiting_reason(it)[1], "refused")


def test_beside_the_kubelets_static_policy(
    bed: KubeBed, client: Client, node: KubeNode, publisher: Publisher
) -> None:
    """It grants CPUs to each Guaranteed pod, claims or not: these are then the claim's CPUs."""
    node.restart_kubelet(STATIC)
    try:
        counted = countable(wait_slice(client, publisher)["spec"]["devices"][0])
        client.apply(template("dra-static", 1))
        placed = client.run(claiming("dra-static", "dra-static", 1))
        own = granted(node, placed)
        assert len(own) == 1
        assert client.said("dra-static").startswith(f"cpus={own} ")
        assert node.cpus(placed) == own
        (seen,) = node.plugin.json("/v1/assignments?pod=dra-static")["containers"]
        assert (seen["kind"], seen["cpus"]) == ("exclusive", str(own))
        # What the claim has stays counted as its device's, or the scheduler would count it twice.
        assert countable(wait_slice(client, publisher)["spec"]["devices"][0]) == counted
    finally:
        end_claims(bed)
        node.restart_kubelet(NONE)
